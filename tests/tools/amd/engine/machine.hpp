// machine.hpp: ranks, launches and the schedule.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "wave.hpp"

namespace amd {

// Instructions of one code object, by their place in its memory, decoded when they are first run.
struct Code {
  u64 base = 0;           // where the object's text lies
  std::deque<Inst> list;  // in the order in which they were met
  std::vector<i32> at;    // of a 4-byte word of the text: index into list, or -1
};
// Adds the instruction at an offset of a code's text, or leaves it alone when there is none.
using Decoder = void (*)(int code, u32 offset);

// What a kernel's descriptor and metadata say.
struct Kernel {
  std::string name;
  int code_index = 0;
  const Code* code = nullptr;
  u64 entry = 0;
  u32 lds_bytes = 0, scratch_bytes = 0;
  u32 rsrc1 = 0, rsrc2 = 0, rsrc3 = 0, properties = 0;
};

struct Machine;

struct Launch {
  Machine* machine = nullptr;
  int rank = 0;
  Kernel kernel;
  u64 kernarg = 0, dispatch = 0;  // the arguments, and the packet that says how it was launched
  u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  u32 dynamic_lds = 0;
  u32 resident = 0;  // most workgroups at a time
  u64 next_group = 0;
  std::vector<std::unique_ptr<Workgroup>> groups;

  u64 num_groups() const { return u64{grid[0]} * grid[1] * grid[2]; }
};

struct Machine {
  bool is_gfx950 = false;
  u64 approximation_seed = 0;  // 0: functions of one argument are rounded exactly
  double ns_per_instruction = 1.0;
  bool lds_races = true;
  u32 lds_limit = 65536;

  Memory memory;
  std::vector<std::unique_ptr<DeviceCaches>> devices;  // of the ranks
  std::vector<std::unique_ptr<Code>> codes;
  Decoder decoder = nullptr;
  std::vector<std::deque<std::unique_ptr<Launch>>> queues;  // of the ranks, in order
  std::mt19937_64 random{0};
  u64 instructions = 0, progress = 0;
  std::vector<u64> launched, finished;  // launches of each rank
  const Wave* faulted = nullptr;        // the wave whose instruction threw

  explicit Machine(bool gfx950, int ranks, u64 seed);
  u64 now_ns() const {
    return static_cast<u64>(static_cast<double>(instructions) * ns_per_instruction);
  }
  // Runs until all launches are done. Throws Fault after `limit` instructions, or after `patience`
  // of them without any progress: no byte of memory or LDS changed, no wave ended.
  void run(u64 limit, u64 patience);
  // Runs at most `limit` instructions, and no longer than until a rank's launches are done. Throws
  // Fault as run() does for want of progress.
  void run_some(int rank, u64 limit, u64 patience);
  // Forgets all launches, after a fault.
  void give_up();

 private:
  void start_groups();
  void make_group(Launch& launch, u64 index);
  void turn(Wave& wave);
  const Inst& instruction(Wave& wave);
  void after_turn(Wave& wave);
  void open_barrier(Workgroup& group);
  void retire();
  [[noreturn]] void stuck(const std::string& what) const;

  bool step();
  void watch(u64 patience);

  std::vector<Wave*> runnable_;
  u64 seen_ = 0, since_ = 0;  // of progress
};

void add_vector_operations();
void add_scalar_operations();
void add_memory_operations();
void add_matrix_operations();

}  // namespace amd
