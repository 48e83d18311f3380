#include "host/nvidia/model.hpp"

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "host/nvidia/exchange_region.hpp"
#include "host/nvidia/step.hpp"
#include "platform/nvidia.hpp"
// The platform comes first.
#include "host/device_model.hpp"

namespace lowlat::host::cuda {
namespace {

constexpr const char* kCatalogue =
    "front nvidia sm_90a persistent mHC, Engram, q and kv projections, KV writes\n"
    "select nvidia sm_90a persistent index scores and top-k, ties to the lowest position\n"
    "back nvidia sm_90a persistent attention, o-projection, experts (fused where built), sums "
    "in rank order\n"
    "head nvidia sm_90a persistent norm, logits in bf16, argmax to the lowest id\n"
    "draft nvidia sm_90a persistent three stages, Markov proposals, Philox noise\n"
    "plain nvidia sm_90a persistent the same units, any number of rows\n";

// An event that is done when the work before it is.
class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class NvidiaModel final : public Model {
 public:
  NvidiaModel(const lowlat_model_config& config, int device)
      : Model(config, "nvidia", kCatalogue, false), device_(device) {
    const OnDevice on(device_);
    region_ = std::make_unique<ExchangeRegion>(config.tp_rank, config.tp_size,
                                               step_box_packets(shape()), digest());
    stream_ = std::make_unique<Stream>();
    last_ = std::make_unique<Event>();
  }

  // Work that still runs must end before its memory goes; its peers end with it.
  ~NvidiaModel() override {
    try {
      if (!wait_idle(0)) {
        abort();
        wait_idle(2 * config().wait_budget_ns + 1'000'000'000);
      }
    } catch (const Error&) {
      // The device is lost; what follows frees what it can.
    }
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    for (void* memory : shared_) cudaFreeHost(memory);
    allocated_.clear();
    step_.reset();
    last_.reset();
    stream_.reset();
    region_.reset();
    cudaSetDevice(before);
  }

  std::uint64_t own_bytes() const override {
    return region_->bytes() + (step_ == nullptr ? 0 : step_->bytes());
  }

  void* allocate(lowlat_memory_kind kind, std::uint64_t bytes) override {
    const OnDevice on(device_);
    if (kind == LOWLAT_MEMORY_DEVICE) {
      Memory& memory = allocated_.emplace_back(bytes);
      check(cudaMemset(memory.data(), 0, bytes), "cudaMemset");
      return memory.data();
    }
    void* memory = nullptr;
    check(
        cudaHostAlloc(&memory, bytes > 0 ? bytes : 1, cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
    shared_.push_back(memory);
    std::memset(memory, 0, bytes);
    return memory;
  }
  void write(void* dst, const void* src, std::uint64_t bytes) override {
    const OnDevice on(device_);
    check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }
  void read(void* dst, const void* src, std::uint64_t bytes) const override {
    const OnDevice on(device_);
    check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }

  void peer_export(lowlat_peer_handle& out) const override { out = region_->handle(); }

  void abort() override {
    aborted_.store(true, std::memory_order_relaxed);  // orders nothing: only ever read as a word
    region_->abort();
  }

 protected:
  void check_memory(const TensorSlot& slot, const void* data) const override {
    const OnDevice on(device_);
    cudaPointerAttributes attributes;
    check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
    const bool on_device = attributes.type == cudaMemoryTypeDevice && attributes.device == device_;
    if (on_device || attributes.type == cudaMemoryTypeManaged) return;
    const std::string seen = attributes.type == cudaMemoryTypeDevice
                                 ? "memory of device " + std::to_string(attributes.device)
                                 : "host memory";
    throw invalid("tensor " + slot.name + ": data is " + seen +
                  "; this rank needs memory of device " + std::to_string(device_) +
                  " (lowlat_model_alloc)");
  }

  void open_peer(int peer_rank, const lowlat_peer_handle& handle) override {
    region_->open(peer_rank, handle);
    region_->probe(peer_rank);
  }
  bool has_peer(int rank) const override { return region_->is_open(rank); }

  void become_ready() override {
    step_ = std::make_unique<ResidentStep>(config(), shape(), weights(), *region_);
  }

  // The plain path is the resident program too; fused kernels serve the widths alone.
  void start_step(const lowlat_step& step, Schedule schedule, void* stream) override {
    const bool fused_experts =
        schedule == Schedule::persistent && step_->has_fused_experts(step.num_rows);
    launch(stream, [&](cudaStream_t chosen) { step_->launch(step, fused_experts, chosen); });
  }
  void start_draft(const lowlat_draft& draft, Schedule, void* stream) override {
    launch(stream, [&](cudaStream_t chosen) { step_->launch(draft, chosen); });
  }
  void start_accept(const lowlat_accept& accept, void* stream) override {
    launch(stream, [&](cudaStream_t chosen) { step_->launch(accept, chosen); });
  }

  bool wait_idle(std::uint64_t budget_ns) override {
    using Clock = std::chrono::steady_clock;
    const OnDevice on(device_);
    // An hour at most: a budget of "for ever" must not overflow the clock.
    constexpr std::uint64_t kHour = 3'600'000'000'000;
    const auto deadline =
        Clock::now() + std::chrono::nanoseconds(budget_ns < kHour ? budget_ns : kHour);
    for (;;) {
      const cudaError_t status = cudaEventQuery(last_->get());
      if (status == cudaSuccess) return true;
      if (status != cudaErrorNotReady) check(status, "cudaEventQuery");
      cudaGetLastError();
      if (Clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  bool is_aborted() const override { return aborted_.load(std::memory_order_relaxed); }

  lowlat_status_words status() const override {
    return lowlat::nvidia::devices::status_of(
        static_cast<const lowlat::nvidia::stages::StatusWords*>(region_->status()));
  }

 private:
  template <class Start>
  void launch(void* stream, Start start) {
    const OnDevice on(device_);
    const auto chosen = stream == nullptr ? stream_->get() : static_cast<cudaStream_t>(stream);
    start(chosen);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(chosen, &capture), "cudaStreamIsCapturing");
    // A graph's end is the business of who replays it.
    if (capture == cudaStreamCaptureStatusNone) {
      check(cudaEventRecord(last_->get(), chosen), "cudaEventRecord");
    }
  }

  int device_;
  std::unique_ptr<ExchangeRegion> region_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> last_;  // of what was launched last
  std::unique_ptr<ResidentStep> step_;
  std::vector<Memory> allocated_;
  std::vector<void*> shared_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config) {
  const int device = lowlat::nvidia::devices::device_number(platform, config.tp_rank, [] {
    std::string none;
    return count_devices(none);
  });
  require_device(device, platform);
  return std::make_unique<NvidiaModel>(config, device);
}

}  // namespace lowlat::host::cuda
