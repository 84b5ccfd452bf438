// Dropout (`ir::dropout`): which elements of x[b,s,...] are kept is Philox4x32-10 of key (seed, node) and counter (element of the sequence / 4, sequence), an element a word.
// A thread has LANES elements: the four words of a call, or one where a block does not begin and end with four.
// Config: elem, acc, THREADS, LANES, VEC, ADD, ZIGZAG, SCALE. A block is [rows, positions, outer, inner], its last two dims a part of [.., whole_inner].
DP_DEVICE void dp_philox(u32 (&c)[4], u32 k, u32 l) {
    DP_UNROLL
    for (int round = 0; round < 10; round++) {
        u64 x = u64(c[0]) * 0xd2511f53u, y = u64(c[2]) * 0xcd9e8d57u;
        u32 a = u32(y >> 32) ^ c[1] ^ k, b = u32(x >> 32) ^ c[3] ^ l;
        c[0] = a, c[1] = u32(y), c[2] = b, c[3] = u32(x);
        k += 0x9e3779b9u, l += 0xbb67ae85u;
    }
}

DP_KERNEL(dp_dropout)(DP_IN(elem) x, DP_OUT(elem) y, DP_IN(double) scalars, i64 n, i64 node, i64 threshold, i64 earlier, i64 batch_start, i64 positions, i64 start,
                      i64 chunk, i64 blocks, i64 outer, i64 outer_start, i64 inner, i64 inner_start, i64 whole_inner, i64 whole) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * LANES;
    if (at >= n) return;
    i64 row = at / inner / outer;
    i64 position = dp_position(start + row % positions, chunk, blocks);
    u64 element = u64(position * whole + (outer_start + at / inner % outer) * whole_inner + inner_start + at % inner);
    u64 sequence = (u64(dp_ld(scalars, 14)) << 32 | u64(dp_ld(scalars, 13))) + u64(earlier + batch_start + row / positions);
    u32 words[4] = {u32(element / 4), u32(element / 4 >> 32), u32(sequence), u32(sequence >> 32)};
    dp_philox(words, u32(u64(dp_ld(scalars, 11))) ^ u32(node), u32(u64(dp_ld(scalars, 12))));
    // Chosen by comparisons: registers have no index.
    if (LANES == 1) words[0] = (element & 2) ? ((element & 1) ? words[3] : words[2]) : ((element & 1) ? words[1] : words[0]);
    DP_UNROLL
    for (int first = 0; first < LANES; first += VEC) {
        Pack<elem, VEC> px = dp_ld_pack<VEC>(x, at + first), out;
        if (ADD) out = dp_ld_pack<VEC>(y, at + first);
        DP_UNROLL
        for (int j = 0; j < VEC; j++) {
            acc v = acc(widen(px.v[j])) * (words[first + j] < u32(threshold) ? acc(0) : acc(SCALE));
            out.v[j] = narrow<elem>(ADD ? acc(widen(out.v[j])) + v : v);
        }
        dp_st_pack<VEC>(y, at + first, out);
    }
}
