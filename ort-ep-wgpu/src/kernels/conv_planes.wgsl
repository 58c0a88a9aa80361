// Of each filter with few channels, such as one of a depthwise convolution, LANES neighbouring positions by a workgroup.

fn group(index: u32, lane: u32) {
    let plane = volume(output3());
    let chunks = (plane + LANES - 1u) / LANES;
    let unit = index / chunks;
    let place = index % chunks * LANES + lane;
    if (place >= plane) { return; }
    let m = unit % (p.groups * p.filters);
    let size = input3();
    let origin = unflat(place, output3()) * strides3();
    let rows = taps_inside(0u, origin.x);
    let columns = taps_inside(1u, origin.y);
    let across = taps_inside(2u, origin.z);
    let image = (unit / p.filters) * p.channels * volume(size);
    var sum = num(0);
    for (var channel = 0u; channel < p.channels; channel++) {
        let of_channel = image + channel * volume(size);
        let taps = (m * p.channels + channel) * volume(kernel3());
        for (var i = rows.x; i < rows.y; i++) {
            for (var j = columns.x; j < columns.y; j++) {
                let tap = taps + (i * kernel(1u) + j) * kernel(2u);
                let row = of_channel + ((origin.x + i * dilations(0u) - pads(0u)) * size.y
                    + origin.y + j * dilations(1u) - pads(1u)) * size.z + origin.z - pads(2u);
                for (var k = across.x; k < across.y; k++) {
                    sum += pixel(row + k * dilations(2u)) * weight(tap + k, m);
                }
            }
        }
    }
    finish(unit * plane + place, m, sum);
}
