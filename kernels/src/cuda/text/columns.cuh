// Sums down columns in a fixed order. `dp_columns`: out[c] = sum over rows of in[r, c], one thread a column, rows [chunk * z, chunk * (z + 1)) for block
// row z into row z of the result. A long sum takes two launches: parts, then the sum of the parts.
// Config: in_t, out_t, acc, THREADS, ADD.
DP_KERNEL(dp_columns)(DP_IN(in_t) in, DP_OUT(out_t) out, i64 rows, i64 cols, i64 chunk) {
    i64 strips = (cols + THREADS - 1) / THREADS, z = i64(blockIdx.x) / strips;
    i64 c = i64(blockIdx.x) % strips * THREADS + threadIdx.x;
    if (c >= cols) return;
    acc sum = acc(0);
    i64 end = dp_min(rows, (z + 1) * chunk);
    for (i64 r = z * chunk; r < end; r++) sum += acc(widen(dp_ld(in, r * cols + c)));
    dp_put<ADD>(out, z * cols + c, sum);
}
