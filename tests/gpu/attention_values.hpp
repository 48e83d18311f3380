// gpu/attention_values: what the kernels of a layer's attention half have to give, in float64, and
// the values that their results stand for. The sizes are those of bench/attn_layer.hpp, the
// share of one of LOWLAT_TEST_RANKS ranks.
#pragma once

#include "bench/attn_layer.hpp"
#include "check.hpp"
#include "reference/attention.hpp"
#include "reference/kv.hpp"
#include "reference/linear.hpp"

namespace lowlat::bench {

#ifndef LOWLAT_TEST_RANKS
#define LOWLAT_TEST_RANKS 4
#endif
inline constexpr int kRanks = LOWLAT_TEST_RANKS, kHeads = 64 / kRanks, kGroups = 8 / kRanks;

// Of two arrays of values: || a - b || / || b ||; not finite where only one of two is.
inline double rel_l2(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0.0, size = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return 1e30;
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return std::sqrt(difference / std::max(size, 1e-300));
}

inline void expect(const char* what, int rows, const std::vector<double>& got,
                   const std::vector<double>& want, double bound) {
  const double error = got.size() == want.size() ? rel_l2(got, want) : 1e30;
  std::printf("T=%d %s rel_l2 %.2e (bound %.0e)\n", rows, what, error, bound);
  CHECK(error <= bound);
}

inline std::vector<double> values(const std::vector<std::uint16_t>& codes) {
  std::vector<double> out(codes.size());
  for (std::size_t i = 0; i < codes.size(); ++i) out[i] = reference::from_bf16(codes[i]);
  return out;
}
// e4m3 codes [rows, width] under scales [width / group, padded].
inline std::vector<double> values(const std::vector<std::uint8_t>& codes,
                                  const std::vector<float>& scale, int rows, int width) {
  std::vector<double> out(codes.size());
  const int padded = fused::padded_rows(rows);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < width; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * width + i;
      out[at] = reference::from_e4m3(codes[at]) *
                scale[static_cast<std::size_t>(i / kScaleGroup * padded + row)];
    }
  }
  return out;
}
inline double from_f16(std::uint16_t code) {
  const int exponent = code >> 10 & 31, fraction = code & 1023;
  const double magnitude = exponent == 0   ? std::ldexp(fraction, -24)
                           : exponent < 31 ? std::ldexp(1024 + fraction, exponent - 25)
                                           : std::numeric_limits<double>::quiet_NaN();
  return (code & 0x8000) != 0 ? -magnitude : magnitude;
}
inline std::vector<double> half_values(const std::vector<std::uint16_t>& codes,
                                       const std::vector<float>& scale, int rows, int width) {
  std::vector<double> out(codes.size());
  const int padded = fused::padded_rows(rows);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < width; ++i) {
      const std::size_t at = static_cast<std::size_t>(row) * width + i;
      out[at] =
          from_f16(codes[at]) * scale[static_cast<std::size_t>(i / kScaleGroup * padded + row)];
    }
  }
  return out;
}

// x [rows, k] times w [n, k] transposed, unrounded, [rows, n]: 32 weight rows a task.
inline std::vector<double> product(const std::vector<double>& x, const HostFp8& w, int rows, int n,
                                   int k, int x_stride, int x_first) {
  std::vector<double> y(static_cast<std::size_t>(rows) * n);
  parallel(n / 32, [&](std::int64_t tile) {
    std::vector<double> weight(static_cast<std::size_t>(k));
    double table[256];
    for (int code = 0; code < 256; ++code) {
      table[code] = reference::from_e4m3(static_cast<std::uint8_t>(code));
    }
    for (std::int64_t out = 32 * tile; out < 32 * tile + 32; ++out) {
      for (int i = 0; i < k; ++i) {
        weight[i] = table[w.codes[out * k + i]] *
                    reference::from_ue8m0(
                        w.scales[out / kScaleGroup * (k / kScaleGroup) + i / kScaleGroup]);
      }
      for (int row = 0; row < rows; ++row) {
        double sum = 0.0;
        const double* from = x.data() + static_cast<std::int64_t>(row) * x_stride + x_first;
        for (int i = 0; i < k; ++i) sum += from[i] * weight[i];
        y[static_cast<std::size_t>(row) * n + out] = sum;
      }
    }
  });
  return y;
}
inline std::vector<double> rounded(std::vector<double> v) {
  for (double& x : v) x = reference::round_bf16(x);
  return v;
}
inline std::vector<double> quantized(const std::vector<std::uint16_t>& x) {
  std::vector<double> out(x.size());
  reference::quantize_activation(out.data(), x.data(), static_cast<std::int64_t>(x.size()),
                                 kScaleGroup);
  return out;
}
inline std::vector<std::uint16_t> codes_of(const std::vector<double>& v) {
  std::vector<std::uint16_t> out(v.size());
  for (std::size_t i = 0; i < v.size(); ++i) out[i] = reference::to_bf16(v[i]);
  return out;
}

