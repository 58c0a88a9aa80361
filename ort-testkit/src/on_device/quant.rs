//! Quantized operators: quantized values and integer accumulators are compared exactly, floats
//! within a small tolerance.

use std::sync::Arc;

use ort_core::dtype::{CastOptions, DType, convert};
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Tensor, Tolerance, Value, compare};
use ort_core::{Result, Within, error};

use super::{cpu, numbers, outputs};

/// One node; an omitted input is `None`.
struct QuantCase {
    op: (&'static str, &'static str),
    inputs: Vec<Option<Tensor>>,
    attrs: Vec<(&'static str, Attribute)>,
    outputs: usize,
    tolerance: Tolerance,
    /// How far a quantized value may be off. Transcendental functions of a few floats differ in
    /// their last bits between devices.
    off: i64,
    name: String,
}

/// Integers are always compared exactly; with this tolerance floats are, too.
const EXACT: Tolerance = Tolerance { relative: 0.0, absolute: 0.0 };

fn case(op: &'static str, inputs: Vec<Option<Tensor>>) -> QuantCase {
    let shape =
        |input: &Option<Tensor>| input.as_ref().map(|tensor| (tensor.dtype(), tensor.shape().to_vec()));
    let name = format!("{op} of {:?}", inputs.iter().map(shape).collect::<Vec<_>>());
    QuantCase { op: ("", op), inputs, attrs: Vec::new(), outputs: 1, tolerance: EXACT, off: 0, name }
}

impl QuantCase {
    fn of_microsoft(self) -> QuantCase {
        QuantCase { op: (MICROSOFT, self.op.1), ..self }
    }

    fn with(mut self, name: &'static str, value: i64) -> QuantCase {
        self.attrs.push((name, Attribute::Int(value)));
        self.name += &format!(", {name} {value}");
        self
    }

    fn within(self, relative: f64, absolute: f64) -> QuantCase {
        QuantCase { tolerance: Tolerance { relative, absolute }, ..self }
    }

