#include "host/op/registry.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <string_view>

#include "host/how_to_build.hpp"
#include "host/json.hpp"
#include "reference/format.hpp"
#ifdef LOWLAT_HAVE_CUDA
#include "host/nvidia/run.hpp"
#endif

namespace lowlat::host {
namespace {

constexpr std::int64_t kMaxRows = 64;
// An array of more bytes is a wrong shape, not a case to run.
constexpr std::int64_t kMaxArrayBytes = std::int64_t{1} << 40;

// ---------------------------------------------------------------- shapes

// factor * symbol / (divisor * divisor_symbol); an empty symbol stands for 1.
struct Dim {
  std::int64_t factor = 1;
  std::string symbol;
  std::int64_t divisor = 1;
  std::string divisor_symbol;

  bool bare() const {
    return factor == 1 && !symbol.empty() && divisor == 1 && divisor_symbol.empty();
  }
};

void parse_factor(std::string_view text, std::int64_t& out_number, std::string& out_symbol) {
  std::size_t digits = 0;
  while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
  if (digits > 0) out_number = std::stoll(std::string(text.substr(0, digits)));
  out_symbol = text.substr(digits);
}

std::vector<Dim> parse_shape(const char* shape) {
  std::vector<Dim> dims;
  std::string_view rest = shape;
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view text = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const std::size_t slash = text.find('/');
    Dim dim;
    parse_factor(text.substr(0, slash), dim.factor, dim.symbol);
    if (slash != std::string_view::npos) {
      parse_factor(text.substr(slash + 1), dim.divisor, dim.divisor_symbol);
    }
    dims.push_back(dim);
  }
  return dims;
}

std::string list(const std::int64_t* values, std::size_t count) {
  std::string text = "[";
  for (std::size_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

const char* dtype_name(std::uint32_t dtype) {
  switch (dtype) {
    case LOWLAT_U8: return "u8";
    case LOWLAT_I32: return "i32";
    case LOWLAT_I64: return "i64";
    case LOWLAT_F32: return "f32";
    case LOWLAT_BF16: return "bf16";
    default: return "no dtype of operations";
  }
}

std::int64_t dtype_bytes(std::uint32_t dtype) {
  switch (dtype) {
    case LOWLAT_I64: return 8;
    case LOWLAT_I32:
    case LOWLAT_F32: return 4;
    case LOWLAT_BF16: return 2;
    default: return 1;
  }
}

// "x is f32; needed bf16" or "w is f32; needed u8 (e4m3)".
void check_dtype(const ArgSpec& spec, const lowlat_array& a) {
  if (a.dtype == static_cast<std::uint32_t>(spec.dtype)) return;
  std::string needed = dtype_name(spec.dtype);
  if (needed != spec.dtype_word) needed += std::string(" (") + spec.dtype_word + ")";
  throw OpError(std::string(spec.name) + " is " + dtype_name(a.dtype) + "; needed " + needed);
}

// What can be said of an array without its spec.
void check_array(const lowlat_array& a) {
  const std::string name = a.name;
  require(a.ndim <= LOWLAT_MAX_DIMS, name + " has " + std::to_string(a.ndim) +
                                         " dimensions; needed at most " +
                                         std::to_string(LOWLAT_MAX_DIMS));
  std::int64_t bytes = dtype_bytes(a.dtype);
  for (std::uint32_t i = 0; i < a.ndim; ++i) {
    require(a.shape[i] >= 0, name + " has shape " + list(a.shape, a.ndim) + "; needed sizes >= 0");
    require(a.shape[i] == 0 || bytes <= kMaxArrayBytes / a.shape[i],
            name + " has shape " + list(a.shape, a.ndim) + "; needed at most 2^40 bytes");
    bytes *= a.shape[i];
  }
  require(bytes == 0 || a.data != nullptr, name + " has no data");
  const auto address = reinterpret_cast<std::uintptr_t>(a.data);
  require(address % static_cast<std::uintptr_t>(dtype_bytes(a.dtype)) == 0,
          name + "'s data is not aligned to its dtype");
}

// Binds the symbols of an operation's inputs and holds every shape to them.
class ShapeMatcher {
 public:
  void add(const ArgSpec& spec, const lowlat_array& a) {
    entries_.push_back({&spec, &a, parse_shape(spec.shape)});
  }

  Dims match() {
    for (const Entry& e : entries_) {
      if (e.dims.size() != e.array->ndim) {
        throw OpError(std::string(e.spec->name) + " has shape " +
                      list(e.array->shape, e.array->ndim) + "; needed [" + e.spec->shape + "]");
      }
      for (std::size_t i = 0; i < e.dims.size(); ++i) {
        if (e.dims[i].bare()) bind(e.dims[i].symbol, e.array->shape[i], e);
      }
    }
    while (solve_one()) {
    }
    for (const Entry& e : entries_) verify(e);
    if (const auto rows = dims_.find("T"); rows != dims_.end()) {
      require(rows->second >= 1 && rows->second <= kMaxRows,
              origin_.at("T") + " has T = " + std::to_string(rows->second) + " rows; needed 1 .. " +
                  std::to_string(kMaxRows));
    }
    return dims_;
  }

 private:
  struct Entry {
    const ArgSpec* spec;
    const lowlat_array* array;
    std::vector<Dim> dims;
  };

  void bind(const std::string& symbol, std::int64_t value, const Entry& from) {
    if (dims_.emplace(symbol, value).second) origin_[symbol] = from.spec->name;
  }
  bool known(const std::string& symbol) const { return symbol.empty() || dims_.count(symbol) != 0; }
  std::int64_t value(const std::string& symbol) const {
    return symbol.empty() ? 1 : dims_.at(symbol);
  }

  // Binds one symbol that a dimension leaves no choice for.
  bool solve_one() {
    for (const Entry& e : entries_) {
      for (std::size_t i = 0; i < e.dims.size(); ++i) {
        const Dim& dim = e.dims[i];
        const std::int64_t actual = e.array->shape[i];
        if (!known(dim.symbol) && known(dim.divisor_symbol)) {
          const std::int64_t whole = actual * dim.divisor * value(dim.divisor_symbol);
          if (whole % dim.factor != 0) continue;
          bind(dim.symbol, whole / dim.factor, e);
          return true;
        }
        if (known(dim.symbol) && !known(dim.divisor_symbol)) {
          const std::int64_t whole = dim.factor * value(dim.symbol);
          if (actual == 0 || whole == 0 || whole % (actual * dim.divisor) != 0) continue;
          bind(dim.divisor_symbol, whole / (actual * dim.divisor), e);
          return true;
        }
      }
    }
    return false;
  }

  void verify(const Entry& e) const {
    std::vector<std::int64_t> needed;
    bool right = true;
    for (std::size_t i = 0; i < e.dims.size(); ++i) {
      const Dim& dim = e.dims[i];
      const bool solved = known(dim.symbol) && known(dim.divisor_symbol);
      const std::int64_t whole = solved ? dim.factor * value(dim.symbol) : 0;
      const std::int64_t divisor = solved ? dim.divisor * value(dim.divisor_symbol) : 1;
      if (!solved || divisor == 0 || whole % divisor != 0) {
        throw OpError(describe(e));
      }
      needed.push_back(whole / divisor);
      right = right && needed.back() == e.array->shape[i];
    }
    if (!right) throw OpError(describe(e) + ", that is " + list(needed.data(), needed.size()));
  }

  // "w_scale has shape [3, 2]; needed [N/b,K/b] with N = 64 (w), K = 64 (x), b = 32 (w_scale)".
  std::string describe(const Entry& e) const {
    std::string text = std::string(e.spec->name) + " has shape " +
                       list(e.array->shape, e.array->ndim) + "; needed [" + e.spec->shape + "]";
    const char* join = " with ";
    std::string said = ",";
    for (const Dim& dim : e.dims) {
      for (const std::string& symbol : {dim.symbol, dim.divisor_symbol}) {
        if (symbol.empty() || !known(symbol)) continue;
        if (said.find("," + symbol + ",") != said.npos) continue;
        said += symbol + ",";
        text +=
            join + symbol + " = " + std::to_string(value(symbol)) + " (" + origin_.at(symbol) + ")";
        join = ", ";
      }
    }
    return text;
  }

  std::vector<Entry> entries_;
  Dims dims_;
  std::map<std::string, std::string> origin_;
};

// Shapes of the outputs, data null, from dimensions that are all bound by now.
std::vector<lowlat_array> output_arrays(const OpSpec& op, const Dims& dims) {
  const auto value = [&](const std::string& symbol) {
    return symbol.empty() ? std::int64_t{1} : dims.at(symbol);
  };
  std::vector<lowlat_array> outputs;
  for (const ArgSpec& spec : op.out) {
    lowlat_array a{};
    a.name = spec.name;
    a.dtype = static_cast<std::uint32_t>(spec.dtype);
    for (const Dim& dim : parse_shape(spec.shape)) {
      a.shape[a.ndim++] =
          dim.factor * value(dim.symbol) / (dim.divisor * value(dim.divisor_symbol));
    }
    outputs.push_back(a);
  }
  return outputs;
}

// ---------------------------------------------------------------- one call

bool contains_word(std::string_view words, std::string_view word) {
  while (!words.empty()) {
    const std::size_t space = words.find(' ');
    if (words.substr(0, space) == word) return true;
    if (space == std::string_view::npos) break;
    words.remove_prefix(space + 1);
  }
  return false;
}

const ArgSpec* find_arg(const std::vector<ArgSpec>& specs, std::string_view name) {
  for (const ArgSpec& spec : specs) {
    if (name == spec.name) return &spec;
  }
  return nullptr;
}

std::string names_of(const std::vector<ArgSpec>& specs) {
  std::string text;
  for (const ArgSpec& spec : specs) {
    if (!text.empty()) text += ", ";
    text += spec.name;
    if (spec.optional) text += " (optional)";
  }
  return text;
}

// The checked inputs of one call.
OpArgs check_inputs(const OpSpec& op, const char* model, const char* platform,
                    std::span<const lowlat_array> inputs) {
  require(contains_word(op.models, model),
          std::string("model is ") + model + "; " + op.name + " is there for " + op.models);
  std::string names;
  bool built = false;
  for (const char* name : built_platforms()) {
    built = built || std::string_view(name) == platform;
    if (!names.empty()) names += name == built_platforms().back() ? " and " : ", ";
    names += name;
  }
  const bool on_amd = std::string_view(platform).starts_with("amd");
  require(built, std::string("platform is ") + platform +
                     (on_amd ? ", which runs whole models and no operation alone (docs/amd.md: an "
                               "interpreter runs its stages)"
                             : "") +
                     "; this build has " + names + (on_amd ? "" : how_to_build(platform)));

  std::map<std::string, const lowlat_array*> given;
  for (const lowlat_array& a : inputs) {
    require(a.name != nullptr, "an input has no name");
    require(find_arg(op.in, a.name) != nullptr,
            std::string(a.name) + " is no input of " + op.name + "; needed " + names_of(op.in));
    require(given.emplace(a.name, &a).second, std::string(a.name) + " is given twice");
  }
  ShapeMatcher matcher;
  for (const ArgSpec& spec : op.in) {
    const auto it = given.find(spec.name);
    if (it == given.end()) {
      require(spec.optional, std::string(spec.name) + " is missing; " + op.name + " needs it as " +
                                 spec.dtype_word + " [" + spec.shape + "]");
      continue;
    }
    check_dtype(spec, *it->second);
    check_array(*it->second);
    matcher.add(spec, *it->second);
  }
  OpArgs args(model, matcher.match());
  for (const auto& [name, a] : given) args.add_input(*a);
  if (op.check) op.check(args);
  return args;
}

// The entry of `name` that has `model`: an operation whose arrays differ between models has an
// entry for each.
const OpSpec& find_op(const char* name, const char* model) {
  std::string known, models;
  for (const OpSpec& op : op_table()) {
    if (std::string_view(op.name) == name) {
      if (contains_word(op.models, model)) return op;
      models += models.empty() ? "" : " ";
      models += op.models;
    }
    // Entries of one name are neighbours.
    if (known.ends_with(std::string(" ") + op.name) || known == op.name) continue;
    known += known.empty() ? "" : ", ";
    known += op.name;
  }
  require(!models.empty(), std::string("operation is ") + name + "; needed one of " + known);
  throw OpError(std::string("model is ") + model + "; " + name + " is there for " + models);
}

void require_pointers(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers) require(p != nullptr, "a pointer of the call is null");
}

std::span<const lowlat_array> input_span(const lowlat_array* inputs, std::int32_t num_inputs) {
  require(num_inputs >= 0 && (num_inputs == 0 || inputs != nullptr), "inputs is null");
  return {inputs, static_cast<std::size_t>(num_inputs)};
}

// ---------------------------------------------------------------- JSON

void append_args(std::string& out, const char* name, const std::vector<ArgSpec>& specs) {
  append_objects(out, name, specs, [&](const ArgSpec& spec) {
    append_fields(out, {{"name", spec.name}, {"dtype", spec.dtype_word}, {"shape", spec.shape}});
    out += ", \"optional\": ";
    out += spec.optional ? "true, " : "false, ";
    append_field(out, "about", spec.about);
  });
}

std::string table_json() {
  std::string out = "[";
  for (const OpSpec& op : op_table()) {
    if (out.size() > 1) out += ",\n ";
    out += "{";
    append_fields(out, {{"name", op.name}, {"models", op.models}, {"about", op.about}});
    out += ", ";
    append_args(out, "in", op.in);
    out += ", ";
    append_args(out, "out", op.out);
    out += ", \"numerics\": {";
    std::map<std::string, std::vector<const OpNumerics*>> by_platform;
    for (const OpNumerics& n : op.numerics) {
      for (const char* platform : built_platforms()) {
        if (contains_word(n.platforms, platform)) by_platform[platform].push_back(&n);
      }
    }
    bool first_platform = true;
    for (const auto& [platform, outputs] : by_platform) {
      if (!first_platform) out += ", ";
      first_platform = false;
      append_string(out, platform);
      out += ": {";
      for (const OpNumerics* n : outputs) {
        if (n != outputs.front()) out += ", ";
        append_field(out, n->output, n->bound);
      }
      out += "}";
    }
    out += "}}";
  }
  return out + "]\n";
}

}  // namespace

const std::vector<OpSpec>& op_table() {
  static const std::vector<OpSpec> table = [] {
    std::vector<OpSpec> all;
    for (std::vector<OpSpec> group : {ops_mix(), ops_linear(), ops_rope_kv(), ops_attention(),
                                      ops_index(), ops_moe(), ops_engram(), ops_draft()}) {
      all.insert(all.end(), std::make_move_iterator(group.begin()),
                 std::make_move_iterator(group.end()));
    }
    return all;
  }();
  return table;
}

std::span<const char* const> built_platforms() {
  static constexpr const char* kPlatforms[] = {
      "reference",
      "scalar",
#ifdef LOWLAT_HAVE_CUDA
      "nvidia",
#endif
  };
  return kPlatforms;
}

std::int64_t num_bytes(const lowlat_array& a) {
  std::int64_t bytes = dtype_bytes(a.dtype);
  for (std::uint32_t i = 0; i < a.ndim; ++i) bytes *= a.shape[i];
  return bytes;
}

void op_plan(const OpSpec& op, const char* model, const char* platform,
             std::span<const lowlat_array> inputs, std::vector<lowlat_array>& out_outputs) {
  out_outputs = output_arrays(op, check_inputs(op, model, platform, inputs).dims());
}

void op_run(const OpSpec& op, const char* model, const char* platform,
            std::span<const lowlat_array> inputs, std::span<lowlat_array> outputs) {
  OpArgs args = check_inputs(op, model, platform, inputs);
  const std::vector<lowlat_array> planned = output_arrays(op, args.dims());
  // The body writes to copies, so that one that throws has changed nothing of the caller's. They
  // begin as what the caller's arrays hold: an element that is never written stays visible.
  std::vector<std::vector<std::int64_t>> memory;
  std::vector<lowlat_array*> targets;
  for (const lowlat_array& plan : planned) {
    lowlat_array* target = nullptr;
    for (lowlat_array& a : outputs) {
      require(a.name != nullptr, "an output has no name");
      if (std::string_view(a.name) != plan.name) continue;
      require(target == nullptr, std::string(plan.name) + " is given twice");
      target = &a;
    }
    require(target != nullptr, std::string("output ") + plan.name + " is missing");
    check_dtype(*find_arg(op.out, plan.name), *target);
    check_array(*target);
    const bool same = target->ndim == plan.ndim &&
                      std::memcmp(target->shape, plan.shape, plan.ndim * sizeof plan.shape[0]) == 0;
    require(same, std::string("output ") + plan.name + " has shape " +
                      list(target->shape, target->ndim) + "; needed " +
                      list(plan.shape, plan.ndim));
    const auto bytes = static_cast<std::size_t>(num_bytes(plan));
    memory.emplace_back((bytes + sizeof(std::int64_t) - 1) / sizeof(std::int64_t));
    if (bytes > 0) std::memcpy(memory.back().data(), target->data, bytes);
    lowlat_array copy = plan;
    copy.data = memory.back().data();
    args.add_output(copy);
    targets.push_back(target);
  }
  for (const lowlat_array& a : outputs) {
    require(find_arg(op.out, a.name) != nullptr,
            std::string(a.name) + " is no output of " + op.name + "; needed " + names_of(op.out));
  }
  const std::string_view where = platform;
#ifdef LOWLAT_HAVE_CUDA
  if (where == "nvidia") run_on_nvidia(op, args);
#endif
  if (where == "reference") op.reference(args);
  if (where == "scalar") op.scalar(args);
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const auto bytes = static_cast<std::size_t>(num_bytes(planned[i]));
    if (bytes > 0) std::memcpy(targets[i]->data, memory[i].data(), bytes);
  }
}

