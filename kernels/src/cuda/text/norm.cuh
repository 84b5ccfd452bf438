// RMS and layer normalisation of rows that stay in registers. With r = 1 / sqrt(mean((x - m)^2) + eps), h = (x - m) r, g = w dy (m = 0 for RMS):
//   y = h w (+ bias);   dx = r (g - h mean(g h) - mean(g)), the last term for layer normalisation only;
//   dw = sum over rows of dy h, dbias = sum of dy: each group of T threads sums the rows it visits, then `dp_columns` sums the groups.
// Config: elem, acc, THREADS, T (threads of a row: 32 or THREADS), E (packs of a thread), VEC, LAYER, EPS.
constexpr int GROUPS = THREADS / T;

// A row's elements that a thread has.
struct Part {
    Pack<elem, VEC> v[E];
};

struct Row {
    Part x;
    acc mean, r;
};

DP_DEVICE i64 dp_column(int e) { return (i64(e) * T + threadIdx.x % T) * VEC; }

DP_DEVICE Part dp_load_part(DP_IN(elem) x, i64 at, i64 cols) {
    Part part;
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) part.v[e] = dp_ld_pack<VEC>(x, at * cols + dp_column(e));
    return part;
}

template <class P> DP_DEVICE Row dp_row(const Part& x, i64 cols, P sums) {
    Row row;
    row.x = x;
    acc sum = acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            DP_UNROLL
            for (int j = 0; j < VEC; j++) sum += LAYER ? acc(widen(row.x.v[e].v[j])) : acc(0);
        }
    row.mean = LAYER ? dp_row_sum<T>(sum, sums) / acc(cols) : acc(0);
    acc squares = acc(0);
    DP_UNROLL
    for (int e = 0; e < E; e++)
        if (dp_column(e) < cols) {
            DP_UNROLL
            for (int j = 0; j < VEC; j++) {
                acc d = acc(widen(row.x.v[e].v[j])) - row.mean;
                squares += d * d;
            }
        }
    row.r = dp_rsqrt(dp_row_sum<T>(squares, sums) / acc(cols) + acc(EPS));
    return row;
}

DP_DEVICE acc dp_hat(const Row& row, int e, int j) { return (acc(widen(row.x.v[e].v[j])) - row.mean) * row.r; }
