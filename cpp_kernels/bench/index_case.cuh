// bench/index_case.cuh: a layer's index and compressor with drawn weights and stored keys, and its
// kernels checked against reference/ at true shapes. Shared by the bench and the GPU test.
#pragma once

#include "platform/nvidia.hpp"
// The platform comes first.
#include <functional>

#include "bench/attn_layer.hpp"
#include "fused/compress.hpp"
#include "fused/index.hpp"
#include "fused/index_place.cuh"
#include "reference/compress.hpp"
#include "reference/fp4.hpp"
#include "reference/index.hpp"
#include "reference/kv.hpp"
#include "reference/linear.hpp"
#include "reference/norm.hpp"
#include "reference/select.hpp"

namespace lowlat::bench {

inline constexpr int kIndexHeads = fused::kFp4IndexHeads, kIndexDim = fused::kIndexDim;
inline constexpr int kIndexRowBytes = 68, kIndexPageRows = 64;
inline constexpr std::int64_t kIndexPageBytes = kIndexPageRows * kIndexRowBytes;
inline constexpr int kPositionsOfPage = 256, kStateRing = 16;

// Which requests a step has, and where their entries lie.
struct IndexSizes {
  int requests, tokens, ratio;
  int length;  // positions before the step's first row
  int rows() const { return requests * tokens; }
  int per_page() const { return kPositionsOfPage / ratio; }
  int pages_of_request() const { return (length + tokens) / kPositionsOfPage + 1; }
  int num_pages() const { return requests * pages_of_request() + 1; }
  int max_entries() const { return std::max((length + tokens) / ratio, 1); }
  std::int64_t pitch() const {
    return std::max<std::int64_t>((max_entries() + 63) / 64 * 64, 16384);
  }
};

struct HostIndexWeights {
  HostFp8 wq;
  std::vector<std::uint16_t> weights_proj, wkv, wgate, norm, wk, k_norm, q_norm;

  explicit HostIndexWeights(Random& random)
      : wq(kIndexHeads * kIndexDim, kQLora, 127 - 12, random),
        weights_proj(kIndexHeads * kHidden),
        wkv(kDim * kHidden),
        wgate(kDim * kHidden),
        norm(kDim),
        wk(kIndexDim * kDim),
        k_norm(kIndexDim),
        q_norm(kQLora) {
    for (auto* matrix : {&weights_proj, &wkv, &wgate}) {
      for (auto& v : *matrix) v = bf16(random.normal() / 72.0);
    }
    for (auto& v : wk) v = bf16(random.normal() / 23.0);
    for (auto* gain : {&norm, &k_norm, &q_norm}) {
      for (auto& v : *gain) v = bf16(1.0 + 0.2 * random.normal());
    }
  }
};
struct DeviceIndexWeights {
  DeviceFp8 wq;
  Buffer<std::uint16_t> weights_proj, wkv, wgate, norm, wk, k_norm, q_norm;
  explicit DeviceIndexWeights(const HostIndexWeights& from)
      : wq(from.wq),
        weights_proj(from.weights_proj),
        wkv(from.wkv),
        wgate(from.wgate),
        norm(from.norm),
        wk(from.wk),
        k_norm(from.k_norm),
        q_norm(from.q_norm) {}
};

// How a case's inputs are drawn.
enum class Draw { random, equal_scores, padded };

// Rows of a step, and the pages of its requests, which lie in any order.
struct StepPlaces {
  std::vector<std::int32_t> positions, slots, page_table, state_slots;

