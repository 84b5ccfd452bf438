// One optimizer step on flat buffers, in place. Config: state_t (of state and moments), grad_t, param_t, scale_t, trust_t, acc, THREADS, VEC, ADAM (two moments), LAMB,
// COUPLED, PULLED (by weight decay), SCALED, CAST. Elements from `begin` to `end`; for LAMB those of the parameter whose sums are the `member`th of `trust`.
// AdamW: p <- p (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps). Adam (COUPLED): g <- g + wd p, then the same without decay. SGD: g <- g + wd p; v <- momentum v + g; p <- p - lr v.
// LAMB: u = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps) + wd p; p <- p - lr |p| / |u| u, the norms over the whole parameter; their quotient is 1 where either is zero.
DP_KERNEL(dp_update)(DP_OUT(state_t) state, DP_IN(grad_t) grad, DP_OUT(state_t) first, DP_OUT(state_t) second, DP_OUT(param_t) param, DP_IN(scale_t) scale,
                     DP_IN(trust_t) trust, DP_IN(double) scalars, i64 begin, i64 end, i64 member) {
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
    Adam adam = {};
    acc keep = acc(0), momentum = acc(0);
    if (ADAM) {
        adam = dp_adam(scalars, LAMB ? 1.0 : dp_ld(scalars, 1));
        keep = COUPLED || !PULLED ? acc(1) : acc(1.0 - dp_ld(scalars, 1) * dp_ld(scalars, 5));
    } else {
        momentum = acc(dp_ld(scalars, 6));
    }
    if (LAMB) {
        double weight = double(widen(dp_ld(trust, 2 * member))), along = double(widen(dp_ld(trust, 2 * member + 1)));
        lr = acc(dp_ld(scalars, 1) * (weight > 0.0 && along > 0.0 ? dp_sqrt(weight / along) : 1.0));
    }
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc x = acc(widen(p.v[j])), y = acc(widen(g.v[j])) * factor;
        if (ADAM) {
            if (COUPLED) y = y + decay * x;
            acc mi = acc(widen(m.v[j])), vi = acc(widen(v.v[j])), u = dp_direction(adam, y, mi, vi);
            x = LAMB ? x - lr * (u + decay * x) : x * keep - u;
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
