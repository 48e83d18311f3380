// bench/engram_case.cuh: the n-gram memory of a V4.1-Flash layer with drawn weights and a small
// table, and its kernels checked against float64 at true shapes. Shared by the bench and the GPU
// test.
#pragma once

#include "bench/index_case.cuh"
#include "fused/engram.hpp"
#include "reference/engram.hpp"

namespace lowlat::bench {

inline constexpr int kEngramOutputs = 5 * kHidden, kEngramColumns = 24, kEngramShards = 4;
inline constexpr int kTokens = 129280, kImageToken = 129264, kPadToken = 2;

struct HostEngram {
  HostFp8 wkv;
  std::vector<std::uint8_t> table, table_scale;
  std::vector<std::uint16_t> q_weight, k_weight, gain;
  std::vector<std::int64_t> token_map;
  std::int64_t multipliers[4], primes[kEngramColumns];
  std::int64_t num_rows = 0;

  explicit HostEngram(Random& random)
      : wkv(kEngramOutputs, fused::kEngramWidth, 127 - 13, random),
        q_weight(4 * kHidden),
        k_weight(4 * kHidden),
        gain(kHidden),
        token_map(kTokens) {
    // Odd numbers do for primes here: columns of about 20,000 rows keep the table small.
    for (int i = 0; i < kEngramColumns; ++i) num_rows += primes[i] = 20'011 + 2 * i;
    for (auto& m : multipliers) m = static_cast<std::int64_t>(random.bits() >> 18) | 1;
    for (auto& v : token_map) v = random.below(99'092);
    table.resize(static_cast<std::size_t>(num_rows) * 256);
    for (auto& code : table) {
      code = static_cast<std::uint8_t>(random.bits());
      if ((code & 0x7f) == 0x7f) code ^= 1;  // no NaN
    }
    table_scale.resize(static_cast<std::size_t>(num_rows) * 8);
    for (auto& scale : table_scale) scale = static_cast<std::uint8_t>(119 + random.below(3));
    for (auto* weight : {&q_weight, &k_weight, &gain}) {
      for (auto& v : *weight) v = bf16(1.0 + 0.2 * random.normal());
    }
  }
};
struct DeviceEngram {
  DeviceFp8 wkv;
  Buffer<std::uint8_t> table, table_scale;
  Buffer<std::uint16_t> q_weight, k_weight, gain;
  Buffer<std::int64_t> token_map;
  explicit DeviceEngram(const HostEngram& from)
      : wkv(from.wkv),
        table(from.table),
        table_scale(from.table_scale),
        q_weight(from.q_weight),
        k_weight(from.k_weight),
        gain(from.gain),
        token_map(from.token_map) {}
};

struct EngramBuffers {
  int requests, tokens;
  std::vector<std::int32_t> token_ids, history, positions;
  Buffer<std::int32_t> device_ids, device_history, device_positions, slots;
  Buffer<std::uint8_t> codes;
  Buffer<float> scale, sums;

  EngramBuffers(int num_requests, int num_tokens, Random& random)
      : requests(num_requests), tokens(num_tokens) {
    for (int request = 0; request < requests; ++request) {
      // The first requests have fewer than three tokens before them.
      for (int i = 0; i < 3; ++i) history.push_back(random.below(kTokens - 16));
      for (int i = 0; i < tokens; ++i) {
        token_ids.push_back(random.below(kTokens - 16));
        positions.push_back((request < 3 ? request : 1000) + i);
      }
    }
    if (rows() > 4) token_ids[4] = kImageToken;
    device_ids = Buffer<std::int32_t>(token_ids);
    device_history = Buffer<std::int32_t>(history);
    device_positions = Buffer<std::int32_t>(positions);
    slots = Buffer<std::int32_t>(positions);
    codes = Buffer<std::uint8_t>(static_cast<std::size_t>(rows()) * fused::kEngramWidth);
    scale = Buffer<float>(static_cast<std::size_t>(192 * fused::padded_rows(rows())));
    sums = Buffer<float>(static_cast<std::size_t>(3 * rows()) * kEngramOutputs);
  }
  int rows() const { return requests * tokens; }

