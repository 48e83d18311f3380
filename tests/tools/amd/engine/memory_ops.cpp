// memory_ops.cpp: loads, stores and atomics of every path to memory.
#include <bit>

#include "machine.hpp"
#include "operands.hpp"

namespace amd {
namespace {

enum class Path : u8 { flat, global, scratch, buffer, lds };

// What a load or store moves: bytes in memory, words in registers, and which half of a register.
struct Shape {
  u32 bytes;
  bool is_signed = false;
  bool low_half = false, high_half = false;  // d16: one half, the other is kept
  u32 words() const { return bytes < 4 ? 1 : bytes / 4; }
};
constexpr Shape kShapes[] = {
    {1},
    {1, true},
    {2},
    {2, true},
    {4},
    {8},
    {12},
    {16},
    {1, false, true, false},
    {1, false, false, true},
    {1, true, true, false},
    {1, true, false, true},
    {2, false, true, false},
    {2, false, false, true},
};
enum ShapeId : u8 {
  kU8,
  kS8,
  kU16,
  kS16,
  kDword,
  kDwordX2,
  kDwordX3,
  kDwordX4,
  kU8Low,
  kU8High,
  kS8Low,
  kS8High,
  kU16Low,
  kU16High
};

i32 signed_offset(i32 value, int bits) {
  return static_cast<i32>(static_cast<u32>(value) << (32 - bits)) >> (32 - bits);
}
int scope_of(const Inst& i) { return i.bit(kF_sc0) + 2 * i.bit(kF_sc1); }
int data_register(const Inst& i, Field field) {
  return i.at(field) - 256 + (i.bit(kF_acc) != 0 ? 256 : 0);
}

struct Addresses {
  u64 of[kLanes];
  u64 lanes = 0;    // that take part
  u64 outside = 0;  // of a buffer: lanes beyond its end read 0 and store nothing
};

void buffer_addresses(Wave& w, const Inst& i, u32 bytes, Addresses& out) {
  const int rsrc = 4 * (i.at(kF_srsrc) / 4);
  u32 words[4];
  for (int k = 0; k < 4; ++k) words[k] = w.scalar(rsrc + k);
  const u64 base = words[0] | static_cast<u64>(words[1] & 0xffff) << 32;
  const u32 stride = (words[1] >> 16) & 0x3fff;
  if (((words[1] >> 31) & 1) != 0) w.fault("a swizzled buffer is not modelled");
  const u32 records = words[2];
  const Source soffset{i.at(kF_soffset) < 128 ? Kind::scalar : Kind::constant,
                       static_cast<u16>(i.at(kF_soffset)), 0, false, false};
  const u32 scalar_offset = read_scalar<u32>(w, soffset);
  const int vaddr = i.at(kF_vaddr) - 256;
  const bool offen = i.bit(kF_offen) != 0, idxen = i.bit(kF_idxen) != 0;
  if (offen || idxen) w.touch_vector(vaddr, offen && idxen ? 2 : 1, false);
  for (int lane = 0; lane < kLanes; ++lane) {
    const u32 index = idxen ? w.v[vaddr][lane] : 0;
    const u32 offset =
        (offen ? w.v[vaddr + (idxen ? 1 : 0)][lane] : 0) + static_cast<u32>(i.at(kF_offset));
    const bool beyond = stride == 0 ? u64{offset} + bytes > records : index >= records;
    if (beyond) out.outside |= 1ull << lane;
    out.of[lane] = base + scalar_offset + u64{index} * stride + offset;
  }
}

Addresses addresses(Wave& w, const Inst& i, Path path, u32 bytes) {
  Addresses out;
  out.lanes = w.exec;
  if (path == Path::buffer) {
    buffer_addresses(w, i, bytes, out);
    return out;
  }
  const int reg = i.at(kF_addr) - 256;
  if (path == Path::lds) {
    w.touch_vector(reg, 1, false);
    const u32 offset = static_cast<u32>(i.at(kF_offset0) | i.at(kF_offset1) << 8);
    // 32 bits: an address and its offset may go around.
    for (int lane = 0; lane < kLanes; ++lane) out.of[lane] = u64{w.v[reg][lane] + offset};
    return out;
  }
  if (path == Path::flat) {
    w.touch_vector(reg, 2, false);
    for (int lane = 0; lane < kLanes; ++lane) {
      out.of[lane] = (w.v[reg][lane] | static_cast<u64>(w.v[reg + 1][lane]) << 32) +
                     static_cast<u64>(i.at(kF_offset));
    }
    return out;
  }
  const u64 offset = static_cast<u64>(i64{signed_offset(i.at(kF_offset), 13)});
  const int saddr = i.at(kF_saddr);
  const bool has_scalar = saddr != 127;
  if (path == Path::scratch) {
    const bool has_vector = i.bit(kF_sve) != 0;
    if (has_vector) w.touch_vector(reg, 1, false);
    const u32 scalar = has_scalar ? w.scalar(saddr) : 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      const u32 sum = scalar + (has_vector ? w.v[reg][lane] : 0) + static_cast<u32>(offset);
      out.of[lane] = kPrivateAperture + sum;
    }
    return out;
  }
  if (has_scalar) {
    w.touch_vector(reg, 1, false);
    const u64 scalar = w.scalar64(saddr);
    for (int lane = 0; lane < kLanes; ++lane) out.of[lane] = scalar + w.v[reg][lane] + offset;
  } else {
    w.touch_vector(reg, 2, false);
    for (int lane = 0; lane < kLanes; ++lane) {
      out.of[lane] = (w.v[reg][lane] | static_cast<u64>(w.v[reg + 1][lane]) << 32) + offset;
    }
  }
  return out;
}

// LDS, with its rule: between two barriers a place that one wave writes is that wave's alone, and a
// write has landed when its wave waited for it.
[[noreturn]] void lds_race(const Wave& w, u64 address, const char* what, u32 other) {
  w.fault("LDS byte " + std::to_string(address) + ": " + what + " wave " + std::to_string(other) +
          " with no barrier between");
}
u8* lds_at(Wave& w, u64 address, u32 bytes, bool writes, bool atomic, Counter counter, u64 id) {
  Workgroup& group = *w.group;
  if (address + bytes > group.lds.size()) {
    w.fault((writes ? "store of " : "load of ") + std::to_string(bytes) + " bytes at LDS byte " +
            std::to_string(address) + "; the workgroup has " + std::to_string(group.lds.size()));
  }
  if (group.launch->machine->lds_races && bytes >= 2 && !atomic) {
    const u8 me = static_cast<u8>(w.index);
    for (u64 unit = address / 2; unit < (address + bytes) / 2; ++unit) {
      LdsUnit& u = group.units[unit];
      if (u.write_turn != 0 && u.writer != me) {
        if (u.write_turn == group.turn)
          lds_race(w, 2 * unit, writes ? "written after a write by" : "read after a write by",
                   u.writer);
        const Wave& writer = *group.waves[u.writer];
        if (!writer.ended && u.write_id > writer.lds_landed[u.counter])
          lds_race(w, 2 * unit, "touched before an s_waitcnt for the write by", u.writer);
      }
      if (writes) {
        if (u.read_turn == group.turn && u.reader != me)
          lds_race(w, 2 * unit, "written after a read by", u.reader);
        u.write_turn = group.turn;
        u.writer = me;
        u.write_id = static_cast<u32>(id);
        u.counter = static_cast<u8>(counter);
      } else {
        u.reader = u.read_turn == group.turn && u.reader != me ? LdsUnit::kSeveral : me;
        u.read_turn = group.turn;
      }
    }
  }
  return group.lds.data() + address;
}

bool in_aperture(u64 address, u64 aperture) { return (address >> 32) == (aperture >> 32); }

u8* scratch_at(Wave& w, int lane, u64 address, u32 bytes) {
  const u64 offset = address & 0xffff'ffffull;
  if (offset + bytes > w.scratch_bytes) {
    w.fault("scratch byte " + std::to_string(offset) + "; a lane has " +
            std::to_string(w.scratch_bytes));
  }
  return w.scratch.data() + static_cast<std::size_t>(lane) * w.scratch_bytes + offset;
}

void load_lane(Wave& w, Path path, int scope, int lane, u64 address, u32 bytes, u8* out) {
  if (path == Path::lds || (path == Path::flat && in_aperture(address, kSharedAperture))) {
    std::memcpy(out,
                lds_at(w, path == Path::lds ? address : address & 0xffff'ffffull, bytes, false,
                       false, Counter::lgkm, 0),
                bytes);
  } else if (path == Path::scratch || in_aperture(address, kPrivateAperture)) {
    std::memcpy(out, scratch_at(w, lane, address, bytes), bytes);
  } else {
    w.group->view.memory->region(address, bytes, false);
    w.group->load_pieces(scope, address, bytes, out);
  }
}

void spread(Wave& w, const Shape& shape, int reg, int lane, const u8* bytes) {
  if (shape.bytes >= 4) {
    for (u32 word = 0; word < shape.words(); ++word)
      std::memcpy(&w.v[reg + static_cast<int>(word)][lane], bytes + 4 * word, 4);
    return;
  }
  u32 value = shape.bytes == 1 ? bytes[0] : static_cast<u32>(bytes[0] | bytes[1] << 8);
  if (shape.is_signed) {
    value = shape.bytes == 1 ? static_cast<u32>(i32{static_cast<i8>(value)})
                             : static_cast<u32>(i32{static_cast<i16>(value)});
  }
  u32& word = w.v[reg][lane];
  if (shape.low_half) {
    word = (word & 0xffff'0000) | (value & 0xffff);
  } else if (shape.high_half) {
    word = (word & 0xffff) | value << 16;
  } else {
    word = value;
  }
}

// Both counters count a flat load, and its data is there when that of the memory which its lanes
// went to says so: a compiler that knows where a pointer leads waits for the one.
void count_load(Wave& w, Path path, int reg, u32 words, const Addresses* from = nullptr) {
  Outstanding operation;
  operation.first = static_cast<u16>(reg);
  operation.count = static_cast<u16>(words);
  if (path == Path::flat) {
    bool shared = false, other = false;
    for (u64 left = from->lanes; left != 0; left &= left - 1) {
      const bool here = in_aperture(from->of[std::countr_zero(left)], kSharedAperture);
      shared = shared || here;
      other = other || !here;
    }
    // What went to memory alone is back in its order, as any other load of it.
    operation.flat = shared;
    operation.in_order = !shared;
    Outstanding none = operation;
    none.count = 0;
    none.flat = true;
    none.id = operation.id = w.next_id++;
    w.count(Counter::vm, other ? operation : none);
    w.count(Counter::lgkm, shared ? operation : none);
  } else {
    operation.in_order = path != Path::lds;
    w.count(path == Path::lds ? Counter::lgkm : Counter::vm, operation);
  }
}

template <Path path>
void load(Wave& w, const Inst& i) {
  const Shape& shape = kShapes[i.note];
  const Addresses from = addresses(w, i, path, shape.bytes);
  const int reg = data_register(i, path == Path::buffer ? kF_vdata : kF_vdst);
  if (path == Path::global || path == Path::buffer || path == Path::scratch) {
    w.touch_loaded(reg, static_cast<int>(shape.words()));
  } else if (!shape.low_half && !shape.high_half) {
    w.touch_vector(reg, static_cast<int>(shape.words()), true);
  }
  u8 bytes[16];
  for (u64 left = from.lanes; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    if ((from.outside >> lane) & 1) {
      std::memset(bytes, 0, sizeof bytes);
    } else {
      load_lane(w, path, scope_of(i), lane, from.of[lane], shape.bytes, bytes);
    }
    spread(w, shape, reg, lane, bytes);
  }
  count_load(w, path, reg, shape.words(), &from);
}

// Straight into LDS: M0 says where, then lane after lane.
template <Path path>
void load_to_lds(Wave& w, const Inst& i) {
  const Shape& shape = kShapes[i.note];
  const Addresses from = addresses(w, i, path, shape.bytes);
  const u32 step = std::max(shape.bytes, 4u);
  const u64 base = (w.scalar(kM0) & 0xffff) +
                   (path == Path::global ? static_cast<u64>(signed_offset(i.at(kF_offset), 13))
                                         : static_cast<u64>(i.at(kF_offset)));
  Outstanding operation;
  operation.lds_write = true;
  const u64 id = w.count(Counter::vm, operation);
  u8 bytes[16] = {};
  for (u64 left = from.lanes; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    load_lane(w, path, scope_of(i), lane, from.of[lane], shape.bytes, bytes);
    if (shape.is_signed && shape.bytes < 4) {
      std::memset(bytes + shape.bytes, (bytes[shape.bytes - 1] & 0x80) != 0 ? 0xff : 0,
                  4 - shape.bytes);
    }
    std::memcpy(lds_at(w, base + static_cast<u64>(lane) * step, step, true, false, Counter::vm, id),
                bytes, step);
  }
  ++w.group->launch->machine->progress;
}

template <Path path>
void store(Wave& w, const Inst& i) {
  const Shape& shape = kShapes[i.note];
  const Addresses to = addresses(w, i, path, shape.bytes);
  const int reg = data_register(i, path == Path::buffer ? kF_vdata
                                   : path == Path::lds  ? kF_data0
                                                        : kF_data);
  w.touch_vector(reg, static_cast<int>(shape.words()), false);
  Outstanding operation;
  operation.store = path != Path::lds && path != Path::scratch;
  operation.lds_write = path == Path::lds || path == Path::flat;
  operation.id = w.next_id++;
  PendingStore pending;
  pending.wave = w.index;
  pending.id = operation.id;
  pending.scope = scope_of(i);
  pending.bytes = shape.bytes;
  for (u64 left = to.lanes & ~to.outside; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    u8 bytes[16];
    for (u32 word = 0; word < shape.words(); ++word)
      std::memcpy(bytes + 4 * word, &w.v[reg + static_cast<int>(word)][lane], 4);
    if (shape.high_half) std::memmove(bytes, bytes + 2, 2);
    const u64 address = to.of[lane];
    if (path == Path::lds || (path == Path::flat && in_aperture(address, kSharedAperture))) {
      u8* place = lds_at(w, path == Path::lds ? address : address & 0xffff'ffffull, shape.bytes,
                         true, false, Counter::lgkm, operation.id);
      if (std::memcmp(place, bytes, shape.bytes) != 0) ++w.group->launch->machine->progress;
      std::memcpy(place, bytes, shape.bytes);
    } else if (path == Path::scratch || in_aperture(address, kPrivateAperture)) {
      std::memcpy(scratch_at(w, lane, address, shape.bytes), bytes, shape.bytes);
    } else {
      w.group->view.memory->region(address, shape.bytes, true);
      if (pending.data.empty()) pending.data.resize(std::size_t{kLanes} * shape.bytes);
      std::memcpy(pending.data.data() + static_cast<std::size_t>(lane) * shape.bytes, bytes,
                  shape.bytes);
      pending.address[static_cast<std::size_t>(lane)] = address;
      pending.lanes |= 1ull << lane;
      pending.low = std::min(pending.low, address);
      pending.high = std::max(pending.high, address + shape.bytes);
    }
  }
  if (pending.lanes != 0) w.group->stores.push_back(std::move(pending));
  if (path == Path::lds) {
    w.count(Counter::lgkm, operation);
  } else {
    w.count(Counter::vm, operation);
    if (path == Path::flat) {
      operation.store = false;
      operation.flat = true;
      w.count(Counter::lgkm, operation);
    }
  }
}

// Atomics. note: the operation; bit 7: of 64 bits.
enum Atomic : u8 {
  kAdd,
  kSub,
  kSMin,
  kUMin,
  kSMax,
  kUMax,
  kAnd,
  kOr,
  kXor,
  kInc,
  kDec,
  kSwap,
  kCompareSwap,
  kAddFloat,
  kPkAddHalf,
  kPkAddBfloat,
  kMinFloat,
  kMaxFloat,
  kReverseSub
};
constexpr u8 kWideAtomic = 0x80, kReturns = 0x40;  // kReturns: LDS only, others say it by sc0

template <class U>
U combined(int operation, U old, U value, U other) {
  using S = std::make_signed_t<U>;
  using F = std::conditional_t<sizeof(U) == 8, double, float>;
  switch (operation) {
    case kAdd: return old + value;
    case kSub: return old - value;
    case kReverseSub: return value - old;
    case kSMin: return static_cast<U>(std::min(static_cast<S>(old), static_cast<S>(value)));
    case kSMax: return static_cast<U>(std::max(static_cast<S>(old), static_cast<S>(value)));
    case kUMin: return std::min(old, value);
    case kUMax: return std::max(old, value);
    case kAnd: return old & value;
    case kOr: return old | value;
    case kXor: return old ^ value;
    case kInc: return old >= value ? 0 : old + 1;
    case kDec: return old == 0 || old > value ? value : old - 1;
    case kSwap: return value;
    case kCompareSwap: return old == other ? value : old;
    case kAddFloat: return std::bit_cast<U>(std::bit_cast<F>(old) + std::bit_cast<F>(value));
    case kMinFloat:
      return std::bit_cast<U>(std::fmin(std::bit_cast<F>(old), std::bit_cast<F>(value)));
    case kMaxFloat:
      return std::bit_cast<U>(std::fmax(std::bit_cast<F>(old), std::bit_cast<F>(value)));
    default: {
      u32 out = 0;
      for (int shift = 0; shift < 32; shift += 16) {
        const u32 a = static_cast<u32>(old >> shift) & 0xffff;
        const u32 b = static_cast<u32>(value >> shift) & 0xffff;
        out |= (operation == kPkAddHalf ? float_half(half_float(a) + half_float(b))
                                        : float_bfloat(bfloat_float(a) + bfloat_float(b)))
               << shift;
      }
      return out;
    }
  }
}

template <Path path, class U>
void atomic_of(Wave& w, const Inst& i) {
  constexpr u32 kBytes = sizeof(U);
  constexpr int kRegisters = kBytes / 4;
  const int operation = i.note & 0x3f;
  const bool returns = path == Path::lds ? (i.note & kReturns) != 0 : i.bit(kF_sc0) != 0;
  const Addresses at = addresses(w, i, path, kBytes);
  const int data = data_register(i, path == Path::buffer ? kF_vdata
                                    : path == Path::lds  ? kF_data0
                                                         : kF_data);
  const int second = path == Path::lds ? data_register(i, kF_data1) : data + kRegisters;
  const int to = path == Path::buffer ? data : data_register(i, kF_vdst);
  w.touch_vector(data, kRegisters, false);
  if (operation == kCompareSwap) w.touch_vector(second, kRegisters, false);
  if (returns) w.touch_vector(to, kRegisters, true);
  const auto value_of = [&](int reg, int lane) {
    U value = w.v[reg][lane];
    if constexpr (kBytes == 8) value |= static_cast<U>(w.v[reg + 1][lane]) << 32;
    return value;
  };
  const int scope = i.bit(kF_sc1) != 0 ? 3 : 2;
  Machine& machine = *w.group->launch->machine;
  for (u64 left = at.lanes & ~at.outside; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    const u64 address = at.of[lane];
    const bool shared =
        path == Path::lds || (path == Path::flat && in_aperture(address, kSharedAperture));
    if (address % kBytes != 0) w.fault("atomic at " + Memory::hex(address) + ", not aligned");
    // In memory the swapped value comes before what is compared; in LDS after.
    U value = value_of(data, lane), other = 0;
    if (operation == kCompareSwap) {
      other = value_of(second, lane);
      if (path == Path::lds) std::swap(value, other);
    }
    U old;
    if (shared) {
      u8* place = lds_at(w, path == Path::lds ? address : address & 0xffff'ffffull, kBytes, true,
                         true, Counter::lgkm, 0);
      std::memcpy(&old, place, kBytes);
      const U put = combined<U>(operation, old, value, other);
      if (put != old) ++machine.progress;
      std::memcpy(place, &put, kBytes);
    } else {
      w.group->view.memory->region(address, kBytes, true);
      w.group->perform_overlapping(address, kBytes);
      u8 bytes[kBytes];
      w.group->view.load_for_atomic(scope, address, kBytes, bytes);
      std::memcpy(&old, bytes, kBytes);
      const U put = combined<U>(operation, old, value, other);
      std::memcpy(bytes, &put, kBytes);
      w.group->view.store(scope, address, kBytes, bytes);
    }
    if (returns) {
      w.v[to][lane] = static_cast<u32>(old);
      if constexpr (kBytes == 8) w.v[to + 1][lane] = static_cast<u32>(old >> 32);
    }
  }
  if (returns) {
    count_load(w, path, to, kRegisters, &at);
  } else {
    count_load(w, path, 0, 0, &at);
  }
}
template <Path path>
void atomic(Wave& w, const Inst& i) {
  if ((i.note & kWideAtomic) != 0) {
    atomic_of<path, u64>(w, i);
  } else {
    atomic_of<path, u32>(w, i);
  }
}

// Two places of LDS at once: offsets count elements, times 64 where note's bit 7 is set.
template <bool kStores>
void lds_pair(Wave& w, const Inst& i) {
  const u32 bytes = (i.note & 1) != 0 ? 8 : 4;
  const u32 step = bytes * ((i.note & 0x80) != 0 ? 64 : 1);
  const int reg = i.at(kF_addr) - 256;
  w.touch_vector(reg, 1, false);
  const int words = static_cast<int>(bytes / 4);
  Outstanding operation;
  operation.id = w.next_id++;
  if constexpr (kStores) {
    w.touch_vector(data_register(i, kF_data0), words, false);
    w.touch_vector(data_register(i, kF_data1), words, false);
  } else {
    w.touch_vector(data_register(i, kF_vdst), 2 * words, true);
  }
  u32 base[kLanes];
  std::memcpy(base, w.v[reg], sizeof base);
  for (u64 left = w.exec; left != 0; left &= left - 1) {
    const int lane = std::countr_zero(left);
    for (int half = 0; half < 2; ++half) {
      const u64 address =
          u64{base[lane] + static_cast<u32>(i.at(half == 0 ? kF_offset0 : kF_offset1)) * step};
      u8* place = lds_at(w, address, bytes, kStores, false, Counter::lgkm, operation.id);
      for (int word = 0; word < words; ++word) {
        if constexpr (kStores) {
          const int data = data_register(i, half == 0 ? kF_data0 : kF_data1);
          if (std::memcmp(place + 4 * word, &w.v[data + word][lane], 4) != 0)
            ++w.group->launch->machine->progress;
          std::memcpy(place + 4 * word, &w.v[data + word][lane], 4);
        } else {
          const int data = data_register(i, kF_vdst) + half * words + word;
          std::memcpy(&w.v[data][lane], place + 4 * word, 4);
        }
      }
    }
  }
  if constexpr (kStores) {
    operation.lds_write = true;
  } else {
    operation.first = static_cast<u16>(data_register(i, kF_vdst));
    operation.count = static_cast<u16>(2 * words);
  }
  w.count(Counter::lgkm, operation);
}

// Lanes' values through the LDS unit, without LDS.
void permute(Wave& w, const Inst& i) {
  const int reg = i.at(kF_addr) - 256, data = data_register(i, kF_data0);
  const int to = data_register(i, kF_vdst);
  const bool backward = i.note == 1;
  w.touch_vector(reg, 1, false);
  w.touch_vector(data, 1, false);
  w.touch_vector(to, 1, true);
  const u32 offset = static_cast<u32>(i.at(kF_offset0) | i.at(kF_offset1) << 8);
  u32 out[kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    const u32 other = ((w.v[reg][lane] + offset) / 4) % kLanes;
    if (backward) {
      if ((w.exec >> other) & 1) out[lane] = w.v[data][other];
    } else if ((w.exec >> lane) & 1) {
      out[other] = w.v[data][lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if ((w.exec >> lane) & 1) w.v[to][lane] = out[lane];
  count_load(w, Path::lds, to, 1);
}
void swizzle(Wave& w, const Inst& i) {
  const int data = i.at(kF_addr) - 256, to = data_register(i, kF_vdst);
  w.touch_vector(data, 1, false);
  w.touch_vector(to, 1, true);
  const u32 mode = static_cast<u32>(i.at(kF_offset0) | i.at(kF_offset1) << 8);
  if (mode >= 0xe000) w.fault("ds_swizzle_b32 by FFT or rotation is not modelled");
  u32 out[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    int from = 0;
    if ((mode & 0x8000) != 0) {
      from = (lane & ~3) | static_cast<int>((mode >> (2 * (lane & 3))) & 3);
    } else {
      const int mask_and = static_cast<int>(mode & 31), mask_or = static_cast<int>(mode >> 5 & 31);
      const int mask_xor = static_cast<int>(mode >> 10 & 31);
      from = (lane & 32) | ((((lane & 31) & mask_and) | mask_or) ^ mask_xor);
    }
    out[lane] = (w.exec >> from) & 1 ? w.v[data][from] : 0;
  }
  for (int lane = 0; lane < kLanes; ++lane)
    if ((w.exec >> lane) & 1) w.v[to][lane] = out[lane];
  count_load(w, Path::lds, to, 1);
}

// Scalar memory. note: dwords; bit 7: through a buffer descriptor.
void scalar_load(Wave& w, const Inst& i) {
  const int words = i.note & 0x7f, base = 2 * (i.at(kF_sbase) / 2), to = i.at(kF_sdata);
  u64 address = w.scalar64(base);
  const bool buffer = (i.note & 0x80) != 0;
  u64 records = ~0ull;
  if (buffer) {
    address &= 0xffff'ffff'ffffull;
    records = w.scalar(base + 2);
  }
  i64 offset = 0;
  if (i.bit(kF_imm) != 0) {
    offset = signed_offset(i.at(kF_offset), 21);
  } else if (i.bit(kF_soffset_en) == 0) {
    offset = w.scalar(i.at(kF_offset) & 0x7f);
  }
  if (i.bit(kF_soffset_en) != 0) offset += w.scalar(i.at(kF_soffset));
  if (buffer && static_cast<u64>(offset) + static_cast<u64>(words) * 4 > records)
    w.fault("s_buffer_load beyond its buffer's end");
  address = (address + static_cast<u64>(offset)) & ~3ull;
  w.touch_scalar(to, words, true);
  w.group->view.memory->region(address, static_cast<u64>(words) * 4, false);
  for (int word = 0; word < words; ++word) {
    u32 value = 0;
    w.group->view.load_scalar(address + static_cast<u64>(word) * 4, 4,
                              reinterpret_cast<u8*>(&value));
    w.s[to + word] = value;
  }
  Outstanding operation;
  operation.scalar = true;
  operation.first = static_cast<u16>(to);
  operation.count = static_cast<u16>(words);
  w.count(Counter::lgkm, operation);
}
void read_clock(Wave& w, const Inst& i) {
  const int to = i.at(kF_sdata);
  w.touch_scalar(to, 2, true);
  // s_memrealtime counts at 100 MHz, s_memtime the core's cycles.
  const u64 now = w.group->launch->machine->now_ns();
  const u64 value = i.note == 0 ? now / 10 : now * 2;
  w.s[to] = static_cast<u32>(value);
  w.s[to + 1] = static_cast<u32>(value >> 32);
  Outstanding operation;
  operation.scalar = true;
  operation.first = static_cast<u16>(to);
  operation.count = 2;
  w.count(Counter::lgkm, operation);
}

template <Path path>
void add_path(const std::string& prefix) {
  static const struct {
    const char* name;
    ShapeId shape;
  } kLoads[] = {{"ubyte", kU8},         {"sbyte", kS8},
                {"ushort", kU16},       {"sshort", kS16},
                {"dword", kDword},      {"dwordx2", kDwordX2},
                {"dwordx3", kDwordX3},  {"dwordx4", kDwordX4},
                {"ubyte_d16", kU8Low},  {"ubyte_d16_hi", kU8High},
                {"sbyte_d16", kS8Low},  {"sbyte_d16_hi", kS8High},
                {"short_d16", kU16Low}, {"short_d16_hi", kU16High}},
    kStores[] = {{"byte", kU8},         {"byte_d16_hi", kU8High},
                 {"short", kU16},       {"short_d16_hi", kU16High},
                 {"dword", kDword},     {"dwordx2", kDwordX2},
                 {"dwordx3", kDwordX3}, {"dwordx4", kDwordX4}};
  for (const auto& one : kLoads) add((prefix + "_load_" + one.name).c_str(), load<path>, one.shape);
  for (const auto& one : kStores)
    add((prefix + "_store_" + one.name).c_str(), store<path>, one.shape);
  if constexpr (path == Path::global) {
    for (const auto& one : kLoads) {
      if (one.shape <= kDwordX4)
        add((prefix + "_load_lds_" + one.name).c_str(), load_to_lds<path>, one.shape);
    }
  }
  if constexpr (path != Path::scratch) {
    static const struct {
      const char* name;
      u8 note;
    } kAtomics[] = {{"swap", kSwap}, {"cmpswap", kCompareSwap},
                    {"add", kAdd},   {"sub", kSub},
                    {"smin", kSMin}, {"umin", kUMin},
                    {"smax", kSMax}, {"umax", kUMax},
                    {"and", kAnd},   {"or", kOr},
                    {"xor", kXor},   {"inc", kInc},
                    {"dec", kDec}};
    for (const auto& one : kAtomics) {
      const std::string name = prefix + "_atomic_" + one.name;
      add(name.c_str(), atomic<path>, one.note);
      add((name + "_x2").c_str(), atomic<path>, one.note | kWideAtomic);
    }
    add((prefix + "_atomic_add_f32").c_str(), atomic<path>, kAddFloat);
    add((prefix + "_atomic_add_f64").c_str(), atomic<path>, kAddFloat | kWideAtomic);
    add((prefix + "_atomic_min_f64").c_str(), atomic<path>, kMinFloat | kWideAtomic);
    add((prefix + "_atomic_max_f64").c_str(), atomic<path>, kMaxFloat | kWideAtomic);
    add((prefix + "_atomic_pk_add_f16").c_str(), atomic<path>, kPkAddHalf);
    add((prefix + "_atomic_pk_add_bf16").c_str(), atomic<path>, kPkAddBfloat);
  }
}

void add_lds() {
  static const struct {
    const char* name;
    ShapeId shape;
  } kReads[] = {{"u8", kU8},          {"i8", kS8},
                {"u16", kU16},        {"i16", kS16},
                {"b32", kDword},      {"b64", kDwordX2},
                {"b96", kDwordX3},    {"b128", kDwordX4},
                {"u8_d16", kU8Low},   {"u8_d16_hi", kU8High},
                {"i8_d16", kS8Low},   {"i8_d16_hi", kS8High},
                {"u16_d16", kU16Low}, {"u16_d16_hi", kU16High}},
    kWrites[] = {
        {"b8", kU8},       {"b16", kU16},      {"b32", kDword},        {"b64", kDwordX2},
        {"b96", kDwordX3}, {"b128", kDwordX4}, {"b8_d16_hi", kU8High}, {"b16_d16_hi", kU16High}};
  for (const auto& one : kReads)
    add((std::string("ds_read_") + one.name).c_str(), load<Path::lds>, one.shape);
  for (const auto& one : kWrites)
    add((std::string("ds_write_") + one.name).c_str(), store<Path::lds>, one.shape);
  add("ds_read2_b32", lds_pair<false>, 0);
  add("ds_read2_b64", lds_pair<false>, 1);
  add("ds_read2st64_b32", lds_pair<false>, 0x80);
  add("ds_read2st64_b64", lds_pair<false>, 0x81);
  add("ds_write2_b32", lds_pair<true>, 0);
  add("ds_write2_b64", lds_pair<true>, 1);
  add("ds_write2st64_b32", lds_pair<true>, 0x80);
  add("ds_write2st64_b64", lds_pair<true>, 0x81);
  add("ds_permute_b32", permute, 0);
  add("ds_bpermute_b32", permute, 1);
  add("ds_swizzle_b32", swizzle);
  add("ds_nop", [](Wave&, const Inst&) {});
  static const struct {
    const char* name;
    u8 note;
  } kAtomics[] = {{"add_%u", kAdd},           {"sub_%u", kSub},      {"rsub_%u", kReverseSub},
                  {"inc_%u", kInc},           {"dec_%u", kDec},      {"min_%i", kSMin},
                  {"max_%i", kSMax},          {"min_%u", kUMin},     {"max_%u", kUMax},
                  {"and_%b", kAnd},           {"or_%b", kOr},        {"xor_%b", kXor},
                  {"cmpst_%b", kCompareSwap}, {"add_%f", kAddFloat}, {"min_%f", kMinFloat},
                  {"max_%f", kMaxFloat},      {"wrxchg_%b", kSwap}};
  for (const auto& one : kAtomics) {
    const std::string pattern = one.name;
    const auto at = pattern.find('%');
    for (const bool wide : {false, true}) {
      const std::string type = pattern.substr(at + 1) + (wide ? "64" : "32");
      const u8 note = static_cast<u8>(one.note | (wide ? kWideAtomic : 0));
      add(("ds_" + pattern.substr(0, at) + type).c_str(), atomic<Path::lds>, note);
      add(("ds_" + pattern.substr(0, at) + "rtn_" + type).c_str(), atomic<Path::lds>,
          note | kReturns);
    }
  }
}

}  // namespace

void add_memory_operations() {
  add_path<Path::global>("global");
  add_path<Path::flat>("flat");
  add_path<Path::scratch>("scratch");
  add_path<Path::buffer>("buffer");
  add_lds();
  add("buffer_inv", [](Wave& w, const Inst& i) { w.group->view.invalidate(scope_of(i)); });
  add("buffer_wbl2", [](Wave& w, const Inst& i) {
    Outstanding operation;
    operation.store = true;
    operation.id = w.next_id++;
    PendingStore pending;
    pending.wave = w.index;
    pending.id = operation.id;
    pending.scope = scope_of(i);
    pending.write_back = true;
    pending.lanes = 1;
    w.group->stores.push_back(std::move(pending));
    w.count(Counter::vm, operation);
  });
  for (const u8 words : {1, 2, 4, 8, 16}) {
    const std::string suffix = words == 1 ? "" : "x" + std::to_string(words);
    add(("s_load_dword" + suffix).c_str(), scalar_load, words);
    add(("s_buffer_load_dword" + suffix).c_str(), scalar_load, words | 0x80);
  }
  add("s_memrealtime", read_clock, 0);
  add("s_memtime", read_clock, 1);
  add("s_dcache_inv", [](Wave& w, const Inst&) { w.group->view.scalar.invalidate(); });
  add("s_dcache_wb", [](Wave&, const Inst&) {});
}

}  // namespace amd
