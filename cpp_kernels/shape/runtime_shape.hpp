// shape/runtime_shape.hpp: one rank's sizes as plain members, for models whose shape is known at
// run time.
//
// A compiled shape has static constants of the same names; stages and schedules take either.
#pragma once

#include <cstdint>

namespace lowlat::shape {

inline constexpr int kNumStreams = 4;      // residual copies
inline constexpr int kHeadDim = 512;       // of attention; also the width of the shared latent
inline constexpr int kRopeDim = 64;        // its last dimensions, which rotate
inline constexpr int kIndexDim = 128;      // of an index head
inline constexpr int kOverlapRatio = 4;    // V4: tokens of an entry that also pools the ones before
inline constexpr int kBlockRatio = 128;    // V4: tokens of an entry that pools no others
inline constexpr int kFp4Group = 32;       // weights of an expert that share a scale
inline constexpr int kEngramColumns = 24;  // three n-gram sizes, eight hash heads each

struct RuntimeShape {
  // The model.
  int kHidden, kNumLayers, kVocab;
  int kQLora, kOLora, kWindow, kScaleBlock, kSinkhornIters;
  int kNumExperts, kExpertsPerToken;
  int kIndexHeads, kIndexTopk, kCandidateLayer, kCandidateBlocks, kCandidateBlockSize;
  int kCompressWidth;       // fp32 that a token's compressor makes: values, then scores
  int kIndexCompressWidth;  // of the index's own compressor (V4), else 0
  int kNumEngrams, kEngramDim, kEngramPadToken, kImageToken;
  int kNumDraftStages, kDraftBlock, kDraftMaskToken, kMarkovRank;
  int kDraftExperts, kDraftExpertsPerToken;
  float kNormEps, kHcEps, kSwigluLimit, kRoutedScaling;
  // This rank's share.
  int kTpRank, kTpSize;
  int kVocabLocal, kNumHeadsLocal, kGroupsLocal, kGroupInput, kIntermediateLocal;
  int kEngramColumnsLocal;
  // Steps and the cache.
  int kMaxBatch, kMaxRows, kPageSize, kNumPages, kStateRing;
  int kMaxEntries;  // compressed entries that one row attends to

  int max_experts_per_token() const {
    return kExpertsPerToken > kDraftExpertsPerToken ? kExpertsPerToken : kDraftExpertsPerToken;
  }
  int max_experts() const { return kNumExperts > kDraftExperts ? kNumExperts : kDraftExperts; }
};

}  // namespace lowlat::shape
