// Tiles of halves in shared memory, and their fragments for `mma.sync.m16n8k16`. Rows are 8 elements longer than what they hold: an odd number of
// 16-byte chunks, so that the eight rows of an `ldmatrix` lie in different banks. Config: elem, THREADS, ASYNC (16-byte copies may be used).

// Rows [row, row + ROWS) and columns [col, col + COLS) of a matrix; zero outside `rows` and `cols`. Neighbours in a row are `step` apart in memory (1 if ASYNC).
template <int ROWS, int COLS> DP_DEVICE void dp_fetch(DP_SHARED_PTR(elem) to, DP_IN(elem) from, i64 pitch, i64 step, i64 row, i64 rows, i64 col, i64 cols) {
    DP_UNROLL
    for (int u = 0; u < (ROWS * COLS / 8 + THREADS - 1) / THREADS; u++) {
        int chunk = threadIdx.x + u * THREADS;
        if (ROWS * COLS / 8 % THREADS != 0 && chunk >= ROWS * COLS / 8) break;
        int r = chunk / (COLS / 8), c = chunk % (COLS / 8) * 8;
        i64 left = row + r < rows ? cols - (col + c) : 0;
        if (ASYNC) {
            int valid = left >= 8 ? 16 : left > 0 ? int(left) * 2 : 0;
            dp_cp_async16(to, r * (COLS + 8) + c, from, (row + r) * pitch + col + c, valid);
        } else {
            DP_UNROLL
            for (int j = 0; j < 8; j++) dp_st(to, r * (COLS + 8) + c + j, j < left ? dp_ld(from, (row + r) * pitch + (col + c + j) * step) : elem{});
        }
    }
}

// The 16 x 16 fragment of a left operand at (m, k): of a tile stored [m][k], or TRANSPOSED, [k][m].
template <bool TRANSPOSED> DP_DEVICE void dp_left(u32 (&a)[4], DP_SHARED_PTR(elem) tile, int pitch, int m, int k) {
    int l = threadIdx.x % 32;
    if (TRANSPOSED)
        dp_ldmatrix_x4<true>(a, tile, (k + l % 8 + l / 16 * 8) * pitch + m + l / 8 % 2 * 8);
    else
        dp_ldmatrix_x4<false>(a, tile, (m + l % 16) * pitch + k + l / 16 * 8);
}

// Two 16 x 8 fragments of a right operand, at (k, n) and (k, n + 8): of a tile stored [n][k], or TRANSPOSED, [k][n].
template <bool TRANSPOSED> DP_DEVICE void dp_right(u32 (&b)[2][2], DP_SHARED_PTR(elem) tile, int pitch, int k, int n) {
    int l = threadIdx.x % 32;
    u32 r[4];
    if (TRANSPOSED)
        dp_ldmatrix_x4<true>(r, tile, (k + l % 16) * pitch + n + l / 16 * 8);
    else
        dp_ldmatrix_x4<false>(r, tile, (n + l % 8 + l / 16 * 8) * pitch + k + l / 8 % 2 * 8);
    b[0][0] = r[0], b[0][1] = r[1], b[1][0] = r[2], b[1][1] = r[3];
}

DP_DEVICE u32 dp_halves(float low, float high) { return u32(narrow<elem>(low).bits) | u32(narrow<elem>(high).bits) << 16; }
