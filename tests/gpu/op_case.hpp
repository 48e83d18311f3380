// op_case.hpp: random and awkward inputs of any operation, from its own description: for programs
// that run every operation at given sizes without knowing it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "host/op/registry.hpp"
#include "random_values.hpp"

namespace lowlat::testing {

// An operation at sizes; `numbers` are its one-element arrays.
struct OpCase {
  const char* op;
  const char* model;
  host::Dims dims;
  std::map<std::string, std::int64_t> numbers = {};
};

// What one rank of four computes in a step: the models' own widths, the most rows. Where a weight
// has more rows than tell anything new, fewer.
inline std::vector<OpCase> true_cases() {
  std::vector<OpCase> all;
  for (const char* model : {"v41", "v4"}) {
    const bool v4 = std::string_view(model) == "v4";
    const std::int64_t h = v4 ? 4096 : 5120, b = v4 ? 128 : 32, e = v4 ? 256 : 384;
    all.push_back({"hc_stats", model, {{"T", 48}, {"H", h}}});
    all.push_back({"hc_combine_norm", model, {{"T", 48}, {"H", h}}});
    all.push_back({"hc_post", model, {{"T", 48}, {"H", h}}});
    all.push_back({"rms_norm", model, {{"T", 48}, {"H", h}}});
    all.push_back({"rank_sum", model, {{"R", 4}, {"T", 48}, {"H", h}}});
    all.push_back(
        {"block_linear", model, {{"T", 48}, {"N", 512}, {"K", h}, {"b", b}}, {{"block", b}}});
    all.push_back({"lm_head", model, {{"T", 48}, {"V", 1000}, {"H", h}}});
    all.push_back({"rope",
                   model,
                   {{"T", 48}, {"h", 16}, {"D", 512}},
                   {{"yarn", 1}, {"inverse", v4 ? 1 : 0}}});
    all.push_back({"kv_pack", model, {{"T", 48}}});
    all.push_back({"kv_unpack", model, {{"T", 48}}});
    all.push_back({"sparse_attention",
                   model,
                   {{"T", 48}, {"h", 16}, {"S", 2000}, {"s", 133}, {"E", 3000}, {"n", 512}}});
    all.push_back({"index_query", model, {{"T", 48}, {"h", v4 ? 64 : 32}}});
    all.push_back(
        {"index_select", model, {{"T", 48}, {"h", v4 ? 64 : 32}, {"N", 5000}}, {{"k", 512}}});
    all.push_back({"gate", model, {{"T", 48}, {"H", h}, {"E", e}}});
    all.push_back({"experts",
                   model,
                   {{"T", 48}, {"E", 16}, {"H", h}, {"I", v4 ? 256 : 192}, {"k", 6}, {"b", b}}});
    all.push_back({"markov_draft", model, {{"B", 8}, {"g", 5}, {"V", 20000}, {"R", 256}}});
    all.push_back({"accept", model, {{"B", 8}, {"g", 5}, {"n", 6}, {"V", 20000}}});
  }
  all.push_back({"hc_head", "v4", {{"T", 48}, {"H", 4096}}});
  all.push_back({"head_norm", "v4", {{"T", 48}, {"h", 16}, {"D", 512}}});
  all.push_back({"hash_gate", "v4", {{"T", 48}, {"V", 500}, {"H", 4096}, {"E", 256}}});
  all.push_back(
      {"compress", "v4", {{"L", 132}, {"H", 4096}, {"W", 512}, {"R", 128}}, {{"ratio", 128}}});
  all.push_back(
      {"compress", "v4", {{"L", 23}, {"H", 4096}, {"W", 1024}, {"R", 4}}, {{"ratio", 4}}});
  all.push_back({"compress", "v41", {{"L", 23}, {"H", 5120}}, {{"ratio", 2}}});
  all.push_back({"index_key", "v4", {{"L", 23}, {"H", 4096}, {"W", 256}, {"R", 4}}});
  all.push_back({"index_key", "v41", {{"T", 48}}});
  all.push_back({"candidate_blocks", "v41", {{"T", 48}, {"N", 9000}}, {{"k", 64}}});
  all.push_back({"engram_hash", "v41", {{"T", 48}, {"V", 5000}}});
  all.push_back({"engram_lookup", "v41", {{"T", 48}, {"N", 20000}, {"D", 256}}});
  all.push_back({"engram_apply", "v41", {{"T", 48}, {"H", 5120}, {"D", 32}}});
  return all;
}

// The same operations at sizes that a checking tool, which is a hundred times slower, gets through.
inline std::vector<OpCase> small_cases() {
  std::vector<OpCase> all = true_cases();
  for (OpCase& one : all) {
    const std::string_view op = one.op;
    const bool v4 = std::string_view(one.model) == "v4";
    for (auto& [symbol, size] : one.dims) {
      if (symbol == "T") size = 3;
      if (symbol == "B") size = 2;
      if (symbol == "H" || symbol == "K" || symbol == "I") size = v4 ? 256 : 160;
      if (symbol == "N") size = op == "block_linear" ? 128 : 600;
      if (symbol == "V") size = 1100;
      if (symbol == "E" && op != "sparse_attention") size = 40;
      if (op == "sparse_attention" && symbol == "n") size = 40;
      if (symbol == "s") size = 30;
      if (symbol == "h") size = 2;
    }
    if (one.numbers.count("k") != 0) one.numbers["k"] = 16;
  }
  return all;
}

// What a case's rows hold. `awkward`: rows of zeros, of both signs of zero and subnormals, of one
// large value and of equal values (ties), among random ones.
enum class Inputs { random, awkward };

// One call: memory of the inputs and of poisoned outputs, checked as the C entry points check it.
class OpData {
 public:
  // With `rows_of`, a call of more rows, inputs whose shape begins with T are its first rows, and
  // all others are all of it.
  OpData(const host::OpSpec& spec, const OpCase& one, std::uint32_t seed,
         Inputs kind = Inputs::random, const OpData* rows_of = nullptr)
      : spec_(spec), args_(one.model, one.dims), random_(seed), kind_(kind) {
    for (const host::ArgSpec& arg : spec.in) {
      const bool number = std::string_view(arg.shape).empty();
      if (arg.optional && one.numbers.count(arg.name) == 0 && !wanted(one, arg.name)) continue;
      lowlat_array a = array_of(arg, one.dims);
      if (rows_of != nullptr) {
        std::memcpy(a.data, rows_of->args_.input(arg.name).data,
                    static_cast<std::size_t>(host::num_bytes(a)));
      } else if (number) {
        std::memcpy(a.data, &one.numbers.at(arg.name), sizeof(std::int64_t));
      } else {
        fill(arg, a, one.dims);
      }
      args_.add_input(a);
    }
    if (spec.check) spec.check(args_);
    for (const host::ArgSpec& arg : spec.out) args_.add_output(array_of(arg, args_.dims()));
    poison();
  }

