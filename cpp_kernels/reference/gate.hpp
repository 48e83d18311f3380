// reference/gate: what the router means, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// Score of a logit: sqrt(log(1 + e^z)), in both models.
double gate_score(double z);

// For every row: the k experts of greatest score + bias, ties to the lowest id, in that order, and
// their weights score / (sum of the k) * 1.5. The sum has 1e-20 added, or with `one_for_zero`
// (every draft, V4's target) is taken as 1 where it is not positive. x bf16 [rows, hidden], w bf16
// [num_experts, hidden], bias [num_experts].
void gate(std::int32_t* ids, float* weights, const std::uint16_t* x, const std::uint16_t* w,
          const float* bias, std::int64_t rows, std::int64_t hidden, std::int64_t num_experts,
          std::int64_t k, bool one_for_zero);

// For every row: the k experts that `table` [vocab, k] has for its token, in that order, and their
// weights score / (sum of the k + 1e-20) * 1.5. token [rows].
void hash_gate(std::int32_t* ids, float* weights, const std::int64_t* token,
               const std::int32_t* table, const std::uint16_t* x, const std::uint16_t* w,
               std::int64_t rows, std::int64_t hidden, std::int64_t k);

}  // namespace lowlat::reference
