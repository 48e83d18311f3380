// Launches of speculative decoding: the Markov draft and the acceptance rule.
#include "host/nvidia/ops.cuh"
#include "stages/accept.hpp"
#include "stages/draft.hpp"

namespace lowlat::host::cuda {
namespace {

// A block a request: w1's row of its previous token.
__global__ void embed_kernel(float* out, const std::uint16_t* w1, const std::int64_t* previous,
                             std::int64_t pitch, int rank) {
  const std::int64_t b = blockIdx.x;
  stages::expand_bf16<Block>(out + b * rank, w1 + previous[b * pitch] * rank, rank);
}

// A block a range of the vocabulary.
constexpr int kTokensOfBlock = 64;
__global__ void logits_kernel(float* z, const float* base, std::int64_t pitch,
                              const float* embedding, stages::Bf16Weights w2, int batch, int rank,
                              int vocab) {
  const int begin = kTokensOfBlock * static_cast<int>(blockIdx.x);
  const int end = begin + kTokensOfBlock < vocab ? begin + kTokensOfBlock : vocab;
  stages::markov_logits<Block>(z, base, pitch, embedding, w2, batch, rank, begin, end, nullptr);
}

// A block a request.
__global__ void propose_kernel(std::int64_t* tokens, const float* z, const float* temp,
                               const float* uniform, std::int64_t pitch, int vocab, int steps) {
  __shared__ stages::BlockBest<Block>::Scratch scratch;
  const std::int64_t b = blockIdx.x;
  const float* noise = uniform + b * pitch;
  const stages::Best best = stages::draft_select<Block>(
      z + b * pitch, vocab, 0, temp[b], [=](std::int32_t id) { return noise[id]; }, scratch);
  if (plat::thread_idx() == 0) tokens[b * steps] = best.id;
}

// A block a request. ids: of each, its g drafts; memory: Acceptance's floats.
__global__ void accept_kernel(std::int64_t* accepted, std::int64_t* next,
                              const std::int64_t* drafts, const float* target_logits,
                              const float* draft_logits, const float* temp, const float* coins,
                              int g, int vocab, std::int32_t* ids, float* memory) {
  using Acceptance = stages::Acceptance<Block>;
  __shared__ Acceptance::Scratch scratch;
  const std::int64_t b = blockIdx.x;
  std::int32_t* draft = ids + b * g;
  for (int i = plat::thread_idx(); i < g; i += kThreads) {
    draft[i] = static_cast<std::int32_t>(drafts[b * g + i]);
  }
  plat::block_sync();
  const float* target = target_logits + b * (g + 1) * vocab;
  const stages::Accepted result =
      temp[b] == 0.0f ? Acceptance::greedy(draft, target, g, vocab, scratch)
                      : Acceptance::sampled(draft, target, draft_logits + b * g * vocab, g, vocab,
                                            temp[b], coins + b * (g + 1),
                                            memory + b * Acceptance::memory_floats(vocab), scratch);
  if (plat::thread_idx() != 0) return;
  accepted[b] = result.num_drafts;
  next[b] = result.next;
}

}  // namespace

void launch_markov_draft(DeviceCall& call) {
  const int batch = call.size("B"), vocab = call.size("V"), rank = call.size("R");
  const int steps = call.size("g");
  const std::int64_t pitch = std::int64_t{steps} * vocab;
  const auto* w1 = call.in<std::uint16_t>("w1");
  auto* tokens = call.out<std::int64_t>("tokens");
  float* embedding = call.scratch<float>(std::int64_t{batch} * rank);
  for (int s = 0; s < steps; ++s) {
    float* z = call.out<float>("logits") + std::int64_t{s} * vocab;
    const std::int64_t* previous = s == 0 ? call.in<std::int64_t>("anchor") : tokens + s - 1;
    launch(call, embed_kernel, dim3(batch), embedding, w1, previous, s == 0 ? 1 : steps, rank);
    launch(call, logits_kernel, dim3((vocab + kTokensOfBlock - 1) / kTokensOfBlock), z,
           call.in<float>("base") + std::int64_t{s} * vocab, pitch, embedding,
           stages::Bf16Weights{call.in<std::uint16_t>("w2"), rank}, batch, rank, vocab);
    launch(call, propose_kernel, dim3(batch), tokens + s, z, call.in<float>("temp"),
           call.in<float>("uniform") + std::int64_t{s} * vocab, pitch, vocab, steps);
  }
}

void launch_accept(DeviceCall& call) {
  const std::int64_t batch = call.dim("B");
  launch(call, accept_kernel, dim3(static_cast<unsigned>(batch)),
         call.out<std::int64_t>("accepted"), call.out<std::int64_t>("next"),
         call.in<std::int64_t>("draft"), call.in<float>("target_logits"),
         call.in<float>("draft_logits"), call.in<float>("temp"), call.in<float>("coins"),
         call.size("g"), call.size("V"), call.scratch<std::int32_t>(batch * call.dim("g")),
         call.scratch<float>(batch * stages::Acceptance<Block>::memory_floats(call.size("V"))));
}

}  // namespace lowlat::host::cuda
