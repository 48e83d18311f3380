// Operations of the n-gram memory: hash, look-up and the gated addition to the streams.
#include <algorithm>
#include <limits>
#include <string>

#include "host/op/models.hpp"
#include "host/op/registry.hpp"
#include "platform/scalar.hpp"
#include "reference/engram.hpp"
#include "stages/engram.hpp"
#include "stages/linear.hpp"

namespace lowlat::host {
namespace {

namespace stages = lowlat::scalar::stages;
using Block = lowlat::scalar::plat::Block<256>;

constexpr int kScaleBlock = 32;

// Tokens that the hash may read are in the map, or are the image token.
void require_token(const OpArgs& a, const char* name, std::int64_t i, std::int64_t image_token) {
  const std::int64_t token = a.in<std::int64_t>(name)[i], vocab = a.dim("V");
  require(token == image_token || (token >= 0 && token < vocab),
          element_name(a, name, i) + " is " + std::to_string(token) + "; needed 0 .. " +
              std::to_string(vocab - 1) + " (map has " + std::to_string(vocab) +
              " entries) or the image token " + std::to_string(image_token));
}

OpSpec engram_hash() {
  OpSpec op;
  op.name = "engram_hash";
  op.models = "v41";
  op.about =
      "table rows of each token's n-grams of sizes 2, 3, 4: rolling XOR of map[token] * mult, "
      "modulo "
      "each head's prime, plus the running sum of the primes before it; a token before position 0, "
      "an image token and everything older count as token 2";
  op.in = {{"token", LOWLAT_I64, "i64", "T", false, "token of each row"},
           {"history", LOWLAT_I64, "i64", "T,3", false,
            "the three tokens before it, oldest first; those before position 0 are not read"},
           {"pos", LOWLAT_I64, "i64", "T", false, "position, 0 and more"},
           {"map", LOWLAT_I64, "i64", "V", false, "token to compressed id, 0 and more"},
           {"mult", LOWLAT_I64, "i64", "4", false, "multiplier of each shift, 0 first"},
           {"prime", LOWLAT_I64, "i64", "3,8", false, "modulus by n-gram size and head"},
           {"image_token", LOWLAT_I64, "i64", "", true, "129264 when absent"}};
  op.out = {{"ids", LOWLAT_I64, "i64", "T,24", false, "table rows, offsets included"}};
  op.numerics = {{"scalar nvidia", "ids", "bitwise"}};
  op.check = [](OpArgs& a) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    const std::int64_t vocab = a.dim("V");
    require(vocab > kPadToken,
            "map has " + std::to_string(vocab) +
                " entries; needed at least 3, because a blocked token counts as 2");
    require_range(a, "pos", 0, kMost, "a position");
    require_range(a, "map", 0, kMost, "a compressed id");
    require_range(a, "mult", 1, kMost, "a multiplier");
    const std::int64_t map_most = std::ranges::max(a.in<std::int64_t>("map"));
    const std::int64_t mult_most = std::ranges::max(a.in<std::int64_t>("mult"));
    require(map_most <= kMost / mult_most, "map and mult: " + std::to_string(map_most) + " * " +
                                               std::to_string(mult_most) +
                                               " does not fit int64; needed a product below 2^63");
    // Below 2^58 the sum of 24 primes, which is the number of table rows, fits as well.
    require_range(a, "prime", 1, (std::int64_t{1} << 58) - 1, "a modulus below 2^58");
    const std::int64_t image_token = a.scalar("image_token", kImageToken);
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      require_token(a, "token", t, image_token);
      const std::int64_t num_read = std::min<std::int64_t>(3, a.in<std::int64_t>("pos")[t]);
      for (std::int64_t shift = 1; shift <= num_read; ++shift) {
        require_token(a, "history", t * 3 + 3 - shift, image_token);
      }
    }
  };
  op.reference = [](const OpArgs& a) {
    reference::engram_hash(a.out<std::int64_t>("ids").data(), a.in<std::int64_t>("token").data(),
                           a.in<std::int64_t>("history").data(), a.in<std::int64_t>("pos").data(),
                           a.in<std::int64_t>("map").data(), a.in<std::int64_t>("mult").data(),
                           a.in<std::int64_t>("prime").data(), a.scalar("image_token", kImageToken),
                           a.dim("T"));
  };
  op.scalar = [](const OpArgs& a) {
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      const std::int64_t* history = a.in<std::int64_t>("history").data() + 3 * t;
      const std::int64_t tokens[stages::kEngramShifts] = {a.in<std::int64_t>("token")[t],
                                                          history[2], history[1], history[0]};
      std::int64_t ids[stages::kEngramColumns];
      stages::engram_hash(ids, tokens, a.in<std::int64_t>("pos")[t],
                          a.in<std::int64_t>("map").data(), a.in<std::int64_t>("mult").data(),
                          a.in<std::int64_t>("prime").data(), a.scalar("image_token", kImageToken),
                          kPadToken);
      std::ranges::copy(ids, &a.out<std::int64_t>("ids")[t * stages::kEngramColumns]);
    }
  };
  return op;
}

