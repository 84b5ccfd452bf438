// out[i] = sum over shares s of in[s, i], in their order, starting from the first. Config: in_t, out_t, acc, THREADS.
DP_KERNEL(dp_shares)(DP_IN(in_t) in, DP_OUT(out_t) out, i64 shares, i64 n) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    acc sum = acc(widen(dp_ld(in, i)));
    for (i64 s = 1; s < shares; s++) sum = sum + acc(widen(dp_ld(in, s * n + i)));
    dp_st(out, i, narrow<out_t>(sum));
}
