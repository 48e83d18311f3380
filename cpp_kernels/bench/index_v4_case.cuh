// bench/index_v4_case.cuh: V4-Flash's compressors (ratio 4 and 128) and its index with drawn
// weights, rings and stored keys, and their kernels checked against float64 at true shapes. Shared
// by the bench and the GPU test.
#pragma once

#include "bench/index_case.cuh"
#include "shape/dsv4_flash.hpp"

namespace lowlat::bench {

using ModelV4 = shape::Dsv4Flash<1>;
inline constexpr int kHiddenV4 = ModelV4::kHidden, kQLoraV4 = ModelV4::kQLora;
inline constexpr int kHeadsV4 = fused::kFp8IndexHeads, kKeyBytesV4 = 132;
inline constexpr std::int64_t kIndexPageBytesV4 = kIndexPageRows * kKeyBytesV4;
inline constexpr double kNormEpsV4 = 1e-6;

// The layer's product: compressor (values, scores), the index's, head weights.
constexpr int half_width_v4(int ratio) { return ratio == 4 ? 2 * kDim : kDim; }
constexpr int width_v4(int ratio) {
  return 2 * half_width_v4(ratio) + (ratio == 4 ? 4 * kIndexDim + kHeadsV4 : 0);
}

struct HostV4 {
  std::vector<std::uint16_t> matrices;  // bf16 [width_v4(4), H]; ratio 128 takes the first 1024
  std::vector<float> ape, index_ape;    // [128, 512] or [4, 1024]; [4, 256]
  std::vector<std::uint16_t> norm, index_norm, q_norm;
  std::vector<std::uint8_t> wq, wq_scale;  // [64 * 128, q_lora], blocks of 128

  explicit HostV4(Random& random)
      : matrices(std::size_t{width_v4(4)} * kHiddenV4),
        ape(128 * kDim),
        index_ape(4 * 2 * kIndexDim),
        norm(kDim),
        index_norm(kIndexDim),
        q_norm(kQLoraV4),
        wq(std::size_t{kHeadsV4} * kIndexDim * kQLoraV4),
        wq_scale(kHeadsV4 * kQLoraV4 / 128) {
    for (auto& v : matrices) v = bf16(random.normal() / 64.0);
    for (auto* bias : {&ape, &index_ape}) {
      for (auto& v : *bias) v = random.normal();
    }
    for (auto* gain : {&norm, &index_norm, &q_norm}) {
      for (auto& v : *gain) v = bf16(1.0 + 0.2 * random.normal());
    }
    for (auto& code : wq) {
      code = static_cast<std::uint8_t>(random.bits());
      if ((code & 0x7f) == 0x7f) code ^= 1;  // no NaN
    }
    for (auto& scale : wq_scale) scale = static_cast<std::uint8_t>(127 - 13 + random.below(3));
  }
};
struct DeviceV4 {
  Buffer<std::uint16_t> matrices, norm, index_norm, q_norm;
  Buffer<float> ape, index_ape;
  Buffer<std::uint8_t> wq, wq_scale;
  explicit DeviceV4(const HostV4& from)
      : matrices(from.matrices),
        norm(from.norm),
        index_norm(from.index_norm),
        q_norm(from.q_norm),
        ape(from.ape),
        index_ape(from.index_ape),
        wq(from.wq),
        wq_scale(from.wq_scale) {}
};

// A step, what its layer stores, and the buffers between the kernels.
struct StepV4 : StepPlaces {
  IndexSizes sizes;
  int ring;
  std::vector<std::uint8_t> keys, pool;
  std::vector<float> state, index_state;
  std::vector<std::uint16_t> x, qa;
  std::vector<float> squares;
  Buffer<std::int32_t> d_positions, d_slots, d_page_table, d_state_slots, entries, entry_slots;
  Buffer<std::uint8_t> d_keys, d_pool;
  Buffer<float> d_state, d_index_state, partial, d_squares, query_scale, scores;
  Buffer<std::uint16_t> d_x, d_qa, query;
  Buffer<uint2> found;
  Buffer<std::uint32_t> tickets;

