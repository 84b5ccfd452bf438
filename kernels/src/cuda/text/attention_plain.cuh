// Scaled dot-product attention on the arithmetic units of `acc`, a tile of 32 queries by 32 keys at a time. No score leaves the chip.
//   forward: S = scale Q K^T, running maximum and sum of each row, O = P V / sum, lse = maximum + log sum;
//   A sink is the first score of its head's rows, its value zero: the sum begins with it (SINK);
//   backward: P = exp(S - lse), dP = dO V^T, dS = P (dP - delta) with delta = <dO, O>; dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K.
// dK and dV sum over query heads and tiles in order within one block: no atomics, one result. Eight threads share a row of a tile; thread t has its
// columns t % 8, t % 8 + 8, ... Who sees whom stands in `attention_shape.cuh`. Padding heads (g >= valid_g or r >= valid_r) give 0.
// Config: elem, acc, THREADS = 256, D (of queries and keys), DV (of values), BOUND, DOCUMENTS, ADD, SCALE, SINK (forward).
constexpr int TILE = 32, PITCH_D = D + 1, PITCH_V = DV + 1, PITCH_S = TILE + 1, ND = (D + 7) / 8, NV = (DV + 7) / 8;

// Rows [row, row + TILE) of a matrix whose rows are `pitch` apart, zero from `rows` on.
template <int WIDTH> DP_DEVICE void dp_load_tile(DP_SHARED_PTR(acc) to, DP_IN(elem) from, i64 start, i64 pitch, i64 row, i64 rows) {
    for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
        i64 r = row + i / WIDTH;
        dp_st(to, i / WIDTH * (WIDTH + 1) + i % WIDTH, r < rows ? acc(widen(dp_ld(from, start + r * pitch + i % WIDTH))) : acc(0));
    }
}

template <int WIDTH> DP_DEVICE acc dp_dot(DP_SHARED_PTR(acc) x, int i, DP_SHARED_PTR(acc) y, int j) {
    acc sum = acc(0);
    DP_UNROLL_SOME
    for (int d = 0; d < WIDTH; d++) sum += dp_ld(x, i * (WIDTH + 1) + d) * dp_ld(y, j * (WIDTH + 1) + d);
    return sum;
}
