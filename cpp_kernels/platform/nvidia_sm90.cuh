// platform/nvidia_sm90.cuh: instructions of sm_90 and later: mbarriers, bulk copies, programmatic
// launch, and tensor-core products of few rows. Include platform/nvidia.hpp first.
//
// Names say what the instruction does; its operands keep PTX's order where that helps a reader of
// the PTX manual. Shared memory is named by its 32-bit address (shared_address). wgmma exists on
// sm_90a only, everything else on later parts too.
#pragma once

#ifndef LOWLAT_PLATFORM
#error "include platform/nvidia.hpp before this file"
#endif

#include <cstdint>

namespace lowlat::nvidia::sm90 {

LOWLAT_DEVICE std::uint32_t shared_address(const void* shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
}

// ---------------------------------------------------------------- mbarriers

// A phase ends when `arrivals` threads have arrived and all expected bytes have landed. One thread
// calls; then fence_barrier_init and a block_sync before anyone uses the barrier.
LOWLAT_DEVICE void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes the initialisation of barriers visible to bulk copies, of this block and of its cluster.
LOWLAT_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
LOWLAT_DEVICE void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// Arrives, and adds `bytes` to what the phase waits for.
LOWLAT_DEVICE void barrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
// Adds `bytes` to what the phase waits for; the phase must not be over before.
LOWLAT_DEVICE void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Arrives when this thread's copy_piece's so far have landed.
LOWLAT_DEVICE void barrier_arrive_copied(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
// True when the phase of this parity (0 the first, then 1, 0, ...) is over; what arrived before is
// visible then. Suspends for a while that the hardware chooses, some microseconds at most.
LOWLAT_DEVICE bool barrier_try_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n"
      "selp.b32 %0, 1, 0, over;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0u;
}
// The same without suspending.
LOWLAT_DEVICE bool barrier_test_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred over;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 over, [%1], %2;\n"
      "selp.b32 %0, 1, 0, over;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0u;
}
// As barrier_try_wait, until the phase is over (true) or plat::clock_ns() has passed deadline_ns
// (false). The clock is read only after the first try.
LOWLAT_DEVICE bool barrier_wait(std::uint64_t* barrier, std::uint32_t parity,
                                std::uint64_t deadline_ns) {
  while (!barrier_try_wait(barrier, parity)) {
    if (plat::clock_ns() > deadline_ns) return barrier_try_wait(barrier, parity);
  }
  return true;
}

// Orders ordinary accesses to shared memory before the bulk copies that follow (and wgmma's reads).
LOWLAT_DEVICE void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---------------------------------------------------------------- bulk copies

// What the second-level cache does with the lines of a copy.
enum class CacheHint : std::uint64_t {
  evict_first = 0x12f0'0000'0000'0000,  // read once: weights
  evict_last = 0x14f0'0000'0000'0000    // read again soon
};

// Copies `bytes` from global to this block's shared memory; they count on the barrier as they land.
// Both addresses and bytes are multiples of 16. One thread calls.
LOWLAT_DEVICE void bulk_load(void* dst_shared, const void* src, std::uint32_t bytes,
                             std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(dst_shared)),
      "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
LOWLAT_DEVICE void bulk_load(void* dst_shared, const void* src, std::uint32_t bytes,
                             std::uint64_t* barrier, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(dst_shared)),
      "l"(__cvta_generic_to_global(src)), "r"(bytes), "r"(shared_address(barrier)),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}
// Copies a box of a tensor (a CUtensorMap in constant memory, of three dimensions) from these
// coordinates on, the fastest first; the whole box's bytes count on the barrier. One thread calls.
LOWLAT_DEVICE void tensor_load(void* dst_shared, const void* map, int x, int y, int z,
                               std::uint64_t* barrier, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(dst_shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier)),
      "l"(static_cast<std::uint64_t>(hint))
      : "memory");
}
// Asks for the map itself, which the first copy waits for otherwise.
LOWLAT_DEVICE void tensor_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Copies 16 bytes from global to shared memory; see barrier_arrive_copied.
LOWLAT_DEVICE void copy_piece(std::uint32_t dst_shared, const void* src, CacheHint hint) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst_shared),
               "l"(__cvta_generic_to_global(src)), "l"(static_cast<std::uint64_t>(hint))
               : "memory");
}
// Asks for `bytes` to be in the second-level cache; nothing waits for it.
LOWLAT_DEVICE void bulk_prefetch(const void* src, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(src)),
               "r"(bytes)
               : "memory");
}

