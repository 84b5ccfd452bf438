// dbias[e] = sum of the rows of expert e, a thread a column. Config: elem, acc, grad_t, THREADS, ADD.
DP_KERNEL(dp_moe_bias_grad)(DP_IN(elem) dy, DP_IN(i32) starts, DP_OUT(grad_t) out, i64 capacity, i64 width) {
    i64 strips = (width + THREADS - 1) / THREADS, e = i64(blockIdx.x) / strips, c = i64(blockIdx.x) % strips * THREADS + threadIdx.x;
    if (c >= width) return;
    acc sum = acc(0);
    i64 end = dp_min(dp_ld(starts, e + 1), capacity);
    for (i64 r = dp_ld(starts, e); r < end; r++) sum += acc(widen(dp_ld(dy, r * width + c)));
    dp_put<ADD>(out, e * width + c, sum);
}
