//! Scales, zero points and codes of whole tensors against those of onnxruntime.quantization 1.31.1.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, missing_docs)]

use half::f16;
use ort_core::ErrorKind;
use ort_quant::{GridOptions, LinearCodes, LinearQuantizer, QuantType};
use serde_json::Value;

const CASES: &str = include_str!("data/linear.json");

fn quant_type(name: &str) -> QuantType {
    match name {
        "int4" => QuantType::Int4,
        "uint4" => QuantType::UInt4,
        "int8" => QuantType::Int8,
        "uint8" => QuantType::UInt8,
        "int16" => QuantType::Int16,
        "uint16" => QuantType::UInt16,
        other => panic!("{other}"),
    }
}

fn integers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

/// The codes of the bytes of a tensor.
fn unpacked(bytes: &[u8], ty: QuantType, count: usize) -> Vec<i64> {
    let signed = |code: u32| {
        let shift = 32 - ty.bits();
        i64::from(if ty.is_signed() { (code << shift) as i32 >> shift } else { code as i32 })
    };
    let codes: Vec<u32> = match ty.bits() {
        4 => bytes.iter().flat_map(|byte| [u32::from(byte & 0xf), u32::from(byte >> 4)]).collect(),
        8 => bytes.iter().map(|byte| u32::from(*byte)).collect(),
        _ => bytes.chunks(2).map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]]))).collect(),
    };
    codes.into_iter().take(count).map(signed).collect()
}

#[test]
fn tensors_and_channels_are_quantized_as_by_onnxruntime() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    assert!(cases.len() > 500, "{}", cases.len());
    for case in &cases {
        let flag = |name: &str| case[name].as_bool().unwrap();
        let label = format!(
            "{} {} {:?}",
            case["name"],
            case["type"],
            (case["axis"].as_u64(), flag("symmetric"), flag("reduced"), flag("half"),)
        );
        let ty = quant_type(case["type"].as_str().unwrap());
        let grid = GridOptions { reduce_range: flag("reduced"), ..GridOptions::new(ty, flag("symmetric")) };
        let quantizer = LinearQuantizer { grid, axis: case["axis"].as_u64().map(|axis| axis as usize) };
        let data = floats(&case["data"]);
        let shape: Vec<usize> = integers(&case["shape"]).iter().map(|size| *size as usize).collect();
        let found = match flag("half") {
            true => {
                let data: Vec<f16> = data.iter().map(|value| f16::from_f32(*value)).collect();
                quantizer.quantize(&data, &shape)
            }
            false => quantizer.quantize(&data, &shape),
        };
        let found = found.unwrap();
        let (scales, points): (Vec<f32>, Vec<i64>) =
            found.grids.iter().map(|grid| (grid.scale, i64::from(grid.zero_point))).unzip();
        assert_eq!(scales, floats(&case["scales"]), "{label}");
        assert_eq!(points, integers(&case["zero_points"]), "{label}");
        assert_eq!(unpacked(&found.codes, ty, data.len()), integers(&case["codes"]), "{label}");
        let bytes = found.zero_point_bytes(&grid);
        assert_eq!(unpacked(&bytes, ty, points.len()), points, "{label}");
        assert_eq!(found.scale_bytes(false).len(), 4 * scales.len());
    }
}

/// A tensor that several threads share has the codes that one thread gives.
#[test]
fn large_tensors_have_the_codes_of_their_parts() {
    for (ty, axis) in [(QuantType::Int4, None), (QuantType::Int8, Some(0)), (QuantType::UInt16, Some(1))] {
        let quantizer = LinearQuantizer { grid: GridOptions::new(ty, false), axis };
        let shape = [3, 100_001];
        let data: Vec<f32> = (0..300_003_u32).map(|i| (i % 1009) as f32 * 0.01 - 3.0).collect();
        let LinearCodes { codes, grids, .. } = quantizer.quantize(&data, &shape).unwrap();
        let expected = data.iter().enumerate().map(|(place, value)| {
            let channel = match axis {
                Some(0) => place / shape[1],
                Some(_) => place % shape[1],
                None => 0,
            };
            i64::from(grids[channel].code(*value, ty.codes()))
        });
        assert_eq!(unpacked(&codes, ty, data.len()), expected.collect::<Vec<_>>(), "{ty:?}");
    }
}

#[test]
fn degenerate_tensors_have_defined_results() {
    let quantizer = |axis| LinearQuantizer { grid: GridOptions::new(QuantType::Int8, true), axis };
    let empty = quantizer(None).quantize::<f32>(&[], &[0, 4]).unwrap();
    assert_eq!((empty.codes.len(), empty.grids[0].scale), (0, 1.0));
    let channels = quantizer(Some(1)).quantize::<f32>(&[], &[0, 4]).unwrap();
    assert_eq!(channels.grids.len(), 4);
    assert!(quantizer(Some(0)).quantize::<f32>(&[], &[0, 4]).unwrap().grids.is_empty());
    let scalar = quantizer(None).quantize(&[-2.0_f32], &[]).unwrap();
    assert_eq!((scalar.codes, scalar.grids[0].scale), (vec![129], (2.0_f64 / 127.0) as f32));
    for weights in [[1.0, f32::NAN], [f32::INFINITY, 0.0], [0.0, f32::NEG_INFINITY]] {
        let problem = quantizer(Some(0)).quantize(&weights, &[2]).unwrap_err();
        assert_eq!(problem.kind(), ErrorKind::InvalidArgument);
        assert!(problem.to_string().contains("channel"), "{problem}");
    }
    assert!(quantizer(None).quantize(&[1.0_f32], &[2]).is_err());
    assert!(quantizer(Some(1)).quantize(&[1.0_f32], &[1]).is_err());
}
