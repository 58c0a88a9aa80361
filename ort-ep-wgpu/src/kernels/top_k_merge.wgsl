// The rank of an element in its part and the part's sibling together.
fn element(i: u32) {
    let row = i / p.capacity;
    let line = row / p.parts;
    let part = row - line * p.parts;
    let index = i - row * p.capacity;
    if (index >= kept_of(part)) { return; }
    let own = keys(i);
    let place = places(i);
    let sibling = part ^ 1u;
    let base = (line * p.parts + sibling) * p.capacity;
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
    if (rank < p.merged_capacity) { keep(line, line * p.merged_parts + part / 2u, rank, own, place); }
}

fn kept_of(part: u32) -> u32 {
    if (part >= p.parts) { return 0u; }
    return min(p.capacity, p.len - part * p.size);
}
