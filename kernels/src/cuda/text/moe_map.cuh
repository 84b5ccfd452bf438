// Where the rows of a top-k value lie. A row for each non-zero entry of gate[token, expert], sorted by (expert, token): starts[e] is the first row of
// expert e, slots[row] = token * experts + expert (-1 past the last row), places[token * experts + expert] = row or -1.
// Config: elem, THREADS. One block an expert.
DP_KERNEL(dp_moe_count)(DP_IN(elem) gate, DP_OUT(i32) counts, i64 tokens, i64 experts) {
    DP_SHARED(i32, sums, 0, 32);
    i64 e = blockIdx.x;
    i32 n = 0;
    for (i64 t = threadIdx.x; t < tokens; t += THREADS) n += widen(dp_ld(gate, t * experts + e)) != 0 ? 1 : 0;
    n = dp_row_sum<THREADS>(n, sums);
    if (threadIdx.x == 0) dp_st(counts, e, n);
}
