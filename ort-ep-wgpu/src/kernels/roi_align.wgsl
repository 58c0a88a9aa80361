// The samples of a bin along one axis: those from `first` to `end` may be inside of the map.
struct Samples {
    start: f32,
    bin: f32,
    count: u32,
    first: u32,
    end: u32,
}

// Two neighbours and the weight of the second.
struct Between {
    low: u32,
    high: u32,
    weight: f32,
}

fn samples_of(region: u32, axis: u32, cell: u32) -> Samples {
    var s: Samples;
    let low = rois(region * 4u + 1u - axis) * p.scale - p.shift;
    let high = rois(region * 4u + 3u - axis) * p.scale - p.shift;
    s.bin = max(high - low, p.least_extent) / f32(pooled(axis));
    s.start = low + f32(cell) * s.bin;
    s.count = p.samples;
    if (p.samples == 0u) { s.count = min(u32(clamp(ceil(s.bin), 0.0, f32(MOST_ELEMENTS))), MOST_ELEMENTS); }
    s.first = 0u;
    s.end = s.count;
    if (s.bin > 0.0) {
        let rate = f32(s.count) / s.bin;
        s.first = u32(clamp(floor((-1.0 - s.start) * rate) - 1.0, 0.0, f32(s.count)));
        s.end = min(u32(clamp(ceil((f32(size(axis)) - s.start) * rate) + 2.0, 0.0, f32(s.count))), s.count);
    }
    return s;
}

fn sample(s: Samples, index: u32) -> f32 {
    return s.start + (f32(index) + 0.5) * s.bin / f32(s.count);
}

fn inside(at: f32, axis: u32) -> bool { return at >= -1.0 && at <= f32(size(axis)); }

fn between(place: f32, axis: u32) -> Between {
    let at = max(place, 0.0);
    let last = size(axis) - 1u;
    var b: Between;
    b.low = min(u32(at), last);
    b.high = min(b.low + 1u, last);
    b.weight = select(at - f32(b.low), 0.0, b.high == b.low);
    return b;
}

// What weighs nothing counts as zero, whatever it is.
fn weighed(place: u32, weight: f32) -> f32 {
    if (weight == 0.0) { return 0.0; }
    return x(place) * weight;
}

fn element(i: u32) {
    let row = i / pooled(1u);
    let plane = row / pooled(0u);
    let region = plane / p.channels;
    let image = u32(clamp(images(region), 0, i32(p.batch) - 1));
    let base = (image * p.channels + plane % p.channels) * size(0u) * size(1u);
    let rows = samples_of(region, 0u, row % pooled(0u));
    let columns = samples_of(region, 1u, i % pooled(1u));
    var total = 0.0;
    var found = false;
    // Whether samples of the bin are off the map.
    var off = rows.first > 0u || rows.end < rows.count || columns.first > 0u || columns.end < columns.count;
    for (var r = rows.first; r < rows.end; r++) {
        let at_row = sample(rows, r);
        if (!inside(at_row, 0u)) { off = true; continue; }
        let v = between(at_row, 0u);
        for (var c = columns.first; c < columns.end; c++) {
            let at_column = sample(columns, c);
            if (!inside(at_column, 1u)) { off = true; continue; }
            let h = between(at_column, 1u);
            for (var k = 0u; k < 4u; k++) {
                let lower = (k & 2u) == 2u;
                let right = (k & 1u) == 1u;
                let place = base + select(v.low, v.high, lower) * size(1u) + select(h.low, h.high, right);
                let weight = select(1.0 - v.weight, v.weight, lower);
                let value = weighed(place, weight * select(1.0 - h.weight, h.weight, right));
                COMBINED
            }
        }
    }
    set_y(i, RESULT);
}
