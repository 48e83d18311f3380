// The C entry points of the model: each one line over host::Model, behind the border.
#include <memory>
#include <utility>

#include "host/error.hpp"
#include "host/model.hpp"
#include "platform/scalar.hpp"
// The platform comes before every stage.
#include "stages/wait.hpp"

struct lowlat_model {
  std::unique_ptr<lowlat::host::Model> owned;
  lowlat::host::Model& model;
};

namespace {

using lowlat::host::border;
using lowlat::host::Error;
using lowlat::host::Schedule;

template <class T>
T& some(T* pointer, const char* name) {
  if (pointer == nullptr) throw Error(LOWLAT_INVALID, std::string(name) + " is NULL");
  return *pointer;
}

lowlat_model* made(const char* platform, const lowlat_model_config& config,
                   const lowlat_hosting* hosting) {
  auto model = lowlat::host::make_model(platform, config, hosting);
  lowlat::host::Model& inner = *model;
  return new lowlat_model{std::move(model), inner};
}

}  // namespace

extern "C" {

uint32_t lowlat_kernels_abi_version(void) { return LOWLAT_KERNELS_ABI_VERSION; }

lowlat_status lowlat_model_create(const char* platform, const lowlat_model_config* config,
                                  lowlat_model** out_model) {
  return border([&] {
    some(platform, "platform");
    some(config, "config");
    some(out_model, "out_model");
    *out_model = made(platform, *config, nullptr);
  });
}
lowlat_status lowlat_hosted_create(const char* platform, const lowlat_model_config* config,
                                   const lowlat_hosting* hosting, lowlat_model** out_model) {
  return border([&] {
    some(platform, "platform");
    some(config, "config");
    some(out_model, "out_model");
    *out_model = made(platform, *config, &some(hosting, "hosting"));
  });
}

void lowlat_model_destroy(lowlat_model* model) { delete model; }

int32_t lowlat_model_num_tensors(const lowlat_model* model) {
  return model == nullptr ? 0 : static_cast<int32_t>(model->model.tensors().size());
}

lowlat_status lowlat_model_tensor(const lowlat_model* model, int32_t tensor_idx,
                                  lowlat_tensor_spec* out_spec) {
  return border([&] {
    const auto& tensors = some(model, "model").model.tensors();
    auto& out = some(out_spec, "out_spec");
    if (tensor_idx < 0 || tensor_idx >= static_cast<int32_t>(tensors.size())) {
      throw Error(LOWLAT_INVALID, "tensor_idx is " + std::to_string(tensor_idx) + "; needed 0 .. " +
                                      std::to_string(tensors.size() - 1));
    }
    if (out.struct_bytes != sizeof out) {
      throw Error(LOWLAT_INVALID, "lowlat_tensor_spec.struct_bytes is " +
                                      std::to_string(out.struct_bytes) + "; needed " +
                                      std::to_string(sizeof out));
    }
    lowlat_tensor_spec spec = tensors[tensor_idx].spec;
    spec.name = tensors[tensor_idx].name.c_str();
    out = spec;
  });
}

lowlat_status lowlat_model_bind(lowlat_model* model, const char* name,
                                const lowlat_tensor* tensor) {
  return border([&] { some(model, "model").model.bind(name, some(tensor, "tensor")); });
}

uint64_t lowlat_model_own_bytes(const lowlat_model* model) {
  return model == nullptr ? 0 : model->model.own_bytes();
}
uint64_t lowlat_model_catalogue_digest(const lowlat_model* model) {
  return model == nullptr ? 0 : model->model.catalogue_digest();
}
const char* lowlat_model_catalogue(const lowlat_model* model) {
  return model == nullptr ? "" : model->model.catalogue();
}

lowlat_status lowlat_model_alloc(lowlat_model* model, lowlat_memory_kind kind, uint64_t bytes,
                                 void** out_memory) {
  return border([&] {
    auto& inner = some(model, "model").model;
    void*& out = some(out_memory, "out_memory");
    if (kind != LOWLAT_MEMORY_DEVICE && kind != LOWLAT_MEMORY_SHARED) {
      throw Error(LOWLAT_INVALID, "memory kind is " + std::to_string(static_cast<int>(kind)));
    }
    out = inner.allocate(kind, bytes);
  });
}
lowlat_status lowlat_model_write(lowlat_model* model, void* dst, const void* src, uint64_t bytes) {
  return border([&] {
    auto& inner = some(model, "model").model;
    if (bytes > 0) inner.write(&some(static_cast<char*>(dst), "dst"), src, bytes);
  });
}
lowlat_status lowlat_model_read(const lowlat_model* model, void* dst, const void* src,
                                uint64_t bytes) {
  return border([&] {
    const auto& inner = some(model, "model").model;
    if (bytes > 0) inner.read(&some(static_cast<char*>(dst), "dst"), src, bytes);
  });
}

lowlat_status lowlat_peer_export(lowlat_model* model, lowlat_peer_handle* out_handle) {
  return border([&] { some(model, "model").model.peer_export(some(out_handle, "out_handle")); });
}
lowlat_status lowlat_peer_import(lowlat_model* model, int32_t peer_rank,
                                 const lowlat_peer_handle* handle) {
  return border([&] { some(model, "model").model.peer_import(peer_rank, some(handle, "handle")); });
}
lowlat_status lowlat_model_ready(lowlat_model* model) {
  return border([&] { some(model, "model").model.ready(); });
}

lowlat_status lowlat_step_launch(lowlat_model* model, const lowlat_step* step, void* stream) {
  return border([&] {
    some(model, "model").model.launch_step(some(step, "step"), Schedule::persistent, stream);
  });
}
lowlat_status lowlat_plain_step_launch(lowlat_model* model, const lowlat_step* step, void* stream) {
  return border(
      [&] { some(model, "model").model.launch_step(some(step, "step"), Schedule::plain, stream); });
}
lowlat_status lowlat_draft_launch(lowlat_model* model, const lowlat_draft* draft, void* stream) {
  return border([&] {
    some(model, "model").model.launch_draft(some(draft, "draft"), Schedule::persistent, stream);
  });
}
lowlat_status lowlat_plain_draft_launch(lowlat_model* model, const lowlat_draft* draft,
                                        void* stream) {
  return border([&] {
    some(model, "model").model.launch_draft(some(draft, "draft"), Schedule::plain, stream);
  });
}
lowlat_status lowlat_accept_launch(lowlat_model* model, const lowlat_accept* accept, void* stream) {
  return border([&] { some(model, "model").model.launch_accept(some(accept, "accept"), stream); });
}

lowlat_status lowlat_pools_bind(lowlat_model* model, const lowlat_pools* pools) {
  return border([&] { some(model, "model").model.bind_pools(some(pools, "pools")); });
}
lowlat_status lowlat_hosted_step_launch(lowlat_model* model, const lowlat_hosted_step* step,
                                        void* stream) {
  return border([&] { some(model, "model").model.launch_hosted(some(step, "step"), stream); });
}
lowlat_status lowlat_hosted_draft_launch(lowlat_model* model, const lowlat_hosted_draft* draft,
                                         void* stream) {
  return border([&] { some(model, "model").model.launch_hosted(some(draft, "draft"), stream); });
}
lowlat_status lowlat_propose_launch(lowlat_model* model, const lowlat_proposal* proposal,
                                    void* stream) {
  return border(
      [&] { some(model, "model").model.launch_proposal(some(proposal, "proposal"), stream); });
}

lowlat_status lowlat_synchronize(lowlat_model* model, uint64_t budget_ns) {
  return border([&] { some(model, "model").model.synchronize(budget_ns); });
}

lowlat_status lowlat_status_read(const lowlat_model* model, lowlat_status_words* out_words) {
  return border([&] { some(model, "model").model.read_status(some(out_words, "out_words")); });
}

const char* lowlat_stage_name(uint32_t stage) {
  static const char* const kNames[] = {
      "none",          "embed_sum",     "engram_gather",      "attention_sum",       "moe_sum",
      "logits_gather", "argmax_gather", "draft_token_gather", "draft_logits_gather", "hand_off"};
  static_assert(sizeof kNames / sizeof *kNames ==
                static_cast<std::size_t>(lowlat::scalar::stages::StageId::count));
  return stage < sizeof kNames / sizeof *kNames ? kNames[stage] : "unknown";
}

void lowlat_abort(lowlat_model* model) {
  if (model != nullptr) model->model.abort();
}

}  // extern "C"
