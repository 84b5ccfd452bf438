// The device side of the prelude for Hopper (sm_90a): barriers in shared memory, the copy engine (TMA), products of warpgroups (`wgmma`). `shim/hopper.h` has the
// same names for a CPU. What a GPU does when it meets these instructions is in the PTX manual; what the shim makes of it, and checks, stands there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// A tensor as the copy engine takes it: made by the driver, never looked into.
struct __align__(64) TensorMap { u64 opaque[16]; };
#define DP_TENSOR(name) const __grid_constant__ TensorMap name

// --- barriers: each is eight bytes. A phase ends when all that were expected have arrived and all bytes that were expected were copied.
DP_DEVICE void dp_mbar_init(u64* bars, int i, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(dp_shared_address(bars + i)), "r"(arrivals) : "memory");
}
// What was initialised before is so for the copy engine too.
DP_DEVICE void dp_mbar_publish() { asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory"); }
DP_DEVICE void dp_mbar_arrive(u64* bars, int i) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(dp_shared_address(bars + i)) : "memory");
}
// Arrives, and makes the phase wait for so many bytes.
DP_DEVICE void dp_mbar_expect(u64* bars, int i, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(dp_shared_address(bars + i)), "r"(bytes) : "memory");
}
// Until the phase of this parity has ended.
DP_DEVICE void dp_mbar_wait(u64* bars, int i, u32 parity) {
    u32 at = dp_shared_address(bars + i), done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done) : "r"(at), "r"(parity) : "memory");
    } while (!done);
}

// --- the copy engine: the box of a tensor at (x, y, z), swizzled as the tensor says, to `to`; elements outside are zero.
template <class T> DP_DEVICE void dp_tensor_copy(T* to, const TensorMap& tensor, i32 x, i32 y, i32 z, u64* bars, int i) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dp_shared_address(to)),
                 "l"(&tensor), "r"(dp_shared_address(bars + i)), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// --- products of warpgroups: d[64, N] += a[64, 16] b[16, N] of halves in shared memory.
// A matrix of panels that are 128 bytes wide and swizzled so: `leading` bytes from panel to panel, `stride` from eight rows of one to the next eight.
template <class T> DP_DEVICE u64 dp_wgmma_matrix(T* at, u32 leading, u32 stride) {
    return u64(dp_shared_address(at) >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(1) << 62;
}
DP_DEVICE void dp_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DP_DEVICE void dp_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most PENDING groups are under way; the sums of the others are in `d`.
template <int PENDING, int N> DP_DEVICE void dp_wgmma_wait(float (&d)[N]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    DP_UNROLL
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Sums as operands, from the i-th on.
#define DP_SUMS_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define DP_SUMS_32(i) DP_SUMS_8(i), DP_SUMS_8(i + 8), DP_SUMS_8(i + 16), DP_SUMS_8(i + 24)
#define DP_SUMS_64(i) DP_SUMS_32(i), DP_SUMS_32(i + 32)
// Their places in the text.
#define DP_PLACES_64 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DP_WGMMA_128(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" DP_PLACES_64 "}, %64, %65, 1, 1, 1, %66, %67;" \
                 : DP_SUMS_64(0) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS))
#define DP_WGMMA_256(TYPE) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" DP_PLACES_64 ", " \
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
                 "}, %128, %129, 1, 1, 1, %130, %131;" \
                 : DP_SUMS_64(0), DP_SUMS_64(64) : "l"(a), "l"(b), "n"(A_ROWS), "n"(B_ROWS))
template <class T, int N> struct Wgmma;
#define DP_WGMMA(T, N) \
    template <> struct Wgmma<T, N> { \
        template <int A_ROWS, int B_ROWS> static __device__ __forceinline__ void run(float (&d)[N / 2], u64 a, u64 b) { DP_WGMMA_##N(#T); } \
    };
DP_WGMMA(bf16, 128)
DP_WGMMA(bf16, 256)
DP_WGMMA(f16, 128)
DP_WGMMA(f16, 256)
// ROWS: neighbours in shared memory are neighbours in m of a, in n of b; else in k.
template <class T, bool A_ROWS, bool B_ROWS, int N> DP_DEVICE void dp_wgmma(float (&d)[N], u64 a, u64 b) { Wgmma<T, 2 * N>::template run<A_ROWS, B_ROWS>(d, a, b); }
#endif
