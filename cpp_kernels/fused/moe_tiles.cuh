// fused/moe_tiles.cuh: the second product of moe.cuh on Marlin's tiles.
//
// A word of a tile is what mma.m16n8k16 wants of a lane: rows n and n + 8 at k = 2t, 2t + 1, 2t + 8
// and 2t + 9. A lane's sixteen bytes are four such words, of the same eighth g of a tile's columns.
// A band of four eighths fills half of a product's rows, so the other half takes the same eighths
// of the next group of 32 along K: a pair's h is a column a group, and each half of the rows meets
// its own. A fifth eighth is eight groups at once: of its products the diagonal counts.
#pragma once

#include "fused/stream.cuh"

namespace lowlat::nvidia::fused {

namespace moe {

// A pair's part of K times the band, by one warp.
template <class L>
struct BandTiles {
  static constexpr int kEighths = L::kBandRows / 8, kBytes = 8;  // scales of an eighth
  static constexpr bool kFifth = kEighths == 5;
  static_assert(kEighths == 4 || kFifth);

  int lane, g, t;
  // Of four eighths, of the fifth: a lane's groups of K, in the order of the scales.
  float sums[kBytes] = {}, fifth[kBytes] = {};

  LOWLAT_DEVICE explicit BandTiles(int own_lane)
      : lane(own_lane), g(own_lane / 4), t(own_lane % 4) {}

  // `h`: of each pass this lane's chunk of group g. `codes`, `scales`: the part's first.
  template <int kPasses>
  LOWLAT_DEVICE void multiply(const uint4 (&h)[kPasses], std::uint32_t codes,
                              std::uint32_t scales) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const std::uint32_t own[4] = {h[pass].x, h[pass].y, h[pass].z, h[pass].w};
      multiply_pass(own, codes + pass * L::kPassGroups * (2 * L::kBandLine),
                    scales + pass * L::kPassGroups * L::kBandScaleLine);
    }
  }
  // Every position's sum to its place in the band.
  LOWLAT_DEVICE void store(float* band, float factor) {
    const float sum = add_lanes(sums);
    band[g % 4 * 8 + place()] = sum * factor;
    if constexpr (kFifth) {
      float rest = add_lanes(fifth);
      rest += __shfl_xor_sync(plat::kAllLanes, rest, 4);
      rest += __shfl_xor_sync(plat::kAllLanes, rest, 8);
      if (g % 4 == 0) band[32 + place()] = rest * factor;
    }
  }

 private:
  LOWLAT_DEVICE void multiply_pass(const std::uint32_t (&own)[4], std::uint32_t codes,
                                   std::uint32_t scales) {
    float acc[4][4] = {};
#pragma unroll
    for (int pair = 0; pair < L::kPassGroups / 2; ++pair) {
      std::uint32_t b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = g / 2 == pair ? own[i] : 0u;
      add_group(acc, codes + (2 * pair + g / 4) * (2 * L::kBandLine) + g % 4 * 64 + t * 16, b);
    }
    // Of two columns of a lane the one of its rows' groups. Columns that are none hold zeros: any
    // scale does.
    const bool odd = g >= 4;
    const int group = 2 * t < L::kPassGroups ? 2 * t + g / 4 : 0;
    add_scaled_sums(sums, acc, odd, true, scales + group * L::kBandScaleLine + g % 4 * kBytes);
    if constexpr (kFifth) {
      const int own_group = g < L::kPassGroups ? g : L::kPassGroups - 1;
      float more[4][4] = {};
      add_group(more, codes + own_group * (2 * L::kBandLine) + 4 * 64 + t * 16, own);
      add_scaled_sums(fifth, more, g % 2 != 0, t == g / 2 && g < L::kPassGroups,
                      scales + own_group * L::kBandScaleLine + 4 * kBytes);
    }
  }
  // acc[w] += words w of this lane's sixteen bytes of two tiles times a column of h.
  LOWLAT_DEVICE static void add_group(float (&acc)[4][4], std::uint32_t codes,
                                      const std::uint32_t (&b)[4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const uint4 unit = smem_load16(codes + tile * L::kBandLine);
      const std::uint32_t words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        std::uint32_t a[4];
        place_fp4(words[w], a);
        multiply_half_pairs(acc[w], a, a + 2, b + 2 * tile);
      }
    }
  }
  // Scale 4 (w / 2) + w % 2 is of word w's first row, the one two further of its second.
  LOWLAT_DEVICE static void add_scaled_sums(float (&to)[kBytes], const float (&acc)[4][4], bool odd,
                                            bool counts, std::uint32_t scales) {
    const uint2 bytes = smem_load8(scales);
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      const int w = i / 4 * 2 + i % 2, high = i / 2 % 2;
      const float sum = odd ? acc[w][2 * high + 1] : acc[w][2 * high];
      const float scale = scale_of((i < 4 ? bytes.x : bytes.y) >> i % 4 * 8 & 0xffu);
      to[i] = __fmaf_rn(counts ? sum : 0.0f, scale, to[i]);
    }
  }
  // The sum over eight lanes (t, g / 4) of scale number own_scale()'s.
  LOWLAT_DEVICE float add_lanes(float (&v)[kBytes]) const {
    add_half<4>(v, 16);
    add_half<2>(v, 1);
    add_half<1>(v, 2);
    return v[0];
  }
  template <int kHalf>
  LOWLAT_DEVICE void add_half(float (&v)[kBytes], int mask) const {
    const bool upper = (lane & mask) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float theirs = __shfl_xor_sync(plat::kAllLanes, upper ? v[i] : v[i + kHalf], mask);
      v[i] = (upper ? v[i + kHalf] : v[i]) + theirs;
    }
  }
  // Where the number of the sum that this lane has lies in an eighth: j = 2 w + high.
  LOWLAT_DEVICE int place() const {
    const int number = g / 4 * 4 + t % 2 * 2 + t / 2;
    const int w = number / 4 * 2 + number % 2, high = number / 2 % 2;
    return 2 * w + high;
  }
};

}  // namespace moe
}  // namespace lowlat::nvidia::fused