// ---------------------------------------------------------------- programmatic launch

// Waits until the kernels before this one in the stream have ended (or said that what they wrote is
// there by ending); returns at once in an ordinary launch. All that they wrote is visible then.
LOWLAT_DEVICE void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next kernel of the stream start once every block has called this or ended.
LOWLAT_DEVICE void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---------------------------------------------------------------- registers

// From here on a thread of this group of four warps (128 threads, all call) has kCount registers, a
// multiple of 8: what `fewer` gives back, `more` waits for and takes. Parts that lack the
// instruction keep what the launch gave.
template <int kCount>
LOWLAT_DEVICE void more_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
LOWLAT_DEVICE void fewer_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_FEAT_SM100_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM103_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// ---------------------------------------------------------------- products

// d[16, 8] += a[16, 16] b[16, 8], bf16 in, fp32 sums; a warp calls. With lane = 4 g + t:
//   a[0] = (row g, k 2t 2t+1)  a[1] = (row g + 8, same k)  a[2], a[3] = the same rows at k + 8
//   b[0] = (k 2t 2t+1, column g)  b[1] = (k + 8)
//   d[0] d[1] = (row g, columns 2t 2t+1)  d[2] d[3] = (row g + 8)
// The lower half of a word is the lower k.
LOWLAT_DEVICE void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4],
                            const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same with half of K: d[16, 8] += a[16, 8] b[8, 8], of which a[0], a[1] and b[0] are as above.
LOWLAT_DEVICE void mma_bf16_half(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
      "{%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

// The same with fp16 in.
LOWLAT_DEVICE void mma_f16(float (&d)[4], const std::uint32_t (&a)[4],
                           const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8 x 8 matrices of 16-bit values: lane i gives the address of row i % 8 of matrix i / 8, and
// gets in out[m] the two values of row lane / 4, columns 2 (lane % 4) and the next, of matrix m.
LOWLAT_DEVICE void load_matrices(std::uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
LOWLAT_DEVICE void load_matrices(std::uint32_t (&out)[4], std::uint32_t shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_row)
               : "memory");
}
LOWLAT_DEVICE void load_matrices(std::uint32_t (&out)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared_address(shared_row))
               : "memory");
}
// The same with each matrix turned: lane's two values are of column lane / 4.
LOWLAT_DEVICE void load_matrices_turned(std::uint32_t (&out)[4], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(shared_row))
               : "memory");
}
LOWLAT_DEVICE void load_matrices_turned(std::uint32_t (&out)[2], const void* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(shared_address(shared_row))
               : "memory");
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LOWLAT_HAS_WGMMA 1
// Products of a warp group (four warps, 128 threads), which read shared memory on their own:
// wgmma_fence, products, wgmma_commit, then wgmma_wait before the sums are read.
LOWLAT_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LOWLAT_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending groups of products are under way.
template <int kPending>
LOWLAT_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// A matrix of 8-row cores of 16 bytes a row, each core 128 bytes in one piece, without swizzle:
// `along_k` bytes from a core to the next along K, `along_rows` to the next eight rows.
LOWLAT_DEVICE std::uint64_t wgmma_matrix(const void* shared, std::uint32_t along_k,
                                         std::uint32_t along_rows) {
  const auto field = [](std::uint32_t bytes) -> std::uint64_t { return (bytes & 0x3ffffu) >> 4; };
  return field(shared_address(shared)) | field(along_k) << 16 | field(along_rows) << 32;
}
// d[64, 8] += a[64, 16] b[8, 16]^T, both in shared memory, bf16 in, fp32 sums. Warp w of the group
// holds rows 16 w and on, as mma_bf16's d.
LOWLAT_DEVICE void wgmma_bf16(float (&d)[4], std::uint64_t a_matrix, std::uint64_t b_matrix) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, "
      "1, 1, 1, 0, 0;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "l"(a_matrix), "l"(b_matrix));
}
#endif

}  // namespace lowlat::nvidia::sm90
