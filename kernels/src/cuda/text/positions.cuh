// How positions lie along a dim (`ir::order`): a place is an index along it; in zigzag order block i of n holds chunks i and 2n - 1 - i of the sequence.
// Places of one sequence fit in 32 bits, where division is quick. Config: ZIGZAG. `chunk` and `blocks` are arguments.
DP_DEVICE i64 dp_position(i64 index, i64 chunk, i64 blocks) {
    if (!ZIGZAG) return index;
    u32 c = u32(chunk), n = u32(blocks), slot = u32(index) / c, nth = slot % 2 == 0 ? slot / 2 : 2 * n - 1 - slot / 2;
    return nth * c + u32(index) % c;
}
DP_DEVICE i64 dp_index(i64 position, i64 chunk, i64 blocks) {
    if (!ZIGZAG) return position;
    u32 c = u32(chunk), n = u32(blocks), nth = u32(position) / c, slot = nth < n ? 2 * nth : 2 * (2 * n - 1 - nth) + 1;
    return slot * c + u32(position) % c;
}