  std::size_t count(std::int64_t width) const {
    return static_cast<std::size_t>(sizes.rows() * width);
  }

  StepV4(const IndexSizes& of, Draw draw, Random& random)
      : StepPlaces(of, draw, random), sizes(of), ring(of.ratio == 4 ? 16 : 256) {
    const bool overlaps = sizes.ratio == 4;
    const int pages = sizes.num_pages();
    pool.resize(static_cast<std::size_t>(pages * pool_page_bytes(sizes)));
    for (auto& v : pool) v = static_cast<std::uint8_t>(0x30 + random.below(8));
    if (overlaps) {
      keys.resize(static_cast<std::size_t>(pages * kIndexPageBytesV4));
      for (std::int64_t page = 0; page < pages; ++page) {
        std::uint8_t* at = keys.data() + page * kIndexPageBytesV4;
        for (int i = 0; i < kIndexPageRows * kIndexDim; ++i) {
          at[i] = static_cast<std::uint8_t>(draw == Draw::equal_scores ? 0x38 : random.bits());
          if ((at[i] & 0x7f) == 0x7f) at[i] ^= 1;  // no NaN
        }
        for (int i = 0; i < kIndexPageRows; ++i) {
          const float scale = draw == Draw::equal_scores
                                  ? 0.01f
                                  : static_cast<float>(0.01 + 0.02 * random.uniform());
          std::memcpy(at + kIndexPageRows * kIndexDim + 4 * i, &scale, 4);
        }
      }
    }
    const std::size_t rows_of_ring = static_cast<std::size_t>(overlaps ? pages : sizes.requests) *
                                     static_cast<std::size_t>(ring);
    state.resize(rows_of_ring * 2 * static_cast<std::size_t>(half_width_v4(sizes.ratio)));
    index_state.resize(overlaps ? rows_of_ring * 4 * kIndexDim : 0);
    for (auto* values : {&state, &index_state}) {
      for (auto& v : *values) v = random.normal();
    }
    x.resize(count(kHiddenV4));
    qa.resize(count(kQLoraV4));
    for (auto& v : x) v = bf16(random.normal());
    for (auto& v : qa) v = bf16(2.0 * random.normal());
    squares = squares_of(qa, sizes.rows(), kQLoraV4);
    d_positions = Buffer<std::int32_t>(positions);
    d_slots = Buffer<std::int32_t>(slots);
    d_page_table = Buffer<std::int32_t>(page_table);
    d_state_slots = Buffer<std::int32_t>(state_slots);
    d_keys = Buffer<std::uint8_t>(keys);
    d_pool = Buffer<std::uint8_t>(pool);
    d_state = Buffer<float>(state);
    d_index_state = Buffer<float>(index_state);
    d_x = Buffer<std::uint16_t>(x);
    d_qa = Buffer<std::uint16_t>(qa);
    d_squares = Buffer<float>(squares);
    partial = Buffer<float>(2 * count(width_v4(sizes.ratio)));
    query = Buffer<std::uint16_t>(count(kHeadsV4 * kIndexDim));
    query_scale = Buffer<float>(count(kHeadsV4));
    scores = Buffer<float>(count(sizes.pitch()));
    found = Buffer<uint2>(count(fused::index_found_count(sizes.max_entries())));
    tickets = Buffer<std::uint32_t>(count(2));
    tickets.zero();
    entries = Buffer<std::int32_t>(count(fused::kIndexTopk));
    entry_slots = Buffer<std::int32_t>(count(fused::kIndexTopk));
  }

