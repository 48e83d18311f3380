// bench/measure_layer.cu: plain V4.1-Flash layers, checked and timed; the program behind `lowlat
// bench layer` and, built with LOWLAT_STAMPS=1, behind `lowlat profile layer`.
//
// A chain of layers in one CUDA graph, each with weights of its own, so that no cache holds them; a
// figure is the graph's time over the number of layers. One GPU: the mailboxes of all ranks are its
// own. As many GPUs as ranks: the longest rank's time of four replays in a row.
#include <fstream>
#include <memory>

#include "bench/layer_case.cuh"
#include "bench/machine.cuh"
#include "bench/resident_case.cuh"
#include "bench/stamps_file.hpp"
#include "bench/words.hpp"
#include "host/nvidia/exchange_region.hpp"
#include "shape/bytes.hpp"

namespace lowlat::bench {
namespace {

constexpr int kLayers = 4, kReplays = 20, kStampedLayer = 2;
constexpr std::uint64_t kBudgetNs = 200'000'000, kProbeBudgetNs = 1'000'000'000;
#ifdef LOWLAT_STAMPS
constexpr bool kStamps = LOWLAT_STAMPS != 0;
#else
constexpr bool kStamps = false;
#endif

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

bool finite(const std::vector<std::uint16_t>& values) {
  return std::all_of(values.begin(), values.end(),
                     [](std::uint16_t v) { return (v & 0x7f80) != 0x7f80; });
}

// All ranks of a group, each on its device or all looped back on one.
template <int kTp>
class Group {
 public:
  Group(const HostWeights& host, int gpus, int rows) {
    if (gpus == 1) {
      mail_ = std::make_unique<Mailboxes>(rows, kTp);
      fused::ExchangePort port = mail_->looped(kTp);
      port.budget_ns = kBudgetNs;
      ranks_.push_back(
          std::make_unique<Layers<kTp>>(host, kLayers, rows, port, mail_->step_epoch.get(), 0));
    }
    for (int r = 0; gpus > 1 && r < gpus; ++r) {
      on(r);
      regions_.push_back(std::make_unique<host::cuda::ExchangeRegion>(r, kTp, rows, kHidden));
    }
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      on(r);
      for (std::size_t peer = 0; peer < regions_.size(); ++peer) {
        if (peer == r) continue;
        regions_[r]->open(static_cast<int>(peer), regions_[peer]->handle());
        regions_[r]->probe(static_cast<int>(peer));
      }
    }
    for (std::size_t r = 0; r < regions_.size(); ++r) {
      on(r);
      for (std::size_t peer = 0; peer < regions_.size(); ++peer) {
        if (peer != r) regions_[r]->probed_by(static_cast<int>(peer), kProbeBudgetNs);
      }
      ranks_.push_back(std::make_unique<Layers<kTp>>(
          host, kLayers, rows, regions_[r]->port(kBudgetNs, 0), regions_[r]->step_epoch(), r));
    }
    graphs_.resize(ranks_.size());
  }
  Layers<kTp>& first() { return *ranks_[0]; }
  std::size_t size() const { return ranks_.size(); }

  void capture(const fused::LayerParts& parts) {
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      graphs_[r] =
          std::make_unique<Graph>([&](cudaStream_t stream) { ranks_[r]->launch(parts, stream); });
      // Gates count the steps of one chain.
      ranks_[r]->recover();
    }
  }
  // The inputs of a step. The devices are idle.
  void begin() {
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      ranks_[r]->reset();
      // The graphs' streams do not wait for the one that fills.
      cuda_must(cudaDeviceSynchronize(), "inputs");
    }
  }
  // One step by the graphs, or launched as it comes.
  void run(bool eager) {
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      if (eager) {
        ranks_[r]->launch({}, graphs_[r]->stream());
      } else {
        graphs_[r]->replay();
      }
    }
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      graphs_[r]->wait();
    }
  }
  std::vector<std::uint16_t> result(std::size_t r) {
    on(r);
    return ranks_[r]->take();
  }
  // "" or the status words of the first rank that has any.
  std::string fault() const {
    for (std::size_t r = 0; r < size(); ++r) {
      const auto* words = static_cast<const std::uint32_t*>(ranks_[r]->port.status);
      if (words[0] == 0) continue;
      return "rank " + std::to_string(r) + ": kernel " + std::to_string(words[1]) + ", stage " +
             std::to_string(words[2]) + ", peer " + std::to_string(words[3]);
    }
    return "";
  }
  // Microseconds a layer, of the longest rank.
  Spread time(int repeats) {
    // Several replays in a row where there are peers, so that the ranks' starts do not count.
    const int in_a_row = size() > 1 ? 4 : 1;
    std::vector<cudaEvent_t> from(size()), to(size());
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      cuda_must(cudaEventCreate(&from[r]), "event");
      cuda_must(cudaEventCreate(&to[r]), "event");
    }
    std::vector<double> times;
    for (int i = 0; i < repeats + 5; ++i) {
      for (std::size_t r = 0; r < size(); ++r) {
        on(r);
        Graph& graph = *graphs_[r];
        if (size() > 1) graph.replay();
        cuda_must(cudaEventRecord(from[r], graph.stream()), "record");
        for (int j = 0; j < in_a_row; ++j) graph.replay();
        cuda_must(cudaEventRecord(to[r], graph.stream()), "record");
      }
      double longest = 0.0;
      for (std::size_t r = 0; r < size(); ++r) {
        on(r);
        graphs_[r]->wait();
        float ms = 0.0f;
        cuda_must(cudaEventElapsedTime(&ms, from[r], to[r]), "elapsed");
        longest = std::max(longest, ms * 1e3 / in_a_row / kLayers);
      }
      if (i >= 5) times.push_back(longest);
    }
    for (std::size_t r = 0; r < size(); ++r) {
      on(r);
      cudaEventDestroy(from[r]);
      cudaEventDestroy(to[r]);
    }
    return spread_of(times);
  }

 private:
  void on(std::size_t rank) const {
    cuda_must(cudaSetDevice(mail_ ? 0 : static_cast<int>(rank)), "device");
  }

  std::unique_ptr<Mailboxes> mail_;
  std::vector<std::unique_ptr<host::cuda::ExchangeRegion>> regions_;
  std::vector<std::unique_ptr<Layers<kTp>>> ranks_;
  std::vector<std::unique_ptr<Graph>> graphs_;
};

