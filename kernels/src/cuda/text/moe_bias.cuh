// rows[r] = x[r] + bias[expert of r]; zero past the last row. Config: elem, acc, THREADS, VEC, ADD.
DP_KERNEL(dp_moe_bias)(DP_IN(elem) x, DP_IN(elem) bias, DP_IN(i32) slots, DP_OUT(elem) rows, i64 capacity, i64 width, i64 experts) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= capacity * width) return;
    i64 slot = dp_ld(slots, at / width);
    Pack<elem, VEC> in, add, out;
    if (slot >= 0) in = dp_ld_pack<VEC>(x, at), add = dp_ld_pack<VEC>(bias, slot % experts * width + at % width);
    if (ADD) out = dp_ld_pack<VEC>(rows, at);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc v = slot >= 0 ? acc(widen(in.v[j])) + acc(widen(add.v[j])) : acc(0);
        out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
    }
    dp_st_pack<VEC>(rows, at, out);
}