  fused::StepRows step() const {
    return {sizes.rows(), sizes.tokens, d_positions.get(), d_slots.get()};
  }
  fused::CompressParams product(const DeviceV4& w) const {
    fused::CompressParams p = {};
    p.rows = step();
    p.ratio = sizes.ratio;
    p.x = d_x.get();
    p.matrices[0] = {w.matrices.get(), width_v4(sizes.ratio)};
    p.partial = partial.get();
    return p;
  }
  fused::PoolParams pooling(const DeviceV4& w) const {
    fused::PoolParams p = {};
    p.rows = step();
    p.ratio = sizes.ratio;
    p.partial = partial.get();
    p.width = width_v4(sizes.ratio);
    p.pages = {d_page_table.get(), sizes.pages_of_request(), kPositionsOfPage};
    p.ape = w.ape.get();
    p.norm = w.norm.get();
    p.index_ape = w.index_ape.get();
    p.index_norm = w.index_norm.get();
    p.state = d_state.get();
    p.index_state = d_index_state.get();
    p.state_slots = d_state_slots.get();
    p.ring = ring;
    p.norm_eps = static_cast<float>(kNormEpsV4);
    p.rope = rope_frequencies();
    p.pool = {d_pool.get(), pool_page_bytes(sizes), sizes.per_page()};
    p.keys = {d_keys.get(), kIndexPageBytesV4};
    return p;
  }
  fused::IndexParams index(const DeviceV4& w) const {
    fused::IndexParams p = {};
    p.format = fused::IndexFormat::fp8;
    p.rows = step();
    p.ratio = sizes.ratio;
    p.pages = {d_page_table.get(), sizes.pages_of_request(), sizes.per_page()};
    p.max_entries = sizes.max_entries();
    p.keys = {d_keys.get(), kIndexPageBytesV4};
    p.wq = {w.wq.get(), w.wq_scale.get()};
    p.q_norm = w.q_norm.get();
    p.qa = d_qa.get();
    p.qa_squares = d_squares.get();
    p.norm_eps = static_cast<float>(kNormEpsV4);
    p.rope = rope_frequencies();
    p.query = query.get();
    p.query_scale = query_scale.get();
    p.head_sums = partial.get() + width_v4(4) - kHeadsV4;
    p.head_stride = width_v4(4);
    p.scores = scores.get();
    p.pitch = sizes.pitch();
    p.new_keys = true;
    p.found = found.get();
    p.tickets = tickets.get();
    p.entries = entries.get();
    p.entry_slots = entry_slots.get();
    return p;
  }
};

class CheckV4 {
 public:
  int failures = 0;

  void run(const IndexSizes& sizes, Draw draw, const HostV4& host, const DeviceV4& device) {
    Random random(static_cast<std::uint64_t>(sizes.rows()) * 77 + sizes.length + sizes.ratio);
    StepV4 step(sizes, draw, random);
    fused::CompressParams product = step.product(device);
    if (sizes.rows() <= fused::kHopRows && sizes.ratio == 4) product.turns = 2;
    must(fused::launch_compress_product(product, kHiddenV4, false, nullptr), "compress_product");
    must(fused::launch_compress_pool(step.pooling(device), false, nullptr), "compress_pool");
    check_pool(step, host);
    if (sizes.ratio != 4) return;
    step.keys = step.d_keys.take();
    const fused::IndexParams index = step.index(device);
    must(fused::launch_index_query(index, false, nullptr), "index_query");
    must(fused::launch_index_scores(index, false, nullptr), "index_scores");
    must(fused::launch_index_select(index, false, nullptr), "index_select");
    check_index(step, host);
    if (sizes.rows() <= fused::kHopRows) return;
    const QueryLatent latent(sizes.rows(), kQLoraV4, 128, step.qa, host.q_norm);
    fused::IndexParams given = index;
    given.qa = nullptr;
    given.qa_squares = nullptr;
    given.latent_codes = latent.codes.get();
    given.latent_scale = latent.scale.get();
    step.query.poison();
    step.query_scale.poison();
    must(fused::launch_index_query(given, false, nullptr), "index_query of codes");
    must(fused::launch_index_scores(given, false, nullptr), "index_scores");
    must(fused::launch_index_select(given, false, nullptr), "index_select");
    check_index(step, host);
  }

