// The table of operations: shape language, refusals in one form, outputs, JSON, the C entry points.
#include "host/op/registry.hpp"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.hpp"
#include "host/op/op_call.hpp"

namespace {

using lowlat::host::OpArgs;
using lowlat::host::OpSpec;
using lowlat::testing::OpCall;

// An operation with every form of dimension. y[t, i] = x[t, 2 i], times -1 on "scalar".
OpSpec sample() {
  OpSpec op;
  op.name = "sample";
  op.models = "v4 v41";
  op.about = "says \"hello\"";
  op.in = {{"x", LOWLAT_F32, "f32", "T,H", false, "rows"},
           {"w", LOWLAT_U8, "e4m3", "N,4H", false, "codes"},
           {"scale", LOWLAT_F32, "f32", "N/b,4H/b", false, "of blocks"},
           {"table", LOWLAT_I32, "i32", "24D", true, "ids"},
           {"level", LOWLAT_I64, "i64", "", false, "a number"}};
  op.out = {{"x", LOWLAT_F32, "f32", "T,H/2", false, "every other"}};
  op.numerics = {{"scalar", "x", "bitwise"}};
  const auto body = [](const OpArgs& a, float sign) {
    const std::int64_t half = a.dim("H") / 2;
    for (std::int64_t i = 0; i < a.dim("T") * half; ++i) {
      a.out<float>("x")[i] = sign * a.in<float>("x")[i / half * 2 * half + 2 * (i % half)];
    }
  };
  op.check = [op](OpArgs& a) {
    require_range(a, "level", 0, 3, "four levels");
    if (a.has("table")) require_range(a, "table", -1, 9, "");
    require_all_finite(a, op, 100.0);
    lowlat::host::require_dim(a, "H", 2, 2);
  };
  op.reference = [body](const OpArgs& a) { body(a, 1.0f); };
  op.scalar = [body](const OpArgs& a) { body(a, -1.0f); };
  return op;
}

OpCall valid() {
  OpCall call(sample());
  call.set<float>("x", LOWLAT_F32, {1, 4}, {1.0f, 2.0f, 3.0f, 4.0f});
  call.set<std::uint8_t>("w", LOWLAT_U8, {32, 16}, std::vector<std::uint8_t>(512));
  call.set<float>("scale", LOWLAT_F32, {4, 2}, std::vector<float>(8, 1.0f));
  call.set<std::int32_t>("table", LOWLAT_I32, {48}, std::vector<std::int32_t>(48));
  call.set_number("level", 3);
  return call;
}

std::string after(OpCall& call) { return call.refusal(); }

}  // namespace

TEST_CASE(runs_each_platform_and_keeps_equal_names_apart) {
  CHECK(valid().run<float>("reference") == std::vector<float>({1.0f, 3.0f}));
  CHECK(valid().run<float>("scalar") == std::vector<float>({-1.0f, -3.0f}));
}

TEST_CASE(optional_inputs_may_be_missing) {
  OpCall call = valid();
  CHECK_EQ(after(call.remove("table")), "");
}

TEST_CASE(refuses_by_name) {
  OpCall call = valid();
  CHECK_EQ(after(call.remove("w")), "w is missing; sample needs it as e4m3 [N,4H]");
  call = valid();
  call.set<float>("extra", LOWLAT_F32, {1}, {0.0f});
  CHECK_EQ(after(call), "extra is no input of sample; needed x, w, scale, table (optional), level");
  call = valid();
  call.set<float>("w", LOWLAT_F32, {32, 16}, std::vector<float>(512));
  CHECK_EQ(after(call), "w is f32; needed u8 (e4m3)");
  call = valid();
  call.set<std::int32_t>("x", LOWLAT_I32, {1, 4}, std::vector<std::int32_t>(4));
  CHECK_EQ(after(call), "x is i32; needed f32");
}

TEST_CASE(refuses_shapes_by_name) {
  OpCall call = valid();
  call.set<float>("x", LOWLAT_F32, {4}, std::vector<float>(4));
  CHECK_EQ(after(call), "x has shape [4]; needed [T,H]");
  call = valid();
  call.set<std::uint8_t>("w", LOWLAT_U8, {32, 12}, std::vector<std::uint8_t>(384));
  CHECK_EQ(after(call),
           "w has shape [32, 12]; needed [N,4H] with N = 32 (w), H = 4 (x), that is [32, 16]");
  call = valid();
  call.set<float>("scale", LOWLAT_F32, {4, 1}, std::vector<float>(4));
  CHECK_EQ(after(call),
           "scale has shape [4, 1]; needed [N/b,4H/b] with N = 32 (w), b = 8 (scale), "
           "H = 4 (x), that is [4, 2]");
  call = valid();
  call.set<float>("scale", LOWLAT_F32, {3, 7}, std::vector<float>(21));  // b cannot be solved
  CHECK_EQ(after(call), "scale has shape [3, 7]; needed [N/b,4H/b] with N = 32 (w), H = 4 (x)");
  call = valid();
  call.set<std::int32_t>("table", LOWLAT_I32, {47}, std::vector<std::int32_t>(47));
  CHECK_EQ(after(call), "table has shape [47]; needed [24D]");
  call = valid();
  call.set<std::int64_t>("level", LOWLAT_I64, {1}, {0});
  CHECK_EQ(after(call), "level has shape [1]; needed []");
}

