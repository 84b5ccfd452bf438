DP_KERNEL(dp_moe_place)(DP_IN(elem) gate, DP_IN(i32) counts, DP_OUT(i32) starts, DP_OUT(i32) slots, DP_OUT(i32) places, i64 tokens, i64 experts, i64 capacity) {
    DP_SHARED(i32, votes, 0, THREADS / 32);
    i64 e = blockIdx.x;
    i32 base = 0;
    for (i64 i = 0; i < e; i++) base += dp_ld(counts, i);
    if (threadIdx.x == 0) dp_st(starts, e, base);
    for (i64 first = 0; first < tokens; first += THREADS) {
        i64 t = first + threadIdx.x;
        bool chosen = t < tokens && widen(dp_ld(gate, (t < tokens ? t : 0) * experts + e)) != 0;
        u32 mask = dp_ballot(chosen);
        if (threadIdx.x % 32 == 0) dp_st(votes, threadIdx.x / 32, i32(dp_popc(mask)));
        __syncthreads();
        i32 row = base + dp_popc(mask & ((1u << threadIdx.x % 32) - 1));
        for (int w = 0; w < THREADS / 32; w++) {
            i32 n = dp_ld(votes, w);
            row += w < int(threadIdx.x / 32) ? n : 0;
            base += n;
        }
        __syncthreads();
        if (t < tokens) dp_st(places, t * experts + e, chosen ? row : i32(-1));
        if (chosen && row < capacity) dp_st(slots, row, i32(t * experts + e));
    }
    if (e == experts - 1) {
        if (threadIdx.x == 0) dp_st(starts, experts, base);
        for (i64 r = base + threadIdx.x; r < capacity; r += THREADS) dp_st(slots, r, i32(-1));
    }
}
