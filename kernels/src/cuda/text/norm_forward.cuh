DP_KERNEL(dp_norm_forward)(DP_IN(elem) x, DP_IN(elem) w, DP_IN(elem) bias, DP_OUT(elem) y, i64 rows, i64 cols) {
    DP_SHARED(acc, sums, 0, 32);
    i64 at = i64(blockIdx.x) * GROUPS + threadIdx.x / T;
    if (at >= rows) return;
    Row row;
    dp_load_row(row, x, at, cols, sums);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e)), pb, out;
            if (LAYER) pb = dp_ld_pack<VEC>(bias, dp_column(e));
            if (ADD) out = dp_ld_pack<VEC>(y, at * cols + dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                acc v = dp_hat(row, e, j) * acc(widen(pw.v[j])) + (LAYER ? acc(widen(pb.v[j])) : acc(0));
                out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
            }
            dp_st_pack<VEC>(y, at * cols + dp_column(e), out);
        }
}
