// A hosted model for Python: configuration as dicts under the ABI's names, tensors as addresses.
// Nothing is computed and nothing is copied.
#include "py/hosted.hpp"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lowlat/kernels.h"
#include "py/status.hpp"
#include "py/watch.hpp"

namespace lowlat::py_face {
namespace {

namespace py = pybind11;

constexpr std::array kDtypes = {"u8", "i32", "i64", "f32", "bf16", "e4m3", "ue8m0", "fp4x2"};
constexpr std::array kLayouts = {"row_major", "kv_paged", "index_paged", "marlin"};

template <std::size_t n>
std::uint32_t number_of(const std::array<const char*, n>& names, const std::string& word,
                        const char* what) {
  for (std::size_t i = 0; i < n; ++i) {
    if (word == names[i]) return static_cast<std::uint32_t>(i);
  }
  throw py::value_error(std::string(what) + " is \"" + word + "\", which the kernels do not know");
}

// Copies fields of a dict; every one is needed, and finish() refuses what nobody took.
class Fields {
 public:
  Fields(const py::dict& dict, const char* what) : dict_(dict), what_(what) {}

  py::handle at(const char* name) {
    if (!dict_.contains(name)) {
      throw py::value_error(std::string(what_) + " has no " + name);
    }
    ++taken_;
    return dict_[name];
  }
  template <class T>
  void operator()(const char* name, T& out) {
    try {
      out = at(name).cast<T>();
    } catch (const py::cast_error&) {
      throw py::value_error(std::string(what_) + "." + name + " is " +
                            py::repr(dict_[name]).cast<std::string>() + ", of another type");
    }
  }
  void finish() const {
    if (taken_ == dict_.size()) return;
    throw py::value_error(std::string(what_) + " has " + std::to_string(dict_.size()) +
                          " fields; needed " + std::to_string(taken_));
  }

