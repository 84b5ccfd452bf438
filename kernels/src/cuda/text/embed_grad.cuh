// dtable[v] += sum of dy over the tokens equal to v, in order of position, without atomics. A block has some rows of the table and some columns: it goes through all tokens,
// keeps those that name its rows, and when it has enough of them sums the gradients of each row in registers. So time grows with the tokens, not with their square.
// Config: elem, grad_t, acc, THREADS, VEC. Shared: found, which, links and heads of 2 THREADS tokens.
DP_KERNEL(dp_embed_grad)(DP_IN(i32) tokens, DP_IN(elem) dy, DP_OUT(grad_t) out, i64 count, i64 width, i64 start, i64 rows, i64 rows_of_block) {
    DP_SHARED(i32, votes, 0, THREADS / 32);
    DP_SHARED(i32, found, 128, 2 * THREADS);
    DP_SHARED(i32, which, 128 + 8 * THREADS, 2 * THREADS);
    DP_SHARED(i32, links, 128 + 16 * THREADS, 2 * THREADS);
    DP_SHARED(i32, heads, 128 + 24 * THREADS, 2 * THREADS);
    i64 strips = (width + THREADS * VEC - 1) / (THREADS * VEC);
    i64 low = i64(blockIdx.x) / strips * rows_of_block, high = dp_min(rows, low + rows_of_block);
    i64 column = (i64(blockIdx.x) % strips * THREADS + threadIdx.x) * VEC;
    i32 held = 0;
    for (i64 base = 0; base < count; base += THREADS) {
        i64 i = base + threadIdx.x;
        i64 row = i < count ? i64(dp_ld(tokens, i)) - start : -1;
        bool match = row >= low && row < high;
        u32 mask = dp_ballot(match);
        if (threadIdx.x % 32 == 0) dp_st(votes, threadIdx.x / 32, i32(dp_popc(mask)));
        __syncthreads();
        i32 before = held + dp_popc(mask & ((1u << threadIdx.x % 32) - 1)), total = 0;
        for (int w = 0; w < THREADS / 32; w++) {
            i32 n = dp_ld(votes, w);
            before += w < int(threadIdx.x / 32) ? n : 0;
            total += n;
        }
        if (match) dp_st(found, before, i32(i)), dp_st(which, before, i32(row - low));
        held += total;
        __syncthreads();
        if (held <= THREADS && base + THREADS < count) continue;
        // Of each kept token: the next that names the same row, and whether it is the first.
        for (i32 m = threadIdx.x; m < held; m += THREADS) {
            i32 mine = dp_ld(which, m), next = -1, first = 1;
            for (i32 q = 0; q < m; q++)
                if (dp_ld(which, q) == mine) first = 0;
            for (i32 q = held - 1; q > m; q--)
                if (dp_ld(which, q) == mine) next = q;
            dp_st(links, m, next), dp_st(heads, m, first);
        }
        __syncthreads();
        for (i32 m = 0; column < width && m < held; m++) {
            if (dp_ld(heads, m) == 0) continue;
            acc sum[VEC];
            DP_UNROLL
            for (int j = 0; j < VEC; j++) sum[j] = acc(0);
            for (i32 q = m; q >= 0; q = dp_ld(links, q)) {
                Pack<elem, VEC> g = dp_ld_pack<VEC>(dy, i64(dp_ld(found, q)) * width + column);
                DP_UNROLL
                for (int j = 0; j < VEC; j++) sum[j] += acc(widen(g.v[j]));
            }
            i64 at = (low + dp_ld(which, m)) * width + column;
            DP_UNROLL
            for (int j = 0; j < VEC; j++) dp_put<true>(out, at + j, sum[j]);
        }
        // Nobody writes to what is kept before the next barrier, which all reach.
        held = 0;
    }
}
