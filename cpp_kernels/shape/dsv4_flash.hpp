// shape/dsv4_flash.hpp: DeepSeek-V4-Flash at TP ranks, as it is published.
//
// Every fact that a kernel knows while it is compiled. RuntimeShape has plain members of the same
// names.
#pragma once

#include "shape/runtime_shape.hpp"

namespace lowlat::shape {

template <int kRanks>
struct Dsv4Flash {
  static_assert(kRanks == 1 || kRanks == 2 || kRanks == 4 || kRanks == 8,
                "8 output groups split over ranks");
  // The model.
  static constexpr int kHidden = 4096;
  static constexpr int kNumLayers = 43;
  static constexpr int kNumWindowLayers = 2;    // layers 0 and 1: ratio 0
  static constexpr int kNumOverlapLayers = 21;  // even ones from 2 on: ratio 4
  static constexpr int kNumBlockLayers = 20;    // odd ones from 3 on: ratio 128
  static constexpr int kVocab = 129280;
  static constexpr int kNumHeads = 64;
  static constexpr int kNumGroups = 8;
  static constexpr int kQLora = 1024;
  static constexpr int kOLora = 1024;
  static constexpr int kWindow = 128;
  static constexpr int kScaleBlock = 128;
  static constexpr int kSinkhornIters = 20;
  static constexpr int kNumExperts = 256;
  static constexpr int kExpertsPerToken = 6;
  static constexpr int kIntermediate = 2048;
  static constexpr int kIndexHeads = 64;
  static constexpr int kIndexTopk = 512;
  static constexpr int kNumDraftStages = 3;
  static constexpr int kDraftBlock = 5;
  static constexpr int kMarkovRank = 256;
  static constexpr int kDraftExperts = 256;
  static constexpr int kDraftExpertsPerToken = 6;
  static constexpr bool kQuantizedO = true;  // the target's wo_a stays fp8
  static constexpr bool kNormsHeads = true;  // of q
  // This rank's share.
  static constexpr int kTpSize = kRanks;
  static constexpr int kVocabLocal = kVocab / kRanks;
  static constexpr int kNumHeadsLocal = kNumHeads / kRanks;
  static constexpr int kGroupsLocal = kNumGroups / kRanks;
  static constexpr int kGroupInput = kNumHeads / kNumGroups * kHeadDim;
  static constexpr int kIntermediateLocal = kIntermediate / kRanks;

  static_assert(kNumWindowLayers + kNumOverlapLayers + kNumBlockLayers == kNumLayers);
  static_assert(kHidden % kScaleBlock == 0 && kQLora % kScaleBlock == 0 &&
                    kIntermediateLocal % kScaleBlock == 0 && kGroupInput % kScaleBlock == 0,
                "scale blocks are whole on every rank");
};

}  // namespace lowlat::shape
