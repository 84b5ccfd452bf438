// dtable[v] += sum of dy over the tokens equal to v, in order of position, without atomics: the block of a token's first occurrence sums all of them.
// Config: elem, grad_t, acc, THREADS.
DP_KERNEL(dp_embed_grad)(DP_IN(i32) tokens, DP_IN(elem) dy, DP_OUT(grad_t) out, i64 count, i64 width, i64 start, i64 rows) {
    DP_SHARED(i32, votes, 0, THREADS / 32);
    DP_SHARED(i32, found, THREADS / 32 * 4, THREADS);
    i64 me = blockIdx.x;
    i32 token = dp_ld(tokens, me);
    i64 row = i64(token) - start;
    bool wanted = row >= 0 && row < rows;
    // Is there an earlier one?
    bool earlier = false;
    for (i64 i = threadIdx.x; wanted && i < me; i += THREADS) earlier = earlier || dp_ld(tokens, i) == token;
    u32 vote = dp_ballot(earlier);
    if (threadIdx.x % 32 == 0) dp_st(votes, threadIdx.x / 32, i32(vote != 0));
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) wanted = wanted && dp_ld(votes, w) == 0;
    __syncthreads();
    if (!wanted) return;
    // THREADS tokens at a time: the positions of those that match, in order, then their rows.
    for (i64 base = me; base < count; base += THREADS) {
        i64 i = base + threadIdx.x;
        bool match = i < count && dp_ld(tokens, i < count ? i : me) == token;
        u32 mask = dp_ballot(match);
        if (threadIdx.x % 32 == 0) dp_st(votes, threadIdx.x / 32, i32(dp_popc(mask)));
        __syncthreads();
        i32 before = dp_popc(mask & ((1u << threadIdx.x % 32) - 1)), total = 0;
        for (int w = 0; w < THREADS / 32; w++) {
            i32 n = dp_ld(votes, w);
            before += w < int(threadIdx.x / 32) ? n : 0;
            total += n;
        }
        if (match) dp_st(found, before, i32(threadIdx.x));
        __syncthreads();
        if (total > 0)
            for (i64 c = threadIdx.x; c < width; c += THREADS) {
                acc sum = acc(0);
                for (i32 m = 0; m < total; m++) sum += acc(widen(dp_ld(dy, (base + dp_ld(found, m)) * width + c)));
                dp_put<true>(out, row * width + c, sum);
            }
        __syncthreads();
    }
}
