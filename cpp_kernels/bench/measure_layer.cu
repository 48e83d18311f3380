// bench/measure_layer.cu: plain V4.1-Flash layers by the fused schedule, checked and timed; the
// program behind `lowlat bench layer` and, built with LOWLAT_STAMPS=1, behind `lowlat profile
// layer`.
//
// A chain of layers in one CUDA graph, each with weights of its own, so that no cache holds them; a
// figure is the graph's time over the number of layers. One GPU: the mailboxes of all ranks are its
// own. As many GPUs as ranks: the longest rank's time of four replays in a row.
#include <fstream>
#include <memory>

#include "bench/layer_group.cuh"
#include "bench/machine.cuh"
#include "bench/program.hpp"
#include "bench/stamps_file.hpp"
#include "shape/bytes.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4, kReplays = 20, kStampedLayer = 2;

// What a layer of these parts must read: weights of the chosen experts, once each, and keys.
template <int kTp>
double layer_bytes(const Layers<kTp>& layers, const fused::LayerParts& parts) {
  using Shape = shape::Dsv41Flash<kTp>;
  const int rows = layers.rows;
  double sum = 0.0;
  if (parts.attention) sum += layers.weights[0].bytes() + rows * shape::row_kv_bytes<Shape>();
  if (parts.experts) {
    const double distinct = distinct_experts(layers.ids.take(), kLayers, rows);
    sum += distinct * shape::expert_weight_bytes<Shape>() + shape::moe_weight_bytes<Shape>(0);
  }
  if (parts.second_statistics) sum += shape::mix_weight_bytes<Shape>() / 2;
  return sum;
}

// Eager and replayed steps give the same bits on every rank, and nothing faulted.
template <int kTp>
bool check(Report& report, Group<kTp>& group, int rows) {
  const std::string at = " T=" + std::to_string(rows);
  group.capture({});
  group.begin();
  group.launch({});
  const std::vector<std::uint16_t> first = group.result(0);
  int different = 0;
  for (int r = 1; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  for (int i = 0; i < kReplays && group.fault().empty(); ++i) {
    group.begin();
    group.replay();
    for (int r = 0; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  }
  const std::string fault = group.fault();
  report.check("no wait expired" + at, fault.empty(), fault);
  report.check("residual and x finite" + at, all_finite(first));
  report.check(std::to_string(kReplays) + " replays and all ranks equal eager" + at, different == 0,
               std::to_string(different) + " differ");
  return fault.empty();
}

template <int kTp>
int run(const Words& words, Report& report, double clock_mhz, const std::string& gpu) {
  for (const int rows : words.rows) {
    Group<kTp> group(words.gpus, kLayers, rows);
    if (!check(report, group, rows)) return 1;
    struct Part {
      const char* name;
      fused::LayerParts parts;
    };
    Part parts[3] = {{"layer", {}}, {"attention", {}}, {"moe", {}}};
    parts[1].parts.experts = parts[1].parts.second_statistics = false;
    parts[2].parts.attention = false;
    for (const Part& part : parts) {
      group.capture(part.parts);
      const Spread us = group.time(words.repeats);
      if (!group.fault().empty()) {
        report.check(std::string("no wait expired in ") + part.name, false, group.fault());
        return 1;
      }
      report.figure({part.name, "v41", words.schedule, kTp, words.gpus, rows, us, words.repeats,
                     layer_bytes(group.first(), part.parts),
                     kStamps ? "with stamps" : "chain of 4 layers"});
      if (!kStamps || &part != parts) continue;
      group.first().stamps.zero();
      group.begin();
      group.replay();
      const StampsAbout about = {"layer", "v41", words.schedule, gpu,       kTp,
                                 1,       rows,  words.plain_us, us.median, kStampedLayer};
      std::ofstream file(words.stamps);
      file << stamps_json(group.first().stamps.take(), about, clock_mhz);
      file.close();
      report.check("stamps written", file.good(), words.stamps);
      return report.all_good() ? 0 : 1;
    }
  }
  return report.all_good() ? 0 : 1;
}

std::string wrong_stamps(const Words& words) {
  if (!kStamps) return needless_stamps(words);
  if (words.stamps.empty()) return "the program with stamps needs --stamps FILE";
  return words.gpus > 1 ? "stamps are taken on one GPU: --gpus 1" : "";
}

int measure_all(const Words& words, Report& report) {
  const std::string why =
      first_of({wrong_kind(words, "v41", "fused"), wrong_places(words), wrong_stamps(words)});
  return on_machine(report, words.gpus, why, [&](const Machine& machine) {
    return words.tp == 2 ? run<2>(words, report, machine.clock_mhz, machine.gpu)
                         : run<4>(words, report, machine.clock_mhz, machine.gpu);
  });
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  return lowlat::bench::measured(argc, argv, lowlat::bench::measure_all);
}