TEST_CASE(refuses_rows_outside_1_to_64) {
  for (const std::int64_t rows : {0, 65}) {
    OpCall call = valid();
    call.set<float>("x", LOWLAT_F32, {rows, 4}, std::vector<float>(rows * 4));
    CHECK_EQ(after(call), "x has T = " + std::to_string(rows) + " rows; needed 1 .. 64");
  }
  OpCall call = valid();
  call.set<float>("x", LOWLAT_F32, {64, 4}, std::vector<float>(256));
  CHECK_EQ(after(call), "");
}

TEST_CASE(refuses_values_by_name_and_place) {
  OpCall call = valid();
  CHECK_EQ(after(call.set_number("level", 4)), "level is 4; needed 0 .. 3 (four levels)");
  call = valid();
  std::vector<std::int32_t> table(48);
  table[47] = -2;
  call.set("table", LOWLAT_I32, {48}, table);
  CHECK_EQ(after(call), "table[47] is -2; needed -1 .. 9");
  call = valid();
  const float inf = std::numeric_limits<float>::infinity();
  call.set<float>("x", LOWLAT_F32, {2, 4}, {0, 0, 0, 0, 0, 0, -inf, 0});
  CHECK_EQ(after(call), "x[1, 2] is infinite; needed a finite value of magnitude 100 or less");
  call.set<float>("x", LOWLAT_F32, {1, 4}, {0, std::nanf(""), 0, 0});
  CHECK_EQ(after(call), "x[0, 1] is nan; needed a finite value of magnitude 100 or less");
  call.set<float>("x", LOWLAT_F32, {1, 4}, {0, 100.5f, 0, 0});
  CHECK_EQ(after(call), "x[0, 1] is 100.5; needed a finite value of magnitude 100 or less");
  call = valid();
  std::vector<std::uint8_t> codes(512);
  codes[17] = 0xff;
  call.set("w", LOWLAT_U8, {32, 16}, codes);
  CHECK_EQ(after(call), "w[1, 1] is nan; needed a finite value");
  call = valid();
  call.set<float>("x", LOWLAT_F32, {1, 3}, {1, 2, 3});
  call.set<std::uint8_t>("w", LOWLAT_U8, {32, 12}, std::vector<std::uint8_t>(384));
  call.set<float>("scale", LOWLAT_F32, {8, 3}, std::vector<float>(24));
  CHECK_EQ(after(call), "H is 3; needed 2 or more, a multiple of 2");
}

TEST_CASE(refuses_model_and_platform) {
  std::vector<lowlat_array> outputs;
  const auto refusal = [&](const char* model, const char* platform) -> std::string {
    try {
      lowlat::host::op_plan(sample(), model, platform, {}, outputs);
    } catch (const lowlat::host::OpError& error) {
      return error.what();
    }
    return "";
  };
#ifdef LOWLAT_HAVE_CUDA
  CHECK_EQ(refusal("v4", "amd"),
           "platform is amd, which runs whole models and no operation alone (docs/amd.md: "
           "an interpreter runs its stages); this build has "
           "reference, scalar and nvidia");
#else
  CHECK_EQ(refusal("v4", "nvidia"),
           "platform is nvidia; this build has reference and scalar; build it where nvcc is found "
           "(LOWLAT_CUDA=ON)");
  CHECK_EQ(refusal("v4", "tpu"), "platform is tpu; this build has reference and scalar");
  CHECK_EQ(refusal("v4", "amd:1"),
           "platform is amd:1, which runs whole models and no operation alone (docs/amd.md: "
           "an interpreter runs its stages); this build has "
           "reference and scalar");
#endif
  CHECK_EQ(refusal("v5", "scalar"), "model is v5; sample is there for v4 v41");
  CHECK_EQ(refusal("v", "scalar"), "model is v; sample is there for v4 v41");
}

// ---------------------------------------------------------------- the C face, on rank_sum

