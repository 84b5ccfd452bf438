// The CPU shim of what is asynchronous on Hopper: barriers in shared memory, the copy engine (TMA), products of warpgroups (`wgmma`).
//
// Nothing is done when it is asked for. A copy poisons its destination at once and lands at any time until the barrier's phase ends: at random, or when no
// thread gets further. A product takes its accumulators away (what is left in them is poison) and is computed at any time until it is waited for. So whoever
// reads too early or overwrites too early computes something else; and so that no luck is needed, order is proved as well:
//   - agents are warps, and barriers (for the copies that they wait for). Each warp has a clock: what it knows of the others, through barriers of the block and
//     through phases that it waited for. A product may read a row of 128 bytes only if its warp knows that the copy into it has ended; a copy may overwrite
//     one only if its thread's warp knows that every warp's products that read it were waited for, and that the copy before has ended;
//   - a barrier is used by other warps, and by the copy engine, only when its initialisation was published to them;
//   - products want a `wgmma.fence` since accumulators were last in the thread's hands, and all four warps of a warpgroup issue the same ones;
//   - a block that ends leaves no copy, no product and no byte that a barrier waits for.
// Swizzling is that of the hardware: bits 4 to 6 of an address are xored with bits 7 to 9, of a copy's destination because its tensor says so, of a product's operand
// because its descriptor does. Not modelled: clusters, and shared memory that is both copied to and read or written by threads.
#pragma once

