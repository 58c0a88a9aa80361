// Each result by a workgroup, whose lanes share the products: for filters that meet the image at a few positions only.

var<workgroup> parts: array<num, LANES>;

fn group(index: u32, lane: u32) {
    let position = index % p.positions;
    let m = index / p.positions;
    let size = input3();
    let plane = volume(output3());
    let origin = vec3<i32>(unflat(position % plane, output3()) * strides3()) - vec3<i32>(pads3());
    let image = (position / plane * p.groups + m / p.filters) * p.channels * volume(size);
    let taps = volume(kernel3());
    let products = p.channels * taps;
    var sum = num(0);
    for (var i = lane; i < products; i += LANES) {
        let tap = unflat(i % taps, kernel3());
        let place = vec3<u32>(origin + vec3<i32>(tap * dilations3()));
        if (all(place < size)) {
            sum += pixel(image + i / taps * volume(size) + flat(place, size)) * weight(m * products + i, m);
        }
    }
    parts[lane] = sum;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) { parts[lane] += parts[lane + half]; }
    }
    if (lane == 0u) {
        finish((position / plane * p.groups * p.filters + m) * plane + position % plane, m, parts[0]);
    }
}
