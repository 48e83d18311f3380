// platform/amd_host.hpp: the platform amd as the host's compiler sees it: the same types and sizes,
// so that it lays out what kernels read, and names without a definition for what only a device can
// do. Never in one file with platform/amd.hpp. platform/contract.hpp says what each name means.
#pragma once

#include <cstdint>

#define LOWLAT_PLATFORM amd
#define LOWLAT_DEVICE inline
#define LOWLAT_UNIT inline
#define LOWLAT_TABLE inline constexpr
#define LOWLAT_SHARED(type, name) [[maybe_unused]] static type name

#include "platform/amd_types.hpp"

namespace lowlat::amd::plat {

int thread_idx();
void block_sync();
bool block_any(bool mine);
void warp_sync();
float warp_sum(float v);
float warp_max(float v);
float warp_shuffle(float v, int lane);
std::uint32_t warp_shuffle(std::uint32_t v, int lane);
float warp_shuffle_xor(float v, int mask);
std::uint32_t warp_shuffle_xor(std::uint32_t v, int mask);
std::uint64_t warp_ballot(bool mine);
int warp_uniform(int v);
int popcount(std::uint64_t bits);
float fma(float a, float b, float c);
float rsqrt(float v);
float sqrt(float v);
float exp(float v);
float log(float v);
float log1p(float v);
float pow(float base, float exponent);
float sin(float v);
float cos(float v);
float abs(float v);
float min(float a, float b);
float max(float a, float b);
float copysign(float magnitude, float sign);
std::uint32_t float_bits(float v);
float bits_float(std::uint32_t bits);
template <Scope>
std::uint32_t load_acquire(const std::uint32_t* word);
template <Scope>
std::uint32_t load_poll(const std::uint32_t* word);
template <Scope>
void fence_polled();
void keep(std::uint32_t v);
template <Scope>
void store_release(std::uint32_t* word, std::uint32_t value);
template <Scope>
std::uint32_t atomic_add(std::uint32_t* word, std::uint32_t value);
template <Scope>
std::uint32_t atomic_cas(std::uint32_t* word, std::uint32_t expected, std::uint32_t desired);
void store_tagged(TaggedWords* dst, const std::uint32_t (&payload)[kTaggedPayload],
                  std::uint32_t tag);
bool load_tagged(const TaggedWords* src, std::uint32_t tag,
                 std::uint32_t (&out_payload)[kTaggedPayload]);
void tile_order();
void tile_arrived();
template <int kWords>
TileCodes<kWords> tile_load(const void* src);
std::uint32_t tile_scale(const std::uint8_t* src);
TileRun tile_bf16(const TileCodes<16>& codes);
TileRun tile_values(const TileCodes<32>& values);
TileRun tile_e4m3(const TileCodes<8>& codes, std::uint32_t scale);
TileRun tile_fp4(const TileCodes<4>& codes, std::uint32_t scale);
void tile_multiply(TileSums& c, const TileRun& a, const TileRun& b);
void spin_pause();
std::uint64_t clock_ns();

}  // namespace lowlat::amd::plat
