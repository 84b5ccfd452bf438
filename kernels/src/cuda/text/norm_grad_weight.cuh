DP_KERNEL_ALONE(dp_norm_grad_weight)(DP_IN(elem) x, DP_IN(elem) dy, DP_OUT(acc) parts, i64 rows, i64 cols) {
    DP_SHARED(acc, sums, 0, 32);
    i64 group = i64(blockIdx.x) * GROUPS + threadIdx.x / T, groups = i64(gridDim.x) * GROUPS;
    acc dw[E][VEC], db[LAYER ? E : 1][VEC];
    DP_UNROLL
    for (int e = 0; e < E; e++) {
        DP_UNROLL
        for (int j = 0; j < VEC; j++) dw[e][j] = acc(0), db[LAYER ? e : 0][j] = acc(0);
    }
    for (i64 at = group; at < rows; at += groups) {
        Row row = dp_row(dp_load_part(x, at, cols), cols, sums);
        DP_UNROLL
        for (int e = 0; e < E; e++)
            if (dp_column(e) < cols) {
                Pack<elem, VEC> g = dp_ld_pack<VEC>(dy, at * cols + dp_column(e));
                DP_UNROLL
                for (int j = 0; j < VEC; j++) {
                    acc v = acc(widen(g.v[j]));
                    dw[e][j] += v * dp_hat(row, e, j);
                    if (LAYER) db[LAYER ? e : 0][j] += v;
                }
            }
    }
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                dp_st(parts, group * cols + dp_column(e) + j, dw[e][j]);
                if (LAYER) dp_st(parts, (groups + group) * cols + dp_column(e) + j, db[LAYER ? e : 0][j]);
            }
        }
}
