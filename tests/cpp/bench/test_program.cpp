// How programs of the bench end.
#include "bench/program.hpp"

#include <stdexcept>
#include <string>
#include <vector>

#include "check.hpp"

using lowlat::bench::checked;
using lowlat::bench::exit_status;
using lowlat::bench::failures;
using lowlat::bench::measured;
using lowlat::bench::Report;
using lowlat::bench::Rest;
using lowlat::bench::verdict;
using lowlat::bench::Words;

namespace {

// The status of a program with these words that takes what take(rest) does.
template <class Take>
int status_of(std::vector<const char*> words, Take take) {
  words.insert(words.begin(), "program");
  failures = 0;
  return checked(static_cast<int>(words.size()), words.data(), "program check N [rows..]", take);
}

}  // namespace

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

TEST_CASE(a_checking_program_ends_by_its_failures) {
  CHECK_EQ(status_of({}, [](Rest&) { return verdict(true, "all of %d", 3); }), 0);
  CHECK_EQ(status_of({}, [](Rest&) { return !verdict(false, "one of %d", 3); }), 1);
  CHECK_EQ(failures, 1);
  CHECK_EQ(status_of({}, [](Rest&) -> bool { throw std::runtime_error("no device"); }), 3);
  CHECK_EQ(status_of({"song"}, [](Rest& rest) { return rest.take("check"); }), 2);
}

TEST_CASE(the_first_word_names_the_part) {
  int times = 0;
  const auto run = [&](std::vector<const char*> words) {
    failures = 0;
    return checked(static_cast<int>(words.size()), words.data(), "program once|never",
                   {{"never", [](Rest&) { verdict(false, "never"); }},
                    {"once", [&](Rest& rest) { times += rest.number(1, 9); }}});
  };
  CHECK_EQ(run({"program", "once", "7"}), 0);
  CHECK_EQ(times, 7);
  CHECK_EQ(run({"program", "never"}), 1);
  CHECK_EQ(run({"program", "twice"}), 2);
  CHECK_EQ(run({"program"}), 2);
  CHECK_EQ(run({"program", "once"}), 2);
  CHECK_EQ(times, 7);
}

TEST_CASE(words_of_a_checking_program_are_taken_one_by_one) {
  std::string what;
  int ranks = 0;
  std::vector<int> rows;
  const auto take = [&](Rest& rest) {
    what = rest.take();
    const bool table = rest.take("table");
    ranks = rest.ranks();
    rows = rest.rows({6, 12});
    return table;
  };
  CHECK_EQ(status_of({"check", "table", "4", "1", "64"}, take), 0);
  CHECK_EQ(what, "check");
  CHECK_EQ(ranks, 4);
  CHECK(rows == (std::vector<int>{1, 64}));
  CHECK_EQ(status_of({"check", "table", "2"}, take), 0);
  CHECK(rows == (std::vector<int>{6, 12}));
  for (const char* wrong : {"3", "1", "two", "2x", "-2", ""}) {
    CHECK_EQ(status_of({"check", "table", wrong}, take), 2);
  }
  for (const char* wrong : {"0", "65", "6,12", "six"}) {
    CHECK_EQ(status_of({"check", "table", "2", "6", wrong}, take), 2);
  }
  CHECK_EQ(status_of({"check", "table"}, take), 2);
}
