// A workgroup sums FOURS * 4 filters at POSITIONS * PLACES positions: a lane has PLACES of them, POSITIONS apart. The products run over
// the taps of the kernel and, within a tap, over the channels, so that what a lane reads moves by one plane from product to product;
// the filters come through the memory of the workgroup, for STEPS products at a time. The products are in SLICES, which other lanes sum.
// m counts filters. A line with # stands once for each place of a lane (p), each four filters (f) and each of ABREAST products (k),
// whose number divides the channels.

const FILTERS: u32 = FOURS * 4u;
const NOWHERE: u32 = 0xffffffffu;
const POSITIONS: u32 = LANES / SLICES;
var<workgroup> tile: array<vec4<num>, SLICES * STEPS * FOURS>;
var<workgroup> parts: array<vec4<num>, LANES>;

// The taps that a workgroup sums over, and where they lie: tap t of the position o is the tap first + step * t of the kernel, and meets
// the image at o * scale + shift + delta * t. Of a transposed convolution, the positions of one phase, a stride apart, have their taps
// in common.
struct Taps {
    count: vec3<u32>,
    first: vec3<u32>,
    step: vec3<u32>,
    delta: vec3<i32>,
    shift: vec3<i32>,
    scale: vec3<i32>,
    spread: vec3<u32>,
    phase: vec3<u32>,
}

fn taps_of(phase: u32) -> Taps {
    var taps: Taps;
    if (TRANSPOSED == 0u) {
        taps.count = kernel3();
        taps.step = vec3<u32>(1u);
        taps.delta = vec3<i32>(dilations3());
        taps.shift = -vec3<i32>(pads3());
        taps.scale = vec3<i32>(strides3());
        taps.spread = vec3<u32>(1u);
        return taps;
    }
    taps.phase = unflat(phase, strides3());
    taps.scale = vec3<i32>(1);
    taps.spread = strides3();
    for (var axis = 0u; axis < 3u; axis++) {
        let stride = strides(axis);
        let step = steps(axis);
        let start = taps.phase[axis] + pads(axis);
        var first = 0u;
        while (first < step && first < kernel(axis) && (first * dilations(axis)) % stride != start % stride) { first++; }
        taps.first[axis] = first;
        taps.step[axis] = step;
        taps.delta[axis] = -i32(step * dilations(axis) / stride);
        if (first < step && first < kernel(axis)) {
            taps.count[axis] = (kernel(axis) - first + step - 1u) / step;
            taps.shift[axis] = (i32(start) - i32(first * dilations(axis))) / i32(stride);
        }
    }
    return taps;
}

fn filter_values(own: u32, m: u32, product: u32, products: u32, taps: Taps) -> vec4<num> {
    if (SLICES > 1u && product >= products) { return vec4<num>(); }
    let tap = flat(taps.first + taps.step * unflat(product / p.channels, taps.count), kernel3());
    let channel = product % p.channels;
    let kernel = volume(kernel3());
    var values = vec4<num>();
    for (var i = 0u; i < 4u && m + i < p.filters; i++) {
        let whole = own * p.filters + m + i;
        var at = (whole * p.channels + channel) * kernel + tap;
        if (TRANSPOSED == 1u) { at = ((own * p.channels + channel) * p.filters + m + i) * kernel + tap; }
        values[i] = weight(at, whole);
    }
    return values;
}

// Where the result of the first filter of a group at a position goes.
fn result_of(position: u32, own: u32, taps: Taps) -> u32 {
    if (position >= p.positions) { return NOWHERE; }
    let grid = (output3() + taps.spread - 1u) / taps.spread;
    let at = unflat(position % volume(grid), grid) * taps.spread + taps.phase;
    if (any(at >= output3())) { return NOWHERE; }
    let image = position / volume(grid);
    return (image * p.groups + own) * p.filters * volume(output3()) + flat(at, output3());
}

