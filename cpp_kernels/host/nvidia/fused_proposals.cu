#include "host/nvidia/fused_proposals.hpp"

#include <algorithm>

#include "fused/draft.hpp"
#include "fused/exchange_mix.hpp"
#include "fused/step.hpp"
#include "host/model.hpp"
#include "host/nvidia/fused_base.hpp"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::host::cuda {
namespace {

namespace fused = lowlat::nvidia::fused;
constexpr int kRows = fused::kMaxDraftBatch * fused::kDraftSteps;

}  // namespace

struct FusedProposals::State : FusedBase {
  using FusedBase::FusedBase;

  std::uint16_t* x = nullptr;
  float *sums = nullptr, *base = nullptr;
  std::int64_t *offset = nullptr, *anchors = nullptr;
  // V4's alone.
  fused::HyperWeights head_hc = {};
  float* mix = nullptr;
  int first_index = 0;

  bool is_v4() const { return config.kind == LOWLAT_V4; }
  void launch_x(const lowlat_proposal& proposal, int rows, cudaStream_t stream) const;
};

// x of the head, and copies of the offset and the anchors. What V4's last stage leaves are streams.
void FusedProposals::State::launch_x(const lowlat_proposal& proposal, int rows,
                                     cudaStream_t stream) const {
  if (is_v4()) {
    fused::ExchangeMixParams params = {};
    params.port = port;
    params.num_rows = rows;
    params.residual_in = proposal.hidden;
    params.next = head_hc;
    params.gain = weights.draft_norm;
    params.norm_eps = shape.kNormEps;
    params.hc_eps = shape.kHcEps;
    params.sinkhorn_iters = shape.kSinkhornIters;
    params.mix_out = rows > fused::kMaxMixClusters ? mix : nullptr;  // nobody reads it
    params.x = x;
    check(fused::launch_exchange_mix(params, false, stream), "the draft's streams");
  }
  check(fused::launch_norm({port, rows, is_v4() ? nullptr : proposal.hidden, weights.draft_norm,
                            shape.kNormEps, x, proposal.noise_offset, offset, proposal.batch_size,
                            shape.kVocab, proposal.anchors, anchors},
                           stream),
        "the draft's norm");
}

std::string FusedProposals::refusal(const lowlat_model_config& c, const shape::RuntimeShape& s,
                                    int device) {
  Reasons reasons;
  const bool is_v4 = c.kind == LOWLAT_V4;
  reasons.need(c.hidden, is_v4 ? shape::Dsv4Flash<1>::kHidden : shape::Dsv41Flash<1>::kHidden,
               "hidden");
  reasons.need(c.draft_block, fused::kDraftSteps, "draft_block");
  reasons.need(c.markov_rank, fused::kMarkovRank, "markov_rank");
  reasons.need_ranks(c.tp_size, {1, 2, 4});
  reasons.need_vocab(s);
  reasons.need_sms(device, fused::kMaxDraftBlocks);
  return reasons.text();
}

std::int64_t FusedProposals::box_packets(const lowlat_model_config& c,
                                         const shape::RuntimeShape& s) {
  const int rows = std::min(c.max_batch, fused::kMaxDraftBatch) * fused::kDraftSteps;
  return std::max(
      fused::gather_packets(rows, s.kVocabLocal),
      std::int64_t{fused::draft_packets(fused::kMaxDraftBlocks, fused::kMaxDraftBatch)});
}

FusedProposals::FusedProposals(const lowlat_model_config& config, const shape::RuntimeShape& shape,
                               const lowlat::persistent::ModelWeights& weights,
                               const ExchangeRegion& region, std::uint32_t kernel, int first_index)
    : state_(std::make_unique<State>(config, shape, weights, region, kernel)) {
  State& s = *state_;
  s.first_index = first_index;
  s.x = s.take<std::uint16_t>(std::int64_t{kRows} * shape.kHidden);
  if (s.is_v4()) {
    s.head_hc = s.laid_head(weights.draft_hc_head);
    s.mix = s.take<float>(kRows * fused::kMixStride);
  }
  s.sums = s.take<float>(std::int64_t{2} * kRows * shape.kVocabLocal);
  s.base = s.take<float>(std::int64_t{kRows} * shape.kVocabLocal);
  s.offset = s.take<std::int64_t>(1);
  s.anchors = s.take<std::int64_t>(fused::kMaxDraftBatch);
  wait_for(nullptr, "the proposals' memory");
  for (int batch = 1; batch <= fused::kMaxDraftBatch; ++batch) {
    lowlat_proposal proposal{};
    proposal.batch_size = batch;
    proposal.temperature = s.base;
    proposal.draft_logits = s.base;
    load_kernels_of([&](cudaStream_t stream) { launch(proposal, stream); });
  }
}

FusedProposals::~FusedProposals() = default;

bool FusedProposals::serves(const lowlat_proposal& proposal) const {
  return proposal.batch_size <= fused::kMaxDraftBatch;
}

void FusedProposals::launch(const lowlat_proposal& proposal, cudaStream_t stream) const {
  const State& s = *state_;
  const int rows = proposal.batch_size * fused::kDraftSteps;
  const bool samples = proposal.temperature != nullptr;
  check(fused::launch_begin_step(s.step_epoch, 0, nullptr, 0, stream), "proposals");
  s.launch_x(proposal, rows, stream);
  const fused::StepRows step_rows = {rows, fused::kDraftSteps, nullptr, nullptr};
  s.launch_head_product(step_rows, s.x, s.sums, {}, stream);
  check(fused::launch_base({rows, s.shape.kVocabLocal, s.sums, s.base}, stream),
        "the draft's logits");
  fused::DraftProposalsParams params =
      s.proposals(proposal.batch_size, s.base, s.anchors, proposal.draft_tokens);
  params.exchange_index = s.first_index;
  params.temperatures = proposal.temperature;
  params.noise_key = proposal.noise_key;
  params.noise_offset = samples ? s.offset : nullptr;
  if (samples) params.logits[s.port.tp_rank] = proposal.draft_logits;
  check(fused::launch_draft_proposals(params, fused::kMaxDraftBlocks, false, stream), "proposals");
  std::uint64_t exchanges = fused::kDraftSteps;
  if (samples && proposal.draft_logits != nullptr) {
    const fused::GatherParams gather = {s.port,
                                        s.first_index + fused::kDraftSteps,
                                        rows,
                                        fused::kDraftSteps,
                                        s.shape.kVocabLocal,
                                        proposal.temperature,
                                        proposal.draft_logits};
    check(fused::launch_gather(gather, stream), "proposals' logits");
    ++exchanges;
  }
  check(fused::launch_begin_step(s.step_epoch, exchanges, nullptr, 0, stream), "proposals");
}

std::uint64_t FusedProposals::bytes() const { return state_->bytes(); }

}  // namespace lowlat::host::cuda
