// fused/moe.cu: launches and instances of moe_region_mxfp4_sm90.
#include "fused/moe.cuh"

#include "fused/moe_launch.cuh"
#include "shape/dsv41_flash.hpp"
#include "shape/dsv4_flash.hpp"

namespace lowlat::fused {
namespace {

namespace moe = lowlat::nvidia::fused::moe;
namespace stages = lowlat::nvidia::stages;

// Up to so many rows this kernel is the faster one (docs/bench), from there on moe_wide.cuh.
constexpr int kFewRows = 8;
bool is_draft(MoeShape shape) {
  return shape == MoeShape::v41_draft_tp2 || shape == MoeShape::v41_draft_tp4;
}
bool is_wide(MoeShape shape, int rows) { return rows > kFewRows || is_draft(shape); }

// The kernel of few rows, and where the workspace of that of many begins.
template <class S>
struct Instance {
  using L = moe::Layout<S>;
  static constexpr std::size_t kWideOffset = (L::kWorkspaceBytes + 255) / 256 * 256;

  static cudaError_t run(const MoeArgs& args, const moe::Rules& rules, cudaStream_t stream,
                         bool overlapped) {
    constexpr std::int64_t kRows = std::int64_t{L::kExperts} * L::kInner;
    constexpr int kRow = L::kHidden / 2;
    moe::TileMaps maps;
    const moe::BoxedMatrix matrices[] = {
        {args.w.w1.codes, kRows, kRow, moe::kTileRows, kRow, true},
        {args.w.w3.codes, kRows, kRow, moe::kTileRows, kRow, true}};
    cudaError_t status = moe::tile_map(matrices[0], &maps.gate);
    if (status == cudaSuccess) status = moe::tile_map(matrices[1], &maps.up);
    if (status != cudaSuccess) return status;
    return moe::launch<L>(moe::moe_region_mxfp4_sm90<L>, args, rules, stream, overlapped, maps);
  }
  static cudaError_t init(void* workspace, cudaStream_t stream) {
    auto* bytes = static_cast<unsigned char*>(workspace);
    const cudaError_t status = cudaMemsetAsync(workspace, 0, kWideOffset, stream);
    if (status != cudaSuccess) return status;
    return cudaMemsetAsync(bytes + L::kHiddenOffset, 0xff, 2 * L::kHiddenBytes, stream);
  }
};

// Calls `f` with the instance of a shape.
template <class F>
auto with_shape(MoeShape shape, F f) {
  switch (shape) {
    case MoeShape::v41_tp2: return f(Instance<shape::Dsv41Flash<2>>());
    case MoeShape::v4_tp2: return f(Instance<shape::Dsv4Flash<2>>());
    case MoeShape::v4_tp4: return f(Instance<shape::Dsv4Flash<4>>());
    // A draft's are all of the other kernel.
    case MoeShape::v41_draft_tp2:
    case MoeShape::v41_draft_tp4:
    case MoeShape::v41_tp4: break;
  }
  return f(Instance<shape::Dsv41Flash<4>>());
}

std::size_t wide_offset(MoeShape shape) {
  return with_shape(shape, [](auto instance) { return decltype(instance)::kWideOffset; });
}

}  // namespace

std::size_t moe_workspace_bytes(MoeShape shape) {
  return wide_offset(shape) + moe::wide::workspace_bytes(shape);
}

int moe_workspace_init(MoeShape shape, void* workspace, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const cudaError_t status =
      with_shape(shape, [&](auto instance) { return instance.init(workspace, on); });
  if (status != cudaSuccess) return static_cast<int>(status);
  return static_cast<int>(
      moe::wide::init(shape, static_cast<unsigned char*>(workspace) + wide_offset(shape), on));
}

int moe_box_band(MoeShape shape, int rows) {
  return is_wide(shape, rows)
             ? moe::wide::kBandColumns
             : with_shape(shape, [](auto instance) { return decltype(instance)::L::kBandRows; });
}
int moe_box_column(MoeShape shape, MoeLayout layout, int rows, int position) {
  const bool is_few = layout == MoeLayout::marlin && !is_wide(shape, rows);
  return is_few ? moe::tiles::column_of(shape, position) : position;
}
bool moe_tile_order(MoeShape shape, MoeLayout layout, int rows) {
  return layout == MoeLayout::marlin && !is_wide(shape, rows) && moe::tiles::sends_positions(shape);
}
bool moe_ends_layer(MoeShape shape, int rows) {
  return !is_wide(shape, rows) &&
         with_shape(shape, [](auto instance) { return decltype(instance)::L::kEndsLayer; });
}
std::int64_t moe_box_packets(MoeShape shape, int rows) {
  const int band = moe_box_band(shape, rows);
  const int hidden =
      with_shape(shape, [](auto instance) { return decltype(instance)::L::kHidden; });
  return std::int64_t{rows} * (hidden / band) * ((band + 2) / 3);
}

int launch_moe_region(MoeShape shape, const MoeArgs& args, void* stream, bool overlapped) {
  if (args.rows < 1 || args.rows > 64) return cudaErrorInvalidValue;
  if (args.exchange.num_rows != 0 &&
      (!moe_ends_layer(shape, args.rows) || args.exchange.num_rows != args.rows ||
       args.quads.tp_size != args.exchange.port.tp_size ||
       args.quads_index != args.exchange.exchange_index ||
       args.quads.tp_size !=
           with_shape(shape, [](auto instance) { return decltype(instance)::L::kRanks; }))) {
    return cudaErrorInvalidValue;
  }
  const bool v4 = shape == MoeShape::v4_tp2 || shape == MoeShape::v4_tp4;
  // V4's router and the drafts' divide by 1 where a sum is 0; a hash layer's and V4.1's target's
  // add 1e-20.
  const bool target = (!v4 && !is_draft(shape)) || args.routing == MoeRouting::table;
  const moe::Rules rules = {v4 ? stages::GateRule::v4 : stages::GateRule::v41,
                            target ? stages::GateSum::target : stages::GateSum::draft, 0};
  const auto on = static_cast<cudaStream_t>(stream);
  if (!is_wide(shape, args.rows)) {
    if (args.w.layout == MoeLayout::marlin) {
      return static_cast<int>(moe::tiles::launch(shape, args, rules, on, overlapped));
    }
    return static_cast<int>(with_shape(
        shape, [&](auto instance) { return instance.run(args, rules, on, overlapped); }));
  }
  MoeArgs wide = args;
  wide.workspace = static_cast<unsigned char*>(args.workspace) + wide_offset(shape);
  return static_cast<int>(moe::wide::launch(shape, wide, rules, on, overlapped));
}

}  // namespace lowlat::fused
