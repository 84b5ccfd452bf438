// out[m, n] = sum over k of a[m, k] b[k, n] on Hopper's matrix units: halves in, float sums. A block has tiles of BM x BN of the result one after the other.
// One warp asks the copy engine for tiles of a and b, DEEP in k, that go through a ring of STAGES in shared memory; each of BM / 64 warpgroups multiplies its
// 64 rows. A tile of an operand is made of square panels of 64 x 64, whose rows lie along what is contiguous in memory.
//
// Of each stage, `full` ends a phase when both tiles have come, `empty` when all warps that read them are through; so phase p of a stage is its use p.
// Config: that of `gemm_out.cuh`, THREADS, A_ROWS (neighbours in memory of a are neighbours in m), B_ROWS (of b: in k), GROUPED (0, or 1: an expert's rows are m), STAGES.
constexpr int DEEP = 64, PANEL = 64 * 64, A_TILE = BM * DEEP, B_TILE = BN * DEEP, WARPS = BM / 16;

// A tile of the result: its place and the rows of the matrix it is in, whose first is `first` of what a and the result hold.
struct Tile { i64 z, m0, n0, first, m; };
DP_DEVICE Tile dp_tile(i64 number, i64 tiles_m, i64 tiles_n, DP_IN(i32) starts, i64 m) {
    i64 z = number / (tiles_m * tiles_n), at = number % (tiles_m * tiles_n);
    Corner corner = dp_corner(at, tiles_m, tiles_n);
    Tile t = {z, corner.m, corner.n, 0, m};
    if (GROUPED) t.first = dp_ld(starts, z), t.m = i64(dp_ld(starts, z + 1)) - t.first;
    return t;
}

DP_KERNEL_ALONE(dp_gemm_wgmma)(DP_TENSOR(a), DP_TENSOR(b), DP_OUT(out_t) out, DP_IN(i32) starts, DP_IN(elem) p, DP_IN(elem) q, i64 tiles, i64 m, i64 n,
                               i64 k, i64 om, i64 on, i64 oz) {
    DP_SHARED(elem, ring, 0, STAGES * (A_TILE + B_TILE));
    DP_SHARED(u64, full, STAGES * (A_TILE + B_TILE) * 2, STAGES);
    DP_SHARED(u64, empty, STAGES * ((A_TILE + B_TILE) * 2 + 8), STAGES);
    i64 tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, steps = (k + DEEP - 1) / DEEP;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) dp_mbar_init(full, s, 1), dp_mbar_init(empty, s, WARPS);
        dp_mbar_publish();
    }
    __syncthreads();
    int stage = 0;
    u32 use = 0;  // parity
    auto next = [&]() {
        if (++stage == STAGES) stage = 0, use ^= 1;
    };
    if (warp == WARPS) {
        if (lane != 0) return;
        for (i64 number = blockIdx.x; number < tiles; number += gridDim.x) {
            Tile t = dp_tile(number, tiles_m, tiles_n, starts, m);
            if (t.m0 >= t.m) continue;
            for (i64 step = 0; step < steps; step++, next()) {
                dp_mbar_wait(empty, stage, use ^ 1);
                dp_mbar_expect(full, stage, (A_TILE + B_TILE) * 2);
                DP_SHARED_PTR(elem) to = ring + stage * (A_TILE + B_TILE);
                i32 k0 = i32(step) * DEEP, az = GROUPED ? 0 : i32(t.z);
                DP_UNROLL
                for (int p = 0; p < BM / 64; p++) {
                    i32 row = i32(t.first + t.m0) + p * 64;
                    dp_tensor_copy(to + p * PANEL, a, A_ROWS ? row : k0, A_ROWS ? k0 : row, az, full, stage);
                }
                DP_UNROLL
                for (int p = 0; p < BN / 64; p++) {
                    i32 col = i32(t.n0) + p * 64;
                    dp_tensor_copy(to + A_TILE + p * PANEL, b, B_ROWS ? k0 : col, B_ROWS ? col : k0, i32(t.z), full, stage);
                }
            }
        }
        return;
    }
    for (i64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        Tile t = dp_tile(number, tiles_m, tiles_n, starts, m);
        if (t.m0 >= t.m) continue;
        float sum[BN / 2];
        DP_UNROLL
        for (int i = 0; i < BN / 2; i++) sum[i] = 0.0f;
        int before = 0;
        for (i64 step = 0; step < steps; step++, next()) {
            dp_mbar_wait(full, stage, use);
            DP_SHARED_PTR(elem) ta = ring + stage * (A_TILE + B_TILE) + warp / 4 * PANEL;
            DP_SHARED_PTR(elem) tb = ring + stage * (A_TILE + B_TILE) + A_TILE;
            dp_wgmma_fence();
            DP_UNROLL
            for (int kk = 0; kk < DEEP; kk += 16) {
                u64 da = dp_wgmma_matrix(ta + (A_ROWS ? kk * 64 : kk), PANEL * 2, 1024);
                u64 db = dp_wgmma_matrix(tb + (B_ROWS ? kk : kk * 64), PANEL * 2, 1024);
                dp_wgmma<elem, A_ROWS, !B_ROWS>(sum, da, db);
            }
            dp_wgmma_commit();
            // The products of the step before are through, so its stage may be filled again; this step's go on meanwhile.
            dp_wgmma_wait<1>(sum);
            if (step > 0 && lane == 0) dp_mbar_arrive(empty, before);
            before = stage;
        }
        dp_wgmma_wait<0>(sum);
        if (steps > 0 && lane == 0) dp_mbar_arrive(empty, before);
        // Of every 16 rows a warp has, a lane holds two elements of rows l / 4 and l / 4 + 8 of each eight columns.
        i64 row = t.m0 + warp * 16 + lane / 4, col = t.n0 + lane % 4 * 2;
        i64 to = t.first * om + (GROUPED ? 0 : t.z) * oz + row * om + col * on;
        int left = int(dp_min(n - col, BN));
        DP_UNROLL
        for (int h = 0; h < 2; h++) {
            if (row + h * 8 < t.m) {
                DP_UNROLL
                for (int j = 0; j < BN / 8; j++)
                    dp_write_two(out, to + j * 8 * (PAIRS ? 1 : on), on, col + j * 8, left - j * 8, sum[j * 4 + h * 2], sum[j * 4 + h * 2 + 1], p, q);
            }
            to += 8 * om;
        }
    }
}