namespace dp {

constexpr unsigned BARRIERS = 32, AGENTS = WARPS + BARRIERS, ROW = 128, BOX = 64;

struct Clock {
    uint32_t of[AGENTS];
    void join(const Clock& other) {
        for (unsigned i = 0; i < AGENTS; i++)
            if (other.of[i] > of[i]) of[i] = other.of[i];
    }
};

// What an agent did, and how far it had come.
struct Stamp { uint32_t agent, time; };

struct Mbarrier {
    uint32_t at;
    uint32_t expected, pending;
    int64_t bytes;
    uint64_t phase;  // phases that have ended
    bool published;
    Stamp made;
    Clock arriving, ended;
};

// A row of shared memory as the copy engine and products see it.
struct Row {
    bool copied, landing;
    Stamp copy;
    uint32_t reading[WARPS], read[WARPS];  // products under way, and when the last was waited for
};

// A tensor: `dims` elements of two bytes, neighbours along the first; `pitches` in bytes of the others. As in `kernels/src/cuda/tensor.rs`.
struct TensorMap {
    Memory* memory;
    uint64_t at;
    uint64_t dims[3], pitches[2];
};

struct BoxCopy { TensorMap from; int32_t x, y, z; uint32_t to; unsigned barrier; };

// Accumulators of a warp while products on them are under way.
struct Held {
    float* at[32];
    unsigned n, users;
    std::vector<float> values;  // [lane][n]
};

struct Product {
    uint64_t a, b;
    bool a_rows, b_rows;
    unsigned n;
    float (*half)(uint16_t);
    float* sum;  // of lane 0
    int64_t group;  // -1 before it is committed
    bool done;
    std::vector<uint16_t> rows;
    bool same(const Product& o) const { return a == o.a && b == o.b && a_rows == o.a_rows && b_rows == o.b_rows && n == o.n; }
};

// What a warp has under way.
struct Under {
    std::vector<Product> products;
    std::vector<Held> held;
    int64_t groups;
    bool fenced;
    size_t issued;
};

struct Hopper {
    bool used;
    unsigned barriers;
    Mbarrier barrier[BARRIERS];
    Clock clock[WARPS];
    Row rows[SHARED / ROW];
    std::vector<BoxCopy> copies;
    Under under[WARPS];
    std::vector<Product> issued[WARPS / 4];
};
static Hopper H;

inline unsigned me() { return warp_of(S.current); }
inline Stamp now() { return {me(), H.clock[me()].of[me()]}; }
inline bool knows(Stamp s) { return H.clock[me()].of[s.agent] >= s.time; }
inline uint32_t swizzled(uint32_t at) { return at ^ ((at >> 7 & 7) << 4); }

inline void begin_block() {
    if (!H.used) return;
    H.used = false;
    H.barriers = 0;
    H.copies.clear();
    memset(H.rows, 0, sizeof(H.rows));
    for (auto& i : H.issued) i.clear();
    for (auto& u : H.under) u.products.clear(), u.held.clear(), u.groups = 0, u.fenced = false, u.issued = 0;
}

// Of a block that uses any of this: clocks begin.
inline void use() {
    if (H.used) return;
    H.used = true;
    memset(H.clock, 0, sizeof(H.clock));
    for (unsigned w = 0; w < WARPS; w++) H.clock[w].of[w] = 1;
}

// All warps of the block have met.
inline void block_synchronised() {
    if (!H.used) return;
    Clock all = {};
    for (unsigned w = 0; w < S.launch->threads / 32; w++) all.join(H.clock[w]);
    for (unsigned w = 0; w < S.launch->threads / 32; w++) H.clock[w] = all, H.clock[w].of[w]++;
}

inline void end_phase(Mbarrier& b) {
    if (b.pending > 0 || b.bytes != 0) return;
    b.phase++;
    b.pending = b.expected;
    b.arriving.of[WARPS + (&b - H.barrier)] = uint32_t(b.phase);
    b.ended.join(b.arriving);
    b.arriving = {};
}

// One of the copies under way lands; false if there is none.
inline bool land_one() {
    if (H.copies.empty()) return false;
    std::swap(H.copies[next_random() % H.copies.size()], H.copies.back());
    BoxCopy c = H.copies.back();
    H.copies.pop_back();
    for (unsigned r = 0; r < BOX; r++) {
        for (unsigned i = 0; i < BOX; i++) {
            int64_t x = int64_t(c.x) + i, y = int64_t(c.y) + r, z = c.z;
            bool inside = x >= 0 && y >= 0 && z >= 0 && uint64_t(x) < c.from.dims[0] && uint64_t(y) < c.from.dims[1] && uint64_t(z) < c.from.dims[2];
            unsigned char* to = S.shared + swizzled(c.to + r * ROW + i * 2);
            if (inside)
                memcpy(to, c.from.memory->base + c.from.at + z * c.from.pitches[1] + y * c.from.pitches[0] + x * 2, 2);
            else
                memset(to, 0, 2);
        }
        H.rows[c.to / ROW + r].landing = false;
    }
    Mbarrier& b = H.barrier[c.barrier];
    b.bytes -= BOX * ROW;
    end_phase(b);
    return true;
}

// What a block left behind, or null.
inline const char* end_block() {
    if (!H.used) return nullptr;
    if (!H.copies.empty()) return "ends with copies under way";
    for (unsigned i = 0; i < H.barriers; i++)
        if (H.barrier[i].bytes != 0) return "ends with a barrier that waits for bytes";
    for (unsigned w = 0; w < S.launch->threads / 32; w++) {
        if (!H.under[w].products.empty()) return "ends with products that nobody waits for";
        if (H.under[w].issued != H.issued[w / 4].size()) return "ends with products that not all warps of a warpgroup issued";
    }
    return nullptr;
}

inline Mbarrier& mbarrier(Shared<unsigned long long> bars, int i) {
    uint32_t at = bars.at + uint32_t(i) * 8;
    for (unsigned b = 0; b < H.barriers; b++)
        if (H.barrier[b].at == at) {
            if (!knows(H.barrier[b].made)) fail("uses an mbarrier whose initialisation it does not know of");
            return H.barrier[b];
        }
    fail("uses an mbarrier that was not initialised");
}

inline void arrive_at(Mbarrier& b) {
    if (b.pending == 0) fail("arrives at an mbarrier that expects nobody more");
    b.arriving.join(H.clock[me()]);
    H.clock[me()].of[me()]++;
    b.pending--;
    end_phase(b);
}

// The address of an element of a product's operand, as its descriptor says.
inline uint32_t element_at(uint64_t matrix, bool rows, unsigned mn, unsigned k) {
    uint32_t start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4, stride = (matrix >> 32 & 0x3fff) << 4;
    uint32_t at = rows ? start + mn / 64 * leading + mn % 64 * 2 + k / 8 * stride + k % 8 * ROW : start + mn / 8 * stride + mn % 8 * ROW + k * 2;
    return swizzled(at);
}

#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("O3")))
#endif
// Internal: what is static in an inline function is one object for all libraries of a process (STB_GNU_UNIQUE), and each runs under a lock of its own.
static void compute(Product& p, Held& held, unsigned quarter) {
    static float a[16][16], b[16][256], c[16][256];
    auto half = [&](uint32_t at) { uint16_t bits; memcpy(&bits, S.shared + at, 2); return p.half(bits); };
    for (unsigned m = 0; m < 16; m++)
        for (unsigned k = 0; k < 16; k++) a[m][k] = half(element_at(p.a, p.a_rows, quarter * 16 + m, k));
    for (unsigned k = 0; k < 16; k++)
        for (unsigned n = 0; n < p.n; n++) b[k][n] = half(element_at(p.b, p.b_rows, n, k));
    auto each = [&](auto f) {
        for (unsigned l = 0; l < 32; l++)
            for (unsigned i = 0; i < held.n; i++) f(held.values[l * held.n + i], c[l / 4 + i / 2 % 2 * 8][i / 4 * 8 + l % 4 * 2 + i % 2]);
    };
    each([](float& sum, float& element) { element = sum; });
    for (unsigned k = 0; k < 16; k++)
        for (unsigned m = 0; m < 16; m++)
            for (unsigned n = 0; n < p.n; n++) c[m][n] += a[m][k] * b[k][n];
    each([](float& sum, float& element) { sum = element; });
    p.done = true;
}

inline Held& held_of(Under& u, const float* sum) {
    for (auto& h : u.held)
        if (h.at[0] == sum) return h;
    abort();
}

// All products of a warp up to a group, in order.
inline void compute_until(unsigned warp, int64_t group) {
    Under& u = H.under[warp];
    for (auto& p : u.products)
        if (!p.done && (group < 0 || (p.group >= 0 && p.group <= group))) compute(p, held_of(u, p.sum), warp % 4);
}

// The lanes of a warp come together; the last does `what` with what they left, before any goes on.
template <class T, class F> inline void together(const T& value, const char* name, F what) {
    Warp& w = S.warps[me()];
    unsigned char(*slot)[64] = w.exchange[w.barrier.generation & 1];
    if (w.barrier.arrived == 31) {
        memcpy(slot[lane()], &value, sizeof(T));
        if (w.at == name) what(slot);
    }
    exchange(value, name);
}

inline void issue(Product p, unsigned char (*sums)[64]) {
    unsigned w = me();
    Under& u = H.under[w];
    if ((w / 4 + 1) * 128 > S.launch->threads) fail("a product of a warpgroup that is not whole");
    if (!u.fenced) fail("a product whose accumulators were not fenced");
    std::vector<Product>& all = H.issued[w / 4];
    if (u.issued < all.size() ? !all[u.issued].same(p) : (all.push_back(p), false)) fail("warps of a warpgroup issue different products");
    u.issued++;
    for (uint64_t matrix : {p.a, p.b})
        if (matrix >> 62 != 1 || (matrix >> 49 & 7) != 0) fail("an operand of a product is not swizzled by 128 bytes");
    auto read = [&](uint64_t matrix, bool rows, unsigned from, unsigned to) {
        for (unsigned k = 0; k < (rows ? 16u : 1u); k++)
            for (unsigned mn = from; mn < to; mn += rows ? 64 : 1) {
                uint32_t at = element_at(matrix, rows, mn, k);
                if (at >= S.launch->shared) fail("a product reads shared byte %u of %u", at, S.launch->shared);
                Row& row = H.rows[at / ROW];
                if (!row.copied) fail("a product reads shared byte %u, where nothing was copied to", at);
                if (row.landing || !knows(row.copy)) fail("race: a product reads shared byte %u, and its warp has not waited for the copy to there", at);
                row.reading[w]++;
                p.rows.push_back(uint16_t(at / ROW));
            }
    };
    read(p.a, p.a_rows, w % 4 * 16, w % 4 * 16 + 16);
    read(p.b, p.b_rows, 0, p.n);
    memcpy(&p.sum, sums[0], sizeof(p.sum));
    bool known = false;
    for (auto& h : u.held) known |= h.at[0] == p.sum;
    if (!known) {
        Held h;
        h.n = p.n / 2, h.users = 0;
        for (unsigned l = 0; l < 32; l++) {
            memcpy(&h.at[l], sums[l], sizeof(float*));
            h.values.insert(h.values.end(), h.at[l], h.at[l] + h.n);
            memset(h.at[l], 0xff, h.n * sizeof(float));
        }
        u.held.push_back(h);
    }
    held_of(u, p.sum).users++;
    u.products.push_back(p);
    if (next_random() & 1) compute_until(w, -1);
}

inline void retire(int64_t pending) {
    unsigned w = me();
    Under& u = H.under[w];
    int64_t last = u.groups - pending - 1;
    compute_until(w, last < 0 ? -2 : last);
    size_t kept = 0;
    for (auto& p : u.products) {
        if (p.group < 0 || p.group > last) {
            if (kept != size_t(&p - u.products.data())) u.products[kept] = p;
            kept++;
            continue;
        }
        for (uint16_t row : p.rows) H.rows[row].reading[w]--, H.rows[row].read[w] = now().time;
        Held& h = held_of(u, p.sum);
        if (--h.users > 0) continue;
        for (unsigned l = 0; l < 32; l++) memcpy(h.at[l], &h.values[l * h.n], h.n * sizeof(float));
        std::swap(h, u.held.back());
        u.held.pop_back();
    }
    u.products.resize(kept);
    u.fenced = false;
}

template <> struct FromArg<TensorMap> {
    static TensorMap get(const Arg& a) {
        if (a.kind != 2) abort();
        TensorMap t = {a.memory, a.offset, {}, {}};
        memcpy(t.dims, a.tensor, sizeof(t.dims) + sizeof(t.pitches));
        return t;
    }
};

}  // namespace dp

