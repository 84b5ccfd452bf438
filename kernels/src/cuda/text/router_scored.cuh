// The top-k router of any score, a warp for each token: s = softmax or 1 / (1 + exp(-logit)); experts are chosen by s + bias if CORRECTED, else by their logits (which fall as scores
// do), out of the KEPT best of GROUPS groups: those whose best, or with TWO_BEST the sum of whose two best, is largest. Of equals the lower index comes first.
// gate = SCALE s on the chosen, divided by the sum of s if RENORMALIZE. Gradient, with along = sum gate dgate, and `over` = gate / SCALE if RENORMALIZE, else s of a softmax and 0 of a
// sigmoid: gate dgate - over along, of a sigmoid times 1 - s.
// Config: elem, acc, THREADS, L (experts of a lane), K, RENORMALIZE, ADD, SIGMOID, GROUPS (0: none), KEPT, TWO_BEST, CORRECTED, SCALE.
struct Scores {
    acc x[L], s[L];
};

DP_DEVICE Scores dp_scores(DP_IN(elem) logits, i64 token, i64 experts, i64 valid) {
    Scores all;
    int lane = threadIdx.x % 32;
    acc top = dp_minus_infinity<acc>(), sum = acc(0);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i;
        all.x[i] = e < valid ? acc(widen(dp_ld(logits, token * experts + e))) : dp_minus_infinity<acc>();
        top = dp_max(top, all.x[i]);
    }
    if (!SIGMOID) top = dp_warp_max(top);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        bool here = lane + 32 * i < valid;
        all.s[i] = !here ? acc(0) : SIGMOID ? acc(1) / (acc(1) + dp_exp(-all.x[i])) : dp_exp(all.x[i] - top);
        sum += all.s[i];
    }
    if (!SIGMOID) {
        sum = dp_warp_sum(sum);
        DP_UNROLL
        for (int i = 0; i < L; i++) all.s[i] = all.s[i] / sum;
    }
    return all;
}

// The groups that a token may choose from, a bit for each.
DP_DEVICE u32 dp_groups(const acc (&choice)[L], i64 valid) {
    int lane = threadIdx.x % 32, size = int(valid) / (GROUPS ? GROUPS : 1);
    acc worth = dp_minus_infinity<acc>();
    for (int g = 0; g < GROUPS; g++) {
        acc best = dp_minus_infinity<acc>(), second = dp_minus_infinity<acc>();
        DP_UNROLL
        for (int i = 0; i < L; i++) {
            int e = lane + 32 * i;
            if (e < g * size || e >= (g + 1) * size) continue;
            second = dp_max(second, choice[i] > best ? best : choice[i]), best = dp_max(best, choice[i]);
        }
        DP_UNROLL
        for (int m = 16; m > 0; m /= 2) {
            acc other = dp_shfl_xor(best, m), next = dp_shfl_xor(second, m);
            second = dp_max(dp_max(second, next), other > best ? best : other), best = dp_max(best, other);
        }
        if (lane == g) worth = TWO_BEST && size > 1 ? best + second : best;
    }
    u32 kept = 0;
    for (int k = 0; k < KEPT; k++) {
        acc best = worth;
        int which = lane < GROUPS && !(kept >> lane & 1) ? lane : 1 << 30;
        dp_best_of_warp(best, which);
        if (which < 32) kept |= u32(1) << which;
    }
    return kept;
}

DP_KERNEL(dp_router_scored)(DP_IN(elem) logits, DP_IN(elem) bias, DP_OUT(elem) gate, i64 tokens, i64 experts, i64 valid) {
    i64 token = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    Scores all = dp_scores(logits, token, experts, valid);
    acc choice[L], order[L], g[L], kept = acc(0);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i;
        choice[i] = all.s[i] + (CORRECTED && e < valid ? acc(widen(dp_ld(bias, e))) : acc(0));
        order[i] = CORRECTED ? choice[i] : all.x[i];
        g[i] = acc(-1);
    }
    u32 groups = GROUPS ? dp_groups(choice, valid) : ~u32(0);
    int size = GROUPS ? int(valid) / GROUPS : 1;
    for (int k = 0; k < K && k < valid; k++) {
        acc best = dp_minus_infinity<acc>();
        int which = 1 << 30;
        DP_UNROLL
        for (int i = 0; i < L; i++) {
            int e = lane + 32 * i;
            bool allowed = e < valid && g[i] < acc(0) && (!GROUPS || (groups >> (e / size) & 1));
            if (allowed && (which == 1 << 30 || order[i] > best)) best = order[i], which = e;
        }
        dp_best_of_warp(best, which);
        acc score = acc(0);
        DP_UNROLL
        for (int i = 0; i < L; i++)
            if (lane + 32 * i == which) g[i] = score = all.s[i];
        if (RENORMALIZE) kept += dp_warp_sum(score);
    }
    acc divisor = RENORMALIZE ? kept : acc(1);
    DP_UNROLL
    for (int i = 0; i < L; i++)
        if (lane + 32 * i < experts) dp_put<ADD>(gate, token * experts + lane + 32 * i, g[i] < acc(0) ? acc(0) : acc(SCALE) * g[i] / divisor);
}

DP_KERNEL(dp_router_scored_grad)(DP_IN(elem) logits, DP_IN(elem) gate, DP_IN(elem) dgate, DP_OUT(elem) out, i64 tokens, i64 experts, i64 valid) {
    i64 token = i64(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    if (token >= tokens) return;
    int lane = threadIdx.x % 32;
    Scores all = dp_scores(logits, token, experts, valid);
    acc g[L], d[L], along = acc(0);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i, at = token * experts + e;
        g[i] = e < valid ? acc(widen(dp_ld(gate, at))) : acc(0);
        d[i] = e < valid ? acc(widen(dp_ld(dgate, at))) : acc(0);
        along += g[i] * d[i];
    }
    along = dp_warp_sum(along);
    DP_UNROLL
    for (int i = 0; i < L; i++) {
        i64 e = lane + 32 * i;
        acc over = RENORMALIZE ? g[i] / acc(SCALE) : SIGMOID ? acc(0) : all.s[i];
        acc slope = (g[i] * d[i] - over * along) * (SIGMOID ? acc(1) - all.s[i] : acc(1));
        if (e < experts) dp_put<ADD>(out, token * experts + e, e < valid ? slope : acc(0));
    }
}
