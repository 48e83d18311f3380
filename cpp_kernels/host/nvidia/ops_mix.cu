// Launches of the operations that mix and norm rows: a block a row.
#include "host/nvidia/ops.cuh"
#include "host/op/models.hpp"
#include "stages/hc.hpp"
#include "stages/norm.hpp"
#include "stages/rank_sum.hpp"

namespace lowlat::host::cuda {
namespace {

using Stats = stages::HcStats<Block>;
using RmsNorm = stages::RmsNorm<Block>;

float norm_eps(const DeviceCall& call) {
  return static_cast<float>(model_rules(call.model()).norm_eps);
}

// rows: fp32 [T, 4 hidden] of scratch.
__global__ void stats_kernel(float* out_pre, float* out_post, float* out_comb, float* rows,
                             const std::uint16_t* residual, const float* fn, const float* base,
                             const float* scale, int hidden, float eps, float hc_eps) {
  __shared__ Stats::Scratch scratch;
  __shared__ stages::HcParams params;
  const std::int64_t t = blockIdx.x, n = std::int64_t{4} * hidden;
  float* row = rows + t * n;
  stages::expand_bf16<Block>(row, residual + t * n, static_cast<int>(n));
  plat::block_sync();
  float mix[stages::kHcOutputs];
  Stats::mix(mix, row, fn, hidden, eps, scratch);
  Stats::params(params, mix, base, scale, hc_eps, kSinkhornIters);
  plat::block_sync();
  const int i = plat::thread_idx();
  if (i < stages::kHcStreams) {
    out_pre[4 * t + i] = params.pre[i];
    out_post[4 * t + i] = params.post[i];
  }
  if (i < 16) out_comb[16 * t + i] = params.comb[i / 4][i % 4];
}

// rows: fp32 [T, hidden] of scratch.
__global__ void combine_norm_kernel(std::uint16_t* out, float* rows, const std::uint16_t* residual,
                                    const float* pre, const std::uint16_t* gain, int hidden,
                                    float eps, stages::HcStatistic statistic) {
  __shared__ RmsNorm::Scratch scratch;
  const std::int64_t t = blockIdx.x;
  stages::hc_combine_norm<Block>(out + t * hidden, residual + 4 * t * hidden, pre + 4 * t, gain,
                                 hidden, eps, rows + t * hidden, scratch, statistic);
}

__global__ void post_kernel(std::uint16_t* out, const std::uint16_t* residual,
                            const std::uint16_t* y, const float* post, const float* comb,
                            int hidden) {
  const std::int64_t t = blockIdx.x;
  float streams[stages::kHcStreams][stages::kHcStreams];
  for (int i = 0; i < 16; ++i) streams[i / 4][i % 4] = comb[16 * t + i];
  stages::hc_post<Block>(out + 4 * t * hidden, residual + 4 * t * hidden, y + t * hidden,
                         post + 4 * t, streams, hidden, 0, hidden);
}

// rows: fp32 [T, 4 hidden] of scratch.
__global__ void head_kernel(std::uint16_t* out, float* rows, const std::uint16_t* residual,
                            const float* fn, const float* base, const float* scale, int hidden,
                            float eps, float hc_eps) {
  __shared__ Stats::Scratch scratch;
  const std::int64_t t = blockIdx.x, n = std::int64_t{4} * hidden;
  float* row = rows + t * n;
  stages::expand_bf16<Block>(row, residual + t * n, static_cast<int>(n));
  plat::block_sync();
  float mix[stages::kHcStreams], pre[stages::kHcStreams];
  Stats::mix(mix, row, fn, hidden, eps, scratch, stages::kHcStreams);
  Stats::pre(pre, mix, base, scale[0], hc_eps);
  stages::hc_combine<Block>(residual + t * n, pre, hidden,
                            [&](int h, float v) { out[t * hidden + h] = stages::to_bf16(v); });
}

// rows: fp32 [rows, n] of scratch; gain may be null.
__global__ void norm_kernel(std::uint16_t* out, float* rows, const std::uint16_t* x,
                            const std::uint16_t* gain, int n, float eps) {
  __shared__ RmsNorm::Scratch scratch;
  const std::int64_t first = std::int64_t{blockIdx.x} * n;
  stages::expand_bf16<Block>(rows + first, x + first, n);
  plat::block_sync();
  if (gain == nullptr) {
    RmsNorm::run(out + first, rows + first, n, eps, scratch);
  } else {
    RmsNorm::run(out + first, rows + first, gain, n, eps, scratch);
  }
}

// A block a row of n.
__global__ void rank_sum_kernel(std::uint16_t* out, const float* partial, int num_ranks,
                                std::int64_t total, int n) {
  const std::int64_t first = std::int64_t{blockIdx.x} * n;
  stages::rank_sum<Block>(out + first, num_ranks, 0, n,
                          [=](int rank, int i) { return partial[rank * total + first + i]; });
}

}  // namespace

void launch_hc_stats(DeviceCall& call) {
  launch(call, stats_kernel, dim3(call.size("T")), call.out<float>("pre"), call.out<float>("post"),
         call.out<float>("comb"), call.scratch<float>(4 * call.dim("T") * call.dim("H")),
         call.in<std::uint16_t>("residual"), call.in<float>("fn"), call.in<float>("base"),
         call.in<float>("scale"), call.size("H"), norm_eps(call), static_cast<float>(kHcEps));
}

void launch_hc_combine_norm(DeviceCall& call) {
  launch(call, combine_norm_kernel, dim3(call.size("T")), call.out<std::uint16_t>("x"),
         call.scratch<float>(call.dim("T") * call.dim("H")), call.in<std::uint16_t>("residual"),
         call.in<float>("pre"), call.in<std::uint16_t>("gain"), call.size("H"), norm_eps(call),
         model_rules(call.model()).hc_statistic);
}

void launch_hc_post(DeviceCall& call) {
  launch(call, post_kernel, dim3(call.size("T")), call.out<std::uint16_t>("residual"),
         call.in<std::uint16_t>("residual"), call.in<std::uint16_t>("y"), call.in<float>("post"),
         call.in<float>("comb"), call.size("H"));
}

void launch_hc_head(DeviceCall& call) {
  launch(call, head_kernel, dim3(call.size("T")), call.out<std::uint16_t>("h"),
         call.scratch<float>(4 * call.dim("T") * call.dim("H")), call.in<std::uint16_t>("residual"),
         call.in<float>("fn"), call.in<float>("base"), call.in<float>("scale"), call.size("H"),
         norm_eps(call), static_cast<float>(kHcEps));
}

void launch_rms_norm(DeviceCall& call) {
  launch(call, norm_kernel, dim3(call.size("T")), call.out<std::uint16_t>("y"),
         call.scratch<float>(call.dim("T") * call.dim("H")), call.in<std::uint16_t>("x"),
         call.in<std::uint16_t>("gain"), call.size("H"), norm_eps(call));
}

void launch_head_norm(DeviceCall& call) {
  const std::int64_t rows = call.dim("T") * call.dim("h");
  launch(call, norm_kernel, dim3(static_cast<unsigned>(rows)), call.out<std::uint16_t>("x"),
         call.scratch<float>(rows * call.dim("D")), call.in<std::uint16_t>("x"), nullptr,
         call.size("D"), norm_eps(call));
}

void launch_rank_sum(DeviceCall& call) {
  launch(call, rank_sum_kernel, dim3(call.size("T")), call.out<std::uint16_t>("y"),
         call.in<float>("partial"), call.size("R"), call.dim("T") * call.dim("H"), call.size("H"));
}

}  // namespace lowlat::host::cuda
