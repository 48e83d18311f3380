// reference/rank_sum: what the sum over ranks means. Its order and its fp32 sums are the
// operation's definition (every rank must get the same bits), so they are kept here.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// y[i] = bf( ((p[0][i] + p[1][i]) + p[2][i]) + ... ), each sum rounded to fp32. partial f32 [ranks,
// n].
void rank_sum(std::uint16_t* y, const float* partial, std::int64_t ranks, std::int64_t n);

}  // namespace lowlat::reference