  // A ring's row of a position, in floats from its begin.
  static std::int64_t ring_at(const StepV4& step, int request, int position, int width) {
    if (step.sizes.ratio != 4) {
      return (std::int64_t{step.state_slots[request]} * step.ring + position % step.ring) * width;
    }
    const std::int64_t page = step.page_table[static_cast<std::size_t>(
        request * step.sizes.pages_of_request() + position / kPositionsOfPage)];
    return (page * step.ring + position % kPositionsOfPage % step.ring) * width;
  }

  // Normed and turned, nothing rounded.
  static std::vector<double> pooled(const StepV4& step, const HostV4& host,
                                    const std::vector<float>& sums, int row, bool index) {
    const IndexSizes& sizes = step.sizes;
    const int ratio = sizes.ratio, dim = index ? kIndexDim : kDim;
    const int half = ratio == 4 ? 2 * dim : dim, column = index ? 4 * kDim : 0;
    const int request = row / sizes.tokens, position = step.positions[row];
    int first_row = request * sizes.tokens;
    while (step.slots[first_row] < 0) ++first_row;
    const int entry = position / ratio, num = ratio == 4 ? 8 : ratio;
    const std::vector<float>& ape = index ? host.index_ape : host.ape;
    const std::vector<float>& state = index ? step.index_state : step.state;
    std::vector<double> c(dim);
    double squares = 0.0;
    for (int d = 0; d < dim; ++d) {
      std::vector<double> values, scores;
      for (int i = 0; i < num; ++i) {
        const int at = entry * ratio - (ratio == 4 ? 4 : 0) + i;
        if (at < 0) continue;
        const int offset = (ratio == 4 && i >= 4 ? dim : 0) + d;
        const float* from =
            at >= step.positions[first_row]
                ? &sums[static_cast<std::size_t>(first_row + at - step.positions[first_row]) *
                            width_v4(ratio) +
                        column]
                : &state[static_cast<std::size_t>(ring_at(step, request, at, 2 * half))];
        values.push_back(from[offset]);
        scores.push_back(double{from[half + offset]} +
                         ape[static_cast<std::size_t>(i % ratio * half + offset)]);
      }
      const double most = *std::max_element(scores.begin(), scores.end());
      double sum = 0.0, weighted = 0.0;
      for (std::size_t i = 0; i < scores.size(); ++i) {
        sum += std::exp(scores[i] - most);
        weighted += std::exp(scores[i] - most) * values[i];
      }
      c[d] = weighted / sum;
      squares += c[d] * c[d];
    }
    const std::vector<std::uint16_t>& norm = index ? host.index_norm : host.norm;
    for (int d = 0; d < dim; ++d) {
      c[d] *= reference::from_bf16(norm[d]) / std::sqrt(squares / dim + kNormEpsV4);
    }
    const std::int64_t first = std::int64_t{entry} * ratio;
    reference::rope(c.data(), &first, 1, 1, dim, true, false);
    return c;
  }

 private:
  static void must(cudaError_t error, const char* what) {
    cuda_must(error, what);
    cuda_must(cudaDeviceSynchronize(), what);
  }
  void expect(const char* what, const IndexSizes& sizes, const Errors& errors, double bound) {
    const bool good = errors.rel_l2() <= bound && errors.count > 0;
    failures += good ? 0 : 1;
    std::printf("%s V4 T=%d ratio %d length %d: %s rel_l2 %.2e (bound %.0e), %lld of %lld differ\n",
                good ? "ok  " : "FAIL", sizes.rows(), sizes.ratio, sizes.length, what,
                errors.rel_l2(), bound, static_cast<long long>(errors.different),
                static_cast<long long>(errors.count));
  }
  void expect(const char* what, const IndexSizes& sizes, std::int64_t wrong, std::int64_t of) {
    failures += wrong == 0 ? 0 : 1;
    std::printf("%s V4 T=%d ratio %d length %d: %s, %lld of %lld wrong\n",
                wrong == 0 ? "ok  " : "FAIL", sizes.rows(), sizes.ratio, sizes.length, what,
                static_cast<long long>(wrong), static_cast<long long>(of));
  }

