// Sums of whole tensors, in a fixed order: each block sums one stretch (short sums in `acc`, long ones in double), one block sums the blocks.
// Config: in_t, out_t, acc, THREADS, SQUARE, LAST (the sum of the parts), ADD, MEAN (times the loss divisor).
DP_KERNEL(dp_sum)(DP_IN(in_t) in, DP_OUT(out_t) out, DP_IN(double) scalars, i64 n, i64 stretch) {
    DP_SHARED(double, sums, 0, 32);
    i64 first = i64(blockIdx.x) * stretch, end = dp_min(n, first + stretch);
    double total = 0.0;
    for (i64 base = first + threadIdx.x; base < end; base += 8 * THREADS) {
        acc sum = acc(0);
        DP_UNROLL
        for (int u = 0; u < 8; u++) {
            i64 i = base + u * THREADS;
            if (i < end) {
                acc x = acc(widen(dp_ld(in, i)));
                sum += SQUARE ? x * x : x;
            }
        }
        total += double(sum);
    }
    total = dp_row_sum<THREADS>(total, sums);
    if (threadIdx.x == 0) dp_put<ADD>(out, blockIdx.x, MEAN ? total * dp_ld(scalars, 0) : total);
}
