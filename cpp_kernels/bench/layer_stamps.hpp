// bench/layer_stamps.hpp: clock stamps of a layer's kernels, as lines of text.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "fused/exchange_hop.hpp"
#include "fused/place.hpp"
#include "fused/stamps.hpp"

namespace lowlat::bench {

namespace fused = nvidia::fused;

// Where the blocks of one layer's kernels were: medians and latest over blocks, in microseconds
// from the first block's begin.
inline void print_stamps(const std::vector<fused::Stamp>& all, int layer_idx) {
  const auto stages = static_cast<std::size_t>(fused::StampStage::count);
  std::vector<double> offset(1024, -1e300);
  std::uint64_t first_ns = ~std::uint64_t{0};
  for (std::size_t i = 0; i < all.size(); i += stages) {
    if (all[i].begin != 0) first_ns = std::min(first_ns, all[i].begin);
  }
  // Ticks of a microsecond, from the first and the last block of each multiprocessor.
  std::vector<const fused::Stamp*> earliest(1024, nullptr), latest(1024, nullptr);
  for (std::size_t i = 0; i < all.size(); i += stages) {
    if (all[i].begin == 0) continue;
    const fused::Stamp*& first = earliest[all[i].multiprocessor];
    const fused::Stamp*& last = latest[all[i].multiprocessor];
    if (first == nullptr || all[i].end < first->end) first = &all[i];
    if (last == nullptr || all[i].end > last->end) last = &all[i];
  }
  std::vector<double> rates;
  for (std::size_t i = 0; i < earliest.size(); ++i) {
    if (earliest[i] == nullptr || latest[i]->begin < earliest[i]->begin + 50'000) continue;
    rates.push_back(static_cast<double>(latest[i]->end - earliest[i]->end) * 1e3 /
                    static_cast<double>(latest[i]->begin - earliest[i]->begin));
  }
  if (rates.empty()) return;
  std::nth_element(rates.begin(), rates.begin() + rates.size() / 2, rates.end());
  const double ticks_a_us = rates[rates.size() / 2];
  std::printf("stamp clock %.0f ticks a us\n", ticks_a_us);
  for (std::size_t i = 0; i < all.size(); i += stages) {
    const fused::Stamp& align = all[i];
    if (align.begin == 0) continue;
    double& to = offset[align.multiprocessor];
    to = std::max(to, static_cast<double>(align.begin - first_ns) * 1e-3 -
                          static_cast<double>(align.end) / ticks_a_us);
  }
  const char* const kNames[] = {"qkv",     "q",       "attention",  "wo_a",  "wo_b",  "exchange",
                                "mix",     "experts", "exchange 2", "begin", "mix 2", "latent",
                                "product", "query",   "scores",     "select"};
  const char* const kStages[] = {"begin", "ask", "wait", "read", "compute", "sum", "store"};
  double start = 1e300;
  // How the layer before ends comes first.
  constexpr auto kExperts = static_cast<int>(fused::HopKernel::experts);
  constexpr int kLast = static_cast<int>(fused::HopKernel::second_exchange) - kExperts + 1;
  const int num_before = layer_idx > 0 ? kLast : 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = -num_before; i < static_cast<int>(fused::HopKernel::count); ++i) {
      const int layer_back = i < 0 ? 1 : 0, kernel = i < 0 ? kExperts + kLast + i : i;
      for (std::size_t stage = 0; stage < 7; ++stage) {
        std::vector<double> ends, lengths;
        std::vector<int> blocks_of(1024, 0);  // of a multiprocessor
        for (std::size_t block = 0; block < fused::kStampBlocks; ++block) {
          const fused::Stamp& stamp =
              all[((fused::kLayerKernels * (layer_idx - layer_back) + kernel) *
                       std::size_t{fused::kStampBlocks} +
                   block) *
                      stages +
                  stage];
          if (stamp.begin == 0) continue;
          const double end =
              static_cast<double>(stamp.end) / ticks_a_us + offset[stamp.multiprocessor];
          ends.push_back(end);
          ++blocks_of[stamp.multiprocessor];
          if (stage > 0)
            lengths.push_back(static_cast<double>(stamp.end - stamp.begin) / ticks_a_us);
          if (layer_back == 0) start = std::min(start, end);
        }
        if (ends.empty() || pass == 0) continue;
        std::sort(ends.begin(), ends.end());
        std::sort(lengths.begin(), lengths.end());
        std::printf("stamp %-18s %-7s blocks %3zu end: first %7.2f median %7.2f last %7.2f",
                    (std::string(i < 0 ? "before: " : "") + kNames[kernel]).c_str(), kStages[stage],
                    ends.size(), ends.front() - start, ends[ends.size() / 2] - start,
                    ends.back() - start);
        if (!lengths.empty()) {
          std::printf("  length: median %6.2f longest %6.2f", lengths[lengths.size() / 2],
                      lengths.back());
        }
        if (stage == 0) {
          std::printf("  at most %d on a multiprocessor",
                      *std::max_element(blocks_of.begin(), blocks_of.end()));
        }
        std::printf("\n");
      }
    }
  }
}

}  // namespace lowlat::bench
