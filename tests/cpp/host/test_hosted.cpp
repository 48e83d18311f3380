// A model inside another engine beside one that keeps its caches: the same weights in the engine's
// layouts, caches at other places, the same bits.
#include <array>
#include <numeric>

#include "tiny_group.hpp"

namespace {

using namespace lowlat::testing;

constexpr int kFirstPage = 2;     // of ours in the engine's pages; page 0 is padding's
constexpr int kWindowPages = 31;  // prime: every page of ours has another one
constexpr int kNumRequests = 9;
constexpr std::uint16_t kNan = 0x7fc0;

int window_page(int page) { return (page * 5 + 3) % kWindowPages; }
int request_row(int request) { return 3 + 2 * request; }

float bf16(std::uint16_t bits) {
  const std::uint32_t word = std::uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

// The published way to Marlin's tiles, as a permutation of 1024 nibbles and one of 64 scales.
std::vector<int> code_order() {
  std::vector<int> order;
  for (int lane = 0; lane < 32; ++lane) {
    std::array<int, 8> one{};
    int n = 0;
    for (const int block : {0, 1}) {
      for (const int row :
           {2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1}) {
        one[n++] = 16 * row + lane / 4 + 8 * block;
      }
    }
    for (int j = 0; j < 4; ++j) {
      for (const int place : {0, 2, 4, 6, 1, 3, 5, 7}) order.push_back(one[place] + 256 * j);
    }
  }
  return order;
}
std::vector<int> scale_order() {
  std::vector<int> order, swapped;
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) order.push_back(i + 8 * j);
  }
  for (int i = 0; i < 64; i += 4) {
    for (const int place : {0, 2, 1, 3}) swapped.push_back(order[i + place]);
  }
  return swapped;
}

struct Matrix {  // fp4 codes of [N, K], one a byte, and scales [N, K / 32]
  int n, k;
  std::vector<std::uint8_t> codes, scales;
};
void to_marlin(const Matrix& m, std::uint8_t* out_codes, std::uint8_t* out_scales) {
  static const std::vector<int> codes = code_order(), scales = scale_order();
  // [K, N] in blocks of 16 x 16, blocks of a row of blocks one after another.
  std::vector<std::uint8_t> blocks(m.codes.size());
  std::size_t at = 0;
  for (int bk = 0; bk < m.k / 16; ++bk) {
    for (int bn = 0; bn < m.n / 16; ++bn) {
      for (int k = 0; k < 16; ++k) {
        for (int n = 0; n < 16; ++n) blocks[at++] = m.codes[(bn * 16 + n) * m.k + bk * 16 + k];
      }
    }
  }
  for (std::size_t i = 0; i < blocks.size(); i += 2) {
    const auto code = [&](std::size_t place) {
      return blocks[place / 1024 * 1024 + codes[place % 1024]];
    };
    out_codes[i / 2] = static_cast<std::uint8_t>(code(i) | code(i + 1) << 4);
  }
  for (int group = 0; group < m.k / 32; ++group) {
    for (int n = 0; n < m.n; ++n) {
      const int row = n / 64 * 64 + scales[n % 64];
      out_scales[group * m.n + n] = m.scales[row * (m.k / 32) + group];
    }
  }
}

lowlat_model_config edited(lowlat_model_config config) {
  // A width that Marlin's tiles pad.
  if (config.kind == LOWLAT_V41) config.moe_intermediate = 96 * config.tp_size;
  return config;
}

// What of a model is hosted: its target, or its draft's layers and proposals.
enum class Part { target, draft };

