// The model behind the C ABI: persistent against plain, batches, chunks, ranks, refusals and
// faults.
#include "check.hpp"
#include "host/tiny_group.hpp"

namespace {

using lowlat::testing::Random;
using lowlat::testing::StepArrays;
using lowlat::testing::tiny_config;
using lowlat::testing::TinyGroup;

using Launch = lowlat_status (*)(lowlat_model*, const lowlat_step*, void*);

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
    StepArrays arrays;
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

TEST_CASE(chunks_of_a_prompt_give_the_same_bits) {
  const auto all = text(1, 90);
  TinyGroup whole(1), small(1);
  const auto a = prefill(whole, all, 0, 90, 64, 40);
  const auto b = prefill(small, all, 0, 90, 7, 40);
  CHECK_EQ(a.size(), b.size());
  CHECK(a == b);
}

TEST_CASE(persistent_and_plain_give_the_same_bits_on_every_number_of_ranks) {
  const auto first = text(2, 80), second = text(3, 80);
  for (const int tp_size : {1, 2, 4}) {
    TinyGroup on(tp_size), off(tp_size);
    for (TinyGroup* group : {&on, &off}) {
      prefill(*group, first, 0, 53, 32, 1);
      prefill(*group, second, 1, 40, 32, 1);
    }
    // Decode one, verify two with a batch of both, decode again over what was verified.
    StepArrays decode, verify, again;
    decode.add(0, first, 53, 1);
    verify.add(0, first, 54, 6);
    verify.add(1, second, 40, 6);
    again.add(0, first, 57, 1);  // three of six were kept
    again.add(1, second, 46, 1);
    CHECK(logits_of(on, decode, LOWLAT_DECODE, lowlat_step_launch) ==
          logits_of(off, decode, LOWLAT_DECODE, lowlat_plain_step_launch));
    CHECK(logits_of(on, verify, LOWLAT_TARGET_VERIFY, lowlat_step_launch) ==
          logits_of(off, verify, LOWLAT_TARGET_VERIFY, lowlat_plain_step_launch));
    CHECK(logits_of(on, again, LOWLAT_DECODE, lowlat_step_launch) ==
          logits_of(off, again, LOWLAT_DECODE, lowlat_plain_step_launch));
  }
}

TEST_CASE(a_row_does_not_depend_on_its_batch_on_padding_or_on_being_verified) {
  const auto first = text(4, 70), second = text(5, 70);
  const int vocab = tiny_config(1, 0).vocab;
  TinyGroup batched(2), alone(2), one_by_one(2);
  for (TinyGroup* group : {&batched, &alone, &one_by_one}) {
    prefill(*group, first, 0, 50, 64, 1);
    prefill(*group, second, 1, 33, 64, 1);
  }
  StepArrays both, only, padded;
  both.add(0, first, 50, 6);
  both.add(1, second, 33, 6);
  only.add(0, first, 50, 6);
  padded.add(1, second, 33, 6);
  padded.pad(6);
  const auto of_both = logits_of(batched, both, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  const auto of_only = logits_of(alone, only, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  const auto of_padded = logits_of(alone, padded, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  CHECK(rows_of(of_both, vocab, 0, 6) == of_only);
  CHECK(rows_of(of_both, vocab, 6, 6) == rows_of(of_padded, vocab, 0, 6));
  for (int i = 0; i < 6; ++i) {
    StepArrays row;
    row.add(0, first, 50 + i, 1);
    CHECK(logits_of(one_by_one, row, LOWLAT_DECODE, lowlat_step_launch) ==
          rows_of(of_only, vocab, i, 1));
  }
}

TEST_CASE(what_a_rejected_draft_wrote_does_not_show) {
  const auto all = text(6, 70);
  auto wrong = all;
  for (int i = 48; i < 70; ++i) wrong[i] = (all[i] + 1) % 120;
  TinyGroup speculative(1), straight(1);
  prefill(speculative, all, 0, 47, 64, 1);
  prefill(straight, all, 0, 47, 64, 1);
  // Anchor at 47 is right, 48 .. 52 are not: only the anchor's row counts.
  StepArrays rejected;
  rejected.add(0, wrong, 47, 6);
  logits_of(speculative, rejected, LOWLAT_TARGET_VERIFY, lowlat_step_launch);
  StepArrays anchor;
  anchor.add(0, all, 47, 1);
  logits_of(straight, anchor, LOWLAT_DECODE, lowlat_step_launch);
  StepArrays next;
  next.add(0, all, 48, 6);
  CHECK(logits_of(speculative, next, LOWLAT_TARGET_VERIFY, lowlat_step_launch) ==
        logits_of(straight, next, LOWLAT_TARGET_VERIFY, lowlat_step_launch));
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
      slots.push_back(last.page_table[r * last.stride + position / 16] * 16 + position % 16);
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

TEST_CASE(drafts_agree_between_schedules_and_ranks_and_greedy_rows_follow_their_logits) {
  const auto first = text(7, 60), second = text(8, 60);
  for (const int tp_size : {1, 2}) {
    TinyGroup on(tp_size), off(tp_size);
    DraftOut out[2];
    for (int i = 0; i < 2; ++i) {
      TinyGroup& group = i == 0 ? on : off;
      StepArrays prompt;
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

TEST_CASE(context_is_injected_for_committed_rows_only) {
  const auto first = text(9, 60), second = text(10, 60);
  TinyGroup all_rows(1), some_rows(1), no_rows(1);
  DraftOut out[3];
  TinyGroup* groups[3] = {&all_rows, &some_rows, &no_rows};
  for (int i = 0; i < 3; ++i) {
    StepArrays prompt;
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

TEST_CASE(a_rank_that_does_not_launch_is_named_and_ends_every_rank_and_a_new_group_works) {
  const auto all = text(11, 20);
  {
    TinyGroup group(3 - 1, [](lowlat_model_config& c) { c.wait_budget_ns = 50'000'000; });
    StepArrays arrays;
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
  TinyGroup fresh(2);
  StepArrays arrays;
  arrays.add(0, all, 0, 1);
  logits_of(fresh, arrays, LOWLAT_DECODE, lowlat_step_launch);
}

TEST_CASE(the_plain_path_names_a_missing_rank_too) {
  const auto all = text(12, 20);
  TinyGroup group(2, [](lowlat_model_config& c) { c.wait_budget_ns = 50'000'000; });
  StepArrays arrays;
  arrays.add(0, all, 0, 4);
  const lowlat_step step = arrays.step(LOWLAT_EXTEND);
  CHECK_EQ(lowlat_plain_step_launch(group.model(1), &step, nullptr), LOWLAT_OK);
  CHECK_EQ(lowlat_synchronize(group.model(1), 20'000'000'000ull), LOWLAT_FAULT);
  CHECK(std::string(lowlat_last_error()).find("for rank 0") != std::string::npos);
}

TEST_CASE(an_abort_ends_a_step_that_waits_and_destroying_a_busy_rank_ends_its_peer) {
  const auto all = text(13, 20);
  StepArrays arrays;
  arrays.add(0, all, 0, 1);
  const lowlat_step step = arrays.step(LOWLAT_DECODE);
  {
    TinyGroup group(2);  // a budget of a minute
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
    lowlat_abort(group.model(1));  // raised by the peer's host, seen by rank 0's wait
    CHECK_EQ(lowlat_synchronize(group.model(0), 20'000'000'000ull), LOWLAT_FAULT);
    CHECK(std::string(lowlat_last_error()).find("ended by the host") != std::string::npos);
  }
  {
    TinyGroup group(2);
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), LOWLAT_OK);
  }  // must not take the budget
}

TEST_CASE(a_configuration_is_refused_with_every_reason_at_once) {
  lowlat_model_config config = tiny_config(3, 0);
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
  config = tiny_config(1, 0);
  config.candidate_layer = config.layers[8].candidate_source = -100'000;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("layers[8].candidate_source is -100000") !=
        std::string::npos);
  config = tiny_config(1, 0);
  config.hidden = 4096;
  config.max_rows = 200'000;  // 5 * 4096 * 200,000 elements do not fit 32 bits
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("max_rows is 200000; needed 2 .. 104857") !=
        std::string::npos);
  config = tiny_config(1, 0);
  CHECK_EQ(lowlat_model_create("tpu", &config, &model), LOWLAT_UNSUPPORTED);
  config.struct_bytes = 8;
  CHECK_EQ(lowlat_model_create("scalar", &config, &model), LOWLAT_INVALID);
}

TEST_CASE(what_is_missing_before_ready_is_listed_and_wrong_tensors_are_named) {
  lowlat_model_config config = tiny_config(2, 0);
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
  lowlat_model_config config = tiny_config(2, 0);
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
  config = tiny_config(2, 0);
  CHECK_EQ(lowlat_model_create("scalar", &config, &zero), LOWLAT_OK);
  std::swap(handle, garbage);
  refused("its model was destroyed");
  lowlat_model_destroy(zero);
  lowlat_model_destroy(other);
}

TEST_CASE(peers_are_sealed_when_the_model_is_ready) {
  TinyGroup group(2), other(2);
  lowlat_peer_handle handle;
  CHECK_EQ(lowlat_peer_export(other.model(1), &handle), LOWLAT_OK);
  CHECK_EQ(lowlat_peer_import(group.model(0), 1, &handle), LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("after lowlat_model_ready") != std::string::npos);
}

TEST_CASE(steps_with_wrong_values_are_refused_before_anything_runs) {
  const auto all = text(14, 40);
  TinyGroup group(1);
  const auto refused = [&](StepArrays& arrays, lowlat_step_mode mode, lowlat_status status,
                           const char* needed) {
    const lowlat_step step = arrays.step(mode);
    CHECK_EQ(lowlat_step_launch(group.model(0), &step, nullptr), status);
    CHECK(std::string(lowlat_last_error()).find(needed) != std::string::npos);
  };
  StepArrays good;
  good.add(0, all, 0, 6);
  refused(good, LOWLAT_EXTEND, LOWLAT_UNSUPPORTED, "plain path");
  StepArrays width;
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
