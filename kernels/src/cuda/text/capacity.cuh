// kept[token, expert] = gate[token, expert] of the first `most` tokens of a sequence, by position, that chose the expert, else 0. A block for each sequence and expert.
// Config: elem, acc, THREADS, ADD, ZIGZAG.
DP_KERNEL(dp_capacity)(DP_IN(elem) gate, DP_OUT(elem) kept, i64 sequence, i64 experts, i64 most, i64 chunk, i64 blocks) {
    DP_SHARED(i32, votes, 0, THREADS / 32);
    i64 of = i64(blockIdx.x) / experts, e = i64(blockIdx.x) % experts;
    i64 base = 0;
    for (i64 first = 0; first < sequence; first += THREADS) {
        i64 p = first + threadIdx.x;
        bool inside = p < sequence;
        i64 at = (of * sequence + dp_index(inside ? p : 0, chunk, blocks)) * experts + e;
        elem g = dp_ld(gate, at);
        bool chosen = inside && widen(g) != 0;
        u32 mask = dp_ballot(chosen);
        if (threadIdx.x % 32 == 0) dp_st(votes, threadIdx.x / 32, i32(dp_popc(mask)));
        __syncthreads();
        i64 before = base + dp_popc(mask & ((1u << threadIdx.x % 32) - 1));
        for (int w = 0; w < THREADS / 32; w++) {
            i32 n = dp_ld(votes, w);
            before += w < int(threadIdx.x / 32) ? n : 0;
            base += n;
        }
        __syncthreads();
        if (inside) dp_put<ADD>(kept, at, chosen && before < most ? acc(widen(g)) : acc(0));
    }
}
