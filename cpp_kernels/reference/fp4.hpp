// reference/fp4: what four-bit quantisation means, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// x[n], n a multiple of 16: every 16 by scale = e4m3(clamp(amax / 6, 2^-9, 448)) and back.
void fp4_round_trip_latent(double* x, std::int64_t n);

// x[n], n a multiple of 32: every 32 by the smallest power of two >= max(amax, 6 * 2^-126) / 6 and
// back.
void fp4_round_trip_index(double* x, std::int64_t n);

// x[128] to a stored index row: 64 bytes of codes (the even index in the low nibble), then 4 ue8m0
// scales; amax is at least 1e-4. And back.
void fp4_pack_index(std::uint8_t* row, const double* x);
void fp4_unpack_index(double* x, const std::uint8_t* row);

}  // namespace lowlat::reference
