// The CPU shim: what a kernel's text sees instead of a GPU when a C++ compiler compiles it.
//
// One launch runs its blocks one after the other; the threads of a block are fibers of one CPU thread, resumed in an order that is shuffled each time
// from a seed. A fiber leaves the CPU only at a barrier, a shuffle or another collective of its warp, so a text that lacks a barrier computes something
// else under some order; and so that no luck is needed, every access to shared memory is checked:
//   - two threads may touch the same bytes, one of them writing, only with a barrier of the block (or of their warp, if they share it) between: a shuffle or a vote is none;
//   - shared memory is poisoned when a block begins, global results and scratch before the first launch;
//   - each pointer knows the memory it came from, and no access leaves it; inputs are not written; two threads never write one element in one launch;
//   - a barrier that some thread does not reach ends the launch with an error, as does a collective that half a warp reaches.
// `cp.async` copies when it is waited for, not before. The traffic with global memory is counted.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sys/mman.h>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace dp {

struct Dim3 { unsigned x, y, z; };

// A global allocation. `writers` has one entry for each two bytes: which thread of which block last wrote it, in which launch. `sectors` has one for each
// 32 bytes: the launches that last read and wrote it. `read` and `written` count a sector once a launch: what a perfect cache would leave for memory.
struct Memory {
    char* base;
    uint64_t bytes;
    uint64_t* writers;
    uint32_t (*sectors)[2];
    uint64_t read, written;
    int32_t writable;
};

// As in `kernels/src/shim/mod.rs`.
struct Arg {
    int32_t kind;  // 0 memory, 1 integer, 2 a tensor in memory
    Memory* memory;
    uint64_t offset;
    int64_t integer;
    const uint64_t* tensor;
};

struct Launch {
    Dim3 grid;
    uint32_t threads;
    uint32_t shared;
    uint64_t seed;
    uint64_t number;  // of this launch, for `writers`
    uint64_t first_block, blocks;
    const Arg* args;
    char* error;  // 512 bytes
};

constexpr unsigned MAX_THREADS = 1024, WARPS = 32, STACK = 128 << 10, SHARED = 232448;

// What is known of the last accesses to two bytes of shared memory.
struct Shadow {
    uint64_t write_block, write_warp, read_block, read_warp;
    int32_t writer, reader;  // thread + 1; reader -1: several
};

struct Copy { char* to; uint32_t shared_at; const char* from; uint32_t bytes, valid; uint64_t group; };

struct Fiber {
    void* sp;
#if !defined(__x86_64__)
    ucontext_t context;
#endif
    const uint64_t* waits_for;  // runnable when *waits_for != seen
    uint64_t seen;
    const char* at;  // what it waits at
    bool done;
    std::vector<Copy> copies;
    uint64_t group;
};

// A barrier of some threads: `generation` grows when all have arrived.
struct Barrier { uint64_t generation; unsigned arrived; };

// Every collective of a warp holds its lanes together; that what one wrote is there for the others only `__syncwarp` says, whose rounds are counted in `fences`.
struct Warp {
    Barrier barrier;
    uint64_t fences;
    const char* at;
    unsigned char exchange[2][32][64];
};

struct State {
    const Launch* launch;
    Dim3 block, thread;
    unsigned current;
    Barrier barrier;
    Warp warps[WARPS];
    Fiber fibers[MAX_THREADS];
    Fiber main;
    char* stacks;
    alignas(1024) unsigned char shared[SHARED];
    Shadow* shadows;
    bool failed;
    uint64_t random;
    void (*body)(const Arg*);
};

static State S;
static std::mutex S_lock;