    fn check(&self, device: &Arc<dyn Device>, host: &Arc<dyn Device>) -> Result<()> {
        let mut builder = GraphBuilder::new("one node");
        let (mut ids, mut given) = (Vec::new(), Vec::<(String, Value)>::new());
        for (index, input) in self.inputs.iter().enumerate() {
            let Some(tensor) = input else {
                ids.push(None);
                continue;
            };
            let name = format!("x{index}");
            let sizes: Vec<String> = tensor.shape().iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            ids.push(Some(builder.input(&name, tensor.dtype(), &sizes)));
            given.push((name, tensor.clone().into()));
        }
        let results = builder.add(self.op, &ids, &self.attrs, self.outputs, Vec::new())?;
        let model = Model::from_graph(builder.finish(&results)?);
        let actual = outputs(&model, device.clone(), &given)?;
        let expected = outputs(&model, host.clone(), &given)?;
        assert_eq!((actual.len(), expected.len()), (self.outputs, self.outputs), "{}", self.name);
        let mut both = actual.iter().zip(&expected);
        both.try_for_each(|(actual, expected)| match self.off {
            0 => compare(actual, expected, self.tolerance),
            off => near(actual, expected, off),
        })
    }
}

/// Fails if a quantized value is off by more than `off`, or if more than 2% differ.
fn near(actual: &Value, expected: &Value, off: i64) -> Result<()> {
    let (actual, expected) = (actual.tensor()?.to_doubles()?, expected.tensor()?.to_doubles()?);
    let differs = actual.iter().zip(&expected).filter(|(a, b)| a != b);
    let far = differs.clone().find(|(a, b)| (*a - *b).abs() > off as f64);
    match far {
        Some((a, b)) => Err(error!(Fail, "a code is {a}, expected {b}")),
        // A few neighbours come from roundings, but many from a wrong formula.
        None if differs.count() * 50 > actual.len() => Err(error!(Fail, "many codes differ")),
        None => Ok(()),
    }
}

/// Pseudo-random numbers times a factor, as elements of a type.
fn floats(dtype: DType, shape: &[usize], seed: usize, factor: f32) -> Option<Tensor> {
    let count = shape.iter().product();
    of_numbers(dtype, shape, numbers(count, seed).into_iter().map(|number| number * factor))
}

/// Positive pseudo-random scales.
fn scales(dtype: DType, shape: &[usize], seed: usize) -> Option<Tensor> {
    let count = shape.iter().product();
    of_numbers(dtype, shape, numbers(count, seed).into_iter().map(|number| number.abs() * 0.2 + 0.01))
}

fn of_numbers(dtype: DType, shape: &[usize], numbers: impl Iterator<Item = f32>) -> Option<Tensor> {
    let bytes: Vec<u8> = numbers.flat_map(f32::to_le_bytes).collect();
    let count = bytes.len() / 4;
    let mut to = vec![0; dtype.byte_len(count).unwrap()];
    convert(DType::F32, &bytes, dtype, &mut to, count, CastOptions::default()).unwrap();
    Some(Tensor::from_bytes(dtype, shape, to.into()).unwrap())
}

/// Pseudo-random quantized values, including the extremes.
fn codes(dtype: DType, shape: &[usize], seed: usize) -> Option<Tensor> {
    let bytes = dtype.byte_len(shape.iter().product()).unwrap();
    let of = |(place, number): (usize, f32)| match place {
        // The extremes of int8, then that of uint8.
        3 => 0x80,
        4 => 0x7f,
        5 => 0xff,
        _ => ((number + 1.0) * 127.9) as u8,
    };
    let bytes: Vec<u8> = numbers(bytes, seed).into_iter().enumerate().map(of).collect();
    Some(Tensor::from_bytes(dtype, shape, bytes.into()).unwrap())
}

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const NARROW: [DType; 8] =
    [DType::I8, DType::U8, DType::I16, DType::U16, DType::I4, DType::U4, DType::I2, DType::U2];

/// Shapes of the scales of a tensor of [3, 7, 11], with axis and block size.
const GRANULARITIES: [(&[usize], i64, i64); 7] = [
    (&[], 1, 0),
    (&[1], 1, 0),
    (&[7], 1, 0),
    (&[11], -1, 0),
    (&[3, 4, 11], 1, 2),
    (&[3, 7, 3], 2, 4),
    (&[1, 7, 11], 0, 5),
];

fn linear() -> Vec<QuantCase> {
    let (shape, mut cases) = ([3, 7, 11], Vec::new());
    for code in NARROW.into_iter().chain([DType::I32]) {
        for (index, (of_scales, axis, block)) in GRANULARITIES.into_iter().enumerate() {
            let float = FLOATS[index % 3];
            // Only uint8 may omit its zero points, because it is the default type.
            let zeros = || codes(code, of_scales, 5).filter(|_| index % 2 == 0 || code != DType::U8);
            let with = |case: QuantCase| case.with("axis", axis).with("block_size", block);
            let inputs = vec![codes(code, &shape, 1), scales(float, of_scales, 2), zeros()];
            if code == DType::I32 {
                // int32 has no zero points other than zero.
                let inputs = vec![codes(code, &shape, 1), scales(float, of_scales, 2)];
                cases.push(with(case("DequantizeLinear", inputs)));
                let ints = of_numbers(DType::I32, &shape, numbers(231, 8).into_iter().map(|x| x * 300.0));
                cases.push(with(case("QuantizeLinear", vec![ints, scales(DType::F32, of_scales, 2)])));
                continue;
            }
            cases.push(with(case("DequantizeLinear", inputs)));
            let inputs = vec![floats(float, &shape, 3, 9.0), scales(float, of_scales, 2), zeros()];
            cases.push(with(case("QuantizeLinear", inputs)));
        }
    }
    let inputs =
        || vec![floats(DType::F16, &[70_001], 3, 9.0), scales(DType::F16, &[], 2), codes(DType::I8, &[], 3)];
    cases.push(case("QuantizeLinear", inputs()));
    cases.push(case("QuantizeLinear", inputs()).with("precision", 1));
    cases.push(case("DequantizeLinear", vec![codes(DType::U8, &[0, 4], 1), scales(DType::F32, &[], 1)]));
    // 0.5, 1.5 and -0.5 are ties, which round to even (ONNX, `QuantizeLinear`).
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.5, 1.5, -0.5, 1e30];
    let special = of_numbers(DType::F32, &[7], special.into_iter());
    cases.push(case("QuantizeLinear", vec![special, of_numbers(DType::F32, &[], [1.0].into_iter())]));
    cases
}