#define DP_TENSOR(name) dp::TensorMap name
typedef dp::TensorMap TensorMap;

// --- barriers in shared memory
static inline void dp_mbar_init(dp::Shared<u64> bars, int i, u32 arrivals) {
    dp::use();
    if (i < 0 || u32(i) >= bars.count || bars.at % 8 || bars.at + (i + 1) * 8 > dp::S.launch->shared) dp::fail("mbarrier %d of %u", i, bars.count);
    if (dp::H.barriers == dp::BARRIERS) dp::fail("more than %u mbarriers", dp::BARRIERS);
    uint32_t at = bars.at + u32(i) * 8;
    for (unsigned b = 0; b < dp::H.barriers; b++)
        if (dp::H.barrier[b].at == at) dp::fail("an mbarrier is initialised twice");
    dp::H.barrier[dp::H.barriers++] = {at, arrivals, arrivals, 0, 0, false, dp::now(), {}, {}};
}
static inline void dp_mbar_publish() {
    for (unsigned b = 0; b < dp::H.barriers; b++)
        if (dp::H.barrier[b].made.agent == dp::me()) dp::H.barrier[b].published = true;
}
static inline void dp_mbar_arrive(dp::Shared<u64> bars, int i) { dp::arrive_at(dp::mbarrier(bars, i)); }
static inline void dp_mbar_expect(dp::Shared<u64> bars, int i, u32 bytes) {
    dp::Mbarrier& b = dp::mbarrier(bars, i);
    b.bytes += bytes;
    dp::arrive_at(b);
}
static inline void dp_mbar_wait(dp::Shared<u64> bars, int i, u32 parity) {
    dp::Mbarrier& b = dp::mbarrier(bars, i);
    dp::Fiber& fiber = dp::S.fibers[dp::S.current];
    while ((b.phase & 1) == parity) {
        fiber.waits_for = &b.phase, fiber.seen = b.phase, fiber.at = "an mbarrier";
        dp::to_scheduler();
        fiber.waits_for = nullptr;
    }
    dp::H.clock[dp::me()].join(b.ended);
}