  fused::EngramParams params(const HostEngram& host, const DeviceEngram& w, const Activations& act,
                             int side) const {
    fused::EngramParams p = {};
    p.rows = {rows(), tokens, device_positions.get(), slots.get()};
    p.token_ids = device_ids.get();
    p.history = device_history.get();
    p.token_map = w.token_map.get();
    std::copy_n(host.multipliers, 4, p.multipliers);
    std::copy_n(host.primes, kEngramColumns, p.primes);
    p.image_token = kImageToken;
    p.pad_token = kPadToken;
    p.table.num_shards = kEngramShards;
    std::int64_t first = 0;
    for (int shard = 0, column = 0; shard < kEngramShards; ++shard) {
      p.table.first_row[shard] = first;
      p.table.codes[shard] = w.table.get() + first * 256;
      p.table.scales[shard] = w.table_scale.get() + first * 8;
      for (; column < (shard + 1) * kEngramColumns / kEngramShards; ++column) {
        first += host.primes[column];
      }
    }
    p.codes = codes.get();
    p.scale = scale.get();
    p.wkv = w.wkv.view();
    p.sums = sums.get();
    p.residual = act.residual[side].get();
    p.mix = act.mix.get();
    p.q_weight = w.q_weight.get();
    p.k_weight = w.k_weight.get();
    p.gain = w.gain.get();
    p.norm_eps = kNormEps;
    p.x = act.x.get();
    p.x_codes = act.x_codes.get();
    p.x_scale = act.x_scale.get();
    return p;
  }
};

// Failures of one step's look-up, product and application; slots: of the product's ring.
inline int check_engram(int requests, int tokens, int slots, const HostEngram& host,
                        const DeviceEngram& device) {
  Random random(static_cast<std::uint64_t>(requests) * 131 + tokens);
  const EngramBuffers buffers(requests, tokens, random);
  const int rows = buffers.rows();
  Activations act(rows, 16, 2);
  std::vector<std::uint16_t> residual(act.count(4 * kHidden));
  for (auto& v : residual) v = bf16(random.normal());
  act.residual[0].put(residual);
  std::vector<float> mix(act.mix.size());
  for (auto& v : mix) v = static_cast<float>(random.uniform());
  act.mix.put(mix);
  fused::EngramParams params = buffers.params(host, device, act, 0);
  params.slots = slots;
  const auto must = [](cudaError_t error, const char* what) {
    cuda_must(error, what);
    cuda_must(cudaDeviceSynchronize(), what);
  };
  must(fused::launch_engram_lookup(params, false, nullptr), "engram_lookup");
  must(fused::launch_engram_product(params, false, nullptr), "engram_product");
  must(fused::launch_engram_apply(params, false, nullptr), "engram_apply");

  int failures = 0;
  const auto expect = [&](const char* what, const Errors& errors, double bound) {
    const bool good = errors.rel_l2() <= bound && errors.count > 0;
    failures += good ? 0 : 1;
    std::printf("%s T=%d engram %s rel_l2 %.2e (bound %.0e), %lld of %lld differ\n",
                good ? "ok  " : "FAIL", rows, what, errors.rel_l2(), bound,
                static_cast<long long>(errors.different), static_cast<long long>(errors.count));
  };
  constexpr int kWidth = fused::kEngramWidth;
  std::vector<std::int64_t> token(buffers.token_ids.begin(), buffers.token_ids.end()),
      pos(buffers.positions.begin(), buffers.positions.end()), history;
  // The reference wants three tokens before every row.
  for (int row = 0; row < rows; ++row) {
    for (int back = 3; back >= 1; --back) {
      const int at = row % tokens - back;
      history.push_back(at >= 0 ? buffers.token_ids[row - back]
                                : buffers.history[row / tokens * 3 + 3 + at]);
    }
  }
  std::vector<std::int64_t> ids(static_cast<std::size_t>(rows) * kEngramColumns);
  reference::engram_hash(ids.data(), token.data(), history.data(), pos.data(),
                         host.token_map.data(), host.multipliers, host.primes, kImageToken, rows);
  std::vector<std::uint16_t> e(static_cast<std::size_t>(rows) * kWidth);
  reference::engram_lookup(e.data(), ids.data(), host.table.data(), host.table_scale.data(), rows,
                           256);
  std::vector<double> want_e(e.size());
  reference::quantize_activation(want_e.data(), e.data(), static_cast<std::int64_t>(e.size()), 32);
  {
    const std::vector<std::uint8_t> codes = buffers.codes.take();
    const std::vector<float> scale = buffers.scale.take();
    Errors errors;
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < kWidth; ++i) {
        const std::size_t at = static_cast<std::size_t>(row) * kWidth + i;
        errors.add(reference::from_e4m3(codes[at]) *
                       scale[static_cast<std::size_t>(i / 32 * fused::padded_rows(rows) + row)],
                   want_e[at]);
      }
    }
    expect("look-up", errors, 0.0);
  }
  const std::vector<float> parts = buffers.sums.take();
  std::vector<float> sums(static_cast<std::size_t>(rows) * kEngramOutputs);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    sums[i] = parts[i] + parts[sums.size() + i] + parts[2 * sums.size() + i];
  }
  {
    // Every some-th output, all sixteen places of a tile among them.
    constexpr int kEvery = 23, kChecked = kEngramOutputs / kEvery;
    std::vector<double> want(static_cast<std::size_t>(rows) * kChecked);
    parallel(kChecked, [&](std::int64_t i) {
      const std::int64_t n = i * kEvery;
      std::vector<double> weight(kWidth);
      for (int k = 0; k < kWidth; ++k) {
        weight[k] = reference::from_e4m3(host.wkv.codes[n * kWidth + k]) *
                    reference::from_ue8m0(host.wkv.scales[n / 32 * (kWidth / 32) + k / 32]);
      }
      for (int row = 0; row < rows; ++row) {
        double sum = 0.0;
        const double* x = &want_e[static_cast<std::size_t>(row) * kWidth];
        for (int k = 0; k < kWidth; ++k) sum += x[k] * weight[k];
        want[static_cast<std::size_t>(row * kChecked + i)] = sum;
      }
    });
    Errors errors;
    for (int row = 0; row < rows; ++row) {
      for (int i = 0; i < kChecked; ++i) {
        errors.add(sums[static_cast<std::size_t>(row) * kEngramOutputs + i * kEvery],
                   want[static_cast<std::size_t>(row * kChecked + i)]);
      }
    }
    expect("product", errors, 1e-5);
    Errors all;  // that every output was written
    for (const float v : sums) all.add(v, v);
    expect("product's outputs", all, 0.0);
  }
  // The formulas of the application in float64, on the sums that the device has.
  const std::vector<std::uint16_t> got_r = act.residual[0].take(), got_x = act.x.take();
  const std::vector<std::uint8_t> x_codes = act.x_codes.take();
  const std::vector<float> x_scale = act.x_scale.take();
  Errors streams, inputs, codes;
  for (int row = 0; row < rows; ++row) {
    const float* kv = &sums[static_cast<std::size_t>(row) * kEngramOutputs];
    const std::size_t begin = static_cast<std::size_t>(row) * 4 * kHidden;
    std::vector<double> v(kHidden, 0.0);
    for (int k = 0; k < 4; ++k) {
      double dot = 0.0, r_squares = 0.0, k_squares = 0.0;
      for (int i = 0; i < kHidden; ++i) {
        const double r = reference::from_bf16(residual[begin + k * kHidden + i]);
        const double key = reference::round_bf16(kv[k * kHidden + i]);
        dot += r * reference::from_bf16(host.q_weight[k * kHidden + i]) *
               reference::from_bf16(host.k_weight[k * kHidden + i]) * key;
        r_squares += r * r;
        k_squares += key * key;
      }
      const double s = dot / std::sqrt(r_squares / kHidden + kNormEps) /
                       std::sqrt(k_squares / kHidden + kNormEps) / std::sqrt(double{kHidden});
      const double root = std::copysign(std::sqrt(std::max(std::abs(s), 1e-6)), s);
      const double gate = 1.0 / (1.0 + std::exp(-root));
      for (int i = 0; i < kHidden; ++i) {
        double r = reference::from_bf16(residual[begin + k * kHidden + i]);
        if (buffers.token_ids[row] != kImageToken) {
          r = reference::round_bf16(r + gate * reference::round_bf16(kv[4 * kHidden + i]));
        }
        const double got = reference::from_bf16(got_r[begin + k * kHidden + i]);
        streams.add(got, r);
        v[i] += mix[static_cast<std::size_t>(row) * fused::kMixStride + k] * got;
      }
    }
    double squares = 0.0;
    for (double& u : v) {
      u = reference::round_bf16(u);
      squares += u * u;
    }
    const double norm = 1.0 / std::sqrt(squares / kHidden + kNormEps);
    for (int i = 0; i < kHidden; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * kHidden + i;
      inputs.add(reference::from_bf16(got_x[at]),
                 reference::round_bf16(v[i] * norm * reference::from_bf16(host.gain[i])));
    }
    std::vector<double> want(kHidden);
    reference::quantize_activation(want.data(), &got_x[static_cast<std::size_t>(row) * kHidden],
                                   kHidden, 32);
    for (int i = 0; i < kHidden; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * kHidden + i;
      codes.add(reference::from_e4m3(x_codes[at]) *
                    x_scale[static_cast<std::size_t>(i / 32 * act.padded + row)],
                want[i]);
    }
  }
  expect("streams", streams, 4e-3);
  expect("x", inputs, 4e-3);
  expect("codes of x", codes, 0.0);
  return failures;
}

}  // namespace lowlat::bench
