// bench/attn_bench.hpp: device memory, random numbers, graphs and timing for the programs that
// check and time the attention half of a layer.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace lowlat::bench {

// Ends the program with one line; the bench has nobody to hand an error to.
inline void cuda_must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(3);
}

// Waits for a stream's work. What has not ended within the budget ends the program, after say() has
// told where it stands, and at once: what frees memory would wait for the device.
template <class Say>
void wait_for(cudaStream_t stream, std::chrono::seconds budget, Say say) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + budget;
  cudaError_t state = cudaSuccess;
  while ((state = cudaStreamQuery(stream)) == cudaErrorNotReady) {
    cudaGetLastError();  // that it is not ready is no error of a later call
    if (Clock::now() < deadline) continue;
    say();
    std::fflush(stdout);
    std::fprintf(stderr, "work of the device has not ended after %d s\n",
                 static_cast<int>(budget.count()));
    std::_Exit(4);
  }
  cuda_must(state, "a replay");
}
inline void wait_for(cudaStream_t stream) {
  wait_for(stream, std::chrono::minutes(2), [] {});
}

// Device memory of the current device, filled with 0xff (a NaN in every format) until written.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count) : count_(count) {
    cuda_must(cudaMalloc(&data_, std::max<std::size_t>(count, 1) * sizeof(T)), "cudaMalloc");
    poison();
  }
  explicit Buffer(const std::vector<T>& from) : Buffer(from.size()) { put(from); }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }

  T* get() const { return data_; }
  std::size_t size() const { return count_; }
  void poison() { cuda_must(cudaMemset(data_, 0xff, count_ * sizeof(T)), "cudaMemset"); }
  void zero() { cuda_must(cudaMemset(data_, 0, count_ * sizeof(T)), "cudaMemset"); }
  void put(const std::vector<T>& from) {
    cuda_must(cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
              "copy to the device");
  }
  std::vector<T> take() const {
    std::vector<T> to(count_);
    cuda_must(cudaMemcpy(to.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              "copy from the device");
    return to;
  }

 private:
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

// splitmix64: the same numbers everywhere.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e37'79b9'7f4a'7c15ull;
    z = (z ^ z >> 30) * 0xbf58'476d'1ce4'e5b9ull;
    z = (z ^ z >> 27) * 0x94d0'49bb'1331'11ebull;
    return z ^ z >> 31;
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<std::uint64_t>(n)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Near enough to a normal: twelve uniforms would be slow and nobody asks for tails.
  float normal() {
    return static_cast<float>((uniform() + uniform() + uniform() + uniform() - 2.0) * 1.732);
  }

 private:
  std::uint64_t state_;
};

// Whether no value is infinite or none.
inline bool all_finite(const std::vector<std::uint16_t>& bf16) {
  return std::all_of(bf16.begin(), bf16.end(),
                     [](std::uint16_t code) { return (code & 0x7f80) != 0x7f80; });
}

// body(i) for i < count on all cores.
inline void parallel(std::int64_t count, const std::function<void(std::int64_t)>& body) {
  const unsigned workers = std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (unsigned worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      for (std::int64_t i = worker; i < count; i += workers) body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// A captured sequence of launches.
class Graph {
 public:
  explicit Graph(const std::function<void(cudaStream_t)>& launches) {
    cuda_must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    cuda_must(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin capture");
    launches(stream_);
    cudaGraph_t graph;
    cuda_must(cudaStreamEndCapture(stream_, &graph), "end capture");
    cuda_must(cudaGraphInstantiate(&graph_, graph, 0), "instantiate");
    cuda_must(cudaGraphDestroy(graph), "destroy graph");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  void replay() { cuda_must(cudaGraphLaunch(graph_, stream_), "graph launch"); }
  void wait() { wait_for(stream_); }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

struct Times {
  double median_us, low_us, high_us;  // low and high: the 10th and 90th of a hundred
};

// Time of one replay, of `count` after a few that are not counted.
inline Times time_of(Graph& graph, int count) {
  cudaEvent_t begin, end;
  cuda_must(cudaEventCreate(&begin), "event");
  cuda_must(cudaEventCreate(&end), "event");
  std::vector<double> times;
  for (int i = 0; i < count + 5; ++i) {
    cuda_must(cudaEventRecord(begin, graph.stream()), "record");
    graph.replay();
    cuda_must(cudaEventRecord(end, graph.stream()), "record");
    graph.wait();
    float ms;
    cuda_must(cudaEventElapsedTime(&ms, begin, end), "elapsed");
    if (i >= 5) times.push_back(ms * 1e3);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], times[times.size() / 10], times[times.size() * 9 / 10]};
}

}  // namespace lowlat::bench
