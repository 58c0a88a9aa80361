// The window of each result. The pool declares Sum, start(), fold(sum, value, place) and finish(i, sum, count).

// The taps of a window that count: those inside of the image, or also those in the padding.
fn counted(axis: u32, origin: u32, inside: vec2<u32>) -> u32 {
    if (INCLUDE_PAD == 0u) { return inside.y - inside.x; }
    let end = pads(axis) + input(axis) + pads_behind(axis);
    return min((max(end, origin) - origin + dilations(axis) - 1u) / dilations(axis), kernel(axis));
}

fn element(i: u32) {
    let plane = volume(output3());
    let size = input3();
    let origin = unflat(i % plane, output3()) * strides3();
    let across = taps_inside(0u, origin.x);
    let rows = taps_inside(1u, origin.y);
    let columns = taps_inside(2u, origin.z);
    let image = i / plane * volume(size);
    var sum = start();
    for (var a = across.x; a < across.y; a++) {
        for (var b = rows.x; b < rows.y; b++) {
            let row = image + ((origin.x + a * dilations(0u) - pads(0u)) * size.y
                + origin.y + b * dilations(1u) - pads(1u)) * size.z + origin.z - pads(2u);
            for (var c = columns.x; c < columns.y; c++) {
                let place = row + c * dilations(2u);
                sum = fold(sum, x(place), place);
            }
        }
    }
    let count = counted(0u, origin.x, across) * counted(1u, origin.y, rows) * counted(2u, origin.z, columns);
    finish(i, sum, count);
}
