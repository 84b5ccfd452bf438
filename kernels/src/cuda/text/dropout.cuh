// Dropout (`ir::dropout`): which elements of x[b,s,...] are kept is Philox4x32-10 of key (seed, node) and counter (element of the sequence / 4, sequence), an element a word.
// Config: elem, acc, VEC, ZIGZAG, KEEP (what a kept element is multiplied by), FOURS (whether a block begins and ends with four elements of a call).
// A block is [rows, positions, outer, inner], its last two dims a part of [.., whole_inner].
DP_DEVICE void dp_philox(u32 (&c)[4], u32 k, u32 l) {
    DP_UNROLL
    for (int round = 0; round < 10; round++) {
        u64 x = u64(c[0]) * 0xd2511f53u, y = u64(c[2]) * 0xcd9e8d57u;
        u32 a = u32(y >> 32) ^ c[1] ^ k, b = u32(x >> 32) ^ c[3] ^ l;
        c[0] = a, c[1] = u32(y), c[2] = b, c[3] = u32(x);
        k += 0x9e3779b9u, l += 0xbb67ae85u;
    }
}

struct Drops {
    i64 node, threshold, earlier, batch_start, positions, start, chunk, blocks, outer, outer_start, inner, inner_start, whole_inner, whole;
};

// What the elements from `at` on, a pack of them, are multiplied by.
DP_DEVICE void dp_factors(acc (&factor)[VEC], const Drops& d, DP_IN(double) scalars, i64 at) {
    constexpr int STEP = FOURS && VEC % 4 == 0 ? 4 : 1;
    i64 row = at / d.inner / d.outer;
    i64 position = dp_position(d.start + row % d.positions, d.chunk, d.blocks);
    u64 element = u64(position * d.whole + (d.outer_start + at / d.inner % d.outer) * d.whole_inner + d.inner_start + at % d.inner);
    u64 sequence = (u64(dp_ld(scalars, 14)) << 32 | u64(dp_ld(scalars, 13))) + u64(d.earlier + d.batch_start + row / d.positions);
    u32 key = u32(u64(dp_ld(scalars, 11))) ^ u32(d.node), high = u32(u64(dp_ld(scalars, 12)));
    DP_UNROLL
    for (int j = 0; j < VEC; j += STEP) {
        u64 one = element + j;
        u32 words[4] = {u32(one / 4), u32(one / 4 >> 32), u32(sequence), u32(sequence >> 32)};
        dp_philox(words, key, high);
        // Chosen by comparisons: registers have no index.
        if (STEP == 1) words[0] = (one & 2) ? ((one & 1) ? words[3] : words[2]) : ((one & 1) ? words[1] : words[0]);
        DP_UNROLL
        for (int i = 0; i < STEP; i++) factor[j + i] = words[i] < u32(d.threshold) ? acc(0) : acc(KEEP);
    }
}
