#include "host/json.hpp"

#include <cstdio>

namespace lowlat::host {

void append_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  out += '"';
}

void append_field(std::string& out, const char* name, std::string_view text) {
  append_string(out, name);
  out += ": ";
  append_string(out, text);
}

void append_fields(std::string& out, Fields fields) {
  for (auto field = fields.begin(); field != fields.end(); ++field) {
    if (field != fields.begin()) out += ", ";
    append_field(out, field->first, field->second);
  }
}

}  // namespace lowlat::host
