DP_KERNEL(dp_attention)(DP_IN(elem) q, DP_IN(elem) k, DP_IN(elem) v, DP_OUT(elem) o, DP_OUT(acc) lse, i64 queries, i64 keys, i64 groups, i64 heads, i64 valid_g,
                        i64 valid_r, i64 first_query, i64 first_key, i64 window, i64 chunk, i64 blocks, DP_IN(i32) documents, DP_IN(elem) sinks) {
    DP_SHARED(acc, tq, 0, TILE * PITCH_D);
    DP_SHARED(acc, tk, TILE * PITCH_D * sizeof(acc), TILE * PITCH_D);
    DP_SHARED(acc, tv, 2 * TILE * PITCH_D * sizeof(acc), TILE * PITCH_V);
    DP_SHARED(acc, tp, TILE * (2 * PITCH_D + PITCH_V) * sizeof(acc), TILE * PITCH_S);
    Shape s = {queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks, documents};
    i64 tiles = (queries + TILE - 1) / TILE, at = blockIdx.x;
    i64 q0 = at % tiles * TILE, r = at / tiles % heads, g = at / tiles / heads % groups, b = at / tiles / heads / groups;
    bool real = g < valid_g && r < valid_r;
    i64 hi = real ? keys : 0;
    i64 stride = groups * heads, row0 = (b * queries * groups + g) * heads + r;
    dp_load_tile<D>(tq, q, row0 * D, stride * D, q0, queries);
    int i = threadIdx.x / 8, part = threadIdx.x % 8;
    i64 mine = q0 + i, from = dp_first_seen(s, b, mine), end = dp_end_seen(s, mine);
    acc top = SINK ? acc(widen(dp_ld(sinks, g * heads + r))) : dp_minus_infinity<acc>(), sum = acc(SINK ? 1 : 0), out[NV];
    DP_UNROLL
    for (int c = 0; c < NV; c++) out[c] = acc(0);
    for (i64 k0 = 0; k0 < hi; k0 += TILE) {
        if (dp_hidden(s, b, q0, TILE, k0, TILE)) continue;
        __syncthreads();
        dp_load_tile<D>(tk, k, (b * keys * groups + g) * D, groups * D, k0, keys);
        dp_load_tile<DV>(tv, v, (b * keys * groups + g) * DV, groups * DV, k0, keys);
        __syncthreads();
        acc score[4], m = top;
        DP_UNROLL
        for (int j = 0; j < 4; j++) {
            i64 key = k0 + part + 8 * j;
            score[j] = dp_sees(s, from, end, key) ? acc(SCALE) * dp_dot<D>(tq, i, tk, part + 8 * j) : dp_minus_infinity<acc>();
            m = dp_max(m, score[j]);
        }
        DP_UNROLL
        for (int x = 1; x < 8; x *= 2) m = dp_max(m, dp_shfl_xor(m, x));
        bool any = m > dp_minus_infinity<acc>();
        acc shrink = any && sum > acc(0) ? dp_exp(top - m) : acc(0), added = acc(0);
        DP_UNROLL
        for (int j = 0; j < 4; j++) {
            acc p = any ? dp_exp(score[j] - m) : acc(0);
            added += p;
            dp_st(tp, i * PITCH_S + part + 8 * j, p);
        }
        DP_UNROLL
        for (int x = 1; x < 8; x *= 2) added += dp_shfl_xor(added, x);
        sum = sum * shrink + added, top = m;
        __syncwarp();
        DP_UNROLL
        for (int c = 0; c < NV; c++) {
            int col = part + 8 * c;
            if (col >= DV) continue;
            acc x = out[c] * shrink;
            DP_UNROLL_SOME
            for (int j = 0; j < TILE; j++) x += dp_ld(tp, i * PITCH_S + j) * dp_ld(tv, j * PITCH_V + col);
            out[c] = x;
        }
    }
    if (mine >= queries) return;
    i64 row = row0 + mine * stride;
    DP_UNROLL
    for (int c = 0; c < NV; c++)
        if (part + 8 * c < DV) dp_put<ADD>(o, row * DV + part + 8 * c, sum > acc(0) ? out[c] / sum : acc(0));
    if (part == 0) dp_put<ADD>(lse, row, !real ? acc(0) : sum > acc(0) ? top + dp_log(sum) : dp_minus_infinity<acc>());
}
