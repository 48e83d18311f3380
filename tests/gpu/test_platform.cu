// The platform nvidia keeps the contract (which compiles only when it does) on a device, and the
// instructions of sm_90 do what their comments say.
#include "platform/nvidia.hpp"

#include "platform/contract.hpp"
#include "platform/nvidia_sm90.cuh"

#include "gpu.cuh"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "random_values.hpp"

namespace plat = lowlat::nvidia::plat;
namespace sm90 = lowlat::nvidia::sm90;
using lowlat::host::cuda::check;
using lowlat::host::cuda::Event;
using lowlat::host::cuda::Graph;
using lowlat::host::cuda::Stream;
using lowlat::testing::finish;
using lowlat::testing::need_device;
using lowlat::testing::OnDevice;

namespace {

// No wait of a test lasts longer.
constexpr std::uint64_t kBudgetNs = 2'000'000'000;

__global__ void rounding_kernel(float* out, float e) {
  out[0] = plat::fma(1.0f + e, 1.0f - e, -1.0f);
  out[1] = (1.0f + e) * (1.0f - e) - 1.0f;
  out[2] = plat::rsqrt(3.0f);
  out[3] = 1.0f / 3.0f;
  out[4] = plat::sqrt(2.0f);
}

__global__ void warp_kernel(float* sums, float* maxima, std::uint32_t* words, float nan) {
  const int lane = plat::thread_idx();
  sums[lane] = plat::warp_sum(static_cast<float>(lane + 1));
  maxima[lane] = plat::warp_max(lane == 3 ? nan : static_cast<float>(-lane));
  maxima[32 + lane] = plat::warp_max(nan);
  words[lane] = plat::warp_shuffle(static_cast<std::uint32_t>(lane), (lane + 5) % 32);
  words[32 + lane] = plat::warp_shuffle_xor(static_cast<std::uint32_t>(lane), 9);
  const std::uint64_t odd = plat::warp_ballot(lane % 2 == 1);
  words[64 + lane] = static_cast<std::uint32_t>(odd);
  words[96 + lane] = static_cast<std::uint32_t>(plat::popcount(odd));
}

__global__ void any_kernel(std::uint32_t* out, int who) {
  const bool any = plat::block_any(plat::thread_idx() == who);
  out[plat::thread_idx()] = any ? 1u : 0u;
}

__global__ void atomics_kernel(std::uint32_t* words) {
  plat::atomic_add<plat::Scope::device>(&words[0], 2u);
  plat::atomic_cas<plat::Scope::device>(&words[1], 7u, static_cast<std::uint32_t>(blockIdx.x));
}

// Block 0 sends every epoch's packet and waits until block 1 has taken it. status[block]: the last
// epoch of each, or 0 where a wait expired or a payload was not whole.
__global__ void exchange_kernel(plat::TaggedWords* box, std::uint32_t* taken, std::uint32_t* status,
                                std::uint32_t first, std::uint32_t count) {
  if (plat::thread_idx() != 0) return;
  const std::uint64_t deadline_ns = plat::clock_ns() + kBudgetNs;
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::uint32_t epoch = first + i;
    if (blockIdx.x == 0) {
      const std::uint32_t payload[plat::kTaggedPayload] = {epoch, epoch * 3u, ~epoch};
      plat::store_tagged(box, payload, epoch);
      while (plat::load_acquire<plat::Scope::system>(taken) != epoch) {
        if (plat::clock_ns() > deadline_ns) return;
        plat::spin_pause();
      }
    } else {
      std::uint32_t seen[plat::kTaggedPayload];
      while (!plat::load_tagged(box, epoch, seen)) {
        if (plat::clock_ns() > deadline_ns) return;
        plat::spin_pause();
      }
      if (seen[0] != epoch || seen[1] != epoch * 3u || seen[2] != ~epoch) return;
      plat::store_release<plat::Scope::system>(taken, epoch);
    }
  }
  status[blockIdx.x] = first + count - 1u;
}

