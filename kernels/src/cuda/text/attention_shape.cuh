// Who sees whom. A query at position p sees keys at positions [p + 1 - window, p] (BOUND), or all; none before its own document (DOCUMENTS: first positions do
// not decrease along a sequence). A rank has the keys of the indices [first_key, first_key + keys). In straight order they
// are at the positions of their indices, so what a query sees is a range of them; in ZIGZAG order ranges are of positions, of which the rank's keys have some.
struct Shape {
    i64 queries, keys, groups, heads, valid_g, valid_r, first_query, first_key, window, chunk, blocks;
    DP_IN(i32) documents;
};

DP_DEVICE i64 dp_clamp_key(const Shape& s, i64 position) {
    return ZIGZAG ? position : position < s.first_key ? 0 : dp_min(position - s.first_key, s.keys);
}
// What a query of this rank sees: [first, end).
DP_DEVICE i64 dp_first_seen(const Shape& s, i64 b, i64 query) {
    i64 p = dp_position(s.first_query + query, s.chunk, s.blocks) + 1, first = BOUND && p > s.window ? p - s.window : 0;
    if (DOCUMENTS && query < s.queries) {
        i64 own = dp_ld(s.documents, b * s.queries + query);
        first = own > first ? own : first;
    }
    return BOUND ? dp_clamp_key(s, first) : 0;
}
DP_DEVICE i64 dp_end_seen(const Shape& s, i64 query) {
    return BOUND ? dp_clamp_key(s, dp_position(s.first_query + query, s.chunk, s.blocks) + 1) : ZIGZAG ? 2 * s.chunk * s.blocks : s.keys;
}
DP_DEVICE bool dp_sees(const Shape& s, i64 first, i64 end, i64 key) {
    i64 at = ZIGZAG ? dp_position(s.first_key + key, s.chunk, s.blocks) : key;
    return at >= first && at < end && (!ZIGZAG || key < s.keys);
}

// Least and largest position of the indices [at, at + n).
DP_DEVICE void dp_extremes(const Shape& s, i64 at, i64 n, i64& least, i64& largest) {
    i64 end = at + n;
    least = dp_position(at, s.chunk, s.blocks), largest = dp_position(end - 1, s.chunk, s.blocks);
    if (!ZIGZAG) return;
    if (largest < least) {
        i64 swap = least;
        least = largest, largest = swap;
    }
    for (i64 begin = (at / s.chunk + 1) * s.chunk; begin < end; begin += s.chunk) {
        i64 low = dp_position(begin, s.chunk, s.blocks), high = dp_position(begin - 1, s.chunk, s.blocks);
        least = dp_min(least, low), largest = high > largest ? high : largest;
        low = dp_position(dp_min(begin + s.chunk, end) - 1, s.chunk, s.blocks);
        largest = low > largest ? low : largest;
    }
}
// Whether no query of a tile sees any key of another.
DP_DEVICE bool dp_hidden(const Shape& s, i64 b, i64 q0, i64 rows, i64 k0, i64 cols) {
    if (!BOUND) return false;
    i64 q = dp_min(q0 + rows, s.queries) - q0, k = dp_min(k0 + cols, s.keys) - k0, first, last, least, largest;
    dp_extremes(s, s.first_query + q0, q, first, last);
    dp_extremes(s, s.first_key + k0, k, least, largest);
    if (DOCUMENTS && !ZIGZAG && largest < dp_ld(s.documents, b * s.queries + q0)) return true;
    return least > last || first >= s.window && largest <= first - s.window;
}
