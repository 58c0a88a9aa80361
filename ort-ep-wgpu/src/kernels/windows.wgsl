// The windows of convolutions and pools over three axes; those that an image does not have are of size 1.

fn input3() -> vec3<u32> { return vec3<u32>(input(0u), input(1u), input(2u)); }
fn output3() -> vec3<u32> { return vec3<u32>(output(0u), output(1u), output(2u)); }
fn kernel3() -> vec3<u32> { return vec3<u32>(kernel(0u), kernel(1u), kernel(2u)); }
fn strides3() -> vec3<u32> { return vec3<u32>(strides(0u), strides(1u), strides(2u)); }
fn dilations3() -> vec3<u32> { return vec3<u32>(dilations(0u), dilations(1u), dilations(2u)); }
fn pads3() -> vec3<u32> { return vec3<u32>(pads(0u), pads(1u), pads(2u)); }

// A place by its coordinates and back, the last axis fastest.
fn flat(at: vec3<u32>, size: vec3<u32>) -> u32 { return (at.x * size.y + at.y) * size.z + at.z; }
fn unflat(at: u32, size: vec3<u32>) -> vec3<u32> {
    let row = at / size.z;
    return vec3<u32>(row / size.y, row % size.y, at % size.z);
}

fn volume(size: vec3<u32>) -> u32 { return size.x * size.y * size.z; }

// The taps of a window along an axis that meet the image, and those before: x until y.
fn taps_inside(axis: u32, origin: u32) -> vec2<u32> {
    let before = pads(axis);
    let behind = before + input(axis);
    let step = dilations(axis);
    let first = (max(before, origin) - origin + step - 1u) / step;
    let end = (max(behind, origin) - origin + step - 1u) / step;
    return min(vec2<u32>(first, end), vec2<u32>(kernel(axis)));
}
