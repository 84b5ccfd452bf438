// The sums that LAMB's trust ratios are of, over the elements that this rank has of each parameter: squares of the parameter, and of the direction of its update. Each block sums its
// part of a stretch into two of `parts`: a thread's elements in `acc`, all else in double.
// Config: state_t (of state and moments), grad_t, scale_t, acc, THREADS, VEC, SCALED.
DP_KERNEL(dp_trust)(DP_IN(state_t) state, DP_IN(grad_t) grad, DP_IN(state_t) first, DP_IN(state_t) second, DP_IN(scale_t) scale, DP_IN(double) scalars,
                    DP_OUT(double) parts, i64 shift, DP_STRETCHES) {
    DP_SHARED(double, sums, 0, 32);
    Part part = {};
    i64 block = blockIdx.x;
    DP_EACH_STRETCH(DP_SEEK)
    acc factor = SCALED ? acc(widen(dp_ld(scale, 0))) : acc(1), decay = part.what % 2 ? acc(dp_ld(scalars, 5)) : acc(0);
    Adam adam = dp_adam(scalars, 1.0);
    double weights = 0.0, directions = 0.0;
    for (i64 at = part.begin + i64(threadIdx.x) * VEC; at < part.end; at += THREADS * VEC) {
        Pack<state_t, VEC> p = dp_ld_pack<VEC>(state, at), m = dp_ld_pack<VEC>(first, at), v = dp_ld_pack<VEC>(second, at);
        Pack<grad_t, VEC> g = dp_ld_pack<VEC>(grad, at);
        acc weight = acc(0), direction = acc(0);
        DP_UNROLL
        for (int j = 0; j < VEC; j++) {
            acc x = acc(widen(p.v[j])), mi = acc(widen(m.v[j])), vi = acc(widen(v.v[j]));
            acc u = dp_direction(adam, acc(widen(g.v[j])) * factor, mi, vi) + decay * x;
            weight += x * x, direction += u * u;
        }
        weights += double(weight), directions += double(direction);
    }
    weights = dp_row_sum<THREADS>(weights, sums);
    directions = dp_row_sum<THREADS>(directions, sums);
    if (threadIdx.x == 0) {
        dp_st(parts, 2 * i64(blockIdx.x), weights);
        dp_st(parts, 2 * i64(blockIdx.x) + 1, directions);
    }
}
