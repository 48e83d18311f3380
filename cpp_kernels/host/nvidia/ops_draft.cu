// Launches of speculative decoding: the Markov draft and the acceptance rule.
#include "host/nvidia/linear.cuh"
#include "host/nvidia/ops.cuh"
#include "stages/accept.hpp"
#include "stages/draft.hpp"

namespace lowlat::host::cuda {
namespace {

// A block a request: w1's row of its previous token.
__global__ void embed_kernel(float* out, const std::uint16_t* w1, const std::int64_t* previous,
                             std::int64_t pitch, int rank) {
  const std::int64_t b = blockIdx.x;
  expand_row(out + b * rank, w1 + previous[b * pitch] * rank, rank);
}

// z = base + bf(bias), a request's rows `pitch` apart.
struct AddBias {
  float* z;
  const float* base;
  std::int64_t pitch;
  LOWLAT_DEVICE void operator()(int b, int v, float bias) const {
    z[b * pitch + v] = base[b * pitch + v] + stages::round_bf16(bias);
  }
};

// The best of what all threads hold, in every thread. Syncs inside and at the end.
LOWLAT_DEVICE stages::Best block_best(stages::Best own, stages::Best (&shared)[kThreads]) {
  const int thread = plat::thread_idx();
  shared[thread] = own;
  plat::block_sync();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (thread < half) shared[thread] = stages::best_of(shared[thread], shared[thread + half]);
    plat::block_sync();
  }
  const stages::Best best = shared[0];
  plat::block_sync();
  return best;
}

// A block a request; each thread has a range of ids.
__global__ void propose_kernel(std::int64_t* tokens, const float* z, const float* temp,
                               const float* uniform, std::int64_t pitch, int vocab, int steps) {
  __shared__ stages::Best shared[kThreads];
  const std::int64_t b = blockIdx.x;
  const int part = (vocab + kThreads - 1) / kThreads, begin = part * plat::thread_idx();
  const int end = begin + part < vocab ? begin + part : vocab;
  stages::Best best = stages::kNoBest;
  if (begin < end) {
    const float* noise = uniform + b * pitch;
    best = stages::draft_select(z + b * pitch + begin, end - begin, begin, temp[b],
                                [=](std::int32_t id) { return noise[id]; });
  }
  best = block_best(best, shared);
  if (plat::thread_idx() == 0) tokens[b * steps] = best.id;
}

// scratch: a request's g ids, and 2 vocab floats.
__global__ void accept_kernel(std::int64_t* accepted, std::int64_t* next,
                              const std::int64_t* drafts, const float* target_logits,
                              const float* draft_logits, const float* temp, const float* coins,
                              int g, int vocab, std::int32_t* ids, float* scratch) {
  if (plat::thread_idx() != 0) return;
  const std::int64_t b = blockIdx.x;
  std::int32_t* draft = ids + b * g;
  for (int i = 0; i < g; ++i) draft[i] = static_cast<std::int32_t>(drafts[b * g + i]);
  const float* target = target_logits + b * (g + 1) * vocab;
  const stages::Accepted result =
      temp[b] == 0.0f
          ? stages::accept_greedy(draft, target, g, vocab)
          : stages::accept_sampled(draft, target, draft_logits + b * g * vocab, g, vocab, temp[b],
                                   coins + b * (g + 1), scratch + 2 * b * vocab);
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
    launch(call, embed_kernel, dim3(batch), 0, embedding, w1, previous, s == 0 ? 1 : steps, rank);
    launch_linear(call, embedding, batch, rank,
                  stages::Bf16Weights{call.in<std::uint16_t>("w2"), rank}, vocab,
                  AddBias{z, call.in<float>("base") + std::int64_t{s} * vocab, pitch});
    launch(call, propose_kernel, dim3(batch), 0, tokens + s, z, call.in<float>("temp"),
           call.in<float>("uniform") + std::int64_t{s} * vocab, pitch, vocab, steps);
  }
}

void launch_accept(DeviceCall& call) {
  const std::int64_t batch = call.dim("B");
  launch(call, accept_kernel, dim3(static_cast<unsigned>(batch)), 0,
         call.out<std::int64_t>("accepted"), call.out<std::int64_t>("next"),
         call.in<std::int64_t>("draft"), call.in<float>("target_logits"),
         call.in<float>("draft_logits"), call.in<float>("temp"), call.in<float>("coins"),
         call.size("g"), call.size("V"), call.scratch<std::int32_t>(batch * call.dim("g")),
         call.scratch<float>(2 * batch * call.dim("V")));
}

}  // namespace lowlat::host::cuda
