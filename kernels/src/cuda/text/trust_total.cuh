// Each block adds up the parts of one parameter's trust sums, in a fixed order. Config: trust_t, THREADS.
DP_KERNEL(dp_trust_total)(DP_IN(double) parts, DP_OUT(trust_t) totals, i64 count) {
    DP_SHARED(double, sums, 0, 32);
    double weights = 0.0, directions = 0.0;
    for (i64 i = threadIdx.x; i < count; i += THREADS) {
        i64 at = 2 * (i64(blockIdx.x) * count + i);
        weights += dp_ld(parts, at), directions += dp_ld(parts, at + 1);
    }
    weights = dp_row_sum<THREADS>(weights, sums);
    directions = dp_row_sum<THREADS>(directions, sums);
    if (threadIdx.x == 0) {
        dp_st(totals, 2 * i64(blockIdx.x), narrow<trust_t>(weights));
        dp_st(totals, 2 * i64(blockIdx.x) + 1, narrow<trust_t>(directions));
    }
}
