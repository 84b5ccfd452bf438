// The top-k router, a warp for each token: softmax over the first `valid` experts, the k largest kept (of equal logits the lower index first).
// gate = p on the chosen, divided by their sum if RENORMALIZE. Gradient, with s = sum gate dgate: gate dgate - (RENORMALIZE ? gate : p) s.
// Config: elem, acc, THREADS, L (experts of a lane), K, RENORMALIZE, ADD.
DP_KERNEL(dp_router)(DP_IN(elem) logits, DP_OUT(elem) gate, i64 tokens, i64 experts, i64 valid) {
    i64 token = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    acc x[L], g[L];
    acc top = dp_minus_infinity<acc>();
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i;
        x[i] = e < valid ? acc(widen(dp_ld(logits, token * experts + e))) : dp_minus_infinity<acc>();
        top = dp_max(top, x[i]);
        g[i] = acc(-1);
    }
    top = dp_warp_max(top);
    acc sum = acc(0), kept = acc(0);
    DP_UNROLL
    for (int i = 0; i < L; i++) sum += lane + 32 * i < valid ? dp_exp(x[i] - top) : acc(0);
    sum = dp_warp_sum(sum);
    for (int k = 0; k < K && k < valid; k++) {
        acc best = dp_minus_infinity<acc>();
        int which = 1 << 30;
        DP_UNROLL
        for (int i = 0; i < L; i++) {
            int e = lane + 32 * i;
            if (g[i] < acc(0) && e < valid && (which == 1 << 30 || x[i] > best)) best = x[i], which = e;
        }
        dp_best_of_warp(best, which);
        acc p = dp_exp(best - top);
        kept += p;
        DP_UNROLL
        for (int i = 0; i < L; i++)
            if (lane + 32 * i == which) g[i] = p;
    }
    acc divisor = RENORMALIZE ? kept : sum;
    DP_UNROLL
    for (int i = 0; i < L; i++)
        if (lane + 32 * i < experts) dp_put<ADD>(gate, token * experts + lane + 32 * i, g[i] < acc(0) ? acc(0) : g[i] / divisor);
}
