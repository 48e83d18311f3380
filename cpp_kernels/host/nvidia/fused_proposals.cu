#include "host/nvidia/fused_proposals.hpp"

#include <algorithm>
#include <vector>

#include "fused/compress.hpp"
#include "fused/draft.hpp"
#include "fused/step.hpp"
#include "host/model.hpp"
#include "shape/dsv41_flash.hpp"

namespace lowlat::host::cuda {
namespace {

namespace fused = lowlat::nvidia::fused;
using Served = shape::Dsv41Flash<1>;
constexpr int kRows = fused::kMaxDraftBatch * fused::kDraftSteps;

}  // namespace

struct FusedProposals::State {
  shape::RuntimeShape shape;
  lowlat::persistent::ModelWeights weights;
  fused::ExchangePort port;
  std::uint64_t* step_epoch;
  std::vector<Memory> pieces;
  std::uint16_t* x;
  float *sums, *base;
  std::int64_t *offset, *anchors;

  template <class T>
  T* take(std::int64_t count) {
    Memory& piece = pieces.emplace_back(static_cast<std::size_t>(count) * sizeof(T));
    check(cudaMemset(piece.data(), 0, piece.bytes()), "cudaMemset");
    return static_cast<T*>(piece.data());
  }
};

std::string FusedProposals::refusal(const lowlat_model_config& c, const shape::RuntimeShape& s,
                                    int device) {
  std::string out;
  const auto add = [&](const std::string& reason) { out += (out.empty() ? "" : "; ") + reason; };
  if (c.kind != LOWLAT_V41) {
    add("kind is " + std::to_string(c.kind) + ", needed LOWLAT_V41");
    return out;
  }
  const auto need = [&](std::int64_t seen, std::int64_t needed, const char* name) {
    if (seen == needed) return;
    add(std::string(name) + " is " + std::to_string(seen) + ", needed " + std::to_string(needed));
  };
  need(c.hidden, Served::kHidden, "hidden");
  need(c.draft_block, fused::kDraftSteps, "draft_block");
  need(c.markov_rank, fused::kMarkovRank, "markov_rank");
  if (c.tp_size != 1 && c.tp_size != 2 && c.tp_size != 4) {
    add("tp_size is " + std::to_string(c.tp_size) + ", needed 1, 2 or 4");
  }
  if (s.kVocabLocal % 16 != 0) add("vocab is no multiple of 16 on a rank");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
        "cudaDeviceGetAttribute");
  if (sms < fused::kMaxDraftBlocks) {
    add("the device has " + std::to_string(sms) + " SMs, needed " +
        std::to_string(fused::kMaxDraftBlocks));
  }
  return out;
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
                               const ExchangeRegion& region, std::uint32_t kernel)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.shape = shape;
  s.weights = weights;
  s.port = region.port(config.wait_budget_ns, kernel);
  s.step_epoch = region.step_epoch();
  s.x = s.take<std::uint16_t>(std::int64_t{kRows} * Served::kHidden);
  s.sums = s.take<float>(std::int64_t{2} * kRows * shape.kVocabLocal);
  s.base = s.take<float>(std::int64_t{kRows} * shape.kVocabLocal);
  s.offset = s.take<std::int64_t>(1);
  s.anchors = s.take<std::int64_t>(fused::kMaxDraftBatch);
  check(cudaDeviceSynchronize(), "the proposals' memory");
  // Loads every kernel, see FusedStep.
  const Stream stream;
  for (int batch = 1; batch <= fused::kMaxDraftBatch; ++batch) {
    lowlat_proposal proposal{};
    proposal.batch_size = batch;
    proposal.temperature = s.base;
    proposal.draft_logits = s.base;
    check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "a capture");
    launch(proposal, stream.get());
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(stream.get(), &graph), "a capture");
    cudaGraphDestroy(graph);
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
  check(fused::launch_norm({s.port, rows, proposal.hidden, s.weights.draft_norm, s.shape.kNormEps,
                            s.x, proposal.noise_offset, s.offset, proposal.batch_size,
                            s.shape.kVocab, proposal.anchors, s.anchors},
                           stream),
        "the draft's norm");
  fused::CompressParams product = {};
  product.rows = {rows, fused::kDraftSteps, nullptr, nullptr};
  product.x = s.x;
  product.matrices[0] = {s.weights.head, s.shape.kVocabLocal};
  product.partial = s.sums;
  check(fused::launch_compress_product(product, s.shape.kHidden, false, stream), "the head");
  check(fused::launch_base({rows, s.shape.kVocabLocal, s.sums, s.base}, stream),
        "the draft's logits");
  fused::DraftProposalsParams params = {};
  params.port = s.port;
  params.batch_size = proposal.batch_size;
  params.vocab_shard = s.shape.kVocabLocal;
  params.w1 = s.weights.markov_embed;
  params.w2 = s.weights.markov_head;
  params.base = s.base;
  params.base_pitch = s.shape.kVocabLocal;
  params.anchors = s.anchors;
  params.anchor_pitch = 1;
  params.temperatures = proposal.temperature;
  params.noise_key = proposal.noise_key;
  params.noise_offset = samples ? s.offset : nullptr;
  params.tokens = proposal.draft_tokens;
  if (samples) params.logits[s.port.tp_rank] = proposal.draft_logits;
  check(fused::launch_draft_proposals(params, fused::kMaxDraftBlocks, false, stream), "proposals");
  std::uint64_t exchanges = fused::kDraftSteps;
  if (samples && proposal.draft_logits != nullptr) {
    const fused::GatherParams gather = {s.port,
                                        fused::kDraftSteps,
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

std::uint64_t FusedProposals::bytes() const {
  std::uint64_t bytes = 0;
  for (const Memory& piece : state_->pieces) bytes += piece.bytes();
  return bytes;
}

}  // namespace lowlat::host::cuda
