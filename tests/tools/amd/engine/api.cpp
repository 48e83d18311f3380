// api.cpp: the engine's C face, for machine.py.
#include <cstring>

#include "machine.hpp"
#include "operands.hpp"

using namespace amd;

namespace {

thread_local std::string last_error;  // NOLINT: the face's only state

const char* const kFieldNames[] = {
#define AMD_NAME(name) #name,
    AMD_FIELDS(AMD_NAME)
#undef AMD_NAME
};

// Runs a body; 0, or 1 with last_error set.
template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

Source source_of(const Inst& i, int number) {
  Source s;
  if (number < 0) return s;
  if (number >= 256) {
    s.kind = Kind::vector;
    s.index = static_cast<u16>(number - 256);
  } else if (number < 128) {
    s.kind = Kind::scalar;
    s.index = static_cast<u16>(number);
  } else {
    s.kind = Kind::constant;
    s.index = static_cast<u16>(number);
    s.literal = static_cast<u32>(i.at(kF_literal));
  }
  return s;
}

// Sources, destination and modifiers, wherever the encoding keeps them.
void arrange(Inst& i, int encoding) {
  constexpr int kSdwa = 1, kDpp = 2, kVop3 = 4, kVop3p = 8, kScalar = 16;
  i.sdwa = (encoding & kSdwa) != 0;
  i.dpp = (encoding & kDpp) != 0;
  i.vop3 = (encoding & kVop3) != 0;
  i.vop3p = (encoding & kVop3p) != 0;
  if ((encoding & kScalar) != 0) {
    i.src[0] = source_of(i, i.at(kF_ssrc0));
    i.src[1] = source_of(i, i.at(kF_ssrc1));
    return;
  }
  const auto number = [&](Field plain, Field vector) {
    return i.has(plain) ? i.at(plain) : i.at(vector);
  };
  i.src[0] = source_of(i, i.dpp || i.sdwa ? i.at(kF_vsrc0) : number(kF_src0, kF_vsrc0));
  i.src[1] = source_of(i, number(kF_src1, kF_vsrc1));
  i.src[2] = source_of(i, i.at(kF_src2));
  // SDWA sources may be scalar registers.
  if (i.sdwa && i.bit(kF_s0) != 0) i.src[0] = source_of(i, i.at(kF_vsrc0) - 256);
  if (i.sdwa && i.bit(kF_s1) != 0 && i.has(kF_vsrc1)) i.src[1] = source_of(i, i.at(kF_vsrc1) - 256);
  if (i.sdwa || i.dpp) {
    i.src[0].neg = i.bit(kF_src0_neg) != 0;
    i.src[0].abs = i.bit(kF_src0_abs) != 0;
    i.src[1].neg = i.bit(kF_src1_neg) != 0;
    i.src[1].abs = i.bit(kF_src1_abs) != 0;
  } else if (i.vop3 && !i.vop3p) {
    for (int k = 0; k < 3; ++k) {
      i.src[k].neg = ((std::max(i.at(kF_neg), 0) >> k) & 1) != 0;
      i.src[k].abs = ((std::max(i.at(kF_abs), 0) >> k) & 1) != 0;
    }
  }
  if (i.has(kF_vdst)) i.vdst = static_cast<u16>(i.at(kF_vdst) & 0xff);
  i.clamp = static_cast<u8>(i.bit(kF_clmp));
  i.omod = static_cast<u8>(std::max(i.at(kF_omod), 0));
  i.opsel = static_cast<u8>(std::max(i.at(kF_opsel), 0));
  // A product's accumulator registers and a move's are named by the opcode.
  if (i.name == "v_accvgpr_write" || i.name == "v_accvgpr_mov_b32") i.vdst += 256;
  if ((i.name == "v_accvgpr_read" || i.name == "v_accvgpr_mov_b32") &&
      i.src[0].kind == Kind::vector) {
    i.src[0].index += 256;
  }
}

}  // namespace

