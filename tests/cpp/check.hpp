// check.hpp: the checks and the runner of the C++ tests. One test_*.cpp is one program.
//
//   #include "check.hpp"            // tests/cpp is on the include path
//
//   TEST_CASE(adds_in_rank_order) {
//     CHECK(sum > 0);               // fails the case and goes on
//     CHECK_EQ(num_rows, 6);        // signed and unsigned compare by value
//     CHECK_NEAR(y, 1.5, 1e-6);     // |y - 1.5| <= 1e-6; NaN is near nothing
//     CHECK_THROWS(refuses());
//     REQUIRE(ptr != nullptr);      // fails the case and leaves it (the case's own thread only)
//     SKIP("no second core");       // leaves the case, counted as skipped
//   }
//
// The header defines main(). `test_x` runs every case, `test_x WORD` those whose name contains
// WORD, `test_x --list` prints the names. LOWLAT_TEST_FILTER=WORD in the environment does the same
// for a whole run of many programs: it keeps every case of a program whose own path contains WORD,
// and a program without such a case does nothing. The last line is "N passed, N failed, N skipped".
// Exit status: 0 no case failed, 1 one did (or no case has the WORD given as argument), 77 every
// case that ran was skipped.
// CHECK, CHECK_EQ, CHECK_NEAR and CHECK_THROWS may be called from any thread that ends before
// its case does.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// The test's path below tests/cpp, without ending; CMake sets it.
#ifndef LOWLAT_TEST_NAME
#define LOWLAT_TEST_NAME ""
#endif

