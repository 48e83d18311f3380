// The resident schedule on the platform amd, cut into launches: K1 (front), K2i (select, on index
// sources) and K2 (back) a layer, then head or propose, and the acceptance rule as one.
//
// Every kernel takes the rank (device memory), the blocks' words of the hand-offs, the number of
// blocks, the call by value and the layer or stage. Steps of a model that keeps its caches and of a
// hosted one are the same kernels. All blocks are resident at once, which the host sees to
// (host/amd/geometry.hpp). A boundary of two launches of one stream is the hand-off between them.
// It never ran on an AMD GPU: see docs/amd.md.
#include "platform/amd.hpp"
#include "platform/contract.hpp"
// The platform comes first.
#include "host/amd/geometry.hpp"
#include "persistent/program.hpp"

namespace persistent = lowlat::amd::persistent;
namespace plat = lowlat::amd::plat;
namespace stages = lowlat::amd::stages;

namespace {

constexpr int kThreads = persistent::Block::kNumThreads;
static_assert(kThreads == lowlat::amd::kBlockThreads);
static_assert(sizeof(persistent::Rank) == lowlat::amd::kRankBytes);
static_assert(sizeof(persistent::BlockMemory) == lowlat::amd::kBlockMemoryBytes);

// A rank that was ended runs nothing more: true when the block may go on. Blocks that began before
// an abort was raised meet those that began after it in no hand-off: they see the word there.
LOWLAT_DEVICE bool may_run(const persistent::Rank& rank) {
  const stages::FaultPort& fault = rank.port.fault;
  const bool ended =
      plat::load_acquire<plat::Scope::system>(fault.abort_words[fault.tp_rank]) != 0u;
  if (ended && plat::thread_idx() == 0) {
    stages::note_abort(fault, 0, stages::StageId::none, rank.progress->epoch);
  }
  return !plat::block_any(ended);
}

LOWLAT_DEVICE persistent::Program program_of(const persistent::Rank& rank, std::uint32_t* arrived,
                                             int num_blocks) {
  return {rank, {arrived, plat::block_idx(), num_blocks}};
}

}  // namespace

LOWLAT_KERNEL(kThreads)
lowlat_target_front(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                    persistent::TargetStep step, int layer_idx) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).target_front(step, layer_idx);
}
LOWLAT_KERNEL(kThreads)
lowlat_target_select(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                     persistent::TargetStep step, int layer_idx) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).target_select(step, layer_idx);
}
LOWLAT_KERNEL(kThreads)
lowlat_target_back(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                   persistent::TargetStep step, int layer_idx) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).target_back(step, layer_idx);
}
LOWLAT_KERNEL(kThreads)
lowlat_target_head(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                   persistent::TargetStep step) {
  const bool runs = may_run(*rank);
  persistent::Program program = program_of(*rank, arrived, num_blocks);
  if (runs) {
    program.target_head(step);
  } else {
    // A rank that was ended before the first front leaves no old hidden states either.
    program.spoil(step);
  }
}
LOWLAT_KERNEL(kThreads)
lowlat_draft_inject(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                    lowlat_draft draft) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).draft_inject(draft);
}
LOWLAT_KERNEL(kThreads)
lowlat_draft_front(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                   lowlat_draft draft, int stage) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).draft_front(draft, stage);
}
LOWLAT_KERNEL(kThreads)
lowlat_draft_back(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                  lowlat_draft draft, int stage) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).draft_back(draft, stage);
}
LOWLAT_KERNEL(kThreads)
lowlat_draft_propose(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                     lowlat_draft draft) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).draft_propose(draft);
}
LOWLAT_KERNEL(kThreads)
lowlat_propose(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
               lowlat_proposal proposal) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).propose(proposal);
}
LOWLAT_KERNEL(kThreads)
lowlat_accept_tokens(const persistent::Rank* rank, std::uint32_t* arrived, int num_blocks,
                     lowlat_accept accept) {
  if (may_run(*rank)) program_of(*rank, arrived, num_blocks).accept(accept);
}
// The proof that a peer's memory is reached, and that the matrix unit has its sums where the
// kernels look for them: one thread of one block stores a word, the complement of `value` where a
// lane has another sum than 16 row + column of a tile.
LOWLAT_KERNEL(kThreads) lowlat_probe(std::uint32_t* word, std::uint32_t value) {
  const int lane = plat::thread_idx() % plat::kWarpLanes;
  const int row = lane % plat::kTileSide, part = lane / plat::kTileSide;
  const auto pair = [](int low, int high) {
    return static_cast<std::uint32_t>(stages::to_bf16(static_cast<float>(low))) |
           static_cast<std::uint32_t>(stages::to_bf16(static_cast<float>(high))) << 16;
  };
  plat::TileRun rows = {}, columns = {};
  if (part == 0) {
    rows.words[0] = pair(row, 1);
    columns.words[0] = pair(plat::kTileSide, row);
  }
  plat::TileSums sums;
  plat::tile_multiply(sums, rows, columns);
  bool elsewhere = false;
  for (int i = 0; i < plat::TileSums::kNum; ++i) {
    const int of_tile = plat::TileSums::kNum * part + i;
    elsewhere |= sums.sums[i] != static_cast<float>(plat::kTileSide * of_tile + row);
  }
  elsewhere = plat::block_any(elsewhere);
  if (plat::thread_idx() == 0) {
    plat::store_release<plat::Scope::system>(word, elsewhere ? ~value : value);
  }
}
