// At position p the pair (x[START + i], x[START + i + HALF]), or with NEIGHBOURS (x[START + 2 i], x[START + 2 i + 1]), turns by the angle p f[i] and is scaled; TURNS holds f / pi, with
// the sign of the rotation. What is in no pair of the WIDTH elements stays. A thread turns one pair of one position in all heads. Whole turns are taken off in double, so that large positions lose nothing.
// Config: elem, acc, THREADS, ADD, HALF, WIDTH, START, NEIGHBOURS, SCALE, TURNS, ZIGZAG.
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
    sine *= acc(SCALE), cosine *= acc(SCALE);
    for (i64 h = 0; h < heads; h++) {
        i64 vector = (token * heads + h) * WIDTH, low = vector + START + (NEIGHBOURS ? 2 * i : i), high = low + (NEIGHBOURS ? 1 : HALF);
        acc a = acc(widen(dp_ld(x, low))), b = acc(widen(dp_ld(x, high)));
        dp_put<ADD>(y, low, a * cosine - b * sine);
        dp_put<ADD>(y, high, b * cosine + a * sine);
        for (i64 c = i; c < WIDTH - 2 * HALF; c += HALF) {
            i64 stays = vector + (c < START ? c : c + 2 * HALF);
            dp_put<ADD>(y, stays, acc(widen(dp_ld(x, stays))));
        }
    }
}
