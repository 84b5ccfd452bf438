// P and dS of a tile: thread (i, part) has row i, columns part + 8 j. `p` may be needed transposed only, so both go to shared memory.
DP_DEVICE void dp_tile_slopes(const Shape& s, DP_SHARED_PTR(acc) tq, DP_SHARED_PTR(acc) tk, DP_SHARED_PTR(acc) tv, DP_SHARED_PTR(acc) td, DP_SHARED_PTR(acc) tp,
                              DP_SHARED_PTR(acc) ts, DP_IN(acc) lse, DP_IN(acc) delta, i64 b, i64 row0, i64 stride, i64 q0, i64 k0) {
    int i = threadIdx.x / 8, part = threadIdx.x % 8;
    i64 query = q0 + i;
    bool inside = query < s.queries;
    i64 from = inside ? dp_first_seen(s, b, query) : 0, end = inside ? dp_end_seen(s, query) : 0;
    acc l = inside ? dp_ld(lse, row0 + query * stride) : acc(0), along = inside ? dp_ld(delta, row0 + query * stride) : acc(0);
    DP_UNROLL
    for (int j = 0; j < 4; j++) {
        int col = part + 8 * j;
        bool seen = inside && dp_sees(s, from, end, k0 + col);
        acc p = seen ? dp_exp(acc(SCALE) * dp_dot<D>(tq, i, tk, col) - l) : acc(0);
        dp_st(tp, i * PITCH_S + col, p);
        dp_st(ts, i * PITCH_S + col, seen ? p * (dp_dot<DV>(td, i, tv, col) - along) : acc(0));
    }
}

DP_KERNEL_ALONE(dp_attention_grad_keys)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_IN(elem) dout, DP_IN(acc) lse, DP_IN(acc) delta, DP_OUT(elem) dk, DP_OUT(elem) dv,
                                  i64 queries, i64 keys, i64 groups, i64 heads, i64 valid_g, i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents) {
    DP_SHARED(acc, tq, 0, TILE * PITCH_D);
    DP_SHARED(acc, tk, TILE * PITCH_D * sizeof(acc), TILE * PITCH_D);
    DP_SHARED(acc, tv, 2 * TILE * PITCH_D * sizeof(acc), TILE * PITCH_V);
    DP_SHARED(acc, td, TILE * (2 * PITCH_D + PITCH_V) * sizeof(acc), TILE * PITCH_V);
    DP_SHARED(acc, tp, TILE * (2 * PITCH_D + 2 * PITCH_V) * sizeof(acc), TILE * PITCH_S);
    DP_SHARED(acc, ts, TILE * (2 * PITCH_D + 2 * PITCH_V + PITCH_S) * sizeof(acc), TILE * PITCH_S);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (keys + TILE - 1) / TILE, at = blockIdx.x;
    i64 k0 = at % tiles * TILE, g = at / tiles % groups, b = at / tiles / groups;
    i64 stride = groups * heads;
    dp_load_tile<D>(tk, k, (b * keys * groups + g) * D, groups * D, k0, keys);
    dp_load_tile<DV>(tv, v, (b * keys * groups + g) * DV, groups * DV, k0, keys);
    int i = threadIdx.x / 8, part = threadIdx.x % 8;
    acc gk[ND], gv[NV];
    DP_UNROLL
    for (int c = 0; c < ND; c++) gk[c] = acc(0);
    DP_UNROLL
    for (int c = 0; c < NV; c++) gv[c] = acc(0);
    for (i64 r = 0; g < valid_g && r < valid_r; r++) {
        i64 row0 = (b * queries * groups + g) * heads + r;
        for (i64 q0 = 0; q0 < queries; q0 += TILE) {
            if (dp_hidden(s, b, q0, TILE, k0, TILE)) continue;
            __syncthreads();
            dp_load_tile<D>(tq, q, row0 * D, stride * D, q0, queries);
            dp_load_tile<DV>(td, dout, row0 * DV, stride * DV, q0, queries);
            __syncthreads();
            dp_tile_slopes(s, tq, tk, tv, td, tp, ts, lse, delta, b, row0, stride, q0, k0);
            __syncthreads();
            DP_UNROLL_SOME
            for (int j = 0; j < TILE; j++) {
                acc p = dp_ld(tp, j * PITCH_S + i), ds = dp_ld(ts, j * PITCH_S + i);
                DP_UNROLL
                for (int c = 0; c < NV; c++)
                    if (part + 8 * c < DV) gv[c] += p * dp_ld(td, j * PITCH_V + part + 8 * c);
                DP_UNROLL
                for (int c = 0; c < ND; c++)
                    if (part + 8 * c < D) gk[c] += ds * dp_ld(tq, j * PITCH_D + part + 8 * c);
            }
        }
    }
    if (k0 + i >= keys) return;
    i64 row = (b * keys + k0 + i) * groups + g;
    DP_UNROLL
    for (int c = 0; c < NV; c++)
        if (part + 8 * c < DV) dp_put<ADD>(dv, row * DV + part + 8 * c, gv[c]);
    DP_UNROLL
    for (int c = 0; c < ND; c++)
        if (part + 8 * c < D) dp_put<ADD>(dk, row * D + part + 8 * c, acc(SCALE) * gk[c]);
}

