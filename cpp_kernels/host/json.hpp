// host/json.hpp: strings and fields of the JSON that C entry points answer with.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace lowlat::host {

// "text", escaped.
void append_string(std::string& out, std::string_view text);
// "name": "text"
void append_field(std::string& out, const char* name, std::string_view text);
// The same of each, with ", " between them.
using Fields = std::initializer_list<std::pair<const char*, std::string_view>>;
void append_fields(std::string& out, Fields fields);
// "name": [{of one}, ..]; append(item) appends what stands between its braces.
template <class Items, class Append>
void append_objects(std::string& out, const char* name, const Items& items, Append append) {
  append_string(out, name);
  out += ": [";
  bool first = true;
  for (const auto& item : items) {
    out += first ? "{" : ", {";
    first = false;
    append(item);
    out += "}";
  }
  out += "]";
}

}  // namespace lowlat::host
