// The rank of an element in its part and the part's sibling together.
fn element(i: u32) {
    let global_part = i / p.capacity;
    let row = global_part / p.parts;
    let part = global_part - row * p.parts;
    let index = i - global_part * p.capacity;
    if (index >= kept_of(part)) { return; }
    let own = keys(i);
    let place = places(i);
    let sibling = part ^ 1u;
    let base = (row * p.parts + sibling) * p.capacity;
    var low = 0u;
    var high = kept_of(sibling);
    while (low < high) {
        let middle = (low + high) / 2u;
        if (before(keys(base + middle), places(base + middle), own, place)) {
            low = middle + 1u;
        } else {
            high = middle;
        }
    }
    let rank = index + low;
    if (rank < p.merged_capacity) { keep(row, row * p.merged_parts + part / 2u, rank, own, place); }
}

fn kept_of(part: u32) -> u32 {
    if (part >= p.parts) { return 0u; }
    return min(p.capacity, p.len - part * p.size);
}
