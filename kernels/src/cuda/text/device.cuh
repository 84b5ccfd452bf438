// The device side of the prelude: the names that kernels use for what C++ does not have, in CUDA and PTX. `kernels/src/shim/shim.h` has the same
// names for a CPU. Headerless: nothing is included.
#define DP_KERNEL(name) extern "C" __global__ void __launch_bounds__(THREADS) name
// One that may take as many registers as it needs: more threads on a multiprocessor would not pay for what they spill.
#define DP_KERNEL_ALONE(name) extern "C" __global__ void __launch_bounds__(THREADS, 1) name
#define DP_IN(T) const T* __restrict__
#define DP_OUT(T) T* __restrict__
#define DP_SHARED(T, name, at, count) T* name = reinterpret_cast<T*>(dp_shared_memory + (at))
#define DP_SHARED_PTR(T) T*
#define DP_DEVICE static __device__ __forceinline__
#define DP_CONSTANT static __device__ const
#define DP_UNROLL _Pragma("unroll")
#define DP_UNROLL_SOME _Pragma("unroll 4")

extern __shared__ __align__(1024) unsigned char dp_shared_memory[];

typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

DP_DEVICE float bits_float(u32 b) { return __uint_as_float(b); }
DP_DEVICE float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
DP_DEVICE float widen(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DP_DEVICE float widen(float x) { return x; }
DP_DEVICE double widen(double x) { return x; }

template <class T> struct Narrow;
template <> struct Narrow<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct Narrow<float> {
    static __device__ __forceinline__ float of(float x) { return x; }
    static __device__ __forceinline__ float of(double x) { return float(x); }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct Narrow<f16> {
    static __device__ __forceinline__ f16 of(float x) {
        f16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <class T, class A> DP_DEVICE T narrow(A x) { return Narrow<T>::of(x); }

template <class T, int N> struct __align__(sizeof(T) * N) Pack { T v[N]; };

template <class T> struct Plain { typedef T type; };
template <class T> struct Plain<const T> { typedef T type; };

// --- global and shared memory
template <class T> DP_DEVICE typename Plain<T>::type dp_ld(T* p, i64 i) { return p[i]; }
template <class T> DP_DEVICE void dp_st(T* p, i64 i, T value) { p[i] = value; }
template <int N, class T> DP_DEVICE Pack<typename Plain<T>::type, N> dp_ld_pack(T* p, i64 i) {
    return *reinterpret_cast<const Pack<typename Plain<T>::type, N>*>(p + i);
}
template <int N, class T> DP_DEVICE void dp_st_pack(T* p, i64 i, Pack<T, N> value) { *reinterpret_cast<Pack<T, N>*>(p + i) = value; }

// --- collectives
template <class T> DP_DEVICE T dp_shfl(T value, int from) { return __shfl_sync(0xffffffffu, value, from); }
template <class T> DP_DEVICE T dp_shfl_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DP_DEVICE u32 dp_ballot(bool vote) { return __ballot_sync(0xffffffffu, vote); }
DP_DEVICE int dp_popc(u32 x) { return __popc(x); }

DP_DEVICE float dp_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// --- asynchronous copies
DP_DEVICE u32 dp_shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
// 16 bytes, of which the first `valid` are copied and the others zero.
template <class T> DP_DEVICE void dp_cp_async16(T* to, i64 i, const T* from, i64 j, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dp_shared_address(to + i)), "l"(from + (valid ? j : 0)), "r"(valid) : "memory");
}
DP_DEVICE void dp_cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DP_DEVICE void dp_cp_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// --- matrix units
template <class T> struct Mma;
template <> struct Mma<bf16> {
    static __device__ __forceinline__ void run(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
template <> struct Mma<f16> {
    static __device__ __forceinline__ void run(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
};
template <class T> DP_DEVICE void dp_mma_16816(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) { Mma<T>::run(c, a, b); }
template <bool TRANSPOSED, class T> DP_DEVICE void dp_ldmatrix_x4(u32 (&r)[4], T* base, i64 at) {
    u32 address = dp_shared_address(base + at);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
