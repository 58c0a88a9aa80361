const TILE: u32 = 32u;

// By column: its elements, and one more so that those of a row are in different banks.
var<workgroup> tile: array<array<x_t, 33>, 32>;

fn group(index: u32, lane: u32) {
    let across = (p.columns + TILE - 1u) / TILE;
    let down = (p.rows + TILE - 1u) / TILE;
    let column = index % across * TILE;
    let row = index / across % down * TILE;
    let batch = index / across / down;
    let x_start = p.x_start + at_x(batch) + row;
    for (var k = lane; k < TILE * TILE; k += LANES) {
        let r = k % TILE;
        let c = k / TILE;
        if (row + r < p.rows && column + c < p.columns) {
            tile[c][r] = x(x_start + r + bitcast<u32>(bitcast<i32>(column + c) * p.x_column));
        }
    }
    workgroupBarrier();
    let y_start = p.y_start + at_y(batch) + column;
    let width = TILE / PER_WORD;
    for (var k = lane; k < TILE * width; k += LANES) {
        let r = k / width;
        let c = k % width * PER_WORD;
        if (row + r < p.rows && column + c < p.columns) {
            let used = min(PER_WORD, p.columns - column - c);
            let at = y_start + c + bitcast<u32>(bitcast<i32>(row + r) * p.y_row);
            // stored
        }
    }
}
