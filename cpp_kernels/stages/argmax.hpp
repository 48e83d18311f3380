// stages/argmax.hpp: the greatest of many values, with one rule for ties and NaN.
//
// One thread calls; nothing here syncs. Parts of a row are reduced apart, by tile or by rank, and
// joined with best_of in any order: the rule is a total order, so the result is the same.
#pragma once
#ifndef LOWLAT_PLATFORM
#error "include one platform before any stage"
#endif

#include <cstdint>

namespace lowlat::LOWLAT_PLATFORM::stages {

// A candidate. id -1 is no candidate; everything beats it.
struct Best {
  float value;
  std::int32_t id;
};
inline constexpr Best kNoBest = {0.0f, -1};

// A NaN beats every number; then the greater value; then the lower id. +0 and -0 are equal.
LOWLAT_DEVICE bool beats(Best a, Best b) {
  if (a.id < 0 || b.id < 0) return a.id >= 0 && b.id < 0;
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan;
  if (!a_nan && a.value != b.value) return a.value > b.value;
  return a.id < b.id;
}
LOWLAT_DEVICE Best best_of(Best a, Best b) { return beats(b, a) ? b : a; }

// The best of values[0..n), whose first id is first_id. n = 0 gives kNoBest.
LOWLAT_DEVICE Best argmax(const float* values, int n, std::int32_t first_id = 0) {
  Best best = kNoBest;
  for (int i = 0; i < n; ++i) best = best_of(best, {values[i], first_id + i});
  return best;
}

}  // namespace lowlat::LOWLAT_PLATFORM::stages
