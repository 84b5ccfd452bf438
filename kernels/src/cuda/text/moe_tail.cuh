// Rows past the last are zero. Config: elem, THREADS.
DP_KERNEL(dp_moe_tail)(DP_IN(i32) starts, DP_OUT(elem) rows, i64 capacity, i64 width, i64 experts) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= i64(dp_ld(starts, experts)) * width && at < capacity * width) dp_st(rows, at, elem{});
}
