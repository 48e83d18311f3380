// machine.cpp: launches, workgroups and the order in which waves run.
#include "machine.hpp"

#include <unordered_map>

namespace amd {
namespace {

struct Entry {
  Handler handler;
  u8 note;
};
std::unordered_map<std::string, Entry>& table() {
  static std::unordered_map<std::string, Entry> entries;
  return entries;
}

// Bits of a kernel descriptor.
constexpr u32 kPropertySizes[] = {4, 2, 2, 2, 2, 2, 1};  // user registers, in order
constexpr int kDispatchPointer = 1, kKernargPointer = 3;
constexpr u32 kPoisonWord = 0xa5a5a5a5;
constexpr u32 kLongestTurn = 64;

}  // namespace

void add(const char* name, Handler handler, u8 note) { table()[name] = Entry{handler, note}; }

Handler find(const std::string& name, u8* out_note) {
  if (table().empty()) {
    add_vector_operations();
    add_scalar_operations();
    add_memory_operations();
    add_matrix_operations();
  }
  const auto found = table().find(name);
  if (found == table().end()) return nullptr;
  *out_note = found->second.note;
  return found->second.handler;
}

u64 Wave::code_offset() const { return pc - group->launch->kernel.code->base; }

Machine::Machine(bool gfx950, int ranks, u64 seed) : is_gfx950(gfx950), random(seed) {
  lds_limit = gfx950 ? 163840 : 65536;
  for (int rank = 0; rank < ranks; ++rank) devices.push_back(std::make_unique<DeviceCaches>());
  queues.resize(static_cast<std::size_t>(ranks));
  launched.resize(queues.size());
  finished.resize(queues.size());
}

void Machine::make_group(Launch& launch, u64 index) {
  auto group = std::make_unique<Workgroup>();
  group->launch = &launch;
  group->id[0] = static_cast<u32>(index % launch.grid[0]);
  group->id[1] = static_cast<u32>(index / launch.grid[0] % launch.grid[1]);
  group->id[2] = static_cast<u32>(index / launch.grid[0] / launch.grid[1]);
  group->view.memory = &memory;
  group->view.caches = devices[static_cast<std::size_t>(launch.rank)].get();
  group->view.part = static_cast<int>(index % DeviceCaches::kParts);
  group->view.progress = &progress;
  group->random = &random;
  const u32 lds_bytes = launch.kernel.lds_bytes + launch.dynamic_lds;
  group->lds.assign(lds_bytes, kPoison);
  group->units.resize(lds_bytes / 2 + 1);
  const u32 threads = launch.block[0] * launch.block[1] * launch.block[2];
  const u32 num_waves = (threads + kLanes - 1) / kLanes;
  for (u32 index_of_wave = 0; index_of_wave < num_waves; ++index_of_wave) {
    auto wave = std::make_unique<Wave>();
    wave->group = group.get();
    wave->index = index_of_wave;
    for (auto& reg : wave->v)
      for (auto& word : reg) word = kPoisonWord;
    for (auto& word : wave->s) word = kPoisonWord;
    const u32 first = index_of_wave * kLanes;
    const u32 count = std::min<u32>(kLanes, threads - first);
    wave->exec = count == kLanes ? ~0ull : (1ull << count) - 1;
    wave->scc = false;
    const Kernel& kernel = launch.kernel;
    wave->pc = wave->next_pc = kernel.entry;
    wave->mode = (kernel.rsrc1 >> 12) & 0xff;
    if ((kernel.rsrc1 >> 26) & 1) wave->mode |= 1u << 23;
    if ((wave->mode & 0xff) != 0xf0)
      throw Fault("kernel " + kernel.name + " asks for a rounding or subnormals not modelled");
    for (int lane = 0; lane < kLanes; ++lane) {
      const u32 thread = first + static_cast<u32>(lane);
      const u32 x = thread % launch.block[0];
      const u32 y = thread / launch.block[0] % launch.block[1];
      const u32 z = thread / launch.block[0] / launch.block[1];
      wave->v[0][lane] = x | y << 10 | z << 20;
    }
    u32 at = 0;
    for (int property = 0; property < 7; ++property) {
      if (((kernel.properties >> property) & 1) == 0) continue;
      if (property == kKernargPointer || property == kDispatchPointer) {
        const u64 address = property == kKernargPointer ? launch.kernarg : launch.dispatch;
        wave->s[at] = static_cast<u32>(address);
        wave->s[at + 1] = static_cast<u32>(address >> 32);
      } else {
        throw Fault("kernel " + kernel.name + " asks for user registers (property " +
                    std::to_string(property) + ") that are not modelled");
      }
      at += kPropertySizes[property];
    }
    at = (kernel.rsrc2 >> 1) & 31;
    for (int axis = 0; axis < 3; ++axis)
      if ((kernel.rsrc2 >> (7 + axis)) & 1) wave->s[at++] = group->id[axis];
    if ((kernel.rsrc2 >> 10) & 1) wave->s[at++] = 0;
    wave->scratch_bytes = kernel.scratch_bytes;
    wave->scratch.assign(std::size_t{kernel.scratch_bytes} * kLanes, kPoison);
    group->waves.push_back(std::move(wave));
  }
  group->num_live = num_waves;
  for (auto& wave : group->waves) runnable_.push_back(wave.get());
  launch.groups.push_back(std::move(group));
}

void Machine::start_groups() {
  for (auto& queue : queues) {
    if (queue.empty()) continue;
    Launch& launch = *queue.front();
    while (launch.next_group < launch.num_groups() && launch.groups.size() < launch.resident) {
      make_group(launch, launch.next_group++);
      ++progress;
    }
  }
}

const Inst& Machine::instruction(Wave& wave) {
  const Kernel& kernel = wave.group->launch->kernel;
  const Code& code = *kernel.code;
  const u64 offset = wave.pc - code.base;
  if (wave.pc < code.base || offset / 4 >= code.at.size() || offset % 4 != 0)
    wave.fault("runs to a place outside of the code");
  if (code.at[offset / 4] < 0) decoder(kernel.code_index, static_cast<u32>(offset));
  if (code.at[offset / 4] < 0) wave.fault("runs to a place that holds no instruction");
  const Inst& inst = code.list[static_cast<std::size_t>(code.at[offset / 4])];
  if (inst.run == nullptr) wave.fault("an instruction that is not modelled");
  return inst;
}

void Machine::turn(Wave& wave) {
  const u32 length = 1 + static_cast<u32>(random() % kLongestTurn);
  wave.gives_way = false;
  for (u32 step = 0; step < length && !wave.gives_way; ++step) {
    wave.pc = wave.next_pc;
    faulted = &wave;
    const Inst& inst = instruction(wave);
    wave.next_pc = wave.pc + inst.size;
    inst.run(wave, inst);
    faulted = nullptr;
    ++wave.instructions;
    ++instructions;
  }
}

void Machine::open_barrier(Workgroup& group) {
  for (auto& wave : group.waves) {
    if (wave->ended || !wave->at_barrier) continue;
    wave->at_barrier = false;
    runnable_.push_back(wave.get());
  }
  group.num_waiting = 0;
  ++group.turn;
}

void Machine::after_turn(Wave& wave) {
  Workgroup& group = *wave.group;
  if (wave.ended || wave.at_barrier) {
    std::erase(runnable_, &wave);
    if (wave.ended) {
      --group.num_live;
      ++progress;
    } else {
      ++group.num_waiting;
    }
    // Waves that ended are not waited for.
    if (group.num_live != 0 && group.num_waiting == group.num_live) open_barrier(group);
  }
  if ((random() & 3) == 0) group.perform_some();
}

void Machine::retire() {
  for (std::size_t rank = 0; rank < queues.size(); ++rank) {
    auto& queue = queues[rank];
    if (queue.empty()) continue;
    Launch& launch = *queue.front();
    std::erase_if(launch.groups, [](const std::unique_ptr<Workgroup>& group) {
      if (group->num_live != 0) return false;
      group->perform_all();
      return true;
    });
    if (!launch.groups.empty() || launch.next_group < launch.num_groups()) continue;
    // A kernel's end publishes all that it wrote, and the next one begins with empty caches.
    DeviceCaches& caches = *devices[rank];
    View view;
    view.memory = &memory;
    view.caches = &caches;
    view.progress = &progress;
    for (int part = 0; part < DeviceCaches::kParts; ++part) {
      view.part = part;
      view.write_back(3);
    }
    for (auto& part : caches.part) part.clear();
    caches.device.clear();
    queue.pop_front();
    ++finished[rank];
    ++progress;
  }
}

void Machine::stuck(const std::string& what) const {
  std::string text = what;
  int shown = 0;
  for (const auto& queue : queues) {
    if (queue.empty()) continue;
    for (const auto& group : queue.front()->groups) {
      for (const auto& wave : group->waves) {
        if (wave->ended || ++shown > 24) continue;
        text += "\n  rank " + std::to_string(group->launch->rank) + " kernel " +
                group->launch->kernel.name + " workgroup " + std::to_string(group->id[0]) +
                " wave " + std::to_string(wave->index) + " at " +
                Memory::hex(wave->next_pc - group->launch->kernel.code->base) + " exec " +
                Memory::hex(wave->exec) + (wave->at_barrier ? ", waits at a barrier" : ", runs");
      }
    }
  }
  throw Fault(text);
}

void Machine::give_up() {
  runnable_.clear();
  for (std::size_t rank = 0; rank < queues.size(); ++rank) {
    queues[rank].clear();
    finished[rank] = launched[rank];
  }
  for (auto& caches : devices) {
    for (auto& part : caches->part) part.clear();
    caches->device.clear();
  }
}

// One turn of one wave. False: all launches are done.
bool Machine::step() {
  if (runnable_.empty()) {
    retire();
    start_groups();
    bool any = false;
    for (const auto& queue : queues) any = any || !queue.empty();
    if (!any) return false;
    if (runnable_.empty()) {
      for (const auto& queue : queues) {
        if (!queue.empty() && !queue.front()->groups.empty())
          stuck("no progress: every wave waits at a barrier that cannot open");
      }
      return true;
    }
  }
  Wave& wave = *runnable_[random() % runnable_.size()];
  turn(wave);
  const bool ended = wave.ended;
  Workgroup& group = *wave.group;
  after_turn(wave);
  if (ended && group.num_live == 0) {
    retire();
    start_groups();
  }
  return true;
}

void Machine::watch(u64 patience) {
  if (progress != seen_) {
    seen_ = progress;
    since_ = instructions;
  }
  if (instructions - since_ > patience) {
    stuck("no progress in " + std::to_string(patience) +
          " instructions: no byte changed, no wave ended");
  }
}

void Machine::run(u64 limit, u64 patience) {
  const u64 begin = instructions;
  since_ = begin;
  start_groups();
  while (step()) {
    watch(patience);
    if (instructions - begin > limit) {
      stuck("no end after " + std::to_string(limit) + " instructions");
    }
  }
}

void Machine::run_some(int rank, u64 limit, u64 patience) {
  const u64 begin = instructions;
  const auto& queue = queues[static_cast<std::size_t>(rank)];
  start_groups();
  while (!queue.empty() && instructions - begin < limit && step()) watch(patience);
}

}  // namespace amd
