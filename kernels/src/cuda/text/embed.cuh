// Rows of a table by token; rows outside this rank's `[start, start + rows)` give zero. Config: elem, acc, THREADS, VEC, ADD.
DP_KERNEL(dp_embed)(DP_IN(elem) table, DP_IN(i32) tokens, DP_OUT(elem) y, i64 count, i64 width, i64 start, i64 rows) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= count * width) return;
    i64 row = i64(dp_ld(tokens, at / width)) - start;
    bool here = row >= 0 && row < rows;
    Pack<elem, VEC> in, out;
    if (here) in = dp_ld_pack<VEC>(table, row * width + at % width);
    if (ADD) out = dp_ld_pack<VEC>(y, at);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc v = here ? acc(widen(in.v[j])) : acc(0);
        out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
    }
    dp_st_pack<VEC>(y, at, out);
}
