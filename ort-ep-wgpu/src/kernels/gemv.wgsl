// Columns of a single row by one workgroup, whose invocations share the steps of each sum. NEAR says whether steps of a column lie next to
// each other; else columns of a step do.
const SLICES: u32 = LANES / COLUMNS;
var<workgroup> shares: array<sum_t, LANES>;

fn term(a_at: u32, b_at: u32, zeros: vec2<sum_t>, k: u32) -> sum_t {
    return (sum_t(a(a_at + k * p.a_depth)) - zeros.x) * (sum_t(b(b_at + k * p.b_depth)) - zeros.y);
}

fn share(at: At, column: u32, slice: u32) -> sum_t {
    let zeros = vec2<sum_t>(a_zeros(at, vec4<u32>()).x, b_zeros(at, vec4<u32>(column)).x);
    let b_at = at.b + column * p.b_column;
    var sums = vec4<sum_t>();
    var k = slice;
    while (k + 3u * SLICES < p.depth) {
        sums += vec4<sum_t>(
            term(at.a, b_at, zeros, k),
            term(at.a, b_at, zeros, k + SLICES),
            term(at.a, b_at, zeros, k + 2u * SLICES),
            term(at.a, b_at, zeros, k + 3u * SLICES),
        );
        k += 4u * SLICES;
    }
    while (k < p.depth) {
        sums.x += term(at.a, b_at, zeros, k);
        k += SLICES;
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}

fn group(index: u32, lane: u32) {
    let at = places(index / p.tiles_across);
    let own = select(lane % COLUMNS, lane / SLICES, NEAR == 1u);
    let slice = select(lane / COLUMNS, lane % SLICES, NEAR == 1u);
    let column = (index % p.tiles_across) * COLUMNS + own;
    var sum = sum_t();
    if (column < p.columns) { sum = share(at, column, slice); }
    let place = slice * COLUMNS + own;
    shares[place] = sum;
    workgroupBarrier();
    for (var half = SLICES / 2u; half > 0u; half = half / 2u) {
        if (slice < half) { shares[place] += shares[place + half * COLUMNS]; }
        workgroupBarrier();
    }
    if (slice == 0u && column < p.columns) { store(at, 0u, column, shares[own]); }
}
