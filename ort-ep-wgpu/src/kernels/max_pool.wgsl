// The greatest element of a window, the first of equal ones; one that is not a number counts as greatest.

struct Sum {
    value: x_t,
    place: u32,
    found: bool,
}

fn start() -> Sum { return Sum(least(), 0u, false); }

fn fold(best: Sum, value: x_t, place: u32) -> Sum {
    if (!best.found || replaces(value, best.value)) { return Sum(value, place, true); }
    return best;
}

// The place as an index into all planes, counted within the plane with the first axis fastest where the node says so.
fn index_of(i: u32, best: Sum) -> u32 {
    let size = input3();
    let plane = volume(size);
    let first = i / volume(output3()) * plane;
    if (!best.found) { return first; }
    if (COLUMN_MAJOR == 0u) { return best.place; }
    let at = unflat(best.place - first, size);
    return first + (at.z * size.y + at.y) * size.x + at.x;
}
