// dlogits = dlse exp(logits - lse) + dpicked where the target is; padding gets 0. Each thread has VEC columns of one row.
DP_KERNEL(dp_loss_grad)(DP_IN(elem) logits, DP_IN(i32) targets, DP_IN(acc) lse, DP_IN(acc) dlse, DP_IN(acc) dpicked, DP_OUT(elem) out, i64 rows, i64 cols,
                        i64 start, i64 valid) {
    i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * VEC;
    if (at >= rows * cols) return;
    i64 row = at / cols, c = at % cols, target;
    bool here = dp_has(dp_ld(targets, row), start, valid, target);
    acc l = dp_ld(lse, row), d = dp_ld(dlse, row), dp = dp_ld(dpicked, row);
    Pack<elem, VEC> in = dp_ld_pack<VEC>(logits, at), result;
    if (ADD) result = dp_ld_pack<VEC>(out, at);
    DP_UNROLL
    for (int j = 0; j < VEC; j++) {
        acc v = c + j < valid ? d * dp_exp(acc(widen(in.v[j])) - l) : acc(0);
        if (here && c + j == target) v += dp;
        result.v[j] = narrow<elem>(ADD ? acc(widen(result.v[j])) + v : v);
    }
    dp_st_pack<VEC>(out, at, result);
}
