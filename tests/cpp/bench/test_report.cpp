// The lines of a measuring program, byte for byte: Python reads them (tests/python/test_cli_bench).
#include "bench/report.hpp"

#include "check.hpp"

namespace {

using lowlat::bench::Report;
using lowlat::bench::spread_of;

// What `say` prints.
template <class Say>
std::string said(const Say& say) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  Report report(file);
  say(report);
  std::rewind(file);
  std::string text;
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

const lowlat::bench::Machine kMachine{"NVIDIA \"H\"", 2, 1980.0, 4e12, "13.0, driver 13.0"};

}  // namespace

TEST_CASE(a_spread_is_the_middle_and_the_tenths) {
  std::vector<double> times;
  for (int i = 99; i >= 0; --i) times.push_back(i);
  const auto spread = spread_of(times);
  CHECK_EQ(spread.median, 50.0);
  CHECK_EQ(spread.low, 10.0);
  CHECK_EQ(spread.high, 90.0);
  CHECK_EQ(spread_of({7.5}).high, 7.5);
}

TEST_CASE(a_machine_is_one_object_a_line) {
  CHECK_EQ(said([](Report& report) { report.machine(kMachine); }),
           "{\"kind\": \"machine\", \"gpu\": \"NVIDIA \\\"H\\\"\", \"gpus\": 2, "
           "\"clock_mhz\": 1980, \"read_bytes_per_s\": 4e+12, "
           "\"cuda\": \"13.0, driver 13.0\"}\n");
}

TEST_CASE(a_figure_has_the_floor_of_the_run) {
  const std::string text = said([](Report& report) {
    report.machine(kMachine);
    report.figure({"layer", "v41", "fused", 4, 1, 6, {80.0, 79.5, 81.25}, 60, 200e6, ""});
  });
  CHECK_EQ(text.substr(text.find('\n') + 1),
           "{\"kind\": \"figure\", \"arm\": \"lowlat\", \"name\": \"layer\", \"model\": \"v41\", "
           "\"schedule\": \"fused\", \"tp\": 4, \"gpus\": 1, \"rows\": 6, \"unit\": \"us\", "
           "\"median\": 80, \"low\": 79.5, \"high\": 81.25, \"repeats\": 60, \"bytes\": 2e+08, "
           "\"floor\": 50, \"share\": 0.625, \"words\": \"\"}\n");
}

TEST_CASE(a_figure_without_bytes_or_rate_has_no_floor) {
  const std::string text = said([](Report& report) {
    report.figure({"draft", "v41", "fused", 2, 2, 6, {30.0, 29.0, 31.0}, 60, 1e6, ""});
    report.machine(kMachine);
    report.figure({"draft", "v41", "fused", 2, 2, 6, {30.0, 29.0, 31.0}, 60, 0.0, ""});
  });
  CHECK_EQ(text.find("floor"), std::string::npos);
  CHECK_EQ(text.find("share"), std::string::npos);
}

TEST_CASE(a_time_that_is_no_number_is_null) {
  const double nan = std::nan("");
  const std::string text = said([&](Report& report) {
    report.figure({"layer", "v41", "fused", 4, 1, 6, {nan, 1.0 / 0.0, 1.0}, 1, 0.0, ""});
  });
  CHECK(text.find("\"median\": null, \"low\": null, \"high\": 1") != std::string::npos);
}

TEST_CASE(a_check_that_fails_is_remembered) {
  std::FILE* none = std::tmpfile();
  REQUIRE(none != nullptr);
  Report report(none);
  report.check("a", true);
  CHECK(report.all_good());
  report.check("b", false, "off by 2");
  report.check("c", true);
  CHECK(!report.all_good());
  std::fclose(none);
  CHECK_EQ(said([](Report& r) { r.check("b", false, "off by 2"); }),
           "{\"kind\": \"check\", \"name\": \"b\", \"good\": false, \"words\": \"off by 2\"}\n");
}

TEST_CASE(a_refusal_is_a_line) {
  CHECK_EQ(said([](Report& report) { report.refusal("no GPU"); }),
           "{\"kind\": \"refusal\", \"words\": \"no GPU\"}\n");
}