class Hosted {
 public:
  // split: V4.1's index keys are two tensors, see lowlat_pools.
  Hosted(TinyGroup& own, bool marlin, bool split = false, Part part = Part::target)
      : own_(own), config_(own.config()), ranks_(own.tp_size()), split_(split), part_(part) {
    if (part == Part::draft) {
      config_.num_widths = config_.max_batch;
      for (int i = 0; i < config_.num_widths; ++i) {
        config_.widths[i] = (i + 1) * config_.draft_block;
      }
    }
    for (int r = 0; r < own.tp_size(); ++r) {
      lowlat_model_config config = config_;
      config.tp_rank = r;
      lowlat_hosting hosting{};
      hosting.struct_bytes = sizeof hosting;
      hosting.expert_layout = marlin ? LOWLAT_MARLIN : LOWLAT_ROW_MAJOR;
      hosting.bf16_wo_a = config.kind == LOWLAT_V41 || part == Part::draft;
      hosting.proposals = hosting.stages = part == Part::draft;
      ranks_[r] = std::make_unique<Rank>();
      TinyGroup::must(lowlat_hosted_create("scalar", &config, &hosting, &ranks_[r]->model));
      bind_weights(r);
    }
    for (int r = 0; r < own.tp_size(); ++r) {
      for (int peer = 0; peer < own.tp_size(); ++peer) {
        if (peer == r) continue;
        lowlat_peer_handle handle;
        TinyGroup::must(lowlat_peer_export(ranks_[peer]->model, &handle));
        TinyGroup::must(lowlat_peer_import(ranks_[r]->model, peer, &handle));
      }
      TinyGroup::must(lowlat_model_ready(ranks_[r]->model));
      histories_.emplace_back(kNumRequests * 3, 0);
      bind_pools(r);
    }
  }

  lowlat_model* model(int r) { return ranks_[r]->model; }
  std::vector<std::int32_t>& history(int r) { return histories_[r]; }
  std::vector<std::uint8_t>& pool(int r, const std::string& name) {
    return ranks_[r]->memory[place_.at(name)];
  }
  bool is_split() const { return split_; }

  lowlat_tensor_spec spec(int r, int i) {
    lowlat_tensor_spec out{};
    out.struct_bytes = sizeof out;
    TinyGroup::must(lowlat_model_tensor(model(r), i, &out));
    return out;
  }

 private:
  // A pool's rows in this test's engine.
  std::int64_t rows_of(const std::string& name) const {
    if (name.starts_with("mtp.")) return kWindowPages;
    const std::size_t dot = name.rfind('.');
    const std::string kind = name.substr(0, dot);
    const int ratio = config_.layers[std::stoi(name.substr(dot + 1))].ratio;
    const int pages = config_.num_pages + kFirstPage;
    if (kind == "kv.swa") return kWindowPages;
    if (kind == "kv.extra") return pages;
    if (kind.starts_with("kv.index") && kind != "kv.index_state") {
      return (pages * (config_.page_size / ratio) + 63) / 64;
    }
    const bool paged = config_.kind == LOWLAT_V4 && ratio == 4;
    const int ring = config_.state_ring * (config_.kind == LOWLAT_V4 && ratio == 128 ? 16 : 1);
    return std::int64_t{paged ? kWindowPages : kNumRequests} * ring + 1;
  }

  void bind_pools(int r) {
    Rank& rank = *ranks_[r];
    std::vector<const char*> names;
    std::vector<lowlat_tensor> tensors;
    std::vector<std::string> kept;
    const int num = lowlat_model_num_tensors(rank.model);
    kept.reserve(2 * static_cast<std::size_t>(num));
    rank.memory.resize(2 * static_cast<std::size_t>(num));
    const auto give = [&](const std::string& name, lowlat_tensor_spec one, std::size_t place) {
      one.shape[0] = rows_of(name);
      const int bytes = one.dtype == LOWLAT_F32 ? 4 : 1;
      rank.memory[place].assign(static_cast<std::size_t>(one.shape[0] * one.shape[1] * bytes), 0);
      place_[name] = place;
      kept.emplace_back(name);
      names.push_back(kept.back().c_str());
      tensors.push_back(dense_tensor(one, rank.memory[place].data()));
    };
    for (int i = 0; i < num; ++i) {
      lowlat_tensor_spec one = spec(r, i);
      if (one.role != LOWLAT_POOL) continue;
      CHECK(one.shape[0] == 0);
      const std::string name = one.name;
      if (!split_ || !name.starts_with("kv.index.")) {
        give(name, one, static_cast<std::size_t>(i));
        continue;
      }
      one.layout = LOWLAT_ROW_MAJOR;
      one.shape[1] = 64 * 64;
      give(name, one, static_cast<std::size_t>(i));
      one.shape[1] = 64 * 4;
      give("kv.index_scales." + name.substr(9), one, static_cast<std::size_t>(num + i));
    }
    if (window_slots_.empty()) {
      window_slots_.assign((config_.num_pages + kFirstPage) * config_.page_size, -1);
      for (int page = 0; page < config_.num_pages; ++page) {
        for (int i = 0; i < config_.page_size; ++i) {
          window_slots_[(page + kFirstPage) * config_.page_size + i] =
              std::int64_t{window_page(page)} * config_.page_size + i;
        }
      }
    }
    lowlat_pools pools{};
    pools.struct_bytes = sizeof pools;
    pools.num_pages = config_.num_pages + kFirstPage;
    pools.num_window_pages = kWindowPages;
    pools.num_requests = kNumRequests;
    if (part_ == Part::target) {
      pools.window_slots = window_slots_.data();
      pools.history = config_.num_engrams > 0 ? histories_[r].data() : nullptr;
    }
    pools.split_index = split_ ? 1 : 0;
    pools.num_tensors = static_cast<int>(names.size()) - 1;
    pools.names = names.data();
    pools.tensors = tensors.data();
    CHECK(lowlat_pools_bind(rank.model, &pools) == LOWLAT_INVALID);  // one is missing
    ++pools.num_tensors;
    const std::int64_t rows = tensors.back().shape[0];
    tensors.back().shape[0] = 1;
    CHECK(lowlat_pools_bind(rank.model, &pools) == LOWLAT_INVALID);  // one is short
    tensors.back().shape[0] = rows;
    TinyGroup::must(lowlat_pools_bind(rank.model, &pools));
  }