  StepPlaces(const IndexSizes& sizes, Draw draw, Random& random)
      : page_table(static_cast<std::size_t>(sizes.requests * sizes.pages_of_request())) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(sizes.num_pages()));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<std::size_t>(random.below(static_cast<int>(i)))]);
    }
    std::copy_n(order.begin(), page_table.size(), page_table.begin());
    for (int request = 0; request < sizes.requests; ++request) {
      state_slots.push_back(sizes.requests - 1 - request);
      for (int i = 0; i < sizes.tokens; ++i) {
        const int position = sizes.length + i;
        const std::int32_t page = page_table[static_cast<std::size_t>(
            request * sizes.pages_of_request() + position / kPositionsOfPage)];
        positions.push_back(position);
        slots.push_back(page * kPositionsOfPage + position % kPositionsOfPage);
      }
    }
    if (draw == Draw::padded) {
      slots[0] = -1;
      slots.back() = -1;
    }
  }
  static std::int64_t pool_page_bytes(const IndexSizes& sizes) {
    return (sizes.per_page() * std::int64_t{584} + 575) / 576 * 576;
  }
};
// [width / 16, padded_rows]: sums of the squares of sixteen columns of bf16 [rows, width].
inline std::vector<float> squares_of(const std::vector<std::uint16_t>& values, int rows,
                                     int width) {
  const int padded = fused::padded_rows(rows);
  std::vector<float> squares(static_cast<std::size_t>(width / 16 * padded), 0.0f);
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < width; ++i) {
      const auto v = static_cast<float>(
          reference::from_bf16(values[static_cast<std::size_t>(row) * width + i]));
      squares[static_cast<std::size_t>(i / 16 * padded + row)] += v * v;
    }
  }
  return squares;
}

// What is stored in a step's pages, too.
struct HostIndexState : StepPlaces {
  std::vector<std::uint8_t> keys, pool;
  std::vector<float> state;

  // with_pool: also the compressed keys of attention, which only a compressor needs.
  HostIndexState(const IndexSizes& sizes, Draw draw, bool with_pool, Random& random)
      : StepPlaces(sizes, draw, random),
        keys(static_cast<std::size_t>(sizes.num_pages()) *
             static_cast<std::size_t>(sizes.per_page() / kIndexPageRows * kIndexPageBytes)),
        state(static_cast<std::size_t>(sizes.requests) * kStateRing * 2 * kDim) {
    const std::size_t pages = keys.size() / kIndexPageBytes;
    for (std::size_t page = 0; page < pages; ++page) {
      std::uint8_t* at = keys.data() + page * kIndexPageBytes;
      for (int i = 0; i < kIndexPageRows * 64; i += 8) {
        const std::uint64_t bits =
            draw == Draw::equal_scores ? 0x2222'2222'2222'2222u : random.bits();
        std::memcpy(at + i, &bits, 8);
      }
      for (int i = kIndexPageRows * 64; i < kIndexPageBytes; ++i) {
        at[i] = static_cast<std::uint8_t>(draw == Draw::equal_scores ? 125 : 124 + random.below(3));
      }
    }
    if (with_pool) {
      pool.resize(static_cast<std::size_t>(sizes.num_pages() * pool_page_bytes(sizes)));
      // Small numbers as codes, as bf16 and as scales alike.
      for (auto& v : pool) v = static_cast<std::uint8_t>(0x30 + random.below(8));
    }
    for (auto& v : state) v = random.normal();
  }
};
struct DeviceIndexState {
  Buffer<std::int32_t> positions, slots, page_table, state_slots;
  Buffer<std::uint8_t> keys, pool;
  Buffer<float> state;
  explicit DeviceIndexState(const HostIndexState& from)
      : positions(from.positions),
        slots(from.slots),
        page_table(from.page_table),
        state_slots(from.state_slots),
        keys(from.keys),
        pool(from.pool),
        state(from.state) {}
};

// Buffers between the kernels and what they give.
struct IndexBuffers {
  IndexSizes sizes;
  Buffer<std::uint16_t> query;
  Buffer<float> scores, block_scores, partial;
  Buffer<uint2> found;
  Buffer<std::uint32_t> tickets;
  Buffer<std::int32_t> entries, entry_slots, blocks;

  explicit IndexBuffers(const IndexSizes& of)
      : sizes(of),
        query(count(kIndexHeads * kIndexDim)),
        scores(count(of.pitch())),
        block_scores(count(of.pitch() / 8)),
        partial(2 * count(width_of(of))),
        found(count(fused::index_found_count(of.max_entries()))),
        tickets(count(2)),
        entries(count(fused::kIndexTopk)),
        entry_slots(count(fused::kIndexTopk)),
        blocks(count(fused::kIndexMaxBlocks)) {
    tickets.zero();
  }
  std::size_t count(std::int64_t width) const {
    return static_cast<std::size_t>(sizes.rows() * width);
  }

