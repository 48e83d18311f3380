// The model behind the C ABI: persistent against plain, batches, chunks, ranks, refusals and
// faults.
#include <algorithm>
#include <initializer_list>
#include <map>

#include "check.hpp"
#include "host/tiny_group.hpp"

namespace {

using lowlat::testing::dense_tensor;
using lowlat::testing::Random;
using lowlat::testing::StepArrays;
using lowlat::testing::tiny_config;
using lowlat::testing::TinyGroup;

using Launch = lowlat_status (*)(lowlat_model*, const lowlat_step*, void*);

// A case for each kind of model.
#define TEST_BOTH(name)                       \
  void name(std::uint32_t kind);              \
  TEST_CASE(name##_v41) { name(LOWLAT_V41); } \
  TEST_CASE(name##_v4) { name(LOWLAT_V4); }   \
  void name(std::uint32_t kind)

// Tokens that V4's prompts have more, so that what follows them crosses a page and a whole block of
// ratio 128.
int lead(std::uint32_t kind) { return kind == LOWLAT_V4 ? 72 : 0; }

std::vector<std::int32_t> text(std::uint64_t seed, int n) {
  Random random(seed);
  std::vector<std::int32_t> out(n);
  for (auto& t : out) t = static_cast<std::int32_t>(random.bits() % 127);
  return out;
}

// Logits of a step, checked to be the same bits on every rank.
std::vector<float> logits_of(TinyGroup& group, const StepArrays& arrays, lowlat_step_mode mode,
                             Launch launch) {
  const int vocab = group.config().vocab;
  std::vector<std::vector<float>> logits(group.tp_size());
  std::vector<std::vector<std::int32_t>> argmax(group.tp_size());
  group.run([&](lowlat_model* model, int rank) {
    logits[rank].assign(arrays.token_ids.size() * vocab, std::nanf(""));
    argmax[rank].assign(arrays.token_ids.size(), -7);
    lowlat_step step = arrays.step(mode);
    step.logits = logits[rank].data();
    step.argmax = argmax[rank].data();
    return launch(model, &step, nullptr);
  });
  for (int rank = 1; rank < group.tp_size(); ++rank) {
    CHECK(std::memcmp(logits[0].data(), logits[rank].data(), logits[0].size() * 4) == 0);
    CHECK(argmax[0] == argmax[rank]);
  }
  for (std::size_t row = 0; row < argmax[0].size(); ++row) {
    const float* z = logits[0].data() + row * vocab;
    int best = 0;
    for (int v = 1; v < vocab; ++v) {
      if (z[v] > z[best]) best = v;
    }
    CHECK_EQ(argmax[0][row], best);
    CHECK(std::isfinite(z[0]));
  }
  return logits[0];
}

std::vector<float> rows_of(const std::vector<float>& logits, int vocab, int first, int count) {
  return {logits.begin() + std::int64_t{first} * vocab,
          logits.begin() + std::int64_t{first + count} * vocab};
}

// The whole text through the plain path in chunks; the last `keep` rows' logits.
std::vector<float> prefill(TinyGroup& group, const std::vector<std::int32_t>& all, int request,
                           int length, int chunk, int keep) {
  std::vector<float> kept;
  const int vocab = group.config().vocab;
  for (int start = 0; start < length; start += chunk) {
    const int count = std::min(chunk, length - start);
    StepArrays arrays(group.config());
    arrays.add(request, all, start, count);
    const auto logits = logits_of(group, arrays, LOWLAT_EXTEND, lowlat_plain_step_launch);
    const int from = std::max(0, length - keep - start);
    if (from < count) {
      const auto part = rows_of(logits, vocab, from, count - from);
      kept.insert(kept.end(), part.begin(), part.end());
    }
  }
  return kept;
}

// Rows of V4's rings that a later step may read, of a request of `length` tokens: where they begin
// in the pool and how wide they are, in floats.
template <class Visit>
void live_state_rows(TinyGroup& group, const StepArrays& request, const std::string& name,
                     int length, Visit visit) {
  const int layer = std::stoi(name.substr(name.rfind('.') + 1));
  const bool overlaps = group.config().layers[layer].ratio == 4;
  for (int p = 0; p < length; ++p) {
    if (overlaps) {
      const bool kept = p >= std::min(length / 4 * 4 - 4, length - 10) || p % 128 >= 124;
      const int width = name.find("index_state") != std::string::npos ? 512 : 2048;
      if (kept) visit((request.page_table[p / 128] * 16 + p % 16) * width, width);
    } else if (p >= std::min(length / 128 * 128, length - 130)) {
      visit((request.state_slots[0] * 256 + p % 256) * 1024, 1024);
    }
  }
}

// What steps have stored for one request of `length` tokens, bit for bit: pools and live state.
void check_same_memory(TinyGroup& a, TinyGroup& b, const StepArrays& request, int length) {
  int num_rows = 0;
  for (const std::string& name : a.pools()) {
    const auto &left = a.memory(0, name), &right = b.memory(0, name);
    if (a.config().kind == LOWLAT_V41 || name.find("state") == std::string::npos) {
      CHECK(left == right);
      continue;
    }
    live_state_rows(a, request, name, length, [&](int first, int width) {
      ++num_rows;
      CHECK(std::memcmp(&left[4 * first], &right[4 * first], 4 * width) == 0);
      CHECK(std::any_of(&left[4 * first], &left[4 * (first + width)], [](int v) { return v; }));
    });
  }
  CHECK_EQ(num_rows > 0, a.config().kind == LOWLAT_V4);
}

TEST_BOTH(chunks_of_a_prompt_and_single_rows_give_the_same_bits) {
  const int length = kind == LOWLAT_V4 ? 141 : 90;
  const auto all = text(1, length);
  TinyGroup whole(kind, 1), small(kind, 1), single(kind, 1);
  // No chunk ends where a page does: what the page keeps is not just its chunk's end.
  const auto a = prefill(whole, all, 0, length, 60, 40);
  const auto b = prefill(small, all, 0, length, 7, 40);
  std::vector<float> c;
  for (int i = 0; i < length; ++i) {
    StepArrays row(single.config());
    row.add(0, all, i, 1);
    const auto logits = logits_of(single, row, LOWLAT_DECODE, lowlat_step_launch);
    if (i >= length - 40) c.insert(c.end(), logits.begin(), logits.end());
  }
  CHECK_EQ(a.size(), std::size_t{40} * whole.config().vocab);
  CHECK(a == b);
  CHECK(a == c);
  StepArrays request(whole.config());
  request.add(0, all, 0, 1);
  check_same_memory(whole, small, request, length);
  check_same_memory(whole, single, request, length);
}

TEST_BOTH(persistent_and_plain_give_the_same_bits_on_every_number_of_ranks) {
  const int skip = lead(kind);
  const auto first = text(2, skip + 80), second = text(3, skip + 80);
  for (const int tp_size : {1, 2, 4}) {
    TinyGroup on(kind, tp_size), off(kind, tp_size);
    prefill(on, first, 0, skip + 53, 64, 1);
    prefill(on, second, 1, skip + 40, 64, 1);
    off.take_pools(on);
    // Decode one, verify two with a batch of both, decode again over what was verified.
    StepArrays decode(on.config()), verify = decode, again = decode;
    decode.add(0, first, skip + 53, 1);
    verify.add(0, first, skip + 54, 6);
    verify.add(1, second, skip + 40, 6);
    again.add(0, first, skip + 57, 1);  // three of six were kept
    again.add(1, second, skip + 46, 1);
    CHECK(logits_of(on, decode, LOWLAT_DECODE, lowlat_step_launch) ==
          logits_of(off, decode, LOWLAT_DECODE, lowlat_plain_step_launch));
    CHECK(logits_of(on, verify, LOWLAT_TARGET_VERIFY, lowlat_step_launch) ==
          logits_of(off, verify, LOWLAT_TARGET_VERIFY, lowlat_plain_step_launch));
    CHECK(logits_of(on, again, LOWLAT_DECODE, lowlat_step_launch) ==
          logits_of(off, again, LOWLAT_DECODE, lowlat_plain_step_launch));
  }
}

TEST_BOTH(a_row_does_not_depend_on_its_batch_on_padding_or_on_being_verified) {
  const int skip = lead(kind);
  const auto first = text(4, skip + 70), second = text(5, skip + 70);
  TinyGroup batched(kind, 2), alone(kind, 2), one_by_one(kind, 2);
  const int vocab = batched.config().vocab;
  prefill(batched, first, 0, skip + 50, 64, 1);
  prefill(batched, second, 1, skip + 33, 64, 1);
  alone.take_pools(batched);
  one_by_one.take_pools(batched);
  StepArrays both(batched.config()), only = both, padded = both;
  both.add(0, first, skip + 50, 6);
  both.add(1, second, skip + 33, 6);
  only.add(0, first, skip + 50, 6);
  padded.add(1, second, skip + 33, 6);
  padded.pad(6);
  const auto of_both = logits_of(batched, both, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  const auto of_only = logits_of(alone, only, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  const auto of_padded = logits_of(alone, padded, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  CHECK(rows_of(of_both, vocab, 0, 6) == of_only);
  CHECK(rows_of(of_both, vocab, 6, 6) == rows_of(of_padded, vocab, 0, 6));
  for (int i = 0; i < 6; ++i) {
    StepArrays row(alone.config());
    row.add(0, first, skip + 50 + i, 1);
    CHECK(logits_of(one_by_one, row, LOWLAT_DECODE, lowlat_step_launch) ==
          rows_of(of_only, vocab, i, 1));
  }
}

TEST_BOTH(what_a_rejected_draft_wrote_does_not_show) {
  // V4: the rejected rows finish a block of every ratio.
  const int prefix = kind == LOWLAT_V4 ? 123 : 47;
  const auto all = text(6, prefix + 30);
  auto wrong = all;
  for (int i = prefix + 1; i < prefix + 30; ++i) wrong[i] = (all[i] + 1) % 120;
  TinyGroup speculative(kind, 1), straight(kind, 1);
  prefill(speculative, all, 0, prefix, 64, 1);
  straight.take_pools(speculative);
  // The anchor is right, the five after it are not: only the anchor's row counts.
  StepArrays rejected(straight.config()), anchor = rejected;
  rejected.add(0, wrong, prefix, 6);
  logits_of(speculative, rejected, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  anchor.add(0, all, prefix, 1);
  logits_of(straight, anchor, LOWLAT_DECODE, lowlat_step_launch);
  for (const int start : {prefix + 1, prefix + 7}) {
    StepArrays next(straight.config());
    next.add(0, all, start, 6);
    CHECK(logits_of(speculative, next, LOWLAT_TARGET_VERIFY, lowlat_step_launch) ==
          logits_of(straight, next, LOWLAT_TARGET_VERIFY, lowlat_step_launch));
  }
}

TEST_BOTH(a_request_that_shares_pages_goes_on_as_if_it_had_filled_them) {
  const lowlat_model_config config = tiny_config(kind, 1, 0);
  const int shared_pages = kind == LOWLAT_V4 ? 1 : 2, shared = shared_pages * config.page_size;
  const auto owner = text(15, shared + 40);
  auto other = owner;
  for (int i = shared; i < shared + 40; ++i) other[i] = (owner[i] + 3) % 120;
  TinyGroup cached(kind, 1), fresh(kind, 1);
  // A chunk goes beyond the shared pages: they must keep their end for whoever goes on from it.
  prefill(cached, owner, 0, shared + 30, 50, 1);
  prefill(fresh, other, 1, shared, 64, 1);
  StepArrays on_shared(config), on_own = on_shared;
  on_shared.add(1, other, shared, 12, shared_pages);
  on_own.add(1, other, shared, 12);
  CHECK(logits_of(cached, on_shared, LOWLAT_EXTEND, lowlat_plain_step_launch) ==
        logits_of(fresh, on_own, LOWLAT_EXTEND, lowlat_plain_step_launch));
  // The owner does not notice.
  StepArrays owner_next(config);
  owner_next.add(0, owner, shared + 30, 6);
  TinyGroup alone(kind, 1);
  prefill(alone, owner, 0, shared + 30, 64, 1);
  CHECK(logits_of(cached, owner_next, LOWLAT_TARGET_VERIFY, lowlat_step_launch) ==
        logits_of(alone, owner_next, LOWLAT_TARGET_VERIFY, lowlat_step_launch));
}

TEST_CASE(a_hash_layer_takes_its_experts_from_the_token) {
  TinyGroup one(LOWLAT_V4, 1), other(LOWLAT_V4, 1);
  const int slots = one.config().experts_per_token;
  for (const char* name : {"layers.0.ffn.gate.tid2eid", "layers.1.ffn.gate.tid2eid"}) {
    auto* table = reinterpret_cast<std::int32_t*>(other.memory(0, name).data());
    for (int slot = 0; slot < slots; ++slot) {
      std::int32_t& expert = table[7 * slots + slot];
      expert = (expert + 1) % one.config().num_experts;
    }
  }
  StepArrays changed(one.config()), same = changed;
  changed.add(0, {7}, 0, 1);
  same.add(0, {9}, 0, 1);
  for (const auto launch : {lowlat_step_launch, lowlat_plain_step_launch}) {
    CHECK(logits_of(one, changed, LOWLAT_DECODE, launch) !=
          logits_of(other, changed, LOWLAT_DECODE, launch));
    CHECK(logits_of(one, same, LOWLAT_DECODE, launch) ==
          logits_of(other, same, LOWLAT_DECODE, launch));
  }
}

struct DraftOut {
  std::vector<std::int32_t> tokens;
  std::vector<float> logits;
  bool operator==(const DraftOut&) const = default;
};

DraftOut draft_of(TinyGroup& group, const StepArrays& last, int prefix0, int prefix1,
                  float temperature,
                  lowlat_status (*launch)(lowlat_model*, const lowlat_draft*, void*)) {
  const int vocab = group.config().vocab;
  const std::vector<std::int32_t> anchors = {5, 9}, prefixes = {prefix0, prefix1},
                                  noise_row = {0, 1};
  const std::vector<std::int64_t> noise_offset = {3, (std::int64_t{1} << 32) + 4};
  const std::vector<float> temps = {0.0f, temperature};
  std::vector<std::int32_t> slots;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 5; ++i) {
      const int position = prefixes[r] + i;
      slots.push_back(last.page_table[r * last.stride + position / last.page_size] *
                          last.page_size +
                      position % last.page_size);
    }
  }
  std::vector<DraftOut> out(group.tp_size());
  group.run([&](lowlat_model* model, int rank) {
    out[rank].tokens.assign(10, -7);
    out[rank].logits.assign(10 * vocab, std::nanf(""));
    lowlat_draft d{};
    d.struct_bytes = sizeof d;
    d.num_inject_rows = static_cast<int>(last.token_ids.size());
    d.inject_slots = last.slots.data();
    d.inject_positions = last.positions.data();
    d.batch_size = 2;
    d.page_table_stride = last.stride;
    d.anchors = anchors.data();
    d.prefixes = prefixes.data();
    d.slots = slots.data();
    d.page_table = last.page_table.data();
    d.temperature = temps.data();
    d.noise_row = noise_row.data();
    d.noise_offset = noise_offset.data();
    d.noise_key = 0x1234567890abcdefull;
    d.draft_tokens = out[rank].tokens.data();
    d.draft_logits = out[rank].logits.data();
    return launch(model, &d, nullptr);
  });
  for (int rank = 1; rank < group.tp_size(); ++rank) CHECK(out[rank] == out[0]);
  return out[0];
}

TEST_BOTH(drafts_agree_between_schedules_and_ranks_and_greedy_rows_follow_their_logits) {
  const auto first = text(7, 60), second = text(8, 60);
  for (const int tp_size : {1, 2}) {
    TinyGroup on(kind, tp_size), off(kind, tp_size);
    DraftOut out[2];
    for (int i = 0; i < 2; ++i) {
      TinyGroup& group = i == 0 ? on : off;
      StepArrays prompt(group.config());
      prompt.add(0, first, 0, 30);
      prompt.add(1, second, 0, 22);
      logits_of(group, prompt, LOWLAT_EXTEND, lowlat_plain_step_launch);
      out[i] = draft_of(group, prompt, 30, 22, 1.0f,
                        i == 0 ? lowlat_draft_launch : lowlat_plain_draft_launch);
    }
    CHECK(out[0] == out[1]);
    const int vocab = on.config().vocab;
    for (int place = 0; place < 5; ++place) {
      const float* z = out[0].logits.data() + place * vocab;
      int best = 0;
      for (int v = 1; v < vocab; ++v) {
        if (z[v] > z[best]) best = v;
      }
      CHECK_EQ(out[0].tokens[place], best);
      CHECK(0 <= out[0].tokens[5 + place] && out[0].tokens[5 + place] < vocab);
    }
  }
}

TEST_BOTH(context_is_injected_for_committed_rows_only) {
  const auto first = text(9, 60), second = text(10, 60);
  TinyGroup all_rows(kind, 1), some_rows(kind, 1), no_rows(kind, 1);
  DraftOut out[3];
  TinyGroup* groups[3] = {&all_rows, &some_rows, &no_rows};
  for (int i = 0; i < 3; ++i) {
    StepArrays prompt(all_rows.config());
    prompt.add(0, first, 0, 30);
    prompt.add(1, second, 0, 22);
    logits_of(*groups[i], prompt, LOWLAT_EXTEND, lowlat_plain_step_launch);
    if (i == 1) {  // rows before the window of position 30 are not read
      for (int t = 0; t < 30 - 16; ++t) prompt.slots[t] = -1;
    } else if (i == 2) {
      for (int t = 0; t < 30; ++t) prompt.slots[t] = -1;
    }
    out[i] = draft_of(*groups[i], prompt, 30, 22, 0.0f, lowlat_draft_launch);
  }
  CHECK(out[0] == out[1]);
  CHECK(out[0].logits != out[2].logits);
}

TEST_BOTH(features_are_taken_before_the_layer_or_after_it) {
  // The last target layer's ffn is behind V4.1's features and before V4's.
  const auto first = text(16, 20), second = text(17, 20);
  TinyGroup one(kind, 1), other(kind, 1);
  const std::string last = "layers." + std::to_string(one.config().num_layers - 1);
  for (auto& byte : other.memory(0, last + ".ffn_norm.weight")) byte ^= 1;
  StepArrays prompt(one.config());
  prompt.add(0, first, 0, 9);
  prompt.add(1, second, 0, 8);
  for (const auto launch : {lowlat_step_launch, lowlat_plain_step_launch}) {
    const bool plain = launch == lowlat_plain_step_launch;
    StepArrays rows(one.config());
    rows.add(0, first, 9, 6);
    rows.add(1, second, 8, 6);
    DraftOut out[2];
    for (int i = 0; i < 2; ++i) {
      TinyGroup& group = i == 0 ? one : other;
      if (!plain) logits_of(group, prompt, LOWLAT_EXTEND, lowlat_plain_step_launch);
      logits_of(group, rows, LOWLAT_TARGET_VERIFY, launch);
      out[i] = draft_of(group, rows, 15, 14, 0.0f,
                        plain ? lowlat_plain_draft_launch : lowlat_draft_launch);
    }
    CHECK_EQ(out[0].logits == out[1].logits, kind == LOWLAT_V41);
  }
}

TEST_BOTH(a_rank_that_does_not_launch_is_named_and_ends_every_rank_and_a_new_group_works) {
  const auto all = text(11, 20);
  {
    TinyGroup group(kind, 2, [](lowlat_model_config& c) { c.wait_budget_ns = 50'000'000; });
    StepArrays arrays(group.config());
    arrays.add(0, all, 0, 1);
    lowlat_step step = arrays.step(LOWLAT_DECODE);
    std::int32_t argmax = -7;
    step.argmax = &argmax;
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
    CHECK_EQ(lowlat_synchronize(group.model(0), 20'000'000'000ull), LOWLAT_FAULT);
    const std::string message = lowlat_last_error();
    CHECK(message.find("for rank 1 in embed_sum") != std::string::npos);
    lowlat_status_words words{};
    words.struct_bytes = sizeof words;
    CHECK_EQ(lowlat_status_read(group.model(0), &words), LOWLAT_OK);
    CHECK_EQ(words.state, 1u);
    CHECK_EQ(words.peer, 1);
    CHECK_EQ(words.epoch, 1u);
    CHECK_EQ(argmax, -7);
    // The other rank was told: it refuses instead of waiting for a peer that has gone.
    CHECK_EQ(lowlat_step_launch(group.model(1), &step, nullptr), LOWLAT_FAULT);
    CHECK_EQ(lowlat_plain_step_launch(group.model(0), &step, nullptr), LOWLAT_FAULT);
  }
  TinyGroup fresh(kind, 2);
  StepArrays arrays(fresh.config());
  arrays.add(0, all, 0, 1);
  logits_of(fresh, arrays, LOWLAT_DECODE, lowlat_step_launch);
}

TEST_BOTH(the_plain_path_names_a_missing_rank_too) {
  const auto all = text(12, 20);
  TinyGroup group(kind, 2, [](lowlat_model_config& c) { c.wait_budget_ns = 50'000'000; });
  StepArrays arrays(group.config());
  arrays.add(0, all, 0, 4);
  const lowlat_step step = arrays.step(LOWLAT_EXTEND);
  CHECK_EQ(lowlat_plain_step_launch(group.model(1), &step, nullptr), LOWLAT_OK);
  CHECK_EQ(lowlat_synchronize(group.model(1), 20'000'000'000ull), LOWLAT_FAULT);
  CHECK(std::string(lowlat_last_error()).find("for rank 0") != std::string::npos);
}

TEST_BOTH(an_abort_ends_a_step_that_waits_and_destroying_a_busy_rank_ends_its_peer) {
  const auto all = text(13, 20);
  StepArrays arrays(tiny_config(kind, 2, 0));
  arrays.add(0, all, 0, 1);
  const lowlat_step step = arrays.step(LOWLAT_DECODE);
  {
    TinyGroup group(kind, 2);  // a budget of a minute
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
    lowlat_abort(group.model(1));  // raised by the peer's host, seen by rank 0's wait
    CHECK_EQ(lowlat_synchronize(group.model(0), 20'000'000'000ull), LOWLAT_FAULT);
    CHECK(std::string(lowlat_last_error()).find("ended by the host") != std::string::npos);
  }
  {
    TinyGroup group(kind, 2);
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
  }  // must not take the budget
}

TEST_CASE(a_platform_that_is_not_in_the_library_is_refused_with_what_builds_it) {
  const lowlat_model_config config = tiny_config(LOWLAT_V41, 1, 0);
  const auto words_of = [&](const char* platform) -> std::string {
    lowlat_model* model = nullptr;
    CHECK_EQ(lowlat_model_create(platform, &config, &model), LOWLAT_UNSUPPORTED);
    return lowlat_last_error();
  };
  const std::string built = "\"; this library was built with: scalar";
  CHECK(words_of("abacus").starts_with("platform is \"abacus" + built));
#ifndef LOWLAT_HAVE_CUDA
  const std::string seen = words_of("nvidia:0:fused");
  CHECK(seen.starts_with("platform is \"nvidia:0:fused" + built));
  CHECK(seen.ends_with("; build it where nvcc is found (LOWLAT_CUDA=ON)"));
#endif
}

TEST_CASE(a_configuration_is_refused_with_every_reason_at_once) {
  lowlat_model_config config = tiny_config(LOWLAT_V41, 3, 0);
  config.page_size = 15;
  config.state_ring = 6;
  config.candidate_layer = 5;
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  const std::string reasons = lowlat_last_error();
  for (const char* needed :
       {"num_heads over tp_size 3 is 4", "o_groups over tp_size 3 is 4", "page_size is 15",
        "state_ring is 6", "layers[8].candidate_source is 6"}) {
    CHECK(reasons.find(needed) != std::string::npos);
  }
  CHECK(model == nullptr);
  // A number that is no layer is refused, not looked up.
  config = tiny_config(LOWLAT_V41, 1, 0);
  config.candidate_layer = config.layers[8].candidate_source = -100'000;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("layers[8].candidate_source is -100000") !=
        std::string::npos);
  config = tiny_config(LOWLAT_V41, 1, 0);
  config.hidden = 4096;
  config.max_rows = 200'000;  // 5 * 4096 * 200,000 elements do not fit 32 bits
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("max_rows is 200000; needed 2 .. 104857") !=
        std::string::npos);
  config = tiny_config(LOWLAT_V41, 1, 0);
  config.index_heads = 1 << 20;  // of 128 elements each
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("max_rows is 64; needed 2 .. 15") !=
        std::string::npos);
  config = tiny_config(LOWLAT_V41, 1, 0);
  CHECK_EQ(lowlat_model_create("tpu", &config, &model), LOWLAT_UNSUPPORTED);
  config.struct_bytes = 8;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
}

TEST_CASE(a_configuration_of_v4_is_refused_with_every_reason_at_once) {
  lowlat_model* model = nullptr;
  const auto refused = [&](const lowlat_model_config& config,
                           std::initializer_list<const char*> reasons) {
    CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
    const std::string seen = lowlat_last_error();
    for (const char* needed : reasons) CHECK(seen.find(needed) != std::string::npos);
    CHECK_EQ(std::count(seen.begin(), seen.end(), '\n') + 1, static_cast<long>(reasons.size()));
  };
  const lowlat_model_config good = tiny_config(LOWLAT_V4, 1, 0);
  lowlat_model_config config = good;
  config.page_size = 192;
  config.state_ring = 8;  // five drafts need twelve
  config.candidate_layer = 3;
  config.num_engrams = 1;
  config.layers[0].ratio = 2;
  config.layers[1].index_source = -1;
  config.layers[2].index_source = 2;
  config.layers[3].kv_source = 1;
  config.layers[3].engram = 0;
  config.layers[4].candidate_source = 1;
  config.layers[4].hash_gate = 2;
  refused(config,
          {"page_size is 192; needed a multiple of 128", "state_ring is 8; needed 12 .. 4096",
           "candidate_layer is 3", "num_engrams is 1; needed 0 .. 0",
           "layers[0].ratio is 2; needed 0, 4 or 128", "layers[0].kv_source is -1",
           "layers[1].index_source is -1", "layers[2].index_source is 2",
           "layers[3].kv_source is 1", "layers[3].engram is 0", "layers[4].candidate_source is 1",
           "layers[4].hash_gate is 2; needed 0 .. 1"});
  config = good;
  config.scale_block = 32;
  refused(config, {"scale_block is 32; these kernels need 128"});
  config = good;
  config.moe_intermediate = 64;
  refused(config, {"moe_intermediate over tp_size 1 is 64; needed a multiple of 128"});
  config = good;
  config.state_ring = 24;
  refused(config, {"state_ring is 24; needed a power of two"});
  config = tiny_config(LOWLAT_V41, 1, 0);
  config.layers[3].hash_gate = 1;
  config.state_ring = 4;
  refused(config,
          {"layers[3].hash_gate is 1; needed 0 .. 0", "state_ring is 4; needed 7 .. 65536"});
  config = good;
  config.kind = 3;
  config.scale_block = 32;
  refused(config, {"kind is 3; needed 1 .. 2"});
  // Without a draft eight rows are enough; without an index its fields are not looked at.
  config = good;
  config.num_draft_stages = 0;
  config.state_ring = 8;
  for (lowlat_layer& layer : config.layers) {
    if (layer.ratio == 4) layer = {0, -1, -1, -1, -1, 0};
  }
  config.index_heads = config.index_topk = config.index_dim = -5;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_OK);
  lowlat_model_destroy(model);
}

TEST_CASE(a_table_that_names_no_expert_is_refused_before_the_model_is_ready) {
  TinyGroup group(LOWLAT_V4, 1);  // for its tensors
  const lowlat_model_config config = group.config();
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_OK);
  for (int i = 0; i < lowlat_model_num_tensors(model); ++i) {
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    CHECK_EQ(lowlat_model_tensor(model, i, &spec), LOWLAT_OK);
    const lowlat_tensor tensor = dense_tensor(spec, group.memory(0, spec.name).data());
    CHECK_EQ(lowlat_model_bind(model, spec.name, &tensor), LOWLAT_OK);
  }
  auto& table = group.memory(0, "layers.1.ffn.gate.tid2eid");
  for (const std::int32_t wrong : {8, -1}) {
    const std::int32_t right = 3;
    std::memcpy(&table[4 * 11], &wrong, 4);
    CHECK_EQ(lowlat_model_ready(model), LOWLAT_INVALID);
    CHECK(std::string(lowlat_last_error()) ==
          "layers.1.ffn.gate.tid2eid[11] is " + std::to_string(wrong) + "; needed 0 .. 7");
    std::memcpy(&table[4 * 11], &right, 4);
  }
  CHECK_EQ(lowlat_model_ready(model), LOWLAT_OK);
  lowlat_model_destroy(model);
}

TEST_CASE(v4_lists_its_tensors_in_the_published_names) {
  lowlat_model_config config = tiny_config(LOWLAT_V4, 2, 0);
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_OK);
  std::map<std::string, std::string> seen;  // dtype, split dimension, shape
  for (int i = 0; i < lowlat_model_num_tensors(model); ++i) {
    lowlat_tensor_spec spec{};
    spec.struct_bytes = sizeof spec;
    CHECK_EQ(lowlat_model_tensor(model, i, &spec), LOWLAT_OK);
    std::string text = std::to_string(spec.dtype) + " " + std::to_string(spec.shard_dim);
    for (std::uint32_t d = 0; d < spec.ndim; ++d) text += " " + std::to_string(spec.shape[d]);
    seen[spec.name] = text;
  }
  lowlat_model_destroy(model);
  const auto has = [&](const char* name, lowlat_dtype dtype, const char* rest) {
    CHECK_EQ(seen[name], std::to_string(dtype) + " " + rest);
  };
  has("hc_head_fn", LOWLAT_F32, "-1 4 512");
  has("hc_head_base", LOWLAT_F32, "-1 4");
  has("hc_head_scale", LOWLAT_F32, "-1 1");
  has("mtp.2.hc_head_fn", LOWLAT_F32, "-1 4 512");
  has("layers.0.ffn.gate.tid2eid", LOWLAT_I32, "-1 128 3");
  has("layers.2.ffn.gate.bias", LOWLAT_F32, "-1 8");
  has("layers.1.attn.compressor.wkv.weight", LOWLAT_BF16, "-1 1024 128");
  has("layers.1.attn.compressor.wgate.weight", LOWLAT_BF16, "-1 1024 128");
  has("layers.1.attn.compressor.ape", LOWLAT_F32, "-1 4 1024");
  has("layers.1.attn.compressor.norm.weight", LOWLAT_BF16, "-1 512");
  has("layers.1.attn.indexer.wq_b.weight", LOWLAT_E4M3, "-1 256 128");
  has("layers.1.attn.indexer.wq_b.scale", LOWLAT_UE8M0, "-1 2 1");
  has("layers.1.attn.indexer.weights_proj.weight", LOWLAT_BF16, "-1 2 128");
  has("layers.1.attn.indexer.compressor.wkv.weight", LOWLAT_BF16, "-1 256 128");
  has("layers.1.attn.indexer.compressor.ape", LOWLAT_F32, "-1 4 256");
  has("layers.1.attn.indexer.compressor.norm.weight", LOWLAT_BF16, "-1 128");
  has("layers.2.attn.compressor.wgate.weight", LOWLAT_BF16, "-1 512 128");
  has("layers.2.attn.compressor.ape", LOWLAT_F32, "-1 128 512");
  has("layers.1.ffn.experts.w1.weight", LOWLAT_FP4X2, "1 8 128 64");
  has("layers.1.ffn.shared_experts.w2.scale", LOWLAT_UE8M0, "1 1 1");
  has("mtp.2.markov_head.markov_w1.weight", LOWLAT_BF16, "-1 128 16");
  has("mtp.2.markov_head.markov_w2.weight", LOWLAT_BF16, "0 64 16");
  has("kv.swa.0", LOWLAT_U8, "-1 8 74880");
  has("kv.extra.1", LOWLAT_U8, "-1 8 19008");      // 32 entries of 584 bytes, to a multiple of 576
  has("kv.extra.2", LOWLAT_U8, "-1 8 1152");       // one entry
  has("kv.index.1", LOWLAT_U8, "-1 4 8448");       // 8 * 32 rows, 64 a page
  has("kv.state.1", LOWLAT_F32, "-1 8 16 2048");   // a ring a page
  has("kv.state.2", LOWLAT_F32, "-1 2 256 1024");  // a ring a request
  has("kv.index_state.1", LOWLAT_F32, "-1 8 16 512");
  for (const char* name :
       {"layers.0.ffn.gate.bias", "layers.2.ffn.gate.bias_vl", "layers.2.attn.indexer.wq_b.weight",
        "kv.index.2", "kv.index_state.2", "kv.state.0", "kv.extra.0", "mtp.0.ffn.gate.tid2eid",
        "mtp.1.hc_head_fn", "layers.1.attn.indexer.wk.weight"}) {
    CHECK_EQ(seen.count(name), 0u);
  }
}

TEST_CASE(what_is_missing_before_ready_is_listed_and_wrong_tensors_are_named) {
  lowlat_model_config config = tiny_config(LOWLAT_V41, 2, 0);
  lowlat_model* model = nullptr;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_OK);
  CHECK_EQ(lowlat_model_ready(model), LOWLAT_INVALID);
  const std::string missing = lowlat_last_error();
  CHECK(missing.find("tensor embed.weight is not bound") != std::string::npos);
  CHECK(missing.find("tensor mtp.2.markov_head.head.weight is not bound") != std::string::npos);
  CHECK(missing.find("rank 1's memory is not imported") != std::string::npos);

  std::vector<std::uint16_t> memory(128 * 64);
  lowlat_tensor tensor{};
  tensor.struct_bytes = sizeof tensor;
  tensor.dtype = LOWLAT_BF16;
  tensor.ndim = 2;
  tensor.shape[0] = 128;
  tensor.shape[1] = 64;
  tensor.stride[0] = 64;
  tensor.stride[1] = 1;
  tensor.data = memory.data();
  const auto refused = [&](const char* name, const char* needed) {
    CHECK_EQ(lowlat_model_bind(model, name, &tensor), LOWLAT_INVALID);
    CHECK(std::string(lowlat_last_error()).find(needed) != std::string::npos);
  };
  refused("embed.weight", "shape is [128, 64]; needed [64, 64] on rank 0 of 2");
  refused("embed.wait", "no such tensor");
  tensor.shape[0] = 64;
  tensor.stride[0] = 65;
  refused("embed.weight", "stride[0] is 65");
  tensor.stride[0] = 64;
  tensor.dtype = LOWLAT_F32;
  refused("embed.weight", "dtype is f32; needed bf16");
  tensor.dtype = LOWLAT_BF16;
  CHECK_EQ(lowlat_model_bind(model, "embed.weight", &tensor), LOWLAT_OK);
  lowlat_model_destroy(model);
}

TEST_CASE(peer_handles_of_another_kind_rank_shape_or_life_are_refused) {
  lowlat_model_config config = tiny_config(LOWLAT_V41, 2, 0);
  lowlat_model *zero = nullptr, *one = nullptr, *other = nullptr;
  CHECK_EQ(lowlat_model_create("scalar", &config, &zero), LOWLAT_OK);
  config.tp_rank = 1;
  CHECK_EQ(lowlat_model_create("scalar", &config, &one), LOWLAT_OK);
  config.widths[0] = 3;
  config.widths[1] = 4;
  CHECK_EQ(lowlat_model_create("scalar", &config, &other), LOWLAT_OK);
  CHECK(lowlat_model_catalogue_digest(zero) == lowlat_model_catalogue_digest(one));
  CHECK(lowlat_model_catalogue_digest(zero) != lowlat_model_catalogue_digest(other));
  lowlat_peer_handle handle;
  const auto refused = [&](const char* needed) {
    CHECK_EQ(lowlat_peer_import(zero, 1, &handle), LOWLAT_INVALID);
    CHECK(std::string(lowlat_last_error()).find(needed) != std::string::npos);
  };
  CHECK_EQ(lowlat_peer_export(zero, &handle), LOWLAT_OK);
  refused("it is rank 0's");
  CHECK_EQ(lowlat_peer_export(other, &handle), LOWLAT_OK);
  refused("another set of widths");
  CHECK_EQ(lowlat_peer_export(one, &handle), LOWLAT_OK);
  CHECK_EQ(lowlat_peer_import(zero, 0, &handle), LOWLAT_INVALID);
  CHECK_EQ(lowlat_peer_import(zero, 1, &handle), LOWLAT_OK);
  lowlat_peer_handle garbage = handle;
  garbage.bytes[0] ^= 1;
  std::swap(handle, garbage);
  refused("no peer handle");
  lowlat_model_destroy(zero);
  CHECK_EQ(lowlat_model_create("scalar", &config, &zero),
           LOWLAT_OK);  // rank 1 of another width set
  lowlat_model_destroy(zero);
  lowlat_model_destroy(one);
  config = tiny_config(LOWLAT_V41, 2, 0);
  CHECK_EQ(lowlat_model_create("scalar", &config, &zero), LOWLAT_OK);
  std::swap(handle, garbage);
  refused("its model was destroyed");
  lowlat_model_destroy(zero);
  lowlat_model_destroy(other);
}

TEST_CASE(peers_are_sealed_when_the_model_is_ready) {
  TinyGroup group(LOWLAT_V41, 2), other(LOWLAT_V41, 2);
  lowlat_peer_handle handle;
  CHECK_EQ(lowlat_peer_export(other.model(1), &handle), LOWLAT_OK);
  CHECK_EQ(lowlat_peer_import(group.model(0), 1, &handle), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("after lowlat_model_ready") != std::string::npos);
}

TEST_CASE(steps_with_wrong_values_are_refused_before_anything_runs) {
  const auto all = text(14, 40);
  TinyGroup group(LOWLAT_V41, 1);
  const auto refused = [&](StepArrays& arrays, lowlat_step_mode mode, lowlat_status status,
                           const char* needed) {
    const lowlat_step step = arrays.step(mode);
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), status);
    CHECK(std::string(lowlat_last_error()).find(needed) != std::string::npos);
  };
  StepArrays good(group.config());
  good.add(0, all, 0, 6);
  refused(good, LOWLAT_EXTEND, LOWLAT_UNSUPPORTED, "plain path");
  StepArrays width(group.config());
  width.add(0, all, 0, 5);
  refused(width, LOWLAT_TARGET_VERIFY, LOWLAT_UNSUPPORTED, "5 rows were not built");
  auto bad = good;
  bad.token_ids[2] = 128;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "token_ids[2] is 128; needed 0 .. 127");
  bad = good;
  bad.slots[3] += 1;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "slots[3]");
  bad = good;
  bad.positions[4] = 9;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "row 4");
  bad = good;
  bad.slots[3] = -1;
  bad.positions[3] = 8;
  bad.positions[4] = 9;  // a row that pads hides no gap
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "row 4");
  bad = good;
  bad.stride = 1000;
  bad.page_table.assign(1000, bad.page_table[0]);
  for (int i = 0; i < 6; ++i) bad.positions[i] += 256;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "positions[0] is 256; needed 0 .. 255");
  bad = good;
  bad.page_table[5] = 99;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "page_table[5] is 99");
  bad = good;
  bad.state_slots[0] = 2;
  refused(bad, LOWLAT_TARGET_VERIFY, LOWLAT_INVALID, "state_slots[0] is 2");
  int stream = 0;
  const lowlat_step step = good.step(LOWLAT_TARGET_VERIFY);
  CHECK_EQ(lowlat_step_launch(group.model(0), &step, &stream), LOWLAT_INVALID);
}

}  // namespace
