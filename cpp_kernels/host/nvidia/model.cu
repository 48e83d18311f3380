#include "host/nvidia/model.hpp"

#include <chrono>
#include <cstring>
#include <thread>

#include "host/nvidia/exchange_region.hpp"
#include "host/nvidia/fused_proposals.hpp"
#include "host/nvidia/fused_step.hpp"
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
constexpr std::uint32_t kFusedLine = 6;  // behind those of persistent::KernelId
const char* catalogue_with_fused(const lowlat_hosting* hosting) {
  static const std::string steps =
      std::string(kCatalogue) +
      "step nvidia sm_90a fused whole target steps: layers, n-gram memory, index, head\n";
  static const std::string proposed =
      std::string(kCatalogue) +
      "propose nvidia sm_90a fused a request's proposals, of what an engine's draft left\n";
  static const std::string staged =
      std::string(kCatalogue) +
      "draft nvidia sm_90a fused a draft's layers, then a request's proposals, for an engine\n";
  if (hosting == nullptr || hosting->proposals == 0) return steps.c_str();
  return (hosting->stages != 0 ? staged : proposed).c_str();
}

enum class Schedules { best, fused, persistent };

// What follows "nvidia".
struct Words {
  int device = -1;  // -1: the rank's
  Schedules schedules = Schedules::best;
  bool loop = false;
};
Words read_words(const std::string& platform) {
  Words out;
  const auto twice = [&](const std::string& first, const std::string& second) {
    return invalid("platform is \"" + platform + "\", which names " + first + " and " + second +
                   "; needed one of them");
  };
  for (std::size_t at = platform.find(':'); at != std::string::npos;) {
    const std::size_t next = platform.find(':', at + 1);
    const std::string word =
        platform.substr(at + 1, next == std::string::npos ? next : next - at - 1);
    at = next;
    if (word == "fused" || word == "persistent") {
      if (out.schedules != Schedules::best) {
        throw twice(out.schedules == Schedules::fused ? "fused" : "persistent", word);
      }
      out.schedules = word == "fused" ? Schedules::fused : Schedules::persistent;
      continue;
    }
    if (word == "loop") {
      out.loop = true;
      continue;
    }
    const int before = out.device;
    const char* end = word.data() + word.size();
    const auto read = std::from_chars(word.data(), end, out.device);
    if (word.empty() || read.ec != std::errc{} || read.ptr != end || out.device < 0) {
      throw invalid("platform is \"" + platform +
                    "\"; needed nvidia or nvidia:N, N a device's number, and after further colons "
                    "fused, persistent or loop");
    }
    if (before >= 0) throw twice("device " + std::to_string(before), word);
  }
  return out;
}

int device_of(const Words& words, const lowlat_model_config& config) {
  if (words.device >= 0) return words.device;
  std::string none;
  const int count = count_devices(none);
  return count > 0 ? config.tp_rank % count : 0;
}

class NvidiaModel final : public lowlat::nvidia::devices::DeviceModel<ExchangeRegion> {
 public:
  // fused: there are fused kernels for the model, and they are wanted; forced: nothing else is.
  NvidiaModel(const lowlat_model_config& config, const lowlat_hosting* hosting, int device,
              bool fused, bool forced, bool loop)
      : DeviceModel(config, hosting, "nvidia", fused ? catalogue_with_fused(hosting) : kCatalogue,
                    device),
        fused_(fused),
        forced_(forced) {
    const OnDevice on(device_);
    std::int64_t fused_packets = 0;
    if (fused && proposes_only()) fused_packets = FusedProposals::box_packets(config, shape());
    if (fused && has_layers()) {
      fused_packets = std::max(fused_packets, FusedStep::box_packets(of_layers(), shape()));
    }
    region_ = std::make_unique<ExchangeRegion>(config.tp_rank, config.tp_size,
                                               step_box_packets(shape()), fused_packets, digest());
    if (loop) region_->loop_back();
    stream_ = std::make_unique<Stream>();
    copies_ = std::make_unique<Stream>();
    last_ = std::make_unique<Event>();
  }

  ~NvidiaModel() override {
    end_work();
    int before = 0;
    cudaGetDevice(&before);
    cudaSetDevice(device_);
    for (void* memory : shared_) cudaFreeHost(memory);
    allocated_.clear();
    fused_step_.reset();
    fused_proposals_.reset();
    step_.reset();
    last_.reset();
    stream_.reset();
    copies_.reset();
    region_.reset();
    cudaSetDevice(before);
  }