  // Columns of the compressor's product: those of an entry, then the head weights'.
  static int width_of(const IndexSizes& sizes) { return sizes.ratio * kDim + kIndexHeads; }
  static fused::StepRows step(const IndexSizes& sizes, const DeviceIndexState& state) {
    return {sizes.rows(), sizes.tokens, state.positions.get(), state.slots.get()};
  }
  // by_blocks: only positions of the published blocks; new_keys: the layer stores keys itself;
  // alone: its product has the head weights only.
  fused::IndexParams index(const DeviceIndexWeights& w, const DeviceIndexState& state,
                           const Activations& act, bool by_blocks, bool new_keys,
                           bool alone = false) const {
    fused::IndexParams p = {};
    p.rows = step(sizes, state);
    p.ratio = sizes.ratio;
    p.pages = {state.page_table.get(), sizes.pages_of_request(), sizes.per_page()};
    p.max_entries = sizes.max_entries();
    p.keys = {state.keys.get(), kIndexPageBytes};
    p.wq = w.wq.view();
    p.q_norm = w.q_norm.get();
    p.qa = act.qa.get();
    p.qa_squares = act.qa_squares.get();
    p.norm_eps = kNormEps;
    p.rope = rope_frequencies();
    p.query = query.get();
    p.head_sums = partial.get() + (alone ? 0 : sizes.ratio * kDim);
    p.head_stride = alone ? kIndexHeads : width_of(sizes);
    p.scores = scores.get();
    p.pitch = sizes.pitch();
    p.block_scores = by_blocks ? nullptr : block_scores.get();
    p.blocks = by_blocks ? blocks.get() : nullptr;
    p.new_keys = new_keys;
    p.found = found.get();
    p.tickets = tickets.get();
    p.entries = entries.get();
    p.entry_slots = entry_slots.get();
    p.out_blocks = blocks.get();
    return p;
  }
  fused::CompressParams compress(const DeviceIndexWeights& w, const DeviceIndexState& state,
                                 const Activations& act, bool alone = false) const {
    fused::CompressParams p = {};
    p.rows = step(sizes, state);
    p.ratio = sizes.ratio;
    p.x = act.x.get();
    if (!alone) {
      p.matrices[0] = {w.wkv.get(), kDim};
      if (sizes.ratio == 2) p.matrices[1] = {w.wgate.get(), kDim};
    }
    p.matrices[2] = {w.weights_proj.get(), kIndexHeads};
    p.partial = partial.get();
    p.state = state.state.get();
    p.state_slots = state.state_slots.get();
    p.ring = kStateRing;
    p.norm = w.norm.get();
    p.wk = w.wk.get();
    p.k_norm = w.k_norm.get();
    p.norm_eps = kNormEps;
    p.rope = rope_frequencies();
    p.pool = {state.pool.get(), HostIndexState::pool_page_bytes(sizes), sizes.per_page()};
    p.keys = {state.keys.get(), kIndexPageBytes};
    return p;
  }
};

// ------------------------------------------------------------------------------------ checks

struct Errors {
  double difference = 0.0, size = 0.0;
  std::int64_t count = 0, different = 0;
  void add(double got, double want) {
    difference += std::isfinite(got) ? (got - want) * (got - want) : 1e300;
    size += want * want;
    ++count;
    different += got != want ? 1 : 0;
  }
  double rel_l2() const { return std::sqrt(difference / std::max(size, 1e-300)); }
};

