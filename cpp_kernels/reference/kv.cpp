#include "reference/kv.hpp"

#include <algorithm>
#include <cmath>

#include "reference/format.hpp"

namespace lowlat::reference {

void kv_pack(std::uint8_t* out, const float* kv, std::int64_t rows) {
  for (std::int64_t t = 0; t < rows; ++t, out += 584, kv += 512) {
    for (int group = 0; group < 7; ++group) {
      double amax = 1e-4f;  // the fp32 number
      for (int i = 64 * group; i < 64 * group + 64; ++i) {
        amax = std::max(amax, std::abs(static_cast<double>(kv[i])));
      }
      out[576 + group] = ue8m0_ceil(amax / 448.0);
      for (int i = 64 * group; i < 64 * group + 64; ++i) {
        out[i] = to_e4m3(kv[i] / from_ue8m0(out[576 + group]));
      }
    }
    for (int i = 0; i < 64; ++i) {
      const std::uint16_t code = to_bf16(kv[448 + i]);
      out[448 + 2 * i] = static_cast<std::uint8_t>(code % 256);
      out[448 + 2 * i + 1] = static_cast<std::uint8_t>(code / 256);
    }
    out[583] = 0;
  }
}

void kv_unpack(float* kv, const std::uint8_t* in, std::int64_t rows) {
  for (std::int64_t t = 0; t < rows; ++t, in += 584, kv += 512) {
    for (int i = 0; i < 448; ++i) {
      kv[i] = static_cast<float>(from_e4m3(in[i]) * from_ue8m0(in[576 + i / 64]));
    }
    for (int i = 448; i < 512; ++i) {
      const std::uint8_t* bytes = in + 448 + 2 * (i - 448);
      kv[i] = static_cast<float>(from_bf16(static_cast<std::uint16_t>(bytes[0] + 256 * bytes[1])));
    }
  }
}

}  // namespace lowlat::reference