 private:
  const py::dict& dict_;
  const char* what_;
  std::size_t taken_ = 0;
};

template <class T, std::size_t n>
void copy_list(py::handle list, T (&out)[n], const char* name) {
  const auto values = list.cast<std::vector<T>>();
  if (values.size() > n) {
    throw py::value_error(std::string(name) + " has " + std::to_string(values.size()) +
                          " values; needed at most " + std::to_string(n));
  }
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
}

lowlat_model_config config_of(const py::dict& dict) {
  lowlat_model_config c{};
  c.struct_bytes = sizeof c;
  Fields take(dict, "config");
  take("kind", c.kind);
  take("hidden", c.hidden);
  take("num_layers", c.num_layers);
  take("vocab", c.vocab);
  take("num_heads", c.num_heads);
  take("head_dim", c.head_dim);
  take("rope_dim", c.rope_dim);
  take("q_lora", c.q_lora);
  take("o_groups", c.o_groups);
  take("o_lora", c.o_lora);
  take("window", c.window);
  take("num_experts", c.num_experts);
  take("experts_per_token", c.experts_per_token);
  take("moe_intermediate", c.moe_intermediate);
  take("index_heads", c.index_heads);
  take("index_dim", c.index_dim);
  take("index_topk", c.index_topk);
  take("candidate_layer", c.candidate_layer);
  take("candidate_blocks", c.candidate_blocks);
  take("candidate_block_size", c.candidate_block_size);
  take("scale_block", c.scale_block);
  take("sinkhorn_iters", c.sinkhorn_iters);
  take("norm_eps", c.norm_eps);
  take("hc_eps", c.hc_eps);
  take("swiglu_limit", c.swiglu_limit);
  take("routed_scaling", c.routed_scaling);
  take("rope_theta", c.rope_theta);
  take("compress_rope_theta", c.compress_rope_theta);
  take("yarn_factor", c.yarn_factor);
  take("yarn_beta_fast", c.yarn_beta_fast);
  take("yarn_beta_slow", c.yarn_beta_slow);
  take("yarn_original_positions", c.yarn_original_positions);
  take("max_positions", c.max_positions);
  const auto layers = take.at("layers").cast<std::vector<py::dict>>();
  if (layers.size() > LOWLAT_MAX_LAYERS) {
    throw py::value_error("config.layers has " + std::to_string(layers.size()) +
                          " layers; needed at most " + std::to_string(LOWLAT_MAX_LAYERS));
  }
  for (std::size_t i = 0; i < layers.size(); ++i) {
    Fields layer(layers[i], "config.layers[..]");
    layer("ratio", c.layers[i].ratio);
    layer("kv_source", c.layers[i].kv_source);
    layer("index_source", c.layers[i].index_source);
    layer("candidate_source", c.layers[i].candidate_source);
    layer("engram", c.layers[i].engram);
    layer("hash_gate", c.layers[i].hash_gate);
    layer.finish();
  }
  take("num_engrams", c.num_engrams);
  take("engram_head_dim", c.engram_head_dim);
  take("engram_pad_token", c.engram_pad_token);
  take("image_token", c.image_token);
  const auto primes = take.at("engram_primes").cast<std::vector<py::object>>();
  const auto factors = take.at("engram_multipliers").cast<std::vector<py::object>>();
  if (primes.size() > LOWLAT_MAX_ENGRAMS || factors.size() > LOWLAT_MAX_ENGRAMS) {
    throw py::value_error("config has more than " + std::to_string(LOWLAT_MAX_ENGRAMS) +
                          " Engram tables");
  }
  for (std::size_t table = 0; table < primes.size(); ++table) {
    const auto sizes = primes[table].cast<std::vector<py::object>>();
    for (std::size_t i = 0; i < sizes.size() && i < LOWLAT_ENGRAM_NGRAMS; ++i) {
      copy_list(sizes[i], c.engram_primes[table][i], "config.engram_primes");
    }
  }
  for (std::size_t table = 0; table < factors.size(); ++table) {
    copy_list(factors[table], c.engram_multipliers[table], "config.engram_multipliers");
  }
  take("num_draft_stages", c.num_draft_stages);
  take("draft_block", c.draft_block);
  take("draft_mask_token", c.draft_mask_token);
  take("markov_rank", c.markov_rank);
  take("draft_experts", c.draft_experts);
  take("draft_experts_per_token", c.draft_experts_per_token);
  copy_list(take.at("draft_target_layers"), c.draft_target_layers, "config.draft_target_layers");
  take("tp_rank", c.tp_rank);
  take("tp_size", c.tp_size);
  copy_list(take.at("widths"), c.widths, "config.widths");
  c.num_widths = static_cast<std::int32_t>(py::len(dict["widths"]));
  take("max_batch", c.max_batch);
  take("max_rows", c.max_rows);
  take("page_size", c.page_size);
  take("num_pages", c.num_pages);
  take("state_ring", c.state_ring);
  take("wait_budget_ns", c.wait_budget_ns);
  take.finish();
  return c;
}

lowlat_hosting hosting_of(const py::dict& dict) {
  lowlat_hosting hosting{};
  hosting.struct_bytes = sizeof hosting;
  Fields take(dict, "hosting");
  std::string layout;
  take("expert_layout", layout);
  hosting.expert_layout = number_of(kLayouts, layout, "expert_layout");
  take("bf16_wo_a", hosting.bf16_wo_a);
  take("proposals", hosting.proposals);
  take("stages", hosting.stages);
  take.finish();
  return hosting;
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// One tensor as Python gives it: address, shape, dtype.
using Given = std::tuple<std::uintptr_t, std::vector<std::int64_t>, std::string>;

lowlat_tensor tensor_of(const std::string& name, const Given& given, std::uint32_t layout) {
  const auto& [address, shape, dtype] = given;
  if (shape.empty() || shape.size() > LOWLAT_MAX_DIMS) {
    throw py::value_error(name + " has " + std::to_string(shape.size()) +
                          " dimensions; needed 1 .. " + std::to_string(LOWLAT_MAX_DIMS));
  }
  lowlat_tensor tensor{};
  tensor.struct_bytes = sizeof tensor;
  tensor.dtype = number_of(kDtypes, dtype, name.c_str());
  tensor.layout = layout;
  tensor.ndim = static_cast<std::uint32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    stride *= shape[i];
  }
  tensor.data = at<void>(address);
  return tensor;
}

class HostedModel {
 public:
  HostedModel(const std::string& platform, const py::dict& config, const py::dict& hosting) {
    const lowlat_model_config c = config_of(config);
    const lowlat_hosting h = hosting_of(hosting);
    require_ok(lowlat_hosted_create(platform.c_str(), &c, &h, &model_));
  }
  ~HostedModel() { lowlat_model_destroy(model_); }
  HostedModel(const HostedModel&) = delete;
  HostedModel& operator=(const HostedModel&) = delete;

