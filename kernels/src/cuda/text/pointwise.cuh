// Elementwise: results[i] = expression(operands[i]); an operand may repeat along rows of `cols` elements.
// Config: in_t, out_t, acc, IN, OUT, VEC, THREADS, ADD, REPEATS (which operand repeats, -1: none), `expression`.
DP_KERNEL(dp_pointwise)(DP_IN(in_t) a, DP_IN(in_t) b, DP_IN(in_t) c, DP_OUT(out_t) r, DP_OUT(out_t) t, DP_IN(double) scalars, i64 n, i64 cols) {
    i64 first = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (first >= n) return;
    Pack<in_t, VEC> pa, pb, pc;
    i64 repeated = REPEATS >= 0 ? first % cols : 0;
    if (IN > 0) pa = dp_ld_pack<VEC>(a, REPEATS == 0 ? repeated : first);
    if (IN > 1) pb = dp_ld_pack<VEC>(b, REPEATS == 1 ? repeated : first);
    if (IN > 2) pc = dp_ld_pack<VEC>(c, REPEATS == 2 ? repeated : first);
    Pack<out_t, VEC> pr, pt;
    if (ADD) pr = dp_ld_pack<VEC>(r, first);
    if (ADD && OUT > 1) pt = dp_ld_pack<VEC>(t, first);
    acc inv_tokens = IN == 0 ? acc(dp_ld(scalars, 0) * dp_ld(scalars, 10)) : acc(0);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc x = IN > 0 ? acc(widen(pa.v[j])) : inv_tokens, y = IN > 1 ? acc(widen(pb.v[j])) : acc(0), z = IN > 2 ? acc(widen(pc.v[j])) : acc(0);
        acc u = acc(0), v = acc(0);
        expression(x, y, z, u, v);
        pr.v[j] = narrow<out_t>(ADD ? acc(widen(pr.v[j])) + u : u);
        if (OUT > 1) pt.v[j] = narrow<out_t>(ADD ? acc(widen(pt.v[j])) + v : v);
    }
    dp_st_pack<VEC>(r, first, pr);
    if (OUT > 1) dp_st_pack<VEC>(t, first, pt);
}
