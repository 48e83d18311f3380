// reference/accept: what the acceptance rule means, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// One request. temperature 0: greedy, by argmax with ties to the lowest id. Else drafts are
// accepted while coin * q < p, the next token is drawn from max(p - q, 0) of the refusing row or
// from p of the bonus row by inverse CDF in id order, temperatures taken as at least 1e-5. draft
// [num_drafts]; target_logits [num_drafts + 1, vocab]; draft_logits [num_drafts, vocab]; coins
// [num_drafts + 1]. out_margin: how near the nearest comparison of sampling was to going the other
// way, as a probability: |p - coin * q| and |running sum - coin * total|; infinite when greedy,
// which compares logits as they are.
void accept(std::int64_t* out_accepted, std::int64_t* out_next, double* out_margin,
            const std::int64_t* draft, const float* target_logits, const float* draft_logits,
            double temperature, const float* coins, std::int64_t num_drafts, std::int64_t vocab);

}  // namespace lowlat::reference
