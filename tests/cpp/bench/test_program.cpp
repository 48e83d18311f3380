// How programs of the bench end.
#include "bench/program.hpp"

#include <stdexcept>

#include "check.hpp"

using lowlat::bench::exit_status;
using lowlat::bench::measured;
using lowlat::bench::Report;
using lowlat::bench::Words;

TEST_CASE(the_status_is_the_runs_or_3_for_what_was_thrown) {
  CHECK_EQ(exit_status([] { return 1; }), 1);
  CHECK_EQ(exit_status([]() -> int { throw std::runtime_error("no device"); }), 3);
}

TEST_CASE(words_reach_the_measurement_and_wrong_ones_do_not) {
  int rows = 0;
  const auto measure = [&](const Words& words, Report&) {
    rows = words.rows.at(0);
    return 0;
  };
  const char* const good[] = {"measure", "--rows", "12"};
  CHECK_EQ(measured(3, good, measure), 0);
  CHECK_EQ(rows, 12);
  const char* const wrong[] = {"measure", "--rows", "many"};
  CHECK_EQ(measured(3, wrong, measure), 2);
  CHECK_EQ(rows, 12);
}
