// bench/machine.cuh: the device that a program measures on: its read rate, of which floors are
// made, and its clock.
#pragma once

#include <cuda_runtime.h>

#include "bench/attn_bench.hpp"
#include "bench/read_rate.cuh"
#include "bench/report.hpp"
#include "host/nvidia/device.hpp"

namespace lowlat::bench {

static __global__ void clock_rate(std::uint64_t* out_clocks, std::uint64_t* out_ns) {
  std::uint64_t begin_ns, end_ns;
  const std::int64_t begin = clock64();
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin_ns)::"memory");
  while (clock64() - begin < 300'000'000) {
  }
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end_ns)::"memory");
  *out_clocks = static_cast<std::uint64_t>(clock64() - begin);
  *out_ns = end_ns - begin_ns;
}

// Bytes a second of a plain read of 2 GiB on the current device; the better of two grids.
inline double read_rate() {
  constexpr std::size_t kBytes = std::size_t{2} << 30;
  Buffer<std::uint8_t> data(kBytes);
  Buffer<std::uint32_t> out(1);
  int sms = 0;
  cuda_must(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "attribute");
  double best = 0.0;
  for (const int blocks : {4, 8}) {
    Graph graph([&](cudaStream_t stream) {
      read_for_rate<<<sms * blocks, 512, 0, stream>>>(reinterpret_cast<const uint4*>(data.get()),
                                                      kBytes / 16, out.get());
    });
    best = std::max(best, static_cast<double>(kBytes) / time_of(graph, 20).median_us * 1e6);
  }
  return best;
}

// Measures the current device, which stands for all of `gpus`.
inline Machine measure_machine(int gpus) {
  Machine machine;
  cudaDeviceProp properties;
  int device = 0, runtime = 0, driver = 0;
  cuda_must(cudaGetDevice(&device), "device");
  cuda_must(cudaGetDeviceProperties(&properties, device), "properties");
  cuda_must(cudaRuntimeGetVersion(&runtime), "version");
  cuda_must(cudaDriverGetVersion(&driver), "version");
  machine.gpu = properties.name;
  machine.gpus = gpus;
  Buffer<std::uint64_t> clocks(1), ns(1);
  clock_rate<<<1, 1>>>(clocks.get(), ns.get());
  cuda_must(cudaDeviceSynchronize(), "clock");
  machine.clock_mhz =
      static_cast<double>(clocks.take()[0]) * 1e3 / static_cast<double>(ns.take()[0]);
  machine.read_bytes_per_s = read_rate();
  machine.cuda =
      host::cuda::version_words(runtime) + ", driver for " + host::cuda::version_words(driver);
  return machine;
}

// Whether `gpus` devices are there that run these kernels; says a refusal where not.
inline bool require_gpus(Report& report, int gpus) {
  std::string why;
  const int seen = host::cuda::count_devices(why);
  if (seen < gpus) {
    report.refusal(seen == 0 ? "needs an NVIDIA GPU of sm_90: " + why
                             : "needs " + std::to_string(gpus) + " GPUs; CUDA sees " +
                                   std::to_string(seen));
    return false;
  }
  for (int device = 0; device < gpus; ++device) {
    why = host::cuda::refusal_of_device(device);
    if (why.empty()) continue;
    report.refusal("GPU " + std::to_string(device) + ": " + why);
    return false;
  }
  return true;
}

// A measurement on `gpus` devices: refused where `why` is a reason or they are not there, else
// run(machine), which gives the exit status, after the machine's line.
template <class Run>
int on_machine(Report& report, int gpus, const std::string& why, Run run) {
  if (!why.empty()) return report.refusal(why);
  if (!require_gpus(report, gpus)) return 1;
  const Machine machine = measure_machine(gpus);
  report.machine(machine);
  return run(machine);
}

}  // namespace lowlat::bench