// Copies 4 KB by two bulk copies. done[0]: both landed in time; done[1]: a barrier that nothing
// arrives at was left at its deadline.
__global__ void bulk_kernel(std::uint32_t* out, const std::uint32_t* src, std::uint32_t* done) {
  __shared__ alignas(128) std::uint32_t landed[1024];
  __shared__ std::uint64_t barriers[2];
  if (plat::thread_idx() == 0) {
    sm90::barrier_init(&barriers[0], 1);
    sm90::barrier_init(&barriers[1], 1);
    sm90::fence_barrier_init();
  }
  plat::block_sync();
  if (plat::thread_idx() == 0) {
    sm90::bulk_prefetch(src, sizeof landed);
    sm90::barrier_arrive_expect(&barriers[0], sizeof landed);
    sm90::bulk_load(landed, src, sizeof landed / 2, &barriers[0]);
    sm90::bulk_load(landed + 512, src + 512, sizeof landed / 2, &barriers[0],
                    sm90::CacheHint::evict_first);
  }
  const bool arrived = sm90::barrier_wait(&barriers[0], 0, plat::clock_ns() + kBudgetNs);
  const bool late = !sm90::barrier_wait(&barriers[1], 0, plat::clock_ns() + 100'000);
  if (arrived) {
    for (int i = plat::thread_idx(); i < 1024; i += 128) out[i] = landed[i];
  }
  if (plat::thread_idx() == 0) {
    done[0] = arrived ? 1u : 0u;
    done[1] = late ? 1u : 0u;
  }
}

// d[16, 8] = a[16, 16] b[8, 16]^T by one warp; both matrices row by row in shared memory.
__global__ void mma_kernel(float* out, const std::uint16_t* a, const std::uint16_t* b) {
  __shared__ alignas(16) std::uint16_t rows_a[16][16], rows_b[8][16];
  const int lane = plat::thread_idx();
  for (int i = lane; i < 256; i += 32) rows_a[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) rows_b[i / 16][i % 16] = b[i];
  plat::block_sync();
  std::uint32_t part_a[4], part_b[2];
  // Matrices: rows 0-7 and 8-15 of the lower k, then of the upper.
  sm90::load_matrices(part_a, &rows_a[lane % 16][lane / 16 * 8]);
  sm90::load_matrices(part_b, &rows_b[lane % 8][lane / 8 % 2 * 8]);
  float d[4] = {};
  sm90::mma_bf16(d, part_a, part_b);
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// The same product with b given as [16, 8]: its matrices are turned while they are loaded.
__global__ void turned_kernel(float* out, const std::uint16_t* a, const std::uint16_t* b) {
  __shared__ alignas(16) std::uint16_t columns_a[16][16], rows_b[16][8];
  const int lane = plat::thread_idx();
  for (int i = lane; i < 256; i += 32) columns_a[i % 16][i / 16] = a[i];
  for (int i = lane; i < 128; i += 32) rows_b[i % 16][i / 16] = b[i];
  plat::block_sync();
  std::uint32_t part_a[4], part_b[2];
  sm90::load_matrices_turned(part_a, &columns_a[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
  sm90::load_matrices_turned(part_b, &rows_b[lane % 16][0]);
  float d[4] = {};
  sm90::mma_bf16(d, part_a, part_b);
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

// d[64, 8] = a[64, 16] b[8, 16]^T by a warp group. Cores of 8 rows of 16 bytes, 128 bytes each:
// core (row / 8, k / 8) of a at 2 (row / 8) + k / 8.
__global__ void wgmma_kernel(float* out, const std::uint16_t* a, const std::uint16_t* b) {
#ifdef LOWLAT_HAS_WGMMA
  __shared__ alignas(128) std::uint16_t cores_a[64 * 16], cores_b[8 * 16];
  const auto place = [](int row, int k) {
    return (2 * (row / 8) + k / 8) * 64 + row % 8 * 8 + k % 8;
  };
  for (int i = plat::thread_idx(); i < 64 * 16; i += 128) cores_a[place(i / 16, i % 16)] = a[i];
  for (int i = plat::thread_idx(); i < 8 * 16; i += 128) cores_b[place(i / 16, i % 16)] = b[i];
  sm90::fence_async_shared();
  plat::block_sync();
  float d[4] = {};
  sm90::wgmma_fence();
  sm90::wgmma_bf16(d, sm90::wgmma_matrix(cores_a, 128, 256), sm90::wgmma_matrix(cores_b, 128, 256));
  sm90::wgmma_commit();
  sm90::wgmma_wait<0>();
  const int warp = plat::thread_idx() / 32, lane = plat::thread_idx() % 32;
  const int g = 16 * warp + lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
#endif
}

// The producer lets its successor start, then takes its time, then writes.
__global__ void producer_kernel(std::uint32_t* word, std::uint32_t value, std::uint64_t delay_ns) {
  sm90::launch_dependents();
  const std::uint64_t until_ns = plat::clock_ns() + delay_ns;
  while (plat::clock_ns() < until_ns) plat::spin_pause();
  *word = value;
}
__global__ void consumer_kernel(std::uint32_t* out, const std::uint32_t* word) {
  sm90::wait_for_predecessors();
  *out = *word;
}

std::vector<float> product(const std::vector<std::uint16_t>& a, const std::vector<std::uint16_t>& b,
                           int rows, int columns, int k) {
  std::vector<float> d(static_cast<std::size_t>(rows) * columns);
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      double sum = 0.0;
      for (int i = 0; i < k; ++i) {
        sum +=
            lowlat::reference::from_bf16(a[m * k + i]) * lowlat::reference::from_bf16(b[n * k + i]);
      }
      d[m * columns + n] = static_cast<float>(sum);
    }
  }
  return d;
}

void check_product(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK_NEAR(got[i], want[i], 1e-5);
}

}  // namespace

TEST_CASE(roundings_are_the_contracts) {
  need_device();
  const float e = std::numeric_limits<float>::epsilon();
  OnDevice<float> out(5);
  rounding_kernel<<<1, 1>>>(out.data(), e);
  finish();
  const std::vector<float> seen = out.get();
  CHECK_EQ(seen[0], -e * e);
  // A compiler that contracts the product and the difference gives -e^2 here.
  CHECK_EQ(seen[1], 0.0f);
  CHECK_EQ(seen[2], 1.0f / std::sqrt(3.0f));
  CHECK_EQ(seen[3], 1.0f / 3.0f);
  CHECK_EQ(seen[4], std::sqrt(2.0f));
}

TEST_CASE(warp_functions_reach_every_lane) {
  need_device();
  OnDevice<float> sums(32), maxima(64);
  OnDevice<std::uint32_t> words(128);
  warp_kernel<<<1, 32>>>(sums.data(), maxima.data(), words.data(),
                         std::numeric_limits<float>::quiet_NaN());
  finish();
  const std::vector<float> sum = sums.get(), max = maxima.get();
  const std::vector<std::uint32_t> word = words.get();
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    CHECK_EQ(sum[lane], 528.0f);
    CHECK_EQ(max[lane], 0.0f);
    CHECK(std::isnan(max[32 + lane]));
    CHECK_EQ(word[lane], (lane + 5) % 32);
    CHECK_EQ(word[32 + lane], lane ^ 9u);
    CHECK_EQ(word[64 + lane], 0xaaaa'aaaau);
    CHECK_EQ(word[96 + lane], 16);
  }
}

TEST_CASE(one_thread_of_a_block_is_heard_by_all) {
  need_device();
  OnDevice<std::uint32_t> out(256);
  for (const int who : {200, -1}) {
    any_kernel<<<1, 256>>>(out.data(), who);
    finish();
    for (const std::uint32_t any : out.get()) CHECK_EQ(any, who >= 0 ? 1 : 0);
  }
}

TEST_CASE(atomics_lose_nothing) {
  need_device();
  OnDevice<std::uint32_t> words(std::vector<std::uint32_t>{5, 7});
  atomics_kernel<<<64, 128>>>(words.data());
  finish();
  const std::vector<std::uint32_t> seen = words.get();
  CHECK_EQ(seen[0], 5 + 2 * 64 * 128);
  CHECK(seen[1] < 64);  // one block's number, and no later one's over it
}

TEST_CASE(a_packet_is_whole_when_its_tag_is_seen) {
  need_device();
  OnDevice<plat::TaggedWords> box(std::vector<plat::TaggedWords>(1));
  OnDevice<std::uint32_t> taken(std::vector<std::uint32_t>{0});
  // The second run wraps: tags go through 2^32 - 1 to 0.
  for (const std::uint32_t first : {1u, 0xffff'fff0u}) {
    OnDevice<std::uint32_t> status(std::vector<std::uint32_t>{0, 0});
    const std::uint32_t count = first == 1u ? 5000u : 64u;
    exchange_kernel<<<2, 32>>>(box.data(), taken.data(), status.data(), first, count);
    finish();
    for (const std::uint32_t last : status.get()) CHECK_EQ(last, first + count - 1u);
  }
}

TEST_CASE(bulk_copies_land_and_a_wait_has_a_deadline) {
  need_device();
  std::vector<std::uint32_t> values(1024);
  for (std::uint32_t i = 0; i < 1024; ++i) values[i] = i * 2654435761u;
  const OnDevice<std::uint32_t> src(values);
  OnDevice<std::uint32_t> out(1024), done(2);
  bulk_kernel<<<1, 128>>>(out.data(), src.data(), done.data());
  finish();
  CHECK(lowlat::testing::equal_bytes(out.get(), values));
  CHECK_EQ(done.get()[0], 1);
  CHECK_EQ(done.get()[1], 1);
}

TEST_CASE(tensor_products_have_the_layout_of_their_comments) {
  need_device();
  lowlat::testing::Random random(7);
  const auto a = random.bf16(64 * 16), b = random.bf16(8 * 16);
  const OnDevice<std::uint16_t> on_a(a), on_b(b);
  OnDevice<float> out(16 * 8);
  const std::vector<float> want = product(a, b, 64, 8, 16);
  const std::vector<float> first_rows(want.begin(), want.begin() + 16 * 8);
  mma_kernel<<<1, 32>>>(out.data(), on_a.data(), on_b.data());
  finish();
  check_product(out.get(), first_rows);
  OnDevice<float> turned(16 * 8);
  turned_kernel<<<1, 32>>>(turned.data(), on_a.data(), on_b.data());
  finish();
  check_product(turned.get(), first_rows);
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  if (properties.major != 9) return;  // wgmma is Hopper's
  OnDevice<float> group(64 * 8);
  wgmma_kernel<<<1, 128>>>(group.data(), on_a.data(), on_b.data());
  finish();
  check_product(group.get(), want);
}

TEST_CASE(a_successor_that_started_early_sees_what_was_written_late) {
  need_device();
  OnDevice<std::uint32_t> word(1), out(1);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(1);
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (std::uint32_t value = 1; value <= 20; ++value) {
    producer_kernel<<<1, 1>>>(word.data(), value, 1'000'000);
    check(cudaLaunchKernelEx(&config, consumer_kernel, out.data(),
                             static_cast<const std::uint32_t*>(word.data())),
          "cudaLaunchKernelEx");
    finish();
    CHECK_EQ(out.get()[0], value);
  }
}

// Planted: a capture that only end() ends. The next allocation is refused.
TEST_CASE(a_launch_that_throws_leaves_no_capture_open) {
  need_device();
  const Stream stream, beside;
  OnDevice<std::uint32_t> word(1);
  for (const bool forks : {false, true}) {
    bool thrown = false;
    try {
      const Graph graph(stream.get(), [&] {
        producer_kernel<<<1, 1, 0, stream.get()>>>(word.data(), 7, 0);
        if (forks) {
          const Event begun;
          begun.record(stream.get());
          begun.hold(beside.get());  // joined by nobody, so that the capture cannot end well
        }
        throw std::runtime_error("a launch is refused");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
    for (const Stream* each : {&stream, &beside}) {
      cudaStreamCaptureStatus state;
      check(cudaStreamIsCapturing(each->get(), &state), "cudaStreamIsCapturing");
      CHECK(state == cudaStreamCaptureStatusNone);
    }
    word.set({1});
    const OnDevice<std::uint32_t> next(1);
    const Graph graph(stream.get(),
                      [&] { producer_kernel<<<1, 1, 0, stream.get()>>>(word.data(), 9, 0); });
    CHECK_EQ(word.get()[0], 1u);
    graph.launch(stream.get());
    stream.wait();
    CHECK_EQ(word.get()[0], 9u);
  }
}
