// 16 x 16 invocations compute a tile of a product of p.m rows, p.n columns and p.k sums. The kernel says lhs(row, k) and
// rhs(column, k), the values of four k from a multiple of 4 on, and result(row, column, value).
const COLUMNS: u32 = 64u;
const QUADS: u32 = 4u;
// One more than the quads of a line, so that neighbours lie in other banks.
const LINE: u32 = QUADS + 1u;
var<workgroup> lhs_tile: array<vec4<f32>, ROWS * LINE>;
var<workgroup> rhs_tile: array<vec4<f32>, COLUMNS * LINE>;

fn load_tiles(row: u32, column: u32, depth: u32, lane: u32) {
    let own = lane / QUADS;
    let k = depth + lane % QUADS * 4u;
    let at = own * LINE + lane % QUADS;
    if (own < ROWS) {
        var four = vec4<f32>(0.0, 0.0, 0.0, 0.0);
        if (row + own < p.m && k < p.k) { four = lhs(row + own, k); }
        lhs_tile[at] = four;
    }
    var four = vec4<f32>(0.0, 0.0, 0.0, 0.0);
    if (column + own < p.n && k < p.k) { four = rhs(column + own, k); }
    rhs_tile[at] = four;
}

fn store(row: u32, column: u32, sums: vec4<f32>) {
    if (row >= p.m) { return; }
    if (column < p.n) { result(row, column, sums.x); }
    if (column + 16u < p.n) { result(row, column + 16u, sums.y); }
    if (column + 32u < p.n) { result(row, column + 32u, sums.z); }
    if (column + 48u < p.n) { result(row, column + 48u, sums.w); }
}
