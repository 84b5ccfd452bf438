// min(1, clip / (norm + 1e-6)); 1 where there is no limit. Config: in_t, out_t, THREADS.
DP_KERNEL(dp_clip)(DP_IN(in_t) squares, DP_OUT(out_t) out, DP_IN(double) scalars) {
    if (threadIdx.x > 0) return;
    double clip = dp_ld(scalars, 7), scale = clip / (sqrt(double(widen(dp_ld(squares, 0)))) + 1e-6);
    dp_st(out, 0, narrow<out_t>(clip < 1e300 && scale < 1.0 ? scale : 1.0));
}
