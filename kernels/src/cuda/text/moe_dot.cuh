// dgate[token, expert] = <dy[token], row> where the token has a row of the expert, else 0. A warp for each. Config: elem, acc, THREADS, ADD.
DP_KERNEL(dp_moe_dot)(DP_IN(elem) dy, DP_IN(elem) rows, DP_IN(i32) places, DP_OUT(elem) dgate, i64 tokens, i64 width, i64 experts) {
    i64 slot = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (slot >= tokens * experts) return;
    i64 row = dp_ld(places, slot);
    acc sum = acc(0);
    for (i64 c = threadIdx.x % 32; row >= 0 && c < width; c += 32) sum += acc(widen(dp_ld(dy, slot / experts * width + c))) * acc(widen(dp_ld(rows, row * width + c)));
    sum = dp_warp_sum(sum);
    if (threadIdx.x % 32 == 0) dp_put<ADD>(dgate, slot, sum);
}
