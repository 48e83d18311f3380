// Every operation on the platform nvidia at true sizes: against reference by its declared bound,
// with every number of rows, and captured in a graph that is replayed with other inputs.
// The cases with "small" in their names are those that compute-sanitizer gets through.
#include "gpu.cuh"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "host/nvidia/call.hpp"
#include "op_case.hpp"

namespace host = lowlat::host;
namespace cuda = lowlat::host::cuda;
using lowlat::testing::equal_bytes;
using lowlat::testing::Inputs;
using lowlat::testing::need_device;
using lowlat::testing::OpCase;
using lowlat::testing::OpData;
using lowlat::testing::spec_of;

namespace {

using Bytes = std::vector<std::uint8_t>;

std::string label(const OpCase& one) { return std::string(one.op) + " " + one.model; }

// The outputs of one eager run, by name.
std::map<std::string, Bytes> run(const host::OpSpec& spec, OpData& data) {
  data.poison();
  const cuda::Stream stream;
  cuda::DeviceCall call(spec, data.args(), stream.get());
  cuda::find_launch(spec.name)(call);
  stream.wait();
  call.download();
  std::map<std::string, Bytes> outputs;
  for (const host::ArgSpec& arg : spec.out) outputs[arg.name] = data.output(arg.name);
  return outputs;
}

double value_at(const Bytes& bytes, std::string_view word, std::size_t i) {
  if (word == "bf16") {
    std::uint16_t code;
    std::memcpy(&code, &bytes[2 * i], 2);
    return lowlat::reference::from_bf16(code);
  }
  float v;
  std::memcpy(&v, &bytes[4 * i], 4);
  return v;
}

void complain(const std::string& what) { lowlat::check::report(__FILE__, __LINE__, what); }

// body(one) of every case, on several threads: most of the time is reference's. Each case is a call
// of its own, with a stream of its own.
template <class Body>
void for_each_case(const std::vector<OpCase>& cases, Body&& body) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < cases.size(); i = next++) {
      try {
        body(cases[i]);
      } catch (const std::exception& error) {
        complain(label(cases[i]) + ": " + error.what());
      }
    }
  };
  std::vector<std::jthread> threads;
  const unsigned num = std::clamp(std::thread::hardware_concurrency(), 1u, 12u);
  for (unsigned i = 0; i < num; ++i) threads.emplace_back(work);
}

// A bound that is a measure and a number, or bitwise. Bounds in words are for
// tests/gpu/test_true_shapes.py.
struct Bound {
  bool bitwise = false, ulp = false;
  double limit = -1.0;

  explicit Bound(std::string_view text) : bitwise(text == "bitwise") {
    ulp = text.starts_with("max_ulp <= ");
    if (!ulp && !text.starts_with("rel_l2 <= ")) return;
    const std::string number(text.substr(text.find("<= ") + 3));
    char* end = nullptr;
    const double value = std::strtod(number.c_str(), &end);
    if (*end == '\0') limit = value;
  }
  bool known() const { return bitwise || limit >= 0.0; }
};

void check_bound(const std::string& what, const Bound& bound, std::string_view word,
                 const Bytes& got, const Bytes& want) {
  if (bound.bitwise) {
    if (!equal_bytes(got, want)) complain(what + ": not bitwise");
    return;
  }
  double diff = 0.0, norm = 0.0, worst = 0.0;
  const std::size_t count = want.size() / (word == "bf16" ? 2 : 4);
  for (std::size_t i = 0; i < count; ++i) {
    const double a = value_at(got, word, i), b = value_at(want, word, i);
    if (std::isnan(a) != std::isnan(b)) worst = diff = std::numeric_limits<double>::infinity();
    if (std::isnan(b) || a == b) {
      if (!std::isnan(b)) norm += b * b;
      continue;
    }
    diff += (a - b) * (a - b);
    norm += b * b;
    const int exponent = b == 0.0 ? -126 : std::max(std::ilogb(b), -126);
    worst = std::max(worst, std::abs(a - b) / std::ldexp(1.0, exponent - 7));
  }
  const double seen = bound.ulp ? worst : std::sqrt(norm > 0.0 ? diff / norm : diff);
  if (!(seen <= bound.limit)) {
    complain(what + ": " + lowlat::check::words(seen) + ", declared " +
             lowlat::check::words(bound.limit));
  }
}