  const lowlat_model* get() const { return model_; }

  py::list tensors() const {
    py::list out;
    for (int i = 0; i < lowlat_model_num_tensors(model_); ++i) {
      const lowlat_tensor_spec spec = spec_of(i);
      py::dict one;
      one["name"] = spec.name;
      one["dtype"] = kDtypes.at(spec.dtype);
      one["layout"] = kLayouts.at(spec.layout);
      one["pool"] = spec.role == LOWLAT_POOL;
      one["shape"] = std::vector<std::int64_t>(spec.shape, spec.shape + spec.ndim);
      one["shard_dim"] = spec.shard_dim;  // of the published tensor, -1: none
      out.append(one);
    }
    return out;
  }

  void bind(const std::string& name, const Given& given) {
    const lowlat_tensor tensor = tensor_of(name, given, layout_of(name));
    require_ok(lowlat_model_bind(model_, name.c_str(), &tensor));
  }

  void bind_pools(int num_pages, int num_window_pages, int num_requests,
                  std::uintptr_t window_slots, std::uintptr_t history, bool split_index,
                  const std::vector<std::pair<std::string, Given>>& pools) {
    std::vector<const char*> names;
    std::vector<lowlat_tensor> tensors;
    for (const auto& [name, given] : pools) {
      names.push_back(name.c_str());
      const std::uint32_t layout = layout_of(name);
      const bool is_split = split_index && layout == LOWLAT_INDEX_PAGED;
      tensors.push_back(
          tensor_of(name, given, is_split ? std::uint32_t{LOWLAT_ROW_MAJOR} : layout));
    }
    lowlat_pools all{};
    all.struct_bytes = sizeof all;
    all.num_pages = num_pages;
    all.num_window_pages = num_window_pages;
    all.num_requests = num_requests;
    all.window_slots = at<const std::int64_t>(window_slots);
    all.history = at<std::int32_t>(history);
    all.num_tensors = static_cast<std::int32_t>(names.size());
    all.split_index = split_index ? 1 : 0;
    all.names = names.data();
    all.tensors = tensors.data();
    require_ok(lowlat_pools_bind(model_, &all));
  }

  py::bytes peer_export() {
    lowlat_peer_handle handle;
    require_ok(lowlat_peer_export(model_, &handle));
    return {reinterpret_cast<const char*>(handle.bytes), sizeof handle.bytes};
  }
  void peer_import(int peer_rank, const std::string& bytes) {
    lowlat_peer_handle handle;
    if (bytes.size() != sizeof handle.bytes) {
      throw py::value_error("a peer's handle has " + std::to_string(bytes.size()) +
                            " bytes; needed " + std::to_string(sizeof handle.bytes));
    }
    bytes.copy(reinterpret_cast<char*>(handle.bytes), sizeof handle.bytes);
    require_ok(lowlat_peer_import(model_, peer_rank, &handle));
  }
  void ready() { require_ok(lowlat_model_ready(model_)); }