OpSpec engram_lookup() {
  OpSpec op;
  op.name = "engram_lookup";
  op.models = "v41";
  op.about = "the 24 table rows of each token, dequantised to bf16 and laid side by side";
  op.in = {{"ids", LOWLAT_I64, "i64", "T,24", false, "rows, 0 .. N - 1"},
           {"table", LOWLAT_U8, "e4m3", "N,D", false, "codes"},
           {"table_scale", LOWLAT_U8, "ue8m0", "N,D/32", false, "one a 32 columns"}};
  op.out = {{"e", LOWLAT_BF16, "bf16", "T,24D", false, "code * scale"}};
  op.numerics = {{"scalar nvidia", "e", "bitwise"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "D", 32, 32);
    require_all_finite(a, spec);
    require_range(a, "ids", 0, a.dim("N") - 1, "N = " + std::to_string(a.dim("N")));
  };
  op.reference = [](const OpArgs& a) {
    reference::engram_lookup(a.out<std::uint16_t>("e").data(), a.in<std::int64_t>("ids").data(),
                             a.in<std::uint8_t>("table").data(),
                             a.in<std::uint8_t>("table_scale").data(), a.dim("T"), a.dim("D"));
  };
  op.scalar = [](const OpArgs& a) {
    const auto dim = static_cast<int>(a.dim("D"));
    for (std::int64_t t = 0; t < a.dim("T"); ++t) {
      stages::engram_lookup(a.out<std::uint16_t>("e").data() + t * stages::kEngramColumns * dim,
                            a.in<std::int64_t>("ids").data() + t * stages::kEngramColumns, 0,
                            stages::kEngramColumns, a.in<std::uint8_t>("table").data(),
                            a.in<std::uint8_t>("table_scale").data(), 0, dim);
    }
  };
  return op;
}

OpSpec engram_apply() {
  OpSpec op;
  op.name = "engram_apply";
  op.models = "v41";
  op.about =
      "keys and value e wkv^T by the block-fp8 linear, rounded to bf16; each stream gets the value "
      "times the sigmoid of the signed root of its match; the sum is rounded to bf16";
  op.in = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "streams"},
           {"e", LOWLAT_BF16, "bf16", "T,24D", false, "looked-up rows"},
           {"wkv", LOWLAT_U8, "e4m3", "5H,24D", false, "keys of streams 0 .. 3, then the value"},
           {"wkv_scale", LOWLAT_F32, "f32", "5H/32,24D/32", false, "one a 32 x 32 block"},
           {"q_weight", LOWLAT_BF16, "bf16", "4,H", false, "weight of the stream in the match"},
           {"k_weight", LOWLAT_BF16, "bf16", "4,H", false, "weight of the key in the match"}};
  op.out = {{"residual", LOWLAT_BF16, "bf16", "T,4,H", false, "streams after the addition"}};
  op.numerics = {{"scalar nvidia", "residual", "rel_l2 <= 4e-3"}};
  op.check = [spec = op](OpArgs& a) {
    require_dim(a, "H", 32, 32);
    require_dim(a, "D", 4, 4);
    require_all_finite(a, spec);
  };
  op.reference = [](const OpArgs& a) {
    reference::engram_apply(a.out<std::uint16_t>("residual").data(),
                            a.in<std::uint16_t>("residual").data(), a.in<std::uint16_t>("e").data(),
                            a.in<std::uint8_t>("wkv").data(), a.in<float>("wkv_scale").data(),
                            a.in<std::uint16_t>("q_weight").data(),
                            a.in<std::uint16_t>("k_weight").data(), a.dim("T"), a.dim("H"),
                            24 * a.dim("D"), model_rules(a.model()).norm_eps);
  };
  op.scalar = [](const OpArgs& a) {
    const auto rows = static_cast<int>(a.dim("T")), hidden = static_cast<int>(a.dim("H"));
    const int width = 24 * static_cast<int>(a.dim("D")), outputs = 5 * hidden;
    std::vector<float> x(static_cast<std::size_t>(rows) * width), w_row(width);
    for (int t = 0; t < rows; ++t) {
      const std::int64_t start = static_cast<std::int64_t>(t) * width;
      stages::quantize_row(&x[start], a.in<std::uint16_t>("e").data() + start, width, kScaleBlock);
    }
    const stages::E4m3Weights<stages::ScaleF32> wkv = {
        a.in<std::uint8_t>("wkv").data(),
        width,
        {a.in<float>("wkv_scale").data(), width / kScaleBlock},
        kScaleBlock};
    std::vector<std::uint16_t> kv(static_cast<std::size_t>(rows) * outputs);
    stages::linear(x.data(), width, rows, width, wkv, 0, outputs, w_row.data(),
                   [&](int t, int n, float y) {
                     kv[static_cast<std::size_t>(t) * outputs + n] = stages::to_bf16(y);
                   });
    std::ranges::copy(a.in<std::uint16_t>("residual"), a.out<std::uint16_t>("residual").begin());
    stages::EngramApply<Block>::Scratch scratch;
    for (int t = 0; t < rows; ++t) {
      stages::EngramApply<Block>::run(
          a.out<std::uint16_t>("residual").data() + static_cast<std::int64_t>(t) * 4 * hidden,
          &kv[static_cast<std::size_t>(t) * outputs], a.in<std::uint16_t>("q_weight").data(),
          a.in<std::uint16_t>("k_weight").data(), hidden,
          static_cast<float>(model_rules(a.model()).norm_eps), scratch);
    }
  };
  return op;
}

}  // namespace

std::vector<OpSpec> ops_engram() { return {engram_hash(), engram_lookup(), engram_apply()}; }

}  // namespace lowlat::host
