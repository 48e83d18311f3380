// platform/contract.hpp: what every platform must offer. Include a platform, then this file: it
// fails to compile when a name is missing or has another type.
//
//   LOWLAT_DEVICE              before every function that runs on the platform
//   LOWLAT_TABLE               before a constant that such a function indexes
//   kName, kWarpLanes          the platform's word; lanes of a warp
//   Block<N>::kNumThreads      threads of a block that was launched with N
//   thread_idx, block_sync     place in the block; barrier and memory order inside the block
//   warp_sum, warp_max         over the lanes of a warp, in every lane; all lanes call
//   fma .. copysign            fp32; fma is one rounding, the others are rounded once
//   float_bits, bits_float     reinterpretation
//   Scope, load_acquire, store_release   memory order, with the scope in full
//   TaggedWords, kTaggedPayload, store_tagged, load_tagged   payload and epoch as one access
//   spin_pause, clock_ns       every spin calls the first; a monotonic clock
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include one platform before the contract"
#endif
#if !defined(LOWLAT_DEVICE) || !defined(LOWLAT_TABLE)
#error "the platform does not say how functions and tables are declared"
#endif

#include <concepts>
#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::plat {

static_assert(kWarpLanes >= 1 && Block<256>::kNumThreads >= 1 && kTaggedPayload >= 1);
static_assert(std::same_as<decltype(thread_idx()), int>);
static_assert(std::same_as<decltype(block_sync()), void>);
static_assert(std::same_as<decltype(warp_sum(0.0f)), float>);
static_assert(std::same_as<decltype(warp_max(0.0f)), float>);
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
    std::same_as<decltype(store_release<Scope::device>(static_cast<std::uint32_t*>(nullptr), 0u)),
                 void>);
static_assert(std::same_as<decltype(spin_pause()), void>);
static_assert(std::same_as<decltype(clock_ns()), std::uint64_t>);
static_assert(Scope::block != Scope::device && Scope::device != Scope::system);

}  // namespace lowlat::LOWLAT_PLATFORM::plat
