// out[m, n] = sum over k of a[m, k] b[k, n] on the matrix units: halves in, float sums. A block has BM x BN of the result, its warps WM x WN each; tiles of
// BK in k go through a ring of STAGES in shared memory, filled by asynchronous copies STAGES - 1 ahead of their use.
// Config: that of `gemm_out.cuh`, THREADS, ASYNC, A_ROWS (neighbours in memory of a are neighbours in m), B_ROWS (of b: in k), GROUPED, BK, WM, WN, STAGES. Groups as in
// the plain kernel.
constexpr int A_PITCH = (A_ROWS ? BM : BK) + 8, B_PITCH = (B_ROWS ? BK : BN) + 8;
constexpr int A_TILE = (A_ROWS ? BK : BM) * A_PITCH, B_TILE = (B_ROWS ? BN : BK) * B_PITCH;

DP_KERNEL(dp_gemm_mma)(DP_IN(elem) a, DP_IN(elem) b, DP_OUT(out_t) out, DP_IN(i32) starts, DP_IN(elem) p, DP_IN(elem) q, i64 m, i64 n, i64 k, i64 am,
                       i64 ak, i64 bk, i64 bn, i64 om, i64 on, i64 az, i64 bz, i64 oz) {
    DP_SHARED(elem, ring, 0, STAGES * (A_TILE + B_TILE));
    i64 tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
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
    auto fetch = [&](i64 k0, int slot) {
        DP_SHARED_PTR(elem) ta = ring + slot * (A_TILE + B_TILE);
        DP_SHARED_PTR(elem) tb = ta + A_TILE;
        if (A_ROWS)
            dp_fetch<BK, BM>(ta, a, ak, am, k0, k, m0, m);
        else
            dp_fetch<BM, BK>(ta, a, am, ak, m0, m, k0, k);
        if (B_ROWS)
            dp_fetch<BN, BK>(tb, b, bn, bk, n0, n, k0, k);
        else
            dp_fetch<BK, BN>(tb, b, bk, bn, k0, k, n0, n);
    };
    int warp = threadIdx.x / 32, wm = warp % (BM / WM) * WM, wn = warp / (BM / WM) * WN;
    float sum[WM / 16][WN / 8][4];
    DP_UNROLL
    for (int i = 0; i < WM / 16; i++) {
        DP_UNROLL
        for (int j = 0; j < WN / 8; j++) {
            DP_UNROLL
            for (int e = 0; e < 4; e++) sum[i][j][e] = 0.0f;
        }
    }
    i64 steps = (k + BK - 1) / BK;
    DP_UNROLL
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) fetch(i64(s) * BK, s);
        dp_cp_commit();
    }
    for (i64 t = 0; t < steps; t++) {
        dp_cp_wait<STAGES - 2>();
        __syncthreads();
        // The slot that was read in the step before is free: every thread has passed the barrier since.
        if (t + STAGES - 1 < steps) fetch((t + STAGES - 1) * BK, int((t + STAGES - 1) % STAGES));
        dp_cp_commit();
        DP_SHARED_PTR(elem) ta = ring + int(t % STAGES) * (A_TILE + B_TILE);
        DP_SHARED_PTR(elem) tb = ta + A_TILE;
        DP_UNROLL
        for (int kk = 0; kk < BK; kk += 16) {
            u32 fa[WM / 16][4], fb[WN / 8][2];
            DP_UNROLL
            for (int i = 0; i < WM / 16; i++) dp_left<A_ROWS>(fa[i], ta, A_PITCH, wm + i * 16, kk);
            DP_UNROLL
            for (int j = 0; j < WN / 8; j += 2) {
                u32 two[2][2];
                dp_right<!B_ROWS>(two, tb, B_PITCH, kk, wn + j * 8);
                DP_UNROLL
                for (int h = 0; h < 2; h++) fb[j + h][0] = two[h][0], fb[j + h][1] = two[h][1];
            }
            DP_UNROLL
            for (int i = 0; i < WM / 16; i++) {
                DP_UNROLL
                for (int j = 0; j < WN / 8; j++) dp_mma_16816<elem>(sum[i][j], fa[i], fb[j]);
            }
        }
    }
    dp_cp_wait<0>();
    int l = threadIdx.x % 32;
    DP_UNROLL
    for (int i = 0; i < WM / 16; i++) {
        DP_UNROLL
        for (int j = 0; j < WN / 8; j++) {
            DP_UNROLL
            for (int h = 0; h < 2; h++) {
                i64 row = m0 + wm + i * 16 + l / 4 + h * 8, col = n0 + wn + j * 8 + l % 4 * 2;
                if (row < m) dp_write_two(out, to + row * om + col * on, on, col, int(dp_min(n - col, 2)), sum[i][j][h * 2], sum[i][j][h * 2 + 1], p, q);
            }
        }
    }
}
