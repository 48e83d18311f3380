#include "host/nvidia/fused_base.hpp"

#include "fused/compress.hpp"

namespace lowlat::host::cuda {

namespace fused = lowlat::nvidia::fused;

void Reasons::need(std::int64_t seen, std::int64_t needed, const char* name) {
  if (seen == needed) return;
  add(std::string(name) + " is " + std::to_string(seen) + ", needed " + std::to_string(needed));
}

void Reasons::need_ranks(int seen, std::initializer_list<int> needed) {
  std::string all;
  for (const int ranks : needed) {
    if (seen == ranks) return;
    const bool last = ranks == *(needed.end() - 1);
    all += (all.empty() ? "" : last ? " or " : ", ") + std::to_string(ranks);
  }
  add("tp_size is " + std::to_string(seen) + ", needed " + all);
}

void Reasons::need_sms(int device, int needed) {
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  if (sms >= needed) return;
  add("the device has " + std::to_string(sms) + " SMs, needed " + std::to_string(needed));
}

void Reasons::need_vocab(const shape::RuntimeShape& shape) {
  if (shape.kVocabLocal % 16 != 0) add("vocab is no multiple of 16 on a rank");
}

FusedBase::FusedBase(const lowlat_model_config& model_config,
                     const shape::RuntimeShape& model_shape,
                     const lowlat::persistent::ModelWeights& model_weights,
                     const ExchangeRegion& region, std::uint32_t kernel)
    : config(model_config),
      shape(model_shape),
      weights(model_weights),
      port(region.port(model_config.wait_budget_ns, kernel)),
      step_epoch(region.step_epoch()) {}

std::uint64_t FusedBase::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : pieces) bytes += piece.bytes();
  return bytes;
}

fused::HyperWeights FusedBase::laid_head(const lowlat::persistent::HcWeights& head) {
  constexpr int kOutputs = 24, kStreams = shape::kNumStreams, kScales = 3;
  const std::int64_t width = std::int64_t{kStreams} * shape.kHidden;
  const auto laid = [&](const float* from, std::int64_t count, std::int64_t all) {
    auto* const out = take<float>(all);
    check(cudaMemcpy(out, from, static_cast<std::size_t>(count) * sizeof(float),
                     cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
    return out;
  };
  return {laid(head.fn, kStreams * width, kOutputs * width), laid(head.base, kStreams, kOutputs),
          laid(head.scale, 1, kScales)};
}

void FusedBase::launch_head_product(const fused::StepRows& rows, const std::uint16_t* x,
                                    float* partial, fused::Gate x_done, cudaStream_t stream) const {
  fused::CompressParams product = {};
  product.rows = rows;
  product.x = x;
  product.matrices[0] = {weights.head, shape.kVocabLocal};
  product.partial = partial;
  product.x_done = x_done;
  const bool programmatic = x_done.word != nullptr;
  check(fused::launch_compress_product(product, shape.kHidden, programmatic, stream), "the head");
}

fused::DraftProposalsParams FusedBase::proposals(int batch_size, const float* base,
                                                 const std::int64_t* anchors,
                                                 std::int64_t* tokens) const {
  fused::DraftProposalsParams out = {};
  out.port = port;
  out.batch_size = batch_size;
  out.vocab_shard = shape.kVocabLocal;
  out.w1 = weights.markov_embed;
  out.w2 = weights.markov_head;
  out.base = base;
  out.base_pitch = shape.kVocabLocal;
  out.anchors = anchors;
  out.anchor_pitch = 1;
  out.tokens = tokens;
  return out;
}

}  // namespace lowlat::host::cuda
