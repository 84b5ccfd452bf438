DP_KERNEL(dp_attention)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_OUT(elem) o, DP_OUT(acc) lse, i64 queries, i64 keys, i64 groups, i64 heads, i64 valid_g,
                        i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents, DP_IN(elem) sinks) {
    DP_SHARED(elem, tq, 0, ROWS * PITCH_D);
    DP_SHARED(elem, tk, ROWS * PITCH_D * 2, 2 * STEP * PITCH_D);
    DP_SHARED(elem, tv, (ROWS + 2 * STEP) * PITCH_D * 2, 2 * STEP * PITCH_V);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (queries + ROWS - 1) / ROWS, at = blockIdx.x;
    // The last tiles of a causal mask see the most: they begin first.
    i64 q0 = (tiles - 1 - at % tiles) * ROWS, r = at / tiles % heads, g = at / tiles / heads % groups, b = at / tiles / heads / groups;
    bool real = g < valid_g && r < valid_r;
    i64 hi = real ? keys : 0;
    // The next tile of keys that some query of the block sees.
    auto next = [&](i64 k0) {
        while (k0 < hi && dp_hidden(s, b, q0, ROWS, k0, STEP)) k0 += STEP;
        return k0;
    };
    i64 lo = next(0);
    i64 stride = groups * heads, row0 = (b * queries * groups + g) * heads + r;
    DP_IN(elem) kb = k + (b * keys * groups + g) * D;
    DP_IN(elem) vb = v + (b * keys * groups + g) * DV;
    auto fetch = [&](i64 k0, int slot) {
        dp_fetch<STEP, D>(tk + slot * STEP * PITCH_D, kb, groups * D, 1, k0, keys, 0, D);
        dp_fetch<STEP, DV>(tv + slot * STEP * PITCH_V, vb, groups * DV, 1, k0, keys, 0, DV);
    };
    dp_fetch<ROWS, D>(tq, q + row0 * D, stride * D, 1, q0, queries, 0, D);
    if (lo < hi) fetch(lo, 0);
    dp_cp_commit();
    int warp = threadIdx.x / 32, l = threadIdx.x % 32;
    i64 mine = q0 + warp * 16 + l / 4;
    i64 from[2] = {dp_first_seen(s, b, mine), dp_first_seen(s, b, mine + 8)}, end[2] = {dp_end_seen(s, mine), dp_end_seen(s, mine + 8)};
    // In units of log 2: exp(x) = exp2(x log2 e).
    float begin = SINK ? widen(dp_ld(sinks, g * heads + r)) * LOG2_E : dp_minus_infinity<float>();
    // Four lanes share a row; one of them has the sink.
    float top[2] = {begin, begin}, first = SINK && l % 4 == 0 ? 1.0f : 0.0f, sum[2] = {first, first};
    float out[DV / 8][4];
    dp_clear<DV>(out);
    int slot = 0;
    for (i64 k0 = lo; k0 < hi;) {
        i64 after = next(k0 + STEP);
        dp_cp_wait<0>();
        __syncthreads();
        if (after < hi) fetch(after, slot ^ 1);
        dp_cp_commit();
        float p[STEP / 8][4];
        dp_scores<STEP, D>(p, tq, warp * 16, tk + slot * STEP * PITCH_D);
        DP_UNROLL
        for (int h = 0; h < 2; h++) {
            float m = top[h];
            DP_UNROLL
            for (int j = 0; j < STEP / 8; j++) {
                DP_UNROLL
                for (int e = 0; e < 2; e++) {
                    i64 key = k0 + j * 8 + l % 4 * 2 + e;
                    float x = dp_sees(s, from[h], end[h], key) ? p[j][h * 2 + e] * float(SCALE * LOG2_E) : dp_minus_infinity<float>();
                    p[j][h * 2 + e] = x;
                    m = dp_max(m, x);
                }
            }
            m = dp_max(m, dp_shfl_xor(m, 1));
            m = dp_max(m, dp_shfl_xor(m, 2));
            bool any = m > dp_minus_infinity<float>();
            float shrink = any ? dp_exp2(top[h] - m) : 0.0f, base = any ? m : 0.0f, added = 0.0f;
            DP_UNROLL
            for (int j = 0; j < STEP / 8; j++) {
                DP_UNROLL
                for (int e = 0; e < 2; e++) {
                    float x = dp_exp2(p[j][h * 2 + e] - base);
                    p[j][h * 2 + e] = x;
                    added += x;
                }
            }
            sum[h] = sum[h] * shrink + added, top[h] = m;
            DP_UNROLL
            for (int j = 0; j < DV / 8; j++) out[j][h * 2] *= shrink, out[j][h * 2 + 1] *= shrink;
        }
        dp_weighted<STEP, DV>(out, p, tv + slot * STEP * PITCH_V);
        slot ^= 1;
        k0 = after;
    }
    dp_cp_wait<0>();
    DP_UNROLL
    for (int h = 0; h < 2; h++) {
        sum[h] += dp_shfl_xor(sum[h], 1);
        sum[h] += dp_shfl_xor(sum[h], 2);
        i64 row = mine + h * 8;
        if (l % 4 == 0 && row < queries)
            dp_put<ADD>(lse, row0 + row * stride, !real ? 0.0f : sum[h] > 0.0f ? top[h] / LOG2_E + dp_log(sum[h]) : dp_minus_infinity<float>());
    }
    float low = sum[0] > 0.0f ? 1.0f / sum[0] : 0.0f, high = sum[1] > 0.0f ? 1.0f / sum[1] : 0.0f;
    dp_store_rows<DV>(o, out, low, high, q0 + warp * 16, queries, row0 * DV, stride * DV);
}
