// out[i] = log sum over parts of exp(in[part, i]), in order of the parts. Config: elem, acc, THREADS.
DP_KERNEL(dp_merge)(DP_IN(elem) in, DP_OUT(elem) out, i64 parts, i64 n) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    acc top = dp_minus_infinity<acc>(), sum = acc(0);
    for (i64 p = 0; p < parts; p++) top = dp_max(top, acc(widen(dp_ld(in, p * n + i))));
    bool any = top > dp_minus_infinity<acc>();
    for (i64 p = 0; any && p < parts; p++) sum += dp_exp(acc(widen(dp_ld(in, p * n + i))) - top);
    dp_st(out, i, narrow<elem>(any ? top + dp_log(sum) : top));
}