  Matrix expert(int r, const std::string& name, int e, int n, int k, int tiled_n, int tiled_k) {
    const auto& codes = own_.memory(r, name + ".weight");
    const auto& scales = own_.memory(r, name + ".scale");
    Matrix m{tiled_n, tiled_k, {}, {}};
    m.codes.assign(static_cast<std::size_t>(tiled_n) * tiled_k, 0);
    m.scales.assign(static_cast<std::size_t>(tiled_n) * tiled_k / 32, 127);
    for (int row = 0; row < n; ++row) {
      const std::size_t first = (static_cast<std::size_t>(e) * n + row);
      for (int i = 0; i < k; ++i) {
        m.codes[row * tiled_k + i] = codes[first * (k / 2) + i / 2] >> 4 * (i % 2) & 15;
      }
      for (int g = 0; g < k / 32; ++g) {
        m.scales[row * (tiled_k / 32) + g] = scales[first * (k / 32) + g];
      }
    }
    return m;
  }

  void bind(int r, int i, const lowlat_tensor_spec& one, std::vector<std::uint8_t> bytes) {
    ranks_[r]->memory[i] = std::move(bytes);
    const lowlat_tensor tensor = dense_tensor(one, ranks_[r]->memory[i].data());
    TinyGroup::must(lowlat_model_bind(model(r), one.name, &tensor));
  }

  void bind_weights(int r) {
    const int num = lowlat_model_num_tensors(model(r));
    ranks_[r]->memory.resize(num);
    const int hidden = config_.hidden, inner = config_.moe_intermediate / config_.tp_size;
    const int tiled = (inner + 63) / 64 * 64;
    const int num_experts = part_ == Part::draft ? config_.draft_experts : config_.num_experts;
    std::map<std::string, std::vector<std::uint8_t>> scales;
    for (int i = 0; i < num; ++i) {
      const lowlat_tensor_spec one = spec(r, i);
      const std::string name = one.name;
      if (one.role == LOWLAT_POOL) continue;
      if (one.layout == LOWLAT_MARLIN) {
        const std::string base = name.substr(0, name.rfind('.'));
        const bool down = base.find(".w2") != std::string::npos;
        const int n = down ? hidden : 2 * tiled, k = down ? tiled : hidden;
        const std::size_t code_bytes = static_cast<std::size_t>(n) * k / 2;
        std::vector<std::uint8_t> codes(code_bytes * num_experts);
        std::vector<std::uint8_t> powers(code_bytes / 16 * num_experts);
        for (int e = 0; e < num_experts; ++e) {
          Matrix m;
          if (down) {
            m = expert(r, base, e, hidden, inner, hidden, tiled);
          } else {
            const std::string prefix = base.substr(0, base.rfind('.'));
            m = expert(r, prefix + ".w1", e, inner, hidden, tiled, hidden);
            const Matrix up = expert(r, prefix + ".w3", e, inner, hidden, tiled, hidden);
            m.codes.insert(m.codes.end(), up.codes.begin(), up.codes.end());
            m.scales.insert(m.scales.end(), up.scales.begin(), up.scales.end());
            m.n = 2 * tiled;
          }
          to_marlin(m, &codes[code_bytes * e], &powers[code_bytes / 16 * e]);
        }
        bind(r, i, one, name.ends_with(".weight") ? codes : powers);
      } else if (one.dtype == LOWLAT_BF16 && name.find("wo_a.weight") != std::string::npos) {
        bind(r, i, one, expanded_wo_a(r, name));
      } else {
        bind(r, i, one, own_.memory(r, name));
      }
    }
  }

