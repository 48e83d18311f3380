// oproj_few_fp8_sm90: the output projection of attention, both products of up to eight rows.
//
// Math         u[g] = bf( o[g]·wo_a[g]ᵀ )     o not quantised: bf16 values, weights e4m3 exactly
//              partial = quant(u)·wo_bᵀ       fp32, of this rank's columns; sent to every rank
// Shapes       V4.1-Flash, two groups: o [T,8192] · wo_a [2048,4096] · wo_b [5120,2048]
// Rounding     u to bf16, codes nearest-even; partial sums as exchange.cuh sends them
// Bytes        8.4 MB and 10.5 MB of weights. T = 6: activations 0.3 MB, packets 0.49 MB
// Floor        4.1 us at 4.65 TB/s
// Launch       128 blocks, one a multiprocessor: 32 rows of wo_a by half of their K, which a
//              cluster of two shares (clusters of two have room wherever two blocks have), and 40
//              rows of wo_b. All weights are on their way before the input is there, but for eight
//              of wo_b's rows: memory beside a block of attention ends there, so they come to where
//              wo_a's were. Sixteen warps, which take half as long as eight where all come late;
//              the exchange may start when wo_a is over
// Residency    blocks wait for u of all others, so all have to have room at once, when the kernels
//              before have ended; the launch refuses a device with fewer multiprocessors
// Ordering     packets (exchange_hop.cuh) from attention, between the blocks and to the exchange;
//              inside a cluster a barrier that counts what the other block sends
// Determinism  fixed summation order; bitwise run to run and rank to rank
// Meaning      reference/linear.cpp. Bound: rel_l2 ≤ 4e-3 each
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/exchange_hop.cuh"
#include "fused/front_launch.cuh"
#include "fused/front_product.cuh"
#include "fused/front_quant.cuh"
#include "fused/oproj.hpp"
#include "fused/oproj_send.cuh"