// ---------------------------------------------------------------- helpers for checks

void require(bool ok, const std::string& message) {
  if (!ok) throw OpError(message);
}

std::string element_name(const OpArgs& args, const std::string& name, std::int64_t idx) {
  const lowlat_array& a = args.input(name);
  if (a.ndim == 0) return name;
  std::int64_t at[LOWLAT_MAX_DIMS];
  for (std::uint32_t i = a.ndim; i-- > 0;) {
    at[i] = idx % a.shape[i];
    idx /= a.shape[i];
  }
  return name + list(at, a.ndim);
}

void require_range(const OpArgs& args, const std::string& name, std::int64_t low, std::int64_t high,
                   const std::string& why) {
  const auto check = [&](auto values) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::int64_t v = values[i];
      if (low <= v && v <= high) continue;
      throw OpError(element_name(args, name, static_cast<std::int64_t>(i)) + " is " +
                    std::to_string(v) + "; needed " + std::to_string(low) + " .. " +
                    std::to_string(high) + (why.empty() ? "" : " (" + why + ")"));
    }
  };
  if (args.input(name).dtype == LOWLAT_I32) {
    check(args.in<std::int32_t>(name));
  } else {
    check(args.in<std::int64_t>(name));
  }
}

namespace {

std::string number(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", v);
  return text;
}

// Throws for the first element that is not finite or lies beyond `limit`.
template <class T>
void check_values(const OpArgs& args, const std::string& name, double limit, double (*value)(T)) {
  const std::span<const T> values = args.in<T>(name);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double v = value(values[i]);
    if (std::isfinite(v) && std::abs(v) <= limit) continue;
    std::string seen = std::isnan(v) ? "nan" : std::isinf(v) ? "infinite" : number(v);
    throw OpError(element_name(args, name, static_cast<std::int64_t>(i)) + " is " + seen +
                  "; needed a finite value" +
                  (std::isinf(limit) ? "" : " of magnitude " + number(limit) + " or less"));
  }
}

