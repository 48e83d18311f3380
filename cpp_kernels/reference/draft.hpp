// reference/draft: what the draft's own parts mean, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// f [rows, hidden] bf16: mean of the four residual streams. residual bf16 [rows, 4, hidden].
void draft_feature(std::uint16_t* f, const std::uint16_t* residual, std::int64_t rows,
                   std::int64_t hidden);

// One request: a chain of `steps` proposals from `anchor`. Step s has z = base[s] + bf(w1[previous]
// w2^T), fp32, and takes its argmax (temperature 0) or that of z / max(temperature, 1e-5) + Gumbel
// noise of uniform[s]; ties to the lowest id. base, uniform, logits [steps, vocab]; w1, w2 bf16
// [vocab, rank]. out_margin [steps]: by how much the chosen value beat the next best one.
void markov_draft(std::int64_t* tokens, float* logits, double* out_margin, const float* base,
                  const std::uint16_t* w1, const std::uint16_t* w2, std::int64_t anchor,
                  double temperature, const float* uniform, std::int64_t steps, std::int64_t vocab,
                  std::int64_t rank);

}  // namespace lowlat::reference
