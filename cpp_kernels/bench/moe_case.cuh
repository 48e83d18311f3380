// bench/moe_case.cuh: a layer's experts with drawn weights, and the region checked against
// reference/ at true shapes. Shared by the bench and the GPU test.
//
// Weights are drawn by a counter-based generator, so the host makes again only the experts that a
// case chose.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "bench/marlin_layout.cuh"
#include "fused/moe.hpp"
#include "reference/experts.hpp"
#include "reference/format.hpp"
#include "reference/gate.hpp"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::bench {

using lowlat::fused::MoeArgs;
using lowlat::fused::MoeLayout;
using lowlat::fused::MoeMatrix;
using lowlat::fused::MoeRouting;
using lowlat::fused::MoeShape;

inline void require(cudaError_t status, const char* what, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "moe, line %d: %s: %s\n", line, what, cudaGetErrorString(status));
  std::exit(3);
}
#define CUDA(call) ::lowlat::bench::require((call), #call, __LINE__)

// ---------------------------------------------------------------------------------- drawn data

__host__ __device__ inline std::uint32_t draw(std::uint32_t seed, std::uint64_t i) {
  std::uint64_t z = i + 0x9e37'79b9'7f4a'7c15ull * (seed + 1);
  z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
  z = (z ^ z >> 27) * 0x94d0'49bb'1331'11ebull;
  return static_cast<std::uint32_t>((z ^ z >> 31) >> 16);
}
enum class Draw { bytes, e4m3, scales };
__host__ __device__ inline std::uint8_t draw_byte(Draw kind, std::uint32_t seed, std::uint64_t i,
                                                  int low) {
  const std::uint32_t v = draw(seed, i);
  if (kind == Draw::scales) return static_cast<std::uint8_t>(low + v % 5);
  const auto byte = static_cast<std::uint8_t>(v);
  return kind == Draw::e4m3 && (byte & 0x7f) == 0x7f ? static_cast<std::uint8_t>(byte ^ 1) : byte;
}
static __global__ void fill(std::uint8_t* dst, std::size_t n, Draw kind, std::uint32_t seed,
                            int low) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < n; i += step) {
    dst[i] = draw_byte(kind, seed, i, low);
  }
}
// Roughly normal: the sum of twelve uniforms.
inline float draw_normal(std::uint32_t seed, std::uint64_t i) {
  float sum = -6.0f;
  for (int k = 0; k < 12; ++k) sum += static_cast<float>(draw(seed, i * 12 + k)) * 0x1p-32f;
  return sum;
}
inline std::uint16_t bf16(float v) { return lowlat::reference::to_bf16(v); }

struct Buffer {  // device memory
  std::uint8_t* data = nullptr;
  std::size_t bytes = 0;
  explicit Buffer(std::size_t n) : bytes(n) { CUDA(cudaMalloc(&data, n)); }
  Buffer(const Buffer&) = delete;
  Buffer(Buffer&& other) : data(other.data), bytes(other.bytes) { other.data = nullptr; }
  ~Buffer() { cudaFree(data); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};
struct Drawn {  // bytes that both sides can make
  Draw kind;
  std::uint32_t seed;
  int low;
  Buffer buffer;
  Drawn(Draw k, std::uint32_t s, std::size_t n, int l = 0) : kind(k), seed(s), low(l), buffer(n) {
    fill<<<1056, 256>>>(buffer.data, n, kind, seed, low);
    CUDA(cudaGetLastError());
  }
  std::vector<std::uint8_t> host(std::size_t begin, std::size_t n) const {
    std::vector<std::uint8_t> out(n);
    for (std::size_t i = 0; i < n; ++i) out[i] = draw_byte(kind, seed, begin + i, low);
    return out;
  }
};

// ---------------------------------------------------------------------------------- a layer

struct Dims {
  MoeShape shape;
  const char* name;
  int hidden, inner, experts, slots, block;
};
template <class S>
Dims dims(MoeShape shape, const char* name) {
  return {
      shape,         name, S::kHidden, S::kIntermediateLocal, S::kNumExperts, S::kExpertsPerToken,
      S::kScaleBlock};
}

inline constexpr int kMaxRows = 64, kSets = 8, kPeers = 4;

struct Layer {
  Dims d;
  MoeLayout layout;
  std::uint64_t budget_ns = 200'000'000;  // of a launch
  std::vector<Buffer> relaid;             // marlin: w1 and w3, w2, each codes and scales
  std::size_t matrix, scales;             // bytes of one expert's matrix and its scales
  Drawn w1, w1_scale, w3, w3_scale, w2, w2_scale, s1, s1_scale, s3, s3_scale, s2, s2_scale;
  Buffer gate, bias, x, ids, weights, out, out_ids, out_weights, workspace, boxes, outboxes, epoch,
      status, abort_word, abort_words;
  std::vector<std::uint16_t> host_gate, host_x;
  std::vector<float> host_bias;