void check_finite(const OpArgs& args, const OpSpec& spec, const std::string& name, double limit) {
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (!args.has(name)) return;
  const ArgSpec* arg = find_arg(spec.in, name);
  if (arg == nullptr) throw std::logic_error(name + " is no input of " + spec.name);
  const std::string_view word = arg->dtype_word;
  if (word == "f32") {
    check_values<float>(args, name, limit, [](float v) { return static_cast<double>(v); });
  }
  if (word == "bf16") check_values<std::uint16_t>(args, name, limit, reference::from_bf16);
  if (word == "e4m3") check_values<std::uint8_t>(args, name, kNone, reference::from_e4m3);
  if (word == "ue8m0") check_values<std::uint8_t>(args, name, kNone, reference::from_ue8m0);
}

}  // namespace

void require_finite(const OpArgs& args, const OpSpec& spec, const std::string& name) {
  check_finite(args, spec, name, std::numeric_limits<double>::infinity());
}

void require_all_finite(const OpArgs& args, const OpSpec& spec, double limit) {
  for (const ArgSpec& arg : spec.in) check_finite(args, spec, arg.name, limit);
}

void require_dim(const OpArgs& args, const std::string& symbol, std::int64_t least,
                 std::int64_t multiple) {
  const std::int64_t size = args.dim(symbol);
  if (size >= least && size % multiple == 0) return;
  throw OpError(symbol + " is " + std::to_string(size) + "; needed " + std::to_string(least) +
                " or more" +
                (multiple > 1 ? ", a multiple of " + std::to_string(multiple) : std::string()));
}

}  // namespace lowlat::host

