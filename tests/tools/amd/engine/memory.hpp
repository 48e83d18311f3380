// memory.hpp: the memory of all ranks, and the caches between it and the lanes.
//
// A load or store names a scope: 0 a wave, 1 a workgroup, 2 the device, 3 the system (sc1 sc0).
// Four places hold bytes, and each scope reaches one of them:
//   L1       of a workgroup; keeps what it read until buffer_inv; stores go through it
//   L2       of a part (XCD) of a device; takes stores of scopes 0 and 1 until buffer_wbl2
//   device   where the parts of a device meet: scope 2
//   memory   what other ranks see: scope 3
// A copy that was read stays as it was until it is invalidated, and what was written stays where it
// was put until it is written back: the least that hardware promises. So a missing scope or fence
// shows at every run, not at one in a million.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "isa.hpp"

namespace amd {

inline constexpr u32 kLineBytes = 128;
inline constexpr u64 kAlignment = 4096;
inline constexpr u8 kPoison = 0xa5;

struct ByteMask {
  u64 word[2] = {0, 0};

  static ByteMask range(u32 first, u32 count) {
    ByteMask mask;
    for (int half = 0; half < 2; ++half) {
      const int begin = std::clamp(static_cast<int>(first) - 64 * half, 0, 64);
      const int end = std::clamp(static_cast<int>(first + count) - 64 * half, 0, 64);
      if (end > begin) {
        mask.word[half] = (end - begin == 64 ? ~0ull : ((1ull << (end - begin)) - 1)) << begin;
      }
    }
    return mask;
  }
  static ByteMask all() { return {{~0ull, ~0ull}}; }
  bool any() const { return (word[0] | word[1]) != 0; }
  bool test(u32 i) const { return (word[i / 64] >> (i % 64)) & 1; }
  ByteMask operator&(ByteMask o) const { return {{word[0] & o.word[0], word[1] & o.word[1]}}; }
  ByteMask operator|(ByteMask o) const { return {{word[0] | o.word[0], word[1] | o.word[1]}}; }
  ByteMask operator~() const { return {{~word[0], ~word[1]}}; }
};

struct Line {
  u8 data[kLineBytes];
  ByteMask valid, dirty;
  u32 generation = 0;
};

class Cache {
 public:
  Line* find(u64 address) {
    if (address == last_address_) return fresh(last_);
    const auto found = lines_.find(address);
    if (found == lines_.end()) return nullptr;
    last_address_ = address;
    last_ = found->second.get();
    return fresh(last_);
  }
  Line& make(u64 address) {
    if (Line* line = find(address)) return *line;
    auto& place = lines_[address];
    place = std::make_unique<Line>();
    place->generation = generation_;
    last_address_ = address;
    last_ = place.get();
    return *last_;
  }
  // Forgets what was only read; what was written stays.
  void invalidate() { ++generation_; }
  void forget(u64 address) {
    if (Line* line = find(address)) line->valid = line->dirty;
  }
  void mark_dirty(u64 address, Line& line, ByteMask bytes) {
    if (!line.dirty.any()) dirty_lines_.push_back(address);
    line.dirty = line.dirty | bytes;
    line.valid = line.valid | bytes;
  }
  // body(address, line) for each line with written bytes, which are clean then.
  template <class Body>
  void write_back(Body&& body) {
    for (const u64 address : dirty_lines_) {
      Line* line = find(address);
      if (line->dirty.any()) body(address, *line);
      line->dirty = {};
    }
    dirty_lines_.clear();
  }
  void clear() {
    lines_.clear();
    dirty_lines_.clear();
    last_ = nullptr;
    last_address_ = ~0ull;
  }

 private:
  Line* fresh(Line* line) {
    if (line->generation != generation_) {
      line->generation = generation_;
      line->valid = line->dirty;
    }
    return line;
  }