namespace lowlat::nvidia::fused {
namespace {

// Pace of the weights' copies (ask_for_rows): they come while attention works.
constexpr int kPaceA = 1000, kPaceB = 500;

using Model = shape::Dsv41Flash<1>;
constexpr int kGroup = Model::kScaleBlock;  // values that share a scale
constexpr int kLora = Model::kOLora, kGroupInput = Model::kGroupInput;
constexpr int kHidden = Model::kHidden, kU = kOprojFewGroups * kLora;

// Of a block.
constexpr int kCluster = 2;
constexpr int kK = 2048;  // of both products
constexpr int kRowsA = 32, kRowsB = kHidden / kOprojFewBlocks;
constexpr int kEarlyB = 32;  // rows of wo_b that have memory of their own
constexpr int kWarps = 16, kThreads = kWarps * plat::kWarpLanes;
constexpr int kSteps = kK / kStep / kWarps;  // of a warp
constexpr int kPitch = kK + 32;              // as in front_product.cuh
constexpr int kTilesB = (kRowsB + 15) / 16;
constexpr int kOwnTokens = kTileTokens / kCluster;
static_assert(kU / kRowsA * (kGroupInput / kK) == kOprojFewBlocks && kU == kK);
static_assert(kGroupInput / kK == kCluster && kRowsA == kGroup && kEarlyB % kGroup == 0);
static_assert(kRowsA * kTileTokens <= kThreads);  // a sum a thread
static_assert((kTilesB * 16 - kEarlyB) * kPitch <= kRowsA * kPitch);

struct Shared {
  // wo_b's early rows, then wo_a's, where wo_b's last ones come later.
  alignas(128) unsigned char memory[(kEarlyB + kRowsA) * kPitch];
  alignas(16) float owned[kCluster][kOwnTokens][kRowsA];  // of u, written by each block
  float scale_a[kK / kStep], scale_b[kTilesB][kK / kStep];
  std::uint64_t barrier_a, barrier_b, barrier_late;  // of weights
  std::uint64_t owned_barrier;
};
// Beside a block of attention (fused/attention.cu).
static_assert(sizeof(Shared) <= 142 * 1024);

// Rows of wo_b: of number i among the block's.
LOWLAT_DEVICE int row_of_b(int block_idx, int i) {
  return i < kEarlyB ? block_idx * kEarlyB + i
                     : kOprojFewBlocks * kEarlyB + block_idx * (kRowsB - kEarlyB) + i - kEarlyB;
}

__global__ void __launch_bounds__(kThreads, 2)
    oproj_few_fp8_sm90(const __grid_constant__ OprojParams params) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  unsigned char* const rows_b = shared.memory;
  unsigned char* const rows_a = shared.memory + kEarlyB * kPitch;
  const int thread_idx = plat::thread_idx(), block_idx = static_cast<int>(blockIdx.x);
  const int tile = block_idx / kCluster, rank = block_idx % kCluster;
  const int warp_k = thread_idx / plat::kWarpLanes * kSteps * kStep;  // of the block's K
  const int own_tokens =
      (params.num_rows + kCluster - 1 - rank) / kCluster;  // tokens rank, + 2, ..
  if (thread_idx == 0) {
    for (std::uint64_t* barrier :
         {&shared.barrier_a, &shared.barrier_b, &shared.barrier_late, &shared.owned_barrier}) {
      sm90::barrier_init(barrier, 1);
    }
    sm90::fence_barrier_init();
    sm90::barrier_arrive_expect(&shared.barrier_a, kRowsA * kK);
    sm90::barrier_arrive_expect(&shared.barrier_b, kEarlyB * kK);
    sm90::barrier_arrive_expect(&shared.barrier_late, (kRowsB - kEarlyB) * kK);
    sm90::barrier_arrive_expect(&shared.owned_barrier, kCluster * kRowsA * own_tokens * 4);
  }
  plat::block_sync();
  sm90::cluster_arrive_relaxed();
  const HopTag hop = hop_tag(params.hop, params.hop.index, HopKernel::oproj_a);
  const HopTag hop_b = {hop.port, hop.tag,
                        params.hop.id + static_cast<std::uint32_t>(HopKernel::oproj_b)};
  const std::uint64_t epoch =
      params.published ? exchange_epoch(params.port, params.exchange_index) : 0;
  Stamps stamps(stamp_sink(params.hop), hop.kernel);
  const auto codes_b = [&](int i) {
    return params.wo_b.codes + static_cast<std::int64_t>(row_of_b(block_idx, i)) * kU;
  };
  const std::uint8_t* const codes_a =
      params.wo_a.codes + static_cast<std::int64_t>(tile) * kRowsA * kGroupInput + rank * kK;
  ask_for_rows<kPitch, kWarps>(rows_a, kRowsA, kK, &shared.barrier_a, kPaceA,
                               [&](int i) { return codes_a + i * kGroupInput; });
  ask_for_rows<kPitch, kWarps>(rows_b, kEarlyB, kK, &shared.barrier_b, kPaceB, codes_b);
  // A scale a thread: of wo_a's rows, then of each 16 of wo_b's.
  constexpr int kScales = kK / kStep;
  static_assert(kThreads >= (1 + kTilesB) * kScales);
  if (thread_idx < (1 + kTilesB) * kScales) {
    const int of = thread_idx / kScales - 1, step = thread_idx % kScales;
    const std::uint8_t* from =
        of < 0 ? params.wo_a.scales + tile * (kGroupInput / kGroup) + rank * kScales
               : params.wo_b.scales + row_of_b(block_idx, 16 * of) / kGroup * kScales;
    (of < 0 ? shared.scale_a : shared.scale_b[of])[step] = stages::from_ue8m0(__ldg(from + step));
  }
  // The late ones are brought near.
  if (thread_idx % plat::kWarpLanes == 0 && thread_idx / plat::kWarpLanes < kRowsB - kEarlyB) {
    sm90::bulk_prefetch(codes_b(kEarlyB + thread_idx / plat::kWarpLanes), kK);
  }
  stamps.mark(StampStage::ask);

