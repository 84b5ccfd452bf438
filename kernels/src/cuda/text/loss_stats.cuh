// lse = log sum exp of a row, in one pass: each thread keeps its largest logit and the sum of exp(x - largest).
DP_KERNEL(dp_loss_stats)(DP_IN(elem) logits, DP_IN(i32) targets, DP_OUT(acc) lse, DP_OUT(acc) picked, i64 cols, i64 start, i64 valid) {
    DP_SHARED(acc, sums, 0, 32);
    i64 row = blockIdx.x;
    acc largest = dp_minus_infinity<acc>(), sum = acc(0);
    for (i64 c = i64(threadIdx.x) * VEC; c < valid; c += THREADS * VEC) {
        Pack<elem, VEC> p = dp_ld_pack<VEC>(logits, row * cols + c);
        acc m = largest;
        DP_UNROLL
        for (int j = 0; j < VEC; j++)
            if (c + j < valid) m = dp_max(m, acc(widen(p.v[j])));
        sum = sum == acc(0) ? acc(0) : sum * dp_exp(largest - m);
        DP_UNROLL
        for (int j = 0; j < VEC; j++)
            if (c + j < valid) sum += dp_exp(acc(widen(p.v[j])) - m);
        largest = m;
    }
    acc top = dp_row_max<THREADS>(largest, sums);
    sum = dp_row_sum<THREADS>(sum == acc(0) ? acc(0) : sum * dp_exp(largest - top), sums);
    if (threadIdx.x == 0) {
        i64 column;
        bool here = dp_has(dp_ld(targets, row), start, valid, column);
        dp_put<ADD>(lse, row, valid > 0 ? top + dp_log(sum) : dp_minus_infinity<acc>());
        dp_put<ADD>(picked, row, here ? acc(widen(dp_ld(logits, row * cols + column))) : acc(0));
    }
}