  std::unordered_map<u64, std::unique_ptr<Line>> lines_;
  std::vector<u64> dirty_lines_;
  Line* last_ = nullptr;
  u64 last_address_ = ~0ull;
  u32 generation_ = 0;
};

// Memory of the machine lies at its own addresses in this process: what the host's code reads and
// writes is what kernels do.
struct Region {
  u64 base = 0, bytes = 0;
  std::string name;
  bool read_only = false;
  int owner = 0;  // a rank, or kHost
  u64 mapped = 0;
};
inline constexpr int kHost = -1;

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    for (const auto& [base, region] : regions_)
      munmap(reinterpret_cast<void*>(base), region.mapped);
  }

  // Every byte is kPoison. Throws Fault.
  u64 allocate(u64 bytes, const std::string& name, bool read_only, int owner) {
    Region region;
    region.bytes = bytes;
    region.name = name;
    region.read_only = read_only;
    region.owner = owner;
    region.mapped = (bytes + kAlignment) / kAlignment * kAlignment;
    // Always the same places, so that a run is repeated exactly; another machine of this process
    // has the next ones. A page that belongs to nobody lies between any two regions.
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      void* wanted = reinterpret_cast<void*>(next_);
      void* got = mmap(wanted, region.mapped, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
      if (got == wanted) {
        region.base = next_;
        std::memset(got, kPoison, region.mapped);
        next_ += region.mapped + kAlignment;
        regions_.emplace(region.base, region);
        return region.base;
      }
      if (got != MAP_FAILED) munmap(got, region.mapped);
      next_ += kNextMachine;
    }
    throw Fault("no room for " + std::to_string(bytes) + " bytes of " + name);
  }
  void free(u64 base) {
    const auto found = regions_.find(base);
    if (found == regions_.end())
      throw Fault("freed " + where(base) + ", which begins no allocation");
    munmap(reinterpret_cast<void*>(base), found->second.mapped);
    if (last_ == &found->second) last_ = nullptr;
    regions_.erase(found);
  }
  const Region* find(u64 address) const {
    auto found = regions_.upper_bound(address);
    if (found == regions_.begin()) return nullptr;
    --found;
    return address - found->first < found->second.bytes ? &found->second : nullptr;
  }
  // The region that holds all of these bytes. Throws Fault.
  Region& region(u64 address, u64 bytes, bool writes) {
    if (last_ == nullptr || address < last_->base || address >= last_->base + last_->bytes) {
      auto found = regions_.upper_bound(address);
      if (found == regions_.begin()) outside(address, bytes, writes, nullptr);
      last_ = &(--found)->second;
    }
    if (address < last_->base || bytes > last_->bytes ||
        address - last_->base > last_->bytes - bytes)
      outside(address, bytes, writes, last_);
    if (writes && last_->read_only) {
      throw Fault("store to " + where(address) + ", which is read only");
    }
    return *last_;
  }
  u8* at(u64 address, u64 bytes, bool writes) {
    region(address, bytes, writes);
    return reinterpret_cast<u8*>(address);
  }
  // The whole line around an address that region() has accepted.
  u8* line(u64 address) { return reinterpret_cast<u8*>(address); }
  std::string where(u64 address) {
    auto found = regions_.upper_bound(address);
    if (found == regions_.begin()) return hex(address);
    const Region& near = (--found)->second;
    return hex(address) + " (" + near.name + " + " + std::to_string(address - near.base) + " of " +
           std::to_string(near.bytes) + " bytes)";
  }
  static std::string hex(u64 value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
  }

 private:
  [[noreturn]] void outside(u64 address, u64 bytes, bool writes, const Region*) {
    throw Fault((writes ? "store of " : "load of ") + std::to_string(bytes) + " bytes at " +
                where(address) + ", outside of every allocation");
  }

  std::map<u64, Region> regions_;
  Region* last_ = nullptr;
  u64 next_ = kFirst;
  static constexpr u64 kFirst = 0x3000'0000'0000ull, kNextMachine = 0x10'0000'0000ull;
  static constexpr int kAttempts = 256;
};

// The caches of one device. Workgroups are spread over its parts.
struct DeviceCaches {
  static constexpr int kParts = 2;
  Cache device;
  Cache part[kParts];
};

// What a workgroup's lanes look through.
struct View {
  Memory* memory = nullptr;
  DeviceCaches* caches = nullptr;
  int part = 0;
  Cache l1, scalar;  // scalar: of s_load, emptied by s_dcache_inv alone
  u64* progress = nullptr;

  Cache& l2() { return caches->part[part]; }