fn dynamic() -> Vec<QuantCase> {
    let mut cases = Vec::new();
    for count in [1, 5, 4096, 4099, 300_001] {
        // A factor of 0 makes the range of the values empty.
        for factor in [3.0, 0.0] {
            let input = floats(DType::F32, &[count], count, factor);
            cases.push(QuantCase { outputs: 3, ..case("DynamicQuantizeLinear", vec![input]) });
        }
    }
    // ONNX extends the range of the values, so that it includes 0.
    for values in [[1.0, 2.0, 3.0], [-3.0, -2.0, -1.0], [f32::NAN, 1.0, -2.0], [f32::INFINITY, 1.0, -2.0]] {
        let input = of_numbers(DType::F32, &[3], values.into_iter());
        cases.push(QuantCase { outputs: 3, ..case("DynamicQuantizeLinear", vec![input]) });
    }
    cases
}

const BYTES: [DType; 2] = [DType::I8, DType::U8];

/// Zero points of rows and columns: per tensor, or for each.
fn zeros(dtype: DType, shape: &[usize], seed: usize) -> Option<Tensor> {
    codes(dtype, shape, seed + 100)
}

fn matrices() -> Vec<QuantCase> {
    let mut cases = Vec::new();
    for (at, rows) in [1, 3, 5, 65, 130].into_iter().enumerate() {
        for columns in [1, 7, 36, 65, 132] {
            for depth in [1, 16, 67, 200] {
                let (left, right) = (BYTES[at % 2], BYTES[(at + depth) % 2]);
                let mut inputs = vec![codes(left, &[rows, depth], 1), codes(right, &[depth, columns], 2)];
                // By depth: no zero points, one for each matrix, by column, and by row and column.
                match depth {
                    1 => {}
                    16 => inputs.extend([zeros(left, &[], 3), zeros(right, &[], 4)]),
                    67 => inputs.extend([None, zeros(right, &[columns], 4)]),
                    _ => inputs.extend([zeros(left, &[rows], 3), zeros(right, &[columns], 4)]),
                }
                cases.push(case("MatMulInteger", inputs));
            }
        }
    }
    let shapes: [[&[usize]; 2]; 10] = [
        [&[300], &[300]],
        [&[17], &[17, 5]],
        [&[5, 17], &[17]],
        [&[2, 3, 5, 17], &[17, 6]],
        [&[5, 1, 17], &[5, 17, 6]],
        [&[2, 1, 4, 16], &[3, 16, 8]],
        [&[2, 70, 32], &[2, 32, 68]],
        [&[3, 0], &[0, 4]],
        [&[0, 5], &[5, 4]],
        // Enough for large tiles.
        [&[700, 80], &[80, 700]],
    ];
    for [left, right] in shapes {
        let inputs = vec![codes(DType::U8, left, 1), codes(DType::I8, right, 2)];
        let zeros = [zeros(DType::U8, &[], 3), zeros(DType::I8, &[], 4)];
        cases.push(case("MatMulInteger", [inputs, zeros.to_vec()].concat()));
    }
    cases
}