// --- the copy engine
template <class T> static inline void dp_tensor_copy(dp::Shared<T> to, const TensorMap& t, i32 x, i32 y, i32 z, dp::Shared<u64> bars, int i) {
    static_assert(sizeof(T) == 2, "tensors are of halves");
    dp::Mbarrier& b = dp::mbarrier(bars, i);
    unsigned barrier = unsigned(&b - dp::H.barrier);
    if (!b.published) dp::fail("the copy engine uses an mbarrier that was not published to it");
    uint64_t address = reinterpret_cast<uint64_t>(t.memory->base) + t.at;
    if (address % 16 || t.pitches[0] % 16 || t.pitches[1] % 16 || !t.dims[0] || !t.dims[1] || !t.dims[2]) dp::fail("no tensor that the copy engine takes");
    if (to.at % 1024 || to.count < dp::BOX * dp::BOX || to.at + dp::BOX * dp::ROW > dp::S.launch->shared) dp::fail("a copy to shared byte %u of %u", to.at, dp::S.launch->shared);
    for (unsigned o = 0; o < dp::H.barriers; o++)
        if (dp::H.barrier[o].at / dp::ROW - to.at / dp::ROW < dp::BOX) dp::fail("a copy over an mbarrier");
    for (unsigned r = 0; r < dp::BOX; r++) {
        dp::Row& row = dp::H.rows[to.at / dp::ROW + r];
        if (row.landing || (row.copied && !dp::knows(row.copy))) dp::fail("race: a copy to shared byte %u, where another may be under way", to.at + r * dp::ROW);
        for (unsigned w = 0; w < dp::WARPS; w++)
            if (row.reading[w] || !dp::knows({w, row.read[w]})) dp::fail("race: a copy to shared byte %u, where warp %u may still read", to.at + r * dp::ROW, w);
        row.copied = row.landing = true;
        row.copy = {dp::WARPS + barrier, uint32_t(b.phase) + 1};
    }
    memset(dp::S.shared + to.at, 0xff, dp::BOX * dp::ROW);
    int64_t from = std::max(0, x), end = std::min<int64_t>(int64_t(x) + dp::BOX, t.dims[0]);
    for (int64_t r = y; r < int64_t(y) + dp::BOX; r++)
        if (r >= 0 && uint64_t(r) < t.dims[1] && z >= 0 && uint64_t(z) < t.dims[2] && from < end)
            dp::check_global(t.memory, t.at + z * t.pitches[1] + r * t.pitches[0] + from * 2, (end - from) * 2, false);
    dp::H.copies.push_back({t, x, y, z, to.at, barrier});
    if (dp::next_random() % 4 == 0) dp::land_one();
}

