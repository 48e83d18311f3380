// fused/moe_tiles.cu: launches and instances of moe_region_mxfp4_sm90 on Marlin's tiles.
#include "fused/moe.cuh"

#include "fused/moe_launch.cuh"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::nvidia::fused::moe::tiles {
namespace {

template <class S>
struct Instance {
  using L = Layout<S, MoeLayout::marlin>;

  static cudaError_t run(const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                         bool overlapped) {
    constexpr std::int64_t kHidden = std::int64_t{L::kExperts} * L::kHidden,
                           kInner = std::int64_t{L::kExperts} * L::kInner;
    constexpr int kLines = L::kHidden / 16 / L::kUses;  // a use's, of either matrix
    const auto& w = args.w;
    // Of rows of 64 columns by 16 of K, 512 bytes.
    const BoxedMatrix matrices[] = {
        {w.w1.codes, kHidden / 16, 2 * L::kInner * 8, kLines, L::kLineBytes, false},
        {w.w1.scales, kHidden / 32, 2 * L::kInner, kLines / 2, L::kLineScales, false},
        {w.w2.codes, kInner / 16, L::kHidden * 8, L::kInner / 16, L::kBandLine, false},
        {w.w2.scales, kInner / 32, L::kHidden, L::kInner / 32, L::kBandScaleLine, false}};
    CUtensorMap maps[4];
    const cudaError_t status = tile_maps(matrices, maps);
    if (status != cudaSuccess) return status;
    return moe::launch<L>(moe_region_mxfp4_sm90<L>, args, rules, stream, overlapped,
                          MarlinMaps{maps[0], maps[1], maps[2], maps[3]});
  }
};

// Calls `f` with the instance of a shape.
template <class F>
auto with_shape(MoeShape shape, F f) {
  switch (shape) {
    case MoeShape::v41_tp2: return f(Instance<shape::Dsv41Flash<2>>());
    case MoeShape::v4_tp2: return f(Instance<shape::Dsv4Flash<2>>());
    case MoeShape::v4_tp4: return f(Instance<shape::Dsv4Flash<4>>());
    // A draft's are all of the kernel of many rows.
    case MoeShape::v41_draft_tp2:
    case MoeShape::v41_draft_tp4:
    case MoeShape::v41_tp4: break;
  }
  return f(Instance<shape::Dsv41Flash<4>>());
}

}  // namespace

int column_of(MoeShape shape, int position) {
  return with_shape(shape, [=](auto instance) {
    using L = typename decltype(instance)::L;
    return L::column_of(position / L::kBandRows, position % L::kBandRows);
  });
}
bool sends_positions(MoeShape shape) {
  return with_shape(shape, [](auto instance) { return !decltype(instance)::L::kTrueQuads; });
}
cudaError_t launch(MoeShape shape, const MoeArgs& args, const Rules& rules, cudaStream_t stream,
                   bool overlapped) {
  return with_shape(shape,
                    [&](auto instance) { return instance.run(args, rules, stream, overlapped); });
}

}  // namespace lowlat::nvidia::fused::moe::tiles
