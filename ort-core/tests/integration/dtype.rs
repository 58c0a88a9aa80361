//! Element types against the `onnx` and `ml_dtypes` packages; the scripts beside the data files
//! made them.

use ort_core::dtype::minifloat::{Format, decode_scale, encode_scale};
use ort_core::dtype::text::{format_elements, format_float, parse_elements};
use ort_core::dtype::{CastOptions, ConvertError, DType, Element, RoundMode, TypeSet, convert, packed};
use ort_core::{for_each_size, for_each_type};

fn hex(words: &[&str]) -> Vec<u32> {
    words.iter().map(|word| u32::from_str_radix(word, 16).unwrap()).collect()
}

/// The bits that compare floats: one for all NaN.
fn bits(value: f32) -> u32 {
    if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() }
}

#[test]
fn narrow_floats_agree_with_ml_dtypes() {
    let (mut values, mut scales, mut checked) = (Vec::new(), Vec::new(), 0);
    for line in include_str!("../data/minifloat.txt").lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["values", rest @ ..] => values = hex(rest),
            ["scales", rest @ ..] => scales = hex(rest),
            ["decode", name, rest @ ..] => {
                let format = Format::of(DType::from_name(name).unwrap());
                for (code, expected) in hex(rest).into_iter().enumerate() {
                    let code = code as u8;
                    let value = format.map_or_else(|| decode_scale(code), |format| format.decode(code));
                    assert_eq!(bits(value), expected, "{name} {code:#x}");
                    checked += 1;
                }
            }
            ["encode", name, saturate, rest @ ..] => {
                let format = Format::of(DType::from_name(name).unwrap()).unwrap();
                assert_eq!(rest.len(), values.len());
                for (value, expected) in values.iter().zip(hex(rest)) {
                    let value = f32::from_bits(*value);
                    let code = format.encode(value.into(), *saturate == "1");
                    assert_eq!(
                        u32::from(code),
                        expected,
                        "{value:e} ({value}) to {name}, saturate {saturate}"
                    );
                    checked += 1;
                }
            }
            ["e8m0", mode, rest @ ..] => {
                let mode = match *mode {
                    "up" => RoundMode::Up,
                    "down" => RoundMode::Down,
                    _ => RoundMode::Nearest,
                };
                for (value, expected) in scales.iter().zip(hex(rest)) {
                    let value = f32::from_bits(*value);
                    assert_eq!(
                        u32::from(encode_scale(value.into(), true, mode)),
                        expected,
                        "{value:e} {mode:?}"
                    );
                    checked += 1;
                }
            }
            _ => panic!("unknown line {line:.40}"),
        }
    }
    assert!(checked > 10_000, "only {checked} values were checked");
}

/// The table of special values in the documentation of `Cast`.
#[test]
fn special_scales() {
    let (up, nearest) = (RoundMode::Up, RoundMode::Nearest);
    let table = [
        (0.0, 0, 0xff),
        (f64::NAN, 0xff, 0xff),
        (f64::INFINITY, 0xfe, 0xff),
        (1e300, 0xfe, 0xff),
        (1e-300, 0, 0xff),
        (1.0, 127, 127),
        (1.1, 128, 127),
        (1.5, 128, 128),
    ];
    for (value, saturated, plain) in table {
        assert_eq!(encode_scale(value, true, up), saturated, "{value}");
        assert_eq!(encode_scale(value, false, nearest), plain, "{value}");
    }
}

fn bytes_of(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|index| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap())
        .collect()
}

/// Elements as their own type compares them: codes of zero and NaN may differ in sign for narrow
/// floats.
fn comparable(dtype: DType, bytes: &[u8], elements: usize) -> Vec<u64> {
    let mut floats = vec![0; elements * 8];
    if dtype.is_float() {
        convert(dtype, bytes, DType::F64, &mut floats, elements, CastOptions::default()).unwrap();
        let values = floats.chunks_exact(8).map(|bytes| f64::from_le_bytes(bytes.try_into().unwrap()));
        return values.map(|value| if value.is_nan() { u64::MAX } else { value.to_bits() }).collect();
    }
    bytes.iter().map(|byte| u64::from(*byte)).collect()
}

#[test]
fn conversions_agree_with_numpy() {
    let mut pairs = 0;
    for line in include_str!("../data/cast.txt").lines() {
        let words: Vec<&str> = line.trim_start_matches("range ").split(' ').collect();
        let [from, to, elements, source, expected] = words.as_slice() else { panic!("{line}") };
        let from = DType::from_onnx(from.parse().unwrap()).unwrap();
        let to = DType::from_onnx(to.parse().unwrap()).unwrap();
        let elements = elements.parse().unwrap();
        // One byte in front: nothing may depend on alignment.
        let source = [vec![0], bytes_of(source)].concat();
        let expected = bytes_of(expected);
        let mut result = vec![0xaa; expected.len() + 1];
        convert(from, &source[1..], to, &mut result[1..], elements, CastOptions::default()).unwrap();
        let (ours, theirs) = (comparable(to, &result[1..], elements), comparable(to, &expected, elements));
        assert_eq!(ours, theirs, "{from} to {to}: {elements} elements");
        pairs += 1;
    }
    assert!(pairs > 500, "only {pairs} pairs were checked");
}

