// [outer, parts, len] <-> [parts, outer, len]. Config: elem, THREADS, PACK.
DP_KERNEL(dp_blocks)(DP_IN(elem) in, DP_OUT(elem) out, i64 outer, i64 parts, i64 len) {
    i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= outer * parts * len) return;
    i64 i = at % len, part = at / len % parts, o = at / len / parts, other = (part * outer + o) * len + i;
    dp_st(out, PACK ? other : at, dp_ld(in, PACK ? at : other));
}