fn origin_of(position: u32, taps: Taps) -> vec3<i32> {
    let grid = (output3() + taps.spread - 1u) / taps.spread;
    return vec3<i32>(unflat(position % volume(grid), grid)) * taps.scale + taps.shift;
}

fn image_of(position: u32, own: u32, taps: Taps) -> u32 {
    let grid = (output3() + taps.spread - 1u) / taps.spread;
    return (position / volume(grid) * p.groups + own) * p.channels * volume(input3());
}

fn put(place: u32, own: u32, m: u32, sums: vec4<num>) {
    let plane = volume(output3());
    for (var i = 0u; i < 4u && m + i < p.filters && place != NOWHERE; i++) {
        finish(place + (m + i) * plane, own * p.filters + m + i, sums[i]);
    }
}

fn group(index: u32, lane: u32) {
    let filter_tiles = (p.filters + FILTERS - 1u) / FILTERS;
    let m = index % filter_tiles * FILTERS;
    let part = index / filter_tiles;
    let own = part / p.position_tiles % p.groups;
    let taps = taps_of(part / p.position_tiles / p.groups);
    let products = volume(taps.count) * p.channels;
    let size = input3();
    let plane = volume(size);
    var slice = 0u;
    if (SLICES > 1u) { slice = lane / POSITIONS; }
    let share = (products + SLICES * ABREAST - 1u) / (SLICES * ABREAST) * ABREAST;
    let position = part % p.position_tiles * (POSITIONS * PLACES) + lane - slice * POSITIONS;
    let n#p = position + #pu * POSITIONS;
    let origin#p = origin_of(min(n#p, p.positions - 1u), taps);
    let image#p = image_of(min(n#p, p.positions - 1u), own, taps);
    var inside#p = false;
    var at#p = 0u;
    var sum#p_#f = vec4<num>();
    var tap = 0u;
    var channel = 0u;
    if (SLICES > 1u && products > 0u) {
        tap = slice * share / p.channels;
        channel = slice * share % p.channels;
    }
    for (var start = 0u; start < share; start += STEPS) {
        let end = min(STEPS, share - start);
        workgroupBarrier();
        for (var i = lane; i < SLICES * end * FOURS; i += LANES) {
            let product = i / FOURS;
            let of_slice = product / end;
            let k = product % end;
            tile[(of_slice * STEPS + k) * FOURS + i % FOURS] =
                filter_values(own, m + i % FOURS * 4u, of_slice * share + start + k, products, taps);
        }
        workgroupBarrier();
        for (var k = 0u; k < end; k += ABREAST) {
            if (channel == 0u || (SLICES > 1u && start + k == 0u)) {
                let moved = taps.delta * vec3<i32>(unflat(tap, taps.count));
                let place#p = vec3<u32>(origin#p + moved);
                inside#p = tap < volume(taps.count) && all(place#p < size);
                at#p = select(0u, image#p + channel * plane + flat(place#p, size), inside#p);
            }
            let x#p_#k = select(num(0), pixel(at#p + #ku * plane), inside#p);
            let w#f_#k = tile[(slice * STEPS + k + #ku) * FOURS + #fu];
            sum#p_#f += x#p_#k * w#f_#k;
            at#p += ABREAST * plane;
            channel += ABREAST;
            if (channel == p.channels) {
                channel = 0u;
                tap++;
            }
        }
    }
    let to#p = result_of(n#p, own, taps);
    sum#p_#f = sliced(sum#p_#f, lane);
    if (slice == 0u) { put(to#p, own, m + #fu * 4u, sum#p_#f); }
}

// The sum over all slices, for the lanes of the first.
fn sliced(part: vec4<num>, lane: u32) -> vec4<num> {
    if (SLICES == 1u) { return part; }
    workgroupBarrier();
    parts[lane] = part;
    workgroupBarrier();
    var sum = part;
    for (var at = lane + POSITIONS; at < LANES; at += POSITIONS) { sum += parts[at]; }
    return sum;
}
