// host/nvidia/device.hpp: CUDA's runtime, checked: memory, streams, and the wait for one.
//
// Host code only; included where CUDA is there. Every failure is an Error that names the call and
// what CUDA said.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/error.hpp"

namespace lowlat::host::cuda {

// Throws LOWLAT_FAULT: "cudaMalloc: out of memory".
void check(cudaError_t status, const char* call);

// "13.0" of CUDA's 13000.
std::string version_words(int version);

// How many devices CUDA sees. 0 leaves in out_why why there is none: no driver, an older one, or
// what CUDA says.
int count_devices(std::string& out_why);

// Makes device 0 the calling thread's. Throws LOWLAT_UNSUPPORTED, in words that say what changes
// it, where there is no driver, no device or no kernel for it in this library.
void open_first_device();

// The same for any device, without making it current; `asked` is what was asked for.
void require_device(int device, const std::string& asked);

// Why this library's kernels do not run on a device; "" when they do. Leaves the current device as
// it was.
std::string refusal_of_device(int device);

// The current device of the calling thread, given back at the end.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// A deadline for work that is not meant to wait for anything.
inline constexpr std::uint64_t kWorkBudgetNs = 120'000'000'000;

// Until a stream's work is done; NULL: the null stream's. Throws LOWLAT_FAULT, which begins with
// `work`, when it failed or took longer.
void wait_for(cudaStream_t stream, const char* work, std::uint64_t budget_ns = kWorkBudgetNs);

// A stream of the device that is current when it is made.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  // Until all work is done, see wait_for.
  void wait(std::uint64_t budget_ns = kWorkBudgetNs) const {
    wait_for(stream_, "the device", budget_ns);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

// What is put on a stream while this lives becomes a graph and does not run. A capture that nobody
// ended, as when a launch threw, ends with this: while one is open, CUDA refuses its thread what
// cannot be captured, memory among it.
class Capture {
 public:
  explicit Capture(cudaStream_t stream);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  // The graph, which this keeps.
  cudaGraph_t end();

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  bool open_ = true;
};

// What launches() puts on a stream, to be launched again and again.
class Graph {
 public:
  template <class Launches>
  Graph(cudaStream_t stream, const Launches& launches) {
    Capture capture(stream);
    launches();
    check(cudaGraphInstantiate(&graph_, capture.end(), 0), "cudaGraphInstantiate");
  }
  Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Graph& operator=(Graph&&) = delete;
  ~Graph() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  void launch(cudaStream_t stream) const {
    check(cudaGraphLaunch(graph_, stream), "cudaGraphLaunch");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

// Done when the work that was in a stream before it is.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }
  void record(cudaStream_t stream) const;
  // What is launched into the stream from now on starts when the event is done.
  void hold(cudaStream_t stream) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Device memory of one owner; never null.
class Memory {
 public:
  explicit Memory(std::size_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  Memory& operator=(Memory&&) = delete;
  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

// Memory of the launches of one call: take() gives the same pieces again, in order, after rewind(),
// so that a second run of the same launches allocates nothing (and may be captured).
class Workspace {
 public:
  void* take(std::size_t bytes) {
    if (next_ == pieces_.size()) pieces_.emplace_back(bytes);
    Memory& piece = pieces_[next_++];
    if (piece.bytes() < bytes) throw Error(LOWLAT_BUG, "a workspace is taken in another order");
    return piece.data();
  }
  void rewind() { next_ = 0; }

 private:
  std::vector<Memory> pieces_;
  std::size_t next_ = 0;
};

}  // namespace lowlat::host::cuda
