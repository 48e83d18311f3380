// fused/front_launch.cuh: one launch with shared memory, a cluster and a programmatic edge.
#pragma once

#include <cuda_runtime.h>

#include "fused/exchange.hpp"

namespace lowlat::nvidia::fused {

// Launches kernel(params) with `shared_bytes` of dynamic shared memory. `cluster` blocks along x
// are a cluster (1: none); more than 8 need the part's consent, which is asked for here.
// Programmatic: the kernel may start before its predecessor in the stream has ended, and waits
// inside. `started`, where given, is recorded when every block of the kernel has begun: who waits
// for it in another stream finds the kernel resident.
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), dim3 grid, int threads, int shared_bytes,
                          int cluster, bool programmatic, cudaStream_t stream, const Params& params,
                          cudaEvent_t started = nullptr) {
  const auto attribute = [&](cudaFuncAttribute what, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), what, value);
  };
  // One division of the memory for all of them: a multiprocessor changes it only when it is empty.
  cudaError_t error =
      attribute(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error == cudaSuccess && shared_bytes > 48 * 1024) {
    error = attribute(cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess && cluster > 8) {
    error = attribute(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = 1;
    attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  if (started != nullptr) {
    attributes[count].id = cudaLaunchAttributeLaunchCompletionEvent;
    attributes[count].val.launchCompletionEvent.event = started;
    attributes[count].val.launchCompletionEvent.flags = 0;
    ++count;
  }
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// launch.operator()<kTiles>() with the fewest groups of eight tokens that were built for num_rows.
template <class Launch>
cudaError_t with_tiles(int num_rows, Launch launch) {
  if (num_rows < 1 || num_rows > kMaxFusedRows) return cudaErrorInvalidValue;
  if (num_rows <= 8) return launch.template operator()<1>();
  if (num_rows <= 16) return launch.template operator()<2>();
  if (num_rows <= 24) return launch.template operator()<3>();
  return launch.template operator()<6>();
}

}  // namespace lowlat::nvidia::fused
