// delta = <dO, O> of each row, a warp a row. Config: elem, acc, THREADS, DV.
DP_KERNEL(dp_attention_delta)(DP_IN(elem) o, DP_IN(elem) dout, DP_OUT(acc) delta, i64 rows) {
    i64 row = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    acc sum = acc(0);
    for (int c = threadIdx.x % 32; c < DV; c += 32) sum += acc(widen(dp_ld(o, row * DV + c))) * acc(widen(dp_ld(dout, row * DV + c)));
    sum = dp_warp_sum(sum);
    if (threadIdx.x % 32 == 0) dp_st(delta, row, sum);
}
