#include "reference/accept.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace lowlat::reference {
namespace {

std::vector<double> softmax(const float* logits, std::int64_t vocab, double tau) {
  const double most = *std::max_element(logits, logits + vocab);
  std::vector<double> p(vocab);
  double total = 0.0;
  for (std::int64_t v = 0; v < vocab; ++v) total += p[v] = std::exp((logits[v] - most) / tau);
  for (double& value : p) value /= total;
  return p;
}

}  // namespace

void accept(std::int64_t* out_accepted, std::int64_t* out_next, double* out_margin,
            const std::int64_t* draft, const float* target_logits, const float* draft_logits,
            double temperature, const float* coins, std::int64_t num_drafts, std::int64_t vocab) {
  std::int64_t accepted = 0;
  double margin = HUGE_VAL;
  if (temperature == 0.0) {
    // Logits are compared as given, so nothing here is near: fp32 and double agree exactly.
    for (;; ++accepted) {
      const float* row = target_logits + accepted * vocab;
      *out_next = std::max_element(row, row + vocab) - row;  // the first of equal ones
      if (accepted == num_drafts || draft[accepted] != *out_next) break;
    }
  } else {
    const double tau = std::max(temperature, 1e-5);
    std::vector<double> mass;
    for (;; ++accepted) {
      mass = softmax(target_logits + accepted * vocab, vocab, tau);
      if (accepted == num_drafts) break;
      const std::vector<double> q = softmax(draft_logits + accepted * vocab, vocab, tau);
      const double spare = mass[draft[accepted]] - coins[accepted] * q[draft[accepted]];
      margin = std::min(margin, std::abs(spare));
      if (spare > 0.0 && q[draft[accepted]] > 0.0) continue;
      for (std::int64_t v = 0; v < vocab; ++v) mass[v] = std::max(mass[v] - q[v], 0.0);
      break;
    }
    double total = 0.0;
    for (const double m : mass) total += m;
    double sum = 0.0;
    *out_next = vocab - 1;
    bool drawn = false;
    for (std::int64_t v = 0; v < vocab; ++v) {
      sum += mass[v];
      if (total > 0.0) margin = std::min(margin, std::abs(sum - coins[num_drafts] * total));
      if (!drawn && sum > coins[num_drafts] * total) {
        *out_next = v;
        drawn = true;
      }
    }
  }
  *out_accepted = accepted;
  *out_margin = margin;
}

}  // namespace lowlat::reference
