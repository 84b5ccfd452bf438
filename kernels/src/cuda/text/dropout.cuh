// Dropout (`ir::dropout`): which elements of x[b,s,...] are kept is Philox4x32-10 of key (seed, node) and counter (element of the sequence / 4, sequence), an element a word.
// Config: elem, acc, VEC, ZIGZAG, KEEP (what a kept element is multiplied by), FOURS (whether a block begins and ends with four elements of a call), WITHIN (whether a row of the program
// is a part of one of the block, so that its elements follow its first).
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

// Where an element is: which of its sequence, and which sequence.
struct Spot {
    u64 element, sequence;
};

DP_DEVICE Spot dp_spot(const Drops& d, DP_IN(double) scalars, i64 at) {
    i64 line = at / d.inner, row = line / d.outer, sequence = row / d.positions;
    i64 position = dp_position(d.start + row - sequence * d.positions, d.chunk, d.blocks);
    i64 element = position * d.whole + (d.outer_start + line - row * d.outer) * d.whole_inner + d.inner_start + at - line * d.inner;
    return Spot{u64(element), (u64(dp_ld(scalars, 14)) << 32 | u64(dp_ld(scalars, 13))) + u64(d.earlier + d.batch_start + sequence)};
}

// What a pack of elements is multiplied by, that begins at a column of a row. `first`: where the row begins.
DP_DEVICE void dp_factors(acc (&factor)[VEC], const Drops& d, const Spot& first, DP_IN(double) scalars, i64 at, i64 column) {
    constexpr int STEP = FOURS && VEC % 4 == 0 ? 4 : 1;
    Spot spot = WITHIN ? Spot{first.element + u64(column), first.sequence} : dp_spot(d, scalars, at + column);
    u32 key = u32(u64(dp_ld(scalars, 11))) ^ u32(d.node), high = u32(u64(dp_ld(scalars, 12)));
    DP_UNROLL
    for (int j = 0; j < VEC; j += STEP) {
        u64 one = spot.element + j;
        u32 words[4] = {u32(one / 4), u32(one / 4 >> 32), u32(spot.sequence), u32(spot.sequence >> 32)};
        dp_philox(words, key, high);
        // Chosen by comparisons: registers have no index.
        if (STEP == 1) words[0] = (one & 2) ? ((one & 1) ? words[3] : words[2]) : ((one & 1) ? words[1] : words[0]);
        DP_UNROLL
        for (int i = 0; i < STEP; i++) factor[j + i] = words[i] < u32(d.threshold) ? acc(0) : acc(KEEP);
    }
}
