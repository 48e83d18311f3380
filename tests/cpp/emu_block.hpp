// emu_block.hpp: block forms on the platform emu, run in several orders of the fibers and compared
// bit for bit: with each other, and with the form of one thread, which is scalar's (the same source
// over the arithmetic of platform/cpu.hpp).
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "check.hpp"
#include "platform/emu.hpp"
#include "stages/team.hpp"

namespace lowlat::testing {

using OneThread = emu::stages::OneThread;
using Warp = emu::stages::Warp;
using Block128 = emu::plat::Block<128>;
using Block256 = emu::plat::Block<256>;

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// make(order) for the orders of launch(), whose results, vectors, must have the same bits: a block
// form that lacks a barrier gives different ones. Gives the first.
template <class Make>
auto in_every_order(Make make) {
  auto first = make(emu::kAscending);
  for (const std::uint32_t order : {emu::kDescending, 2u, 3u}) {
    CHECK(same_bits(make(order), first));
  }
  return first;
}

// Runs body() as a team: one thread is the caller, a block or a warp is a launch.
template <class Block, class Body>
void run_team(std::uint32_t order, Body body) {
  if constexpr (Block::kNumThreads == 1) {
    body();
  } else {
    emu::launch({Block::kNumThreads, 1, order}, [&](int) { body(); });
  }
}

// make<Block>(order), the result of a team, is the same in every order, for a block of 256 and of
// 128 threads and a warp; it has the bits of one thread's or, where sums have another order, goes
// to compare(got, alone).
template <class Make, class Compare>
void check_teams(Make make, Compare compare) {
  const auto alone = make.template operator()<OneThread>(0u);
  const auto check = [&]<class Block>(std::type_identity<Block>) {
    compare(
        in_every_order([&](std::uint32_t order) { return make.template operator()<Block>(order); }),
        alone);
  };
  check(std::type_identity<Block256>{});
  check(std::type_identity<Block128>{});
  check(std::type_identity<Warp>{});
}
template <class Make>
void check_teams(Make make) {
  check_teams(make, [](const auto& got, const auto& alone) { CHECK(same_bits(got, alone)); });
}

// Memory that a stage must write before it reads: every byte is 0xff, a NaN where it is a float.
template <class T>
std::vector<T> poisoned(std::size_t n) {
  std::vector<T> memory(n);
  if (n > 0) std::memset(static_cast<void*>(memory.data()), 0xff, n * sizeof(T));
  return memory;
}

}  // namespace lowlat::testing
