// host/json.hpp: strings and fields of the JSON that C entry points answer with.
#pragma once

#include <string>
#include <string_view>

namespace lowlat::host {

// "text", escaped.
void append_string(std::string& out, std::string_view text);
// "name": "text"
void append_field(std::string& out, const char* name, std::string_view text);

}  // namespace lowlat::host
