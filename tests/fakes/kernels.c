/* A kernel library of four operations on one array x (f32), for tests of lowlat._kernels:
 *   scale    y = 2 x, and writes every output but the last element of each
 *   fault    plans like scale, then says LOWLAT_FAULT
 *   decline  LOWLAT_UNSUPPORTED
 *   invalid  LOWLAT_INVALID
 * and of no model: the platform "absent" is LOWLAT_UNSUPPORTED, any other finds the configuration
 * LOWLAT_INVALID.
 * FAKE_ABI_VERSION replaces the header's version. */
#include <lowlat/kernels.h>
#include <string.h>

#ifndef FAKE_ABI_VERSION
#define FAKE_ABI_VERSION LOWLAT_KERNELS_ABI_VERSION
#endif

static const char* last_error = "";

uint32_t lowlat_kernels_abi_version(void) { return FAKE_ABI_VERSION; }

const char* lowlat_last_error(void) { return last_error; }

const char* lowlat_devices(void) {
  return "{\"nvidia\": {\"built\": false, \"refusal\": \"\", \"devices\": [], \"peers\": []}, "
         "\"amd\": {\"built\": false, \"refusal\": \"\", \"devices\": [], \"peers\": []}}";
}

lowlat_status lowlat_model_create(const char* platform, const lowlat_model_config* config,
                                  lowlat_model** out_model) {
  (void)config;
  (void)out_model;
  const int absent = strcmp(platform, "absent") == 0;
  last_error = absent ? "no model on absent" : "the configuration is empty";
  return absent ? LOWLAT_UNSUPPORTED : LOWLAT_INVALID;
}

void lowlat_model_destroy(lowlat_model* model) { (void)model; }

const char* lowlat_op_list(void) { return "[{\"name\": \"scale\"}]"; }

static int64_t count(const lowlat_array* array) {
  int64_t product = 1;
  for (uint32_t dim = 0; dim < array->ndim; ++dim) product *= array->shape[dim];
  return product;
}

lowlat_status lowlat_op_plan(const char* op, const char* model, const char* platform,
                             const lowlat_array* inputs, int32_t num_inputs,
                             lowlat_array* out_outputs, int32_t* out_num_outputs) {
  static const char* const names[] = {"f32", "bf16", "u8", "i64"};
  static const uint32_t dtypes[] = {LOWLAT_F32, LOWLAT_BF16, LOWLAT_U8, LOWLAT_I64};
  (void)model;
  (void)platform;
  if (strcmp(op, "decline") == 0) {
    last_error = "not built";
    return LOWLAT_UNSUPPORTED;
  }
  if (strcmp(op, "invalid") == 0 || num_inputs != 1 || strcmp(inputs[0].name, "x") != 0 ||
      inputs[0].dtype != LOWLAT_F32) {
    last_error = "needed one array x of f32";
    return LOWLAT_INVALID;
  }
  for (int i = 0; i < 4; ++i) {
    out_outputs[i] = inputs[0];
    out_outputs[i].name = names[i];
    out_outputs[i].dtype = dtypes[i];
    out_outputs[i].data = NULL;
  }
  *out_num_outputs = 4;
  return LOWLAT_OK;
}

lowlat_status lowlat_op_run(const char* op, const char* model, const char* platform,
                            const lowlat_array* inputs, int32_t num_inputs, lowlat_array* outputs,
                            int32_t num_outputs) {
  (void)model;
  (void)platform;
  (void)num_inputs;
  if (strcmp(op, "fault") == 0) {
    last_error = "a wait expired";
    return LOWLAT_FAULT;
  }
  const float* x = inputs[0].data;
  for (int32_t i = 0; i < num_outputs; ++i) {
    for (int64_t at = 0; at + 1 < count(&inputs[0]); ++at) {
      switch (outputs[i].dtype) {
        case LOWLAT_F32: ((float*)outputs[i].data)[at] = 2 * x[at]; break;
        case LOWLAT_BF16: ((uint16_t*)outputs[i].data)[at] = (uint16_t)(2 * x[at]); break;
        case LOWLAT_U8: ((uint8_t*)outputs[i].data)[at] = (uint8_t)(2 * x[at]); break;
        default: ((int64_t*)outputs[i].data)[at] = (int64_t)(2 * x[at]); break;
      }
    }
  }
  return LOWLAT_OK;
}

/* No model is made, so nothing that takes one is ever asked. */
#define NEVER(name, ...)                    \
  lowlat_status name(__VA_ARGS__) {         \
    last_error = "the fake hosts no model"; \
    return LOWLAT_UNSUPPORTED;              \
  }
#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif
NEVER(lowlat_hosted_create, const char* platform, const lowlat_model_config* config,
      const lowlat_hosting* hosting, lowlat_model** out_model)
NEVER(lowlat_model_tensor, const lowlat_model* model, int32_t tensor_idx,
      lowlat_tensor_spec* out_spec)
NEVER(lowlat_model_bind, lowlat_model* model, const char* name, const lowlat_tensor* tensor)
NEVER(lowlat_peer_export, lowlat_model* model, lowlat_peer_handle* out_handle)
NEVER(lowlat_peer_import, lowlat_model* model, int32_t peer_rank, const lowlat_peer_handle* handle)
NEVER(lowlat_model_ready, lowlat_model* model)
NEVER(lowlat_pools_bind, lowlat_model* model, const lowlat_pools* pools)
NEVER(lowlat_hosted_step_launch, lowlat_model* model, const lowlat_hosted_step* step, void* stream)
NEVER(lowlat_hosted_draft_launch, lowlat_model* model, const lowlat_hosted_draft* draft,
      void* stream)
NEVER(lowlat_propose_launch, lowlat_model* model, const lowlat_proposal* proposal, void* stream)
NEVER(lowlat_synchronize, lowlat_model* model, uint64_t budget_ns)
NEVER(lowlat_status_read, const lowlat_model* model, lowlat_status_words* out_words)
int32_t lowlat_model_num_tensors(const lowlat_model* model) { return 0; }
uint64_t lowlat_model_own_bytes(const lowlat_model* model) { return 0; }
uint64_t lowlat_model_catalogue_digest(const lowlat_model* model) { return 0; }
const char* lowlat_model_catalogue(const lowlat_model* model) { return ""; }
const char* lowlat_stage_name(uint32_t stage) { return ""; }
void lowlat_abort(lowlat_model* model) {}