  // Bytes within one line, in `out`.
  void load(int scope, u64 address, u32 bytes, u8* out) {
    const u64 base = address & ~u64{kLineBytes - 1};
    const u32 first = static_cast<u32>(address - base);
    if (scope <= 1) {
      std::memcpy(out, through(l1, base, first, bytes) + first, bytes);
      return;
    }
    l1.forget(base);
    if (scope == 2) {
      std::memcpy(out, in_device(base, first, bytes) + first, bytes);
    } else {
      std::memcpy(out, memory->line(base) + first, bytes);
      overlay(caches->device.find(base), first, bytes, out);
    }
    overlay(l2().find(base), first, bytes, out);
  }
  void load_scalar(u64 address, u32 bytes, u8* out) {
    const u64 base = address & ~u64{kLineBytes - 1};
    const u32 first = static_cast<u32>(address - base);
    std::memcpy(out, through(scalar, base, first, bytes) + first, bytes);
  }
  // Bytes within one line. Makes them visible as far as the scope reaches.
  void store(int scope, u64 address, u32 bytes, const u8* data) {
    const u64 base = address & ~u64{kLineBytes - 1};
    const u32 first = static_cast<u32>(address - base);
    const ByteMask mask = ByteMask::range(first, bytes);
    update(l1.find(base), mask, first, bytes, data, false);
    if (scope <= 1) {
      Line& line = l2().make(base);
      if ((mask & ~line.valid).any() || std::memcmp(line.data + first, data, bytes) != 0)
        ++*progress;
      std::memcpy(line.data + first, data, bytes);
      l2().mark_dirty(base, line, mask);
      return;
    }
    update(l2().find(base), mask, first, bytes, data, true);
    if (scope == 2) {
      Line& line = caches->device.make(base);
      if ((mask & ~line.valid).any() || std::memcmp(line.data + first, data, bytes) != 0)
        ++*progress;
      std::memcpy(line.data + first, data, bytes);
      caches->device.mark_dirty(base, line, mask);
      return;
    }
    update(caches->device.find(base), mask, first, bytes, data, true);
    u8* place = memory->line(base) + first;
    if (std::memcmp(place, data, bytes) != 0) ++*progress;
    std::memcpy(place, data, bytes);
  }
  // The value that an atomic operation of a scope (2 or 3) works on; store() puts the new one.
  void load_for_atomic(int scope, u64 address, u32 bytes, u8* out) {
    const u64 base = address & ~u64{kLineBytes - 1};
    flush_line(scope, base);
    load(scope, address, bytes, out);
  }

  void invalidate(int scope) {
    l1.invalidate();
    if (scope >= 2) l2().invalidate();
    if (scope >= 3) caches->device.invalidate();
  }
  void write_back(int scope) {
    if (scope < 2) return;
    l2().write_back([&](u64 base, Line& line) { line_to_device(base, line); });
    if (scope < 3) return;
    caches->device.write_back([&](u64 base, Line& line) { line_to_memory(base, line); });
  }

 private:
  u8* through(Cache& cache, u64 base, u32 first, u32 bytes) {
    Line& line = cache.make(base);
    if ((ByteMask::range(first, bytes) & ~line.valid).any()) {
      Line& below = l2().make(base);
      if ((~below.valid).any()) fill(below, in_device(base, 0, kLineBytes));
      fill(line, below.data);
    }
    return line.data;
  }
  u8* in_device(u64 base, u32 first, u32 bytes) {
    Line& line = caches->device.make(base);
    if ((ByteMask::range(first, bytes) & ~line.valid).any()) fill(line, memory->line(base));
    return line.data;
  }
  static void fill(Line& line, const u8* from) {
    if (!line.valid.any()) {
      std::memcpy(line.data, from, kLineBytes);
    } else {
      for (u32 i = 0; i < kLineBytes; ++i)
        if (!line.valid.test(i)) line.data[i] = from[i];
    }
    line.valid = ByteMask::all();
  }
  static void overlay(const Line* line, u32 first, u32 bytes, u8* out) {
    if (line == nullptr || !line->dirty.any()) return;
    for (u32 i = 0; i < bytes; ++i)
      if (line->dirty.test(first + i)) out[i] = line->data[first + i];
  }
  static void update(Line* line, ByteMask mask, u32 first, u32 bytes, const u8* data, bool cleans) {
    if (line == nullptr) return;
    for (u32 i = 0; i < bytes; ++i)
      if (line->valid.test(first + i)) line->data[first + i] = data[i];
    if (cleans) line->dirty = line->dirty & ~mask;
  }
  void line_to_device(u64 base, Line& line) {
    Line& below = caches->device.make(base);
    for (u32 i = 0; i < kLineBytes; ++i)
      if (line.dirty.test(i)) below.data[i] = line.data[i];
    caches->device.mark_dirty(base, below, line.dirty);
    ++*progress;
  }
  void line_to_memory(u64 base, Line& line) {
    u8* place = memory->line(base);
    for (u32 i = 0; i < kLineBytes; ++i)
      if (line.dirty.test(i)) place[i] = line.data[i];
    ++*progress;
  }
  void flush_line(int scope, u64 base) {
    if (Line* line = l2().find(base); line != nullptr && line->dirty.any()) {
      line_to_device(base, *line);
      line->dirty = {};
    }
    if (scope < 3) return;
    if (Line* line = caches->device.find(base); line != nullptr && line->dirty.any()) {
      line_to_memory(base, *line);
      line->dirty = {};
    }
  }
};

}  // namespace amd