fn scaled() -> Vec<QuantCase> {
    let (u8, i8, f32) = (DType::U8, DType::I8, DType::F32);
    let mut cases = Vec::new();
    for [rows, columns, depth] in [[1, 70, 64], [33, 40, 100], [130, 66, 32]] {
        for scale in FLOATS {
            for of_columns in [&[][..], &[columns]] {
                let inputs = vec![
                    codes(u8, &[2, rows, depth], 1),
                    scales(scale, &[], 2),
                    zeros(u8, &[], 3),
                    codes(i8, &[depth, columns], 4),
                    scales(scale, of_columns, 5),
                    zeros(i8, of_columns, 6),
                    of_numbers(scale, &[], [17.0].into_iter()),
                    zeros(u8, &[], 7),
                ];
                cases.push(case("QLinearMatMul", inputs));
            }
        }
        let left = || codes(i8, &[rows, depth], 1);
        let right = || codes(u8, &[depth, columns], 4);
        let inputs =
            vec![left(), right(), scales(f32, &[], 2), scales(f32, &[columns], 3), zeros(i8, &[], 3)];
        cases.push(case("MatMulIntegerToFloat", inputs.clone()).of_microsoft());
        let more = vec![zeros(u8, &[columns], 4), floats(f32, &[columns], 5, 1.0)];
        cases.push(case("MatMulIntegerToFloat", [inputs, more].concat()).of_microsoft());
        let inputs = vec![
            floats(f32, &[3, rows, depth], 1, 2.0),
            right(),
            scales(f32, &[columns], 2),
            zeros(u8, &[columns], 3),
            floats(f32, &[columns], 4, 1.0),
        ];
        cases.push(case("DynamicQuantizeMatMul", inputs).of_microsoft());
    }
    let by_row = vec![
        codes(i8, &[6, 20], 1),
        scales(f32, &[6], 2),
        zeros(i8, &[6], 3),
        codes(i8, &[20, 9], 4),
        scales(f32, &[9], 5),
        zeros(i8, &[9], 6),
        of_numbers(f32, &[], [3.0].into_iter()),
        zeros(i8, &[], 7),
    ];
    cases.push(case("QLinearMatMul", by_row));
    cases
}

/// Image, filters, strides, pads, dilations, groups.
type Windows = (&'static [usize], &'static [usize], [i64; 2], [i64; 4], [i64; 2], i64);

const CONVS: &[Windows] = &[
    (&[2, 10, 13, 11], &[18, 10, 3, 3], [1, 1], [1; 4], [1, 1], 1),
    (&[1, 7, 23, 19], &[9, 7, 3, 3], [2, 2], [0, 1, 2, 1], [1, 1], 1),
    (&[1, 3, 45, 37], &[16, 3, 7, 7], [2, 2], [3; 4], [1, 1], 1),
    (&[1, 12, 9, 9], &[20, 12, 3, 3], [2, 1], [1, 0, 0, 2], [2, 3], 1),
    // Pointwise, with groups and with a stride.
    (&[2, 40, 7, 7], &[70, 40, 1, 1], [1, 1], [0; 4], [1, 1], 1),
    (&[2, 16, 8, 8], &[24, 8, 1, 1], [1, 1], [0; 4], [1, 1], 2),
    (&[1, 16, 15, 15], &[33, 16, 1, 1], [2, 2], [0; 4], [1, 1], 1),
    // Groups, and depthwise filters.
    (&[2, 12, 9, 10], &[15, 4, 3, 3], [1, 1], [1; 4], [1, 1], 3),
    (&[1, 20, 12, 12], &[20, 1, 3, 3], [1, 1], [1; 4], [1, 1], 20),
    (&[1, 8, 12, 12], &[16, 1, 5, 5], [2, 2], [2; 4], [1, 1], 8),
    (&[1, 70, 12, 12], &[2, 70, 3, 3], [1, 1], [1; 4], [1, 1], 1),
    (&[1, 150, 3, 3], &[70, 150, 3, 3], [1, 1], [0; 4], [1, 1], 1),
];

fn convolutions() -> Vec<QuantCase> {
    let mut cases = Vec::new();
    for (at, (image, filters, strides, pads, dilations, group)) in CONVS.iter().enumerate() {
        let with = |mut case: QuantCase| {
            let lists = [("strides", &strides[..]), ("pads", &pads[..]), ("dilations", &dilations[..])];
            case.attrs.extend(lists.map(|(name, list)| (name, Attribute::Ints(list.to_vec()))));
            case.with("group", *group)
        };
        let (x, w) = (BYTES[at % 2], BYTES[at / 2 % 2]);
        let inputs = vec![codes(x, image, 1), codes(w, filters, 2), zeros(x, &[], 3)];
        cases.push(with(case("ConvInteger", inputs[..2].to_vec())));
        cases.push(with(case("ConvInteger", inputs)));
        for of_filters in [&[][..], &filters[..1]] {
            let inputs = vec![
                codes(x, image, 1),
                scales(DType::F32, &[], 2),
                zeros(x, &[], 3),
                codes(w, filters, 4),
                scales(DType::F32, of_filters, 5),
                zeros(w, of_filters, 6),
                of_numbers(DType::F32, &[], [9.0].into_iter()),
                zeros(x, &[], 7),
                of_numbers(DType::I32, &filters[..1], numbers(filters[0], 8).into_iter().map(|x| x * 1e4)),
            ];
            cases.push(with(case("QLinearConv", inputs[..8].to_vec())));
            cases.push(with(case("QLinearConv", inputs)));
        }
    }
    let (line, space) = ([2, 5, 40], [1, 3, 7, 8, 9]);
    cases.push(case("ConvInteger", vec![codes(DType::U8, &line, 1), codes(DType::I8, &[6, 5, 3], 2)]));
    cases.push(case("ConvInteger", vec![codes(DType::U8, &space, 1), codes(DType::I8, &[4, 3, 3, 2, 3], 2)]));
    cases
}