  void step(const std::string& mode, int batch_size, int tokens_per_request, int page_table_stride,
            int num_table_pages, std::uintptr_t token_ids, std::uintptr_t positions,
            std::uintptr_t slots, std::uintptr_t requests, std::uintptr_t page_table,
            std::uintptr_t hidden, std::uintptr_t features, std::uintptr_t streams,
            std::uintptr_t stream) {
    constexpr std::array kModes = {"decode", "target_verify"};
    lowlat_hosted_step step{};
    step.struct_bytes = sizeof step;
    step.mode = number_of(kModes, mode, "mode");
    step.batch_size = batch_size;
    step.tokens_per_request = tokens_per_request;
    step.page_table_stride = page_table_stride;
    step.num_table_pages = num_table_pages;
    step.token_ids = at<const std::int64_t>(token_ids);
    step.positions = at<const std::int64_t>(positions);
    step.slots = at<const std::int64_t>(slots);
    step.requests = at<const std::int64_t>(requests);
    step.page_table = at<const std::int32_t>(page_table);
    step.hidden = at<std::uint16_t>(hidden);
    step.features = at<std::uint16_t>(features);
    step.streams = at<std::uint16_t>(streams);
    require_ok(lowlat_hosted_step_launch(model_, &step, at<void>(stream)));
  }

  void draft(int batch_size, int window_stride, std::uintptr_t token_ids, std::uintptr_t positions,
             std::uintptr_t key_slots, std::uintptr_t window, std::uintptr_t hidden,
             std::uintptr_t stream) {
    lowlat_hosted_draft draft{};
    draft.struct_bytes = sizeof draft;
    draft.batch_size = batch_size;
    draft.window_stride = window_stride;
    draft.token_ids = at<const std::int64_t>(token_ids);
    draft.positions = at<const std::int64_t>(positions);
    draft.key_slots = at<const std::int32_t>(key_slots);
    draft.window = at<const std::int32_t>(window);
    draft.hidden = at<std::uint16_t>(hidden);
    require_ok(lowlat_hosted_draft_launch(model_, &draft, at<void>(stream)));
  }

  void propose(int batch_size, std::uintptr_t hidden, std::uintptr_t anchors,
               std::uintptr_t temperature, std::uintptr_t noise_offset, std::uint64_t noise_key,
               std::uintptr_t draft_tokens, std::uintptr_t draft_logits, std::uintptr_t stream) {
    lowlat_proposal proposal{};
    proposal.struct_bytes = sizeof proposal;
    proposal.batch_size = batch_size;
    proposal.hidden = at<const std::uint16_t>(hidden);
    proposal.anchors = at<const std::int64_t>(anchors);
    proposal.temperature = at<const float>(temperature);
    proposal.noise_offset = at<const std::int64_t>(noise_offset);
    proposal.noise_key = noise_key;
    proposal.draft_tokens = at<std::int64_t>(draft_tokens);
    proposal.draft_logits = at<float>(draft_logits);
    require_ok(lowlat_propose_launch(model_, &proposal, at<void>(stream)));
  }

  void synchronize(std::uint64_t budget_ns) {
    lowlat_status status = LOWLAT_OK;
    {
      const py::gil_scoped_release unlocked;
      status = lowlat_synchronize(model_, budget_ns);
    }
    require_ok(status);
  }
  void abort() { lowlat_abort(model_); }
  py::dict status() const {
    lowlat_status_words words{};
    words.struct_bytes = sizeof words;
    require_ok(lowlat_status_read(model_, &words));
    py::dict out;
    out["state"] = words.state;
    out["kernel"] = words.kernel;
    out["stage"] = lowlat_stage_name(words.stage);
    out["peer"] = words.peer;
    out["place"] = words.place;
    out["epoch"] = words.epoch;
    return out;
  }

  std::uint64_t own_bytes() const { return lowlat_model_own_bytes(model_); }
  std::uint64_t catalogue_digest() const { return lowlat_model_catalogue_digest(model_); }
  std::string catalogue() const { return lowlat_model_catalogue(model_); }

 private:
  lowlat_tensor_spec spec_of(int tensor_idx) const {
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    require_ok(lowlat_model_tensor(model_, tensor_idx, &spec));
    return spec;
  }
  // An unknown name is refused by the library.
  std::uint32_t layout_of(const std::string& name) const {
    for (int i = 0; i < lowlat_model_num_tensors(model_); ++i) {
      const lowlat_tensor_spec spec = spec_of(i);
      if (name == spec.name) return spec.layout;
    }
    return LOWLAT_ROW_MAJOR;
  }

