// host/op/registry.hpp: the table of operations: what each takes, gives and promises, and how it
// runs.
//
// An operation's file (host/op/ops_*.cpp) describes its arrays and gives two functions: one that
// calls reference/ and one that calls the stage on the scalar platform; its launches on the
// platform nvidia are in host/nvidia/ops_*.cu. Checks that the shapes and dtypes cannot say
// (ranges, codes, ratios) are in its `check`.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "host/error.hpp"
#include "lowlat/kernels.h"

namespace lowlat::host {

// A refusal: what() is the one line a user reads. It begins with the array's name where one is at
// fault.
struct OpError : Error {
  explicit OpError(const std::string& message) : Error(LOWLAT_INVALID, message) {}
};

// Shape is a comma list of dimensions, "" for an array of no dimensions: a number ("512"), a symbol
// ("T"), a number times a symbol ("4H", "24D"), and any of these over a number or symbol ("H/2",
// "K/b"; must divide). A symbol's first bare use binds it; one without a bare use is solved from
// the first dimension that fixes it ("24D" binds D, "K/b" binds b once K is known). T is always
// held to 1 .. 64; other limits belong in `check`.
struct ArgSpec {
  const char* name;
  lowlat_dtype dtype;
  // What the array means: "bf16", "e4m3", "ue8m0", "fp4", "f32", "i32", "i64" or "u8".
  const char* dtype_word;
  const char* shape;
  bool optional;
  const char* about;
};

using Dims = std::map<std::string, std::int64_t>;

// The arrays of one call, already checked against their specs.
class OpArgs {
 public:
  OpArgs(const char* model, Dims dims) : model_(model), dims_(std::move(dims)) {}

  const std::string& model() const { return model_; }
  std::int64_t dim(const std::string& symbol) const { return dims_.at(symbol); }
  void set_dim(const std::string& symbol, std::int64_t value) { dims_[symbol] = value; }
  const Dims& dims() const { return dims_; }

  // An input and an output may have one name: they are kept apart.
  bool has(const std::string& name) const { return inputs_.count(name) != 0; }
  template <class T>
  std::span<const T> in(const std::string& name) const {
    const auto& a = inputs_.at(name);
    return {static_cast<const T*>(a.data), static_cast<std::size_t>(count(a))};
  }
  template <class T>
  std::span<T> out(const std::string& name) const {
    const auto& a = outputs_.at(name);
    return {static_cast<T*>(a.data), static_cast<std::size_t>(count(a))};
  }
  const lowlat_array& input(const std::string& name) const { return inputs_.at(name); }
  const lowlat_array& output(const std::string& name) const { return outputs_.at(name); }
  // First element of a one-element i64 array (ratio, block, ...), or `otherwise` when it is absent.
  std::int64_t scalar(const std::string& name, std::int64_t otherwise) const {
    return has(name) ? in<std::int64_t>(name)[0] : otherwise;
  }
  void add_input(const lowlat_array& a) { inputs_[a.name] = a; }
  void add_output(const lowlat_array& a) { outputs_[a.name] = a; }

 private:
  static std::int64_t count(const lowlat_array& a) {
    std::int64_t n = 1;
    for (std::uint32_t i = 0; i < a.ndim; ++i) n *= a.shape[i];
    return n;
  }
  std::string model_;
  Dims dims_;
  std::map<std::string, lowlat_array> inputs_;
  std::map<std::string, lowlat_array> outputs_;
};

struct OpNumerics {
  const char* platforms;  // "scalar", "nvidia" or "scalar nvidia"
  const char* output;
  // "bitwise" or e.g. "rel_l2 <= 2e-3": ||out - ref|| / ||ref|| against reference.
  const char* bound;
};

// An operation whose arrays differ between models has one entry a model, next to each other; one
// whose arrays are the same has one entry for both.
struct OpSpec {
  const char* name;
  const char* models;  // "v4", "v41" or "v4 v41"
  const char* about;
  std::vector<ArgSpec> in;
  std::vector<ArgSpec> out;
  std::vector<OpNumerics> numerics;
  // Throws OpError on what the shapes cannot say; may set symbols that the outputs' shapes use.
  std::function<void(OpArgs&)> check;
  std::function<void(const OpArgs&)> reference;
  std::function<void(const OpArgs&)> scalar;
};

// Each ops_*.cpp gives its part; the order here is the order of --list.
// hc_stats, hc_combine_norm, hc_post, hc_head, rms_norm, head_norm, rank_sum
std::vector<OpSpec> ops_mix();
std::vector<OpSpec> ops_linear();     // block_linear, lm_head
std::vector<OpSpec> ops_rope_kv();    // rope, kv_pack, kv_unpack
std::vector<OpSpec> ops_attention();  // sparse_attention, compress
std::vector<OpSpec> ops_index();      // index_query, index_key, index_select, candidate_blocks
std::vector<OpSpec> ops_moe();        // gate, hash_gate, experts
std::vector<OpSpec> ops_engram();     // engram_hash, engram_lookup, engram_apply
std::vector<OpSpec> ops_draft();      // markov_draft, accept

const std::vector<OpSpec>& op_table();

// "reference", "scalar" and, in a build with CUDA, "nvidia".
std::span<const char* const> built_platforms();

// The C entry points on a spec that need not be in the table. `platform` is one of
// built_platforms(); op_plan needs no device. Throws OpError, and on nvidia what run_on_nvidia
// throws. op_run leaves `outputs` untouched when it throws.
void op_plan(const OpSpec& op, const char* model, const char* platform,
             std::span<const lowlat_array> inputs, std::vector<lowlat_array>& out_outputs);
void op_run(const OpSpec& op, const char* model, const char* platform,
            std::span<const lowlat_array> inputs, std::span<lowlat_array> outputs);

// Bytes of an array of an operation.
std::int64_t num_bytes(const lowlat_array& a);

// Helpers for `check`, so that every message has one form.
// "ids[0, 3] is 12; needed 0 .. 7 (E = 8)": every element of an i32 or i64 array, both ends
// inclusive; `why` may be empty.
void require_range(const OpArgs& args, const std::string& name, std::int64_t low, std::int64_t high,
                   const std::string& why);
// Refuses NaN and infinity by name and index; decodes bf16, e4m3 and ue8m0 by dtype_word.
void require_finite(const OpArgs& args, const OpSpec& spec, const std::string& name);
// The same for every input that is present and has such values; those of f32 and bf16 must not be
// beyond `limit` in magnitude.
void require_all_finite(const OpArgs& args, const OpSpec& spec,
                        double limit = std::numeric_limits<double>::infinity());
// "H is 100; needed a multiple of 32": the size of a symbol, its least value and what divides it.
void require_dim(const OpArgs& args, const std::string& symbol, std::int64_t least,
                 std::int64_t multiple);
void require(bool ok, const std::string& message);
// "x[1, 5]" for flat element `idx` of an array; "x" for one of no dimensions.
std::string element_name(const OpArgs& args, const std::string& name, std::int64_t idx);

}  // namespace lowlat::host
