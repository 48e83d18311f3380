// The life of one or two requests on a small model, on two sides that get the same tokens: prompt
// in chunks, then verify, decode and drafts. For a platform's models against those of scalar.
//
// Norms and attention add in another order on a device than one thread does, and what four bits
// round to may flip by it, so logits are near and not equal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "check.hpp"
#include "host/tiny_group.hpp"

namespace lowlat::testing {

// A rank's arrays and outputs where host and launches both reach them.
class Shared {
 public:
  explicit Shared(lowlat_model* model) {
    TinyGroup::must(lowlat_model_alloc(model, LOWLAT_MEMORY_SHARED, kBytes, &base_));
  }
  template <class T>
  T* take(std::size_t count) {
    next_ = (next_ + 63) / 64 * 64;
    T* out = reinterpret_cast<T*>(static_cast<char*>(base_) + next_);
    next_ += count * sizeof(T);
    REQUIRE(next_ <= kBytes);
    return out;
  }
  template <class T>
  const T* put(const std::vector<T>& values) {
    T* out = take<T>(values.size());
    std::copy(values.begin(), values.end(), out);
    return out;
  }
  void rewind() { next_ = 0; }

 private:
  static constexpr std::size_t kBytes = 1 << 20;
  void* base_ = nullptr;
  std::size_t next_ = 0;
};

enum class How { resident, plain, captured };

// A draft's arrays after a step of one or more requests, sampled where `temperature` is above 0.
struct DraftArrays {
  std::vector<std::int32_t> anchors, prefixes, slots, rows;
  std::vector<std::int64_t> offsets;
  std::vector<float> temperature;
};

using Launch = std::function<lowlat_status(lowlat_model*, int rank, Shared&, void* stream)>;

// A group and what it is given. How a step may be launched is the platform's.
class Side {
 public:
  template <class PlatformOf>
  Side(std::uint32_t kind, int tp_size, PlatformOf platform_of, std::uint64_t wait_budget_ns)
      : group(
            kind, tp_size, [&](lowlat_model_config& c) { c.wait_budget_ns = wait_budget_ns; },
            platform_of) {
    for (int r = 0; r < tp_size; ++r) shared_.emplace_back(group.model(r));
  }
  virtual ~Side() = default;
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;

  // launch(model, rank, shared, stream) on every rank; then all have ended.
  virtual void run(How, const Launch& launch) {
    for (auto& shared : shared_) shared.rewind();
    group.run([&](lowlat_model* model, int r) { return launch(model, r, shared_[r], nullptr); });
  }

  lowlat_step placed(const StepArrays& arrays, lowlat_step_mode mode, Shared& shared) {
    lowlat_step step = arrays.step(mode);
    step.token_ids = shared.put(arrays.token_ids);
    step.positions = shared.put(arrays.positions);
    step.request_idx = shared.put(arrays.request_idx);
    step.slots = shared.put(arrays.slots);
    step.page_table = shared.put(arrays.page_table);
    step.history = shared.put(arrays.history);
    step.state_slots = shared.put(arrays.state_slots);
    return step;
  }

  // Logits and argmax of every row.
  void step(const StepArrays& arrays, lowlat_step_mode mode, How how,
            std::vector<float>& out_logits, std::vector<std::int32_t>& out_argmax) {
    const std::size_t rows = arrays.slots.size(), vocab = group.config().vocab;
    std::vector<float*> logits(group.tp_size());
    std::vector<std::int32_t*> argmax(group.tp_size());
    run(how, [&](lowlat_model* model, int r, Shared& shared, void* stream) {
      lowlat_step step = placed(arrays, mode, shared);
      step.logits = logits[r] = shared.take<float>(rows * vocab);
      step.argmax = argmax[r] = shared.take<std::int32_t>(rows);
      std::fill_n(logits[r], rows * vocab, std::nanf(""));
      std::fill_n(argmax[r], rows, -7);
      return (how == How::plain ? lowlat_plain_step_launch : lowlat_step_launch)(model, &step,
                                                                                 stream);
    });
    for (int r = 1; r < group.tp_size(); ++r) {
      CHECK(std::memcmp(logits[0], logits[r], rows * vocab * 4) == 0);
      CHECK(std::memcmp(argmax[0], argmax[r], rows * 4) == 0);
    }
    out_logits.assign(logits[0], logits[0] + rows * vocab);
    out_argmax.assign(argmax[0], argmax[0] + rows);
  }

