// Parts of one value that are of different blocks, joined. IN_PLACE: the left part is where the result goes.
//   sums:      out = left + right;
//   attention: lse = log(exp l + exp r), o = left exp(l - lse) + right exp(r - lse); of rows that neither part sees anything for, o = 0 and lse = -inf.
// Config: elem, acc (of lse too), THREADS, IN_PLACE.
DP_KERNEL(dp_join_sums)(DP_IN(elem) left, DP_IN(elem) right, DP_OUT(elem) out, i64 n) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    acc x = acc(widen(IN_PLACE ? dp_ld(out, i) : dp_ld(left, i)));
    dp_st(out, i, narrow<elem>(x + acc(widen(dp_ld(right, i)))));
}

// A warp has a row of `width` elements of o.
DP_KERNEL(dp_join_attention)(DP_IN(elem) o_left, DP_IN(acc) lse_left, DP_IN(elem) o_right, DP_IN(acc) lse_right, DP_OUT(elem) o, DP_OUT(acc) lse, i64 rows, i64 width) {
    i64 row = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    acc l = IN_PLACE ? dp_ld(lse, row) : dp_ld(lse_left, row), r = dp_ld(lse_right, row), top = dp_max(l, r);
    bool any = top > dp_minus_infinity<acc>();
    acc x = any ? dp_exp(l - top) : acc(0), y = any ? dp_exp(r - top) : acc(0), sum = x + y;
    // Nobody reads what is written over.
    __syncwarp();
    if (threadIdx.x % 32 == 0) dp_st(lse, row, any ? top + dp_log(sum) : top);
    if (any) x = x / sum, y = y / sum;
    for (i64 c = threadIdx.x % 32; c < width; c += 32) {
        i64 at = row * width + c;
        acc of_left = acc(widen(IN_PLACE ? dp_ld(o, at) : dp_ld(o_left, at)));
        dp_st(o, at, narrow<elem>(x * of_left + y * acc(widen(dp_ld(o_right, at)))));
    }
}
