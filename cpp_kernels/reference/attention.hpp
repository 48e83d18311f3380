// reference/attention: what sparse attention means, in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// Keys of every query row: ids[rows, num_ids] into stored rows of 584 bytes, -1 pads.
struct Keys {
  const std::uint8_t* rows;
  const std::int32_t* ids;
  std::int64_t num_ids;
};

// o[t, h] = bf( sum_j e^s_j k_j / (sum_j e^s_j + e^sink_h) ), s_j = 512^-0.5 * (q[t, h] . k_j),
// over the keys of both sets; 0 where the denominator is 0. q, o: bf16 [rows, heads, 512]; sink
// [heads].
void sparse_attention(std::uint16_t* o, const std::uint16_t* q, std::int64_t rows,
                      std::int64_t heads, const Keys& window, const Keys& extra, const float* sink);

}  // namespace lowlat::reference