extern "C" {

const char* amd_last_error() { return last_error.c_str(); }
int amd_num_fields() { return kNumFields; }
const char* amd_field_name(int which) { return kFieldNames[which]; }
int amd_knows(const char* name) {
  u8 note = 0;
  return find(name, &note) != nullptr ? 1 : 0;
}

Machine* amd_create(int gfx950, int ranks, u64 seed) {
  return new Machine(gfx950 != 0, ranks, seed);
}
void amd_destroy(Machine* m) { delete m; }
void amd_set(Machine* m, u64 approximation_seed, double ns_per_instruction, int lds_races) {
  m->approximation_seed = approximation_seed;
  m->ns_per_instruction = ns_per_instruction;
  m->lds_races = lds_races != 0;
}

// `owner`: a rank, or -1 for the host. 0 with last_error set when there is no room.
u64 amd_allocate(Machine* m, u64 bytes, const char* name, int read_only, int owner) {
  u64 address = 0;
  guarded([&] { address = m->memory.allocate(bytes, name, read_only != 0, owner); });
  return address;
}
int amd_free(Machine* m, u64 address) {
  return guarded([&] { m->memory.free(address); });
}
// The host's copies see memory itself, past every cache, and write to read-only memory too.
int amd_write(Machine* m, u64 address, const void* data, u64 bytes) {
  return guarded([&] { std::memcpy(m->memory.at(address, bytes, false), data, bytes); });
}
int amd_read(Machine* m, u64 address, void* out, u64 bytes) {
  return guarded([&] { std::memcpy(out, m->memory.at(address, bytes, false), bytes); });
}

int amd_add_code(Machine* m, u64 base, u64 bytes, Decoder decoder) {
  m->decoder = decoder;
  auto code = std::make_unique<Code>();
  code->base = base;
  code->at.assign(bytes / 4, -1);
  m->codes.push_back(std::move(code));
  return static_cast<int>(m->codes.size()) - 1;
}
// `fields`: amd_num_fields() numbers, -1 where the encoding has none. The literal may use all bits.
void amd_add_instruction(Machine* m, int code_index, const char* name, u32 offset, u32 size,
                         int encoding, const i32* fields) {
  Code& code = *m->codes[static_cast<std::size_t>(code_index)];
  Inst i;
  i.name = name;
  i.offset = offset;
  i.size = size;
  std::copy(fields, fields + kNumFields, i.field.begin());
  arrange(i, encoding);
  i.run = find(name, &i.note);
  code.at[offset / 4] = static_cast<i32>(code.list.size());
  code.list.push_back(std::move(i));
}

struct LaunchText {
  const char* kernel;
  int rank, code;
  u64 entry, kernarg, dispatch;
  u32 lds_bytes, scratch_bytes, rsrc1, rsrc2, rsrc3, properties, dynamic_lds, resident;
  u32 grid[3], block[3];
};
int amd_launch(Machine* m, const LaunchText* text) {
  return guarded([&] {
    auto launch = std::make_unique<Launch>();
    launch->machine = m;
    launch->rank = text->rank;
    Kernel& kernel = launch->kernel;
    kernel.name = text->kernel;
    kernel.code_index = text->code;
    kernel.code = m->codes[static_cast<std::size_t>(text->code)].get();
    kernel.entry = text->entry;
    kernel.lds_bytes = text->lds_bytes;
    kernel.scratch_bytes = text->scratch_bytes;
    kernel.rsrc1 = text->rsrc1;
    kernel.rsrc2 = text->rsrc2;
    kernel.rsrc3 = text->rsrc3;
    kernel.properties = text->properties;
    launch->kernarg = text->kernarg;
    launch->dispatch = text->dispatch;
    launch->dynamic_lds = text->dynamic_lds;
    launch->resident = text->resident;
    std::copy(text->grid, text->grid + 3, launch->grid);
    std::copy(text->block, text->block + 3, launch->block);
    if (kernel.lds_bytes + launch->dynamic_lds > m->lds_limit) {
      throw Fault("kernel " + kernel.name + " wants " +
                  std::to_string(kernel.lds_bytes + launch->dynamic_lds) +
                  " bytes of LDS; the part has " + std::to_string(m->lds_limit));
    }
    m->queues[static_cast<std::size_t>(text->rank)].push_back(std::move(launch));
    ++m->launched[static_cast<std::size_t>(text->rank)];
  });
}

struct FaultPlace {
  int code;  // -1: no instruction is to blame
  u32 offset;
  int rank;
  u32 workgroup[3], wave;
  u64 exec;
  char kernel[256];
};
}  // extern "C"

namespace {

// Runs a body; a fault forgets all launches and leaves its place in *out.
template <class Body>
int watched(Machine* m, FaultPlace* out, Body&& body) {
  out->code = -1;
  m->faulted = nullptr;
  return guarded([&] {
    try {
      body();
    } catch (const Fault&) {
      if (const Wave* w = m->faulted) {
        const Launch& launch = *w->group->launch;
        out->code = launch.kernel.code_index;
        out->offset = static_cast<u32>(w->pc - launch.kernel.code->base);
        out->rank = launch.rank;
        std::copy(w->group->id, w->group->id + 3, out->workgroup);
        out->wave = w->index;
        out->exec = w->exec;
        std::strncpy(out->kernel, launch.kernel.name.c_str(), sizeof out->kernel - 1);
        out->kernel[sizeof out->kernel - 1] = 0;
      }
      m->give_up();
      throw;
    }
  });
}

}  // namespace

extern "C" {

int amd_run(Machine* m, u64 limit, u64 patience, FaultPlace* out) {
  return watched(m, out, [&] { m->run(limit, patience); });
}
int amd_run_some(Machine* m, int rank, u64 limit, u64 patience, FaultPlace* out) {
  return watched(m, out, [&] { m->run_some(rank, limit, patience); });
}
u64 amd_launched(const Machine* m, int rank) { return m->launched[static_cast<std::size_t>(rank)]; }
u64 amd_finished(const Machine* m, int rank) { return m->finished[static_cast<std::size_t>(rank)]; }
// Of the allocation at an address: 1 and its rank (-1: the host's), or 0.
int amd_owner(const Machine* m, u64 address, int* out_owner) {
  const Region* region = m->memory.find(address);
  if (region == nullptr) return 0;
  *out_owner = region->owner;
  return 1;
}
u64 amd_instructions(const Machine* m) { return m->instructions; }
}
