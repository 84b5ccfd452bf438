// Each block adds up the parts of one stretch's trust sums, in a fixed order; of a stretch of nothing there are none. Config: trust_t, THREADS.
#define DP_PARTS(n) \
    if (n <= i64(blockIdx.x)) { \
        before += count, member = m##n / 2; \
        count = (e##n - b##n + (i64(1) << shift) - 1) >> shift; \
    }
DP_KERNEL(dp_trust_total)(DP_IN(double) parts, DP_OUT(trust_t) totals, i64 shift, DP_STRETCHES) {
    DP_SHARED(double, sums, 0, 32);
    i64 before = 0, count = 0, member = 0;
    DP_EACH_STRETCH(DP_PARTS)
    double weights = 0.0, directions = 0.0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) {
        i64 at = 2 * (before + i);
        weights += dp_ld(parts, at), directions += dp_ld(parts, at + 1);
    }
    weights = dp_row_sum<THREADS>(weights, sums);
    directions = dp_row_sum<THREADS>(directions, sums);
    if (threadIdx.x == 0) {
        dp_st(totals, 2 * member, narrow<trust_t>(weights));
        dp_st(totals, 2 * member + 1, narrow<trust_t>(directions));
    }
}
