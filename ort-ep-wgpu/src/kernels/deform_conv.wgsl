// What each tap of the kernel meets at each position, between the pixels around the place that its offset moves it to.

fn between(image: u32, at: vec3<f32>) -> f32 {
    let below = floor(at);
    let share = at - below;
    var sum = 0.0;
    for (var corner = 0u; corner < 8u; corner++) {
        let side = vec3<u32>(corner & 1u, (corner >> 1u) & 1u, corner >> 2u);
        let shares = select(1.0 - share, share, side == vec3<u32>(1u));
        let place = below + vec3<f32>(side);
        if (all(shares > vec3<f32>(0.0)) && all(place >= vec3<f32>(0.0)) && all(place < vec3<f32>(input3()))) {
            sum += shares.x * shares.y * shares.z * x(image + flat(vec3<u32>(place), input3()));
        }
    }
    return sum;
}

fn element(i: u32) {
    let pixels = volume(output3());
    let taps = volume(kernel3());
    let pixel = i % pixels;
    let tap = i / pixels % taps;
    let unit = i / pixels / taps;
    let own = unit / p.channels * p.offset_groups + unit % p.channels / (p.channels / p.offset_groups);
    let place = unflat(pixel, output3()) * strides3() + unflat(tap, kernel3()) * dilations3();
    var at = vec3<f32>(vec3<i32>(place) - vec3<i32>(pads3()));
    for (var axis = 0u; axis < RANK; axis++) {
        at[axis + 3u - RANK] += offset(((own * taps + tap) * RANK + axis) * pixels + pixel);
    }
    set_columns(i, between(unit * volume(input3()), at) * factor((own * taps + tap) * pixels + pixel));
}
