// bench/program.hpp: the frame of a measuring program. Every C++ compiler reads it.
#pragma once

#include <cstdio>
#include <exception>

#include "bench/report.hpp"
#include "bench/words.hpp"

namespace lowlat::bench {

// The program's exit status: what measure(words, report) gives, 2 for words that are none, 3 for
// what was thrown, those two with one line on standard error.
template <class Measure>
int measured(int argc, const char* const* argv, Measure measure) {
  try {
    const Words words = read_words(argc, argv);
    if (!words.wrong.empty()) {
      std::fprintf(stderr, "%s\n", words.wrong.c_str());
      return 2;
    }
    Report report;
    return measure(words, report);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}

}  // namespace lowlat::bench
