// At position p the pair (x[i], x[i + HALF]) turns by the angle p f[i]; TURNS holds f / pi, with the sign of the rotation.
// A thread turns one pair of one position in all heads. Whole turns are taken off in double, so that large positions lose nothing.
// Config: elem, acc, THREADS, ADD, HALF, TURNS, ZIGZAG.
DP_DEVICE void dp_sincospi(float x, float* s, float* c) { sincospif(x, s, c); }
DP_DEVICE void dp_sincospi(double x, double* s, double* c) { sincospi(x, s, c); }

DP_KERNEL(dp_rope)(DP_IN(elem) x, DP_OUT(elem) y, i64 batch, i64 positions, i64 heads, i64 start, i64 chunk, i64 blocks) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    i64 i = at % HALF, token = at / HALF;
    if (token >= batch * positions) return;
    double turns = double(dp_position(start + token % positions, chunk, blocks)) * TURNS[i];
    turns -= 2.0 * floor(turns * 0.5);
    acc sine, cosine;
    dp_sincospi(acc(turns), &sine, &cosine);
    for (i64 h = 0; h < heads; h++) {
        i64 low = (token * heads + h) * 2 * HALF + i;
        acc a = acc(widen(dp_ld(x, low))), b = acc(widen(dp_ld(x, low + HALF)));
        dp_put<ADD>(y, low, a * cosine - b * sine);
        dp_put<ADD>(y, low + HALF, b * cosine + a * sine);
    }
}
