//! Removal of clamps that the saturation of quantization makes redundant.

use crate::dtype::DType;
use crate::rewrite::Found;
use crate::rewrite::Then::Template;
use crate::rules;

rules! { "codes", Basic;
    /// Relu before QuantizeLinear is removed, if the zero point is the lowest quantized value:
    /// saturation does the same.
    relu_before_codes: "q@QuantizeLinear(Relu(x), #s, #z)" if range_is_inside
        => Template("QuantizeLinear(x, s, z; ..q)"), ["x=f32[2,40] s=f32:0.5 z=u8:0", "x=f32[2,40] s=f32:0.5 z=i8:-128"], known Types;
    /// Clip before QuantizeLinear is removed, if its bounds quantize to the ends of the integer
    /// range: saturation does the same.
    clip_before_codes: "q@QuantizeLinear(Clip(x, #low, #high), #s, #z)" if range_is_inside
        => Template("QuantizeLinear(x, s, z; ..q)"), ["x=f32[2,40] low=f32:0 high=f32:1.5 s=f32:0.005859375 z=u8:0"],
        known Types;
}

/// Whether the bounds quantize to the ends of the integer range. Saturation then does what the
/// clamp does, because rounding is monotonic. A rectifier has no upper bound.
fn range_is_inside(found: &Found<'_>) -> bool {
    let (least, greatest) = match found.dtype("z") {
        Some(DType::U8) => (0.0, 255.0),
        Some(DType::I8) => (-128.0, 127.0),
        _ => return false,
    };
    let (Some(scale), Some(zero)) = (found.scalar("s"), found.scalar("z")) else { return false };
    // In the precision of the run, so that the same values are ties.
    let code = |bound: f64| f64::from((bound as f32 / scale as f32).round_ties_even()) + zero;
    let bound = |name: &str, without: f64| match found.value(name) {
        Some(_) => found.scalar(name),
        None => Some(without),
    };
    let (Some(low), Some(high)) = (bound("low", 0.0), bound("high", f64::INFINITY)) else { return false };
    // The bounds above are rounded in float32, which other types do not follow.
    let of_floats = found.dtype("x") == Some(DType::F32) && found.dtype("s") == Some(DType::F32);
    of_floats && scale > 0.0 && code(low) <= least && code(high) >= greatest
}
