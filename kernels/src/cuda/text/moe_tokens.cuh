// y[token] = sum over its rows, in order of expert, times their gates where GATED. Config: elem, acc, THREADS, VEC, ADD, GATED.
DP_KERNEL(dp_moe_tokens)(DP_IN(elem) rows, DP_IN(elem) gate, DP_IN(i32) places, DP_OUT(elem) y, i64 tokens, i64 width, i64 experts) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= tokens * width) return;
    i64 token = at / width;
    acc sum[VEC];
    DP_UNROLL
    for (int j = 0; j < VEC; j++) sum[j] = acc(0);
    for (i64 e = 0; e < experts; e++) {
        i64 row = dp_ld(places, token * experts + e);
        if (row < 0) continue;
        acc factor = GATED ? acc(widen(dp_ld(gate, token * experts + e))) : acc(1);
        Pack<elem, VEC> in = dp_ld_pack<VEC>(rows, row * width + at % width);
        DP_UNROLL
        for (int j = 0; j < VEC; j++) sum[j] += acc(widen(in.v[j])) * factor;
    }
    Pack<elem, VEC> out;
    if (ADD) out = dp_ld_pack<VEC>(y, at);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + sum[j] : sum[j]);
    dp_st_pack<VEC>(y, at, out);
}
