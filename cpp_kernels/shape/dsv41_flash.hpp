// shape/dsv41_flash.hpp: DeepSeek-V4.1-Flash at TP ranks, as it is published.
//
// Every fact that a kernel knows while it is compiled. RuntimeShape has plain members of the same
// names.
#pragma once

#include "shape/runtime_shape.hpp"

namespace lowlat::shape {

template <int kRanks>
struct Dsv41Flash {
  static_assert(kRanks == 1 || kRanks == 2 || kRanks == 4 || kRanks == 8,
                "8 output groups split over ranks");
  // The model.
  static constexpr int kHidden = 5120;
  static constexpr int kNumLayers = 40;
  static constexpr int kVocab = 129280;
  static constexpr int kNumHeads = 64;
  static constexpr int kNumGroups = 8;
  static constexpr int kQLora = 1280;
  static constexpr int kOLora = 1024;
  static constexpr int kWindow = 128;
  static constexpr int kScaleBlock = 32;
  static constexpr int kSinkhornIters = 20;
  static constexpr int kNumExperts = 384;
  static constexpr int kExpertsPerToken = 6;
  static constexpr int kIntermediate = 2304;
  static constexpr int kIndexHeads = 32;
  static constexpr int kIndexTopk = 512;
  static constexpr int kEngramDim = 256;
  static constexpr int kNumDraftStages = 3;
  static constexpr int kDraftBlock = 5;
  static constexpr int kMarkovRank = 256;
  static constexpr int kDraftExperts = 128;
  static constexpr int kDraftExpertsPerToken = 3;
  static constexpr bool kQuantizedO = false;  // wo_a is kept as bf16
  static constexpr bool kNormsHeads = false;  // of q
  // This rank's share.
  static constexpr int kTpSize = kRanks;
  static constexpr int kVocabLocal = kVocab / kRanks;
  static constexpr int kNumHeadsLocal = kNumHeads / kRanks;
  static constexpr int kGroupsLocal = kNumGroups / kRanks;
  static constexpr int kGroupInput = kNumHeads / kNumGroups * kHeadDim;
  static constexpr int kIntermediateLocal = kIntermediate / kRanks;
  static constexpr int kEngramColumnsLocal = kEngramColumns / kRanks;

  static_assert(kHidden % kScaleBlock == 0 && kQLora % kScaleBlock == 0 &&
                    kIntermediateLocal % kScaleBlock == 0 && kGroupInput % kScaleBlock == 0,
                "scale blocks are whole on every rank");
};

// What the experts of its draft stages know of it.
template <int kRanks>
struct Dsv41FlashDraft : Dsv41Flash<kRanks> {
  static constexpr int kNumExperts = Dsv41Flash<kRanks>::kDraftExperts;
  static constexpr int kExpertsPerToken = Dsv41Flash<kRanks>::kDraftExpertsPerToken;
};

}  // namespace lowlat::shape