void compare_with_reference(const OpCase& one, Inputs kind) {
  const host::OpSpec& spec = spec_of(one);
  const auto known = [](const host::OpNumerics& n) {
    constexpr auto kNowhere = std::string_view::npos;
    return Bound(n.bound).known() && std::string_view(n.platforms).find("nvidia") != kNowhere;
  };
  if (std::ranges::none_of(spec.numerics, known)) return;
  OpData data(spec, one, 3, kind);
  const auto got = run(spec, data);
  data.poison();
  spec.reference(data.args());
  for (const host::ArgSpec& arg : spec.out) {
    for (const host::OpNumerics& n : spec.numerics) {
      if (std::string_view(n.output) != arg.name || !known(n)) continue;
      // A bound is over a whole random output; where most rows are zeros or equal values, one code
      // on the other side of a tie weighs more.
      const bool loose = kind == Inputs::awkward && !Bound(n.bound).bitwise;
      check_bound(label(one) + " " + arg.name, Bound(loose ? "rel_l2 <= 1e-1" : n.bound),
                  arg.dtype_word, got.at(arg.name), data.output(arg.name));
    }
  }
}

bool has_rows(const OpCase& one) { return one.dims.count("T") != 0 && one.dims.count("R") == 0; }

void replay(const OpCase& one, int num_replays) {
  const host::OpSpec& spec = spec_of(one);
  constexpr int kSets = 3;
  std::vector<OpData> sets;
  sets.reserve(kSets);
  std::vector<std::map<std::string, Bytes>> eager;
  for (std::uint32_t seed = 0; seed < kSets; ++seed) {
    // The second is awkward, so that what a replay leaves behind would show in the next.
    sets.emplace_back(spec, one, 20 + seed, seed == 1 ? Inputs::awkward : Inputs::random);
    eager.push_back(run(spec, sets.back()));
  }
  const cuda::Stream stream;
  cuda::DeviceCall call(spec, sets[0].args(), stream.get());
  const cuda::Launch launch = cuda::find_launch(spec.name);
  launch(call);  // takes the workspace
  stream.wait();
  call.rewind();
  const cuda::Graph graph(stream.get(), [&] { launch(call); });
  for (int i = 0; i < num_replays; ++i) {
    const OpData& data = sets[i % kSets];
    call.upload_from(data.args());
    graph.launch(stream.get());
    stream.wait();
    call.download_to(data.args());
    for (const host::ArgSpec& arg : spec.out) {
      const Bytes got = data.output(arg.name);
      if (equal_bytes(got, eager[i % kSets].at(arg.name))) continue;
      complain(label(one) + " " + arg.name + ": replay " + std::to_string(i));
    }
  }
}

}  // namespace

TEST_CASE(every_operation_has_launches_and_a_case) {
  for (const host::OpSpec& op : host::op_table()) {
    CHECK(cuda::find_launch(op.name) != nullptr);
    bool covered = false;
    for (const OpCase& one : lowlat::testing::true_cases()) covered |= &spec_of(one) == &op;
    if (!covered) complain(std::string(op.name) + ": no case");
  }
}

TEST_CASE(small_sizes_are_within_the_bounds) {
  need_device();
  for_each_case(lowlat::testing::small_cases(),
                [](const OpCase& one) { compare_with_reference(one, Inputs::random); });
}

TEST_CASE(awkward_rows_of_small_sizes_are_near) {
  need_device();
  for_each_case(lowlat::testing::small_cases(),
                [](const OpCase& one) { compare_with_reference(one, Inputs::awkward); });
}

// A few rows: reference is float64 on the host, and that a row is the same among more is the next
// case's to say.
TEST_CASE(true_sizes_are_within_the_bounds) {
  need_device();
  for_each_case(lowlat::testing::true_cases(), [](const OpCase& most) {
    OpCase one = most;
    if (one.dims.count("T") != 0) one.dims["T"] = 7;
    if (one.dims.count("B") != 0) one.dims["B"] = 2;
    compare_with_reference(one, Inputs::random);
    compare_with_reference(one, Inputs::awkward);
  });
}

// Rows do not depend on their neighbours: the first T of the most rows are those of T rows alone.
TEST_CASE(every_number_of_rows_gives_the_rows_of_the_most) {
  need_device();
  for_each_case(lowlat::testing::true_cases(), [](const OpCase& most) {
    if (!has_rows(most)) return;
    const host::OpSpec& spec = spec_of(most);
    OpData whole(spec, most, 4);
    const auto want = run(spec, whole);
    for (std::int64_t rows = 1; rows < most.dims.at("T"); ++rows) {
      OpCase one = most;
      one.dims["T"] = rows;
      OpData part(spec, one, 4, Inputs::random, &whole);
      for (const auto& [name, bytes] : run(spec, part)) {
        const Bytes first(want.at(name).begin(), want.at(name).begin() + bytes.size());
        if (!equal_bytes(bytes, first)) {
          complain(label(most) + " " + name + ": " + std::to_string(rows) + " rows");
        }
      }
    }
  });
}

TEST_CASE(a_graph_replays_small_sizes) {
  need_device();
  for_each_case(lowlat::testing::small_cases(), [](const OpCase& one) { replay(one, 6); });
}

TEST_CASE(a_graph_replays_with_other_inputs) {
  need_device();
  for_each_case(lowlat::testing::true_cases(), [](const OpCase& one) { replay(one, 30); });
}
