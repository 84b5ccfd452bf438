// Terms of a sink's gradient, -exp(sink - lse) <dO, O> of each row, a warp a row; 0 for padding heads. `dp_columns` sums them. Config: elem, acc, THREADS, DV.
DP_KERNEL(dp_sink_terms)(DP_IN(elem) sinks, DP_IN(elem) o, DP_IN(acc) lse, DP_IN(elem) dout, DP_OUT(acc) terms, i64 rows, i64 groups, i64 heads, i64 valid_g, i64 valid_r) {
    i64 row = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    acc sum = acc(0);
    for (int c = threadIdx.x % 32; c < DV; c += 32) sum += acc(widen(dp_ld(o, row * DV + c))) * acc(widen(dp_ld(dout, row * DV + c)));
    sum = dp_warp_sum(sum);
    i64 head = row % (groups * heads);
    bool real = head / heads < valid_g && head % heads < valid_r;
    if (threadIdx.x % 32 == 0) dp_st(terms, row, real ? -dp_exp(acc(widen(dp_ld(sinks, head))) - dp_ld(lse, row)) * sum : acc(0));
}