  const host::OpArgs& args() const { return args_; }
  void poison() {
    for (const host::ArgSpec& arg : spec_.out) {
      const lowlat_array& a = args_.output(arg.name);
      std::memset(a.data, 0xa5, static_cast<std::size_t>(host::num_bytes(a)));
    }
  }
  // The bytes of an output.
  std::vector<std::uint8_t> output(const char* name) const {
    const lowlat_array& a = args_.output(name);
    const auto* bytes = static_cast<const std::uint8_t*>(a.data);
    return {bytes, bytes + host::num_bytes(a)};
  }

 private:
  static bool wanted(const OpCase& one, std::string_view name) {
    return name == "wgate" && one.numbers.count("ratio") != 0 && one.numbers.at("ratio") == 2;
  }

  // "4H", "H/2", "5H/32", "24D", "128": a number, a symbol, or both, over the same.
  static std::int64_t part(std::string_view text, const host::Dims& dims) {
    std::int64_t value = 1;
    std::size_t digits = 0;
    while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
    if (digits > 0) value = std::stoll(std::string(text.substr(0, digits)));
    if (digits < text.size()) value *= dims.at(std::string(text.substr(digits)));
    return value;
  }

  lowlat_array array_of(const host::ArgSpec& arg, const host::Dims& dims) {
    lowlat_array a{};
    a.name = arg.name;
    a.dtype = static_cast<std::uint32_t>(arg.dtype);
    for (std::string_view rest = arg.shape; !rest.empty();) {
      const std::size_t comma = rest.find(',');
      const std::string_view text = rest.substr(0, comma);
      rest = comma == rest.npos ? std::string_view() : rest.substr(comma + 1);
      const std::size_t slash = text.find('/');
      const std::int64_t under = slash == text.npos ? 1 : part(text.substr(slash + 1), dims);
      a.shape[a.ndim++] = part(text.substr(0, slash), dims) / under;
    }
    memory_.emplace_back(static_cast<std::size_t>(host::num_bytes(a)) / 8 + 1);
    a.data = memory_.back().data();
    return a;
  }

  template <class T, class Make>
  static void each(const lowlat_array& a, Make&& make) {
    const auto count = static_cast<std::size_t>(host::num_bytes(a)) / sizeof(T);
    for (std::size_t i = 0; i < count; ++i) static_cast<T*>(a.data)[i] = static_cast<T>(make(i));
  }

  // Rows of activations, awkward where the case says so: row r is of kind r % 6.
  double activation(std::size_t row, std::size_t i) {
    if (kind_ == Inputs::random) return random_.normal();
    switch (row % 6) {
      case 0: return 0.0;
      case 1: return i % 2 == 0 ? -0.0 : 1e-40;
      case 2: return i == 5 ? 3e4 : 0.0;
      case 3: return 1.0;
      case 4: return i % 3 == 0 ? -1.5 : 1.5;
      default: return random_.normal();
    }
  }