// The query latent's codes as the front leaves them, by reference/.
struct QueryLatent {
  Buffer<std::uint8_t> codes;
  Buffer<float> scale;
  QueryLatent(int rows, int q_lora, int group, const std::vector<std::uint16_t>& qa,
              const std::vector<std::uint16_t>& q_norm) {
    const auto padded = static_cast<std::size_t>(fused::padded_rows(rows));
    const auto lora = static_cast<std::size_t>(q_lora), span = static_cast<std::size_t>(group);
    std::vector<std::uint16_t> latent(static_cast<std::size_t>(rows) * lora);
    reference::rms_norm(latent.data(), qa.data(), q_norm.data(), rows, q_lora, kNormEps);
    std::vector<std::uint8_t> code(latent.size());
    std::vector<float> power(padded * (lora / span), NAN);
    for (std::size_t first = 0; first < latent.size(); first += span) {
      double amax = 1e-10;
      for (std::size_t i = first; i < first + span; ++i) {
        amax = std::max(amax, std::fabs(reference::from_bf16(latent[i])));
      }
      const double by = std::exp2(std::ceil(std::log2(amax / 448.0)));
      for (std::size_t i = first; i < first + span; ++i) {
        code[i] = reference::to_e4m3(reference::from_bf16(latent[i]) / by);
      }
      power[first % lora / span * padded + first / lora] = static_cast<float>(by);
    }
    codes = Buffer<std::uint8_t>(code);
    scale = Buffer<float>(power);
  }
};

class IndexCheck {
 public:
  int failures = 0;

  void expect(const char* what, const IndexSizes& sizes, const Errors& errors, double bound) {
    const bool good = errors.rel_l2() <= bound && errors.count > 0;
    failures += good ? 0 : 1;
    std::printf("%s T=%d ratio %d length %d: %s rel_l2 %.2e (bound %.0e), %lld of %lld differ\n",
                good ? "ok  " : "FAIL", sizes.rows(), sizes.ratio, sizes.length, what,
                errors.rel_l2(), bound, static_cast<long long>(errors.different),
                static_cast<long long>(errors.count));
  }
  void expect(const char* what, const IndexSizes& sizes, std::int64_t wrong, std::int64_t of) {
    failures += wrong == 0 ? 0 : 1;
    std::printf("%s T=%d ratio %d length %d: %s, %lld of %lld wrong\n",
                wrong == 0 ? "ok  " : "FAIL", sizes.rows(), sizes.ratio, sizes.length, what,
                static_cast<long long>(wrong), static_cast<long long>(of));
  }

  // Draws a step and runs all kernels of a layer of sizes.ratio one after the other; with `chain`
  // also those of a layer that reads its candidate blocks.
  void run(const IndexSizes& sizes, Draw draw, const HostIndexWeights& host,
           const DeviceIndexWeights& device) {
    Random random(static_cast<std::uint64_t>(sizes.rows()) * 1000003 + sizes.length * 7 +
                  sizes.ratio + static_cast<int>(draw));
    HostIndexState state(sizes, draw, true, random);
    const DeviceIndexState device_state(state);
    Activations act(sizes.rows(), 16, 2);
    IndexBuffers buffers(sizes);
    draw_inputs(act, draw, random);

    const fused::CompressParams compress = buffers.compress(device, device_state, act);
    must(fused::launch_compress_product(compress, kHidden, false, nullptr), "compress_product");
    must(fused::launch_compress_key(compress, false, nullptr), "compress_key");
    check_compress(sizes, state, device_state, act, buffers, host);
    state.keys = device_state.keys.take();

    fused::IndexParams index = buffers.index(device, device_state, act, false, true);
    must(fused::launch_index_query(index, false, nullptr), "index_query");
    check_query(sizes, state, act, buffers, host);
    if (sizes.rows() > fused::kHopRows) {
      const QueryLatent latent(sizes.rows(), kQLora, 32, act.qa.take(), host.q_norm);
      fused::IndexParams given = index;
      given.qa = nullptr;
      given.qa_squares = nullptr;
      given.latent_codes = latent.codes.get();
      given.latent_scale = latent.scale.get();
      buffers.query.poison();
      must(fused::launch_index_query(given, false, nullptr), "index_query of codes");
      check_query(sizes, state, act, buffers, host);
    }
    must(fused::launch_index_scores(index, false, nullptr), "index_scores");
    check_scores(sizes, state, buffers, {});
    must(fused::launch_index_select(index, false, nullptr), "index_select");
    check_selection(sizes, state, buffers, {});
    if (sizes.ratio != 1) return;
    must(fused::launch_index_blocks(index, false, nullptr), "index_blocks");
    const std::vector<std::int32_t> blocks = check_blocks(sizes, state, buffers);
    buffers.scores.poison();
    buffers.entries.poison();
    buffers.entry_slots.poison();
    index = buffers.index(device, device_state, act, true, false);
    must(fused::launch_index_scores(index, false, nullptr), "index_scores of blocks");
    check_scores(sizes, state, buffers, blocks);
    must(fused::launch_index_select(index, false, nullptr), "index_select of blocks");
    check_selection(sizes, state, buffers, blocks);
  }