// Eager and replayed steps give the same bits on every rank, and nothing faulted.
template <int kTp>
bool check(Report& report, Group<kTp>& group, int rows) {
  const std::string at = " T=" + std::to_string(rows);
  group.capture({});
  group.begin();
  group.run(true);
  const std::vector<std::uint16_t> first = group.result(0);
  int different = 0;
  for (std::size_t r = 1; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  for (int i = 0; i < kReplays && group.fault().empty(); ++i) {
    group.begin();
    group.run(false);
    for (std::size_t r = 0; r < group.size(); ++r) different += group.result(r) != first ? 1 : 0;
  }
  const std::string fault = group.fault();
  report.check("no wait expired" + at, fault.empty(), fault);
  report.check("residual and x finite" + at, finite(first));
  report.check(std::to_string(kReplays) + " replays and all ranks equal eager" + at, different == 0,
               std::to_string(different) + " differ");
  return fault.empty();
}

template <int kTp>
int run(const Words& words, Report& report, double clock_mhz, const std::string& gpu) {
  Random random(1);
  const HostWeights host(64 / kTp, 8 / kTp, random);
  for (const int rows : words.rows) {
    Group<kTp> group(host, words.gpus, rows);
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
      group.run(false);
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

// The same layer by the resident schedule: a share of the difference between two models.
int run_persistent(const Words& words, Report& report) {
  constexpr int kFew = 4, kExtra = 4;
  ResidentShard few(kFew), many(kFew + kExtra);
  for (const int rows : words.rows) {
    const std::vector<double> errors = logit_errors(many, rows);
    report.check("logits with and without the fused experts T=" + std::to_string(rows),
                 errors[errors.size() / 2] < kLogitBound,
                 "rel_l2 of the median row " + std::to_string(errors[errors.size() / 2]));
    const auto a = few.times(rows, lowlat_plain_step_launch, words.repeats);
    const auto b = many.times(rows, lowlat_plain_step_launch, words.repeats);
    const auto at = [&](double share) { return layer_us(a, b, kExtra, share); };
    report.figure({"layer",
                   "v41",
                   words.schedule,
                   words.tp,
                   words.gpus,
                   rows,
                   {at(0.5), at(0.1), at(0.9)},
                   words.repeats,
                   shape::plain_layer_bytes<shape::Dsv41Flash<4>>(rows) +
                       rows * shape::row_kv_bytes<shape::Dsv41Flash<4>>(),
                   "a share of steps of 8 and of 4 layers; bytes of evenly spread experts"});
  }
  return report.all_good() ? 0 : 1;
}

int main_of(int argc, char** argv) {
  const Words words = read_words(argc, argv);
  if (!words.wrong.empty()) {
    std::fprintf(stderr, "%s\n", words.wrong.c_str());
    return 2;
  }
  Report report;
  const auto refuse = [&](const std::string& why) {
    report.refusal(why);
    return 1;
  };
  if (words.model != "v41") {
    return refuse("this program's layers are v41's, not " + words.model + "'s");
  }
  const bool is_fused = words.schedule == "fused";
  if (!is_fused && words.schedule != "persistent") {
    return refuse("needed --schedule fused or persistent, not " + words.schedule);
  }
  if (!is_fused && (kStamps || words.gpus > 1)) {
    return refuse("the persistent layer is timed without stamps, on one GPU: --gpus 1");
  }
  if (words.tp != 4) {
    return refuse("the layer runs for --tp 4, not " + std::to_string(words.tp));
  }
  if (kStamps != !words.stamps.empty()) {
    return refuse(kStamps ? "the program with stamps needs --stamps FILE"
                          : "--stamps needs the program with stamps");
  }
  if (kStamps && words.gpus > 1) return refuse("stamps are taken on one GPU: --gpus 1");
  if (!require_gpus(report, words.gpus)) return 1;
  const Machine machine = measure_machine(words.gpus);
  report.machine(machine);
  if (!is_fused) return run_persistent(words, report);
  return run<4>(words, report, machine.clock_mhz, machine.gpu);
}

}  // namespace
}  // namespace lowlat::bench

int main(int argc, char** argv) {
  try {
    return lowlat::bench::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
