// Vectors of heads put together from a part of each head's own and a part that all heads share, z = (x, y), and the ways back. A thread has an element of the result; `own` and
// `whole` are the elements of x and of z. Padding heads are zero. Config: elem, acc, THREADS, ADD.
DP_KERNEL(dp_append)(DP_IN(elem) x, DP_IN(elem) y, DP_OUT(elem) z, i64 n, i64 heads, i64 valid, i64 own, i64 whole) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= n) return;
    i64 vector = i / whole, c = i % whole;
    acc value = acc(0);
    if (vector % heads < valid) value = acc(widen(c < own ? dp_ld(x, vector * own + c) : dp_ld(y, vector / heads * (whole - own) + c - own)));
    dp_put<ADD>(z, i, value);
}

DP_KERNEL(dp_append_grad_head)(DP_IN(elem) dz, DP_OUT(elem) dx, i64 n, i64 own, i64 whole) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (i < n) dp_put<ADD>(dx, i, acc(widen(dp_ld(dz, i / own * whole + i % own))));
}

// Heads in their order.
DP_KERNEL(dp_append_grad_tail)(DP_IN(elem) dz, DP_OUT(elem) dy, i64 n, i64 heads, i64 own, i64 whole) {
    i64 i = i64(blockIdx.x) * THREADS + threadIdx.x, shared = whole - own;
    if (i >= n) return;
    acc sum = acc(0);
    for (i64 h = 0; h < heads; h++) sum += acc(widen(dp_ld(dz, (i / shared * heads + h) * whole + own + i % shared)));
    dp_put<ADD>(dy, i, sum);
}
