// A tile of a product by one workgroup. Both sides lie in workgroup memory by steps along the depth, four rows (or columns) in a vector;
// each invocation keeps its sums in registers. The pitch spreads neighbours of a step over the banks.
const PITCH: u32 = QUADS + 1u;
var<workgroup> a_tile: array<vec4<sum_t>, DEPTH * PITCH>;
var<workgroup> b_tile: array<vec4<sum_t>, DEPTH * PITCH>;

// Four rows of a step; nothing is added beyond the last step.
fn a_quad(places: vec4<u32>, zeros: vec4<sum_t>, k: u32) -> vec4<sum_t> {
    if (k >= p.depth) { return vec4<sum_t>(); }
    let at = places + k * p.a_depth;
    return vec4<sum_t>(sum_t(a(at.x)), sum_t(a(at.y)), sum_t(a(at.z)), sum_t(a(at.w))) - zeros;
}

fn b_quad(places: vec4<u32>, zeros: vec4<sum_t>, k: u32) -> vec4<sum_t> {
    if (k >= p.depth) { return vec4<sum_t>(); }
    let at = places + k * p.b_depth;
    return vec4<sum_t>(sum_t(b(at.x)), sum_t(b(at.y)), sum_t(b(at.z)), sum_t(b(at.w))) - zeros;
}

fn four(first: u32, size: u32) -> vec4<u32> {
    return min(first + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(size - 1u));
}

fn store_quad(at: At, row: u32, column: u32, sums: vec4<sum_t>) {
    if (row >= p.rows) { return; }
    if (column < p.columns) { store(at, row, column, sums.x); }
    if (column + 1u < p.columns) { store(at, row, column + 1u, sums.y); }
    if (column + 2u < p.columns) { store(at, row, column + 2u, sums.z); }
    if (column + 3u < p.columns) { store(at, row, column + 3u, sums.w); }
}
