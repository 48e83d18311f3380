// The platform amd's host side over a HIP runtime of our own (tests/fakes/hip_runtime.cpp): what it
// launches and with which parameters, every call that may fail, every refusal. No kernel runs here.
//
// Planted and seen to fail: the selection behind the layer's end, a kernel's parameters in another
// order, compute units that ranks of one device do not share, an abort of the own rank alone, work
// whose end nobody notes, memory of another process that stays mapped, and a store to a peer that
// is not looked for.
#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <set>

#include "platform/amd_host.hpp"
// The platform comes first.
#include "check.hpp"
#include "host/amd/geometry.hpp"
#include "host/amd/hip.hpp"
#include "host/devices.hpp"
#include "host/region.hpp"
#include "host/tiny_group.hpp"
#include "persistent/program.hpp"

namespace {

constexpr int kGfx942 = 0x4c, kGfx950 = 0x4f;

// As much of an ELF file as says for which part it is.
struct ElfHeader {
  unsigned char bytes[64] = {0x7f, 'E', 'L', 'F'};
  explicit ElfHeader(int architecture) { bytes[48] = static_cast<unsigned char>(architecture); }
};
const ElfHeader code_950(kGfx950), code_942(kGfx942);

}  // namespace

// In place of the library's, which a build without a compiler for them has not.
std::vector<lowlat::host::hip::CodeObject> lowlat::host::hip::built_code_objects() {
  return {{"gfx950", code_950.bytes}, {"gfx942", code_942.bytes}};
}