  static void draw_inputs(Activations& act, Draw draw, Random& random) {
    std::vector<std::uint16_t> x(act.count(kHidden)), qa(act.count(kQLora));
    for (auto& v : x) v = bf16(random.normal());
    for (auto& v : qa) v = bf16(random.normal() * 2.0);
    if (draw == Draw::equal_scores) {
      for (auto& v : qa) v = bf16(1.0);
    }
    act.x.put(x);
    act.qa.put(qa);
    act.qa_squares.put(squares_of(qa, act.rows, kQLora));
  }

 private:
  static void must(cudaError_t error, const char* what) {
    cuda_must(error, what);
    cuda_must(cudaDeviceSynchronize(), what);
  }
  static int count_of(const IndexSizes& sizes, const HostIndexState& state, int row) {
    return state.slots[static_cast<std::size_t>(row)] < 0
               ? 0
               : (state.positions[static_cast<std::size_t>(row)] + 1) / sizes.ratio;
  }
  // Place of an entry in its pool.
  static std::int64_t slot_of(const IndexSizes& sizes, const HostIndexState& state, int row,
                              int entry) {
    const std::int32_t page = state.page_table[static_cast<std::size_t>(
        row / sizes.tokens * sizes.pages_of_request() + entry / sizes.per_page())];
    return std::int64_t{page} * sizes.per_page() + entry % sizes.per_page();
  }
  static void key_row(std::uint8_t* out, const std::vector<std::uint8_t>& keys, std::int64_t slot) {
    const std::uint8_t* page = keys.data() + slot / kIndexPageRows * kIndexPageBytes;
    std::memcpy(out, page + slot % kIndexPageRows * 64, 64);
    std::memcpy(out + 64, page + kIndexPageRows * 64 + slot % kIndexPageRows * 4, 4);
  }
  static void pool_row(std::uint8_t* out, const std::vector<std::uint8_t>& pool,
                       const IndexSizes& sizes, std::int64_t slot) {
    const std::int64_t rows = sizes.per_page();
    const std::uint8_t* page = pool.data() + slot / rows * HostIndexState::pool_page_bytes(sizes);
    std::memcpy(out, page + slot % rows * 576, 576);
    std::memcpy(out + 576, page + rows * 576 + slot % rows * 8, 8);
  }

