// What AdamW, Adam and LAMB have in common: moments, and where they point. Config: acc.
struct Adam { acc b1, c1, b2, c2, eps, step, root; };

// `step` multiplies the first moment, whose correction it takes along.
template <class P> DP_DEVICE Adam dp_adam(P scalars, double step) {
    // 1 - b is taken in double: in float it would lose the digits that b2 = 0.999 has.
    double beta1 = dp_ld(scalars, 2), beta2 = dp_ld(scalars, 3);
    return Adam{acc(beta1), acc(1.0 - beta1), acc(beta2), acc(1.0 - beta2), acc(dp_ld(scalars, 4)), acc(step / dp_ld(scalars, 8)), acc(1.0 / dp_ld(scalars, 9))};
}

// Moves the moments by a gradient; step / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps).
DP_DEVICE acc dp_direction(const Adam& a, acc g, acc& m, acc& v) {
    m = a.b1 * m + a.c1 * g, v = a.b2 * v + a.c2 * g * g;
    return a.step * m / (dp_sqrt(v) * a.root + a.eps);
}
