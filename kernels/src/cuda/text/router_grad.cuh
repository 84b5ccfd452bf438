DP_KERNEL(dp_router_grad)(DP_IN(elem) logits, DP_IN(elem) gate, DP_IN(elem) dgate, DP_OUT(elem) out, i64 tokens, i64 experts, i64 valid) {
    i64 token = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    acc x[L], g[L], d[L];
    acc top = dp_minus_infinity<acc>(), along = acc(0), sum = acc(0);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i, at = token * experts + e;
        bool here = e < valid;
        x[i] = here ? acc(widen(dp_ld(logits, at))) : dp_minus_infinity<acc>();
        g[i] = here ? acc(widen(dp_ld(gate, at))) : acc(0);
        d[i] = here ? acc(widen(dp_ld(dgate, at))) : acc(0);
        top = dp_max(top, x[i]);
        along += g[i] * d[i];
    }
    top = dp_warp_max(top);
    along = dp_warp_sum(along);
    DP_UNROLL
    for (int i = 0; i < L; i++) sum += lane + 32 * i < valid ? dp_exp(x[i] - top) : acc(0);
    sum = dp_warp_sum(sum);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i;
        acc over = RENORMALIZE ? g[i] : dp_exp(x[i] - top) / sum;
        if (e < experts) dp_put<ADD>(out, token * experts + e, e < valid ? g[i] * d[i] - over * along : acc(0));
    }
}