  lowlat_model* model_ = nullptr;
};

}  // namespace

void define_hosted_model(py::module_& module) {
  using namespace py::literals;
  py::class_<HostedModel>(
      module, "HostedModel",
      "A model inside an engine that keeps caches and head: lowlat_hosted_create() and what "
      "follows it in kernels.h. Addresses are integers, 0 for none; a tensor is (address, shape, "
      "dtype), contiguous. ValueError for a refusal, RuntimeError for a fault, in one line.")
      .def(py::init<const std::string&, const py::dict&, const py::dict&>(), "platform"_a,
           "config"_a, "hosting"_a)
      .def("tensors", &HostedModel::tensors,
           "What must be bound: dicts of name, dtype, layout, pool, shape, shard_dim.")
      .def("bind", &HostedModel::bind, "name"_a, "tensor"_a)
      .def("bind_pools", &HostedModel::bind_pools, py::kw_only(), "num_pages"_a,
           "num_window_pages"_a, "num_requests"_a, "window_slots"_a, "history"_a, "split_index"_a,
           "pools"_a)
      .def("peer_export", &HostedModel::peer_export)
      .def("peer_import", &HostedModel::peer_import, "peer_rank"_a, "handle"_a)
      .def("ready", &HostedModel::ready)
      .def("step", &HostedModel::step, py::kw_only(), "mode"_a, "batch_size"_a,
           "tokens_per_request"_a, "page_table_stride"_a, "num_table_pages"_a, "token_ids"_a,
           "positions"_a, "slots"_a, "requests"_a, "page_table"_a, "hidden"_a, "features"_a,
           "streams"_a, "stream"_a)
      .def("draft", &HostedModel::draft, py::kw_only(), "batch_size"_a, "window_stride"_a,
           "token_ids"_a, "positions"_a, "key_slots"_a, "window"_a, "hidden"_a, "stream"_a)
      .def("propose", &HostedModel::propose, py::kw_only(), "batch_size"_a, "hidden"_a, "anchors"_a,
           "temperature"_a, "noise_offset"_a, "noise_key"_a, "draft_tokens"_a, "draft_logits"_a,
           "stream"_a)
      .def("synchronize", &HostedModel::synchronize, "budget_ns"_a)
      .def("abort", &HostedModel::abort)
      .def("status", &HostedModel::status)
      .def_property_readonly("own_bytes", &HostedModel::own_bytes)
      .def_property_readonly("catalogue_digest", &HostedModel::catalogue_digest)
      .def_property_readonly("catalogue", &HostedModel::catalogue);
  py::class_<Watch>(
      module, "Watch",
      "A thread that reads a hosted model's status words until it is stopped or sees a fault. Then "
      "it writes a post-mortem, a JSON object with `about` in it, to `path`, a line to standard "
      "error, and sends SIGQUIT to `stop_pid` (0: to nobody), and `grace_ms` later SIGKILL to it "
      "and to this process (0: to none).")
      .def(py::init([](const HostedModel& model, int rank, std::string about, std::string path,
                       int stop_pid, int grace_ms) {
             return std::make_unique<Watch>(model.get(), rank, std::move(about), std::move(path),
                                            stop_pid, std::chrono::milliseconds(grace_ms));
           }),
           py::keep_alive<1, 2>(), "model"_a, py::kw_only(), "rank"_a, "about"_a, "path"_a,
           "stop_pid"_a, "grace_ms"_a)
      .def("set_about", &Watch::set_about, py::call_guard<py::gil_scoped_release>(), "about"_a)
      .def_static(
          "words",
          [](std::uint32_t state, std::uint32_t kernel, std::uint32_t stage, std::int32_t peer,
             std::uint32_t place, std::uint64_t epoch, const std::string& catalogue, int rank) {
            return words_of_fault(
                {sizeof(lowlat_status_words), state, kernel, stage, peer, place, epoch}, catalogue,
                rank);
          },
          py::kw_only(), "state"_a, "kernel"_a, "stage"_a, "peer"_a, "place"_a, "epoch"_a,
          "catalogue"_a, "rank"_a, "The line of a fault with these status words.")
      .def("stop", &Watch::stop, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("has_seen_fault", &Watch::has_seen_fault);
}

}  // namespace lowlat::py_face