  // Codes times scales: exact in bf16.
  std::vector<std::uint8_t> expanded_wo_a(int r, const std::string& name) {
    const auto& codes = own_.memory(r, name);
    const std::string scale_name = name.substr(0, name.rfind('.')) + ".scale";
    const auto& scales = own_.memory(r, scale_name);
    const int block = config_.scale_block;
    const int columns = config_.num_heads / config_.o_groups * config_.head_dim;
    std::vector<std::uint8_t> out(codes.size() * 2);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const std::size_t row = i / columns, column = i % columns;
      const int power = scales[row / block * (columns / block) + column / block] - 127;
      const int code = codes[i] & 0x7f, exponent = code >> 3, mantissa = code & 7;
      const double value =
          exponent > 0 ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
      const auto f = static_cast<float>((codes[i] & 0x80 ? -1 : 1) * std::ldexp(value, power));
      std::uint32_t word;
      std::memcpy(&word, &f, 4);
      CHECK((word & 0xffffu) == 0);
      const auto half = static_cast<std::uint16_t>(word >> 16);
      std::memcpy(&out[2 * i], &half, 2);
    }
    return out;
  }

  TinyGroup& own_;
  lowlat_model_config config_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::vector<std::int32_t>> histories_;
  std::vector<std::int64_t> window_slots_;
  std::map<std::string, std::size_t> place_;
  bool split_;
  Part part_;
};

// The hosted arrays of the same step; a request of StepArrays that pads is page 0's.
struct HostedArrays {
  std::vector<std::int64_t> token_ids, positions, slots, requests;
  std::vector<std::int32_t> page_table;
  std::vector<std::uint16_t> hidden, features, streams;
  lowlat_hosted_step step{};

  HostedArrays(const StepArrays& own, const lowlat_model_config& config, lowlat_step_mode mode) {
    const auto num_rows = own.token_ids.size();
    for (std::size_t t = 0; t < num_rows; ++t) {
      token_ids.push_back(own.token_ids[t]);
      positions.push_back(own.positions[t]);
      slots.push_back(own.slots[t] < 0 ? static_cast<std::int64_t>(t)
                                       : own.slots[t] + kFirstPage * own.page_size);
    }
    // Two more entries a request than its table has, as where rows have tables.
    for (int r = 0; r < own.batch_size; ++r) {
      requests.push_back(request_row(own.state_slots[r]));
      for (int i = 0; i < own.stride; ++i) {
        const int page = own.page_table[r * own.stride + i];
        page_table.push_back(page < 0 ? 0 : page + kFirstPage);
      }
      page_table.insert(page_table.end(), 2, 0x7fff'ffff);
    }
    hidden.assign(num_rows * config.hidden, 0);
    features.assign(num_rows * config.num_draft_stages * config.hidden, kNan);
    streams.assign(num_rows * 4 * config.hidden, kNan);
    step.struct_bytes = sizeof step;
    step.mode = mode;
    step.batch_size = own.batch_size;
    step.tokens_per_request = own.tokens_per_request;
    step.page_table_stride = own.stride + 2;
    step.num_table_pages = own.stride;
    step.token_ids = token_ids.data();
    step.positions = positions.data();
    step.slots = slots.data();
    step.requests = requests.data();
    step.page_table = page_table.data();
    step.hidden = hidden.data();
    step.features = features.data();
    step.streams = streams.data();
  }
};

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
                &hosted.pool(r, name)[window_page(p) * page_bytes]);
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
