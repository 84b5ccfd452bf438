// What products have in common: which tile comes when, and what becomes of sums.
// Config: elem (of the operands), acc, out_t, ADD, PAIRS (the result takes two elements at once), BM, BN, `tails` (what is done to sums before they are written).
constexpr int HIGH = 8;  // tiles of m that run before the next of n: what they read of b stays in the L2

// Row and column of the first element of a tile.
struct Corner { i64 m, n; };
DP_DEVICE Corner dp_corner(i64 tile, i64 tiles_m, i64 tiles_n) {
    i64 panel = tile / (HIGH * tiles_n) * HIGH, height = dp_min(HIGH, tiles_m - panel), within = tile - panel * tiles_n;
    return Corner{(panel + within % height) * BM, within / height * BN};
}

// Sums that are neighbours in memory, to `at`; the first is in column `col`.
template <int N> DP_DEVICE void dp_write(DP_OUT(out_t) out, i64 at, i64 col, acc (&x)[N], DP_IN(elem) p, DP_IN(elem) q) {
    tails<N>(x, p, q, col, at);
    Pack<out_t, N> to;
    if (ADD) to = dp_ld_pack<N>(out, at);
    DP_UNROLL
    for (int e = 0; e < N; e++) to.v[e] = narrow<out_t>(ADD ? acc(widen(to.v[e])) + x[e] : x[e]);
    dp_st_pack<N>(out, at, to);
}

// Two sums of neighbouring columns, `on` apart, of which the first `left` are in the result.
DP_DEVICE void dp_write_two(DP_OUT(out_t) out, i64 at, i64 on, i64 col, int left, acc first, acc second, DP_IN(elem) p, DP_IN(elem) q) {
    if (PAIRS) {
        acc x[2] = {first, second};
        if (left > 0) dp_write<2>(out, at, col, x, p, q);
    } else {
        acc x[1] = {first}, y[1] = {second};
        if (left > 0) dp_write<1>(out, at, col, x, p, q);
        if (left > 1) dp_write<1>(out, at + on, col + 1, y, p, q);
    }
}
