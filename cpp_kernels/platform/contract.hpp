// platform/contract.hpp: what every platform must offer. Include a platform, then this file: it
// fails to compile when a name is missing or has another type.
//
//   LOWLAT_DEVICE, LOWLAT_TABLE   before a device function; before a table of constants
//   LOWLAT_UNIT                before a device function that a kernel holds once and calls: large
//                              code that runs a few times costs its fetch, not its call
//   LOWLAT_SHARED(type, name)  in a kernel: declares `name`, one object a block, uninitialised;
//                              `type` is a name, of an array too
//   kName, kWarpLanes          the platform's word; lanes of a warp: 1, 32 or 64
//   kMarlinExperts             whether experts may lie in Marlin's tiles, as another engine has
//                              them: where they may not, no kernel holds code for them
//   Block<N>::kNumThreads      threads of a block that was launched with N, a multiple of the warp
//   thread_idx                 place in the block; thread_idx() / kWarpLanes is the warp
//   block_sync, block_any      barrier and memory order inside the block; the same, and true in
//                              every thread when one said true. All threads call.
//   warp_sync                  barrier and memory order among the lanes of a warp
//   warp_sum, warp_max         over the lanes, in every lane. The sum is a butterfly (distances
//                              half a warp .. 1), so all lanes get the same bits; the maximum
//                              leaves a NaN out. No memory order; all lanes call, as below.
//   warp_shuffle               v of the lane that is asked for, which may differ by lane
//   warp_shuffle_xor           v of the lane at (own lane ^ mask)
//   warp_ballot                bit i: what lane i said; bits past the warp are 0
//   warp_uniform               v, which is the same in all lanes that call; tells a compiler that
//                              cannot see it, and branches on it leave the warp together
//   popcount                   of 64 bits
//   fma .. copysign            fp32; fma is one rounding, the others are rounded once, and a
//                              product and a sum in the source stay two roundings. max and min are
//                              a > b ? a : b and a < b ? a : b: with a NaN they give b.
//   float_bits, bits_float     reinterpretation
//   Scope, load_acquire, store_release   memory order, with the scope in full
//   load_poll, fence_polled    a wait's look at a word, and the fence after the last of them: the
//                              two are an acquire of what was seen, and a platform where an acquire
//                              costs more than a look has it in the fence
//   atomic_add, atomic_cas     relaxed; give the value before
//   TaggedWords, kTaggedPayload, store_tagged, load_tagged   payload and epoch as one access
//   kEarlyLines, keep          lines of 128 bytes that a lane asks for while its block waits for
//                              others, 0 where that is no gain; a load is made before its value is
//                              kept
//   kTileProducts              whether blocks make their products with few rows as tiles
//                              (platform/tile_types.hpp), because warps of 64 have a matrix unit
//   tile_load<kWords>, tile_scale   codes, aligned to 16 bytes, and a scale's byte, from the
//                              device's memory: never what is shared by a block
//   tile_bf16, tile_values, tile_e4m3, tile_fp4   32 values of a lane, exact: bf16; fp32 that are
//                              bf16 values; e4m3fn or e2m1 codes under a ue8m0 scale that leaves
//                              all of them normal
//   tile_multiply              a tile's sums += rows of a times rows of b, products exact, sums in
//                              fp32 and in the platform's order, the same for every place in the
//                              tile. All lanes of a warp of 64 call.
//   tile_order, tile_arrived   a compiler moves nothing over it, so loads that are to be ahead of a
//                              product stay so; all loads and stores so far have ended
//   spin_pause, clock_ns       every spin calls the first; a monotonic clock
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include one platform before the contract"
#endif

#include <concepts>
#include <cstdint>

#if !defined(LOWLAT_DEVICE) || !defined(LOWLAT_TABLE) || !defined(LOWLAT_UNIT) || \
    !defined(LOWLAT_SHARED)
#error "the platform lacks LOWLAT_DEVICE, LOWLAT_UNIT, LOWLAT_TABLE or LOWLAT_SHARED"
#endif

