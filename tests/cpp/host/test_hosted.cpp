// A model inside another engine beside one that keeps its caches: the same weights in the engine's
// layouts, caches at other places, the same bits.
#include <array>
#include <numeric>

#include "host/tiny_hosted.hpp"

namespace {

using namespace lowlat::testing;

void finish(Hosted& hosted, int tp_size) {
  for (int r = 0; r < tp_size; ++r) {
    TinyGroup::must(lowlat_synchronize(hosted.model(r), 100'000'000'000ull));
  }
}

bool same_bytes(const std::uint8_t* a, const std::uint8_t* b, std::size_t n) {
  return std::memcmp(a, b, n) == 0;
}

// Every row of our pools is in the engine's, where it keeps it.
void check_pools(TinyGroup& own, Hosted& hosted, int r) {
  const lowlat_model_config& c = own.config();
  for (const std::string& name : own.pools()) {
    if (name.find("mtp.") == 0) continue;
    const std::size_t dot = name.rfind('.');
    const std::string kind = name.substr(0, dot);
    const int ratio = c.layers[std::stoi(name.substr(dot + 1))].ratio;
    const auto& mine = own.memory(r, name);
    const auto& theirs = hosted.pool(r, name);
    bool equal = true;
    if (kind == "kv.swa" || kind == "kv.extra") {
      const std::size_t bytes = mine.size() / c.num_pages;
      for (int p = 0; p < c.num_pages; ++p) {
        const std::size_t place = kind == "kv.swa" ? window_page(p) : p + kFirstPage;
        equal &= same_bytes(&mine[p * bytes], &theirs[place * bytes], bytes);
      }
    } else if (kind == "kv.index") {
      const int entries = c.page_size / ratio, data = c.kind == LOWLAT_V4 ? 128 : 64;
      const std::size_t page = 64 * (data + 4);
      for (int slot = 0; slot < c.num_pages * entries; ++slot) {
        const int other = slot + kFirstPage * entries;
        if (hosted.is_split()) {
          const auto& scales = hosted.pool(r, "kv.index_scales." + name.substr(dot + 1));
          const int at = other % 64, first = slot / 64 * static_cast<int>(page);
          for (int g = 0; g < 4; ++g) {
            equal &= same_bytes(&mine[first + slot % 64 * data + 16 * g],
                                &theirs[(other / 64 * 4 + g) * 64 * 16 + at * 16], 16);
            equal &= mine[first + 64 * data + slot % 64 * 4 + g] ==
                     scales[(other / 64 * 4 + g) * 64 + at % 16 * 4 + at / 16];
          }
          continue;
        }
        const auto row = [&](int s) { return s / 64 * page + s % 64 * data; };
        const auto scale = [&](int s) { return s / 64 * page + 64 * data + s % 64 * 4; };
        equal &= same_bytes(&mine[row(slot)], &theirs[row(other)], data);
        equal &= same_bytes(&mine[scale(slot)], &theirs[scale(other)], 4);
      }
    } else {
      const bool paged = c.kind == LOWLAT_V4 && ratio == 4;
      const int rings = paged ? c.num_pages : c.max_batch;
      const std::size_t bytes = mine.size() / rings;
      for (int i = 0; i < rings; ++i) {
        const std::size_t place = paged ? window_page(i) : request_row(i);
        equal &= same_bytes(&mine[i * bytes], &theirs[place * bytes], bytes);
      }
    }
    CHECK(equal);
    if (!equal) std::printf("pool %s differs on rank %d\n", name.c_str(), r);
  }
}

void compare(std::uint32_t kind, int tp_size, bool marlin, bool split = false) {
  TinyGroup own(kind, tp_size, [](lowlat_model_config& c) { c = edited(c); });
  const lowlat_model_config& c = own.config();
  // A unit head: logits are hidden states.
  for (int r = 0; r < tp_size; ++r) {
    auto& head = own.memory(r, "head.weight");
    std::fill(head.begin(), head.end(), std::uint8_t{0});
    const int local = c.vocab / tp_size;
    for (int v = 0; v < local && r * local + v < c.hidden; ++v) {
      const std::uint16_t one = 0x3f80;
      std::memcpy(&head[2 * (static_cast<std::size_t>(v) * c.hidden + r * local + v)], &one, 2);
    }
  }
  Hosted hosted(own, marlin, split);
  Random random(kind * 100 + tp_size);
  std::vector<std::vector<std::int32_t>> texts(2);
  for (auto& text : texts) {
    for (int i = 0; i < 200; ++i) text.push_back(static_cast<int>(random.bits() % 120));
  }
  texts[0][7] = c.image_token >= 0 ? c.image_token : 7;
  std::array<int, 2> length{};
  const auto run = [&](int rows, bool second, lowlat_step_mode mode) {
    StepArrays arrays(c);
    arrays.add(0, texts[0], length[0], rows);
    second ? arrays.add(1, texts[1], length[1], rows) : arrays.pad(rows);
    std::vector<HostedArrays> theirs;
    theirs.reserve(tp_size);
    std::vector<std::vector<float>> logits(tp_size);
    own.run([&](lowlat_model* model, int r) {
      lowlat_step step = arrays.step(mode);
      logits[r].assign(static_cast<std::size_t>(step.num_rows) * c.vocab, 0.0f);
      step.logits = logits[r].data();
      return lowlat_step_launch(model, &step, nullptr);
    });
    for (int r = 0; r < tp_size; ++r) {
      theirs.emplace_back(arrays, c, mode);
      TinyGroup::must(lowlat_hosted_step_launch(hosted.model(r), &theirs[r].step, nullptr));
    }
    finish(hosted, tp_size);
    const int num_rows = static_cast<int>(arrays.token_ids.size());
    for (int r = 0; r < tp_size; ++r) {
      bool equal = true, finite = true, mean = true;
      for (int t = 0; t < num_rows; ++t) {
        for (int h = 0; h < c.hidden; ++h) {
          const float value = bf16(theirs[r].hidden[t * c.hidden + h]);
          finite &= std::isfinite(value);
          if (arrays.slots[t] >= 0) {
            equal &= value == logits[r][static_cast<std::size_t>(t) * c.vocab + h];
          }
          // V4's last feature is the mean of the streams after the last layer.
          if (kind != LOWLAT_V4) continue;
          float sum = 0.0f;
          for (int k = 0; k < 4; ++k) {
            sum += bf16(theirs[r].streams[(t * 4 + k) * c.hidden + h]);
          }
          const float feature = bf16(theirs[r].features[(t * 3 + 2) * c.hidden + h]);
          mean &= std::abs(feature - sum / 4) <= std::abs(sum) * 0x1p-9f;
        }
      }
      for (const std::uint16_t value : theirs[r].features) finite &= std::isfinite(bf16(value));
      CHECK(equal);
      CHECK(finite);
      CHECK(mean);
      CHECK(theirs[r].hidden == theirs[0].hidden);
      CHECK(theirs[r].features == theirs[0].features);
      check_pools(own, hosted, r);
    }
    const int accepted = rows == 1 ? 1 : 1 + static_cast<int>(random.bits() % rows);
    length[0] += accepted;
    if (second) length[1] += accepted;
    // A verify step's acceptance is the engine's to note; a decode step has noted its token.
    for (int r = 0; r < tp_size && c.num_engrams > 0; ++r) {
      for (int request = 0; request < 2; ++request) {
        for (int i = 0; i < 3; ++i) {
          const int position = length[request] - 3 + i;
          const std::int32_t token = position >= 0 ? texts[request][position] : 0;
          std::int32_t& kept = hosted.history(r)[request_row(request) * 3 + i];
          if (mode == LOWLAT_DECODE) {
            CHECK(kept == token);
          } else {
            // An image's place holds a number beyond the vocabulary.
            kept = token == c.image_token ? 1'000'000 : token;
          }
        }
      }
    }
  };
  const int context = kind == LOWLAT_V4 ? 140 : 60;
  for (int i = 0; length[0] < context; ++i) run(6, i % 4 != 2, LOWLAT_TARGET_VERIFY);
  for (int i = 0; i < 6; ++i) run(1, i != 2, LOWLAT_DECODE);
}

TEST_CASE(hosted_v41_is_the_models_own_step) { compare(LOWLAT_V41, 1, true); }
TEST_CASE(hosted_v41_ranks_agree) { compare(LOWLAT_V41, 2, true); }
TEST_CASE(hosted_v41_reads_split_index_pages) { compare(LOWLAT_V41, 1, false, true); }
TEST_CASE(hosted_v4_is_the_models_own_step) { compare(LOWLAT_V4, 1, true); }
TEST_CASE(hosted_v4_takes_the_checkpoints_experts) { compare(LOWLAT_V4, 2, false); }

// A draft's layers and proposals behind the engine's context keys, beside the model's own draft:
// the same tokens, logits and keys. A request of the middle pads.
void compare_drafts(std::uint32_t kind, int tp_size, bool marlin) {
  TinyGroup own(kind, tp_size, [](lowlat_model_config& c) { c = edited(c); });
  const lowlat_model_config& c = own.config();
  Hosted hosted(own, marlin, false, Part::draft);
  Random random(kind * 10 + tp_size);
  std::vector<std::vector<std::int32_t>> texts(2);
  for (auto& text : texts) {
    for (int i = 0; i < 200; ++i) text.push_back(static_cast<int>(random.bits() % 120));
  }
  const int block = c.draft_block, window = c.window + block, stride = window + 3;
  const std::size_t page_bytes = own.memory(0, "mtp.0.kv.swa").size() / c.num_pages;
  const auto each_pool = [&](auto&& visit) {
    for (int r = 0; r < tp_size; ++r) {
      for (int stage = 0; stage < c.num_draft_stages; ++stage) {
        const std::string name = "mtp." + std::to_string(stage) + ".kv.swa";
        for (int p = 0; p < c.num_pages; ++p) {
          visit(&own.memory(r, name)[p * page_bytes],
                &hosted.host_pool(r, name)[window_page(p) * page_bytes]);
        }
      }
    }
  };
  const auto window_slot = [&](int slot) {
    return window_page(slot / c.page_size) * c.page_size + slot % c.page_size;
  };
  std::array<int, 2> length{};
  for (int turn = 0; turn < 9; ++turn) {
    const bool second = turn % 3 != 1;
    StepArrays arrays(c);
    arrays.add(0, texts[0], length[0], 6);
    second ? arrays.add(1, texts[1], length[1], 6) : arrays.pad(6);
    own.run([&](lowlat_model* model, int) {
      lowlat_step step = arrays.step(LOWLAT_TARGET_VERIFY);
      step.num_logit_rows = 0;
      return lowlat_step_launch(model, &step, nullptr);
    });
    length[0] += 6;
    if (second) length[1] += 6;
    const std::vector<std::int32_t> anchors = {5, 9}, noise_row = {0, 1};
    const std::vector<std::int32_t> prefixes = {length[0], second ? length[1] : 0};
    const std::int64_t offset = (std::int64_t{1} << 32) + turn;
    const std::vector<std::int64_t> offsets(2, offset), wide_anchors = {5, 9};
    const std::vector<float> temperatures = {turn % 2 == 0 ? 0.0f : 0.9f, 1.3f};
    std::vector<std::int32_t> slots, key_slots, seen;
    std::vector<std::int64_t> ids, positions;
    for (int request = 0; request < 2; ++request) {
      const auto slot_at = [&](int position) {
        return arrays.page_table[request * arrays.stride + position / c.page_size] * c.page_size +
               position % c.page_size;
      };
      const int prefix = prefixes[request], first = std::max(prefix - c.window, 0);
      const bool pads = request == 1 && !second;
      std::vector<std::int32_t> row;
      for (int p = first; !pads && p < prefix + block; ++p) row.push_back(window_slot(slot_at(p)));
      row.resize(stride, -1);
      for (int i = 0; i < block; ++i) {
        slots.push_back(pads ? -1 : slot_at(prefix + i));
        key_slots.push_back(pads ? i : window_slot(slot_at(prefix + i)));
        ids.push_back(i == 0 ? anchors[request] : c.draft_mask_token);
        positions.push_back(prefix + i);
        seen.insert(seen.end(), row.begin(), row.end());
      }
    }
    std::vector<std::vector<std::int32_t>> tokens(tp_size, std::vector<std::int32_t>(2 * block));
    std::vector<std::vector<float>> logits(tp_size, std::vector<float>(2 * block * c.vocab));
    const auto draft = [&](int num_inject_rows, int batch_size) {
      own.run([&](lowlat_model* model, int r) {
        lowlat_draft d{};
        d.struct_bytes = sizeof d;
        d.num_inject_rows = num_inject_rows;
        d.inject_slots = arrays.slots.data();
        d.inject_positions = arrays.positions.data();
        d.batch_size = batch_size;
        d.page_table_stride = arrays.stride;
        d.anchors = anchors.data();
        d.prefixes = prefixes.data();
        d.slots = slots.data();
        d.page_table = arrays.page_table.data();
        d.temperature = temperatures.data();
        d.noise_row = noise_row.data();
        d.noise_offset = offsets.data();
        d.noise_key = 77;
        d.draft_tokens = tokens[r].data();
        d.draft_logits = logits[r].data();
        return lowlat_draft_launch(model, &d, nullptr);
      });
    };
    draft(12, 0);
    each_pool([&](const std::uint8_t* mine, std::uint8_t* theirs) {
      std::memcpy(theirs, mine, page_bytes);
    });
    draft(0, 2);
    const int width = c.hidden * (kind == LOWLAT_V4 ? 4 : 1);
    std::vector<std::vector<std::uint16_t>> hidden(tp_size);
    std::vector<std::vector<std::int64_t>> their_tokens(tp_size);
    std::vector<std::vector<float>> their_logits(tp_size);
    for (int r = 0; r < tp_size; ++r) {
      hidden[r].assign(static_cast<std::size_t>(2 * block) * width, 0);
      their_tokens[r].assign(2 * block, -7);
      their_logits[r].assign(static_cast<std::size_t>(2 * block) * c.vocab, 0.0f);
      lowlat_hosted_draft layers{};
      layers.struct_bytes = sizeof layers;
      layers.batch_size = 2;
      layers.window_stride = stride;
      layers.token_ids = ids.data();
      layers.positions = positions.data();
      layers.key_slots = key_slots.data();
      layers.window = seen.data();
      layers.hidden = hidden[r].data();
      TinyGroup::must(lowlat_hosted_draft_launch(hosted.model(r), &layers, nullptr));
      lowlat_proposal proposal{};
      proposal.struct_bytes = sizeof proposal;
      proposal.batch_size = 2;
      proposal.hidden = hidden[r].data();
      proposal.anchors = wide_anchors.data();
      proposal.temperature = temperatures.data();
      proposal.noise_offset = &offset;
      proposal.noise_key = 77;
      proposal.draft_tokens = their_tokens[r].data();
      proposal.draft_logits = their_logits[r].data();
      TinyGroup::must(lowlat_propose_launch(hosted.model(r), &proposal, nullptr));
    }
    finish(hosted, tp_size);
    for (int r = 0; r < tp_size; ++r) {
      CHECK(hidden[r] == hidden[0]);
      for (const std::uint16_t value : hidden[r]) CHECK(std::isfinite(bf16(value)));
      const int rows = second ? 2 * block : block;
      for (int i = 0; i < rows; ++i) CHECK_EQ(their_tokens[r][i], tokens[r][i]);
      CHECK(std::equal(logits[r].begin(), logits[r].begin() + std::int64_t{rows} * c.vocab,
                       their_logits[r].begin()));
    }
    bool equal = true;
    each_pool([&](const std::uint8_t* mine, const std::uint8_t* theirs) {
      equal &= same_bytes(mine, theirs, page_bytes);
    });
    CHECK(equal);
  }
}

TEST_CASE(hosted_draft_of_v41_is_the_models_own) { compare_drafts(LOWLAT_V41, 1, true); }
TEST_CASE(hosted_draft_of_v41_agrees_between_ranks) { compare_drafts(LOWLAT_V41, 2, true); }
TEST_CASE(hosted_draft_of_v4_is_the_models_own) { compare_drafts(LOWLAT_V4, 1, true); }
TEST_CASE(hosted_draft_of_v4_takes_the_checkpoints_experts) { compare_drafts(LOWLAT_V4, 2, false); }

TEST_CASE(hosted_drafts_are_refused_by_name) {
  TinyGroup own(LOWLAT_V41, 1, [](lowlat_model_config& c) { c = edited(c); });
  Hosted target(own, false), draft(own, false, false, Part::draft);
  const lowlat_model_config& c = own.config();
  const int block = c.draft_block, stride = c.window + block;
  std::vector<std::int64_t> ids(block, 3), positions(block, 0);
  std::vector<std::int32_t> keys(block), window(block * stride, -1);
  for (int i = 0; i < block; ++i) keys[i] = c.page_size + i;
  std::vector<std::uint16_t> hidden(static_cast<std::size_t>(block) * c.hidden);
  lowlat_hosted_draft d{};
  d.struct_bytes = sizeof d;
  d.batch_size = 1;
  d.window_stride = stride;
  d.token_ids = ids.data();
  d.positions = positions.data();
  d.key_slots = keys.data();
  d.window = window.data();
  d.hidden = hidden.data();
  const auto refused = [&](Hosted& on, lowlat_status needed, const char* word) {
    const lowlat_status status = lowlat_hosted_draft_launch(on.model(0), &d, nullptr);
    const bool named = std::string(lowlat_last_error()).find(word) != std::string::npos;
    if (status != needed || !named) std::printf("%d %s\n", status, lowlat_last_error());
    return status == needed && named;
  };
  CHECK(refused(target, LOWLAT_UNSUPPORTED, "hosted with stages"));
  d.window_stride = stride - 1;
  CHECK(refused(draft, LOWLAT_INVALID, "window_stride"));
  d.window_stride = stride;
  window[stride] = kWindowPages * c.page_size;
  CHECK(refused(draft, LOWLAT_INVALID, "window of row 1"));
  window[stride] = -1;
  keys[2] = kWindowPages * c.page_size;
  CHECK(refused(draft, LOWLAT_INVALID, "key_slots"));
  keys[2] = c.page_size + 2;
  positions[4] = c.max_positions;
  CHECK(refused(draft, LOWLAT_INVALID, "positions of row 4"));
  positions[4] = 0;
  d.batch_size = 2;
  d.hidden = nullptr;
  CHECK(refused(draft, LOWLAT_INVALID, "hidden is NULL"));
  lowlat_hosting hosting{};
  hosting.struct_bytes = sizeof hosting;
  hosting.stages = 1;
  lowlat_model* model = nullptr;
  CHECK(lowlat_hosted_create("scalar", &c, &hosting, &model) == LOWLAT_INVALID);
  CHECK(std::string(lowlat_last_error()).find("proposals is 0") != std::string::npos);
}

// A peer that does not come: no row may look like a result.
TEST_CASE(hosted_step_that_ends_leaves_no_number) {
  TinyGroup own(LOWLAT_V41, 2, [](lowlat_model_config& c) {
    c = edited(c);
    c.wait_budget_ns = 200'000'000;
  });
  Hosted hosted(own, false);
  StepArrays arrays(own.config());
  const std::vector<std::int32_t> text(16, 5);
  arrays.add(0, text, 0, 6);
  HostedArrays theirs(arrays, own.config(), LOWLAT_TARGET_VERIFY);
  TinyGroup::must(lowlat_hosted_step_launch(hosted.model(0), &theirs.step, nullptr));
  CHECK(lowlat_synchronize(hosted.model(0), 20'000'000'000ull) == LOWLAT_FAULT);
  bool spoiled = true;
  for (const std::uint16_t value : theirs.hidden) spoiled &= value == kNan;
  CHECK(spoiled);
  CHECK(lowlat_hosted_step_launch(hosted.model(0), &theirs.step, nullptr) == LOWLAT_FAULT);
}

TEST_CASE(hosted_calls_are_refused_by_name) {
  TinyGroup own(LOWLAT_V41, 1, [](lowlat_model_config& c) { c = edited(c); });
  Hosted hosted(own, false);
  const auto refused = [](lowlat_status status, lowlat_status needed, const char* word) {
    const bool named = std::string(lowlat_last_error()).find(word) != std::string::npos;
    if (status != needed || !named) std::printf("%d %s\n", status, lowlat_last_error());
    return status == needed && named;
  };
  StepArrays arrays(own.config());
  const std::vector<std::int32_t> text(16, 5);
  arrays.add(0, text, 0, 6);
  const lowlat_step step = arrays.step(LOWLAT_TARGET_VERIFY);
  CHECK(refused(lowlat_step_launch(hosted.model(0), &step, nullptr), LOWLAT_UNSUPPORTED, "hosted"));
  HostedArrays theirs(arrays, own.config(), LOWLAT_TARGET_VERIFY);
  const auto launch = [&] {
    return lowlat_hosted_step_launch(hosted.model(0), &theirs.step, nullptr);
  };
  CHECK(refused(lowlat_hosted_step_launch(own.model(0), &theirs.step, nullptr), LOWLAT_UNSUPPORTED,
                "hosted"));
  theirs.slots[1] += 1;
  CHECK(refused(launch(), LOWLAT_INVALID, "slots[1]"));
  theirs.slots[1] -= 1;
  theirs.requests[0] = kNumRequests;
  CHECK(refused(launch(), LOWLAT_INVALID, "requests of row 0"));
  theirs.requests[0] = 0;
  theirs.step.tokens_per_request = 5;
  CHECK(refused(launch(), LOWLAT_UNSUPPORTED, "5 rows were not built"));
  theirs.step.tokens_per_request = 6;
  theirs.step.hidden = nullptr;
  CHECK(refused(launch(), LOWLAT_INVALID, "hidden is NULL"));
  lowlat_hosting hosting{};
  hosting.struct_bytes = sizeof hosting;
  hosting.expert_layout = LOWLAT_KV_PAGED;
  lowlat_model* model = nullptr;
  CHECK(refused(lowlat_hosted_create("scalar", &own.config(), &hosting, &model), LOWLAT_INVALID,
                "expert_layout"));
  CHECK(model == nullptr);
}

}  // namespace