  const int first_k = tile * kRowsA / kLora * kGroupInput + rank * kK;  // in the row of o
  const HopActivations<2> o{static_cast<const plat::TaggedWords*>(params.packets.o) + first_k / 4,
                            kOprojFewGroups * (kGroupInput / 4), hop};
  wait_for_signs(hop, {static_cast<const plat::TaggedWords*>(params.packets.q) + tile, hop.tag,
                       o.data, kK / 4 / plat::kWarpLanes});
  stamps.mark(StampStage::wait);
  {
    const Operand x = take_operand<kSteps>(o, warp_k, params.num_rows);
    stamps.mark(StampStage::read);
    wait_for_weights(&shared.barrier_a, 0);
    multiply_rows<HopActivations<2>, kPitch>(rows_a + warp_k, kRowsA,
                                             shared.scale_a + warp_k / kStep, 0, x);
  }
  stamps.mark(StampStage::compute);
  sm90::cluster_wait();  // the other block runs: it arrived when it began
  if (thread_idx < kRowsA * kTileTokens) {
    const int token = thread_idx % kTileTokens, row = thread_idx / kTileTokens;
    const float total = sum_of_warps<kSteps, kWarps>(rows_a + row * kPitch, token);
    if (token < params.num_rows) {
      const int owner = token % kCluster;
      sm90::send_to_peer(sm90::peer_address(&shared.owned[rank][token / kCluster][row], owner),
                         total, sm90::peer_address(&shared.owned_barrier, owner));
    }
  }
  sm90::fence_async_shared();  // the sums before the copies that come over them
  plat::block_sync();
  ask_for_rows<kPitch, kWarps>(rows_b + kEarlyB * kPitch, kRowsB - kEarlyB, kK,
                               &shared.barrier_late, 0,
                               [&](int i) { return codes_b(kEarlyB + i); });
  stamps.mark(StampStage::sum);
  // Not before: who waits for the sums would only ask for them.
  sm90::launch_dependents();
  if (thread_idx < plat::kWarpLanes && own_tokens > 0) {
    // A lane has four outputs of a token's group; two lanes a packet.
    constexpr int kLanes = kGroup / 4;
    static_assert(kLanes * kOwnTokens == plat::kWarpLanes);
    wait_for_cluster(&shared.owned_barrier, 0);
    const int own = thread_idx / kLanes, quad = thread_idx % kLanes;
    const int token = own * kCluster + rank;
    float v[4] = {};
#pragma unroll
    for (int from = 0; from < kCluster; ++from) {
      const float4 part =
          *reinterpret_cast<const float4*>(&shared.owned[from][min(own, own_tokens - 1)][4 * quad]);
      v[0] += part.x, v[1] += part.y, v[2] += part.z, v[3] += part.w;
    }
    send_outputs<kLanes>(v, hop.tag, quad % 2 == 0 && token < params.num_rows, [&] {
      return static_cast<plat::TaggedWords*>(params.packets.u) +
             (token * kU + tile * kRowsA + 4 * quad) / 8;
    });
  }
  stamps.mark(StampStage::store);

  Stamps after(stamp_sink(params.hop), hop_b.kernel);
  const HopActivations<1> u{static_cast<const plat::TaggedWords*>(params.packets.u), kU / 8, hop_b};
  {
    const Operand x = take_operand<kSteps>(u, warp_k, params.num_rows);
    after.mark(StampStage::read);
    wait_for_weights(&shared.barrier_b, 0);
    wait_for_weights(&shared.barrier_late, 0);
    multiply_rows<HopActivations<1>, kPitch>(rows_b + warp_k, kRowsB,
                                             shared.scale_b[0] + warp_k / kStep, kScales, x);
  }
  after.mark(StampStage::compute);
  // Eight tokens by four rows a warp; each lane sends a quad to one of the ranks.
  constexpr int kQuads = kRowsB / 4;
  const int lane_idx = thread_idx % plat::kWarpLanes;
  const int token = lane_idx % kTileTokens, of_quad = lane_idx / kTileTokens;
#pragma unroll 1
  for (int quad = thread_idx / plat::kWarpLanes; quad < kQuads; quad += kWarps) {
    const float total = sum_of_warps<kSteps, kWarps>(rows_b + (4 * quad + of_quad) * kPitch, token);
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = __shfl_sync(plat::kAllLanes, total, token + i * kTileTokens);
    }
    const int row = row_of_b(block_idx, 4 * quad);
    if (token < params.num_rows && params.published) {
      std::uint32_t payload[3];
      pack_quad(payload, v);
      for (int i = of_quad; i < params.port.tp_size; i += 4) {
        send_quad(params.port, i, epoch, token, row / 4, kHidden / 4, payload);
      }
    } else if (token < params.num_rows && of_quad == 0) {
      *reinterpret_cast<float4*>(params.partial + static_cast<std::int64_t>(token) * kHidden +
                                 row) = make_float4(v[0], v[1], v[2], v[3]);
    }
  }
  after.mark(StampStage::store);
}

}  // namespace

cudaError_t launch_oproj_few(const OprojParams& params, bool programmatic, cudaStream_t stream) {
  if (!oproj_is_few(params)) return cudaErrorInvalidValue;
  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error != cudaSuccess) return error;
  if (num_sms < kOprojFewBlocks) return cudaErrorInvalidValue;
  return launch_kernel(oproj_few_fp8_sm90, dim3(kOprojFewBlocks), kThreads, sizeof(Shared),
                       kCluster, programmatic, stream, params);
}

}  // namespace lowlat::nvidia::fused
