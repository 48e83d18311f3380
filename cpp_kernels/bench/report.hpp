// bench/report.hpp: what a measuring program says, one JSON object a line on its standard output.
// `lowlat bench` runs the programs, adds the baseline arm, prints, stores and compares; a line that
// is no object is for people. Every C++ compiler reads it.
//
// The timed loops are programs of their own, and no function of the kernels' library or of its
// Python face: a kernel that hangs or a GPU that faults then ends a process and not the caller's,
// the library that engines link carries no harness, and the same program runs under a profiler or
// compute-sanitizer as it is.
//
//   {"kind": "machine", ...}   first: device, clock, and the read rate that floors are made with
//   {"kind": "check", ...}     a result that was compared, good or not
//   {"kind": "figure", ...}    a time: median and spread of `repeats`, bytes, floor, share
//   {"kind": "refusal", ...}   last, with exit status 1: what is missing here and what changes it
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "host/json.hpp"

namespace lowlat::bench {

// Times in microseconds, of one unit (a layer, an exchange). low and high: the 10th and the 90th of
// a hundred.
struct Spread {
  double median, low, high;
};

// Of at least one time.
inline Spread spread_of(std::vector<double> times) {
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() / 10], times[times.size() * 9 / 10]};
}

struct Machine {
  std::string gpu;
  int gpus;
  double clock_mhz;
  double read_bytes_per_s;  // of a plain read of 1 GiB or more, in this run
  std::string cuda;         // runtime, driver
};

// What names a figure: the same in every run, so that runs can be compared.
struct Figure {
  std::string name;  // "layer", "exchange", "moe" ...
  std::string model, schedule;
  int tp, gpus, rows;
  Spread us;
  int repeats;
  double bytes;  // that a step must move a GPU; 0: no floor
  std::string words;
  std::string arm = "lowlat";  // or "baseline", where the program has that too
};

class Report {
 public:
  explicit Report(std::FILE* out = stdout) : out_(out) {}

  void machine(const Machine& m) {
    rate_ = m.read_bytes_per_s;
    begin("machine");
    field("gpu", m.gpu);
    field("gpus", m.gpus);
    field("clock_mhz", m.clock_mhz);
    field("read_bytes_per_s", m.read_bytes_per_s);
    field("cuda", m.cuda);
    end();
  }
  void check(std::string_view name, bool good, std::string_view words = "") {
    all_good_ = all_good_ && good;
    begin("check");
    field("name", name);
    line_ += std::string(", \"good\": ") + (good ? "true" : "false");
    field("words", words);
    end();
  }
  void figure(const Figure& f) {
    begin("figure");
    field("arm", f.arm);
    field("name", f.name);
    field("model", f.model);
    field("schedule", f.schedule);
    field("tp", f.tp);
    field("gpus", f.gpus);
    field("rows", f.rows);
    field("unit", "us");
    field("median", f.us.median);
    field("low", f.us.low);
    field("high", f.us.high);
    field("repeats", f.repeats);
    if (f.bytes > 0 && rate_ > 0) {
      const double floor_us = f.bytes / rate_ * 1e6;
      field("bytes", f.bytes);
      field("floor", floor_us);
      field("share", floor_us / f.us.median);
    }
    field("words", f.words);
    end();
  }
  // Gives the program's exit status.
  int refusal(std::string_view words) {
    begin("refusal");
    field("words", words);
    end();
    return 1;
  }
  // Whether no check has failed so far.
  bool all_good() const { return all_good_; }

 private:
  void begin(std::string_view kind) {
    line_ = "{\"kind\": ";
    append(kind);
  }
  void field(const char* name, std::string_view text) {
    key(name);
    append(text);
  }
  void field(const char* name, const char* text) { field(name, std::string_view(text)); }
  void field(const char* name, int value) {
    key(name);
    line_ += std::to_string(value);
  }
  void field(const char* name, double value) {
    key(name);
    char text[32];
    // JSON has no infinity and no NaN.
    std::snprintf(text, sizeof text, "%.7g", value);
    line_ += std::isfinite(value) ? text : "null";
  }
  void key(const char* name) {
    line_ += ", ";
    append(name);
    line_ += ": ";
  }
  void append(std::string_view text) { host::append_string(line_, text); }
  void end() {
    line_ += "}\n";
    std::fputs(line_.c_str(), out_);
    std::fflush(out_);
  }

  std::FILE* out_;
  std::string line_;
  double rate_ = 0.0;
  bool all_good_ = true;
};

}  // namespace lowlat::bench
