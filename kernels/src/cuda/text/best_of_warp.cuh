// The largest of the lanes' candidates, and whose it is; of equals that with the lower index. `which` of a lane without one is 1 << 30.
DP_DEVICE void dp_best_of_warp(acc& best, int& which) {
    DP_UNROLL
    for (int m = 16; m > 0; m /= 2) {
        acc other = dp_shfl_xor(best, m);
        int index = dp_shfl_xor(which, m);
        if (index != 1 << 30 && (which == 1 << 30 || other > best || (other == best && index < which))) best = other, which = index;
    }
}