  std::uint64_t own_bytes() const override {
    return region_->bytes() + (step_ == nullptr ? 0 : step_->bytes()) +
           (fused_step_ == nullptr ? 0 : fused_step_->bytes()) +
           (fused_proposals_ == nullptr ? 0 : fused_proposals_->bytes());
  }

  void* allocate(lowlat_memory_kind kind, std::uint64_t bytes) override {
    const OnDevice on(device_);
    if (kind == LOWLAT_MEMORY_DEVICE) {
      Memory& memory = allocated_.emplace_back(bytes);
      check(cudaMemsetAsync(memory.data(), 0, bytes, copies_->get()), "cudaMemsetAsync");
      copies_->wait();
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
  // Whole at return: cudaMemcpy may leave its last piece on the way, behind which a launch on
  // another stream would not wait.
  void write(void* dst, const void* src, std::uint64_t bytes) override {
    const OnDevice on(device_);
    check(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, copies_->get()), "cudaMemcpyAsync");
    copies_->wait();
  }
  void read(void* dst, const void* src, std::uint64_t bytes) const override {
    const OnDevice on(device_);
    check(cudaMemcpy(dst, src, bytes, cudaMemcpyDefault), "cudaMemcpy");
  }

 protected:
  void check_memory(const TensorSlot& slot, const void* data) const override {
    const OnDevice on(device_);
    cudaPointerAttributes attributes;
    check(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
    const bool on_device = attributes.type == cudaMemoryTypeDevice && attributes.device == device_;
    if (on_device || attributes.type == cudaMemoryTypeManaged) {
      if (!fused_ || reinterpret_cast<std::uintptr_t>(data) % kFusedAlignment == 0) return;
      throw invalid("tensor " + slot.name + ": data is not aligned to " +
                    std::to_string(kFusedAlignment) +
                    " bytes, as the fused schedule reads it (nvidia:persistent does without)");
    }
    throw misplaced(slot, attributes.type == cudaMemoryTypeDevice ? attributes.device : -1);
  }

  void become_ready() override {
    step_ = std::make_unique<ResidentStep>(config(), shape(), weights(), pools(), *region_);
    if (!fused_) return;
    // Fused kernels take whole multiprocessors, so two ranks' do not run side by side.
    if (region_->has_shared_device()) {
      if (!forced_) return;
      throw Error(LOWLAT_UNSUPPORTED,
                  "ranks share a device, where fused kernels cannot wait for each other; give each "
                  "rank a device, or nvidia:persistent");
    }
    const OnDevice on(device_);
    if (proposes_only()) {
      fused_proposals_ =
          std::make_unique<FusedProposals>(config(), shape(), weights(), *region_, kFusedLine,
                                           has_layers() ? FusedStep::first_index() : 0);
    }
    if (!has_layers()) return;
    const lowlat_model_config own = of_layers();
    fused_step_ = std::make_unique<FusedStep>(own, runtime_shape(own), weights(), pools(), *region_,
                                              *step_, kFusedLine);
  }
  void move_pools() override {
    const OnDevice on(device_);
    if (fused_step_ != nullptr && pools().split_index != 0) {
      throw Error(
          LOWLAT_UNSUPPORTED,
          "split_index is 1; the fused schedule reads packed pages (nvidia:persistent reads "
          "both)");
    }
    step_->move_pools(weights(), pools());
    if (fused_step_ != nullptr) fused_step_->move_pools(weights(), pools());
  }

  // The plain path is the resident program too; fused kernels serve the widths alone.
  void start_step(const lowlat_step& step, Schedule schedule, void* stream) override {
    if (schedule == Schedule::persistent && fused_step_ != nullptr && fused_step_->serves(step)) {
      launch(stream, [&](cudaStream_t chosen) { fused_step_->launch(step, chosen); });
      return;
    }
    const bool fused_experts =
        schedule == Schedule::persistent && step_->has_fused_experts(step.num_rows);
    launch(stream, [&](cudaStream_t chosen) { step_->launch(step, fused_experts, chosen); });
  }
  void start_draft(const lowlat_draft& draft, Schedule schedule, void* stream) override {
    if (schedule == Schedule::persistent && fused_step_ != nullptr && fused_step_->serves(draft)) {
      launch(stream, [&](cudaStream_t chosen) { fused_step_->launch(draft, chosen); });
      return;
    }
    launch(stream, [&](cudaStream_t chosen) { step_->launch(draft, chosen); });
  }
  void start_accept(const lowlat_accept& accept, void* stream) override {
    launch(stream, [&](cudaStream_t chosen) { step_->launch(accept, chosen); });
  }

  void start_hosted(const lowlat_hosted_step& step, void* stream) override {
    if (fused_step_ != nullptr && fused_step_->serves(step)) {
      launch(stream, [&](cudaStream_t chosen) { fused_step_->launch(step, chosen); });
      return;
    }
    const bool fused_experts = step_->has_fused_experts(step.batch_size * step.tokens_per_request);
    launch(stream, [&](cudaStream_t chosen) { step_->launch(step, fused_experts, chosen); });
  }
  void start_hosted(const lowlat_hosted_draft& draft, void* stream) override {
    if (fused_step_ == nullptr || !fused_step_->serves(draft)) {
      throw Error(LOWLAT_UNSUPPORTED,
                  "the layers of a hosted draft run by the fused schedule alone, which does not "
                  "serve " +
                      std::to_string(draft.batch_size) + " requests here");
    }
    launch(stream, [&](cudaStream_t chosen) { fused_step_->launch(draft, chosen); });
  }
  void start_proposal(const lowlat_proposal& proposal, void* stream) override {
    if (fused_proposals_ != nullptr && fused_proposals_->serves(proposal)) {
      launch(stream, [&](cudaStream_t chosen) { fused_proposals_->launch(proposal, chosen); });
      return;
    }
    launch(stream, [&](cudaStream_t chosen) { step_->launch(proposal, chosen); });
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

  lowlat_status_words status() const override {
    lowlat_status_words out = DeviceModel::status();
    if (out.state != 0u && out.kernel >= kFusedLine) {
      out.place = out.kernel;
      out.kernel = kFusedLine;
    }
    return out;
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

  bool has_layers() const { return !proposes_only() || has_hosted_stages(); }
  // As the fused step takes it.
  lowlat_model_config of_layers() const {
    return proposes_only() ? FusedStep::of_stages(config()) : config();
  }

  static constexpr std::uintptr_t kFusedAlignment = 16;

  bool fused_, forced_;  // see the constructor
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Stream> copies_;  // of memory that nothing that was launched uses
  std::unique_ptr<Event> last_;     // of what was launched last
  std::unique_ptr<ResidentStep> step_;
  std::unique_ptr<FusedStep> fused_step_;
  std::unique_ptr<FusedProposals> fused_proposals_;
  std::vector<Memory> allocated_;
  std::vector<void*> shared_;
};

}  // namespace

std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting) {
  const Words words = read_words(platform);
  const int device = device_of(words, config);
  require_device(device, platform);
  // A configuration with reasons against it is refused by the model itself.
  const bool whole = config.struct_bytes == sizeof config && config_reasons(config).empty();
  const bool proposals = hosting != nullptr && hosting->proposals != 0;
  const bool stages = proposals && hosting->stages != 0;
  std::string refusal = "none";
  if (whole) {
    refusal = proposals ? FusedProposals::refusal(config, runtime_shape(config), device) : "";
    if (stages && refusal.empty()) refusal = FusedStep::draft_refusal(config);
    if ((!proposals || stages) && refusal.empty()) {
      const lowlat_model_config own = stages ? FusedStep::of_stages(config) : config;
      refusal = FusedStep::refusal(own, runtime_shape(own), device);
    }
    if (words.schedules == Schedules::fused && !refusal.empty()) {
      throw Error(LOWLAT_UNSUPPORTED, "platform is \"" + platform +
                                          "\", but the fused step is not built for this model: " +
                                          refusal + " (nvidia:persistent serves it)");
    }
  }
  const bool fused = words.schedules != Schedules::persistent && refusal.empty();
  if (stages && whole && !fused) {
    throw Error(LOWLAT_UNSUPPORTED,
                "stages is 1, but the fused schedule, which alone runs the layers of a hosted "
                "draft, does not serve this model: " +
                    (refusal.empty() ? "nvidia:persistent was asked for" : refusal));
  }
  return std::make_unique<NvidiaModel>(config, hosting, device, fused,
                                       words.schedules == Schedules::fused, words.loop);
}

}  // namespace lowlat::host::cuda