  void fill(const host::ArgSpec& arg, const lowlat_array& a, const host::Dims& dims) {
    const std::string_view name = arg.name, word = arg.dtype_word, op = spec_.name;
    const auto below = [&](const char* symbol) { return dims.at(symbol) - 1; };
    const auto up_to = [&](std::int64_t last) {
      return [this, last](std::size_t) { return random_.integer(0, last); };
    };
    const std::int64_t columns = a.ndim > 0 ? a.shape[a.ndim - 1] : 1;
    if (name == "swa" || name == "extra" || (name == "rows" && op == "kv_unpack")) {
      const auto rows = random_.kv_rows(static_cast<std::size_t>(a.shape[0]));
      std::copy(rows.begin(), rows.end(), static_cast<std::uint8_t*>(a.data));
    } else if (name == "ik") {
      const auto n = static_cast<std::size_t>(a.shape[0]);
      const auto rows = columns == 132 ? random_.index_fp8_rows(n) : random_.index_rows(n);
      std::copy(rows.begin(), rows.end(), static_cast<std::uint8_t*>(a.data));
    } else if (name == "swa_idx" || name == "extra_idx") {
      // One in five is a pad; an awkward row has nothing else.
      const std::int64_t last = below(name == "swa_idx" ? "S" : "E");
      each<std::int32_t>(a, [&](std::size_t i) {
        const bool empty = kind_ == Inputs::awkward && i / columns % 6 == 0;
        return empty || random_.integer(0, 4) == 0 ? -1 : random_.integer(0, last);
      });
    } else if (name == "pos") {
      each<std::int64_t>(a, up_to((1 << 20) - 1));
    } else if (name == "token" || name == "history" || name == "anchor" || name == "draft") {
      each<std::int64_t>(a, up_to(below("V")));
    } else if (name == "map") {
      each<std::int64_t>(a, up_to(99091));
    } else if (name == "mult") {
      each<std::int64_t>(a, [&](std::size_t) { return random_.integer(1, 1LL << 46); });
    } else if (name == "prime") {
      each<std::int64_t>(a, [](std::size_t i) { return 15999999 + 2 * static_cast<int>(i); });
    } else if (name == "count") {
      each<std::int64_t>(a, up_to(dims.at("N")));
    } else if (name == "table" && op == "hash_gate") {
      each<std::int32_t>(a, up_to(below("E")));
    } else if (name == "ids" && op == "experts") {
      // Awkward: all rows want the same experts.
      each<std::int32_t>(a, [&](std::size_t i) {
        return kind_ == Inputs::awkward ? static_cast<std::int64_t>(i % columns)
                                        : random_.integer(0, below("E"));
      });
    } else if (name == "ids") {
      each<std::int64_t>(a, up_to(below("N")));
    } else if (name == "temp") {
      each<float>(a, [](std::size_t i) { return i % 2 == 0 ? 0.0 : 0.7; });
    } else if (name == "uniform" || name == "coins") {
      each<float>(a, [&](std::size_t) { return (random_.integer(0, 999'998) + 1) * 1e-6; });
    } else if (name == "sink") {
      each<float>(a, [&](std::size_t i) {
        return i % 4 == 3 ? -std::numeric_limits<double>::infinity() : random_.normal();
      });
    } else if (name.ends_with("_scale") && word == "f32") {
      each<float>(a, [&](std::size_t) { return std::ldexp(1.0, -8 - random_.integer(0, 3)); });
    } else if (word == "e4m3") {
      each<std::uint8_t>(
          a, [&](std::size_t) { return random_.integer(0, 126) | random_.integer(0, 1) << 7; });
    } else if (word == "ue8m0") {
      each<std::uint8_t>(a, [&](std::size_t) { return random_.integer(120, 124); });
    } else if (word == "fp4") {
      each<std::uint8_t>(a, up_to(255));
    } else if (word == "bf16") {
      const bool rows = std::string_view(arg.shape).substr(0, 1) == "T" || name == "x";
      const double scale = rows ? 1.0 : 1.0 / std::sqrt(static_cast<double>(columns));
      each<std::uint16_t>(a, [&](std::size_t i) {
        return reference::to_bf16(rows ? activation(i / columns, i % columns)
                                       : scale * random_.normal());
      });
    } else {
      const double scale = name == "fn" ? 1.0 / std::sqrt(static_cast<double>(columns)) : 1.0;
      each<float>(a, [&](std::size_t i) {
        return name == "fn" || name == "bias" ? scale * random_.normal()
                                              : activation(i / columns, i % columns);
      });
    }
  }

  const host::OpSpec& spec_;
  host::OpArgs args_;
  Random random_;
  Inputs kind_;
  std::vector<std::vector<std::uint64_t>> memory_;
};

inline const host::OpSpec& spec_of(const OpCase& one) {
  for (const host::OpSpec& op : host::op_table()) {
    if (std::string_view(op.name) == one.op &&
        std::string_view(op.models).find(one.model) != std::string_view::npos) {
      // "v4" is in "v41" too.
      const std::string models = std::string(" ") + op.models + " ";
      if (models.find(std::string(" ") + one.model + " ") != models.npos) return op;
    }
  }
  throw host::OpError(std::string("no operation ") + one.op);
}

}  // namespace lowlat::testing
