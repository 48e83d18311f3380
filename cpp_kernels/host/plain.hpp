// host/plain.hpp: the plain path of one rank: one unit after another over all rows, every
// intermediate in memory, and collectives that stage the whole tensor, signal, and read the peers'
// memory.
//
// It is what runs prompts and every step that the persistent schedule does not cover, and the
// baseline arm. It shares units with persistent/program.hpp, but neither its order of work nor its
// way of crossing ranks.
//
// Ordering     staging[e & 1]  rank's words of epoch e, written by their owner, read by every rank
//              arrived         epoch of its owner; release.system after the words, acquire.system
//                              before a peer reads them
//              reuse           staging[e & 1] is written again at e + 2, after its owner saw every
//                              rank's arrived e + 1, which a rank stores after its last read of
//                              epoch e
//              wrap            (arrived - e) as u32 < 2^31 means arrived; ranks differ by at most 1
//              late            every wait has the budget of the FaultPort
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "host/peer.hpp"
#include "persistent/units.hpp"
#include "stages/rank_sum.hpp"

namespace lowlat::host {

class PlainProgram {
 public:
  using Rank = scalar::persistent::Rank;
  using Rows = scalar::persistent::Rows;
  using LayerCall = scalar::persistent::LayerCall;

  // regions[r] is rank r's memory; epoch counts this rank's plain exchanges.
  PlainProgram(const Rank& rank, const std::vector<std::shared_ptr<Region>>& regions,
               std::uint32_t& epoch)
      : rank_(rank),
        s_(rank.shape),
        b_(rank.buffers),
        share_{0, 1, rank.blocks},
        regions_(regions),
        epoch_(epoch) {}

  // Words that the longest message of a rank takes.
  static std::int64_t staging_words(const shape::RuntimeShape& s);

  bool target_step(const lowlat_step& step);
  bool draft(const lowlat_draft& draft);

 private:
  bool layer(const Rows& rows, const LayerCall& call);
  bool sum_rows(int num_rows, scalar::stages::StageId stage);
  bool exchange(const std::uint32_t* words, std::int64_t num_words, scalar::stages::StageId stage);
  const std::uint32_t* staged(int tp_rank) const { return regions_[tp_rank]->staging(epoch_); }
  void inject(const lowlat_draft& draft);
  void head(const std::uint16_t* norm, const lowlat::persistent::HcWeights& hc, int num_rows,
            const std::int32_t* row_ids, int num_all);
  bool gather_logits(float* out, int num_rows, scalar::stages::StageId stage);

  const Rank& rank_;
  const shape::RuntimeShape& s_;
  const scalar::persistent::Buffers& b_;
  const scalar::persistent::Share share_;  // all of it
  const std::vector<std::shared_ptr<Region>>& regions_;
  std::uint32_t& epoch_;
};

}  // namespace lowlat::host