fn of_codes() -> Vec<QuantCase> {
    let mut cases = Vec::new();
    let pairs: [[&[usize]; 2]; 7] = [
        [&[5, 7, 9], &[5, 7, 9]],
        [&[5000], &[5000]],
        [&[5, 7, 9], &[9]],
        [&[5, 1, 9], &[7, 1]],
        [&[], &[3, 4]],
        [&[3, 4], &[]],
        [&[1], &[1]],
    ];
    for dtype in BYTES {
        for (op, [a, b]) in
            ["QLinearAdd", "QLinearMul"].into_iter().flat_map(|op| pairs.map(|pair| (op, pair)))
        {
            let inputs = vec![
                codes(dtype, a, 1),
                scales(DType::F32, &[], 2),
                zeros(dtype, &[], 3),
                codes(dtype, b, 4),
                scales(DType::F32, &[], 5),
                zeros(dtype, &[], 6),
                scales(DType::F32, &[], 9),
                zeros(dtype, &[], 7).filter(|_| a.len() != 1),
            ];
            cases.push(case(op, inputs).of_microsoft());
        }
        for count in [1, 1001, 20_000] {
            let zero = |seed| zeros(dtype, &[], seed).filter(|_| count > 1);
            let inputs = vec![
                codes(dtype, &[count], 1),
                scales(DType::F32, &[], 2),
                zero(3),
                of_numbers(DType::F32, &[], [0.005].into_iter()),
                zero(4),
            ];
            cases.push(case("QLinearLeakyRelu", inputs.clone()).of_microsoft());
            cases.push(QuantCase { off: 1, ..case("QLinearSigmoid", inputs).of_microsoft() });
        }
        for sizes in [[3, 5, 8], [64, 4, 128]] {
            let mut inputs = vec![scales(DType::F32, &[], 1), zeros(dtype, &[], 2)];
            for (seed, size) in sizes.into_iter().enumerate() {
                let shape = [4, size, 6];
                inputs.extend([
                    codes(dtype, &shape, seed),
                    scales(DType::F32, &[], seed),
                    zeros(dtype, &[], seed),
                ]);
            }
            cases.push(case("QLinearConcat", inputs).of_microsoft().with("axis", 1));
        }
    }
    cases
}

/// Rows, K, N, bits and block size, with packed zero points, zero points in A's type, or none.
fn narrow_weights() -> Vec<QuantCase> {
    const SIZES: [([usize; 5], usize, bool); 16] = [
        ([1, 256, 64, 4, 32], 0, false),
        ([1, 2100, 37, 4, 32], 1, true),
        ([1, 1100, 5, 4, 16], 2, false),
        ([1, 300, 33, 4, 128], 1, false),
        ([3, 129, 65, 8, 32], 1, false),
        ([2, 1100, 9, 8, 16], 2, true),
        ([4, 50, 5, 2, 16], 0, true),
        ([1, 4200, 9, 2, 32], 1, true),
        ([1, 64, 3000, 4, 32], 1, true),
        ([5, 96, 33, 4, 16], 1, true),
        ([8, 200, 17, 2, 64], 2, false),
        ([17, 200, 130, 8, 64], 0, false),
        ([70, 300, 70, 4, 128], 1, true),
        ([66, 100, 70, 2, 16], 1, false),
        ([9, 40, 66, 4, 32], 2, true),
        ([800, 48, 900, 4, 16], 1, false),
    ];
    let mut cases = Vec::new();
    for ([rows, k, n, bits, block], zeros, bias) in SIZES {
        let blocks = k.div_ceil(block);
        for dtype in FLOATS {
            let zero_points = match zeros {
                0 => None,
                1 => codes(DType::U8, &[n, (blocks * bits).div_ceil(8)], 4),
                _ => floats(dtype, &[n, blocks], 4, 8.0),
            };
            if rows * n > 500_000 && dtype == DType::F32 {
                continue;
            }
            let inputs = vec![
                floats(dtype, &[rows, k], 1, 1.0),
                codes(DType::U8, &[n, blocks, block * bits / 8], 2),
                scales(dtype, &[n, blocks], 3),
                zero_points,
                None,
                if bias { floats(dtype, &[n], 5, 1.0) } else { None },
            ];
            let names = ["K", "N", "bits", "block_size"].into_iter().zip([k, n, bits, block]);
            let mut case = case("MatMulNBits", inputs).of_microsoft();
            for (name, value) in names {
                case = case.with(name, value as i64);
            }
            // The error grows with the square root of the number of terms, whose signs differ.
            let size = (k as f64).sqrt() * 0.2 * f64::from(1 << bits) * 0.5;
            let unit = [1e-5, 1e-3, 8e-3][at_of(dtype)];
            cases.push(case.within(unit, unit * size));
        }
    }
    cases
}

