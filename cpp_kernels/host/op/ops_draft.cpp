// Operations of speculative decoding: the Markov draft and the acceptance rule.
#include <cstdio>
#include <string>

#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/accept.hpp"
#include "reference/draft.hpp"
#include "stages/accept.hpp"
#include "stages/draft.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;

// Throws "name[i] is v; needed ..." for an element that is not `right`.
void require_element(const OpArgs& a, const char* name, std::int64_t i, bool right,
                     const char* needed) {
  if (right) return;
  char value[32];
  std::snprintf(value, sizeof value, "%.9g", static_cast<double>(a.in<float>(name)[i]));
  throw OpError(element_name(a, name, i) + " is " + value + "; needed " + needed);
}

void require_temperatures(const OpArgs& a) {
  const auto temp = a.in<float>("temp");
  for (std::size_t b = 0; b < temp.size(); ++b) {
    require_element(a, "temp", b, temp[b] >= 0.0f, "0 (greedy) or a positive temperature");
  }
}

OpSpec markov_draft() {
  OpSpec op;
  op.name = "markov_draft";
  op.models = "v4 v41";
  op.about =
      "g proposals a request, one after the other: z = base + bf(w1[previous] w2^T); argmax of z, "
      "or "
      "of z / max(temp, 1e-5) + Gumbel noise where temp > 0; ties to the lowest id";
  op.in = {{"base", LOWLAT_F32, "f32", "B,g,V", false, "logits of the draft's head"},
           {"w1", LOWLAT_BF16, "bf16", "V,R", false, "Markov embedding of the previous token"},
           {"w2", LOWLAT_BF16, "bf16", "V,R", false, "Markov head"},
           {"anchor", LOWLAT_I64, "i64", "B", false, "last emitted token, 0 .. V - 1"},
           {"temp", LOWLAT_F32, "f32", "B", false, "temperature; 0 is greedy"},
           {"uniform", LOWLAT_F32, "f32", "B,g,V", false, "noise in (0, 1), used where temp > 0"}};
  op.out = {{"tokens", LOWLAT_I64, "i64", "B,g", false, "proposals"},
            {"logits", LOWLAT_F32, "f32", "B,g,V", false, "z of every step, before noise"}};
  // A bias is off by an ulp of bf16 where fp32 and float64 sums lie on two sides of a tie. What is
  // drawn after a token that differs has another previous token.
  op.numerics = {{"scalar nvidia", "tokens",
                  "equal up to a request's first step whose two best keys in float64 are within "
                  "2^-7 * max|logits - base| / max(temp, 1e-5) (greedy: without the divisor)"},
                 {"scalar nvidia", "logits", "rel_l2 <= 1e-3 while the tokens before are equal"}};
  op.check = [spec = op](OpArgs& a) {
    for (const char* symbol : {"B", "g", "V", "R"}) require_dim(a, symbol, 1, 1);
    require_all_finite(a, spec);
    require_temperatures(a);
    require_range(a, "anchor", 0, a.dim("V") - 1, "V = " + std::to_string(a.dim("V")));
    const auto uniform = a.in<float>("uniform");
    const std::int64_t request = a.dim("g") * a.dim("V");
    for (std::int64_t i = 0; i < a.dim("B") * request; ++i) {
      const bool used = a.in<float>("temp")[i / request] > 0.0f;
      require_element(a, "uniform", i, !used || (uniform[i] > 0.0f && uniform[i] < 1.0f),
                      "more than 0 and less than 1 where temp is above 0");
    }
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t steps = a.dim("g"), vocab = a.dim("V");
    std::vector<double> margin(steps);
    for (std::int64_t b = 0; b < a.dim("B"); ++b) {
      const std::int64_t start = b * steps * vocab;
      reference::markov_draft(
          a.out<std::int64_t>("tokens").data() + b * steps, a.out<float>("logits").data() + start,
          margin.data(), a.in<float>("base").data() + start, a.in<std::uint16_t>("w1").data(),
          a.in<std::uint16_t>("w2").data(), a.in<std::int64_t>("anchor")[b], a.in<float>("temp")[b],
          a.in<float>("uniform").data() + start, steps, vocab, a.dim("R"));
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto batch = static_cast<int>(a.dim("B")), rank = static_cast<int>(a.dim("R"));
    const auto vocab = static_cast<int>(a.dim("V"));
    const std::int64_t steps = a.dim("g"), pitch = steps * vocab;
    const std::uint16_t* w1 = a.in<std::uint16_t>("w1").data();
    const stages::Bf16Weights w2 = {a.in<std::uint16_t>("w2").data(), rank};
    float* logits = a.out<float>("logits").data();
    std::vector<float> embedding(static_cast<std::size_t>(batch) * rank), scratch(rank);
    std::vector<std::int64_t> previous(a.in<std::int64_t>("anchor").begin(),
                                       a.in<std::int64_t>("anchor").end());
    for (std::int64_t s = 0; s < steps; ++s) {
      for (int b = 0; b < batch; ++b) {
        stages::expand_bf16(&embedding[static_cast<std::size_t>(b) * rank], w1 + previous[b] * rank,
                            rank);
      }
      stages::markov_logits(logits + s * vocab, a.in<float>("base").data() + s * vocab, pitch,
                            embedding.data(), w2, batch, rank, 0, vocab, scratch.data());
      for (int b = 0; b < batch; ++b) {
        const std::int64_t start = b * pitch + s * vocab;
        const float* uniform = a.in<float>("uniform").data() + start;
        previous[b] = stages::draft_select(logits + start, vocab, 0, a.in<float>("temp")[b],
                                           [=](std::int32_t id) { return uniform[id]; })
                          .id;
        a.out<std::int64_t>("tokens")[b * steps + s] = previous[b];
      }
    }
  };
  return op;
}

OpSpec accept() {
  OpSpec op;
  op.name = "accept";
  op.models = "v4 v41";
  op.about =
      "how many drafts of a verify step are kept and the token after them: by argmax where temp is "
      "0, else by coin * q < p and a draw from max(p - q, 0) or the bonus row's p in id order";
  op.in = {
      {"draft", LOWLAT_I64, "i64", "B,g", false, "proposals, 0 .. V - 1"},
      {"target_logits", LOWLAT_F32, "f32", "B,n,V", false, "n = g + 1; row i predicts draft i"},
      {"draft_logits", LOWLAT_F32, "f32", "B,g,V", false, "what the drafts were drawn from"},
      {"temp", LOWLAT_F32, "f32", "B", false, "temperature; 0 is greedy"},
      {"coins", LOWLAT_F32, "f32", "B,n", false,
       "in [0, 1): one a draft, the last for the draw; used where temp > 0"}};
  op.out = {{"accepted", LOWLAT_I64, "i64", "B", false, "drafts kept, 0 .. g"},
            {"next", LOWLAT_I64, "i64", "B", false, "bonus or residual token"}};
  const char* bound =
      "equal where temp is 0, and where no |p - coin * q| and no |running sum - coin * total| in "
      "float64 is below 2e-6";
  op.numerics = {{"scalar nvidia", "accepted", bound}, {"scalar nvidia", "next", bound}};
  op.check = [spec = op](OpArgs& a) {
    for (const char* symbol : {"B", "g", "V"}) require_dim(a, symbol, 1, 1);
    require(a.dim("n") == a.dim("g") + 1, "target_logits and coins have " +
                                              std::to_string(a.dim("n")) +
                                              " rows a request; needed one more than the drafts, " +
                                              std::to_string(a.dim("g") + 1));
    require_all_finite(a, spec);
    require_temperatures(a);
    require_range(a, "draft", 0, a.dim("V") - 1, "V = " + std::to_string(a.dim("V")));
    const auto coins = a.in<float>("coins");
    for (std::size_t i = 0; i < coins.size(); ++i) {
      require_element(a, "coins", i, coins[i] >= 0.0f && coins[i] < 1.0f,
                      "at least 0 and less than 1");
    }
  };
  op.reference = [](const OpArgs& a) {
    const std::int64_t g = a.dim("g"), vocab = a.dim("V");
    double margin;
    for (std::int64_t b = 0; b < a.dim("B"); ++b) {
      reference::accept(&a.out<std::int64_t>("accepted")[b], &a.out<std::int64_t>("next")[b],
                        &margin, a.in<std::int64_t>("draft").data() + b * g,
                        a.in<float>("target_logits").data() + b * (g + 1) * vocab,
                        a.in<float>("draft_logits").data() + b * g * vocab, a.in<float>("temp")[b],
                        a.in<float>("coins").data() + b * (g + 1), g, vocab);
    }
  };
  op.scalar = [](const OpArgs& a) {
    const auto g = static_cast<int>(a.dim("g")), vocab = static_cast<int>(a.dim("V"));
    std::vector<float> scratch(2 * static_cast<std::size_t>(vocab));
    std::vector<std::int32_t> draft(g);
    for (std::int64_t b = 0; b < a.dim("B"); ++b) {
      for (int i = 0; i < g; ++i) {
        draft[i] = static_cast<std::int32_t>(a.in<std::int64_t>("draft")[b * g + i]);
      }
      const float* target = a.in<float>("target_logits").data() + b * (g + 1) * vocab;
      const float temperature = a.in<float>("temp")[b];
      const stages::Accepted result =
          temperature == 0.0f
              ? stages::accept_greedy(draft.data(), target, g, vocab)
              : stages::accept_sampled(
                    draft.data(), target, a.in<float>("draft_logits").data() + b * g * vocab, g,
                    vocab, temperature, a.in<float>("coins").data() + b * (g + 1), scratch.data());
      a.out<std::int64_t>("accepted")[b] = result.num_drafts;
      a.out<std::int64_t>("next")[b] = result.next;
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_draft() { return {markov_draft(), accept()}; }

}  // namespace lowlat::host
