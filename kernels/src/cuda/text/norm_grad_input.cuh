DP_KERNEL(dp_norm_grad_input)(DP_IN(elem) x, DP_IN(elem) w, DP_IN(elem) dy, DP_OUT(elem) dx, i64 rows, i64 cols) {
    DP_SHARED(acc, sums, 0, 32);
    i64 at = i64(blockIdx.x) * GROUPS + threadIdx.x / T;
    if (at >= rows) return;
    Row row;
    dp_load_row(row, x, at, cols, sums);
    Pack<elem, VEC> g[E];
    acc along = acc(0), sum = acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            g[e] = dp_ld_pack<VEC>(dy, at * cols + dp_column(e));
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                acc v = acc(widen(g[e].v[j])) * acc(widen(pw.v[j]));
                along += v * dp_hat(row, e, j);
                sum += v;
            }
        }
    along = dp_row_sum<T>(along, sums) / acc(cols);
    sum = LAYER ? dp_row_sum<T>(sum, sums) / acc(cols) : acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e)), out;
            if (ADD) out = dp_ld_pack<VEC>(dx, at * cols + dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                acc v = row.r * (acc(widen(g[e].v[j])) * acc(widen(pw.v[j])) - dp_hat(row, e, j) * along - sum);
                out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
            }
            dp_st_pack<VEC>(dx, at * cols + dp_column(e), out);
        }
}