inline uint64_t next_random() {
    S.random += 0x9e3779b97f4a7c15ull;
    uint64_t z = (S.random ^ (S.random >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void dp_switch(void** save, void* load);
asm(R"(
.text
.hidden dp_switch
.globl dp_switch
dp_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
inline void switch_fiber(Fiber& from, Fiber& to) { dp_switch(&from.sp, to.sp); }
#else
inline void switch_fiber(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

// What is asynchronous beyond copies of a thread's own: `hopper.h`.
inline void begin_block();
inline void block_synchronised();
inline bool land_one();
inline const char* end_block();

inline void to_scheduler() { switch_fiber(S.fibers[S.current], S.main); }

[[noreturn]] inline void fail(const char* format, ...) {
    int n = snprintf(S.launch->error, 512, "block (%u, %u, %u), thread %u: ", S.block.x, S.block.y, S.block.z, S.current);
    va_list list;
    va_start(list, format);
    vsnprintf(S.launch->error + n, 512 - n, format, list);
    va_end(list);
    S.failed = true;
    for (;;) to_scheduler();
}

inline void fiber_main() {
    S.body(S.launch->args);
    Fiber& me = S.fibers[S.current];
    if (!me.copies.empty()) fail("ends with %zu asynchronous copies that nobody waits for", me.copies.size());
    me.done = true;
    for (;;) to_scheduler();
}

inline void arrive(Barrier& b, unsigned expected, const char* what) {
    if (++b.arrived == expected) {
        b.arrived = 0;
        b.generation++;
        return;
    }
    Fiber& me = S.fibers[S.current];
    me.waits_for = &b.generation;
    me.seen = b.generation;
    me.at = what;
    to_scheduler();
    me.waits_for = nullptr;
}

inline void prepare_fiber(unsigned i) {
    Fiber& f = S.fibers[i];
    f.waits_for = nullptr;
    f.done = false;
    f.copies.clear();
    f.group = 0;
    char* top = S.stacks + size_t(i + 1) * STACK;
#if defined(__x86_64__)
    void** sp = reinterpret_cast<void**>(top) - 2;
    sp[0] = reinterpret_cast<void*>(&fiber_main);  // returned to; the stack is then aligned as after a call
    sp[1] = nullptr;
    sp -= 6;
    f.sp = sp;
#else
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = top - STACK;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
#endif
}

// Runs all fibers of a block to their ends.
inline void run_block() {
    unsigned n = S.launch->threads, left = n;
    unsigned order[MAX_THREADS];
    memset(S.shared, 0xff, S.launch->shared);
    begin_block();
    S.barrier.arrived = 0;
    S.barrier.generation++;
    for (unsigned i = 0; i < n; i++) {
        prepare_fiber(i);
        order[i] = i;
    }
    for (auto& w : S.warps) w.barrier.arrived = 0, w.barrier.generation++, w.fences++;
    while (left > 0) {
        bool moved = false;
        for (unsigned i = n - 1; i > 0; i--) std::swap(order[i], order[next_random() % (i + 1)]);
        for (unsigned k = 0; k < n; k++) {
            Fiber& f = S.fibers[order[k]];
            if (f.done || (f.waits_for && *f.waits_for == f.seen)) continue;
            S.current = order[k];
            S.thread = {order[k], 0, 0};
            switch_fiber(S.main, f);
            if (S.failed) return;
            moved = true;
            if (f.done) left--;
        }
        if (next_random() % 4 == 0 || !moved) moved |= land_one();
        if (!moved) {
            for (unsigned k = 0; k < n; k++)
                if (!S.fibers[k].done) {
                    snprintf(S.launch->error, 512, "block (%u, %u, %u): thread %u waits at %s that not all threads reach", S.block.x, S.block.y,
                             S.block.z, k, S.fibers[k].at);
                    S.failed = true;
                    return;
                }
        }
    }
    if (const char* left = end_block()) {
        snprintf(S.launch->error, 512, "block (%u, %u, %u) %s", S.block.x, S.block.y, S.block.z, left);
        S.failed = true;
    }
}

inline int run(const Launch* launch, void (*body)(const Arg*)) {
    std::lock_guard<std::mutex> guard(S_lock);
    S.launch = launch;
    S.body = body;
    S.failed = false;
    S.random = launch->seed;
    if (launch->threads > MAX_THREADS || launch->threads % 32 || launch->shared > SHARED) {
        snprintf(launch->error, 512, "%u threads and %u bytes of shared memory", launch->threads, launch->shared);
        return 1;
    }
    if (!S.stacks) {
        S.stacks = static_cast<char*>(mmap(nullptr, size_t(MAX_THREADS) * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        S.shadows = static_cast<Shadow*>(calloc(SHARED / 2, sizeof(Shadow)));
    }
    uint64_t all = uint64_t(launch->grid.x) * launch->grid.y * launch->grid.z;
    for (uint64_t i = 0; i < launch->blocks && launch->first_block + i < all && !S.failed; i++) {
        uint64_t b = launch->first_block + i;
        S.block = {unsigned(b % launch->grid.x), unsigned(b / launch->grid.x % launch->grid.y), unsigned(b / launch->grid.x / launch->grid.y)};
        run_block();
    }
    return S.failed;
}

inline unsigned warp_of(unsigned thread) { return thread / 32; }
inline unsigned lane() { return S.current % 32; }

inline void check_shared(uint64_t at, uint64_t bytes, bool write) {
    if (at + bytes > S.launch->shared) fail("shared memory: %llu bytes at %llu of %u", (unsigned long long)bytes, (unsigned long long)at, S.launch->shared);
    uint64_t block = S.barrier.generation, warp = S.warps[warp_of(S.current)].fences;
    int32_t me = int32_t(S.current) + 1;
    for (uint64_t u = at / 2; u < (at + bytes + 1) / 2; u++) {
        Shadow& s = S.shadows[u];
        auto ordered = [&](int32_t who, uint64_t b, uint64_t w) {
            return who == me || b < block || (who > 0 && warp_of(who - 1) == warp_of(S.current) && w < warp);
        };
        if (s.writer && !ordered(s.writer, s.write_block, s.write_warp))
            fail("race: %s of shared byte %llu that thread %d wrote with no barrier between", write ? "write" : "read", (unsigned long long)u * 2, s.writer - 1);
        if (write) {
            if (s.reader && !ordered(s.reader, s.read_block, s.read_warp))
                fail("race: write of shared byte %llu that thread %d read with no barrier between", (unsigned long long)u * 2, s.reader - 1);
            s.writer = me, s.write_block = block, s.write_warp = warp;
            s.reader = 0;
        } else {
            // Of several readers in one interval of the block only "several" is known, unless all are of one warp.
            bool same = s.reader == 0 || s.reader == me || s.read_block < block;
            bool same_warp = s.reader > 0 && warp_of(s.reader - 1) == warp_of(S.current);
            s.reader = same || same_warp ? me : -1;
            s.read_block = block, s.read_warp = warp;
        }
    }
}

template <class T> struct Shared {
    uint32_t at;  // bytes
    uint32_t count;
    Shared operator+(int64_t elements) const { return {uint32_t(at + elements * int64_t(sizeof(T))), uint32_t(count - elements)}; }
};

inline void check_global(Memory* m, uint64_t at, uint64_t bytes, bool write) {
    if (at > m->bytes || bytes > m->bytes - at)
        fail("global memory: %s of %llu bytes at %lld of %llu", write ? "write" : "read", (unsigned long long)bytes, (long long)at, (unsigned long long)m->bytes);
    for (uint64_t s = at / 32; s <= (at + bytes - 1) / 32; s++)
        if (m->sectors[s][write] != uint32_t(S.launch->number)) {
            m->sectors[s][write] = uint32_t(S.launch->number);
            (write ? m->written : m->read) += 32;
        }
    if (!write) return;
    if (!m->writable) fail("global memory: write to an operand");
    if (!m->writers) return;
    uint64_t block = (uint64_t(S.block.z) * S.launch->grid.y + S.block.y) * S.launch->grid.x + S.block.x;
    uint64_t me = ((S.launch->number << 40) | ((block & 0x3fffffff) << 10) | S.current) + 1;
    for (uint64_t u = at / 2; u < (at + bytes + 1) / 2; u++) {
        uint64_t& w = m->writers[u];
        if (w && w != me && ((w - 1) >> 40) == S.launch->number) fail("global memory: byte %llu is written by two threads", (unsigned long long)u * 2);
        w = me;
    }
}

template <class T> struct Global {
    Memory* memory;
    uint64_t at;  // bytes
    Global operator+(int64_t elements) const { return {memory, at + elements * int64_t(sizeof(T))}; }
    operator Global<const T>() const { return {memory, at}; }
};

inline int64_t integer_of(const Arg& a) {
    if (a.kind != 1) abort();
    return a.integer;
}
template <class T> struct FromArg { static T get(const Arg& a) { return T(integer_of(a)); } };
template <class T> struct FromArg<Global<T>> { static Global<T> get(const Arg& a) { return {a.memory, a.offset}; } };

template <class... A, size_t... I> void call(void (*f)(A...), const Arg* args, std::index_sequence<I...>) {
    f(FromArg<A>::get(args[I])...);
}
template <class... A> void call(void (*f)(A...), const Arg* args) { call(f, args, std::index_sequence_for<A...>{}); }

// Leaves a value for the lanes of the warp; returns what they left.
template <class T> inline unsigned char (*exchange(const T& value, const char* what))[64] {
    static_assert(sizeof(T) <= 64, "an exchange is small");
    Warp& w = S.warps[warp_of(S.current)];
    if (w.barrier.arrived == 0) w.at = what;
    if (w.at != what) fail("a warp is split between %s and %s", w.at, what);
    unsigned char(*slot)[64] = w.exchange[w.barrier.generation & 1];
    memcpy(slot[lane()], &value, sizeof(T));
    arrive(w.barrier, 32, what);
    return slot;
}

}  // namespace dp

#define DP_KERNEL(name) static void name
#define DP_KERNEL_ALONE(name) DP_KERNEL(name)
#define DP_ENTRY(symbol, name) \
    extern "C" int symbol(const dp::Launch* launch) { return dp::run(launch, [](const dp::Arg* args) { dp::call(&name, args); }); }
#define DP_IN(T) dp::Global<const T>
#define DP_OUT(T) dp::Global<T>
#define DP_SHARED(T, name, at, count) dp::Shared<T> name{uint32_t(at), uint32_t(count)}
#define DP_SHARED_PTR(T) dp::Shared<T>
#define DP_DEVICE static inline
#define DP_CONSTANT static const
#define DP_UNROLL
#define DP_UNROLL_SOME
#define threadIdx (dp::S.thread)
#define blockIdx (dp::S.block)
#define gridDim (dp::S.launch->grid)

typedef uint16_t u16;
typedef uint32_t u32;
typedef int32_t i32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

static inline float bits_float(u32 b) { float f; memcpy(&f, &b, 4); return f; }
static inline u32 float_bits(float f) { u32 b; memcpy(&b, &f, 4); return b; }

static inline float widen(bf16 x) { return bits_float(u32(x.bits) << 16); }
static inline float widen(f16 x) {
    u32 sign = u32(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | fraction << 13);
    if (exponent == 0) return bits_float(sign | float_bits(std::ldexp(float(fraction), -24)));
    return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
}
static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }

template <class T> T narrow(double x);
template <> inline double narrow<double>(double x) { return x; }
template <> inline float narrow<float>(double x) { return float(x); }
template <> inline bf16 narrow<bf16>(double x) {
    u32 b = float_bits(float(x));
    if (std::isnan(x)) return {u16(0x7fff)};
    return {u16((b + 0x7fff + ((b >> 16) & 1)) >> 16)};
}
template <> inline f16 narrow<f16>(double v) {
    float x = float(v);
    u32 b = float_bits(x), sign = (b >> 16) & 0x8000;
    float a = std::fabs(x);
    if (std::isnan(x)) return {u16(0x7fff)};
    if (a >= 65520.0f) return {u16(sign | 0x7c00)};
    if (a < 6.103515625e-05f) return {u16(sign | u32(std::nearbyint(a * 16777216.0f)))};
    b &= 0x7fffffff;
    b += 0xfff + ((b >> 13) & 1);
    return {u16(sign | ((b - (112u << 23)) >> 13))};
}

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T v[N]; };

// --- global and shared memory
template <class T> static inline std::remove_const_t<T> dp_ld(dp::Global<T> p, i64 i) {
    uint64_t at = p.at + i * int64_t(sizeof(T));
    dp::check_global(p.memory, at, sizeof(T), false);
    std::remove_const_t<T> value;
    memcpy(&value, p.memory->base + at, sizeof(T));
    return value;
}
template <class T> static inline void dp_st(dp::Global<T> p, i64 i, T value) {
    uint64_t at = p.at + i * int64_t(sizeof(T));
    dp::check_global(p.memory, at, sizeof(T), true);
    memcpy(p.memory->base + at, &value, sizeof(T));
}
template <int N, class T> static inline Pack<std::remove_const_t<T>, N> dp_ld_pack(dp::Global<T> p, i64 i) {
    uint64_t at = p.at + i * int64_t(sizeof(T));
    if (at % (sizeof(T) * N)) dp::fail("misaligned read of %zu bytes", sizeof(T) * N);
    dp::check_global(p.memory, at, sizeof(T) * N, false);
    Pack<std::remove_const_t<T>, N> value;
    memcpy(&value, p.memory->base + at, sizeof(value));
    return value;
}
template <int N, class T> static inline void dp_st_pack(dp::Global<T> p, i64 i, Pack<T, N> value) {
    uint64_t at = p.at + i * int64_t(sizeof(T));
    if (at % (sizeof(T) * N)) dp::fail("misaligned write of %zu bytes", sizeof(T) * N);
    dp::check_global(p.memory, at, sizeof(T) * N, true);
    memcpy(p.memory->base + at, &value, sizeof(value));
}
template <class T> static inline T dp_ld(dp::Shared<T> p, i64 i) {
    if (i < 0 || u64(i) >= p.count) dp::fail("shared element %lld of %u", (long long)i, p.count);
    dp::check_shared(p.at + i * sizeof(T), sizeof(T), false);
    T value;
    memcpy(&value, dp::S.shared + p.at + i * sizeof(T), sizeof(T));
    return value;
}
template <class T> static inline void dp_st(dp::Shared<T> p, i64 i, T value) {
    if (i < 0 || u64(i) >= p.count) dp::fail("shared element %lld of %u", (long long)i, p.count);
    dp::check_shared(p.at + i * sizeof(T), sizeof(T), true);
    memcpy(dp::S.shared + p.at + i * sizeof(T), &value, sizeof(T));
}
template <int N, class T> static inline Pack<T, N> dp_ld_pack(dp::Shared<T> p, i64 i) {
    if ((p.at + i * sizeof(T)) % (sizeof(T) * N)) dp::fail("misaligned shared read");
    Pack<T, N> value;
    for (int j = 0; j < N; j++) value.v[j] = dp_ld(p, i + j);
    return value;
}
template <int N, class T> static inline void dp_st_pack(dp::Shared<T> p, i64 i, Pack<T, N> value) {
    if ((p.at + i * sizeof(T)) % (sizeof(T) * N)) dp::fail("misaligned shared write");
    for (int j = 0; j < N; j++) dp_st(p, i + j, value.v[j]);
}

// --- collectives
static inline void __syncthreads() {
    if (dp::S.barrier.arrived + 1 == dp::S.launch->threads) dp::block_synchronised();
    dp::arrive(dp::S.barrier, dp::S.launch->threads, "a barrier of the block");
}
static inline void __syncwarp() {
    dp::Warp& w = dp::S.warps[dp::warp_of(dp::S.current)];
    if (w.barrier.arrived + 1 == 32) w.fences++;
    dp::exchange(0, "a barrier of the warp");
}
template <class T> static inline T dp_shfl(T value, int from) {
    T out;
    memcpy(&out, dp::exchange(value, "a shuffle")[from & 31], sizeof(T));
    return out;
}
template <class T> static inline T dp_shfl_xor(T value, int mask) { return dp_shfl(value, int(dp::lane()) ^ mask); }
static inline u32 dp_ballot(bool vote) {
    auto all = dp::exchange(vote, "a vote");
    u32 mask = 0;
    for (int i = 0; i < 32; i++) mask |= u32(all[i][0] != 0) << i;
    return mask;
}
static inline int dp_popc(u32 x) { return __builtin_popcount(x); }

// --- asynchronous copies
template <class T> static inline void dp_cp_async16(dp::Shared<T> to, i64 i, dp::Global<const T> from, i64 j, int valid) {
    if (i < 0 || u64(i) + 16 / sizeof(T) > to.count) dp::fail("asynchronous copy to shared element %lld of %u", (long long)i, to.count);
    uint64_t at = from.at + j * int64_t(sizeof(T)), s = to.at + i * sizeof(T);
    if (s % 16 || (valid && at % 16)) dp::fail("misaligned asynchronous copy");
    if (valid) dp::check_global(from.memory, at, valid, false);
    dp::check_shared(s, 16, true);
    dp::Fiber& me = dp::S.fibers[dp::S.current];
    me.copies.push_back({reinterpret_cast<char*>(dp::S.shared + s), uint32_t(s), from.memory->base + at, 16, uint32_t(valid), me.group});
}
static inline void dp_cp_commit() { dp::S.fibers[dp::S.current].group++; }
template <int N> static inline void dp_cp_wait() {
    dp::Fiber& me = dp::S.fibers[dp::S.current];
    size_t kept = 0;
    for (auto& c : me.copies) {
        if (c.group + N < me.group) {
            dp::check_shared(c.shared_at, c.bytes, true);
            memcpy(c.to, c.from, c.valid);
            memset(c.to + c.valid, 0, c.bytes - c.valid);
        } else {
            me.copies[kept++] = c;
        }
    }
    me.copies.resize(kept);
}

// --- matrix units: the fragments of PTX `mma.sync.m16n8k16` and `ldmatrix`
template <class T> static inline float dp_half_of(u32 word, int which) { T x; x.bits = u16(word >> (16 * which)); return widen(x); }
template <class T> static inline void dp_mma_16816(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    struct Both { u32 a[4], b[2]; } mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    auto all = dp::exchange(mine, "a matrix product");
    int group = dp::lane() / 4, pair = dp::lane() % 4;
    auto left = [&](int row, int k) {
        Both other;
        memcpy(&other, all[(row % 8) * 4 + (k % 8) / 2], sizeof(other));
        return dp_half_of<T>(other.a[(k / 8) * 2 + row / 8], k % 2);
    };
    auto right = [&](int k, int col) {
        Both other;
        memcpy(&other, all[col * 4 + (k % 8) / 2], sizeof(other));
        return dp_half_of<T>(other.b[k / 8], k % 2);
    };
    for (int i = 0; i < 4; i++) {
        int row = group + (i / 2) * 8, col = pair * 2 + i % 2;
        float sum = c[i];
        for (int k = 0; k < 16; k++) sum += left(row, k) * right(k, col);
        c[i] = sum;
    }
}
template <bool TRANSPOSED, class T> static inline void dp_ldmatrix_x4(u32 (&r)[4], dp::Shared<T> base, i64 at) {
    static_assert(sizeof(T) == 2, "ldmatrix moves halves");
    if ((base.at + at * 2) % 16) dp::fail("misaligned ldmatrix");
    auto all = dp::exchange(at, "ldmatrix");
    for (int m = 0; m < 4; m++) {
        u16 halves[2];
        for (int h = 0; h < 2; h++) {
            int row = TRANSPOSED ? (dp::lane() % 4) * 2 + h : dp::lane() / 4, col = TRANSPOSED ? dp::lane() / 4 : (dp::lane() % 4) * 2 + h;
            i64 start;
            memcpy(&start, all[m * 8 + row], sizeof(start));
            halves[h] = dp_ld(base, start + col).bits;
        }
        r[m] = u32(halves[0]) | u32(halves[1]) << 16;
    }
}

// --- arithmetic that C++ does not have
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline float dp_exp2(float x) { return std::exp2(x); }
static inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
static inline void sincospif(float x, float* s, float* c) { *s = float(std::sin(M_PI * double(x))), *c = float(std::cos(M_PI * double(x))); }
static inline void sincospi(double x, double* s, double* c) { *s = std::sin(M_PI * x), *c = std::cos(M_PI * x); }
