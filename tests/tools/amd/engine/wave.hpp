// wave.hpp: the state of a wave and of its workgroup, and how operands are read and written.
//
// What a load brings is in its registers at once, but nobody may touch them before the s_waitcnt
// that says so: `busy` marks them, and a read or write is a fault. Stores leave the workgroup
// later: they wait in its queue, and chance lets them go, piece by piece and in no order; an
// s_waitcnt for them stays until they have gone.
#pragma once

#include <bit>
#include <cmath>
#include <deque>
#include <random>

#include "memory.hpp"

namespace amd {

inline constexpr int kVcc = 106, kM0 = 124, kExec = 126;
inline constexpr int kVectorRegisters = 512;  // 256 and up: accumulators
inline constexpr u64 kSharedAperture = 0x0001'0000'0000'0000ull;
inline constexpr u64 kPrivateAperture = 0x0002'0000'0000'0000ull;

// Counters of s_waitcnt.
enum class Counter : u8 { vm, lgkm };

struct PendingStore {
  u32 wave = 0;
  u64 id = 0;  // of the wave's operations
  int scope = 0;
  bool write_back = false;    // buffer_wbl2
  u32 bytes = 0;              // of a lane
  u64 lanes = 0;              // still to go
  u64 low = ~0ull, high = 0;  // addresses that it touches
  std::array<u64, kLanes> address;
  std::vector<u8> data;  // [lane][bytes]

  // Whether the two touch a byte in common, which keeps them in order.
  bool meets(const PendingStore& other) const {
    if (low >= other.high || other.low >= high) return false;
    for (u64 mine = lanes; mine != 0; mine &= mine - 1) {
      const u64 at = address[static_cast<std::size_t>(std::countr_zero(mine))];
      for (u64 theirs = other.lanes; theirs != 0; theirs &= theirs - 1) {
        const u64 from = other.address[static_cast<std::size_t>(std::countr_zero(theirs))];
        if (from < at + bytes && at < from + other.bytes) return true;
      }
    }
    return false;
  }
};

// One operation that a counter counts.
struct Outstanding {
  u64 id = 0;
  u16 first = 0, count = 0;  // registers that come back
  bool scalar = false;       // they are scalar; also: comes back in no order
  bool flat = false;         // counted by both, in no order
  bool in_order = false;     // a load of vector memory that is no flat one
  bool lds_write = false;
  bool store = false;
};

struct Workgroup;

struct Wave {
  // Registers.
  // The last few are nobody's: a span that begins at the end stays inside.
  alignas(64) u32 v[kVectorRegisters + 16][kLanes];
  u32 s[128];
  u64 exec = 0;
  bool scc = false;
  u64 pc = 0;  // of the instruction that runs
  u64 next_pc = 0;
  u32 mode = 0;  // of s_setreg
  u32 trap_status = 0;

  Workgroup* group = nullptr;
  u32 index = 0;  // in the workgroup
  bool ended = false, at_barrier = false;
  bool gives_way = false;  // ended its turn: s_sleep, a barrier, a wait

  u8 busy_vector[kVectorRegisters + 16] = {};
  u8 busy_scalar[128] = {};
  u8 busy_in_order[kVectorRegisters + 16] = {};  // of busy_vector: loads that come back in order
  u64 loaded_by_vector[kVectorRegisters + 16] = {};  // where in the code, of those that are busy
  u64 loaded_by_scalar[128] = {};
  int num_busy = 0;
  std::deque<Outstanding> counted[2];
  u64 next_id = 1;
  u64 lds_landed[2] = {0, 0};  // by counter: the last write to LDS that was waited for
  u64 instructions = 0;
  std::vector<u8> scratch;  // [lane][bytes]
  u32 scratch_bytes = 0;

  u64 vcc() const { return pair(kVcc); }
  u64 pair(int index) const {
    return index == kExec ? exec : s[index] | static_cast<u64>(s[index + 1]) << 32;
  }
  [[noreturn]] void fault(const std::string& what) const { throw Fault(what); }
  std::mt19937_64& random() const;
  u64 code_offset() const;  // of the instruction that runs

