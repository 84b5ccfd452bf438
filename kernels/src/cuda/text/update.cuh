// One optimizer step on flat buffers, in place. Config: state_t (of state and moments), grad_t, param_t, scale_t, acc, THREADS, VEC, ADAM, COUPLED, PULLED (by weight
// decay), SCALED, CAST. Elements from `begin` to `end`.
// AdamW: p <- p (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps). Adam (COUPLED): g <- g + wd p, then the same without decay. SGD: g <- g + wd p; v <- momentum v + g; p <- p - lr v.
DP_KERNEL(dp_update)(DP_OUT(state_t) state, DP_IN(grad_t) grad, DP_OUT(state_t) first, DP_OUT(state_t) second, DP_OUT(param_t) param, DP_IN(scale_t) scale,
                     DP_IN(double) scalars, i64 begin, i64 end) {
    i64 at = begin + (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= end) return;
    acc factor = SCALED ? acc(widen(dp_ld(scale, 0))) : acc(1);
    // Gradients that overflowed: the step is skipped.
    if (factor != factor) return;
    acc lr = acc(dp_ld(scalars, 1)), decay = PULLED ? acc(dp_ld(scalars, 5)) : acc(0);
    Pack<state_t, VEC> p = dp_ld_pack<VEC>(state, at), m = dp_ld_pack<VEC>(first, at), v;
    Pack<grad_t, VEC> g = dp_ld_pack<VEC>(grad, at);
    Pack<param_t, VEC> out;
    if (ADAM) v = dp_ld_pack<VEC>(second, at);
    acc b1 = acc(0), c1 = acc(0), b2 = acc(0), c2 = acc(0), eps = acc(0), step = acc(0), root = acc(1), keep = acc(0), momentum = acc(0);
    if (ADAM) {
        // 1 - b is taken in double: in float it would lose the digits that b2 = 0.999 has.
        double beta1 = dp_ld(scalars, 2), beta2 = dp_ld(scalars, 3);
        b1 = acc(beta1), c1 = acc(1.0 - beta1), b2 = acc(beta2), c2 = acc(1.0 - beta2), eps = acc(dp_ld(scalars, 4));
        step = acc(dp_ld(scalars, 1) / dp_ld(scalars, 8)), root = acc(1.0 / dp_ld(scalars, 9));
        keep = COUPLED || !PULLED ? acc(1) : acc(1.0 - dp_ld(scalars, 1) * dp_ld(scalars, 5));
    } else {
        momentum = acc(dp_ld(scalars, 6));
    }
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc x = acc(widen(p.v[j])), y = acc(widen(g.v[j])) * factor;
        if (ADAM) {
            if (COUPLED) y = y + decay * x;
            acc mi = b1 * acc(widen(m.v[j])) + c1 * y, vi = b2 * acc(widen(v.v[j])) + c2 * y * y;
            x = x * keep - step * mi / (dp_sqrt(vi) * root + eps);
            m.v[j] = narrow<state_t>(mi), v.v[j] = narrow<state_t>(vi);
        } else {
            acc vi = momentum * acc(widen(m.v[j])) + y + decay * x;
            x = x - lr * vi;
            m.v[j] = narrow<state_t>(vi);
        }
        p.v[j] = narrow<state_t>(x);
        if (CAST) out.v[j] = narrow<param_t>(x);
    }
    dp_st_pack<VEC>(state, at, p);
    dp_st_pack<VEC>(first, at, m);
    if (ADAM) dp_st_pack<VEC>(second, at, v);
    if (CAST) dp_st_pack<VEC>(param, at, out);
}
