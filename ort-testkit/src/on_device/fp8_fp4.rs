//! Narrow types: 8-bit and 4-bit floats, and integers of less than eight bits. Casts, quantization
//! and dequantization.

use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::Attribute;
use ort_core::tensor::Tensor;

use super::numbers;
use super::typed::{self, Case, Given, case, run, text};

const FORMATS: [DType; 5] =
    [DType::F8E4M3FN, DType::F8E4M3FNUZ, DType::F8E5M2, DType::F8E5M2FNUZ, DType::F4E2M1];
const FEW_BITS: [DType; 4] = [DType::I4, DType::U4, DType::I2, DType::U2];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// All bit patterns of a type, and one more than a multiple of four of them.
fn codes(dtype: DType) -> Given {
    let count = 257;
    let bytes: Vec<u8> = (0..dtype.byte_len(count).unwrap()).map(|at| at as u8).collect();
    Given::Is(Tensor::from_bytes(dtype, &[count], bytes.into()).unwrap())
}

/// Numbers around those of the formats: midpoints, limits, values out of range, infinities and
/// NaNs.
fn edges() -> Vec<f32> {
    let mut values =
        vec![0.0, -0.0, f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN];
    // 2^-127 is the least number of F8E8M0, and a subnormal of float32.
    values.extend([f32::MIN_POSITIVE, 1e-45, 5.9e-39, 2.9e-39, 1.5e-39]);
    for exponent in -20..20 {
        for sixteenths in 16..32 {
            let value = f64::from(sixteenths) / 16.0 * 2f64.powi(exponent);
            // Just above a midpoint, where nothing ties.
            values.extend([value, -value, value * 1.000_001].map(|value| value as f32));
        }
    }
    values.extend(numbers(301, 3).iter().map(|value| value * 70_000.0));
    values
}

fn to(dtype: DType) -> (&'static str, Attribute) {
    ("to", Attribute::Int(i64::from(dtype.onnx_code())))
}

fn exactly(case: Case) -> Case {
    Case { tolerance: 0.0, ..case }
}

fn casts() -> Vec<Case> {
    let (edges, mut cases) = (edges(), Vec::new());
    let given = || Given::Is(Tensor::from_slice(&[edges.len()], &edges).unwrap());
    for format in FORMATS.into_iter().chain([DType::F8E8M0]) {
        for saturate in [0, 1] {
            for round in ["up", "down", "nearest"] {
                // `round_mode` is for F8E8M0 alone (ONNX, `Cast`).
                if round != "up" && format != DType::F8E8M0 {
                    continue;
                }
                let attrs = [to(format), ("saturate", Attribute::Int(saturate)), ("round_mode", text(round))];
                cases.push(exactly(case("Cast", vec![given()], &attrs)));
            }
        }
        for float in FLOATS {
            cases.push(exactly(case("Cast", vec![codes(format)], &[to(float)])));
            cases.push(exactly(case("Cast", vec![run(float, &[3, 5, 7])], &[to(format)])));
        }
    }
    for few in FEW_BITS {
        cases.push(exactly(case("Cast", vec![given()], &[to(few)])));
        for wide in [DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8, DType::I32, DType::I64] {
            cases.push(exactly(case("Cast", vec![codes(few)], &[to(wide)])));
            cases.push(exactly(case("Cast", vec![run(wide, &[3, 5, 7])], &[to(few)])));
        }
    }
    cases
}

fn quantized() -> Vec<Case> {
    let (edges, mut cases) = (edges(), Vec::new());
    let scale = |values: &[f32]| Given::Is(Tensor::from_slice(&[values.len()], values).unwrap());
    for format in FORMATS {
        cases.push(exactly(case("DequantizeLinear", vec![codes(format), scale(&[0.375])], &[])));
        let scales = [0.5, 3.0, 0.125, 1.0, 40.0, 0.01, 0.75];
        let axis = ("axis", Attribute::Int(1));
        let inputs = vec![run(format, &[3, 7, 5]), scale(&scales)];
        cases.push(exactly(case("DequantizeLinear", inputs, std::slice::from_ref(&axis))));
        for saturate in [0, 1] {
            let attrs = [
                ("output_dtype", Attribute::Int(i64::from(format.onnx_code()))),
                ("saturate", Attribute::Int(saturate)),
            ];
            let all = Given::Is(Tensor::from_slice(&[edges.len()], &edges).unwrap());
            cases.push(exactly(case("QuantizeLinear", vec![all, scale(&[0.75])], &attrs)));
            let of_axis = [&attrs[..], std::slice::from_ref(&axis)].concat();
            let inputs = vec![run(DType::F32, &[3, 7, 5]), scale(&scales)];
            cases.push(exactly(case("QuantizeLinear", inputs, &of_axis)));
        }
    }
    cases
}

/// Checks `Cast`, `QuantizeLinear` and `DequantizeLinear` of these types.
///
/// # Panics
///
/// A result differs from the CPU's, or the device does not run a case.
pub fn casts_and_quantization(device: &Arc<dyn Device>) {
    typed::check_all(device, &casts());
    typed::check_all(device, &quantized());
}