fn at_of(dtype: DType) -> usize {
    FLOATS.iter().position(|float| *float == dtype).unwrap_or(0)
}

fn tables() -> Vec<QuantCase> {
    let mut cases = Vec::new();
    // 9 is out of range: its row is zeros.
    let indices = || Some(Tensor::from_slice(&[2, 3], &[0i64, 5, -1, 3, 9, 6]).unwrap());
    for float in FLOATS {
        for zeros in [false, true] {
            for bits in [2, 4, 8] {
                let data = codes(DType::U8, &[7, 48 * bits / 8], 1);
                let zero_points = codes(DType::U8, &[7, (3 * bits).div_ceil(8)], 3).filter(|_| zeros);
                let inputs = vec![data, indices(), scales(float, &[7, 3], 2), zero_points];
                let case = case("GatherBlockQuantized", inputs).of_microsoft();
                cases.push(case.with("bits", bits as i64).with("block_size", 16));
            }
            for dtype in [DType::I4, DType::U4] {
                let zero_points = codes(dtype, &[7, 2, 3], 3).filter(|_| zeros);
                let inputs =
                    vec![codes(dtype, &[7, 20, 3], 1), indices(), scales(float, &[7, 2, 3], 2), zero_points];
                let case = case("GatherBlockQuantized", inputs).of_microsoft();
                cases.push(case.with("block_size", 16).with("quantize_axis", 1));
            }
        }
    }
    cases
}

fn check_all(device: &Arc<dyn Device>, cases: Vec<QuantCase>) -> Result<()> {
    let host = cpu()?;
    let mut problems = String::new();
    for case in &cases {
        if let Err(problem) = case.check(device, &host).within(|| case.name.clone()) {
            problems += &format!("{problem}\n");
        }
    }
    assert!(problems.is_empty(), "of {} cases:\n{problems}", cases.len());
    Ok(())
}

/// Checks `QuantizeLinear`, `DequantizeLinear` and `DynamicQuantizeLinear`.
///
/// # Errors
///
/// There is no CPU provider in the program.
pub fn codes_of_numbers(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, linear().into_iter().chain(dynamic()).collect())
}

/// Checks `MatMulInteger` and the quantized GEMMs with scales.
///
/// # Errors
///
/// As for [`codes_of_numbers`].
pub fn products_of_codes(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, matrices().into_iter().chain(scaled()).collect())
}

/// Checks `ConvInteger` and `QLinearConv`.
///
/// # Errors
///
/// As for [`codes_of_numbers`].
pub fn convolutions_of_codes(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, convolutions())
}

/// Checks the elementwise `QLinear` operators.
///
/// # Errors
///
/// As for [`codes_of_numbers`].
pub fn functions_of_codes(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, of_codes())
}

/// Checks `MatMulNBits` and `GatherBlockQuantized`.
///
/// # Errors
///
/// As for [`codes_of_numbers`].
pub fn blocks_of_codes(device: &Arc<dyn Device>) -> Result<()> {
    check_all(device, narrow_weights().into_iter().chain(tables()).collect())
}
