// min(1, clip / (norm + 1e-6)) / S of gradients that are S times too large; no limit: 1 / S; NaN where they overflowed. Config: in_t, out_t, THREADS.
DP_KERNEL(dp_clip)(DP_IN(in_t) squares, DP_OUT(out_t) out, DP_IN(double) scalars) {
    if (threadIdx.x > 0) return;
    double square = double(widen(dp_ld(squares, 0))), loss_scale = dp_ld(scalars, 10);
    double clip = dp_ld(scalars, 7), scale = clip / (sqrt(square) / loss_scale + 1e-6);
    // Infinity less itself is NaN, and so is NaN.
    dp_st(out, 0, narrow<out_t>((clip < 1e300 && scale < 1.0 ? scale : 1.0) / loss_scale + (square - square)));
}
