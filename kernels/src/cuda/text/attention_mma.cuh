// Attention on the matrix units, in halves with float sums, as FlashAttention-2 does it: the equations and the mask are those of the plain kernels. A block
// of four warps has 64 rows (queries, or keys where it sums over queries), a warp 16 of them; probabilities never leave registers.
// Config: elem, acc = float, THREADS = 128, D, DV (multiples of 16), BOUND, DOCUMENTS, ADD, SCALE, ASYNC, STEP (rows of the other side at a time), SINK (forward).
constexpr int ROWS = 64, PITCH_D = D + 8, PITCH_V = DV + 8;
constexpr float LOG2_E = 1.4426950408889634f;

// c[16 x N] = a[16 x WIDTH, rows from m on] b[N x WIDTH]^T.
template <int N, int WIDTH> DP_DEVICE void dp_scores(float (&c)[N / 8][4], DP_SHARED_PTR(elem) a, int m, DP_SHARED_PTR(elem) b) {
    DP_UNROLL
    for (int j = 0; j < N / 8; j++) {
        DP_UNROLL
        for (int e = 0; e < 4; e++) c[j][e] = 0.0f;
    }
    DP_UNROLL
    for (int k = 0; k < WIDTH; k += 16) {
        u32 fa[4];
        dp_left<false>(fa, a, WIDTH + 8, m, k);
        DP_UNROLL
        for (int j = 0; j < N / 8; j += 2) {
            u32 fb[2][2];
            dp_right<false>(fb, b, WIDTH + 8, k, j * 8);
            dp_mma_16816<elem>(c[j], fa, fb[0]);
            dp_mma_16816<elem>(c[j + 1], fa, fb[1]);
        }
    }
}

// c[16 x WIDTH] += p[16 x K] b[K x WIDTH], p from the registers that hold a product's result.
template <int K, int WIDTH> DP_DEVICE void dp_weighted(float (&c)[WIDTH / 8][4], const float (&p)[K / 8][4], DP_SHARED_PTR(elem) b) {
    DP_UNROLL
    for (int k = 0; k < K; k += 16) {
        const float(&low)[4] = p[k / 8];
        const float(&high)[4] = p[k / 8 + 1];
        u32 fa[4] = {dp_halves(low[0], low[1]), dp_halves(low[2], low[3]), dp_halves(high[0], high[1]), dp_halves(high[2], high[3])};
        DP_UNROLL
        for (int j = 0; j < WIDTH / 8; j += 2) {
            u32 fb[2][2];
            dp_right<true>(fb, b, WIDTH + 8, k, j * 8);
            dp_mma_16816<elem>(c[j], fa, fb[0]);
            dp_mma_16816<elem>(c[j + 1], fa, fb[1]);
        }
    }
}

template <int WIDTH> DP_DEVICE void dp_clear(float (&c)[WIDTH / 8][4]) {
    DP_UNROLL
    for (int j = 0; j < WIDTH / 8; j++) {
        DP_UNROLL
        for (int e = 0; e < 4; e++) c[j][e] = 0.0f;
    }
}

// Writes a warp's 16 rows, times a factor of each: row `first + i` of the result, for those below `rows`, at start + (first + i) * stride.
template <int WIDTH> DP_DEVICE void dp_store_rows(DP_OUT(elem) out, float (&c)[WIDTH / 8][4], float low, float high, i64 first, i64 rows, i64 start, i64 stride) {
    int l = threadIdx.x % 32;
    DP_UNROLL
    for (int h = 0; h < 2; h++) {
        i64 row = first + l / 4 + h * 8;
        if (row >= rows) continue;
        DP_UNROLL
        for (int j = 0; j < WIDTH / 8; j++) {
            DP_UNROLL
            for (int e = 0; e < 2; e++) dp_put<ADD>(out, start + row * stride + j * 8 + l % 4 * 2 + e, c[j][h * 2 + e] * (h ? high : low));
        }
    }
}
