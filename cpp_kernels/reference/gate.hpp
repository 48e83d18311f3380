// reference/gate: what the router means, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// V4.1's score of a logit: sqrt(log(1 + e^z)).
double gate_score(double z);

// For every row: the k experts of greatest score + bias, ties to the lowest id, in that order, and
// their weights score / (sum of the k) * 1.5. The sum has 1e-20 added (target), or is taken as 1
// where it is not positive (draft). x bf16 [rows, hidden], w bf16 [num_experts, hidden], bias
// [num_experts].
void gate(std::int32_t* ids, float* weights, const std::uint16_t* x, const std::uint16_t* w,
          const float* bias, std::int64_t rows, std::int64_t hidden, std::int64_t num_experts,
          std::int64_t k, bool draft);

}  // namespace lowlat::reference
