// Strings of the JSON that C entry points answer with.
#include "host/json.hpp"

#include "check.hpp"

using lowlat::host::append_field;
using lowlat::host::append_fields;
using lowlat::host::append_objects;
using lowlat::host::append_string;

TEST_CASE(quotes_backslashes_and_control_characters_are_escaped) {
  std::string out;
  append_string(out, "a \"b\" \\ c\nd\x01");
  CHECK_EQ(out, "\"a \\\"b\\\" \\\\ c\\u000ad\\u0001\"");
}

TEST_CASE(a_field_is_appended_to_what_is_there) {
  std::string out = "{";
  append_field(out, "name", "H200");
  CHECK_EQ(out, "{\"name\": \"H200\"");
}

TEST_CASE(fields_and_objects_have_commas_between_them_alone) {
  std::string out;
  append_fields(out, {{"name", "H200"}, {"isa", "sm_90"}});
  CHECK_EQ(out, "\"name\": \"H200\", \"isa\": \"sm_90\"");
  const auto objects = [](std::initializer_list<int> items) {
    std::string list;
    append_objects(list, "all", items, [&](int item) { list += std::to_string(item); });
    return list;
  };
  CHECK_EQ(objects({}), "\"all\": []");
  CHECK_EQ(objects({1, 2}), "\"all\": [{1}, {2}]");
}