// --- products of warpgroups
template <class T> static inline u64 dp_wgmma_matrix(dp::Shared<T> at, u32 leading, u32 stride) {
    if (at.at % 16) dp::fail("misaligned operand of a product");
    return u64(at.at >> 4 & 0x3fff) | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | u64(1) << 62;
}
static inline void dp_wgmma_fence() {
    dp::use();
    dp::together(0, "a fence of products", [](auto) { dp::H.under[dp::me()].fenced = true; });
}
template <class T> static float dp_half_bits(uint16_t bits) { T x; x.bits = bits; return widen(x); }
template <class T, bool A_ROWS, bool B_ROWS, int N> static inline void dp_wgmma(float (&d)[N], u64 a, u64 b) {
    static_assert(N % 4 == 0 && N <= 128, "up to 256 columns, in eights");
    float* mine = d;
    dp::together(mine, "a product of a warpgroup",
                 [&](unsigned char(*sums)[64]) { dp::issue({a, b, A_ROWS, B_ROWS, 2 * N, &dp_half_bits<T>, nullptr, -1, false, {}}, sums); });
}
static inline void dp_wgmma_commit() {
    dp::together(0, "the end of a group of products", [](auto) {
        dp::Under& u = dp::H.under[dp::me()];
        for (auto& p : u.products)
            if (p.group < 0) p.group = u.groups;
        u.groups++;
    });
}
template <int PENDING, int N> static inline void dp_wgmma_wait(float (&)[N]) {
    dp::together(0, "a wait for products", [](auto) { dp::retire(PENDING); });
}
