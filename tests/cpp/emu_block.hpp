// emu_block.hpp: block forms on the platform emu: run in several orders of the fibers, compared bit
// for bit.
#pragma once

#include <cstring>
#include <initializer_list>
#include <vector>

#include "check.hpp"
#include "platform/emu.hpp"

namespace lowlat::testing {

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

// One block of Block::kNumThreads threads runs body().
template <class Block, class Body>
void run_block(std::uint32_t order, Body body) {
  emu::launch({Block::kNumThreads, 1, order}, [&](int) { body(); });
}

}  // namespace lowlat::testing
