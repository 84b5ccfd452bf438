// A block has 64 keys of one key/value head and goes over query heads and tiles of queries in order: S^T = K Q^T, dP^T = V dO^T.
DP_KERNEL(dp_attention_grad_keys)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_IN(elem) dout, DP_IN(acc) lse, DP_IN(acc) delta, DP_OUT(elem) dk, DP_OUT(elem) dv,
                                  i64 queries, i64 keys, i64 groups, i64 heads, i64 valid_g, i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents) {
    DP_SHARED(elem, tk, 0, ROWS * PITCH_D);
    DP_SHARED(elem, tv, ROWS * PITCH_D * 2, ROWS * PITCH_V);
    DP_SHARED(elem, tq, ROWS * (PITCH_D + PITCH_V) * 2, STEP * PITCH_D);
    DP_SHARED(elem, td, (ROWS * (PITCH_D + PITCH_V) + STEP * PITCH_D) * 2, STEP * PITCH_V);
    DP_SHARED(float, rows, (ROWS + STEP) * (PITCH_D + PITCH_V) * 2, 2 * STEP);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (keys + ROWS - 1) / ROWS, at = blockIdx.x;
    i64 k0 = at % tiles * ROWS, g = at / tiles % groups, b = at / tiles / groups, stride = groups * heads;
    dp_fetch<ROWS, D>(tk, k + (b * keys * groups + g) * D, groups * D, 1, k0, keys, 0, D);
    dp_fetch<ROWS, DV>(tv, v + (b * keys * groups + g) * DV, groups * DV, 1, k0, keys, 0, DV);
    int warp = threadIdx.x / 32, l = threadIdx.x % 32;
    i64 mine = k0 + warp * 16 + l / 4;
    float gk[D / 8][4], gv[DV / 8][4];
    dp_clear<D>(gk);
    dp_clear<DV>(gv);
    for (i64 r = 0; g < valid_g && r < valid_r; r++) {
        i64 row0 = (b * queries * groups + g) * heads + r;
        for (i64 q0 = 0; q0 < queries; q0 += STEP) {
            if (dp_hidden(s, b, q0, STEP, k0, ROWS)) continue;
            __syncthreads();
            dp_fetch<STEP, D>(tq, q + row0 * D, stride * D, 1, q0, queries, 0, D);
            dp_fetch<STEP, DV>(td, dout + row0 * DV, stride * DV, 1, q0, queries, 0, DV);
            for (int i = threadIdx.x; i < STEP; i += THREADS) {
                bool inside = q0 + i < queries;
                dp_st(rows, i, inside ? dp_ld(lse, row0 + (q0 + i) * stride) * LOG2_E : 0.0f);
                dp_st(rows, STEP + i, inside ? dp_ld(delta, row0 + (q0 + i) * stride) : 0.0f);
            }
            dp_cp_commit();
            dp_cp_wait<0>();
            __syncthreads();
            float p[STEP / 8][4], ds[STEP / 8][4];
            dp_scores<STEP, D>(p, tk, warp * 16, tq);
            dp_scores<STEP, DV>(ds, tv, warp * 16, td);
            DP_UNROLL
            for (int j = 0; j < STEP / 8; j++) {
                DP_UNROLL
                for (int e = 0; e < 2; e++) {
                    int i = j * 8 + l % 4 * 2 + e;
                    i64 query = q0 + i, from = dp_first_seen(s, b, query), end = query < queries ? dp_end_seen(s, query) : 0;
                    float norm = dp_ld(rows, i), along = dp_ld(rows, STEP + i);
                    DP_UNROLL
                    for (int h = 0; h < 2; h++) {
                        i64 key = mine + h * 8;
                        float x = query < queries && dp_sees(s, from, end, key) ? dp_exp2(p[j][h * 2 + e] * float(SCALE * LOG2_E) - norm) : 0.0f;
                        p[j][h * 2 + e] = x;
                        ds[j][h * 2 + e] = x * (ds[j][h * 2 + e] - along);
                    }
                }
            }
            dp_weighted<STEP, DV>(gv, p, td);
            dp_weighted<STEP, D>(gk, ds, tq);
        }
    }
    dp_cp_commit();
    dp_cp_wait<0>();
    i64 first = k0 + warp * 16, start = b * keys * groups + g;
    dp_store_rows<DV>(dv, gv, 1.0f, 1.0f, first, keys, start * DV, groups * DV);
    dp_store_rows<D>(dk, gk, float(SCALE), float(SCALE), first, keys, start * D, groups * D);
}

