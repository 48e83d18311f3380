// bench/model_calls.hpp: calls of the C ABI of models as programs and tests write them: what a call
// that fails throws, what a tensor's description comes to, and a step's arrays.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "lowlat/kernels.h"

namespace lowlat::bench {

// Throws the library's words where a call failed.
inline void must(lowlat_status status) {
  if (status != LOWLAT_OK) throw std::runtime_error(lowlat_last_error());
}

// Description of a model's tensor; its state now.
inline lowlat_tensor_spec spec_of(lowlat_model* model, int tensor_idx) {
  lowlat_tensor_spec spec{};
  spec.struct_bytes = sizeof spec;
  must(lowlat_model_tensor(model, tensor_idx, &spec));
  return spec;
}
inline lowlat_status_words status_of(lowlat_model* model) {
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  must(lowlat_status_read(model, &words));
  return words;
}

// Bytes of an element, by lowlat_dtype; of FP4X2 those of a pair.
inline constexpr int kDtypeBytes[] = {1, 4, 8, 4, 2, 1, 1, 1};

// Elements of a tensor, and their bytes.
inline std::int64_t count_of(const lowlat_tensor_spec& spec) {
  std::int64_t count = 1;
  for (std::uint32_t d = 0; d < spec.ndim; ++d) count *= spec.shape[d];
  return count;
}
inline std::int64_t bytes_of(const lowlat_tensor_spec& spec) {
  return count_of(spec) * kDtypeBytes[spec.dtype];
}

// A tensor as a model describes it, contiguous, in `data`.
inline lowlat_tensor dense_tensor(const lowlat_tensor_spec& spec, void* data) {
  lowlat_tensor tensor{};
  tensor.struct_bytes = sizeof tensor;
  tensor.dtype = spec.dtype;
  tensor.layout = spec.layout;
  tensor.ndim = spec.ndim;
  std::int64_t stride = 1;
  for (int d = static_cast<int>(spec.ndim) - 1; d >= 0; --d) {
    tensor.shape[d] = spec.shape[d];
    tensor.stride[d] = stride;
    stride *= spec.shape[d];
  }
  tensor.data = data;
  return tensor;
}

// A decode or verify step's arrays: of a request its pages, its state slot and, where there is
// n-gram memory, the three tokens before it, and then its rows.
struct StepRows {
  int pages_of_request, page_size;  // page_size: tokens
  std::vector<std::int32_t> tokens, positions, requests, slots, pages, state, history;

  StepRows(int pages_of_a_request, int tokens_of_page)
      : pages_of_request(pages_of_a_request), page_size(tokens_of_page) {}

  int batch_size() const { return static_cast<int>(state.size()); }
  // A row of the request that was begun last.
  void add(int token, int position) {
    const int request = batch_size() - 1;
    const int page =
        pages[static_cast<std::size_t>(request * pages_of_request + position / page_size)];
    tokens.push_back(token);
    positions.push_back(position);
    requests.push_back(request);
    slots.push_back(page * page_size + position % page_size);
  }
  // place(array) gives where the model reads it.
  template <class Place>
  lowlat_step step(int tokens_per_request, Place place) const {
    lowlat_step step{};
    step.struct_bytes = sizeof step;
    step.mode = tokens_per_request == 1 ? LOWLAT_DECODE : LOWLAT_TARGET_VERIFY;
    step.num_rows = static_cast<int>(tokens.size());
    step.batch_size = batch_size();
    step.tokens_per_request = tokens_per_request;
    step.page_table_stride = pages_of_request;
    step.token_ids = place(tokens);
    step.positions = place(positions);
    step.request_idx = place(requests);
    step.slots = place(slots);
    step.page_table = place(pages);
    step.history = history.empty() ? nullptr : place(history);
    step.state_slots = place(state);
    return step;
  }
};

}  // namespace lowlat::bench
