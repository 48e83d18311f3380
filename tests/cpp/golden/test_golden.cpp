// Every golden vector through the C ABI: `reference` gives the same bytes, `scalar` meets the
// bound.
//
// Planted: one bit of one in_*.bin or out_*.bin changed fails its digest; a digest changed with it
// fails the comparison.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"
#include "lowlat/kernels.h"

namespace {

namespace fs = std::filesystem;

const fs::path kGolden = fs::path(LOWLAT_SOURCE_DIR) / "tests/golden";

// As much JSON as case.json and the list of operations have: objects, arrays, strings (an escaped
// character stands for itself), whole numbers, true and false.
struct Json {
  std::map<std::string, Json> fields;
  std::vector<Json> items;
  std::string text;  // a string, a number's digits, or a word

  const Json& at(const std::string& name) const {
    const auto found = fields.find(name);
    if (found == fields.end()) throw std::runtime_error("case.json has no field " + name);
    return found->second;
  }
};

class Parser {
 public:
  explicit Parser(std::string text) : text_(std::move(text)) {}

  Json whole() {
    Json value = parse();
    if (peek() != '\0') fail("text after the end");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("case.json, byte " + std::to_string(at_) + ": " + what);
  }
  char peek() {
    while (at_ < text_.size() && std::strchr(" \n\r\t", text_[at_]) != nullptr) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool take(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void need(char c) {
    if (!take(c)) fail(std::string("needed ") + c);
  }
  std::string string() {
    need('"');
    std::string value;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\') ++at_;
      if (at_ < text_.size()) value += text_[at_++];
    }
    if (at_ == text_.size()) fail("a string without an end");
    ++at_;
    return value;
  }
  Json parse() {
    Json value;
    if (take('{')) {
      if (take('}')) return value;
      do {
        const std::string name = string();
        need(':');
        value.fields[name] = parse();
      } while (take(','));
      need('}');
    } else if (take('[')) {
      if (take(']')) return value;
      do {
        value.items.push_back(parse());
      } while (take(','));
      need(']');
    } else if (peek() == '"') {
      value.text = string();
    } else {
      while (std::isalnum(static_cast<unsigned char>(peek())) != 0) value.text += text_[at_++];
      if (value.text.empty()) fail("needed a value");
    }
    return value;
  }

  std::string text_;
  std::size_t at_ = 0;
};

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

std::string fnv1a64(const std::string& data) {
  std::uint64_t digest = 0xcbf29ce484222325u;
  for (const char byte : data) {
    digest = (digest ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(digest));
  return text;
}

struct Array {
  std::string name;
  lowlat_dtype dtype;
  std::vector<std::int64_t> shape;
  std::string data;
  std::map<std::string, std::string> bounds;  // of an output, by platform
};

Array read_array(const fs::path& folder, const Json& entry) {
  static const std::map<std::string, lowlat_dtype> kDtypes = {{"u8", LOWLAT_U8},
                                                              {"i32", LOWLAT_I32},
                                                              {"i64", LOWLAT_I64},
                                                              {"f32", LOWLAT_F32},
                                                              {"bf16", LOWLAT_BF16}};
  Array array;
  array.name = entry.at("name").text;
  array.dtype = kDtypes.at(entry.at("dtype").text);
  for (const Json& dim : entry.at("shape").items) array.shape.push_back(std::stoll(dim.text));
  array.data = read_file(folder / entry.at("file").text);
  if (fnv1a64(array.data) != entry.at("fnv1a64").text) {
    throw std::runtime_error((folder / entry.at("file").text).string() + " has another digest");
  }
  if (entry.fields.count("bounds") != 0) {
    for (const auto& [platform, bound] : entry.at("bounds").fields) {
      array.bounds[platform] = bound.text;
    }
  }
  return array;
}

struct Case {
  std::string name, op;
  std::vector<std::string> models;
  std::vector<Array> inputs, outputs;
};

Case read_case(const fs::path& folder) {
  const Json json = Parser(read_file(folder / "case.json")).whole();
  Case one{folder.filename().string(), json.at("op").text, {}, {}, {}};
  for (const Json& model : json.at("models").items) one.models.push_back(model.text);
  for (const Json& entry : json.at("inputs").items) {
    one.inputs.push_back(read_array(folder, entry));
  }
  for (const Json& entry : json.at("outputs").items) {
    one.outputs.push_back(read_array(folder, entry));
  }
  return one;
}

std::vector<fs::path> folders() {
  std::vector<fs::path> all;
  for (const auto& entry : fs::directory_iterator(kGolden)) {
    if (entry.is_directory()) all.push_back(entry.path());
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::size_t element_bytes(std::uint32_t dtype) {
  switch (dtype) {
    case LOWLAT_U8: return 1;
    case LOWLAT_BF16: return 2;
    case LOWLAT_I64: return 8;
    default: return 4;
  }
}

// Outputs by name, in memory that was poisoned before the run.
std::map<std::string, std::string> run(const Case& one, const std::string& model,
                                       const char* platform) {
  std::vector<lowlat_array> inputs;
  for (const Array& array : one.inputs) {
    lowlat_array in{};
    in.name = array.name.c_str();
    in.dtype = array.dtype;
    in.ndim = static_cast<std::uint32_t>(array.shape.size());
    std::copy(array.shape.begin(), array.shape.end(), in.shape);
    in.data = const_cast<char*>(array.data.data());
    inputs.push_back(in);
  }
  const auto num_inputs = static_cast<std::int32_t>(inputs.size());
  lowlat_array outputs[LOWLAT_MAX_OP_OUTPUTS] = {};
  std::int32_t num_outputs = 0;
  if (lowlat_op_plan(one.op.c_str(), model.c_str(), platform, inputs.data(), num_inputs, outputs,
                     &num_outputs) != LOWLAT_OK) {
    throw std::runtime_error(one.op + ": " + lowlat_last_error());
  }
  std::map<std::string, std::string> result;
  for (std::int32_t i = 0; i < num_outputs; ++i) {
    std::size_t bytes = element_bytes(outputs[i].dtype);
    for (std::uint32_t d = 0; d < outputs[i].ndim; ++d) bytes *= outputs[i].shape[d];
    std::string& data = result[outputs[i].name];
    data.assign(bytes, '\xff');  // NaN as f32 and as bf16
    outputs[i].data = data.data();
  }
  if (lowlat_op_run(one.op.c_str(), model.c_str(), platform, inputs.data(), num_inputs, outputs,
                    num_outputs) != LOWLAT_OK) {
    throw std::runtime_error(one.op + ": " + lowlat_last_error());
  }
  return result;
}

// Bits of element i of a float array, and its value.
std::uint32_t bits_of(const std::string& data, lowlat_dtype dtype, std::size_t i) {
  std::uint32_t bits = 0;
  const std::size_t size = element_bytes(dtype);
  std::memcpy(&bits, data.data() + i * size, size);
  return bits;
}

double value_of(const std::string& data, lowlat_dtype dtype, std::size_t i) {
  std::uint32_t bits = bits_of(data, dtype, i);
  if (dtype == LOWLAT_BF16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::int64_t ordered(const std::string& data, lowlat_dtype dtype, std::size_t i) {
  const std::int64_t sign = dtype == LOWLAT_BF16 ? 0x8000 : 0x80000000;
  const std::int64_t bits = bits_of(data, dtype, i);
  return (bits & sign) != 0 ? -(bits & (sign - 1)) : bits;
}

// What `metric` measures between two arrays of floats.
double measure(const std::string& metric, const Array& want, const std::string& got) {
  const std::size_t count = got.size() / element_bytes(want.dtype);
  double diff_sq = 0, want_sq = 0, worst = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double a = value_of(got, want.dtype, i), b = value_of(want.data, want.dtype, i);
    if (std::isnan(b) || std::isinf(b)) {
      if (std::isnan(a) != std::isnan(b) || (std::isinf(b) && a != b)) return INFINITY;
      continue;
    }
    if (std::isnan(a)) return INFINITY;
    diff_sq += (a - b) * (a - b);
    want_sq += b * b;
    if (metric == "max_ulp") {
      const std::int64_t distance = ordered(got, want.dtype, i) - ordered(want.data, want.dtype, i);
      worst = std::max(worst, std::abs(static_cast<double>(distance)));
    } else if (metric == "max_abs") {
      worst = std::max(worst, std::abs(a - b));
    } else if (metric == "max_rel") {
      worst = std::max(worst, a == b ? 0.0 : std::abs(a - b) / std::abs(b));
    }
  }
  if (metric == "rel_l2") return want_sq > 0 ? std::sqrt(diff_sq / want_sq) : std::sqrt(diff_sq);
  if (metric == "max_ulp" || metric == "max_abs" || metric == "max_rel") return worst;
  throw std::runtime_error("no rule for the metric " + metric);
}

double e4m3_value(std::uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// V4's index keys, 128 e4m3 codes and an fp32 scale a row, as fp32 values.
std::string key_values(const std::string& rows) {
  constexpr std::size_t kCodes = 128, kRow = kCodes + sizeof(float);
  std::string values;
  for (std::size_t at = 0; at + kRow <= rows.size(); at += kRow) {
    float scale;
    std::memcpy(&scale, rows.data() + at + kCodes, sizeof scale);
    for (std::size_t i = 0; i < kCodes; ++i) {
      const auto value = static_cast<float>(e4m3_value(rows[at + i]) * scale);
      values.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
  }
  return values;
}

// "bitwise", "metric <= bound", or "values metric <= bound" of V4's index keys.
bool meets(const std::string& bound, const Array& want, const std::string& got) {
  if (got.size() != want.data.size()) return false;
  if (bound == "bitwise") return got == want.data;
  const std::string values = "values ";
  if (bound.starts_with(values)) {
    const Array keys{want.name, LOWLAT_F32, {}, key_values(want.data), {}};
    return meets(bound.substr(values.size()), keys, key_values(got));
  }
  const std::size_t at = bound.find(" <= ");
  if (at == std::string::npos) throw std::runtime_error("no rule for the bound " + bound);
  return measure(bound.substr(0, at), want, got) <= std::stod(bound.substr(at + 4));
}

}  // namespace

TEST_CASE(golden_has_a_case_of_every_operation_and_model) {
  std::set<std::string> covered, declared;
  for (const fs::path& folder : folders()) {
    const Case one = read_case(folder);
    for (const std::string& model : one.models) covered.insert(one.op + " " + model);
  }
  for (const Json& op : Parser(lowlat_op_list()).whole().items) {
    std::istringstream models(op.at("models").text);
    for (std::string model; models >> model;) declared.insert(op.at("name").text + " " + model);
  }
  CHECK(covered == declared);
}

TEST_CASE(golden_reference_gives_the_same_bytes) {
  for (const fs::path& folder : folders()) {
    const Case one = read_case(folder);
    for (const std::string& model : one.models) {
      const auto got = run(one, model, "reference");
      CHECK_EQ(got.size(), one.outputs.size());
      for (const Array& want : one.outputs) {
        if (got.at(want.name) != want.data) {
          lowlat::check::report(__FILE__, __LINE__,
                                one.name + ", " + model + ": " + want.name + " differs");
        }
      }
    }
  }
}

TEST_CASE(golden_scalar_meets_the_declared_bounds) {
  for (const fs::path& folder : folders()) {
    const Case one = read_case(folder);
    for (const std::string& model : one.models) {
      const auto got = run(one, model, "scalar");
      for (const Array& want : one.outputs) {
        const std::string& bound = want.bounds.at("scalar");
        if (!meets(bound, want, got.at(want.name))) {
          lowlat::check::report(__FILE__, __LINE__,
                                one.name + ", " + model + ": " + want.name + " misses " + bound);
        }
      }
    }
  }
}

TEST_CASE(golden_comparison_sees_a_wrong_element) {
  // The rules themselves: a value one step off, a NaN left from the poison, another sign of zero.
  Array want{"y", LOWLAT_BF16, {3}, {}, {}};
  const std::uint16_t bits[3] = {0x3f80, 0x0000, 0x7f80};
  want.data.assign(reinterpret_cast<const char*>(bits), sizeof bits);
  std::string got = want.data;
  CHECK(meets("bitwise", want, got) && meets("max_ulp <= 0", want, got));
  got[0] = '\x81';
  CHECK(!meets("bitwise", want, got) && !meets("max_ulp <= 0", want, got));
  CHECK(meets("max_ulp <= 1", want, got) && meets("rel_l2 <= 8e-3", want, got));
  CHECK(!meets("rel_l2 <= 7e-3", want, got) && !meets("max_abs <= 7e-3", want, got));
  got = want.data;
  got[3] = '\x80';
  CHECK(!meets("bitwise", want, got) && meets("max_ulp <= 0", want, got));
  got[3] = got[2] = '\xff';
  CHECK(!meets("max_ulp <= 9", want, got) && !meets("rel_l2 <= 9", want, got));
  got = want.data;
  got[5] = '\xff';  // -infinity for infinity
  CHECK(!meets("rel_l2 <= 9", want, got));
  // A key of ones under the scale 2; a code one step up; a scale one step up.
  Array key{
      "rows", LOWLAT_U8, {1, 132}, std::string(128, '\x38') + std::string("\0\0\0\x40", 4), {}};
  CHECK(meets("values rel_l2 <= 0", key, key.data));
  std::string other = key.data;
  other[7] = '\x39';
  CHECK(!meets("values rel_l2 <= 1e-2", key, other) && meets("values rel_l2 <= 2e-2", key, other));
  other = key.data;
  other[128] = '\x01';
  CHECK(!meets("values rel_l2 <= 1e-7", key, other) && meets("values rel_l2 <= 2e-7", key, other));
  other[131] = '\x7f', other[130] = '\x80';  // a scale that is infinite
  CHECK(!meets("values rel_l2 <= 9", key, other));
}
