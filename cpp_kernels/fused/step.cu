// step_rows_any, draft_rows_any, embed_any, engram_gather_any, features_any, head_send_any,
// head_take_any, leave_any, base_any, norm_any, gather_any, tokens_any: the ends of a step, see
// step.hpp.
//
// Math         windows: slots of positions p - 127 .. p; entries: of positions up to p, all of a
//              ratio · features: stages/draft.hpp
//              logit = bf( the two sums of K ) ; best: stages/argmax.hpp over ids of all ranks
// Shapes       1 ≤ T ≤ 48, hidden a multiple of 4, any vocabulary share that is a multiple of 4
// Rounding     none but logits' to bf16; embeddings and logits travel exactly
// Bytes        a row of the head: 8 V / ranks in, 4 V out; packets 16 B for six logits and a rank
// Launch       a block a row (and table), or 1536 logits of a row
// Ordering     packets: exchange.cuh, in the step's sequence of exchanges; between the kernels of
//              the head, and a row's tickets: acq_rel.device by the block's first thread
// Determinism  order does not matter: no sums
// Meaning      reference/engram.cpp, stages/argmax.hpp; exactly
#include "platform/nvidia.hpp"
// The platform comes first.
#include "fused/exchange.cuh"
#include "fused/mix.hpp"
#include "fused/step.hpp"
#include "platform/nvidia_sm90_fp8.cuh"
#include "shape/dsv41_flash.hpp"
#include "stages/argmax.hpp"
#include "stages/draft.hpp"
#include "stages/engram.hpp"
#include "stages/hc.hpp"
#include "stages/norm.hpp"