  // One entry before its codes, and what the rings take. dim 512 at column 0, or the index's.
  void check_pool(const StepV4& step, const HostV4& host) {
    const IndexSizes& sizes = step.sizes;
    const int rows = sizes.rows(), width = width_v4(sizes.ratio);
    const std::vector<float> parts = step.partial.take();
    std::vector<float> sums(parts.size() / 2);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = parts[i] + parts[sums.size() + i];
    {
      std::vector<double> want(sums.size());
      parallel(width, [&](std::int64_t n) {
        std::vector<double> weight(kHiddenV4);
        for (int i = 0; i < kHiddenV4; ++i) {
          weight[i] = reference::from_bf16(host.matrices[n * kHiddenV4 + i]);
        }
        for (int row = 0; row < rows; ++row) {
          double sum = 0.0;
          for (int i = 0; i < kHiddenV4; ++i) {
            sum += reference::from_bf16(step.x[static_cast<std::size_t>(row) * kHiddenV4 + i]) *
                   weight[i];
          }
          want[static_cast<std::size_t>(row * width + n)] = sum;
        }
      });
      Errors errors;
      for (std::size_t i = 0; i < sums.size(); ++i) errors.add(sums[i], want[i]);
      expect("compressor's products", sizes, errors, 1e-5);
    }
    std::vector<std::uint8_t> keys = step.keys, pool = step.pool;
    std::vector<float> state = step.state, index_state = step.index_state;
    const std::vector<std::uint8_t> got_keys = step.d_keys.take(), got_pool = step.d_pool.take();
    Errors entries, index_keys;
    for (int row = 0; row < rows; ++row) {
      const int position = step.positions[row];
      if (step.slots[row] < 0 || (position + 1) % sizes.ratio != 0) continue;
      const std::int64_t slot = step.slots[row] / sizes.ratio;
      const std::vector<double> entry = pooled(step, host, sums, row, false);
      std::vector<float> rounded(kDim), want(kDim), got(kDim);
      for (int i = 0; i < kDim; ++i)
        rounded[i] = static_cast<float>(reference::round_bf16(entry[i]));
      std::uint8_t packed[584], stored[584];
      reference::kv_pack(packed, rounded.data(), 1);
      std::uint8_t* page = pool.data() + slot / sizes.per_page() * StepV4::pool_page_bytes(sizes);
      const std::int64_t at = page - pool.data(), i = slot % sizes.per_page();
      std::memcpy(stored, got_pool.data() + at + i * 576, 576);
      std::memcpy(stored + 576, got_pool.data() + at + sizes.per_page() * 576 + i * 8, 8);
      reference::kv_unpack(want.data(), packed, 1);
      reference::kv_unpack(got.data(), stored, 1);
      for (int d = 0; d < kDim; ++d) entries.add(got[d], want[d]);
      std::memcpy(page + i * 576, stored, 576);
      std::memcpy(page + sizes.per_page() * 576 + i * 8, stored + 576, 7);
      if (sizes.ratio != 4) continue;
      const std::vector<double> key = pooled(step, host, sums, row, true);
      std::vector<double> turned(kIndexDim);
      double amax = 1e-4;
      for (unsigned d = 0; d < kIndexDim; ++d) {
        for (unsigned j = 0; j < kIndexDim; ++j) {
          turned[d] += (__builtin_popcount(d & j) % 2 == 0 ? key[j] : -key[j]) / std::sqrt(128.0);
        }
        amax = std::max(amax, std::abs(turned[d]));
      }
      const std::int64_t key_page = slot / kIndexPageRows * kIndexPageBytesV4,
                         j = slot % kIndexPageRows;
      float scale;
      std::memcpy(
          &scale,
          &got_keys[static_cast<std::size_t>(key_page + kIndexPageRows * kIndexDim + 4 * j)], 4);
      for (int d = 0; d < kIndexDim; ++d) {
        const double code = reference::from_e4m3(reference::to_e4m3(turned[d] / (amax / 448.0)));
        index_keys.add(
            reference::from_e4m3(got_keys[static_cast<std::size_t>(key_page + j * kIndexDim + d)]) *
                scale,
            code * (amax / 448.0));
      }
      std::memcpy(&keys[static_cast<std::size_t>(key_page + j * kIndexDim)],
                  &got_keys[static_cast<std::size_t>(key_page + j * kIndexDim)], kIndexDim);
      std::memcpy(&keys[static_cast<std::size_t>(key_page + kIndexPageRows * kIndexDim + 4 * j)],
                  &scale, 4);
    }
    if (entries.count > 0) expect("pooled entries", sizes, entries, 4e-3);
    if (index_keys.count > 0) expect("pooled index keys", sizes, index_keys, 4e-3);
    expect("rows that nobody completed", sizes, (pool != got_pool) + (keys != got_keys), 2);
    // Every row of a step of at most ring - candidates + 2 rows goes to the ring.
    for (int row = 0; row < rows; ++row) {
      if (step.slots[row] < 0) continue;
      const int own = 2 * half_width_v4(sizes.ratio);
      std::copy_n(&sums[static_cast<std::size_t>(row) * width], own,
                  &state[static_cast<std::size_t>(
                      ring_at(step, row / sizes.tokens, step.positions[row], own))]);
      if (sizes.ratio != 4) continue;
      std::copy_n(&sums[static_cast<std::size_t>(row) * width + own], 4 * kIndexDim,
                  &index_state[static_cast<std::size_t>(
                      ring_at(step, row / sizes.tokens, step.positions[row], 4 * kIndexDim))]);
    }
    expect("rings", sizes,
           (state != step.d_state.take()) + (index_state != step.d_index_state.take()), 2);
  }