  // Scalar registers by number, with their checks.
  void touch_scalar(int index, int count, bool writes) const {
    if (num_busy == 0) return;
    for (int i = index; i < index + count && i < 128; ++i) {
      if (busy_scalar[i] != 0) {
        fault("s" + std::to_string(i) + (writes ? " written" : " read") + " before what " +
              Memory::hex(loaded_by_scalar[i]) +
              " loads came back: an s_waitcnt lgkmcnt(0) is missing");
      }
    }
  }
  void touch_vector(int index, int count, bool writes) const {
    if (num_busy == 0) return;
    for (int i = index; i < index + count && i < kVectorRegisters; ++i) {
      if (busy_vector[i] != 0) {
        fault((i < 256 ? "v" : "a") + std::to_string(i % 256) + (writes ? " written" : " read") +
              " before what " + Memory::hex(loaded_by_vector[i]) +
              " loads came back: an s_waitcnt is missing");
      }
    }
  }
  // Before a load of vector memory, which comes back after such loads that are still on their way.
  void touch_loaded(int index, int count) const {
    for (int i = index; i < index + count && num_busy != 0; ++i)
      if (busy_vector[i] != busy_in_order[i]) touch_vector(i, 1, true);
  }
  u32 scalar(int index) const {
    if (index >= kExec) return static_cast<u32>(index == kExec ? exec : exec >> 32);
    touch_scalar(index, 1, false);
    return s[index];
  }
  u64 scalar64(int index) const {
    if (index == kExec) return exec;
    touch_scalar(index, 2, false);
    return pair(index);
  }
  void set_scalar(int index, u32 value) {
    if (index == kExec) {
      exec = (exec & 0xffff'ffff'0000'0000ull) | value;
    } else if (index == kExec + 1) {
      exec = (exec & 0xffff'ffffull) | static_cast<u64>(value) << 32;
    } else {
      touch_scalar(index, 1, true);
      s[index] = value;
    }
  }
  void set_scalar64(int index, u64 value) {
    if (index == kExec) {
      exec = value;
      return;
    }
    touch_scalar(index, 2, true);
    s[index] = static_cast<u32>(value);
    s[index + 1] = static_cast<u32>(value >> 32);
  }

  // Counters.
  u64 count(Counter counter, Outstanding operation) {
    auto& queue = counted[static_cast<int>(counter)];
    const std::size_t limit = counter == Counter::vm ? 63 : 15;
    if (operation.id == 0) operation.id = next_id++;
    mark(operation, 1);
    queue.push_back(operation);
    if (queue.size() > limit) wait(counter, limit);
    return operation.id;
  }
  // Whether such a wait is for stores that have not left yet.
  bool waits_for_stores(std::size_t left) const;
  // What a wait until at most `left` are outstanding promises.
  void wait(Counter counter, std::size_t left);

 private:
  void mark(const Outstanding& operation, int by) {
    for (int i = operation.first; i < operation.first + operation.count; ++i) {
      u8& place = operation.scalar ? busy_scalar[i] : busy_vector[i];
      place = static_cast<u8>(place + by);
      if (by > 0) (operation.scalar ? loaded_by_scalar : loaded_by_vector)[i] = code_offset();
      num_busy += by;
      if (operation.in_order) busy_in_order[i] = static_cast<u8>(busy_in_order[i] + by);
    }
  }
  void finish(Counter counter, const Outstanding& operation);
};

struct LdsUnit {  // of two bytes: who touched it last, for races between waves
  u32 write_turn = 0, read_turn = 0;
  u32 write_id = 0;           // the writer's operation; it has landed once that was waited for
  u8 writer = 0, reader = 0;  // reader kSeveral: of several waves
  u8 counter = 0;             // what counts the write
  static constexpr u8 kSeveral = 255;
};

struct Launch;

struct Workgroup {
  Launch* launch = nullptr;
  u32 id[3] = {0, 0, 0};
  View view;
  std::vector<u8> lds;
  std::vector<LdsUnit> units;
  u32 turn = 1;  // counts barriers
  std::vector<std::unique_ptr<Wave>> waves;
  u32 num_live = 0, num_waiting = 0;
  std::deque<PendingStore> stores;
  std::mt19937_64* random = nullptr;

  // Lets a store go as far as its scope reaches: all its lanes, or those of the mask.
  void perform(PendingStore& store, u64 lanes) {
    if (store.write_back) {
      // What the workgroup stored before is in front of it in the same pipe.
      for (auto& earlier : stores) {
        if (&earlier == &store) break;
        perform(earlier, ~0ull);
      }
      view.write_back(store.scope);
      store.lanes = 0;
      return;
    }
    for (u64 left = store.lanes & lanes; left != 0; left &= left - 1) {
      const int lane = std::countr_zero(left);
      store_pieces(store.scope, store.address[lane], store.bytes,
                   store.data.data() + static_cast<std::size_t>(lane) * store.bytes);
    }
    store.lanes &= ~lanes;
  }
  void perform_until(u32 wave, u64 id) {
    for (auto& store : stores) {
      if (store.wave == wave && store.id <= id) {
        perform_in_order(store);
      }
    }
    sweep();
  }
  void perform_all() {
    for (auto& store : stores) perform(store, ~0ull);
    stores.clear();
  }
  // Chance: some lanes of one store leave.
  void perform_some() {
    if (stores.empty()) return;
    std::size_t pick = (*random)() % stores.size();
    if (stores[pick].write_back) pick = 0;
    for (std::size_t earlier = 0; earlier < pick; ++earlier) {
      if (stores[pick].meets(stores[earlier])) {
        pick = earlier;
        break;
      }
    }
    perform(stores[pick], (*random)());
    sweep();
  }
  void store_pieces(int scope, u64 address, u32 bytes, const u8* data) {
    while (bytes != 0) {
      const u32 room = kLineBytes - static_cast<u32>(address % kLineBytes);
      const u32 part = std::min(room, bytes);
      view.store(scope, address, part, data);
      address += part;
      data += part;
      bytes -= part;
    }
  }
  // Bytes as the workgroup's own lanes see them.
  void load_pieces(int scope, u64 address, u32 bytes, u8* out) {
    u64 at = address;
    u8* to = out;
    for (u32 left = bytes; left != 0;) {
      const u32 part = std::min(kLineBytes - static_cast<u32>(at % kLineBytes), left);
      view.load(scope, at, part, to);
      at += part;
      to += part;
      left -= part;
    }
    for (const auto& store : stores) {
      if (store.low >= address + bytes || address >= store.high) continue;
      for (u64 lanes = store.lanes; lanes != 0; lanes &= lanes - 1) {
        const int lane = std::countr_zero(lanes);
        const u64 from = store.address[lane];
        if (from >= address + bytes || address >= from + store.bytes) continue;
        const u64 begin = std::max(from, address);
        const u64 end = std::min(from + store.bytes, address + bytes);
        std::memcpy(
            out + (begin - address),
            store.data.data() + static_cast<std::size_t>(lane) * store.bytes + (begin - from),
            end - begin);
      }
    }
  }
  void perform_overlapping(u64 address, u32 bytes) {
    bool any = false;
    for (auto& store : stores) {
      if (store.lanes != 0 && store.low < address + bytes && address < store.high) {
        perform(store, ~0ull);
        any = true;
      }
    }
    if (any) sweep();
  }

 private:
  void perform_in_order(PendingStore& store) {
    for (auto& earlier : stores) {
      if (&earlier == &store) break;
      if (store.meets(earlier)) perform(earlier, ~0ull);
    }
    perform(store, ~0ull);
  }
  void sweep() {
    std::erase_if(stores, [](const PendingStore& s) { return s.lanes == 0; });
  }
};

inline std::mt19937_64& Wave::random() const { return *group->random; }

inline void Wave::finish(Counter counter, const Outstanding& operation) {
  mark(operation, -1);
  if (operation.store) group->perform_until(index, operation.id);
  if (operation.lds_write) {
    u64& landed = lds_landed[static_cast<int>(counter)];
    landed = std::max(landed, operation.id);
  }
}

inline bool Wave::waits_for_stores(std::size_t left) const {
  const auto& queue = counted[static_cast<int>(Counter::vm)];
  if (queue.size() <= left) return false;
  const u64 last = queue[queue.size() - left - 1].id;
  for (const auto& store : group->stores)
    if (store.wave == index && store.id <= last) return true;
  return false;
}

inline void Wave::wait(Counter counter, std::size_t left) {
  auto& queue = counted[static_cast<int>(counter)];
  if (queue.size() <= left) return;
  if (left == 0) {
    for (const auto& operation : queue) finish(counter, operation);
    queue.clear();
    return;
  }
  // Those that come back in no order are known to be back only when all are. The others come back
  // in their order, but up to `left` of them may be the ones that are missing.
  std::size_t in_order = 0;
  for (const auto& operation : queue) in_order += !(operation.scalar || operation.flat);
  std::size_t done = in_order > left ? in_order - left : 0;
  std::deque<Outstanding> kept;
  for (const auto& operation : queue) {
    if (!(operation.scalar || operation.flat) && done != 0) {
      --done;
      finish(counter, operation);
    } else {
      kept.push_back(operation);
    }
  }
  queue = std::move(kept);
}

}  // namespace amd
