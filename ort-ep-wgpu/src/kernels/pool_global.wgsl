// Each plane by a workgroup. The pool declares start(), fold(sum, value, place), merge(a, b) and finish(i, sum, count).

var<workgroup> parts: array<Sum, LANES>;

fn group(index: u32, lane: u32) {
    var sum = start();
    let first = index * p.plane;
    for (var i = lane; i < p.plane; i += LANES) { sum = fold(sum, x(first + i), first + i); }
    parts[lane] = sum;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if (lane < half) { parts[lane] = merge(parts[lane], parts[lane + half]); }
    }
    if (lane == 0u) { finish(index, parts[0], p.plane); }
}
