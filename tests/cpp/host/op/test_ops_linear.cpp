// block_linear and lm_head as operations: bounds and refusals.
#include <cmath>
#include <limits>

#include "check.hpp"
#include "host/op/declared.hpp"

namespace {

using lowlat::host::OpSpec;
using lowlat::testing::begins_with;
using lowlat::testing::check_declared;
using lowlat::testing::op_named;
using lowlat::testing::OpCall;
using lowlat::testing::Random;
namespace reference = lowlat::reference;

OpSpec op(const char* name) { return op_named(lowlat::host::ops_linear(), name); }

std::vector<std::uint8_t> e4m3(Random& random, std::size_t n, double scale) {
  std::vector<std::uint8_t> codes(n);
  for (std::uint8_t& code : codes) code = reference::to_e4m3(scale * random.normal());
  return codes;
}

OpCall block(Random& random, std::int64_t rows, std::int64_t n, std::int64_t k, std::int64_t b,
             double scale = 1.0) {
  OpCall call(op("block_linear"));
  call.set("x", LOWLAT_BF16, {rows, k}, random.bf16(rows * k, scale));
  call.set("w", LOWLAT_U8, {n, k}, e4m3(random, n * k, 100.0));
  std::vector<float> w_scale(n / b * (k / b));
  for (float& s : w_scale) s = std::ldexp(1.0f, static_cast<int>(random.integer(-12, 0)));
  call.set("w_scale", LOWLAT_F32, {n / b, k / b}, w_scale);
  call.set_number("block", b);
  return call;
}

OpCall head(Random& random, std::int64_t rows, std::int64_t vocab, std::int64_t hidden) {
  OpCall call(op("lm_head"));
  call.set("x", LOWLAT_BF16, {rows, hidden}, random.bf16(rows * hidden));
  call.set("w", LOWLAT_BF16, {vocab, hidden}, random.bf16(vocab * hidden));
  return call;
}

void check_block(const OpCall& call) {
  check_declared<std::uint16_t>(op("block_linear"), call, "y");
}

}  // namespace

TEST_CASE(random_inputs_stay_within_the_declared_bounds) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const std::int64_t b = seed % 2 == 0 ? 32 : 128;
    check_block(block(random, random.integer(1, 6), b * random.integer(1, 3),
                      b * random.integer(1, 6), b, std::exp(3.0 * random.normal())));
    check_declared<std::uint16_t>(
        op("lm_head"),
        head(random, random.integer(1, 6), random.integer(1, 90), random.integer(1, 300)),
        "logits");
  }
  Random random(1000);
  check_block(block(random, 48, 96, 256, 32));
  check_block(block(random, 1, 32, 5120, 32));
  check_block(block(random, 1, 128, 128, 128));
}

TEST_CASE(scales_need_not_be_powers_of_two) {
  Random random(1);
  OpCall call = block(random, 3, 64, 96, 32);
  call.set("w_scale", LOWLAT_F32, {2, 3}, random.f32(6));
  check_block(call);
}

TEST_CASE(awkward_activations_stay_within_the_bound) {
  Random random(2);
  for (const double scale : {0.0, 1e-40, 1e-11, 448.0, 1e14}) {
    check_block(block(random, 2, 32, 64, 32, scale));
  }
  OpCall call = block(random, 1, 32, 32, 32);
  call.set("x", LOWLAT_BF16, {1, 32}, std::vector<std::uint16_t>(32, 0x8000));  // -0
  for (const std::uint16_t y : call.run<std::uint16_t>("scalar")) CHECK_EQ(y & 0x7fff, 0);
}

TEST_CASE(refuses_by_name) {
  Random random(3);
  OpCall call = block(random, 1, 64, 64, 32);
  CHECK_EQ(call.set_number("block", 64).refusal(), "block is 64; needed 32 or 128");
  call = block(random, 1, 128, 128, 32);
  CHECK_EQ(call.set_number("block", 128).refusal(), "w_scale has blocks of 32; needed block = 128");
  call = block(random, 1, 64, 64, 32);
  call.set("x", LOWLAT_BF16, {1, 48}, random.bf16(48));
  CHECK(begins_with(call.refusal(), "w has shape [64, 64]; needed [N,K] with N = 64 (w), K = 48"));
  call.set("w", LOWLAT_U8, {64, 48}, e4m3(random, 64 * 48, 1.0));
  call.set("w_scale", LOWLAT_F32, {4, 3}, random.f32(12));  // blocks of 16
  CHECK_EQ(call.refusal(), "K is 48; needed 32 or more, a multiple of 32");
  call = block(random, 1, 64, 64, 32);
  std::vector<std::uint8_t> codes(64 * 64);
  codes[65] = 0x7f;
  call.set("w", LOWLAT_U8, {64, 64}, codes);
  CHECK_EQ(call.refusal(), "w[1, 1] is nan; needed a finite value");
  call = block(random, 1, 64, 64, 32);
  call.set("w_scale", LOWLAT_F32, {2, 2},
           std::vector<float>(4, std::numeric_limits<float>::infinity()));
  CHECK(begins_with(call.refusal(), "w_scale[0, 0] is infinite"));
  call = head(random, 1, 4, 8);
  call.set("x", LOWLAT_BF16, {1, 8}, std::vector<std::uint16_t>(8, 0x7fc0));
  CHECK(begins_with(call.refusal(), "x[0, 0] is nan"));
  CHECK(begins_with(head(random, 65, 4, 8).refusal(), "x has T = 65 rows"));
}

TEST_CASE(both_models_mean_the_same) {
  // The block is the call's: 128 is V4's and 32 V4.1's.
  Random random(4);
  for (const OpCall& call :
       {block(random, 3, 128, 256, 128), block(random, 3, 64, 96, 32), head(random, 3, 20, 40)}) {
    for (const char* platform : {"scalar", "reference"}) {
      CHECK(call.of("v4").run<std::uint16_t>(platform) == call.run<std::uint16_t>(platform));
    }
  }
}
