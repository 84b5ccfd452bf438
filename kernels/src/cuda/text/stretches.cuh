// What a launch has of a flat buffer: up to 16 stretches, by where each begins and ends, and twice the number of its parameter, plus one if weight decay pulls it. Blocks take 2^shift
// elements of one stretch each, stretch after stretch. Names are those of arguments, so that no table has to lie in memory.
#define DP_STRETCH(n) i64 b##n, i64 e##n, i64 m##n
#define DP_STRETCHES \
    DP_STRETCH(0), DP_STRETCH(1), DP_STRETCH(2), DP_STRETCH(3), DP_STRETCH(4), DP_STRETCH(5), DP_STRETCH(6), DP_STRETCH(7), \
    DP_STRETCH(8), DP_STRETCH(9), DP_STRETCH(10), DP_STRETCH(11), DP_STRETCH(12), DP_STRETCH(13), DP_STRETCH(14), DP_STRETCH(15)
#define DP_EACH_STRETCH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15)

// A block's part of a stretch.
struct Part { i64 begin, end, what; };

// Goes past a stretch, if `block`, counted from its first, is in a later one; else finds its part.
DP_DEVICE void dp_seek(Part& part, i64& block, int shift, i64 begin, i64 end, i64 what) {
    i64 blocks = (end - begin + (i64(1) << shift) - 1) >> shift, from = begin + (block << shift);
    if (block >= 0 && block < blocks) part = Part{from, dp_min(end, from + (i64(1) << shift)), what};
    block -= blocks;
}
#define DP_SEEK(n) dp_seek(part, block, shift, b##n, e##n, m##n);
