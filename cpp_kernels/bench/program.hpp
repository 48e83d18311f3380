// bench/program.hpp: the frame of the programs here. Every C++ compiler reads it.
#pragma once

#include <cstdio>
#include <exception>

#include "bench/report.hpp"
#include "bench/words.hpp"

namespace lowlat::bench {

// A program's exit status: what run() gives; 3 for what was thrown, with a line on standard error.
template <class Run>
int exit_status(Run run) {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}

// The same of measure(words, report), and 2 for words that are none.
template <class Measure>
int measured(int argc, const char* const* argv, Measure measure) {
  return exit_status([&] {
    const Words words = read_words(argc, argv);
    if (!words.wrong.empty()) {
      std::fprintf(stderr, "%s\n", words.wrong.c_str());
      return 2;
    }
    Report report;
    return measure(words, report);
  });
}

}  // namespace lowlat::bench
