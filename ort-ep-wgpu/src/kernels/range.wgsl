// The rounding errors of both sums are added in the end. Products are exact up to 2^24 elements.
fn value(i: u32) -> f32 {
    let a = f32(i & 0xfffff000u) * p.high;
    let b = f32(i & 0xfffu) * p.high;
    let s = p.start + a;
    let a_of_s = s - p.start;
    let s_error = (p.start - (s - a_of_s)) + (a - a_of_s);
    let t = s + b;
    let b_of_t = t - s;
    let t_error = (s - (t - b_of_t)) + (b - b_of_t);
    return t + (s_error + t_error + f32(i) * p.low);
}