namespace lowlat::LOWLAT_PLATFORM::plat {

static_assert(kWarpLanes == 1 || kWarpLanes == 32 || kWarpLanes == 64);
static_assert(std::same_as<decltype(kMarlinExperts), const bool>);
static_assert(Block<256>::kNumThreads % kWarpLanes == 0 && kTaggedPayload >= 1);
static_assert(std::same_as<decltype(thread_idx()), int>);
static_assert(std::same_as<decltype(block_sync()), void>);
static_assert(std::same_as<decltype(block_any(false)), bool>);
static_assert(std::same_as<decltype(warp_sync()), void>);
static_assert(std::same_as<decltype(warp_sum(0.0f)), float>);
static_assert(std::same_as<decltype(warp_max(0.0f)), float>);
static_assert(std::same_as<decltype(warp_shuffle(0.0f, 0)), float>);
static_assert(std::same_as<decltype(warp_shuffle(0u, 0)), std::uint32_t>);
static_assert(std::same_as<decltype(warp_shuffle_xor(0.0f, 1)), float>);
static_assert(std::same_as<decltype(warp_shuffle_xor(0u, 1)), std::uint32_t>);
static_assert(std::same_as<decltype(warp_ballot(false)), std::uint64_t>);
static_assert(std::same_as<decltype(warp_uniform(0)), int>);
static_assert(std::same_as<decltype(plat::popcount(std::uint64_t{0})), int>);
static_assert(std::same_as<decltype(fma(0.0f, 0.0f, 0.0f)), float>);
static_assert(std::same_as<decltype(rsqrt(0.0f)), float>);
static_assert(std::same_as<decltype(plat::sqrt(0.0f)), float>);
static_assert(std::same_as<decltype(plat::exp(0.0f)), float>);
static_assert(std::same_as<decltype(plat::log(0.0f)), float>);
static_assert(std::same_as<decltype(plat::log1p(0.0f)), float>);
static_assert(std::same_as<decltype(plat::pow(0.0f, 0.0f)), float>);
static_assert(std::same_as<decltype(plat::sin(0.0f)), float>);
static_assert(std::same_as<decltype(plat::cos(0.0f)), float>);
static_assert(std::same_as<decltype(plat::abs(0.0f)), float>);
static_assert(std::same_as<decltype(plat::min(0.0f, 0.0f)), float>);
static_assert(std::same_as<decltype(plat::max(0.0f, 0.0f)), float>);
static_assert(std::same_as<decltype(plat::copysign(0.0f, 0.0f)), float>);
static_assert(std::same_as<decltype(float_bits(0.0f)), std::uint32_t>);
static_assert(std::same_as<decltype(bits_float(0u)), float>);
static_assert(
    std::same_as<decltype(load_acquire<Scope::system>(static_cast<const std::uint32_t*>(nullptr))),
                 std::uint32_t>);
static_assert(
    std::same_as<decltype(load_poll<Scope::device>(static_cast<const std::uint32_t*>(nullptr))),
                 std::uint32_t>);
static_assert(std::same_as<decltype(fence_polled<Scope::device>()), void>);
static_assert(std::same_as<decltype(kEarlyLines), const int> && kEarlyLines >= 0);
static_assert(std::same_as<decltype(keep(0u)), void>);
static_assert(
    std::same_as<decltype(store_release<Scope::device>(static_cast<std::uint32_t*>(nullptr), 0u)),
                 void>);
static_assert(
    std::same_as<decltype(atomic_add<Scope::block>(static_cast<std::uint32_t*>(nullptr), 0u)),
                 std::uint32_t>);
static_assert(
    std::same_as<decltype(atomic_cas<Scope::device>(static_cast<std::uint32_t*>(nullptr), 0u, 0u)),
                 std::uint32_t>);
static_assert(std::same_as<decltype(kTileProducts), const bool>);
static_assert(!kTileProducts || kWarpLanes == kTileSide * kTileParts);
static_assert(std::same_as<decltype(tile_order()), void>);
static_assert(std::same_as<decltype(tile_arrived()), void>);
static_assert(std::same_as<decltype(tile_load<4>(nullptr)), TileCodes<4>>);
static_assert(std::same_as<decltype(tile_scale(nullptr)), std::uint32_t>);
static_assert(std::same_as<decltype(tile_bf16(TileCodes<16>{})), TileRun>);
static_assert(std::same_as<decltype(tile_values(TileCodes<32>{})), TileRun>);
static_assert(std::same_as<decltype(tile_e4m3(TileCodes<8>{}, 0u)), TileRun>);
static_assert(std::same_as<decltype(tile_fp4(TileCodes<4>{}, 0u)), TileRun>);
static_assert(
    std::same_as<decltype(tile_multiply(*static_cast<TileSums*>(nullptr), TileRun{}, TileRun{})),
                 void>);
static_assert(std::same_as<decltype(spin_pause()), void>);
static_assert(std::same_as<decltype(clock_ns()), std::uint64_t>);
static_assert(Scope::block != Scope::device && Scope::device != Scope::system);

}  // namespace lowlat::LOWLAT_PLATFORM::plat