/// The numbers are just above the middle of two floats, by less than a double can tell: the upper
/// one is nearer. Exact arithmetic gives the expected bits.
#[test]
fn large_integers_are_rounded_once() {
    let cases: [(u64, DType, DType, &[u8]); 8] = [
        ((1 << 62) + (1 << 54) + 1, DType::I64, DType::BF16, &[0x81, 0x5e]),
        ((1 << 62) + (1 << 54), DType::I64, DType::BF16, &[0x80, 0x5e]),
        (0u64.wrapping_sub((1 << 62) + (1 << 54) + 1), DType::I64, DType::BF16, &[0x81, 0xde]),
        ((1 << 63) + (1 << 55) + 1, DType::U64, DType::BF16, &[0x01, 0x5f]),
        ((1 << 62) + (1 << 38) + 1, DType::I64, DType::F32, &[0x01, 0x00, 0x80, 0x5e]),
        ((1 << 63) + (1 << 39) + 1, DType::U64, DType::F32, &[0x01, 0x00, 0x00, 0x5f]),
        // Up to the next power of two.
        ((1 << 62) + 1, DType::I64, DType::F8E8M0, &[190]),
        (u64::MAX, DType::U64, DType::F8E8M0, &[191]),
    ];
    for (number, from, to, expected) in cases {
        let mut bytes = vec![0; expected.len()];
        convert(from, &number.to_le_bytes(), to, &mut bytes, 1, CastOptions::default()).unwrap();
        assert_eq!(bytes, expected, "{number} of {from} to {to}");
    }
}

#[test]
fn blocks_and_odd_lengths() {
    for elements in [0, 1, 7, 255, 256, 257, 1001] {
        let source: Vec<u8> = (0..elements).map(|index| (index % 4) as u8).collect();
        for to in TypeSet::ALL.iter().filter(|to| *to != DType::String && *to != DType::F8E8M0) {
            if to == DType::I2 || to == DType::Bool || to == DType::U8 {
                continue;
            }
            let mut there = vec![0; to.byte_len(elements).unwrap()];
            convert(DType::U8, &source, to, &mut there, elements, CastOptions::default()).unwrap();
            if to.is_complex() {
                continue;
            }
            let mut back = vec![9; elements];
            convert(to, &there, DType::U8, &mut back, elements, CastOptions::default()).unwrap();
            assert_eq!(back, source, "{to} {elements}");
        }
    }
    let long: Vec<u8> = (0..600_u32).flat_map(|value| (value as f32).to_le_bytes()).collect();
    let mut half = vec![0; 1200];
    convert(DType::F32, &long, DType::F16, &mut half, 600, CastOptions::default()).unwrap();
    assert_eq!(half[2 * 599..], half::f16::from_f32(599.0).to_le_bytes());
}