// A block has 64 queries of one head and goes over tiles of keys in order.
DP_KERNEL(dp_attention_grad_queries)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_IN(elem) dout, DP_IN(acc) lse, DP_IN(acc) delta, DP_OUT(elem) dq, i64 queries,
                                     i64 keys, i64 groups, i64 heads, i64 valid_g, i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents) {
    DP_SHARED(elem, tq, 0, ROWS * PITCH_D);
    DP_SHARED(elem, td, ROWS * PITCH_D * 2, ROWS * PITCH_V);
    DP_SHARED(elem, tk, ROWS * (PITCH_D + PITCH_V) * 2, STEP * PITCH_D);
    DP_SHARED(elem, tv, (ROWS * (PITCH_D + PITCH_V) + STEP * PITCH_D) * 2, STEP * PITCH_V);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (queries + ROWS - 1) / ROWS, at = blockIdx.x;
    i64 q0 = (tiles - 1 - at % tiles) * ROWS, r = at / tiles % heads, g = at / tiles / heads % groups, b = at / tiles / heads / groups;
    i64 stride = groups * heads, row0 = (b * queries * groups + g) * heads + r;
    i64 hi = g < valid_g && r < valid_r ? keys : 0;
    dp_fetch<ROWS, D>(tq, q + row0 * D, stride * D, 1, q0, queries, 0, D);
    dp_fetch<ROWS, DV>(td, dout + row0 * DV, stride * DV, 1, q0, queries, 0, DV);
    int warp = threadIdx.x / 32, l = threadIdx.x % 32;
    i64 mine = q0 + warp * 16 + l / 4, from[2], end[2];
    float norm[2], along[2];
    DP_UNROLL
    for (int h = 0; h < 2; h++) {
        i64 query = mine + h * 8;
        bool inside = query < queries;
        from[h] = dp_first_seen(s, b, query), end[h] = inside ? dp_end_seen(s, query) : 0;
        norm[h] = inside ? dp_ld(lse, row0 + query * stride) * LOG2_E : 0.0f;
        along[h] = inside ? dp_ld(delta, row0 + query * stride) : 0.0f;
    }
    float gq[D / 8][4];
    dp_clear<D>(gq);
    for (i64 k0 = 0; k0 < hi; k0 += STEP) {
        if (dp_hidden(s, b, q0, ROWS, k0, STEP)) continue;
        __syncthreads();
        dp_fetch<STEP, D>(tk, k + (b * keys * groups + g) * D, groups * D, 1, k0, keys, 0, D);
        dp_fetch<STEP, DV>(tv, v + (b * keys * groups + g) * DV, groups * DV, 1, k0, keys, 0, DV);
        dp_cp_commit();
        dp_cp_wait<0>();
        __syncthreads();
        float p[STEP / 8][4], ds[STEP / 8][4];
        dp_scores<STEP, D>(p, tq, warp * 16, tk);
        dp_scores<STEP, DV>(ds, td, warp * 16, tv);
        DP_UNROLL
        for (int j = 0; j < STEP / 8; j++) {
            DP_UNROLL
            for (int e = 0; e < 4; e++) {
                int h = e / 2;
                i64 key = k0 + j * 8 + l % 4 * 2 + e % 2;
                float x = dp_sees(s, from[h], end[h], key) ? dp_exp2(p[j][e] * float(SCALE * LOG2_E) - norm[h]) : 0.0f;
                ds[j][e] = x * (ds[j][e] - along[h]);
            }
        }
        dp_weighted<STEP, D>(gq, ds, tk);
    }
    dp_cp_commit();
    dp_cp_wait<0>();
    dp_store_rows<D>(dq, gq, float(SCALE), float(SCALE), q0 + warp * 16, queries, row0 * D, stride * D);
}