DP_KERNEL_ALONE(dp_attention_grad_queries)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_IN(elem) dout, DP_IN(acc) lse, DP_IN(acc) delta, DP_OUT(elem) dq, i64 queries,
                                     i64 keys, i64 groups, i64 heads, i64 valid_g, i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents) {
    DP_SHARED(acc, tq, 0, TILE * PITCH_D);
    DP_SHARED(acc, tk, TILE * PITCH_D * sizeof(acc), TILE * PITCH_D);
    DP_SHARED(acc, tv, 2 * TILE * PITCH_D * sizeof(acc), TILE * PITCH_V);
    DP_SHARED(acc, td, TILE * (2 * PITCH_D + PITCH_V) * sizeof(acc), TILE * PITCH_V);
    DP_SHARED(acc, tp, TILE * (2 * PITCH_D + 2 * PITCH_V) * sizeof(acc), TILE * PITCH_S);
    DP_SHARED(acc, ts, TILE * (2 * PITCH_D + 2 * PITCH_V + PITCH_S) * sizeof(acc), TILE * PITCH_S);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (queries + TILE - 1) / TILE, at = blockIdx.x;
    i64 q0 = at % tiles * TILE, r = at / tiles % heads, g = at / tiles / heads % groups, b = at / tiles / heads / groups;
    i64 stride = groups * heads, row0 = (b * queries * groups + g) * heads + r;
    i64 hi = g < valid_g && r < valid_r ? keys : 0;
    dp_load_tile<D>(tq, q, row0 * D, stride * D, q0, queries);
    dp_load_tile<DV>(td, dout, row0 * DV, stride * DV, q0, queries);
    int i = threadIdx.x / 8, part = threadIdx.x % 8;
    acc gq[ND];
    DP_UNROLL
    for (int c = 0; c < ND; c++) gq[c] = acc(0);
    for (i64 k0 = 0; k0 < hi; k0 += TILE) {
        if (dp_hidden(s, b, q0, TILE, k0, TILE)) continue;
        __syncthreads();
        dp_load_tile<D>(tk, k, (b * keys * groups + g) * D, groups * D, k0, keys);
        dp_load_tile<DV>(tv, v, (b * keys * groups + g) * DV, groups * DV, k0, keys);
        __syncthreads();
        dp_tile_slopes(s, tq, tk, tv, td, tp, ts, lse, delta, b, row0, stride, q0, k0);
        __syncwarp();
        DP_UNROLL_SOME
        for (int j = 0; j < TILE; j++) {
            acc ds = dp_ld(ts, i * PITCH_S + j);
            DP_UNROLL
            for (int c = 0; c < ND; c++)
                if (part + 8 * c < D) gq[c] += ds * dp_ld(tk, j * PITCH_D + part + 8 * c);
        }
    }
    if (q0 + i >= queries) return;
    DP_UNROLL
    for (int c = 0; c < ND; c++)
        if (part + 8 * c < D) dp_put<ADD>(dq, (row0 + (q0 + i) * stride) * D + part + 8 * c, acc(SCALE) * gq[c]);
}
