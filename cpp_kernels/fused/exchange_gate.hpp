// fused/exchange_gate.hpp: how a kernel tells the next ones that its results are there, without
// ending. Every C++ compiler reads it.
#pragma once

#include <cstdint>

namespace lowlat::nvidia::fused {

struct ExchangePort;

// Blocks of one kernel count up `word` when what they wrote may be read; who needs it waits until
// all have. The next kernels are resident by then (programmatic launch), so the way from one to the
// other is that of one word, and not the end of a launch and the begin of another.
//
// word NULL: the stream's order instead (the end of the kernels before).
struct Gate {
  std::uint32_t* word;   // device word, 0 when the step begins; one for each kernel of a step
  std::uint32_t blocks;  // of the kernel that counts
  // Of this rank, in device memory: its budget ends the wait, its status words name `id` as the
  // kernel, its abort word ends every other wait. NULL: a second, and nobody is told.
  const ExchangePort* port;
  std::uint32_t id;
};

}  // namespace lowlat::nvidia::fused