namespace lowlat::check {

struct Case {
  const char* name;
  void (*body)();
};

struct LeaveFailed {};
struct LeaveSkipped {
  std::string reason;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

// Checks of the running case that did not hold.
inline std::atomic<int>& num_failed_checks() {
  static std::atomic<int> count{0};
  return count;
}

inline bool register_case(const char* name, void (*body)()) {
  cases().push_back({name, body});
  return true;
}

inline void report(const char* file, int line, const std::string& what) {
  static std::mutex mutex;
  // A loop over a million elements that all differ says so twenty times, not a million.
  constexpr int kMaxLines = 20;
  const int count = num_failed_checks().fetch_add(1) + 1;
  if (count > kMaxLines) return;
  const std::lock_guard lock(mutex);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  if (count == kMaxLines) std::fprintf(stderr, "(more of this case are counted, not shown)\n");
}

template <class T>
concept Printable = requires(std::ostream& out, const T& value) { out << value; };

template <class T>
std::string words(const T& value) {
  std::ostringstream out;
  out.precision(17);
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_integral_v<T>) {
    out << +value;  // a byte prints as a number, not as a character
  } else if constexpr (std::is_enum_v<T>) {
    out << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (Printable<T>) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

template <class T>
concept Integer = std::is_integral_v<T> && !std::is_same_v<T, bool> && !std::is_same_v<T, char> &&
                  !std::is_same_v<T, wchar_t> && !std::is_same_v<T, char8_t> &&
                  !std::is_same_v<T, char16_t> && !std::is_same_v<T, char32_t>;

template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (Integer<A> && Integer<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class A, class B>
void check_eq(const A& a, const B& b, const char* text, const char* file, int line) {
  if (equal(a, b)) return;
  report(file, line, std::string("CHECK_EQ(") + text + "): " + words(a) + " != " + words(b));
}

inline void check_near(double a, double b, double bound, const char* text, const char* file,
                       int line) {
  // The first test takes equal infinities, whose difference is NaN.
  if (a == b || std::abs(a - b) <= bound) return;
  report(file, line,
         std::string("CHECK_NEAR(") + text + "): " + words(a) + " and " + words(b) + " differ by " +
             words(std::abs(a - b)) + ", more than " + words(bound));
}

enum class Outcome { passed, failed, skipped };

inline Outcome run_case(const Case& one) {
  num_failed_checks().store(0);
  try {
    one.body();
  } catch (const LeaveFailed&) {
  } catch (const LeaveSkipped& skipped) {
    if (num_failed_checks().load() == 0) {
      std::printf("skipped %s: %s\n", one.name, skipped.reason.c_str());
      return Outcome::skipped;
    }
  } catch (const std::exception& error) {
    report(one.name, 0, std::string("exception: ") + error.what());
  } catch (...) {
    report(one.name, 0, "exception that is no std::exception");
  }
  const int count = num_failed_checks().load();
  if (count == 0) return Outcome::passed;
  std::printf("FAILED %s (%d checks)\n", one.name, count);
  return Outcome::failed;
}

inline int run(int argc, char** argv) {
  const char* everywhere = std::getenv("LOWLAT_TEST_FILTER");
  if (everywhere == nullptr || std::strstr(LOWLAT_TEST_NAME, everywhere) != nullptr) {
    everywhere = "";
  }
  const char* filter = argc > 1 ? argv[1] : everywhere;
  if (std::strcmp(filter, "--list") == 0) {
    for (const Case& one : cases()) std::printf("%s\n", one.name);
    return 0;
  }
  int num_passed = 0, num_failed = 0, num_skipped = 0;
  for (const Case& one : cases()) {
    if (std::strstr(one.name, filter) == nullptr) continue;
    switch (run_case(one)) {
      case Outcome::passed: ++num_passed; break;
      case Outcome::failed: ++num_failed; break;
      case Outcome::skipped: ++num_skipped; break;
    }
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed, %d skipped\n", num_passed, num_failed, num_skipped);
  if (num_failed > 0) return 1;
  if (num_passed + num_skipped == 0) return argc > 1 || *everywhere == '\0' ? 1 : 0;
  return num_passed == 0 ? 77 : 0;
}

}  // namespace lowlat::check

#define TEST_CASE(name)                                           \
  static void lowlat_case_##name();                               \
  [[maybe_unused]] static const bool lowlat_registered_##name =   \
      ::lowlat::check::register_case(#name, &lowlat_case_##name); \
  static void lowlat_case_##name()

#define CHECK(...)                                                                          \
  do {                                                                                      \
    if (!(__VA_ARGS__))                                                                     \
      ::lowlat::check::report(__FILE__, __LINE__, "CHECK(" #__VA_ARGS__ ") does not hold"); \
  } while (false)

#define CHECK_EQ(a, b) ::lowlat::check::check_eq((a), (b), #a ", " #b, __FILE__, __LINE__)

#define CHECK_NEAR(a, b, bound)                                               \
  ::lowlat::check::check_near(static_cast<double>(a), static_cast<double>(b), \
                              static_cast<double>(bound), #a ", " #b, __FILE__, __LINE__)

#define CHECK_THROWS(...)                                                                  \
  do {                                                                                     \
    bool lowlat_threw = false;                                                             \
    try {                                                                                  \
      static_cast<void>(__VA_ARGS__);                                                      \
    } catch (...) {                                                                        \
      lowlat_threw = true;                                                                 \
    }                                                                                      \
    if (!lowlat_threw)                                                                     \
      ::lowlat::check::report(__FILE__, __LINE__, "CHECK_THROWS(" #__VA_ARGS__ "): none"); \
  } while (false)

#define REQUIRE(...)                                                                          \
  do {                                                                                        \
    if (!(__VA_ARGS__)) {                                                                     \
      ::lowlat::check::report(__FILE__, __LINE__, "REQUIRE(" #__VA_ARGS__ ") does not hold"); \
      throw ::lowlat::check::LeaveFailed{};                                                   \
    }                                                                                         \
  } while (false)

#define SKIP(reason) \
  throw ::lowlat::check::LeaveSkipped { reason }

int main(int argc, char** argv) { return ::lowlat::check::run(argc, argv); }