namespace lowlat::nvidia::fused {
namespace {

constexpr int kThreads = 256;
using Block = plat::Block<kThreads>;
constexpr std::uint32_t kNan = 0x7fc0'0000u;

// True when somebody ended the step; said in the status words, if nothing was said before.
LOWLAT_DEVICE bool note_abort(const ExchangePort& port) {
  if (load_relaxed(port.abort_words[port.tp_rank]) == 0u) return false;
  report_fault(port, port.kernel, stages::StageId::none, port.tp_rank, *port.step_epoch, true);
  return true;
}

// ---------------------------------------------------------------------------------------- rows

LOWLAT_DEVICE std::int32_t within(std::int32_t value, std::int32_t count) {
  return 0 <= value && value < count ? value : 0;
}

// A value of 64 bits as the rows keep it; -1 for one that no model has.
LOWLAT_DEVICE std::int32_t narrowed(std::int64_t value) {
  return 0 <= value && value <= 0x7fff'ffff ? static_cast<std::int32_t>(value) : -1;
}

// A row as it was given.
struct GivenRow {
  std::int32_t token, position, slot;
  bool in_place;  // its request is the one that its place says
};
LOWLAT_DEVICE GivenRow given_row(const StepInput& in, int row) {
  const int request = row / in.tokens, place = row % in.tokens;
  if (in.anchors != nullptr) {
    return {place == 0 ? in.anchors[request] : in.mask_token, in.prefixes[request] + place,
            in.slots[row], true};
  }
  const HostedInput& hosted = in.hosted;
  if (hosted.requests != nullptr) {
    const std::int32_t slot = narrowed(hosted.slots[row]);
    return {narrowed(hosted.token_ids[row]), narrowed(hosted.positions[row]),
            slot < in.page_size ? -1 : slot, true};
  }
  return {in.token_ids[row], in.positions[row], in.slots[row], in.request_idx[row] == request};
}

// Where the window's key of a full slot lies, `none` where it has none.
LOWLAT_DEVICE std::int32_t window_slot(const StepInput& in, std::int32_t slot, std::int32_t none) {
  const HostedInput& hosted = in.hosted;
  if (hosted.requests == nullptr || hosted.window_slots == nullptr) return slot;
  const std::int64_t at = hosted.window_slots[slot];
  return 0 <= at && at < hosted.num_window_slots ? static_cast<std::int32_t>(at) : none;
}

// One thread: the request's ring and the tokens before its first row.
LOWLAT_DEVICE void take_request(const StepInput& in, const StepArrays& out, int request,
                                std::int32_t token, bool whole) {
  constexpr int kBefore = stages::kEngramShifts - 1;
  std::int32_t* history = out.history + kBefore * request;
  if (in.anchors != nullptr) {
    out.anchors[request] = token;
    return;
  }
  const HostedInput& hosted = in.hosted;
  if (hosted.requests == nullptr) {
    out.state_slots[request] = within(in.state_slots[request], in.num_state_slots);
    for (int i = 0; i < kBefore && in.history != nullptr; ++i) {
      history[i] = within(in.history[kBefore * request + i], in.vocab);
    }
    return;
  }
  const std::int32_t known = within(narrowed(hosted.requests[request]), hosted.num_requests);
  out.state_slots[request] = known;
  if (hosted.history == nullptr) return;
  std::int32_t* kept = hosted.history + std::int64_t{known} * kBefore;
  for (int i = 0; i < kBefore; ++i) {
    const bool is_token = 0 <= kept[i] && kept[i] < in.vocab;
    history[i] = is_token ? kept[i] : within(in.image_token, in.vocab);
  }
  if (!hosted.decodes || !whole) return;
  for (int i = 0; i + 1 < kBefore; ++i) kept[i] = history[i + 1];
  kept[kBefore - 1] = token;
}

// Four equal streams of the embedding, the first of them taken; and no number that could be taken
// for a result.
LOWLAT_DEVICE void begin_row(const StepArrays& out, int row, std::uint16_t* hidden, int width) {
  for (int i = plat::thread_idx(); i < kMixStride; i += kThreads) {
    out.mix[row * kMixStride + i] = i == 0 || (4 <= i && i < 8) ? 1.0f : 0.0f;
  }
  for (int i = plat::thread_idx(); i < width; i += kThreads) {
    hidden[static_cast<std::int64_t>(row) * width + i] = kNan >> 16;
  }
}

__global__ void __launch_bounds__(kThreads)
    step_rows_any(const __grid_constant__ StepInput in, const __grid_constant__ StepArrays out) {
  const int row = static_cast<int>(blockIdx.x), thread_idx = plat::thread_idx();
  const int request = row / in.tokens, place = row % in.tokens;
  const bool draft = in.anchors != nullptr;
  const GivenRow given = given_row(in, row);
  const std::int32_t position = given.position;
  const std::int64_t positions = std::int64_t{page_stride_of(in)} * in.page_size;
  const std::int64_t slots = std::int64_t{in.num_pages} * in.page_size;
  bool whole = given.in_place && 0 <= position && position < positions && 0 <= given.slot &&
               given.slot < slots;
  const std::int32_t* pages =
      in.page_table + static_cast<std::int64_t>(request) * in.page_table_stride;
  std::int32_t* own_pages =
      out.page_table + static_cast<std::int64_t>(request) * page_stride_of(in);
  if (whole) {
    bool there = true;
    for (int i = thread_idx; i <= position / in.page_size; i += kThreads) {
      const std::int32_t page = pages[i];
      there = there && 0 <= page && page < in.num_pages;
      own_pages[i] = page;  // the request's other rows store the same
    }
    whole = there;
  }
  whole = !plat::block_any(!whole);
  const int last = draft ? position - place - 1 : position;
  const int first = max(last - (kStepWindow - 1), 0), context = last + 1 - first;
  const int width = window_of(in);
  for (int i = thread_idx; i < width; i += kThreads) {
    std::int32_t key = kNoKey;
    if (whole && i < context) {
      const int at = first + i;
      key =
          window_slot(in, own_pages[at / in.page_size] * in.page_size + at % in.page_size, kNoKey);
    } else if (whole && i < context + width - kStepWindow) {
      const std::int32_t other = in.slots[row - place + i - context];
      key = 0 <= other && other < slots ? other : kNoKey;
    }
    out.window_idx[row * width + i] = key;
  }
  const int per_page = in.num_entries > 0 ? in.page_size / in.entry_ratio : 1;
  for (int i = thread_idx; i < in.num_entries; i += kThreads) {
    const bool seen = whole && (position + 1) / in.entry_ratio > i;
    out.entry_slots[static_cast<std::int64_t>(row) * in.num_entries + i] =
        seen ? own_pages[i / per_page] * per_page + i % per_page : -1;
  }
  begin_row(out, row, in.hosted.hidden, in.hosted.requests != nullptr ? in.hosted.width : 0);
  const std::int32_t token = within(given.token, in.vocab);
  for (int i = 0; i < kMaxTables && in.expert_tables[i] != nullptr; ++i) {
    if (thread_idx >= kTableExperts) continue;
    out.expert_ids[i][row * kTableExperts + thread_idx] =
        in.expert_tables[i][std::int64_t{token} * kTableExperts + thread_idx];
  }
  if (thread_idx != 0) return;
  if (row == 0) note_abort(in.port);
  out.token_ids[row] = token;
  out.positions[row] = whole ? position : 0;
  out.slots[row] = whole ? given.slot : -1;
  out.kv_slots[row] = whole ? window_slot(in, given.slot, -1) : -1;
  out.image_rows[row] = token == in.image_token ? 1 : 0;
  if (place == 0) take_request(in, out, request, token, whole);
}

__global__ void __launch_bounds__(kThreads)
    draft_rows_any(const __grid_constant__ DraftInput in, const __grid_constant__ StepArrays out) {
  const int row = static_cast<int>(blockIdx.x);
  const std::int32_t position = narrowed(in.positions[row]), slot = in.key_slots[row];
  const bool whole = 0 <= position && position < in.max_positions && in.page_size <= slot &&
                     slot < in.num_window_slots;
  const int width = kStepWindow + in.tokens;
  for (int i = plat::thread_idx(); i < width; i += kThreads) {
    const std::int32_t key = in.window[static_cast<std::int64_t>(row) * in.window_stride + i];
    out.window_idx[row * width + i] = whole && 0 <= key && key < in.num_window_slots ? key : kNoKey;
  }
  begin_row(out, row, in.hidden, in.width);
  if (plat::thread_idx() != 0) return;
  if (row == 0) note_abort(in.port);
  out.token_ids[row] = within(narrowed(in.token_ids[row]), in.vocab);
  out.positions[row] = whole ? position : 0;
  out.slots[row] = whole ? slot : -1;
  out.kv_slots[row] = whole ? slot : -1;
  out.image_rows[row] = 0;
}

// ---------------------------------------------------------------------------------- embedding

__global__ void __launch_bounds__(kThreads) embed_any(const __grid_constant__ EmbedParams params) {
  const int quad = static_cast<int>(blockIdx.x * kThreads) + plat::thread_idx();
  const int row = static_cast<int>(blockIdx.y), quads = params.hidden / 4;
  if (quad >= quads) return;
  const int local = params.token_ids[row] - params.port.tp_rank * params.vocab_local;
  float v[4] = {};
  if (0 <= local && local < params.vocab_local) {
    const uint2 words =
        __ldg(reinterpret_cast<const uint2*>(params.embed) + std::int64_t{local} * quads + quad);
    v[0] = sm90::low_bf16(words.x), v[1] = sm90::high_bf16(words.x);
    v[2] = sm90::low_bf16(words.y), v[3] = sm90::high_bf16(words.y);
  }
  publish_quad(params.port, exchange_epoch(params.port, params.index), row, quad, quads, v);
}

// ------------------------------------------------------------------------------------- packets

// The box of `source` in `reader`'s memory.
LOWLAT_DEVICE plat::TaggedWords* box_of(const ExchangePort& port, int reader, std::uint64_t epoch,
                                        int source) {
  return quads_of(port, reader, epoch, source, 0, 0);
}

// Sends a packet to every rank.
LOWLAT_DEVICE void publish(const ExchangePort& port, std::uint64_t epoch, std::int64_t packet,
                           const std::uint32_t (&words)[3]) {
  for (int reader = 0; reader < port.tp_size; ++reader) {
    plat::store_tagged(box_of(port, reader, epoch, port.tp_rank) + packet, words,
                       static_cast<std::uint32_t>(epoch));
  }
}

// words = packet `packet` of `source`, for lanes that want one. Whole warps call. False: the wait
// has ended otherwise, reported.
LOWLAT_DEVICE bool receive(std::uint32_t (&words)[3], const ExchangePort& port, std::uint64_t epoch,
                           int source, std::int64_t packet, bool wanted, stages::StageId stage) {
  constexpr int kPollsPerLook = 32;
  const plat::TaggedWords* src = box_of(port, port.tp_rank, epoch, source) + packet;
  const auto tag = static_cast<std::uint32_t>(epoch);
  std::uint64_t deadline_ns = 0;
  bool missing = wanted;
#pragma unroll 1
  for (int polls = 0;; ++polls) {
    if (missing) missing = !plat::load_tagged(src, tag, words);
    if (!__any_sync(plat::kAllLanes, missing)) return true;
    if (polls % kPollsPerLook != 0) continue;
    const std::uint64_t now_ns = plat::clock_ns();
    if (deadline_ns == 0) deadline_ns = now_ns + port.budget_ns;
    const bool aborted =
        plat::load_acquire<plat::Scope::system>(port.abort_words[port.tp_rank]) != 0u;
    const bool over = aborted || now_ns > deadline_ns;
    if (over && missing) report_fault(port, port.kernel, stage, source, epoch, aborted);
    if (__any_sync(plat::kAllLanes, over)) return false;
  }
}

// ------------------------------------------------------------------------------- n-gram tables

constexpr int kColumns = stages::kEngramColumns, kDim = kEngramWidth / kColumns;
constexpr int kCodeWords = kDim / 4, kScaleWords = kDim / 32 / 4;
constexpr int kColumnPackets = (kCodeWords + kScaleWords) / 3;
static_assert((kCodeWords + kScaleWords) % 3 == 0);

__global__ void __launch_bounds__(kThreads)
    engram_gather_any(const __grid_constant__ EngramGatherParams params) {
  __shared__ std::int64_t ids[kColumns];
  const EngramParams& table = params.tables[blockIdx.y];
  const ExchangePort& port = params.port;
  const int row = static_cast<int>(blockIdx.x), thread_idx = plat::thread_idx();
  const int request = row / table.rows.tokens, request_row = row % table.rows.tokens;
  if (thread_idx < kColumns) {
    std::int64_t tokens[stages::kEngramShifts];
    stages::engram_window(tokens, table.token_ids + row - request_row, request_row,
                          table.history + request * (stages::kEngramShifts - 1));
    stages::engram_hash<Block>(ids, tokens, table.rows.positions[row], table.token_map,
                               table.multipliers, table.primes, table.image_token, table.pad_token);
  }
  plat::block_sync();
  const std::uint64_t epoch = exchange_epoch(port, params.index);
  const int columns = kColumns / port.tp_size, packets = columns * kColumnPackets;
  const std::int64_t first = (std::int64_t{blockIdx.y} * gridDim.x + row) * packets;
  for (int i = thread_idx; i < packets; i += kThreads) {
    const int column = port.tp_rank * columns + i / kColumnPackets;
    const std::int64_t at = ids[column] - table.table.first_row[0];
    const auto* codes =
        reinterpret_cast<const std::uint32_t*>(table.table.codes[0]) + at * kCodeWords;
    const auto* scales =
        reinterpret_cast<const std::uint32_t*>(table.table.scales[0]) + at * kScaleWords;
    std::uint32_t words[3];
    for (int j = 0; j < 3; ++j) {
      const int word = i % kColumnPackets * 3 + j;
      words[j] = word < kCodeWords ? __ldg(codes + word) : __ldg(scales + word - kCodeWords);
    }
    publish(port, epoch, first + i, words);
  }
  const int padded = padded_rows(table.rows.num_rows), all = port.tp_size * packets;
  auto* out_codes = reinterpret_cast<std::uint32_t*>(table.codes) +
                    static_cast<std::int64_t>(row) * (kEngramWidth / 4);
  for (int begin = 0; begin < all; begin += kThreads) {
    const int i = begin + thread_idx, packet = min(i, all - 1) % packets;
    const int source = min(i, all - 1) / packets;
    std::uint32_t words[3] = {};
    receive(words, port, epoch, source, first + packet, i < all, stages::StageId::engram_gather);
    if (i >= all) continue;
    const int column = source * columns + packet / kColumnPackets;
    for (int j = 0; j < 3; ++j) {
      const int word = packet % kColumnPackets * 3 + j;
      if (word < kCodeWords) {
        out_codes[column * kCodeWords + word] = words[j];
        continue;
      }
      const int group = column * (kDim / 32) + 4 * (word - kCodeWords);
      for (int k = 0; k < 4; ++k) {
        table.scale[(group + k) * padded + row] =
            stages::from_ue8m0(static_cast<std::uint8_t>(words[j] >> 8 * k));
      }
    }
  }
}

// ------------------------------------------------------------------------------------ features

__global__ void __launch_bounds__(kThreads)
    features_any(const __grid_constant__ FeatureParams params) {
  const std::int64_t row = blockIdx.x;
  stages::draft_feature<Block>(params.out + row * params.pitch,
                               params.residual + row * 4 * params.hidden, params.hidden);
}

// ---------------------------------------------------------------------------------------- head

constexpr int kPacketLogits = 6;
static_assert(kHeadChunk == kPacketLogits * kThreads);

using Best = stages::BlockBest<Block>;

LOWLAT_DEVICE std::int64_t row_packets(const HeadParams& params) {
  return params.logits == nullptr ? 0 : std::int64_t{head_chunks(params.vocab_local)} * kThreads;
}
// The packet of a row's best is behind all logits.
LOWLAT_DEVICE std::int64_t best_packet(const HeadParams& params, int i) {
  return params.num_logit_rows * row_packets(params) + i;
}

// A warp: the best of the row's chunks, sent by its first lane.
LOWLAT_DEVICE void send_best(const HeadParams& params, std::uint64_t epoch, int i) {
  const int lane_idx = plat::thread_idx() % plat::kWarpLanes;
  const int chunks = head_chunks(params.vocab_local);
  stages::Best best = stages::kNoBest;
  for (int chunk = lane_idx; chunk < chunks; chunk += plat::kWarpLanes) {
    const uint4 words = __ldcg(params.best + std::int64_t{i} * chunks + chunk);
    best = stages::best_of(best, {plat::bits_float(words.x), static_cast<std::int32_t>(words.y)});
  }
  using WarpBest = stages::BlockBest<plat::Block<plat::kWarpLanes>>;
  WarpBest::Scratch none;
  best = WarpBest::run(best, none);
  if (lane_idx != 0) return;
  publish(params.port, epoch, best_packet(params, i),
          {plat::float_bits(best.value), static_cast<std::uint32_t>(best.id), 0u});
}

__global__ void __launch_bounds__(kThreads)
    head_send_any(const __grid_constant__ HeadParams params) {
  __shared__ Best::Scratch scratch;
  __shared__ bool last;
  const int chunk = static_cast<int>(blockIdx.x), i = static_cast<int>(blockIdx.y);
  const int thread_idx = plat::thread_idx();
  const std::uint64_t epoch = exchange_epoch(params.port, params.index);
  if (params.num_logit_rows == 0) {
    if (thread_idx == 0) publish(params.port, epoch, 0, {0u, 0u, 0u});
    return;
  }
  const int row = params.logit_rows == nullptr ? i : within(params.logit_rows[i], params.num_rows);
  const float* sums = params.partial + std::int64_t{row} * params.vocab_local;
  const float* others = sums + std::int64_t{params.num_rows} * params.vocab_local;
  const int first_id = params.port.tp_rank * params.vocab_local;
  const int begin = (chunk * kThreads + thread_idx) * kPacketLogits;
  stages::Best best = stages::kNoBest;
  std::uint32_t codes[kPacketLogits];
#pragma unroll
  for (int j = 0; j < kPacketLogits; ++j) {
    const int at = begin + j;
    codes[j] = 0;
    if (at >= params.vocab_local) continue;
    codes[j] = stages::to_bf16(__ldcg(sums + at) + __ldcg(others + at));
    best = stages::best_of(
        best, {stages::from_bf16(static_cast<std::uint16_t>(codes[j])), first_id + at});
  }
  if (params.logits != nullptr) {
    publish(params.port, epoch, i * row_packets(params) + chunk * kThreads + thread_idx,
            {codes[0] | codes[1] << 16, codes[2] | codes[3] << 16, codes[4] | codes[5] << 16});
  }
  best = Best::run(best, scratch);
  if (thread_idx == 0) {
    params.best[std::int64_t{i} * gridDim.x + chunk] =
        make_uint4(plat::float_bits(best.value), static_cast<std::uint32_t>(best.id), 0u, 0u);
    std::uint32_t ticket;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(ticket)
                 : "l"(__cvta_generic_to_global(params.tickets + i))
                 : "memory");
    last = ticket == gridDim.x - 1;
    if (last) params.tickets[i] = 0;  // nobody else comes in this step
  }
  plat::block_sync();
  if (last && thread_idx < plat::kWarpLanes) send_best(params, epoch, i);
}

__global__ void __launch_bounds__(kThreads)
    head_take_any(const __grid_constant__ HeadParams params) {
  __shared__ stages::Best candidates[kMaxRanks];
  const ExchangePort& port = params.port;
  const int chunk = static_cast<int>(blockIdx.x), i = static_cast<int>(blockIdx.y);
  const int thread_idx = plat::thread_idx();
  const std::uint64_t epoch = exchange_epoch(port, params.index);
  const std::uint32_t* abort_word = port.abort_words[port.tp_rank];
  if (chunk == 0) {
    bool whole = true;
    if (thread_idx < plat::kWarpLanes) {
      const int source = min(thread_idx, port.tp_size - 1);
      std::uint32_t words[3] = {};
      whole = receive(words, port, epoch, source, best_packet(params, i), thread_idx < port.tp_size,
                      stages::StageId::argmax_gather);
      if (thread_idx < port.tp_size) {
        candidates[thread_idx] = {plat::bits_float(words[0]), static_cast<std::int32_t>(words[1])};
      }
      plat::warp_sync();
    }
    if (thread_idx == 0 && params.num_logit_rows > 0 && params.argmax != nullptr) {
      stages::Best winner = stages::kNoBest;
      for (int source = 0; source < port.tp_size; ++source) {
        winner = stages::best_of(winner, candidates[source]);
      }
      params.argmax[i] = whole && !note_abort(port) ? winner.id : -1;
    }
  }
  if (params.num_logit_rows == 0 || params.logits == nullptr) return;
  const std::int64_t packets = row_packets(params);
  float* out = params.logits + std::int64_t{i} * port.tp_size * params.vocab_local;
  for (int source = 0; source < port.tp_size; ++source) {
    std::uint32_t words[3] = {};
    const std::int64_t packet = chunk * kThreads + thread_idx;
    const bool whole = receive(words, port, epoch, source, i * packets + packet, true,
                               stages::StageId::logits_gather) &&
                       load_relaxed(abort_word) == 0u;
    const std::int64_t begin = packet * kPacketLogits;
#pragma unroll
    for (int j = 0; j < kPacketLogits; j += 2) {
      if (begin + j >= params.vocab_local) break;
      // Pairs: a share is a multiple of four, so its rows are too.
      *reinterpret_cast<float2*>(out + std::int64_t{source} * params.vocab_local + begin + j) =
          whole ? make_float2(sm90::low_bf16(words[j / 2]), sm90::high_bf16(words[j / 2]))
                : make_float2(plat::bits_float(kNan), plat::bits_float(kNan));
    }
  }
}

__global__ void __launch_bounds__(kThreads) leave_any(const __grid_constant__ LeaveParams params) {
  const std::int64_t row = blockIdx.x;
  const int pieces = params.hidden / 8;  // of 16 bytes
  const bool ended = note_abort(params.port);
  const std::uint32_t pair = kNan | kNan >> 16;
  const uint4 none = make_uint4(pair, pair, pair, pair);
  const auto give = [&](std::uint16_t* out, const std::uint16_t* from, int count) {
    if (out == nullptr) return;
    for (int i = plat::thread_idx(); i < count; i += kThreads) {
      reinterpret_cast<uint4*>(out)[row * count + i] =
          ended ? none : __ldcg(reinterpret_cast<const uint4*>(from) + row * count + i);
    }
  };
  give(params.out_streams, params.residual, 4 * pieces);
  if (params.mix == nullptr) {
    give(params.out_hidden, params.x, pieces);
    return;
  }
  std::uint16_t* out = params.out_hidden + row * params.hidden;
  stages::hc_combine<Block>(
      params.residual + row * stages::kHcStreams * params.hidden, params.mix + row * kMixStride,
      params.hidden, [&](int h, float v) { out[h] = ended ? kNan >> 16 : stages::to_bf16(v); });
}

// -------------------------------------------------------------------------------------- drafts

__global__ void __launch_bounds__(kThreads) base_any(const __grid_constant__ BaseParams params) {
  const std::int64_t quads = std::int64_t{params.num_rows} * params.vocab_local / 4;
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + plat::thread_idx();
  if (i >= quads) return;
  const float4 a = __ldcg(reinterpret_cast<const float4*>(params.partial) + i);
  const float4 b = __ldcg(reinterpret_cast<const float4*>(params.partial) + quads + i);
  const auto rounded = [](float v) { return stages::from_bf16(stages::to_bf16(v)); };
  reinterpret_cast<float4*>(params.out)[i] =
      make_float4(rounded(a.x + b.x), rounded(a.y + b.y), rounded(a.z + b.z), rounded(a.w + b.w));
}

__global__ void __launch_bounds__(kThreads) norm_any(const __grid_constant__ NormParams params) {
  constexpr int kHidden = shape::Dsv41Flash<1>::kHidden;
  using Norm = stages::RmsNorm<Block>;
  __shared__ Norm::Scratch scratch;
  __shared__ float x[kHidden];
  if (params.in != nullptr) {
    const std::int64_t first = std::int64_t{blockIdx.x} * kHidden;
    for (int i = plat::thread_idx(); i < kHidden; i += kThreads) {
      x[i] = stages::from_bf16(params.in[first + i]);
    }
    plat::block_sync();
    Norm::run(params.out + first, x, params.gain, kHidden, params.eps, scratch);
  }
  if (blockIdx.x != 0) return;
  if (plat::thread_idx() < params.num_anchors) {
    const std::int64_t anchor = params.anchors[plat::thread_idx()];
    params.own_anchors[plat::thread_idx()] = 0 <= anchor && anchor < params.vocab ? anchor : 0;
  }
  if (plat::thread_idx() != 0) return;
  note_abort(params.port);
  *params.own_offset = params.offset == nullptr ? 0 : *params.offset;
}

constexpr int kPacketValues = 3;

__global__ void __launch_bounds__(kThreads)
    gather_any(const __grid_constant__ GatherParams params) {
  const ExchangePort& port = params.port;
  const int row = static_cast<int>(blockIdx.y);
  if (params.temperatures[row / params.tokens] == 0.0f) return;
  const std::uint64_t epoch = exchange_epoch(port, params.index);
  const std::int64_t packet = std::int64_t{blockIdx.x} * kThreads + plat::thread_idx();
  const std::int64_t place = row * (std::int64_t{gridDim.x} * kThreads) + packet;
  const std::int64_t begin = packet * kPacketValues;
  float* out = params.rows + std::int64_t{row} * port.tp_size * params.vocab_local;
  std::uint32_t words[kPacketValues] = {};
  for (int j = 0; j < kPacketValues && begin + j < params.vocab_local; ++j) {
    words[j] =
        plat::float_bits(__ldcg(out + std::int64_t{port.tp_rank} * params.vocab_local + begin + j));
  }
  publish(port, epoch, place, words);
  for (int source = 0; source < port.tp_size; ++source) {
    if (source == port.tp_rank) continue;
    const bool whole =
        receive(words, port, epoch, source, place, true, stages::StageId::draft_logits_gather);
    for (int j = 0; j < kPacketValues && begin + j < params.vocab_local; ++j) {
      out[std::int64_t{source} * params.vocab_local + begin + j] =
          plat::bits_float(whole ? words[j] : kNan);
    }
  }
}

struct Tokens {
  const std::int64_t* in;
  std::int32_t* out;
  int count;
};
__global__ void __launch_bounds__(kThreads) tokens_any(const __grid_constant__ Tokens params) {
  const int i = plat::thread_idx();
  if (i < params.count) params.out[i] = static_cast<std::int32_t>(params.in[i]);
}

bool has_rows(int num_rows) { return 1 <= num_rows && num_rows <= kMaxFusedRows; }

}  // namespace