#[test]
fn complex_numbers() {
    let source: Vec<u8> = [1.5_f32, -2.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut wide = vec![0; 16];
    convert(DType::C64, &source, DType::C128, &mut wide, 1, CastOptions::default()).unwrap();
    assert_eq!(wide, [1.5_f64, -2.0].map(f64::to_le_bytes).concat());
    let mut complex = vec![1; 16];
    convert(DType::F32, &source, DType::C64, &mut complex, 2, CastOptions::default()).unwrap();
    assert_eq!(complex, [1.5_f32, 0.0, -2.0, 0.0].map(f32::to_le_bytes).concat());
    let result = convert(DType::C64, &source, DType::F32, &mut [0; 4], 1, CastOptions::default());
    assert!(matches!(result, Err(ConvertError::Unsupported { .. })));
}

#[test]
fn wrong_lengths_are_errors() {
    let options = CastOptions::default();
    assert!(convert(DType::F32, &[0; 7], DType::F16, &mut [0; 4], 2, options).is_err());
    assert!(convert(DType::F32, &[0; 8], DType::F16, &mut [0; 5], 2, options).is_err());
    assert!(convert(DType::F32, &[], DType::F16, &mut [], usize::MAX, options).is_err());
    assert!(convert(DType::String, &[], DType::F16, &mut [], 0, options).is_err());
    assert!(format_elements(DType::F32, &[0; 3], 1).is_err());
    assert!(parse_elements(&["1"], DType::F32, &mut [0; 3], options).is_err());
}

/// The right-hand strings are what ONNX Runtime 1.31.1 prints for the same numbers.
#[test]
fn strings() {
    let table = [
        (0.478_925_47, "0.47892547"),
        (1.0, "1"),
        (-0.0, "-0"),
        (f64::from(std::f32::consts::PI), "3.1415927"),
        (f64::from(1e-7_f32), "1e-07"),
        (1e10, "1e+10"),
        (123_456_792.0, "1.2345679e+08"),
        (99_999_999.0, "99999999"),
        (100_000_000.0, "1e+08"),
        (f64::from(1e-5_f32), "9.9999997e-06"),
        (f64::from(1e-4_f32), "9.9999997e-05"),
        (16_777_216.0, "16777216"),
        (f64::from(1.17e-38_f32), "1.17e-38"),
        (f64::from(f32::from_bits(1)), "1.4012985e-45"),
        (9.999_999_999, "10"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "INF"),
        (f64::NEG_INFINITY, "-INF"),
    ];
    for (value, expected) in table {
        assert_eq!(format_float(value), expected);
    }
    assert_eq!(format_elements(DType::I4, &[0xf1, 0x08], 3), Ok(vec!["1".into(), "-1".into(), "-8".into()]));
    assert_eq!(format_elements(DType::U64, &[0xff; 8], 1), Ok(vec![u64::MAX.to_string()]));
    assert_eq!(format_elements(DType::Bool, &[1, 0], 2), Ok(vec!["1".into(), "0".into()]));

    let mut bytes = [0; 24];
    let texts = ["3.7", "+INF", "nan", "-inf", "1e5", " 4"];
    parse_elements(&texts, DType::F32, &mut bytes, CastOptions::default()).unwrap();
    let values: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values[..2], [3.7, f32::INFINITY]);
    assert!(values[2].is_nan());
    assert_eq!(values[3..], [f32::NEG_INFINITY, 1e5, 4.0]);
    let mut bytes = [0; 3];
    parse_elements(&["3.7", "-2", "300"], DType::U8, &mut bytes, CastOptions::default()).unwrap();
    assert_eq!(bytes, [3, 254, 44]);
    let mut bytes = [0; 32];
    let texts = ["1e19", "18446744073709551615", "-1.5", "1.5"];
    parse_elements(&texts, DType::U64, &mut bytes, CastOptions::default()).unwrap();
    let values: Vec<u64> = bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values, [10_000_000_000_000_000_000, u64::MAX, u64::MAX, 1]);
    assert!(parse_elements(&["Hello"], DType::U8, &mut [0], CastOptions::default()).is_err());
}

#[test]
fn types_and_sets() {
    for dtype in DType::all() {
        assert_eq!(DType::from_onnx(dtype.onnx_code()), Some(dtype));
        assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        let kinds = [dtype.is_float(), dtype.is_integer(), dtype.is_complex()];
        let is_other = matches!(dtype, DType::Bool | DType::String);
        assert_eq!(kinds.iter().filter(|kind| **kind).count(), usize::from(!is_other), "{dtype}");
    }
    assert_eq!((DType::from_onnx(0), DType::from_onnx(29), DType::from_onnx(-1)), (None, None, None));
    assert_eq!(TypeSet::ALL.len(), 28);
    assert_eq!(TypeSet::FLOATS.to_string(), "float, float16, double, bfloat16");
    assert_eq!(DType::F6E2M3.byte_len(5), Some(4));
    assert_eq!(DType::I2.byte_len(usize::MAX), Some(usize::MAX / 4 + 1));
    for dtype in TypeSet::NUMERIC.iter() {
        let found = for_each_type!(dtype in NUMERIC, T => Some((T::DTYPE, size_of::<T>())), else => None);
        assert_eq!(found, dtype.byte_size().map(|size| (dtype, size)));
        assert_eq!(
            dtype.byte_size(),
            for_each_size!(dtype.byte_size().unwrap(), T => Some(size_of::<T>()), else => None)
        );
    }
}

#[test]
fn packing_reads_back() {
    for bits in [2, 4, 6, 8] {
        for count in 0..40_usize {
            let codes: Vec<u8> = (0..count).map(|index| (index * 37 % (1 << bits)) as u8).collect();
            let mut bytes = vec![0; (count * bits as usize).div_ceil(8)];
            packed::pack(&codes, bits, &mut bytes);
            let mut back = vec![0; count];
            packed::unpack(&bytes, bits, &mut back);
            assert_eq!(back, codes);
        }
    }
    let mut signed = [0; 4];
    packed::unpack_signed(&[0x8f, 0x17], 4, &mut signed);
    assert_eq!(signed, [-1, -8, 7, 1]);
}
