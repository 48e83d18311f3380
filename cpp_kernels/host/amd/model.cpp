#include "host/amd/model.hpp"

#include <cstring>

#include "host/amd/exchange_region.hpp"
#include "host/amd/step.hpp"
#include "platform/amd_host.hpp"
// The platform comes first.
#include "host/device_model.hpp"

namespace lowlat::host::hip {
namespace {

constexpr const char* kCatalogue =
    "front amd gfx942|gfx950 persistent K1: mHC, Engram, q and kv projections, KV writes\n"
    "select amd gfx942|gfx950 persistent K2i: index scores and top-k, ties to the lowest position\n"
    "back amd gfx942|gfx950 persistent K2: attention, o-projection, experts, sums in rank order\n"
    "head amd gfx942|gfx950 persistent norm, logits in bf16, argmax to the lowest id\n"
    "draft amd gfx942|gfx950 persistent three stages, Markov proposals, Philox noise\n"
    "plain amd gfx942|gfx950 persistent the same units, any number of rows\n";

class AmdModel final : public lowlat::amd::devices::DeviceModel<ExchangeRegion> {
 public:
  AmdModel(const lowlat_model_config& config, const lowlat_hosting* hosting, int device,
           const std::vector<CodeObject>& objects)
      : DeviceModel(config, hosting, "amd", kCatalogue, device) {
    const OnDevice on(device_);
    module_ = std::make_unique<Module>(objects);
    region_ = std::make_unique<ExchangeRegion>(*module_, config.tp_rank, config.tp_size,
                                               step_box_packets(shape()), digest());
    stream_ = std::make_unique<Stream>();
    last_ = std::make_unique<Event>();
  }

  ~AmdModel() override {
    end_work();
    int before = 0;
    runtime().hipGetDevice(&before);
    runtime().hipSetDevice(device_);
    allocated_.clear();
    step_.reset();
    last_.reset();
    stream_.reset();
    region_.reset();
    module_.reset();
    runtime().hipSetDevice(before);
  }

  std::uint64_t own_bytes() const override {
    return region_->bytes() + (step_ == nullptr ? 0 : step_->bytes());
  }

  void* allocate(lowlat_memory_kind kind, std::uint64_t bytes) override {
    const OnDevice on(device_);
    const MemoryKind own = kind == LOWLAT_MEMORY_DEVICE ? MemoryKind::device : MemoryKind::shared;
    return allocated_.emplace_back(own, bytes).data();
  }
  void write(void* dst, const void* src, std::uint64_t bytes) override { copy(dst, src, bytes); }
  void read(void* dst, const void* src, std::uint64_t bytes) const override {
    copy(dst, src, bytes);
  }

 protected:
  void check_memory(const TensorSlot& slot, const void* data) const override {
    const OnDevice on(device_);
    PointerAttributes attributes{};
    // Memory that HIP does not know is an error to it, and host memory to us.
    const bool known = runtime().hipPointerGetAttributes(&attributes, data) == kSuccess;
    const bool of_device = known && attributes.type == kMemoryDevice;
    if (of_device && attributes.device == device_) return;
    if (known && attributes.type == kMemoryManaged) return;
    throw misplaced(slot, of_device ? attributes.device : -1);
  }

  void become_ready() override {
    step_ =
        std::make_unique<ResidentStep>(config(), shape(), weights(), pools(), *module_, *region_);
  }

  // The plain path is the resident program too.
  void start_step(const lowlat_step& step, Schedule, void* stream) override {
    launch(step, stream);
  }
  void start_draft(const lowlat_draft& draft, Schedule, void* stream) override {
    launch(draft, stream);
  }
  void start_accept(const lowlat_accept& accept, void* stream) override { launch(accept, stream); }
  void start_hosted(const lowlat_hosted_step& step, void* stream) override { launch(step, stream); }
  void start_hosted(const lowlat_hosted_draft&, void*) override {
    throw Error(LOWLAT_BUG, "a model with stages was made on amd");
  }
  void start_proposal(const lowlat_proposal& proposal, void* stream) override {
    launch(proposal, stream);
  }
  void move_pools() override {
    const OnDevice on(device_);
    step_->move_pools(weights(), pools());
  }

  bool wait_idle(std::uint64_t budget_ns) override {
    const OnDevice on(device_);
    return poll(runtime().hipEventQuery, last_->get(), "hipEventQuery", budget_ns);
  }

 private:
  void copy(void* dst, const void* src, std::uint64_t bytes) const {
    const OnDevice on(device_);
    check(runtime().hipMemcpy(dst, src, bytes, kCopyDefault), "hipMemcpy");
  }

  template <class Call>
  void launch(const Call& call, void* stream) {
    const OnDevice on(device_);
    void* chosen = stream == nullptr ? stream_->get() : stream;
    step_->launch(call, chosen);
    int capturing = 0;
    check(runtime().hipStreamIsCapturing(chosen, &capturing), "hipStreamIsCapturing");
    // A graph's end is the business of who replays it.
    if (capturing == 0) check(runtime().hipEventRecord(last_->get(), chosen), "hipEventRecord");
  }

  std::unique_ptr<Module> module_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> last_;  // of what was launched last
  std::unique_ptr<ResidentStep> step_;
  std::vector<Memory> allocated_;
};

}  // namespace

std::unique_ptr<Model> make_model(const std::string& platform, const lowlat_model_config& config,
                                  const lowlat_hosting* hosting,
                                  const std::vector<CodeObject>& objects) {
  if (hosting != nullptr && hosting->expert_layout == LOWLAT_MARLIN) {
    throw Error(LOWLAT_UNSUPPORTED,
                "expert_layout is Marlin's, which platform amd does not read; needed row-major "
                "experts, as the checkpoint has them");
  }
  if (hosting != nullptr && hosting->stages != 0) {
    throw Error(LOWLAT_UNSUPPORTED,
                "stages is 1; platform amd runs no layers of a hosted draft: needed 0");
  }
  runtime();  // says what is missing before anything else is asked
  const int device = lowlat::amd::devices::device_number(platform, config.tp_rank, count_devices);
  require_device(device, platform);
  return std::make_unique<AmdModel>(config, hosting, device, objects);
}

}  // namespace lowlat::host::hip
