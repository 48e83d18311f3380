#include "host/scalar_model.hpp"
// The platform comes first.
#include <algorithm>
#include <cstring>

#include "host/plain.hpp"
#include "host/rope_frequencies.hpp"
#include "persistent/program.hpp"

namespace lowlat::host {
namespace {

namespace plat = lowlat::scalar::plat;
namespace stages = lowlat::scalar::stages;
namespace persistent = lowlat::scalar::persistent;

constexpr const char* kCatalogue =
    "front scalar any persistent mHC, Engram, q and kv projections, KV writes\n"
    "select scalar any persistent index scores and top-k, ties to the lowest position\n"
    "back scalar any persistent attention, o-projection, experts, sums in rank order\n"
    "head scalar any persistent norm, logits in bf16, argmax to the lowest id\n"
    "draft scalar any persistent three stages, Markov proposals, Philox noise\n"
    "plain scalar any plain the same units one by one, sums in rank order\n";

// The one block of a rank.
constexpr persistent::Grid kGrid{nullptr, 0, 1};

}  // namespace

ScalarModel::ScalarModel(const lowlat_model_config& config, const lowlat_hosting* hosting)
    : Model(config, hosting, "scalar", kCatalogue, true) {
  const int widest = config.num_widths > 0 ? config.widths[config.num_widths - 1] : 1;
  region_ = Region::create({config.tp_size, persistent::Program::box_packets(shape(), widest),
                            PlainProgram::staging_words(shape()), digest()},
                           config.tp_rank);
  peers_.resize(config.tp_size);
  peers_[config.tp_rank] = region_;
  Carver count;
  rank_.buffers.lay_out(shape(), count);
  block_.lay_out(shape(), count);
  arena_bytes_ = static_cast<std::uint64_t>(count.bytes());
}

ScalarModel::~ScalarModel() {
  // A step that still runs must end before its memory goes; its peers end with it.
  if (worker_ != nullptr && worker_->busy()) abort();
  worker_.reset();
}

// Both kinds are the process's memory here.
void* ScalarModel::allocate(lowlat_memory_kind, std::uint64_t bytes) {
  auto& memory = allocated_.emplace_back(new std::byte[bytes + Carver::kAlign]());
  const auto base = reinterpret_cast<std::uintptr_t>(memory.get());
  return memory.get() + (Carver::kAlign - base % Carver::kAlign) % Carver::kAlign;
}
void ScalarModel::write(void* dst, const void* src, std::uint64_t bytes) {
  std::memcpy(dst, src, bytes);
}
void ScalarModel::read(void* dst, const void* src, std::uint64_t bytes) const {
  std::memcpy(dst, src, bytes);
}

void ScalarModel::peer_export(lowlat_peer_handle& out) const { write_handle(*region_, out); }

void ScalarModel::open_peer(int peer_rank, const lowlat_peer_handle& handle) {
  auto region = open_handle(handle, peer_rank, region_->layout());
  // The proof is a store that arrives: written through the peer's memory, read back from it.
  const int tp_rank = config().tp_rank;
  std::uint32_t* probe = &region->probes[tp_rank].value;
  const std::uint32_t token =
      (plat::load_acquire<plat::Scope::system>(probe) ^ 0x5a5a'0001u) + 2u * tp_rank;
  plat::store_release<plat::Scope::system>(probe, token);
  if (plat::load_acquire<plat::Scope::system>(probe) != token) {
    throw Error(LOWLAT_UNSUPPORTED,
                "a store to rank " + std::to_string(peer_rank) + "'s memory did not arrive");
  }
  peers_[peer_rank] = std::move(region);
}

void ScalarModel::become_ready() {
  const lowlat_model_config& config = this->config();
  for (const auto& peer : peers_) {
    outboxes_.push_back(peer->boxes());
    abort_words_.push_back(&peer->abort_word.value);
  }
  arena_.resize(arena_bytes_ + Carver::kAlign);
  const auto base = reinterpret_cast<std::uintptr_t>(arena_.data());
  Carver place(arena_.data() + (Carver::kAlign - base % Carver::kAlign) % Carver::kAlign);
  rank_.shape = shape();
  rank_.buffers.lay_out(shape(), place);
  block_.lay_out(shape(), place);
  rank_.blocks = &block_;
  rank_.progress = &progress_;
  rank_.rules = config.kind == LOWLAT_V4 ? &persistent::kV4Rules : &persistent::kV41Rules;
  rank_.config = &config;
  rank_.weights = &weights();
  move_pools();
  rank_.port = {outboxes_.data(),
                {abort_words_.data(), &region_->status, config.tp_rank, config.tp_size,
                 config.wait_budget_ns},
                region_->layout().box_packets};
  const RopeFrequencies rope = rope_frequencies(config);
  std::ranges::copy(rope.window, rank_.window_rope.values);
  std::ranges::copy(rope.compressed, rank_.compressed_rope.values);
  worker_ = std::make_unique<Worker>([this](const Job& job) { run(job); });
}

template <class Part>
void ScalarModel::push(Job::Kind kind, Part Job::* part, const Part& what, void* stream,
                       Schedule schedule) {
  if (stream != nullptr) {
    throw invalid("stream must be NULL on the scalar platform: a rank has one stream");
  }
  Job job;
  job.kind = kind;
  job.schedule = schedule;
  job.*part = what;
  if (!worker_->push(job)) throw invalid("16 launches are waiting; call lowlat_synchronize");
}

void ScalarModel::start_step(const lowlat_step& step, Schedule schedule, void* stream) {
  push(Job::Kind::step, &Job::step, step, stream, schedule);
}

void ScalarModel::start_draft(const lowlat_draft& draft, Schedule schedule, void* stream) {
  push(Job::Kind::draft, &Job::draft, draft, stream, schedule);
}

void ScalarModel::start_accept(const lowlat_accept& accept, void* stream) {
  push(Job::Kind::accept, &Job::accept, accept, stream);
}

void ScalarModel::start_hosted(const lowlat_hosted_step& step, void* stream) {
  push(Job::Kind::hosted, &Job::hosted, step, stream);
}

void ScalarModel::start_hosted(const lowlat_hosted_draft& draft, void* stream) {
  push(Job::Kind::hosted_draft, &Job::hosted_draft, draft, stream);
}

void ScalarModel::start_proposal(const lowlat_proposal& proposal, void* stream) {
  push(Job::Kind::proposal, &Job::proposal, proposal, stream);
}

void ScalarModel::move_pools() {
  const lowlat_pools& own = pools();
  rank_.pools = {own.num_pages, own.num_window_pages, own.num_requests, own.window_slots,
                 own.history};
}

// On the resident thread. A rank that is over runs nothing more; what it would have written stays.
void ScalarModel::run(const Job& job) {
  if (is_aborted()) {
    if (status().state == 0u) {
      stages::note_abort(rank_.port.fault, 0, stages::StageId::none, progress_.epoch);
    }
    persistent::Program program(rank_, kGrid);
    if (job.kind == Job::Kind::hosted) program.spoil({{}, job.hosted});
    if (job.kind == Job::Kind::hosted_draft) program.spoil(job.hosted_draft);
    return;
  }
  switch (job.kind) {
    case Job::Kind::none: return;
    case Job::Kind::step:
      if (job.schedule == Schedule::persistent) {
        persistent::Program(rank_, kGrid).target_step({job.step, {}});
      } else {
        PlainProgram(rank_, peers_, plain_epoch_).target_step(job.step);
      }
      return;
    case Job::Kind::draft:
      if (job.schedule == Schedule::persistent) {
        persistent::Program(rank_, kGrid).draft(job.draft);
      } else {
        PlainProgram(rank_, peers_, plain_epoch_).draft(job.draft);
      }
      return;
    case Job::Kind::accept: persistent::Program(rank_, kGrid).accept(job.accept); return;
    case Job::Kind::hosted: persistent::Program(rank_, kGrid).target_step({{}, job.hosted}); return;
    case Job::Kind::hosted_draft: persistent::Program(rank_, kGrid).draft(job.hosted_draft); return;
    case Job::Kind::proposal: persistent::Program(rank_, kGrid).propose(job.proposal); return;
  }
}

bool ScalarModel::is_aborted() const {
  return plat::load_acquire<plat::Scope::system>(&region_->abort_word.value) != 0u;
}

bool ScalarModel::is_aborted_by_host() const {
  return plat::load_acquire<plat::Scope::system>(&region_->abort_word.value) ==
         stages::kAbortByHost;
}

lowlat_status_words ScalarModel::status() const {
  const stages::StatusWords& status = region_->status;
  const std::uint32_t state = plat::load_acquire<plat::Scope::system>(&status.state);
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  words.peer = -1;
  if (state != 0u) {
    words.state = state;
    words.kernel = status.kernel;
    words.stage = status.stage;
    words.peer = status.peer;
    words.epoch = status.epoch;
  }
  return words;
}

void ScalarModel::abort() {
  for (const auto& peer : peers_) {
    if (peer == nullptr) continue;
    // A reason that is there already is the first cause: it stays.
    if (plat::load_acquire<plat::Scope::system>(&peer->abort_word.value) != 0u) continue;
    plat::store_release<plat::Scope::system>(&peer->abort_word.value, stages::kAbortByHost);
  }
}

}  // namespace lowlat::host
