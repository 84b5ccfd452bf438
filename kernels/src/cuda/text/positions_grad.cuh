// dtable[p] = sum over sequences of dy at position p; zero for positions that this rank has none of. Config: elem, grad_t, acc, THREADS, ADD, ZIGZAG.
DP_KERNEL(dp_positions_grad)(DP_IN(elem) dy, DP_OUT(grad_t) out, i64 batch, i64 positions, i64 width, i64 start, i64 rows, i64 length, i64 chunk, i64 blocks) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= rows * width) return;
    acc sum = acc(0);
    // A position past the sequence has no index.
    i64 position = at / width, i = position < length ? dp_index(position, chunk, blocks) - start : -1;
    if (i >= 0 && i < positions)
        for (i64 b = 0; b < batch; b++) sum += acc(widen(dp_ld(dy, (b * positions + i) * width + at % width)));
    dp_put<ADD>(out, at, sum);
}