  void check_compress(const IndexSizes& sizes, const HostIndexState& before,
                      const DeviceIndexState& after, const Activations& act,
                      const IndexBuffers& buffers, const HostIndexWeights& host) {
    const int width = IndexBuffers::width_of(sizes), rows = sizes.rows();
    const std::vector<std::uint16_t> x = act.x.take();
    const std::vector<float> parts = buffers.partial.take();
    std::vector<float> sums(static_cast<std::size_t>(rows) * width);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = parts[i] + parts[sums.size() + i];
    {
      std::vector<double> want(sums.size());
      parallel(width, [&](std::int64_t n) {
        const std::int64_t head = n - sizes.ratio * kDim;
        const std::uint16_t* w = head >= 0  ? &host.weights_proj[head * kHidden]
                                 : n < kDim ? &host.wkv[n * kHidden]
                                            : &host.wgate[(n - kDim) * kHidden];
        std::vector<double> weight(kHidden);
        for (int i = 0; i < kHidden; ++i) weight[i] = reference::from_bf16(w[i]);
        for (int row = 0; row < rows; ++row) {
          double sum = 0.0;
          for (int i = 0; i < kHidden; ++i) {
            sum += reference::from_bf16(x[static_cast<std::size_t>(row) * kHidden + i]) * weight[i];
          }
          want[static_cast<std::size_t>(row * width + n)] = sum;
        }
      });
      Errors errors;
      for (std::size_t i = 0; i < sums.size(); ++i) errors.add(sums[i], want[i]);
      expect("compressor's products", sizes, errors, 1e-5);
    }
    std::vector<std::uint8_t> keys = before.keys, pool = before.pool;
    std::vector<float> state = before.state;
    const std::vector<std::uint8_t> got_keys = after.keys.take(), got_pool = after.pool.take();
    const std::vector<float> got_state = after.state.take();
    Errors entries, index_keys;
    int completed = 0;
    for (int row = 0; row < rows; ++row) {
      if (before.slots[row] < 0) continue;
      const int position = before.positions[row];
      const float* sum = &sums[static_cast<std::size_t>(row) * width];
      float* ring = &state[static_cast<std::size_t>(before.state_slots[row / sizes.tokens]) *
                           kStateRing * 2 * kDim];
      std::vector<double> c(sum, sum + kDim);
      if (sizes.ratio == 2) {
        if (position % 2 == 0) {
          std::copy_n(sum, 2 * kDim, ring + position % kStateRing * 2 * kDim);
          continue;
        }
        const float* even = ring + (position - 1) % kStateRing * 2 * kDim;
        for (int d = 0; d < kDim; ++d) {
          c[d] = reference::pool_pair(even[d], even[kDim + d], sum[d], sum[kDim + d]);
        }
      }
      std::vector<std::uint16_t> latent(kDim);
      reference::compressed_latent(latent.data(), c.data(), host.norm.data(), kNormEps);
      const std::int64_t first = position - (sizes.ratio - 1);
      std::vector<double> entry(kDim);
      reference::compressed_entry(entry.data(), latent.data(), first);
      std::vector<float> entry_f32(entry.begin(), entry.end()), want(kDim), got(kDim);
      std::uint8_t packed[584], stored[584], key[68], stored_key[68];
      reference::kv_pack(packed, entry_f32.data(), 1);
      reference::index_key(key, latent.data(), host.wk.data(), host.k_norm.data(), first, kNormEps);
      const std::int64_t slot = before.slots[row] / sizes.ratio;
      pool_row(stored, got_pool, sizes, slot);
      key_row(stored_key, got_keys, slot);
      reference::kv_unpack(want.data(), packed, 1);
      reference::kv_unpack(got.data(), stored, 1);
      for (int i = 0; i < kDim; ++i) entries.add(got[i], want[i]);
      double want_key[kIndexDim], got_key[kIndexDim];
      reference::fp4_unpack_index(want_key, key);
      reference::fp4_unpack_index(got_key, stored_key);
      for (int i = 0; i < kIndexDim; ++i) index_keys.add(got_key[i], want_key[i]);
      ++completed;
      // What the row may write; all else is compared with what was there.
      std::uint8_t* page =
          pool.data() + slot / sizes.per_page() * HostIndexState::pool_page_bytes(sizes);
      std::memcpy(page + slot % sizes.per_page() * 576, stored, 576);
      std::memcpy(page + sizes.per_page() * 576 + slot % sizes.per_page() * 8, stored + 576, 7);
      page = keys.data() + slot / kIndexPageRows * kIndexPageBytes;
      std::memcpy(page + slot % kIndexPageRows * 64, stored_key, 64);
      std::memcpy(page + kIndexPageRows * 64 + slot % kIndexPageRows * 4, stored_key + 64, 4);
    }
    if (completed > 0) {
      expect("compressed entries", sizes, entries, 2e-2);
      expect("index keys", sizes, index_keys, 2e-2);
    }
    expect("rows that nobody completed", sizes, (pool != got_pool) + (keys != got_keys), 2);
    expect("pending halves", sizes, state != got_state ? 1 : 0, 1);
  }

