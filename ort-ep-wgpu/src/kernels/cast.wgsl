// Towards zero; what does not fit becomes the smallest number.
fn truncated(x: f32) -> i32 {
    if (is_nan(x) || x < -2147483648.0 || x >= 2147483648.0) {
        return i32(-2147483648);
    }
    return i32(x);
}

// The lower bits of the 64-bit integer, towards zero; what does not fit has none.
fn truncated_wide(x: f32) -> u32 {
    let size = trunc(abs(x));
    if (is_nan(x) || size >= 9223372036854775808.0) {
        return 0u;
    }
    let bits = u32(size - floor(size / 4294967296.0) * 4294967296.0);
    return select(bits, 0u - bits, x < 0.0);
}

// An integer as a float whose last bit says whether others were lost.
fn rounded_to_odd(size: u32, negative: bool) -> f32 {
    let lost = size >= 0x1000000u && (size & 0xffu) != 0u;
    let kept = f32(select(size, (size & 0xffffff00u) | 0x100u, lost));
    return select(kept, -kept, negative);
}

