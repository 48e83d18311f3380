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
