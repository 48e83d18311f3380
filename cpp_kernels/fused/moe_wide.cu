// fused/moe_wide.cu: launches and instances of moe_wide_mxfp4_sm90.
#include "fused/moe_wide.cuh"

#include "fused/moe_launch.cuh"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::nvidia::fused::moe::wide {
namespace {

template <class S, MoeLayout kLayout>
struct Instance {
  using L = Layout<S, kLayout>;
  static_assert(L::kBandRows == kBandColumns);

  static cudaError_t run(const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                         bool overlapped) {
    // Rows of w1, w3 and w2, or of K in tiles.
    constexpr std::int64_t kInner = std::int64_t{L::kExperts} * L::kInner,
                           kHidden = std::int64_t{L::kExperts} * L::kHidden;
    const auto& w = args.w;
    TileMaps maps;
    cudaError_t status = cudaSuccess;
    if constexpr (L::kMarlin) {
      constexpr int kRow = 2 * L::kTiles * L::kTileBytes, kBandRow = L::kBands * L::kTileBytes;
      const BoxedMatrix matrices[] = {
          {w.w1.codes, kHidden / 16, kRow, 2 * L::kChunkGroups, L::kTileBytes, false},
          {w.w1.scales, kHidden / 32, 2 * L::kInner, L::kChunkGroups, L::kTileValues, false},
          {w.w2.codes, kInner / 16, kBandRow, 2 * L::kPartGroups, L::kTileBytes, false},
          {w.w2.scales, kInner / 32, L::kHidden, L::kPartGroups, L::kBandRows, false}};
      status = moe::tile_maps(matrices, maps.maps);
    } else {
      constexpr int kRow = L::kHidden / 2;
      const BoxedMatrix matrices[] = {
          {w.w1.codes, kInner, kRow, L::kTileValues, L::kChunkRow, true},
          {w.w3.codes, kInner, kRow, L::kTileValues, L::kChunkRow, true},
          {w.w2.codes, kHidden, L::kInnerRow, L::kBandRows, L::kPartRow, L::kBandInLines}};
      status = moe::tile_maps(matrices, maps.maps);
    }
    if (status != cudaSuccess) return status;
    return moe::launch<L>(moe_wide_mxfp4_sm90<L>, args, rules, stream, overlapped, maps);
  }
  static cudaError_t init(void* workspace, cudaStream_t stream) {
    auto* bytes = static_cast<unsigned char*>(workspace);
    const cudaError_t status = cudaMemsetAsync(workspace, 0, L::kWorkspaceBytes, stream);
    if (status != cudaSuccess) return status;
    return cudaMemsetAsync(bytes + L::kHiddenOffset, 0xff, 2 * L::kHiddenBytes, stream);
  }
};

// Calls `f` with the instance of a shape and a layout.
template <MoeLayout kLayout, class F>
auto with_shape(MoeShape shape, F f) {
  switch (shape) {
    case MoeShape::v41_tp2: return f(Instance<shape::Dsv41Flash<2>, kLayout>());
    case MoeShape::v4_tp2: return f(Instance<shape::Dsv4Flash<2>, kLayout>());
    case MoeShape::v4_tp4: return f(Instance<shape::Dsv4Flash<4>, kLayout>());
    case MoeShape::v41_draft_tp2: return f(Instance<shape::Dsv41FlashDraft<2>, kLayout>());
    case MoeShape::v41_draft_tp4: return f(Instance<shape::Dsv41FlashDraft<4>, kLayout>());
    case MoeShape::v41_tp4: break;
  }
  return f(Instance<shape::Dsv41Flash<4>, kLayout>());
}
template <class F>
auto with_instance(MoeShape shape, MoeLayout layout, F f) {
  return layout == MoeLayout::marlin ? with_shape<MoeLayout::marlin>(shape, f)
                                     : with_shape<MoeLayout::checkpoint>(shape, f);
}

}  // namespace

std::size_t workspace_bytes(MoeShape shape) {
  std::size_t most = 0;
  for (const MoeLayout layout : {MoeLayout::checkpoint, MoeLayout::marlin}) {
    const std::size_t bytes = with_instance(
        shape, layout, [](auto instance) { return decltype(instance)::L::kWorkspaceBytes; });
    most = bytes > most ? bytes : most;
  }
  return most;
}
cudaError_t init(MoeShape shape, void* workspace, cudaStream_t stream) {
  return with_shape<MoeLayout::checkpoint>(shape, [&](auto instance) {
    // One workspace serves both layouts: the checkpoint's columns, which are made ready, take at
    // least the room of Marlin's, from the same place on.
    return instance.init(workspace, stream);
  });
}
cudaError_t launch(MoeShape shape, const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                   bool overlapped) {
  return with_instance(shape, args.w.layout, [&](auto instance) {
    return instance.run(args, rules, stream, overlapped);
  });
}

}  // namespace lowlat::nvidia::fused::moe::wide