// Rows of a pool's pages, one after another.
inline std::vector<std::uint8_t> flat(const std::vector<std::uint8_t>& pool, int pages,
                                      int slots_per_page, std::int64_t page_bytes) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(pages) * slots_per_page * 584);
  for (int slot = 0; slot < pages * slots_per_page; ++slot) {
    const std::uint8_t* page = pool.data() + slot / slots_per_page * page_bytes;
    std::uint8_t* to = &out[static_cast<std::size_t>(slot) * 584];
    std::memcpy(to, page + slot % slots_per_page * 576, 576);
    std::memcpy(to + 576, page + slots_per_page * 576 + slot % slots_per_page * 8, 8);
  }
  return out;
}

// V4: q [rows, heads, 512] normed by heads.
inline void norm_heads(std::vector<double>& q) {
  for (std::size_t head = 0; head < q.size(); head += kDim) {
    double squares = 0.0;
    for (int i = 0; i < kDim; ++i) squares += q[head + i] * q[head + i];
    for (int i = 0; i < kDim; ++i) {
      q[head + i] = reference::round_bf16(q[head + i] / std::sqrt(squares / kDim + kNormEps));
    }
  }
}

// Stored rows, and which of them each row sees.
struct SeenKeys {
  std::vector<std::uint8_t> window, extra;
  const std::int32_t *window_idx, *extra_idx;
  int num_extra;
};
inline SeenKeys seen_by(const HostKeys& keys) {
  return {flat(keys.window, kNumPages, kSlotsPerPage, kPageBytes),
          flat(keys.extra, kNumPages, kSlotsPerPage, kPageBytes), keys.window_idx.data(),
          keys.extra_idx.data(), kExtra};
}

// The attention of the given q and keys, rotated back, as bf16 values.
inline std::vector<double> attention(const std::vector<std::uint16_t>& q, const SeenKeys& keys,
                                     const std::vector<std::int32_t>& positions,
                                     const std::vector<float>& sink, int rows) {
  std::vector<std::uint16_t> o(q.size());
  std::vector<double> out(q.size());
  constexpr std::int64_t kRow = kHeads * kDim;
  parallel(rows, [&](std::int64_t row) {
    reference::sparse_attention(
        &o[row * kRow], &q[row * kRow], 1, kHeads,
        {keys.window.data(), keys.window_idx + row * kWindow, kWindow},
        {keys.extra.data(), keys.extra_idx + row * keys.num_extra, keys.num_extra}, sink.data());
    std::vector<double> v(kRow);
    for (std::int64_t i = 0; i < kRow; ++i) v[i] = reference::from_bf16(o[row * kRow + i]);
    const std::int64_t position = positions[row];
    reference::rope(v.data(), &position, 1, kHeads, kDim, true, true);
    for (std::int64_t i = 0; i < kRow; ++i) out[row * kRow + i] = reference::round_bf16(v[i]);
  });
  return out;
}

// Stored rows of kv [rows, 512] (bf16), normed and turned: 584 bytes each.
inline std::vector<std::uint8_t> stored_keys(const std::vector<std::uint16_t>& kv,
                                             const std::vector<std::uint16_t>& gain,
                                             const std::vector<std::int32_t>& positions, int rows) {
  std::vector<double> key(kv.size());
  for (int row = 0; row < rows; ++row) {
    double squares = 0.0;
    for (int i = 0; i < kDim; ++i) {
      key[row * kDim + i] = reference::from_bf16(kv[row * kDim + i]);
      squares += key[row * kDim + i] * key[row * kDim + i];
    }
    for (int i = 0; i < kDim; ++i) {
      key[row * kDim + i] *=
          reference::from_bf16(gain[i]) / std::sqrt(squares / kDim + double{kNormEps});
    }
  }
  const std::vector<std::int64_t> at(positions.begin(), positions.end());
  reference::rope(key.data(), at.data(), rows, 1, kDim, true, false);
  const std::vector<float> key_fp32(key.begin(), key.end());
  std::vector<std::uint8_t> packed(static_cast<std::size_t>(rows) * 584);
  reference::kv_pack(packed.data(), key_fp32.data(), rows);
  return packed;
}

}  // namespace lowlat::bench
