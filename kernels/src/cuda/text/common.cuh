// Both sides: arithmetic by accumulator type, fixed-order reductions.
DP_DEVICE float dp_exp(float x) { return expf(x); }
DP_DEVICE double dp_exp(double x) { return exp(x); }
DP_DEVICE float dp_log(float x) { return logf(x); }
DP_DEVICE double dp_log(double x) { return log(x); }
DP_DEVICE float dp_sqrt(float x) { return sqrtf(x); }
DP_DEVICE double dp_sqrt(double x) { return sqrt(x); }
DP_DEVICE float dp_rsqrt(float x) { return 1.0f / sqrtf(x); }
DP_DEVICE double dp_rsqrt(double x) { return 1.0 / sqrt(x); }
DP_DEVICE float dp_tanh(float x) { return tanhf(x); }
DP_DEVICE double dp_tanh(double x) { return tanh(x); }
DP_DEVICE float dp_erf(float x) { return erff(x); }
DP_DEVICE double dp_erf(double x) { return erf(x); }
template <class A> DP_DEVICE A dp_max(A x, A y) { return x > y ? x : y; }
DP_DEVICE i64 dp_min(i64 x, i64 y) { return x < y ? x : y; }
template <class A> DP_DEVICE A dp_minus_infinity() { return A(bits_float(0xff800000u)); }

// Adds to what is there, or replaces it.
template <bool ADD, class P, class A> DP_DEVICE void dp_put(P out, i64 i, A value) {
    auto old = decltype(dp_ld(out, i)){};
    if (ADD) old = dp_ld(out, i);
    dp_st(out, i, narrow<decltype(old)>(ADD ? A(widen(old)) + value : value));
}

template <class A> DP_DEVICE A dp_warp_sum(A x) {
    DP_UNROLL
    for (int m = 16; m > 0; m /= 2) x += dp_shfl_xor(x, m);
    return x;
}
template <class A> DP_DEVICE A dp_warp_max(A x) {
    DP_UNROLL
    for (int m = 16; m > 0; m /= 2) x = dp_max(x, dp_shfl_xor(x, m));
    return x;
}
// The sum over the T threads of a row: a warp, or the whole block. `at`: 32 elements of shared memory that nobody else uses.
template <int T, class A, class P> DP_DEVICE A dp_row_sum(A x, P at) {
    x = dp_warp_sum(x);
    if (T > 32) {
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) dp_st(at, warp, x);
        __syncthreads();
        x = A(0);
        for (int w = 0; w < T / 32; w++) x += dp_ld(at, w);
        __syncthreads();
    }
    return x;
}
template <int T, class A, class P> DP_DEVICE A dp_row_max(A x, P at) {
    x = dp_warp_max(x);
    if (T > 32) {
        int warp = threadIdx.x / 32;
        if (threadIdx.x % 32 == 0) dp_st(at, warp, x);
        __syncthreads();
        x = dp_ld(at, 0);
        for (int w = 1; w < T / 32; w++) x = dp_max(x, dp_ld(at, w));
        __syncthreads();
    }
    return x;
}