  void draft(const StepArrays& arrays, const DraftArrays& own, How how,
             std::vector<std::int32_t>& out_tokens, std::vector<float>& out_logits) {
    const std::size_t batch = own.anchors.size(), vocab = group.config().vocab;
    std::vector<std::int32_t*> tokens(group.tp_size());
    std::vector<float*> logits(group.tp_size());
    run(how, [&](lowlat_model* model, int r, Shared& shared, void* stream) {
      lowlat_draft d{};
      d.struct_bytes = sizeof d;
      d.num_inject_rows = static_cast<std::int32_t>(arrays.slots.size());
      d.inject_slots = shared.put(arrays.slots);
      d.inject_positions = shared.put(arrays.positions);
      d.batch_size = static_cast<std::int32_t>(batch);
      d.page_table_stride = arrays.stride;
      d.anchors = shared.put(own.anchors);
      d.prefixes = shared.put(own.prefixes);
      d.slots = shared.put(own.slots);
      d.page_table = shared.put(arrays.page_table);
      d.temperature = shared.put(own.temperature);
      d.noise_row = shared.put(own.rows);
      d.noise_offset = shared.put(own.offsets);
      d.noise_key = 77;
      d.draft_tokens = tokens[r] = shared.take<std::int32_t>(5 * batch);
      d.draft_logits = logits[r] = shared.take<float>(5 * batch * vocab);
      return (how == How::plain ? lowlat_plain_draft_launch : lowlat_draft_launch)(model, &d,
                                                                                   stream);
    });
    for (int r = 1; r < group.tp_size(); ++r) {
      CHECK(std::memcmp(tokens[0], tokens[r], 5 * batch * 4) == 0);
      CHECK(std::memcmp(logits[0], logits[r], 5 * batch * vocab * 4) == 0);
    }
    out_tokens.assign(tokens[0], tokens[0] + 5 * batch);
    out_logits.assign(logits[0], logits[0] + 5 * batch * vocab);
  }

  TinyGroup group;

 protected:
  std::vector<Shared> shared_;
};

// What two sides gave, side by side.
struct Compared {
  std::vector<double> errors;  // rel_l2 of each row of logits
  int rows = 0, argmax_differs = 0, drafts = 0, drafts_differ = 0;

  // Rows in which an expert or an entry was chosen otherwise: scores within a rounding of each
  // other, which a random model of a few dozen channels has.
  int flips() const {
    return static_cast<int>(std::ranges::count_if(errors, [](double e) { return !(e < 0.03); }));
  }
  double median() {
    std::ranges::nth_element(errors, errors.begin() + errors.size() / 2);
    return errors[errors.size() / 2];
  }

  void logits(const std::vector<float>& got, const std::vector<float>& want, int vocab) {
    REQUIRE(got.size() == want.size());
    for (std::size_t first = 0; first < got.size(); first += vocab) {
      double error = 0.0, norm = 0.0;
      for (int v = 0; v < vocab; ++v) {
        const double g = got[first + v], w = want[first + v];
        error += (g - w) * (g - w);
        norm += w * w;
      }
      errors.push_back(std::sqrt(error / norm));
    }
  }
};

// A life of one or two requests on both sides: prompt in chunks, then verify, decode and drafts.
// Both sides get the same tokens, whatever they say.
inline Compared live(Side& got, Side& want, How how, int num_requests,
                     std::vector<float>* out_all) {
  const lowlat_model_config& config = got.group.config();
  const int vocab = config.vocab;
  const bool v4 = config.kind == LOWLAT_V4;
  Random random(11);
  std::vector<std::vector<std::int32_t>> all(num_requests);
  for (auto& tokens : all) {
    tokens.resize(300);
    for (auto& t : tokens) t = static_cast<std::int32_t>(random.bits() % 127);
  }
  Compared out;
  int length = 0;
  const auto take = [&](int count, lowlat_step_mode mode, How by) {
    StepArrays arrays(config);
    if (mode == LOWLAT_EXTEND) {
      for (int q = 0; q < num_requests; ++q) arrays.add(q, all[q], length, count);
    } else {
      for (int q = 0; q < num_requests; ++q) arrays.add(q, all[q], length, count);
    }
    std::vector<float> a, b;
    std::vector<std::int32_t> x, y;
    got.step(arrays, mode, by, a, x);
    want.step(arrays, mode, by == How::plain ? How::plain : How::resident, b, y);
    out.logits(a, b, vocab);
    if (out_all != nullptr) out_all->insert(out_all->end(), a.begin(), a.end());
    for (std::size_t i = 0; i < x.size(); ++i) out.argmax_differs += x[i] != y[i];
    out.rows += static_cast<int>(x.size());
    length += count;
    DraftArrays draft;
    for (int q = 0; q < num_requests; ++q) {
      draft.anchors.push_back(all[q][length]);
      draft.prefixes.push_back(length);
      draft.rows.push_back(q);
      draft.offsets.push_back(length);
      draft.temperature.push_back(q == 0 ? 0.0f : 0.7f);
      for (int i = 0; i < 5; ++i) {
        const int position = length + i;
        draft.slots.push_back(arrays.page_table[q * arrays.stride + position / arrays.page_size] *
                                  arrays.page_size +
                              position % arrays.page_size);
      }
    }
    std::vector<std::int32_t> s, t;
    got.draft(arrays, draft, by, s, a);
    want.draft(arrays, draft, by == How::plain ? How::plain : How::resident, t, b);
    if (out_all != nullptr) out_all->insert(out_all->end(), a.begin(), a.end());
    // A token that differs leads to other logits behind it, so only the first place is compared.
    for (std::size_t i = 0; i < s.size(); ++i) {
      out.drafts_differ += s[i] != t[i];
      ++out.drafts;
    }
  };
  const int per_request = 64 / num_requests;
  for (int left = v4 ? 120 : 21; left > 0; left -= per_request) {
    take(std::min(left, per_request - 1), LOWLAT_EXTEND, How::plain);
  }
  for (int i = 0; i < 4; ++i) {
    take(6, LOWLAT_TARGET_VERIFY, how);
    take(1, LOWLAT_DECODE, how);
  }
  return out;
}

}  // namespace lowlat::testing
