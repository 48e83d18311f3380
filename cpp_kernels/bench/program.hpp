// bench/program.hpp: the frame of the programs here. Every C++ compiler reads it.
#pragma once

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/report.hpp"
#include "bench/words.hpp"

namespace lowlat::bench {

// Whether the kernels of this build have clock stamps.
#ifdef LOWLAT_STAMPS
inline constexpr bool kStamps = LOWLAT_STAMPS != 0;
#else
inline constexpr bool kStamps = false;
#endif

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

// Of the checks of this process so far.
inline int failures = 0;

// A check's line, of a format as printf's, counted; gives what it was given.
[[gnu::format(printf, 2, 3)]] inline bool verdict(bool good, const char* format, ...) {
  failures += good ? 0 : 1;
  std::fputs(good ? "ok   " : "FAIL ", stdout);
  std::va_list values;
  va_start(values, format);
  std::vprintf(format, values);
  va_end(values);
  std::fputs("\n", stdout);
  std::fflush(stdout);
  return good;
}

// The words behind a checking program's name, taken one after another. What is not as it should be
// throws WrongWords.
struct WrongWords : std::runtime_error {
  using std::runtime_error::runtime_error;
};
class Rest {
 public:
  Rest(int argc, const char* const* argv) : words_(argv + (argc > 0 ? 1 : 0), argv + argc) {}

  bool empty() const { return next_ == words_.size(); }
  // The next word; "" where there is none.
  std::string take() { return empty() ? "" : words_[next_++]; }
  // Takes the next word if it is this one.
  bool take(std::string_view word) {
    const bool is = !empty() && words_[next_] == word;
    next_ += is ? 1 : 0;
    return is;
  }
  int number(int least, int most) {
    const std::string word = take();
    int value = 0;
    if (!read_number(word, least, most, value)) throw WrongWords(no_number(word, least, most));
    return value;
  }
  // All that is left, as numbers; `otherwise` where nothing is.
  std::vector<int> numbers(int least, int most, std::vector<int> otherwise) {
    if (empty()) return otherwise;
    std::vector<int> values;
    while (!empty()) values.push_back(number(least, most));
    return values;
  }
  int ranks() {
    const int given = number(2, 4);
    if (given == 3) throw WrongWords("needed 2 or 4 ranks, not 3");
    return given;
  }
  std::vector<int> rows(std::vector<int> otherwise = {6}) {
    return numbers(1, kMostRows, std::move(otherwise));
  }

 private:
  std::vector<std::string> words_;
  std::size_t next_ = 0;
};

// A checking program: run(rest) counts failures, or gives false for words that it does not know.
// Its exit status: 0, 1 for failures, 2 for words that are none, 3 for what was thrown.
template <class Run>
int checked(int argc, const char* const* argv, const char* usage, Run run) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 16);  // a run that is killed shows where it stood
  return exit_status([&] {
    std::string wrong = argc > 1 ? "unknown: " + std::string(argv[1]) : "no words";
    try {
      Rest rest(argc, argv);
      if (run(rest)) {
        std::printf("%d failures\n", failures);
        return failures == 0 ? 0 : 1;
      }
    } catch (const WrongWords& error) {
      wrong = error.what();
    }
    std::fprintf(stderr, "%s; usage: %s\n", wrong.c_str(), usage);
    return 2;
  });
}

// The same of a program whose first word names what it does.
struct Part {
  std::string_view name;
  std::function<void(Rest&)> run;
};
inline int checked(int argc, const char* const* argv, const char* usage,
                   std::initializer_list<Part> parts) {
  return checked(argc, argv, usage, [&](Rest& rest) {
    const std::string name = rest.take();
    for (const Part& part : parts) {
      if (part.name != name) continue;
      part.run(rest);
      return true;
    }
    return false;
  });
}

}  // namespace lowlat::bench