  void check_index(const StepV4& step, const HostV4& host) {
    constexpr int kWidth = kHeadsV4 * kIndexDim;
    const IndexSizes& sizes = step.sizes;
    const int rows = sizes.rows();
    std::vector<std::uint16_t> latent(step.qa.size()), product(step.count(kWidth));
    reference::rms_norm(latent.data(), step.qa.data(), host.q_norm.data(), rows, kQLoraV4,
                        kNormEpsV4);
    std::vector<double> quantized_latent(latent.size());
    reference::quantize_activation(quantized_latent.data(), latent.data(),
                                   static_cast<std::int64_t>(latent.size()), 128);
    parallel(kWidth, [&](std::int64_t n) {
      std::vector<double> weight(kQLoraV4);
      for (int i = 0; i < kQLoraV4; ++i) {
        weight[i] = reference::from_e4m3(host.wq[n * kQLoraV4 + i]) *
                    reference::from_ue8m0(host.wq_scale[n / 128 * (kQLoraV4 / 128) + i / 128]);
      }
      for (int row = 0; row < rows; ++row) {
        double sum = 0.0;
        for (int i = 0; i < kQLoraV4; ++i) {
          sum += quantized_latent[static_cast<std::size_t>(row) * kQLoraV4 + i] * weight[i];
        }
        product[static_cast<std::size_t>(row * kWidth + n)] = bf16(sum);
      }
    });
    const std::vector<std::uint16_t> got_query = step.query.take();
    const std::vector<float> query_scale = step.query_scale.take(), parts = step.partial.take(),
                             scores = step.scores.take();
    const std::vector<std::int32_t> entries = step.entries.take(),
                                    entry_slots = step.entry_slots.take();
    Errors queries;
    std::vector<double> worst(static_cast<std::size_t>(rows), 0.0);
    std::vector<std::int64_t> wrong(static_cast<std::size_t>(rows), 0);
    for (int row = 0; row < rows; ++row) {
      std::vector<std::uint8_t> codes(kWidth);
      std::vector<float> scale(kHeadsV4);
      reference::index_query_fp8(codes.data(), scale.data(),
                                 &product[static_cast<std::size_t>(row) * kWidth], kHeadsV4,
                                 step.positions[row]);
      for (int head = 0; head < kHeadsV4; ++head) {
        for (int i = 0; i < kIndexDim; ++i) {
          const double code = half_value(got_query[static_cast<std::size_t>(
              row * kWidth + fused::index_query_place(head, i, true))]);
          queries.add(code * query_scale[static_cast<std::size_t>(row) * kHeadsV4 + head],
                      reference::from_e4m3(codes[head * kIndexDim + i]) * scale[head]);
        }
      }
    }
    expect("queries", sizes, queries, 4e-3);
    parallel(rows, [&](std::int64_t row) {
      const int count = step.slots[row] < 0 ? 0 : (step.positions[row] + 1) / sizes.ratio;
      std::vector<std::uint8_t> codes(kWidth);
      std::vector<float> weights(kHeadsV4), size_of(kHeadsV4);
      for (int head = 0; head < kHeadsV4; ++head) {
        const std::size_t at = static_cast<std::size_t>(row) * width_v4(4) + width_v4(4) -
                               kHeadsV4 + static_cast<std::size_t>(head);
        weights[head] = static_cast<float>(
            double{parts[at] + parts[parts.size() / 2 + at]} / std::sqrt(8192.0) *
            query_scale[static_cast<std::size_t>(row) * kHeadsV4 + head]);
        size_of[head] = std::abs(weights[head]);
        for (int i = 0; i < kIndexDim; ++i) {
          codes[head * kIndexDim + i] =
              reference::to_e4m3(half_value(got_query[static_cast<std::size_t>(
                  row * kWidth + fused::index_query_place(head, i, true))]));
        }
      }
      const auto slot_of = [&](int entry) {
        const std::int32_t page = step.page_table[static_cast<std::size_t>(
            row / sizes.tokens * sizes.pages_of_request() + entry / sizes.per_page())];
        return std::int64_t{page} * sizes.per_page() + entry % sizes.per_page();
      };
      const int every = std::max(count / 700, 1) | 1;
      for (int entry = 0; entry < count; entry += every) {
        const std::int64_t slot = slot_of(entry);
        const std::uint8_t* page = step.keys.data() + slot / kIndexPageRows * kIndexPageBytesV4;
        std::uint8_t key[kKeyBytesV4];
        std::memcpy(key, page + slot % kIndexPageRows * kIndexDim, kIndexDim);
        std::memcpy(key + kIndexDim, page + kIndexPageRows * kIndexDim + slot % kIndexPageRows * 4,
                    4);
        const double want =
            reference::index_scores_fp8(codes.data(), weights.data(), kHeadsV4, key, 1)[0];
        const double size =
            reference::index_scores_fp8(codes.data(), size_of.data(), kHeadsV4, key, 1)[0];
        const double got = scores[static_cast<std::size_t>(row * sizes.pitch() + entry)];
        const double error = std::abs(got - want) / std::max(size, 1e-30);
        worst[row] = std::max(worst[row], std::isfinite(got) ? error : 1e30);
      }
      const float* of_row = &scores[static_cast<std::size_t>(row * sizes.pitch())];
      const std::vector<std::int32_t> best =
          reference::select_top(std::vector<double>(of_row, of_row + count), fused::kIndexTopk);
      for (std::size_t i = 0; i < fused::kIndexTopk; ++i) {
        const int want = i < best.size() ? best[i] : -1;
        const std::size_t at = static_cast<std::size_t>(row) * fused::kIndexTopk + i;
        wrong[row] += entries[at] != want || entry_slots[at] != (want < 0 ? -1 : slot_of(want));
      }
    });
    const double error = *std::max_element(worst.begin(), worst.end());
    failures += error <= 1e-5 ? 0 : 1;
    std::printf(
        "%s V4 T=%d ratio %d length %d: scores, worst %.1e of the sum of sizes (bound 1e-5)\n",
        error <= 1e-5 ? "ok  " : "FAIL", rows, sizes.ratio, sizes.length, error);
    std::int64_t sum = 0;
    for (const std::int64_t w : wrong) sum += w;
    expect("selection", sizes, sum, rows * fused::kIndexTopk);
  }

  static double half_value(std::uint16_t code) {
    const int exponent = code >> 10 & 31, fraction = code & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return (code & 0x8000) != 0 ? -magnitude : magnitude;
  }
};

}  // namespace lowlat::bench