// ---------------------------------------------------------------- C entry points

using lowlat::host::border;
using lowlat::host::find_op;
using lowlat::host::input_span;
using lowlat::host::require;
using lowlat::host::require_pointers;

extern "C" const char* lowlat_op_list(void) {
  static const std::string json = lowlat::host::table_json();
  return json.c_str();
}

extern "C" lowlat_status lowlat_op_plan(const char* op, const char* model, const char* platform,
                                        const lowlat_array* inputs, int32_t num_inputs,
                                        lowlat_array* out_outputs, int32_t* out_num_outputs) {
  return border([&] {
    require_pointers({op, model, platform, out_outputs, out_num_outputs});
    std::vector<lowlat_array> outputs;
    lowlat::host::op_plan(find_op(op, model), model, platform, input_span(inputs, num_inputs),
                          outputs);
    std::copy(outputs.begin(), outputs.end(), out_outputs);
    *out_num_outputs = static_cast<int32_t>(outputs.size());
  });
}

extern "C" lowlat_status lowlat_op_run(const char* op, const char* model, const char* platform,
                                       const lowlat_array* inputs, int32_t num_inputs,
                                       lowlat_array* outputs, int32_t num_outputs) {
  return border([&] {
    require_pointers({op, model, platform});
    require(num_outputs >= 0 && (num_outputs == 0 || outputs != nullptr), "outputs is null");
    lowlat::host::op_run(find_op(op, model), model, platform, input_span(inputs, num_inputs),
                         {outputs, static_cast<std::size_t>(num_outputs)});
  });
}
