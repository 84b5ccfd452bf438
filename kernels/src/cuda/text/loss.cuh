// Cross entropy on this rank's columns [start, start + cols), of which the first `valid` are no padding.
// Config: elem, acc, THREADS (one block a row), VEC, ADD.
DP_DEVICE bool dp_has(i32 target, i64 start, i64 valid, i64& column) {
    column = i64(target) - start;
    return target >= 0 && column >= 0 && column < valid;
}