  explicit Layer(const Dims& dims, MoeLayout weights = MoeLayout::checkpoint)
      : d(dims),
        layout(weights),
        matrix(std::size_t(d.hidden) * d.inner / 2),
        scales(std::size_t(d.hidden) * d.inner / 32),
        w1(Draw::bytes, 1, matrix * d.experts),
        w1_scale(Draw::scales, 2, scales * d.experts, 117),
        w3(Draw::bytes, 3, matrix * d.experts),
        w3_scale(Draw::scales, 4, scales * d.experts, 117),
        w2(Draw::bytes, 5, matrix * d.experts),
        w2_scale(Draw::scales, 6, scales * d.experts, 118),
        s1(Draw::e4m3, 7, matrix * 2),
        s1_scale(Draw::scales, 8, matrix * 2 / (d.block * d.block), 111),
        s3(Draw::e4m3, 9, matrix * 2),
        s3_scale(Draw::scales, 10, matrix * 2 / (d.block * d.block), 111),
        s2(Draw::e4m3, 11, matrix * 2),
        s2_scale(Draw::scales, 12, matrix * 2 / (d.block * d.block), 113),
        gate(std::size_t(2) * d.experts * d.hidden),
        bias(std::size_t(4) * d.experts),
        x(std::size_t(2) * kSets * kMaxRows * d.hidden),
        ids(std::size_t(4) * kSets * kMaxRows * d.slots),
        weights(std::size_t(4) * kSets * kMaxRows * d.slots),
        out(std::size_t(4) * kSets * kMaxRows * d.hidden),
        out_ids(std::size_t(4) * kSets * kMaxRows * d.slots),
        out_weights(std::size_t(4) * kSets * kMaxRows * d.slots),
        workspace(lowlat::fused::moe_workspace_bytes(d.shape)),
        boxes(std::size_t(16) * 2 * kPeers * kPeers * box_packets()),
        outboxes(8 * kPeers),
        epoch(8),
        status(64),
        abort_word(4),
        abort_words(8),
        host_gate(std::size_t(d.experts) * d.hidden),
        host_x(std::size_t(kSets) * kMaxRows * d.hidden),
        host_bias(d.experts) {
    if (layout == MoeLayout::marlin) {
      const std::size_t hidden = d.hidden, inner = d.inner;
      relay({w1.buffer.data, w3.buffer.data, inner, hidden / 2}, false);
      relay({w1_scale.buffer.data, w3_scale.buffer.data, inner, hidden / 32}, true);
      relay({w2.buffer.data, nullptr, hidden, inner / 2}, false);
      relay({w2_scale.buffer.data, nullptr, hidden, inner / 32}, true);
    }
    const float gain = 1.5f / std::sqrt(static_cast<float>(d.hidden));
    for (std::size_t i = 0; i < host_gate.size(); ++i) {
      host_gate[i] = bf16(draw_normal(20, i) * gain);
    }
    for (std::size_t i = 0; i < host_x.size(); ++i) host_x[i] = bf16(draw_normal(21, i));
    for (int e = 0; e < d.experts; ++e) host_bias[e] = 0.05f * draw_normal(22, e);
    CUDA(cudaMemcpy(gate.data, host_gate.data(), gate.bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(x.data, host_x.data(), x.bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(bias.data, host_bias.data(), bias.bytes, cudaMemcpyHostToDevice));
    CUDA(static_cast<cudaError_t>(
        lowlat::fused::moe_workspace_init(d.shape, workspace.data, nullptr)));
    std::uint8_t* peers[kPeers];
    for (int peer = 0; peer < kPeers; ++peer) {
      peers[peer] = boxes.data + std::size_t(16) * 2 * kPeers * box_packets() * peer;
    }
    CUDA(cudaMemcpy(outboxes.data, peers, sizeof(peers), cudaMemcpyHostToDevice));
    CUDA(cudaMemset(boxes.data, 0, boxes.bytes));
    CUDA(cudaMemset(status.data, 0, status.bytes));
    CUDA(cudaMemset(abort_word.data, 0, abort_word.bytes));
    CUDA(cudaMemcpy(abort_words.data, &abort_word.data, 8, cudaMemcpyHostToDevice));
    set_epoch(1);
  }
  void relay(const Rows& rows, bool scale) {
    const std::size_t bytes = d.experts * rows.all() * rows.bytes;
    relaid.emplace_back(bytes);
    if (scale) {
      marlin_scales<<<1056, 256>>>(relaid.back().data, bytes, rows);
    } else {
      marlin_codes<<<1056, 256>>>(relaid.back().as<std::uint32_t>(), bytes / 4, rows);
    }
    CUDA(cudaGetLastError());
  }
  std::int64_t box_packets() const { return lowlat::fused::moe_box_packets(d.shape, kMaxRows); }
  void set_epoch(std::uint64_t e) const {
    CUDA(cudaMemcpy(epoch.data, &e, 8, cudaMemcpyHostToDevice));
  }

  MoeArgs args(int rows, MoeRouting routing, int set, bool shared, bool publish) const {
    MoeArgs a = {};
    a.rows = rows;
    a.routing = routing;
    const std::size_t row = std::size_t(set) * kMaxRows;
    a.x = x.as<std::uint16_t>() + row * d.hidden;
    a.ids = ids.as<std::int32_t>() + row * d.slots;
    a.weights = weights.as<float>() + row * d.slots;
    a.w.gate = gate.as<std::uint16_t>();
    a.w.gate_bias = bias.as<float>();
    a.w.w1 = {w1.buffer.data, w1_scale.buffer.data};
    a.w.w3 = {w3.buffer.data, w3_scale.buffer.data};
    a.w.w2 = {w2.buffer.data, w2_scale.buffer.data};
    a.w.layout = layout;
    if (layout == MoeLayout::marlin) {
      a.w.w1 = {relaid[0].data, relaid[1].data};
      a.w.w3 = {};
      a.w.w2 = {relaid[2].data, relaid[3].data};
    }
    if (shared) {
      a.w.shared_w1 = {s1.buffer.data, s1_scale.buffer.data};
      a.w.shared_w3 = {s3.buffer.data, s3_scale.buffer.data};
      a.w.shared_w2 = {s2.buffer.data, s2_scale.buffer.data};
    }
    a.out_ids = out_ids.as<std::int32_t>() + row * d.slots;
    a.out_weights = out_weights.as<float>() + row * d.slots;
    a.out = out.as<float>() + row * d.hidden;
    a.workspace = workspace.data;
    if (publish) {
      a.boxes = {outboxes.as<void*>(), box_packets(), epoch.as<std::uint64_t>()};
    }
    a.fault = {abort_words.as<std::uint32_t*>(), status.data, 0, publish ? kPeers : 1, budget_ns};
    // Four mailboxes of one GPU: there is one abort word, and a fault raises it four times.
    if (publish) a.fault.abort_words = nullptr;
    return a;
  }

  // A status that is not healthy ends the program.
  void require_healthy(const char* what) const {
    std::uint32_t words[6];
    CUDA(cudaMemcpy(words, status.data, sizeof(words), cudaMemcpyDeviceToHost));
    if (words[0] == 0) return;
    std::fprintf(stderr, "%s: %s: fault: state %u, event %u, epoch %u\n", d.name, what, words[0],
                 words[1], words[4]);
    std::exit(3);
  }
};

template <class T>
std::vector<T> read(const Buffer& buffer, std::size_t begin, std::size_t n) {
  std::vector<T> out(n);
  CUDA(cudaMemcpy(out.data(), buffer.as<T>() + begin, n * sizeof(T), cudaMemcpyDeviceToHost));
  return out;
}

// ---------------------------------------------------------------------------------- check

// reference::experts on the experts that `ids` names, a thread a row.
inline std::vector<float> reference_experts(const Layer& layer, int rows, const std::uint16_t* x,
                                            const std::vector<std::int32_t>& ids,
                                            const std::vector<float>& weights) {
  const Dims& d = layer.d;
  const std::set<std::int32_t> distinct(ids.begin(), ids.end());
  const std::vector<std::int32_t> chosen(distinct.begin(), distinct.end());
  std::vector<std::int32_t> local(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    local[i] = std::lower_bound(chosen.begin(), chosen.end(), ids[i]) - chosen.begin();
  }
  const Drawn* drawn[6] = {&layer.w1,       &layer.w1_scale, &layer.w3,
                           &layer.w3_scale, &layer.w2,       &layer.w2_scale};
  std::vector<std::uint8_t> stacks[6];
  for (int i = 0; i < 6; ++i) {
    stacks[i].resize((i % 2 ? layer.scales : layer.matrix) * chosen.size());
  }
  const auto parallel = [](int n, const std::function<void(int)>& job) {
    const int num = std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::thread> threads;
    for (int k = 0; k < num; ++k) {
      threads.emplace_back([=, &job] {
        for (int i = k; i < n; i += num) job(i);
      });
    }
    for (std::thread& thread : threads) thread.join();
  };
  parallel(static_cast<int>(chosen.size()), [&](int e) {
    for (int i = 0; i < 6; ++i) {
      const std::size_t n = i % 2 ? layer.scales : layer.matrix;
      const std::vector<std::uint8_t> bytes = drawn[i]->host(n * chosen[e], n);
      std::copy(bytes.begin(), bytes.end(), stacks[i].begin() + n * e);
    }
  });
  const std::size_t fp8 = layer.matrix * 2, blocks = fp8 / (d.block * d.block);
  const std::vector<std::uint8_t> s1 = layer.s1.host(0, fp8), s3 = layer.s3.host(0, fp8),
                                  s2 = layer.s2.host(0, fp8);
  const auto factors = [&](const Drawn& scale) {
    std::vector<float> out;
    for (const std::uint8_t byte : scale.host(0, blocks)) {
      out.push_back(static_cast<float>(lowlat::reference::from_ue8m0(byte)));
    }
    return out;
  };
  const std::vector<float> f1 = factors(layer.s1_scale), f3 = factors(layer.s3_scale),
                           f2 = factors(layer.s2_scale);
  std::vector<float> y(std::size_t(rows) * d.hidden);
  parallel(rows, [&](int t) {
    lowlat::reference::experts(
        &y[std::size_t(t) * d.hidden], x + std::size_t(t) * d.hidden,
        {stacks[0].data(), stacks[1].data()}, {stacks[2].data(), stacks[3].data()},
        {stacks[4].data(), stacks[5].data()}, &local[std::size_t(t) * d.slots],
        &weights[std::size_t(t) * d.slots], {s1.data(), f1.data()}, {s3.data(), f3.data()},
        {s2.data(), f2.data()}, 1, d.hidden, d.inner, d.slots, d.block);
  });
  return y;
}

// ||got - want|| / ||want||, of all and of the worst row.
struct Distance {
  double all, worst_row;
};
inline Distance distance(const std::vector<float>& got, const std::vector<float>& want, int row) {
  double error = 0, norm = 0, worst = 0;
  for (std::size_t begin = 0; begin < want.size(); begin += row) {
    double e = 0, n = 0;
    for (std::size_t i = begin; i < begin + row; ++i) {
      const double delta = double(got[i]) - want[i];
      e += delta * delta;
      n += double(want[i]) * want[i];
    }
    error += e;
    norm += n;
    worst = std::max(worst, std::isnan(e) ? INFINITY : std::sqrt(e / n));
  }
  return {std::sqrt(error / norm), worst};
}

inline constexpr double kBound = 1e-2;  // of `experts`: Marlin's roundings, docs/numerics.md

inline bool check_case(const Layer& layer, int rows, const std::string& scenario, int replays) {
  const Dims& d = layer.d;
  const std::size_t pairs = std::size_t(rows) * d.slots;
  const int set = rows % kSets;
  const std::size_t first_row = std::size_t(set) * kMaxRows;
  const std::uint16_t* x = layer.host_x.data() + first_row * d.hidden;
  std::vector<std::int32_t> want_ids(pairs);
  std::vector<float> want_weights(pairs);
  const bool gated = scenario == "gate";
  const bool by_table = scenario == "table";
  if (gated) {
    lowlat::reference::gate(want_ids.data(), want_weights.data(), x, layer.host_gate.data(),
                            layer.host_bias.data(), rows, d.hidden, d.experts, d.slots,
                            d.shape != MoeShape::v41_tp4 && d.shape != MoeShape::v41_tp2);
  } else {
    for (std::size_t i = 0; i < pairs; ++i) {
      const int slot = static_cast<int>(i % d.slots);
      want_ids[i] = scenario == "same"    ? (slot * 61 + 7) % d.experts
                    : scenario == "last"  ? d.experts - 1 - slot
                    : scenario == "twice" ? static_cast<int>(i / 2 * 7 + 3) % d.experts
                                          : static_cast<int>(i * 7 + 3) % d.experts;
      want_weights[i] = 0.1f + 0.01f * static_cast<float>(draw(30, i) % 64);
    }
    if (by_table) {
      std::vector<std::int64_t> tokens(rows);
      for (int t = 0; t < rows; ++t) tokens[t] = t;
      lowlat::reference::hash_gate(want_ids.data(), want_weights.data(), tokens.data(),
                                   want_ids.data(), x, layer.host_gate.data(), rows, d.hidden,
                                   d.slots);
    }
    CUDA(cudaMemcpy(layer.ids.as<std::int32_t>() + first_row * d.slots, want_ids.data(), pairs * 4,
                    cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(layer.weights.as<float>() + first_row * d.slots, want_weights.data(), pairs * 4,
                    cudaMemcpyHostToDevice));
  }
  const bool publish = scenario == "same" || gated;
  const MoeArgs args = layer.args(rows,
                                  gated      ? MoeRouting::gate
                                  : by_table ? MoeRouting::table
                                             : MoeRouting::given,
                                  set, true, publish);
  cudaStream_t stream;
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaMemset(layer.out.data, 0xff, layer.out.bytes));
  CUDA(cudaMemset(layer.out_ids.data, 0xff, layer.out_ids.bytes));
  layer.set_epoch(7);
  CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, stream, false)));
  CUDA(cudaStreamSynchronize(stream));
  layer.require_healthy(scenario.c_str());
  const std::size_t n = std::size_t(rows) * d.hidden, begin = first_row * d.hidden;
  const std::vector<float> got = read<float>(layer.out, begin, n);
  bool good = true;
  int other_ids = 0;
  double weight_error = 0;
  if (args.routing != MoeRouting::given) {
    const auto ids = read<std::int32_t>(layer.out_ids, first_row * d.slots, pairs);
    const auto weights = read<float>(layer.out_weights, first_row * d.slots, pairs);
    for (std::size_t i = 0; i < pairs; ++i) {
      other_ids += ids[i] != want_ids[i] ? 1 : 0;
      weight_error = std::max(weight_error, std::fabs(weights[i] / double(want_weights[i]) - 1.0));
    }
    good = other_ids == 0 && weight_error < 1e-5;
  }
  const Distance error =
      distance(got, reference_experts(layer, rows, x, want_ids, want_weights), d.hidden);
  good = good && error.worst_row <= kBound;
  // What was published: every mailbox holds y in packets by band, tagged with the epoch.
  int wrong_packets = 0;
  if (publish) {
    const int band = lowlat::fused::moe_box_band(d.shape, rows);
    const int bands = d.hidden / band, per_band = (band + 2) / 3;
    for (int peer = 0; peer < kPeers; ++peer) {
      const std::size_t box =
          (std::size_t(peer) * 2 * kPeers + std::size_t(7 & 1) * kPeers) * layer.box_packets();
      const auto words =
          read<std::uint32_t>(layer.boxes, box * 4, std::size_t(4) * bands * per_band * rows);
      for (int t = 0; t < rows; ++t) {
        for (int h = 0; h < d.hidden; ++h) {
          const std::size_t packet = (std::size_t(t) * bands + h / band) * per_band + h % band / 3;
          const int column = lowlat::fused::moe_box_column(d.shape, layer.layout, rows, h);
          std::uint32_t bits;
          std::memcpy(&bits, &got[std::size_t(t) * d.hidden + column], 4);
          if (words[4 * packet + h % band % 3] != bits || words[4 * packet + 3] != 7) {
            ++wrong_packets;
          }
        }
      }
    }
    good = good && wrong_packets == 0;
  }
  // The same bits in every replay of a graph, alone and back to back with programmatic edges.
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, stream, true)));
  CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, stream, true)));
  CUDA(cudaStreamEndCapture(stream, &graph));
  CUDA(cudaGraphInstantiate(&exec, graph, 0));
  int other_bits = 0;
  for (int i = 0; i < replays; ++i) {
    CUDA(cudaMemsetAsync(layer.out.as<float>() + begin, 0xff, n * 4, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    const std::vector<float> again = read<float>(layer.out, begin, n);
    other_bits += std::memcmp(again.data(), got.data(), n * 4) != 0 ? 1 : 0;
  }
  layer.require_healthy("replay");
  good = good && other_bits == 0;
  CUDA(cudaGraphExecDestroy(exec));
  CUDA(cudaGraphDestroy(graph));
  CUDA(cudaStreamDestroy(stream));
  std::printf(
      "%s %s T=%-2d %-5s rel_l2 %.2e worst row %.2e  other ids %d  weight %.1e  packets %d  "
      "replays %d, differing %d\n",
      good ? "ok  " : "FAIL", d.name, rows, scenario.c_str(), error.all, error.worst_row, other_ids,
      weight_error, wrong_packets, replays, other_bits);
  std::fflush(stdout);
  return good;
}

// One block of which the others never hear (its epoch is another): every block leaves at the
// deadline, nothing is written, the report names what was missing, and after a new init the same
// call gives the bits of before.
inline bool check_fault(const Layer& layer, int rows) {
  const Dims& d = layer.d;
  const MoeArgs healthy = layer.args(rows, MoeRouting::gate, 1, true, false);
  const std::size_t begin = std::size_t{kMaxRows} * d.hidden, n = std::size_t(rows) * d.hidden;
  const auto run = [&](const MoeArgs& args) {
    CUDA(cudaMemset(layer.out.data, 0xff, layer.out.bytes));
    CUDA(static_cast<cudaError_t>(launch_moe_region(d.shape, args, nullptr, false)));
    CUDA(cudaDeviceSynchronize());
    return read<std::uint32_t>(layer.out, begin, n);
  };
  CUDA(static_cast<cudaError_t>(
      lowlat::fused::moe_workspace_init(d.shape, layer.workspace.data, nullptr)));
  const std::vector<std::uint32_t> want = run(healthy);
  layer.require_healthy("before the fault");
  // The blocks' epochs, a word each: after one launch of this kernel the only run of ones.
  const auto scratch = read<std::uint32_t>(layer.workspace, 0, layer.workspace.bytes / 4);
  const std::vector<std::uint32_t> ones(128, 1);
  const auto epochs = std::search(scratch.begin(), scratch.end(), ones.begin(), ones.end());
  if (epochs == scratch.end()) return false;
  const std::uint32_t other = 1000;
  CUDA(cudaMemcpy(layer.workspace.as<std::uint32_t>() + (epochs - scratch.begin()) + 5, &other, 4,
                  cudaMemcpyHostToDevice));
  MoeArgs late = healthy;
  late.fault.budget_ns = 20'000'000;
  const std::vector<std::uint32_t> left = run(late);
  const auto status = read<std::uint32_t>(layer.status, 0, 4);
  const auto abort = read<std::uint32_t>(layer.abort_word, 0, 1);
  const auto written = static_cast<int>(
      std::count_if(left.begin(), left.end(), [](std::uint32_t v) { return v != 0xffff'ffffu; }));
  CUDA(cudaMemset(layer.status.data, 0, layer.status.bytes));
  CUDA(cudaMemset(layer.abort_word.data, 0, layer.abort_word.bytes));
  CUDA(static_cast<cudaError_t>(
      lowlat::fused::moe_workspace_init(d.shape, layer.workspace.data, nullptr)));
  const bool same = run(healthy) == want;
  layer.require_healthy("after the fault");
  const bool good = status[0] == 1 && status[1] == 1 && abort[0] == 1 && written == 0 && same;
  std::printf("%s %s T=%-2d fault  state %u  event %u  abort %u  values written %d  then %s\n",
              good ? "ok  " : "FAIL", d.name, rows, status[0], status[1], abort[0], written,
              same ? "the same bits" : "other bits");
  return good;
}

}  // namespace lowlat::bench