namespace {

lowlat_array array(const char* name, lowlat_dtype dtype, std::vector<std::int64_t> shape,
                   void* data) {
  lowlat_array a{};
  a.name = name;
  a.dtype = dtype;
  a.ndim = static_cast<std::uint32_t>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) a.shape[i] = shape[i];
  a.data = data;
  return a;
}

struct RankSum {
  RankSum() = default;
  RankSum(const RankSum&) = delete;  // its arrays point into itself
  float partial[8] = {1, 2, 3, 4, 10, 20, 30, 40};
  std::uint16_t y[4] = {7, 7, 7, 7};
  lowlat_array in = array("partial", LOWLAT_F32, {2, 1, 4}, partial);
  lowlat_array out = array("y", LOWLAT_BF16, {1, 4}, y);
  lowlat_status run() { return lowlat_op_run("rank_sum", "v41", "scalar", &in, 1, &out, 1); }
};

std::string last() { return lowlat_last_error(); }

}  // namespace

TEST_CASE(plans_and_runs_through_the_c_face) {
  RankSum call;
  lowlat_array planned[LOWLAT_MAX_OP_OUTPUTS];
  int32_t count = 0;
  REQUIRE(lowlat_op_plan("rank_sum", "v41", "reference", &call.in, 1, planned, &count) ==
          LOWLAT_OK);
  REQUIRE(count == 1);
  CHECK_EQ(std::string(planned[0].name), "y");
  CHECK_EQ(planned[0].dtype, LOWLAT_BF16);
  CHECK_EQ(planned[0].ndim, 2);
  CHECK_EQ(planned[0].shape[0], 1);
  CHECK_EQ(planned[0].shape[1], 4);
  CHECK(planned[0].data == nullptr);
  REQUIRE(call.run() == LOWLAT_OK);
  CHECK_EQ(call.y[0], 0x4130);  // 11
  CHECK_EQ(call.y[3], 0x4230);  // 44
}

TEST_CASE(refuses_wrong_calls_and_writes_nothing) {
  RankSum call;
  CHECK_EQ(lowlat_op_run("rank_sun", "v41", "scalar", &call.in, 1, &call.out, 1), LOWLAT_INVALID);
  CHECK(last().rfind("operation is rank_sun; needed one of hc_stats, ", 0) == 0);
  CHECK_EQ(lowlat_op_run("rank_sum", "v41", "scalar", nullptr, 1, &call.out, 1), LOWLAT_INVALID);
  CHECK_EQ(lowlat_op_run(nullptr, "v41", "scalar", &call.in, 1, &call.out, 1), LOWLAT_INVALID);
  CHECK_EQ(lowlat_op_run("rank_sum", "v41", "scalar", &call.in, 1, &call.out, -1), LOWLAT_INVALID);
  CHECK_EQ(lowlat_op_run("rank_sum", "v41", "scalar", &call.in, 1, &call.out, 0), LOWLAT_INVALID);
  CHECK_EQ(last(), "output y is missing");
  lowlat_array twice[2] = {call.in, call.in};
  CHECK_EQ(lowlat_op_run("rank_sum", "v41", "scalar", twice, 2, &call.out, 1), LOWLAT_INVALID);
  CHECK_EQ(last(), "partial is given twice");
  call.out.shape[1] = 5;
  CHECK_EQ(call.run(), LOWLAT_INVALID);
  CHECK_EQ(last(), "output y has shape [1, 5]; needed [1, 4]");
  call.out.shape[1] = 4;
  call.out.dtype = LOWLAT_F32;
  CHECK_EQ(call.run(), LOWLAT_INVALID);
  CHECK_EQ(last(), "y is f32; needed bf16");
  call.out.dtype = 77;
  CHECK_EQ(call.run(), LOWLAT_INVALID);
  RankSum odd;
  odd.in.data = reinterpret_cast<char*>(odd.partial) + 1;
  odd.in.shape[0] = 1;
  CHECK_EQ(odd.run(), LOWLAT_INVALID);
  CHECK_EQ(last(), "partial's data is not aligned to its dtype");
  odd.in.data = nullptr;
  CHECK_EQ(odd.run(), LOWLAT_INVALID);
  CHECK_EQ(last(), "partial has no data");
  odd.in.shape[2] = std::int64_t{1} << 60;
  CHECK_EQ(odd.run(), LOWLAT_INVALID);
  odd.in.shape[2] = -4;
  CHECK_EQ(odd.run(), LOWLAT_INVALID);
  odd.in.ndim = 7;
  CHECK_EQ(odd.run(), LOWLAT_INVALID);
  for (const std::uint16_t code : call.y) CHECK_EQ(code, 7);
  for (const std::uint16_t code : odd.y) CHECK_EQ(code, 7);
}