cudaError_t launch_step_rows(const StepInput& in, const StepArrays& out, cudaStream_t stream) {
  if (!has_rows(in.num_rows) || in.tokens < 1 || in.num_rows != in.tokens * in.batch_size ||
      (in.anchors != nullptr && in.tokens > kMaxBlockRows) ||
      (in.num_entries > 0 && in.entry_ratio < 1)) {
    return cudaErrorInvalidValue;
  }
  step_rows_any<<<in.num_rows, kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

cudaError_t launch_embed(const EmbedParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.hidden % 4 != 0) return cudaErrorInvalidValue;
  const dim3 grid(static_cast<unsigned>((params.hidden / 4 + kThreads - 1) / kThreads),
                  static_cast<unsigned>(params.num_rows));
  embed_any<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_engram_gather(const EngramGatherParams& params, cudaStream_t stream) {
  if (params.num_tables < 1 || params.num_tables > kMaxGathered) return cudaErrorInvalidValue;
  const StepRows& rows = params.tables[0].rows;
  if (!has_rows(rows.num_rows) || rows.tokens < 1 || rows.num_rows % rows.tokens != 0 ||
      kColumns % params.port.tp_size != 0) {
    return cudaErrorInvalidValue;
  }
  const dim3 grid(static_cast<unsigned>(rows.num_rows), static_cast<unsigned>(params.num_tables));
  engram_gather_any<<<grid, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_features(const FeatureParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows)) return cudaErrorInvalidValue;
  features_any<<<params.num_rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_head(const HeadParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.num_logit_rows < 0 ||
      params.num_logit_rows > kMaxFusedRows || params.vocab_local % 4 != 0) {
    return cudaErrorInvalidValue;
  }
  const bool none = params.num_logit_rows == 0;
  const auto chunks = static_cast<unsigned>(none ? 1 : head_chunks(params.vocab_local));
  const auto rows = static_cast<unsigned>(none ? 1 : params.num_logit_rows);
  head_send_any<<<dim3(chunks, rows), kThreads, 0, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  head_take_any<<<dim3(params.logits == nullptr ? 1 : chunks, rows), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_draft_rows(const DraftInput& in, const StepArrays& out, cudaStream_t stream) {
  if (!has_rows(in.num_rows) || in.tokens < 1 || in.tokens > kMaxBlockRows ||
      in.num_rows % in.tokens != 0 || in.window_stride < kStepWindow + in.tokens) {
    return cudaErrorInvalidValue;
  }
  draft_rows_any<<<in.num_rows, kThreads, 0, stream>>>(in, out);
  return cudaGetLastError();
}

cudaError_t launch_leave(const LeaveParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.hidden % 8 != 0) return cudaErrorInvalidValue;
  leave_any<<<params.num_rows, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_base(const BaseParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.vocab_local % 4 != 0) return cudaErrorInvalidValue;
  const std::int64_t quads = std::int64_t{params.num_rows} * params.vocab_local / 4;
  base_any<<<static_cast<unsigned>((quads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      params);
  return cudaGetLastError();
}

cudaError_t launch_norm(const NormParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.num_anchors > kThreads) return cudaErrorInvalidValue;
  norm_any<<<params.in != nullptr ? params.num_rows : 1, kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_gather(const GatherParams& params, cudaStream_t stream) {
  if (!has_rows(params.num_rows) || params.tokens < 1 || params.num_rows % params.tokens != 0) {
    return cudaErrorInvalidValue;
  }
  const auto chunks = static_cast<unsigned>(gather_packets(1, params.vocab_local) / kThreads);
  gather_any<<<dim3(chunks, static_cast<unsigned>(params.num_rows)), kThreads, 0, stream>>>(params);
  return cudaGetLastError();
}

cudaError_t launch_tokens(const std::int64_t* in, std::int32_t* out, int count,
                          cudaStream_t stream) {
  if (count < 0 || count > kThreads) return cudaErrorInvalidValue;
  tokens_any<<<1, kThreads, 0, stream>>>({in, out, count});
  return cudaGetLastError();
}

}  // namespace lowlat::nvidia::fused