namespace {

namespace persistent = lowlat::amd::persistent;
using lowlat::host::RegionHandle;
using lowlat::testing::dense_tensor;
using lowlat::testing::StepArrays;
using lowlat::testing::tiny_config;
using lowlat::testing::TinyGroup;

using Hook = void (*)(const char*, unsigned, unsigned, void*, std::size_t, int, void*);

// The fake's own functions.
struct Fake {
  void (*reset)(int, int);
  void (*fail)(const char*, int, int);
  void (*set)(const char*, int);
  void (*on_launch)(Hook);
  int (*calls)(const char*);
  int (*alive)();
  int (*num_launches)();
  const char* (*launch)(int);
  int (*kind_of)(const void*);
};

const Fake& fake() {
  static const Fake found = [] {
    void* library = dlopen("libamdhip64.so.7", RTLD_NOW);
    Fake out{};
    const auto find = [&](auto& function, const char* name) {
      void* address = library == nullptr ? nullptr : dlsym(library, name);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
    find(out.reset, "fake_hip_reset");
    find(out.fail, "fake_hip_fail");
    find(out.set, "fake_hip_set");
    find(out.on_launch, "fake_hip_on_launch");
    find(out.calls, "fake_hip_calls");
    find(out.alive, "fake_hip_alive");
    find(out.num_launches, "fake_hip_num_launches");
    find(out.launch, "fake_hip_launch");
    find(out.kind_of, "fake_hip_kind_of");
    return out;
  }();
  return found;
}
#define NEEDS_FAKE \
  if (fake().reset == nullptr) SKIP("LD_LIBRARY_PATH has no fake HIP runtime; ctest sets it")

std::string own_device(int rank) { return "amd:" + std::to_string(rank); }

struct AmdGroup : TinyGroup {
  explicit AmdGroup(std::uint32_t kind, int tp_size,
                    std::function<std::string(int)> platform_of = own_device)
      : TinyGroup(kind, tp_size, [](lowlat_model_config&) {}, platform_of) {}
};

StepArrays decode_rows(const lowlat_model_config& config) {
  StepArrays arrays(config);
  arrays.add(0, std::vector<std::int32_t>(40, 3), 30, 1);
  return arrays;
}

struct Calls {
  StepArrays arrays;
  lowlat_step step{};
  std::int32_t anchor = 1, prefix = 31, accepted = 0, next = 0;
  std::vector<std::int32_t> tokens, slots;
  std::vector<float> zeros;
  std::int32_t noise_row = 0;
  std::int64_t noise_offset = 0;
  lowlat_draft draft{};
  lowlat_accept accept{};

  explicit Calls(const lowlat_model_config& config)
      : arrays(decode_rows(config)), tokens(8), slots(8, -1), zeros(1024) {
    step = arrays.step(LOWLAT_DECODE);
    draft.struct_bytes = sizeof draft;
    draft.num_inject_rows = 1;
    draft.inject_positions = tokens.data();
    draft.inject_slots = slots.data();
    draft.batch_size = 1;
    draft.anchors = &anchor;
    draft.prefixes = &prefix;
    draft.slots = slots.data();
    draft.page_table = arrays.page_table.data();
    draft.page_table_stride = arrays.stride;
    draft.temperature = zeros.data();
    draft.noise_row = &noise_row;
    draft.noise_offset = &noise_offset;
    draft.draft_tokens = tokens.data();
    accept.struct_bytes = sizeof accept;
    accept.batch_size = 1;
    accept.num_drafts = config.draft_block;
    accept.vocab = config.vocab;
    accept.draft_tokens = tokens.data();
    accept.target_logits = zeros.data();
    accept.temperature = zeros.data();
    accept.accepted = &accepted;
    accept.next_tokens = &next;
  }
};

void run_all(TinyGroup& group) {
  Calls calls(group.config());
  group.run([&](lowlat_model* m, int) { return lowlat_step_launch(m, &calls.step, nullptr); });
  group.run([&](lowlat_model* m, int) { return lowlat_draft_launch(m, &calls.draft, nullptr); });
  group.run([&](lowlat_model* m, int) { return lowlat_accept_launch(m, &calls.accept, nullptr); });
}

std::vector<std::string> launches(int first) {
  std::vector<std::string> out;
  for (int i = first; i < fake().num_launches(); ++i) out.emplace_back(fake().launch(i));
  return out;
}

// What the calls in a body said when they failed; "" when none did.
std::string words_of(const std::function<void()>& body) {
  try {
    body();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void check_launches(std::uint32_t kind, const std::set<int>& index_sources) {
  fake().reset(2, kGfx950);
  AmdGroup group(kind, 1);
  Calls calls(group.config());
  int first = fake().num_launches();
  group.run([&](lowlat_model* m, int) { return lowlat_step_launch(m, &calls.step, nullptr); });
  std::vector<std::string> wanted;
  for (int layer = 0; layer < group.config().num_layers; ++layer) {
    wanted.emplace_back("lowlat_target_front 4");
    if (index_sources.count(layer) == 1) wanted.emplace_back("lowlat_target_select 4");
    wanted.emplace_back("lowlat_target_back 4");
  }
  wanted.emplace_back("lowlat_target_head 4");
  CHECK(launches(first) == wanted);

  first = fake().num_launches();
  group.run([&](lowlat_model* m, int) { return lowlat_draft_launch(m, &calls.draft, nullptr); });
  wanted = {"lowlat_draft_inject 4", "lowlat_draft_front 4",  "lowlat_draft_back 4",
            "lowlat_draft_front 4",  "lowlat_draft_back 4",   "lowlat_draft_front 4",
            "lowlat_draft_back 4",   "lowlat_draft_propose 4"};
  CHECK(launches(first) == wanted);

  first = fake().num_launches();
  group.run([&](lowlat_model* m, int) { return lowlat_accept_launch(m, &calls.accept, nullptr); });
  CHECK(launches(first) == std::vector<std::string>{"lowlat_accept_tokens 1"});
}

TEST_CASE(v41_runs_k1_k2i_and_k2_layer_by_layer) {
  NEEDS_FAKE;
  check_launches(LOWLAT_V41, {2, 4, 6, 8});
}
TEST_CASE(v4_runs_k1_k2i_and_k2_layer_by_layer) {
  NEEDS_FAKE;
  check_launches(LOWLAT_V4, {1, 3});
}

// What the hook saw of one launch: see lowlat_target_back in host/amd/step.hip.
struct Seen {
  std::vector<std::uint8_t> parameters;
  unsigned threads;
  int device;
};
std::vector<Seen>& seen() {
  static std::vector<Seen> all;
  return all;
}
void keep_backs(const char* kernel, unsigned, unsigned threads, void* parameters, std::size_t bytes,
                int device, void*) {
  if (std::string(kernel) != "lowlat_target_back") return;
  const auto* begin = static_cast<const std::uint8_t*>(parameters);
  seen().push_back({{begin, begin + bytes}, threads, device});
}
template <class T>
T at(const Seen& launch, std::size_t offset) {
  T out;
  std::memcpy(&out, launch.parameters.data() + offset, sizeof out);
  return out;
}

TEST_CASE(parameters_lie_as_a_kernel_reads_them) {
  NEEDS_FAKE;
  fake().reset(2, kGfx942);
  AmdGroup group(LOWLAT_V41, 2);
  Calls calls(group.config());
  seen().clear();
  fake().on_launch(keep_backs);
  group.run([&](lowlat_model* m, int) { return lowlat_step_launch(m, &calls.step, nullptr); });
  REQUIRE(seen().size() == 20u);  // ten layers on two ranks
  for (int r = 0; r < 2; ++r) {
    const Seen& launch = seen()[10 * r + 3];
    CHECK_EQ(launch.threads, 256u);
    CHECK_EQ(launch.device, r);
    // Pointer, pointer, int, the call at the next multiple of 8, int.
    CHECK_EQ(launch.parameters.size(), 24 + sizeof(persistent::TargetStep) + 8);
    const auto* rank = at<const persistent::Rank*>(launch, 0);
    CHECK_EQ(fake().kind_of(rank), 0);
    CHECK_EQ(fake().kind_of(at<const void*>(launch, 8)), 0);
    CHECK_EQ(at<int>(launch, 16), 4);
    CHECK(std::memcmp(launch.parameters.data() + 24, &calls.step, sizeof calls.step) == 0);
    // No hosted one beside it.
    CHECK(!at<persistent::TargetStep>(launch, 24).is_hosted());
    CHECK_EQ(at<int>(launch, 24 + sizeof(persistent::TargetStep)), 3);
    CHECK_EQ(rank->port.fault.tp_rank, r);
    CHECK_EQ(rank->port.fault.tp_size, 2);
    CHECK_EQ(rank->port.fault.budget_ns, group.config().wait_budget_ns);
    // What peers write is past the caches, what the host reads is the host's, all else the
    // device's.
    for (int peer = 0; peer < 2; ++peer) {
      CHECK_EQ(fake().kind_of(rank->port.outboxes[peer]), 1);
      CHECK_EQ(fake().kind_of(rank->port.fault.abort_words[peer]), 1);
    }
    CHECK_EQ(fake().kind_of(rank->port.fault.status), 2);
    CHECK_EQ(fake().kind_of(rank->port.fault.claimed), 0);
    CHECK_EQ(fake().kind_of(rank->buffers.residual), 0);
    CHECK_EQ(fake().kind_of(rank->blocks), 0);
    CHECK_EQ(fake().kind_of(rank->blocks[3].wide_f32), 0);
    CHECK_EQ(rank->progress->epoch, 0u);
    CHECK(rank->blocks[2].wide_f32 != rank->blocks[3].wide_f32);
  }
  // Each rank's box in a memory is one and the same for both.
  const auto* left = at<const persistent::Rank*>(seen()[0], 0);
  const auto* right = at<const persistent::Rank*>(seen()[10], 0);
  for (int r = 0; r < 2; ++r) CHECK(left->port.outboxes[r] == right->port.outboxes[r]);
}

// A hosted model of one rank over memory of its own; weights are whatever that holds.
struct HostedAmd {
  lowlat_model_config config;
  lowlat_model* model = nullptr;
  std::vector<std::int64_t> words;
  std::vector<std::uint16_t> rows;
  std::vector<std::int32_t> table;
  lowlat_hosted_step step{};
  lowlat_proposal proposal{};

  HostedAmd(std::uint32_t kind, bool proposals, const char* platform = "amd")
      : config(tiny_config(kind, 1, 0)), words(512), rows(1 << 16), table(64, 1) {
    // A block's proposals, and a request's verify rows.
    config.num_widths = 2;
    config.widths[0] = config.draft_block;
    config.widths[1] = config.draft_block + 1;
    lowlat_hosting hosting{};
    hosting.struct_bytes = sizeof hosting;
    hosting.expert_layout = LOWLAT_ROW_MAJOR;
    hosting.proposals = proposals ? 1 : 0;
    TinyGroup::must(lowlat_hosted_create(platform, &config, &hosting, &model));
    for (int i = 0; i < lowlat_model_num_tensors(model); ++i) {
      const lowlat_tensor_spec spec = spec_of(i);
      if (spec.role == LOWLAT_POOL) continue;
      const lowlat_tensor tensor = dense_tensor(spec, memory(spec));
      TinyGroup::must(lowlat_model_bind(model, spec.name, &tensor));
    }
    TinyGroup::must(lowlat_model_ready(model));
    step.struct_bytes = sizeof step;
    step.mode = LOWLAT_TARGET_VERIFY;
    step.batch_size = 1;
    step.tokens_per_request = config.draft_block + 1;
    step.page_table_stride = step.num_table_pages = 4;
    step.token_ids = step.positions = step.slots = step.requests = words.data();
    step.page_table = table.data();
    step.hidden = step.features = rows.data();
    proposal.struct_bytes = sizeof proposal;
    proposal.batch_size = 1;
    proposal.hidden = rows.data();
    proposal.anchors = words.data();
    proposal.draft_tokens = words.data();
  }
  ~HostedAmd() { lowlat_model_destroy(model); }
  HostedAmd(const HostedAmd&) = delete;
  HostedAmd& operator=(const HostedAmd&) = delete;

  lowlat_tensor_spec spec_of(int i) const {
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    TinyGroup::must(lowlat_model_tensor(model, i, &spec));
    return spec;
  }
  void* memory(const lowlat_tensor_spec& spec) const {
    std::uint64_t bytes = 8;
    for (std::uint32_t d = 0; d < spec.ndim; ++d)
      bytes *= static_cast<std::uint64_t>(spec.shape[d]);
    void* out = nullptr;
    TinyGroup::must(lowlat_model_alloc(model, LOWLAT_MEMORY_DEVICE, bytes, &out));
    return out;
  }
  // The engine's caches, of `pages` pages each; where V4.1's index keys lie apart, `split`.
  lowlat_status bind_pools(int pages, bool split) {
    std::vector<std::string> names;
    std::vector<lowlat_tensor> tensors;
    const auto give = [&](const std::string& name, lowlat_tensor_spec spec) {
      // Pages of 64 entries, or rings of requests and pages; never many.
      const bool paged = name.starts_with("kv.swa") || name.starts_with("kv.extra");
      spec.shape[0] =
          paged ? pages : pages * std::max(config.page_size / 64, config.state_ring) + 64;
      names.push_back(name);
      tensors.push_back(dense_tensor(spec, memory(spec)));
    };
    for (int i = 0; i < lowlat_model_num_tensors(model); ++i) {
      lowlat_tensor_spec spec = spec_of(i);
      if (spec.role != LOWLAT_POOL) continue;
      const std::string name = spec.name;
      if (split && name.starts_with("kv.index.")) {
        spec.layout = LOWLAT_ROW_MAJOR;
        spec.shape[1] = 4096;
        give(name, spec);
        spec.shape[1] = 256;
        give("kv.index_scales." + name.substr(9), spec);
      } else {
        give(name, spec);
      }
    }
    std::vector<const char*> pointers;
    for (const std::string& name : names) pointers.push_back(name.c_str());
    lowlat_pools pools{};
    pools.struct_bytes = sizeof pools;
    pools.num_pages = pages;
    pools.num_window_pages = pages;
    pools.num_requests = 2;
    pools.history = config.num_engrams > 0 ? table.data() : nullptr;
    pools.num_tensors = static_cast<int>(names.size());
    pools.split_index = split ? 1 : 0;
    pools.names = pointers.data();
    pools.tensors = tensors.data();
    return lowlat_pools_bind(model, &pools);
  }
};

TEST_CASE(a_hosted_step_is_the_same_launches_over_the_engines_caches) {
  NEEDS_FAKE;
  fake().reset(1, kGfx950);
  {
    HostedAmd hosted(LOWLAT_V41, false);
    CHECK_EQ(lowlat_hosted_step_launch(hosted.model, &hosted.step, nullptr), LOWLAT_INVALID);
    TinyGroup::must(hosted.bind_pools(40, true));
    const int first = fake().num_launches();
    seen().clear();
    fake().on_launch(keep_backs);
    TinyGroup::must(lowlat_hosted_step_launch(hosted.model, &hosted.step, nullptr));
    const std::vector<std::string> all = launches(first);
    CHECK_EQ(all.front(), "lowlat_target_front 4");
    CHECK_EQ(all.back(), "lowlat_target_head 4");
    CHECK_EQ(std::count(all.begin(), all.end(), "lowlat_target_select 4"), 4);
    REQUIRE(seen().size() == 10u);
    const auto call = at<persistent::TargetStep>(seen()[4], 24);
    CHECK(call.is_hosted());
    CHECK(std::memcmp(&call.hosted, &hosted.step, sizeof hosted.step) == 0);
    const auto* rank = at<const persistent::Rank*>(seen()[4], 0);
    CHECK_EQ(rank->pools.num_pages, 40);
    CHECK_EQ(rank->pools.num_requests, 2);
    CHECK_EQ(rank->pools.history, hosted.table.data());
    const auto& layer = rank->weights->layers[2];
    CHECK_EQ(fake().kind_of(layer.kv_index), 0);
    CHECK_EQ(fake().kind_of(layer.kv_index_scales), 0);

    // Caches that moved are where the next launch looks; the rank itself stays.
    const std::uint8_t* before = layer.kv_swa;
    TinyGroup::must(hosted.bind_pools(50, false));
    TinyGroup::must(lowlat_hosted_step_launch(hosted.model, &hosted.step, nullptr));
    CHECK(at<const persistent::Rank*>(seen()[14], 0) == rank);
    CHECK_EQ(rank->pools.num_pages, 50);
    CHECK(rank->weights->layers[2].kv_swa != before);
    CHECK(rank->weights->layers[2].kv_index_scales == nullptr);
    CHECK_EQ(lowlat_propose_launch(hosted.model, &hosted.proposal, nullptr), LOWLAT_UNSUPPORTED);
  }
  CHECK_EQ(fake().alive(), 0);
}

TEST_CASE(split_index_pages_are_v41s_alone) {
  NEEDS_FAKE;
  fake().reset(1, kGfx950);
  HostedAmd hosted(LOWLAT_V4, false);
  CHECK_EQ(hosted.bind_pools(40, true), LOWLAT_INVALID);
  CHECK_EQ(std::string(lowlat_last_error()), "split_index is 1; needed 0, or 1 of a model of V4.1");
}

TEST_CASE(marlins_tiles_are_refused_in_one_line) {
  NEEDS_FAKE;
  fake().reset(1, kGfx950);
  const lowlat_model_config config = tiny_config(LOWLAT_V4, 1, 0);
  lowlat_hosting hosting{};
  hosting.struct_bytes = sizeof hosting;
  hosting.expert_layout = LOWLAT_MARLIN;
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_hosted_create("amd", &config, &hosting, &model), LOWLAT_UNSUPPORTED);
  CHECK_EQ(std::string(lowlat_last_error()),
           "expert_layout is Marlin's, which platform amd does not read; needed row-major experts, "
           "as the checkpoint has them");
}

TEST_CASE(hosted_proposals_are_one_launch) {
  NEEDS_FAKE;
  fake().reset(1, kGfx942);
  {
    HostedAmd hosted(LOWLAT_V4, true);
    const int first = fake().num_launches();
    TinyGroup::must(lowlat_propose_launch(hosted.model, &hosted.proposal, nullptr));
    CHECK(launches(first) == std::vector<std::string>{"lowlat_propose 4"});
  }
  CHECK_EQ(fake().alive(), 0);
}

// As every_call_that_fails_is_named_and_leaves_nothing, of what a hosted life adds.
TEST_CASE(a_hosted_life_that_fails_names_the_call_and_leaves_nothing) {
  NEEDS_FAKE;
  const auto life = [] {
    HostedAmd hosted(LOWLAT_V41, false);
    TinyGroup::must(hosted.bind_pools(40, true));
    TinyGroup::must(lowlat_hosted_step_launch(hosted.model, &hosted.step, nullptr));
  };
  for (const std::string name : {"hipMemcpy", "hipModuleLaunchKernel", "hipModuleGetFunction"}) {
    fake().reset(1, kGfx950);
    life();
    const int count = fake().calls(name.c_str());
    CHECK(count > 0);
    for (const int call : {count - 1, count}) {
      fake().reset(1, kGfx950);
      fake().fail(name.c_str(), call, 2);
      const std::string words = words_of(life);
      const std::string wanted = name == "hipModuleLaunchKernel" ? "the launch of lowlat_" : name;
      if (words.find(wanted) == std::string::npos) CHECK_EQ(name, words);
      CHECK_EQ(fake().alive(), 0);
    }
  }
}

TEST_CASE(ranks_of_one_device_share_its_units) {
  NEEDS_FAKE;
  fake().reset(1, kGfx950);
  AmdGroup group(LOWLAT_V4, 2, [](int) { return "amd:0"; });
  Calls calls(group.config());
  const int first = fake().num_launches();
  group.run([&](lowlat_model* m, int) { return lowlat_step_launch(m, &calls.step, nullptr); });
  CHECK_EQ(launches(first).front(), "lowlat_target_front 2");
  fake().set("compute_units", 1);
  CHECK_EQ(words_of([] { AmdGroup none(LOWLAT_V4, 2, [](int) { return "amd:0"; }); }),
           "status 2: 2 ranks on one device of 1 compute units; needed a unit a rank");
}

TEST_CASE(an_abort_raises_the_word_on_every_rank_and_status_words_are_read) {
  NEEDS_FAKE;
  fake().reset(2, kGfx950);
  AmdGroup group(LOWLAT_V41, 2);
  Calls calls(group.config());
  seen().clear();
  fake().on_launch(keep_backs);
  group.run([&](lowlat_model* m, int) { return lowlat_step_launch(m, &calls.step, nullptr); });
  const auto* rank = at<const persistent::Rank*>(seen()[0], 0);
  CHECK_EQ(*rank->port.fault.abort_words[1], 0u);
  // What a kernel would leave.
  lowlat::amd::stages::StatusWords* status = rank->port.fault.status;
  status->kernel = 2;
  status->stage = 4;
  status->peer = 1;
  status->epoch = 77;
  status->state = 1;
  lowlat_status_words words{};
  words.struct_bytes = sizeof words;
  TinyGroup::must(lowlat_status_read(group.model(0), &words));
  CHECK_EQ(words.state, 1u);
  CHECK_EQ(words.stage, 4u);
  CHECK_EQ(words.peer, 1);
  CHECK_EQ(words.epoch, 77u);
  CHECK_EQ(lowlat_synchronize(group.model(0), 1'000'000'000), LOWLAT_FAULT);
  lowlat_abort(group.model(0));
  CHECK_EQ(*rank->port.fault.abort_words[0], lowlat::amd::stages::kAbortByHost);
  CHECK_EQ(*rank->port.fault.abort_words[1], lowlat::amd::stages::kAbortByHost);
}

TEST_CASE(work_that_does_not_end_is_a_fault_by_the_deadline) {
  NEEDS_FAKE;
  fake().reset(2, kGfx950);
  {
    TinyGroup group(
        LOWLAT_V4, 1, [](lowlat_model_config& c) { c.wait_budget_ns = 1'000'000; }, own_device);
    Calls calls(group.config());
    TinyGroup::must(lowlat_step_launch(group.model(0), &calls.step, nullptr));
    fake().set("hold", 1);
    CHECK_EQ(lowlat_synchronize(group.model(0), 2'000'000), LOWLAT_FAULT);
    fake().set("hold", 0);
  }
  CHECK_EQ(fake().alive(), 0);
}

TEST_CASE(another_process_s_memory_is_mapped_and_given_back) {
  NEEDS_FAKE;
  fake().reset(2, kGfx950);
  lowlat_model_config config = tiny_config(LOWLAT_V4, 2, 0);
  lowlat_model *own = nullptr, *peer = nullptr;
  TinyGroup::must(lowlat_model_create("amd:0", &config, &own));
  config.tp_rank = 1;
  TinyGroup::must(lowlat_model_create("amd:1", &config, &peer));
  lowlat_peer_handle handle;
  TinyGroup::must(lowlat_peer_export(peer, &handle));
  std::int64_t pid;
  std::memcpy(&pid, handle.bytes + offsetof(RegionHandle, pid), sizeof pid);
  ++pid;
  std::memcpy(handle.bytes + offsetof(RegionHandle, pid), &pid, sizeof pid);
  const int before = fake().alive();
  TinyGroup::must(lowlat_peer_import(own, 1, &handle));
  CHECK_EQ(fake().alive(), before + 1);
  CHECK_EQ(fake().calls("hipIpcOpenMemHandle"), 1);
  fake().set("reach", 0);
  CHECK_EQ(lowlat_peer_import(own, 1, &handle), LOWLAT_UNSUPPORTED);
  CHECK(std::string(lowlat_last_error()).find("its memory cannot be mapped here: ") !=
        std::string::npos);
  lowlat_model_destroy(own);
  lowlat_model_destroy(peer);
  CHECK_EQ(fake().alive(), 0);
}

std::string create_words(const char* platform) {
  const lowlat_model_config config = tiny_config(LOWLAT_V4, 1, 0);
  lowlat_model* model = nullptr;
  const lowlat_status status = lowlat_model_create(platform, &config, &model);
  lowlat_model_destroy(model);
  return std::to_string(status) + " " + (status == LOWLAT_OK ? "" : lowlat_last_error());
}

#ifdef LOWLAT_HAVE_CUDA
const std::string kBuiltBefore = "nvidia, ";
#else
const std::string kBuiltBefore;
#endif
TEST_CASE(devices_are_found_by_a_store_on_each_and_into_each_other) {
  NEEDS_FAKE;
  fake().reset(3, kGfx950);
  auto found = lowlat::host::amd_devices();
  CHECK(found.built);
  CHECK_EQ(found.architectures, "gfx950, gfx942");
  CHECK_EQ(found.toolkit, "libamdhip64.so.7");
  CHECK_EQ(found.refusal, "");
  REQUIRE(found.devices.size() == 3u);
  for (const auto& device : found.devices) {
    CHECK_EQ(device.name, "AMD Instinct of the fake");
    CHECK_EQ(device.isa, "gfx950");
    CHECK_EQ(device.refusal, "");
  }
  CHECK_EQ(found.peers.size(), 6u);
  for (const auto& peer : found.peers) CHECK_EQ(peer.refusal, "");
  CHECK_EQ(fake().num_launches(), 9);
  CHECK_EQ(fake().alive(), 0);

  fake().reset(2, kGfx950);
  fake().set("reach", 0);
  found = lowlat::host::amd_devices();
  CHECK_EQ(found.devices[1].refusal, "");
  CHECK_EQ(found.peers[0].refusal, "HIP says that they cannot reach each other");

  fake().reset(2, 0x41);
  found = lowlat::host::amd_devices();
  const std::string no_code = "this library has no code for this device: it holds gfx950, gfx942";
  CHECK_EQ(found.devices[0].refusal, no_code);
  CHECK_EQ(found.devices[0].isa, "");
  CHECK_EQ(found.peers[1].refusal, no_code);

  fake().reset(0, kGfx950);
  found = lowlat::host::amd_devices();
  CHECK_EQ(found.refusal, "platform amd has no device here: HIP sees none (rocminfo)");
  CHECK(found.devices.empty());

  // Work that never ends is a line too.
  fake().reset(1, kGfx942);
  fake().fail("hipStreamQuery", 2, 2);
  found = lowlat::host::amd_devices();
  CHECK(found.devices[0].refusal.find("hipStreamQuery") != std::string::npos);
  CHECK_EQ(fake().alive(), 0);
}

TEST_CASE(refusals_are_one_line_that_says_what_is_needed) {
  NEEDS_FAKE;
  fake().reset(0, kGfx950);
  CHECK_EQ(create_words("amd"), "2 platform amd has no device here: HIP sees none (rocminfo)");
  fake().reset(2, 0x41);  // another part
  CHECK_EQ(create_words("amd"),
           "2 this library has no code for this device: it holds gfx950, gfx942");
  fake().reset(2, kGfx950);
  CHECK_EQ(create_words("amd:7"), "2 platform is \"amd:7\"; this machine has devices 0 .. 1");
  CHECK_EQ(create_words("amd:x"),
           "1 platform is \"amd:x\"; needed amd or amd:N, N a device's number");
  fake().set("clock_khz", 25'000);
  CHECK_EQ(create_words("amd"),
           "2 device 0 is AMD Instinct of the fake, whose wall clock runs 25000 kHz; needed "
           "100000 (gfx942 or gfx950)");
  CHECK_EQ(
      create_words("amdahl"),
      "2 platform is \"amdahl\"; this library was built with: scalar, " + kBuiltBefore + "amd");
  fake().set("clock_khz", 100'000);
  fake().set("reach", 0);
  CHECK_EQ(words_of([] { AmdGroup none(LOWLAT_V4, 2); }),
           "status 2: peer handle of rank 1: device 0 cannot reach device 1 (see rocm-smi "
           "--showtopoaccess)");
  fake().set("reach", 1);
  fake().set("arrive", 0);
  CHECK_EQ(words_of([] { AmdGroup none(LOWLAT_V4, 2); }),
           "status 2: a store to rank 1's memory did not arrive (see rocm-smi --showtopoaccess)");
  fake().set("arrive", 1);
  fake().set("lanes", 0);
  CHECK_EQ(words_of([] { AmdGroup none(LOWLAT_V4, 2); }),
           "status 2: the matrix unit of this device has its sums in other lanes than these "
           "kernels, which were never run on one, expect: please report the device");
  CHECK_EQ(fake().alive(), 0);
}

TEST_CASE(a_handle_of_something_else_is_refused) {
  NEEDS_FAKE;
  fake().reset(2, kGfx950);
  const lowlat_model_config config = tiny_config(LOWLAT_V4, 2, 0);
  lowlat_model_config other = tiny_config(LOWLAT_V4, 2, 1);
  other.wait_budget_ns = 1;
  lowlat_model *own = nullptr, *peer = nullptr;
  TinyGroup::must(lowlat_model_create("amd:0", &config, &own));
  TinyGroup::must(lowlat_model_create("amd:1", &other, &peer));
  lowlat_peer_handle handle{};
  CHECK_EQ(lowlat_peer_import(own, 1, &handle), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("no handle of a HIP exchange region") !=
        std::string::npos);
  TinyGroup::must(lowlat_peer_export(peer, &handle));
  CHECK_EQ(lowlat_peer_import(own, 1, &handle), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("another model shape") != std::string::npos);
  lowlat_model_destroy(own);
  lowlat_model_destroy(peer);
}

TEST_CASE(a_tensor_in_host_memory_is_refused) {
  NEEDS_FAKE;
  fake().reset(1, kGfx950);
  const lowlat_model_config config = tiny_config(LOWLAT_V4, 1, 0);
  lowlat_model* model = nullptr;
  TinyGroup::must(lowlat_model_create("amd", &config, &model));
  lowlat_tensor_spec spec{};
  spec.struct_bytes = sizeof spec;
  TinyGroup::must(lowlat_model_tensor(model, 0, &spec));
  std::vector<std::uint8_t> host(1 << 16);
  const lowlat_tensor tensor = dense_tensor(spec, host.data());
  CHECK_EQ(lowlat_model_bind(model, spec.name, &tensor), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error())
            .find("data is host memory; this rank needs memory of "
                  "device 0") != std::string::npos);
  lowlat_model_destroy(model);
}

// Every function that is used, failing at its first, second, middle and last call of a whole life:
// one line that names it, and nothing left behind. Functions that give something back have nobody
// to tell.
TEST_CASE(every_call_that_fails_is_named_and_leaves_nothing) {
  NEEDS_FAKE;
  const std::set<std::string> silent = {"hipFree",          "hipHostFree",
                                        "hipStreamDestroy", "hipEventDestroy",
                                        "hipModuleUnload",  "hipIpcCloseMemHandle"};
  // Its failure is an answer: another word than its own name.
  const std::map<std::string, std::string> answers = {
      {"hipGetDeviceCount", "has no device here"},
      {"hipPointerGetAttributes", "data is host memory"},
      {"hipModuleLaunchKernel", "the launch of lowlat_"}};
  const auto life = [] {
    AmdGroup group(LOWLAT_V4, 2);
    run_all(group);
  };
  int num_functions = 0;
#define NAME_OF(name, parameters) #name,
  const char* const names[] = {LOWLAT_HIP_CALLS(NAME_OF)};
#undef NAME_OF
  for (const std::string name : names) {
    fake().reset(2, kGfx950);
    life();
    const int count = fake().calls(name.c_str());
    CHECK_EQ(fake().alive(), 0);
    if (count == 0) {
      // The life has no other process, no refusal and no abort; those have cases of their own.
      CHECK(name.starts_with("hipIpc") || name == "hipDeviceGetName" || name == "hipMemcpyAsync");
      continue;
    }
    ++num_functions;
    for (const int call : std::set<int>{1, 2, (count + 1) / 2, count}) {
      if (call > count) continue;
      fake().reset(2, kGfx950);
      fake().fail(name.c_str(), call, 2);
      const std::string words = words_of(life);
      if (silent.count(name) == 1) {
        CHECK_EQ(words, "");
        continue;
      }
      const auto answer = answers.find(name);
      const std::string& wanted = answer == answers.end() ? name : answer->second;
      // A device is given back in a destructor and asked for there, and so is whether the last work
      // is done: nobody to tell either.
      const bool of_device = name == "hipSetDevice" || name == "hipGetDevice";
      const bool of_end = of_device || (name == "hipEventQuery" && call == count);
      if (!(of_end && words.empty()) && words.find(wanted) == std::string::npos) {
        CHECK_EQ(name + " number " + std::to_string(call), words);
      }
      CHECK(words.find('\n') == std::string::npos);
      if (!of_device) CHECK_EQ(fake().alive(), 0);
    }
  }
  CHECK(num_functions >= 24);
}

}  // namespace
