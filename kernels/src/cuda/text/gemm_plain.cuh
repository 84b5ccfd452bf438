// out[m, n] = sum over k of a[m, k] b[k, n], any strides, on the arithmetic units of `acc`. A block has a 64 x 64 tile, a thread 4 x 4 of it.
// Where experts share the product (GROUPED 1: their rows are m, 2: their rows are k), group z has rows [starts[z], starts[z + 1]).
// Config: that of `gemm_out.cuh`, THREADS = 256, A_ROWS (neighbours in memory of a are neighbours in m), B_ROWS (of b: in k), GROUPED.
constexpr int TILE = BM, DEEP = 16, PITCH = TILE + 4;

DP_KERNEL(dp_gemm_plain)(DP_IN(elem) a, DP_IN(elem) b, DP_OUT(out_t) out, DP_IN(i32) starts, DP_IN(elem) p, DP_IN(elem) q, i64 m, i64 n, i64 k, i64 am,
                         i64 ak, i64 bk, i64 bn, i64 om, i64 on, i64 az, i64 bz, i64 oz) {
    DP_SHARED(acc, left, 0, DEEP * PITCH);
    DP_SHARED(acc, right, DEEP * PITCH * sizeof(acc), DEEP * PITCH);
    i64 tiles_m = (m + TILE - 1) / TILE, tiles_n = (n + TILE - 1) / TILE;
    i64 z = i64(blockIdx.x) / (tiles_m * tiles_n), tile = i64(blockIdx.x) % (tiles_m * tiles_n);
    Corner corner = dp_corner(tile, tiles_m, tiles_n);
    i64 m0 = corner.m, n0 = corner.n, to = 0;
    if (GROUPED) {
        i64 first = dp_ld(starts, z), rows = i64(dp_ld(starts, z + 1)) - first;
        if (GROUPED == 1) {
            a = a + first * am, to = first * om, b = b + z * bz, m = rows;
            if (m0 >= m) return;
        } else {
            a = a + first * ak, b = b + first * bk, to = z * oz, k = rows;
        }
    } else {
        a = a + z * az, b = b + z * bz, to = z * oz;
    }
    int tm = threadIdx.x % 16, tn = threadIdx.x / 16;
    acc sum[4][4];
    DP_UNROLL
    for (int i = 0; i < 4; i++) {
        DP_UNROLL
        for (int j = 0; j < 4; j++) sum[i][j] = acc(0);
    }
    for (i64 k0 = 0; k0 < k; k0 += DEEP) {
        DP_UNROLL
        for (int u = 0; u < TILE * DEEP / THREADS; u++) {
            int i = threadIdx.x + u * THREADS;
            int row = A_ROWS ? i % TILE : i / DEEP, deep = A_ROWS ? i / TILE : i % DEEP;
            bool inside = m0 + row < m && k0 + deep < k;
            dp_st(left, deep * PITCH + row, inside ? acc(widen(dp_ld(a, (m0 + row) * am + (k0 + deep) * ak))) : acc(0));
            int col = B_ROWS ? i / DEEP : i % TILE;
            deep = B_ROWS ? i % DEEP : i / TILE;
            inside = n0 + col < n && k0 + deep < k;
            dp_st(right, deep * PITCH + col, inside ? acc(widen(dp_ld(b, (k0 + deep) * bk + (n0 + col) * bn))) : acc(0));
        }
        __syncthreads();
        for (int d = 0; d < DEEP; d++) {
            Pack<acc, 4> x = dp_ld_pack<4>(left, d * PITCH + tm * 4), y = dp_ld_pack<4>(right, d * PITCH + tn * 4);
            DP_UNROLL
            for (int i = 0; i < 4; i++) {
                DP_UNROLL
                for (int j = 0; j < 4; j++) sum[i][j] += x.v[i] * y.v[j];
            }
        }
        __syncthreads();
    }
    DP_UNROLL
    for (int i = 0; i < 4; i++) {
        DP_UNROLL
        for (int j = 0; j < 4; j += 2) {
            i64 row = m0 + tm * 4 + i, col = n0 + tn * 4 + j;
            if (row < m) dp_write_two(out, to + row * om + col * on, on, col, int(dp_min(n - col, 2)), sum[i][j], sum[i][j + 1], p, q);
        }
    }
}
