// One optimizer step on flat buffers, in place. Config: state_t (of state and moments), grad_t, param_t, scale_t, trust_t, acc, THREADS, VEC, ADAM (two moments), LAMB,
// COUPLED, SCALED, CAST. For LAMB a stretch is of one parameter, by whose number its sums are in `trust`.
// AdamW: p <- p (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps). Adam (COUPLED): g <- g + wd p, then the same without decay. SGD: g <- g + wd p; v <- momentum v + g; p <- p - lr v.
// LAMB: u = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps) + wd p; p <- p - lr |p| / |u| u, the norms over the whole parameter; their quotient is 1 where either is zero.
DP_KERNEL(dp_update)(DP_OUT(state_t) state, DP_IN(grad_t) grad, DP_OUT(state_t) first, DP_OUT(state_t) second, DP_OUT(param_t) param, DP_IN(scale_t) scale,
                     DP_IN(trust_t) trust, DP_IN(double) scalars, i64 shift, DP_STRETCHES) {
    Part part = {};
    i64 block = blockIdx.x;
    DP_EACH_STRETCH(DP_SEEK)
    i64 at = part.begin + i64(threadIdx.x) * VEC, member = part.what / 2;
    bool pulled = part.what % 2;
    if (at >= part.end) return;
    acc factor = SCALED ? acc(widen(dp_ld(scale, 0))) : acc(1);
    // Gradients that overflowed: the step is skipped.
    if (factor != factor) return;
    acc lr = acc(dp_ld(scalars, 1)), decay = pulled ? acc(dp_ld(scalars, 5)) : acc(0);
    Pack<state_t, VEC> p = dp_ld_pack<VEC>(state, at), m = dp_ld_pack<VEC>(first, at), v;
    Pack<grad_t, VEC> g = dp_ld_pack<VEC>(grad, at);
    Pack<param_t, VEC> out;
    if (ADAM) v = dp_ld_pack<VEC>(second, at);
    Adam adam = {};
    acc keep = acc(0), momentum = acc(0);
    if (ADAM) {
        adam = dp_adam(scalars, LAMB ? 1.0 : dp_ld(scalars, 1));
        keep = COUPLED || !pulled ? acc(1) : acc(1.0 - dp_ld(scalars, 1) * dp_ld(scalars, 5));
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