TEST_CASE(takes_the_entry_of_the_model) {
  // One name, an entry a model: arrays are held to the model's, and the list names it once.
  std::vector<std::uint16_t> q(128);
  std::int64_t pos = 0;
  const lowlat_array inputs[] = {array("q", LOWLAT_BF16, {1, 1, 128}, q.data()),
                                 array("pos", LOWLAT_I64, {1}, &pos)};
  lowlat_array planned[LOWLAT_MAX_OP_OUTPUTS];
  int32_t count = 0;
  REQUIRE(lowlat_op_plan("index_query", "v41", "scalar", inputs, 2, planned, &count) == LOWLAT_OK);
  CHECK_EQ(count, 1);
  CHECK_EQ(planned[0].dtype, LOWLAT_BF16);
  REQUIRE(lowlat_op_plan("index_query", "v4", "scalar", inputs, 2, planned, &count) == LOWLAT_OK);
  REQUIRE(count == 2);
  CHECK_EQ(planned[0].dtype, LOWLAT_U8);
  CHECK_EQ(std::string(planned[1].name), "qs");
  CHECK_EQ(lowlat_op_plan("index_query", "v5", "scalar", inputs, 2, planned, &count),
           LOWLAT_INVALID);
  CHECK_EQ(last(), "model is v5; index_query is there for v4 v41");
  CHECK_EQ(lowlat_op_plan("candidate_blocks", "v4", "scalar", inputs, 2, planned, &count),
           LOWLAT_INVALID);
  CHECK_EQ(last(), "model is v4; candidate_blocks is there for v41");
  CHECK_EQ(lowlat_op_plan("index_quer", "v4", "scalar", inputs, 2, planned, &count),
           LOWLAT_INVALID);
  const std::string known = last();
  CHECK(known.find("index_query, index_key, index_select, candidate_blocks, ") != known.npos);
}

TEST_CASE(a_body_that_throws_has_written_nothing) {
  OpSpec op = sample();
  op.scalar = [](const OpArgs& a) {
    a.out<float>("x")[0] = 5.0f;
    throw std::runtime_error("half way");
  };
  float x[4] = {1, 2, 3, 4}, out[2] = {8, 9};
  std::vector<std::uint8_t> w(512);
  std::vector<float> scale(8, 1.0f);
  std::int64_t level = 0;
  const std::vector<lowlat_array> inputs = {
      array("x", LOWLAT_F32, {1, 4}, x), array("w", LOWLAT_U8, {32, 16}, w.data()),
      array("scale", LOWLAT_F32, {4, 2}, scale.data()), array("level", LOWLAT_I64, {}, &level)};
  lowlat_array output = array("x", LOWLAT_F32, {1, 2}, out);
  CHECK_THROWS(lowlat::host::op_run(op, "v41", "scalar", inputs, {&output, 1}));
  CHECK_EQ(out[0], 8.0f);
  CHECK_EQ(out[1], 9.0f);
}

TEST_CASE(lists_every_operation_as_json) {
  const std::string json = lowlat_op_list();
  CHECK(json.rfind("[{\"name\": \"hc_stats\", \"models\": \"v4 v41\", \"about\": \"", 0) == 0);
  for (const OpSpec& op : lowlat::host::op_table()) {
    CHECK(json.find(std::string("{\"name\": \"") + op.name + "\", \"models\"") != json.npos);
    CHECK(!op.out.empty() && op.out.size() <= LOWLAT_MAX_OP_OUTPUTS);
    // Each output has one declaration.
    for (const auto& out : op.out) {
      int count = 0;
      for (const auto& n : op.numerics) count += std::string(n.output) == out.name ? 1 : 0;
      CHECK_EQ(count, 1);
    }
    CHECK_EQ(op.numerics.size(), op.out.size());
  }
  CHECK(json.find("{\"name\": \"block\", \"dtype\": \"i64\", \"shape\": \"\", \"optional\": false, "
                  "\"about\": \"b: 128 (V4's) or 32 (V4.1's)\"}") != json.npos);
  CHECK(json.find("\"scalar\": {\"y\": \"bitwise\"}}}") != json.npos);
  // Brackets outside strings balance and no raw control character but the line breaks is there.
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"' && (i == 0 || json[i - 1] != '\\')) in_string = !in_string;
    if (!in_string && (c == '[' || c == '{')) ++depth;
    if (!in_string && (c == ']' || c == '}')) --depth;
    CHECK(c >= ' ' || (c == '\n' && !in_string));
  }
  CHECK_EQ(depth, 0);
  CHECK(!in_string);
}
