// reference/rope: what the rotary embedding means. Frequencies and angles are fp32 numbers by
// definition (the serving table's), each operation of theirs rounded to fp32, and so are cosine and
// sine, rounded once; the turn itself is in double precision.
#pragma once
#include <cstdint>

namespace lowlat::reference {

// Frequency of pair i (0 .. 31) in radians a position: 1 / base^(2 i / 64); with yarn the pairs up
// to 15 keep it, those from 25 on have a sixteenth, between them a mix (base 160000, factor 16).
float rope_frequency(int pair, bool yarn);

// Turns the last 64 of each head's `dim` values in place by the row's position, or back. x [rows,
// heads, dim], pos [rows].
void rope(double* x, const std::int64_t* pos, std::int64_t rows, std::int64_t heads,
          std::int64_t dim, bool yarn, bool inverse);

}  // namespace lowlat::reference
