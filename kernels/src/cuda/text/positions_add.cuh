// x + the row of a table at each token's position. Config: elem, acc, THREADS, VEC, ADD, ZIGZAG.
DP_KERNEL(dp_positions_add)(DP_IN(elem) x, DP_IN(elem) table, DP_OUT(elem) y, i64 n, i64 positions, i64 width, i64 start, i64 chunk, i64 blocks) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= n) return;
    i64 position = dp_position(start + at / width % positions, chunk, blocks);
    Pack<elem, VEC> px = dp_ld_pack<VEC>(x, at), pt = dp_ld_pack<VEC>(table, position * width + at % width), out;
    if (ADD) out = dp_ld_pack<VEC>(y, at);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc v = acc(widen(px.v[j])) + acc(widen(pt.v[j]));
        out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
    }
    dp_st_pack<VEC>(y, at, out);
}
