// bench/measure_layer_scalar.cpp: a tiny plain V4.1 layer on the CPU by the persistent schedule, a
// thread a rank, and as its baseline one stage after another; the program behind `lowlat bench
// layer --platform scalar`.
//
// It shows that the command works and how the two schedules stand to each other on a CPU. It says
// nothing about a GPU, and its floor (the weights at one thread's read rate from memory, which they
// never come from here) is of use for comparing machines only.
#include <chrono>
#include <fstream>

#include "bench/model_layers.hpp"
#include "bench/program.hpp"

namespace lowlat::bench {
namespace {

constexpr int kFew = 2, kMany = 10;

double now_us() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

// Bytes a second of one thread's read of more than a cache holds.
double read_rate() {
  std::vector<std::uint64_t> data(std::size_t{32} << 20, 1);
  double best = 0.0;
  std::uint64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    const double begin = now_us();
    for (const std::uint64_t v : data) sum += v;
    best = std::max(best, static_cast<double>(8 * data.size()) / (now_us() - begin) * 1e6);
  }
  return sum == 0 ? 0.0 : best;
}

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t at = line.find(": ");
    if (line.rfind("model name", 0) == 0 && at != std::string::npos) return line.substr(at + 2);
  }
  return "a CPU";
}

void measure(Report& report, const Words& words, int rows) {
  ScalarLayers few(words.tp, kFew, rows), many(words.tp, kMany, rows);
  const auto persistent = many.run(false), plain = many.run(true);
  report.check("both schedules choose the same tokens T=" + std::to_string(rows),
               persistent == plain);
  report.check("again the same T=" + std::to_string(rows), many.run(false) == persistent);
  for (const bool is_plain : {false, true}) {
    std::vector<double> times;
    for (int i = 0; i < words.repeats + 2; ++i) {
      const double begin = now_us();
      few.run(is_plain);
      const double middle = now_us();
      many.run(is_plain);
      const double end = now_us();
      if (i >= 2) times.push_back(((end - middle) - (middle - begin)) / (kMany - kFew));
    }
    report.figure({"layer", "v41", is_plain ? "plain" : "persistent", words.tp, words.gpus, rows,
                   spread_of(times), words.repeats, many.layer_bytes(1),
                   "a tiny layer: a step of 10 layers less one of 2, over 8",
                   is_plain ? "baseline" : "lowlat"});
  }
}

int measure_all(const Words& words, Report& report) {
  if (const std::string why = wrong_kind(words, "v41", "persistent"); !why.empty()) {
    return report.refusal(why);
  }
  if (words.tp > 4) return report.refusal("the tiny layer has ranks for --tp 1, 2 and 4");
  report.machine({cpu_name(), 1, 0.0, read_rate(), ""});
  for (const int rows : words.rows) measure(report, words, rows);
  return report.all_good() ? 0 : 1;
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
