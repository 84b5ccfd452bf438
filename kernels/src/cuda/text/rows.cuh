// What row programs are made of. A value is a `Part` of a thread, rounded to elem as it would be in memory; ADDS: what is set is added to what was there.
// Config: as norm.cuh.
template <bool ADDS> DP_DEVICE void dp_set(Part& to, int e, int j, acc value) {
    to.v[e].v[j] = narrow<elem>(ADDS ? acc(widen(to.v[e].v[j])) + value : value);
}

DP_DEVICE void dp_store_part(DP_OUT(elem) y, const Part& part, i64 at, i64 cols) {
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) dp_st_pack<VEC>(y, at * cols + dp_column(e), part.v[e]);
}

// y of a normalised row.
template <bool ADDS> DP_DEVICE void dp_normed(Part& y, const Row& row, DP_IN(elem) w, DP_IN(elem) bias, i64 cols) {
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e)), pb;
            if (LAYER) pb = dp_ld_pack<VEC>(bias, dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++) dp_set<ADDS>(y, e, j, dp_hat(row, e, j) * acc(widen(pw.v[j])) + (LAYER ? acc(widen(pb.v[j])) : acc(0)));
        }
}

// dx of a normalised row.
template <bool ADDS, class P> DP_DEVICE void dp_slopes(Part& dx, const Row& row, DP_IN(elem) w, const Part& dy, i64 cols, P sums) {
    acc along = acc(0), sum = acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                acc v = acc(widen(dy.v[e].v[j])) * acc(widen(pw.v[j]));
                along += v * dp_hat(row, e, j);
                sum += v;
            }
        }
    along = dp_row_sum<T>(along, sums) / acc(cols);
    sum = LAYER ? dp_row_sum<T>(sum, sums) / acc(cols) : acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            Pack<elem, VEC> pw = dp_ld_pack<VEC>(w, dp_column(e));
            DP_UNROLL
            for (int j = 0; j < VEC; j++)
                dp_set<ADDS>(dx, e, j, row.r * (acc(widen(dy.v[e].v[j])) * acc(widen(pw.v[j])) - dp_hat(row, e, j) * along - sum));
        }
}