  void check_query(const IndexSizes& sizes, const HostIndexState& state, const Activations& act,
                   const IndexBuffers& buffers, const HostIndexWeights& host) {
    constexpr int kWidth = kIndexHeads * kIndexDim;
    const int rows = sizes.rows();
    const std::vector<std::uint16_t> qa = act.qa.take();
    std::vector<std::uint16_t> latent(qa.size());
    reference::rms_norm(latent.data(), qa.data(), host.q_norm.data(), rows, kQLora, kNormEps);
    std::vector<double> codes(latent.size());
    reference::quantize_activation(codes.data(), latent.data(),
                                   static_cast<std::int64_t>(latent.size()), 32);
    std::vector<std::uint16_t> product(static_cast<std::size_t>(rows) * kWidth),
        want(product.size());
    parallel(kWidth, [&](std::int64_t n) {
      std::vector<double> weight(kQLora);
      for (int i = 0; i < kQLora; ++i) {
        weight[i] = reference::from_e4m3(host.wq.codes[n * kQLora + i]) *
                    reference::from_ue8m0(host.wq.scales[n / 32 * (kQLora / 32) + i / 32]);
      }
      for (int row = 0; row < rows; ++row) {
        double sum = 0.0;
        for (int i = 0; i < kQLora; ++i) {
          sum += codes[static_cast<std::size_t>(row) * kQLora + i] * weight[i];
        }
        product[static_cast<std::size_t>(row * kWidth + n)] = bf16(sum);
      }
    });
    parallel(rows, [&](std::int64_t row) {
      reference::index_query(&want[row * kWidth], &product[row * kWidth], kIndexHeads,
                             state.positions[row]);
    });
    const std::vector<std::uint16_t> got = buffers.query.take();
    Errors errors;
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < kIndexHeads; ++head) {
        for (int i = 0; i < kIndexDim; ++i) {
          errors.add(
              reference::from_bf16(
                  got[static_cast<std::size_t>(row * kWidth + fused::index_query_place(head, i))]),
              reference::from_bf16(
                  want[static_cast<std::size_t>(row * kWidth + head * kIndexDim + i)]));
        }
      }
    }
    expect("queries", sizes, errors, 2e-2);
  }

  // Entries of a row's candidates: all of them, or those of its published blocks.
  static std::vector<int> candidates(const IndexSizes& sizes, const HostIndexState& state, int row,
                                     const std::vector<std::int32_t>& blocks) {
    const int count = count_of(sizes, state, row);
    std::vector<int> out;
    if (blocks.empty()) {
      for (int i = 0; i < count; ++i) out.push_back(i);
      return out;
    }
    for (int i = 0; i < fused::kIndexMaxBlocks; ++i) {
      const int block = blocks[static_cast<std::size_t>(row) * fused::kIndexMaxBlocks + i];
      for (int j = 8 * block; block >= 0 && j < std::min(8 * block + 8, count); ++j)
        out.push_back(j);
    }
    return out;
  }

  // Against the stored keys and the device's queries; of long contexts, every some-th entry.
  void check_scores(const IndexSizes& sizes, const HostIndexState& state,
                    const IndexBuffers& buffers, const std::vector<std::int32_t>& blocks) {
    constexpr int kWidth = kIndexHeads * kIndexDim;
    const std::vector<std::uint16_t> query = buffers.query.take();
    const std::vector<float> parts = buffers.partial.take(), scores = buffers.scores.take();
    std::vector<float> weights(static_cast<std::size_t>(sizes.rows()) * kIndexHeads);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      const std::size_t at =
          i / kIndexHeads * IndexBuffers::width_of(sizes) + sizes.ratio * kDim + i % kIndexHeads;
      weights[i] = static_cast<float>(
          reference::round_bf16(parts[at] + parts[parts.size() / 2 + at]) / 64.0);
    }
    std::vector<double> worst(static_cast<std::size_t>(sizes.rows()), 0.0);
    parallel(sizes.rows(), [&](std::int64_t row) {
      const std::vector<int> entries = candidates(sizes, state, static_cast<int>(row), blocks);
      std::vector<std::uint16_t> q(kWidth);
      for (int head = 0; head < kIndexHeads; ++head) {
        for (int i = 0; i < kIndexDim; ++i) {
          q[head * kIndexDim + i] = query[row * kWidth + fused::index_query_place(head, i)];
        }
      }
      std::vector<float> sizes_of(kIndexHeads);
      for (int head = 0; head < kIndexHeads; ++head) {
        sizes_of[head] = std::abs(weights[row * kIndexHeads + head]);
      }
      const std::size_t step = std::max<std::size_t>(entries.size() / 1500, 1) | 1;
      for (std::size_t i = 0; i < entries.size(); i += step) {
        std::uint8_t key[68];
        key_row(key, state.keys, slot_of(sizes, state, static_cast<int>(row), entries[i]));
        const double want =
            reference::index_scores(q.data(), &weights[row * kIndexHeads], kIndexHeads, key, 1)[0];
        const double size =
            reference::index_scores(q.data(), sizes_of.data(), kIndexHeads, key, 1)[0];
        const double got = scores[static_cast<std::size_t>(row * sizes.pitch()) + i];
        const double error = std::abs(got - want) / std::max(size, 1e-30);
        worst[row] = std::max(worst[row], std::isfinite(got) ? error : 1e30);
      }
    });
    const double error = *std::max_element(worst.begin(), worst.end());
    failures += error <= 1e-5 ? 0 : 1;
    std::printf(
        "%s T=%d ratio %d length %d: scores%s, worst %.1e of the sum of sizes (bound 1e-5)\n",
        error <= 1e-5 ? "ok  " : "FAIL", sizes.rows(), sizes.ratio, sizes.length,
        blocks.empty() ? "" : " of blocks", error);
  }

  // Exactly the best of the scores that the device has.
  void check_selection(const IndexSizes& sizes, const HostIndexState& state,
                       const IndexBuffers& buffers, const std::vector<std::int32_t>& blocks) {
    const std::vector<float> scores = buffers.scores.take();
    const std::vector<std::int32_t> got = buffers.entries.take(),
                                    slots = buffers.entry_slots.take();
    std::vector<std::int64_t> wrong(static_cast<std::size_t>(sizes.rows()), 0);
    parallel(sizes.rows(), [&](std::int64_t row) {
      const std::vector<int> entries = candidates(sizes, state, static_cast<int>(row), blocks);
      const float* of_row = &scores[static_cast<std::size_t>(row * sizes.pitch())];
      const std::vector<double> values(of_row, of_row + entries.size());
      const std::vector<std::int32_t> best = reference::select_top(values, fused::kIndexTopk);
      for (std::size_t i = 0; i < fused::kIndexTopk; ++i) {
        const int want = i < best.size() ? entries[static_cast<std::size_t>(best[i])] : -1;
        const std::int64_t slot =
            want < 0 ? -1 : slot_of(sizes, state, static_cast<int>(row), want);
        const std::size_t at = static_cast<std::size_t>(row) * fused::kIndexTopk + i;
        wrong[row] += got[at] != want || slots[at] != slot ? 1 : 0;
      }
    });
    std::int64_t sum = 0;
    for (const std::int64_t w : wrong) sum += w;
    expect(blocks.empty() ? "selection" : "selection of blocks", sizes, sum,
           sizes.rows() * fused::kIndexTopk);
  }

  std::vector<std::int32_t> check_blocks(const IndexSizes& sizes, const HostIndexState& state,
                                         const IndexBuffers& buffers) {
    const std::vector<float> scores = buffers.scores.take();
    const std::vector<std::int32_t> got = buffers.blocks.take();
    std::vector<std::int64_t> wrong(static_cast<std::size_t>(sizes.rows()), 0);
    parallel(sizes.rows(), [&](std::int64_t row) {
      const float* of_row = &scores[static_cast<std::size_t>(row * sizes.pitch())];
      const std::vector<double> values(of_row,
                                       of_row + count_of(sizes, state, static_cast<int>(row)));
      const std::vector<std::int32_t> best =
          reference::candidate_blocks(values, fused::kIndexBlock, fused::kIndexMaxBlocks);
      for (std::size_t i = 0; i < fused::kIndexMaxBlocks; ++i) {
        const int want = i < best.size() ? best[i] : -1;
        wrong[row] += got[static_cast<std::size_t>(row) * fused::kIndexMaxBlocks + i] != want;
      }
    });
    std::int64_t sum = 0;
    for (const std::int64_t w : wrong) sum += w;
    expect("candidate blocks", sizes, sum, sizes.rows() * fused::kIndexMaxBlocks);
    return got;
  }
};

}  // namespace lowlat::bench
