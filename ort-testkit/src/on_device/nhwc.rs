//! NHWC convolutions and pools. The results must equal those of the standard's NCHW operators on
//! the CPU. Each check returns the kernels that computed the results.

use std::collections::BTreeSet;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder, ValueId};
use ort_core::rewrite::Level;
use ort_core::session::{Model, Profile, RunOptions, Session};
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::{Tensor, Value};
use ort_core::{Result, error};

use super::windows::{CONVS, POOLS, Windows, channels_last, of, result_of};
use super::{assert_close, cpu, mma, numbers, outputs};

/// Further windows: large tiles of whole vectors of channels, split accumulation, and windows that
/// are not adjacent.
const VECTORS: &[Windows] = &[
    Windows { pads: &[1; 4], ..of(&[2, 16, 17, 19], &[130, 16, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 16, 11, 12], &[264, 16, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 80, 20, 20], &[250, 80, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 40, 14, 14], &[60, 40, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 192, 4, 5], &[16, 192, 3, 3]) },
    Windows { pads: &[2, 0, 1, 1], dilations: &[2, 1], ..of(&[3, 24, 11, 13], &[72, 24, 3, 2]) },
    Windows { strides: &[2, 2], group: 2, pads: &[1; 4], ..of(&[1, 32, 12, 10], &[40, 16, 3, 3]) },
];

/// Few channels, in tiles of 64 and 128 results and of up to 32 and 64 filters: windows that start
/// at odd elements, with odd strides in elements, and one spatial axis.
const FEW_CHANNELS: &[Windows] = &[
    Windows { strides: &[2, 2], pads: &[3; 4], ..of(&[2, 3, 45, 37], &[64, 3, 7, 7]) },
    Windows { strides: &[2, 2], pads: &[3; 4], ..of(&[3, 3, 68, 66], &[40, 3, 7, 7]) },
    Windows { pads: &[1; 4], ..of(&[1, 3, 21, 40], &[33, 3, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[3, 3, 40, 36], &[20, 3, 3, 3]) },
    Windows { pads: &[2, 1, 2, 3], ..of(&[2, 1, 19, 35], &[8, 1, 5, 5]) },
    Windows { strides: &[1, 3], pads: &[1; 4], ..of(&[1, 4, 9, 70], &[130, 4, 3, 3]) },
    Windows { strides: &[3], pads: &[1, 2], ..of(&[2, 5, 233], &[12, 5, 4]) },
    of(&[1, 9, 12, 13], &[24, 9, 3, 2]),
    // More taps than the bit masks of tensor-core kernels hold, in a case without few channels.
    of(&[1, 8, 3, 40], &[4, 8, 2, 30]),
];

/// An NHWC node, and the standard's NCHW operator of the same images.
struct Node<'a> {
    dtype: DType,
    op: (&'a str, &'a str),
    standard: (&'a str, &'a str),
    /// The NCHW shapes of its inputs; those of one axis are not images.
    shapes: &'a [&'a [usize]],
    attrs: &'a [(&'a str, Attribute)],
}

fn transposed(builder: &mut GraphBuilder, value: ValueId, rank: usize, to_front: bool) -> Result<ValueId> {
    let mut order: Vec<i64> = (0..rank as i64).collect();
    // [0, last, 1, ...] moves the channels to axis 1, and the inverse moves them back.
    if to_front {
        order[1..].rotate_right(1);
    } else {
        order[1..].rotate_left(1);
    }
    builder.node("Transpose", &[value], &[("perm", Attribute::Ints(order))])
}

fn cast(builder: &mut GraphBuilder, value: ValueId, to: DType) -> Result<ValueId> {
    builder.node("Cast", &[value], &[("to", Attribute::Int(i64::from(to.onnx_code())))])
}

impl Node<'_> {
    /// Builds the node itself, or the standard's between transposes. Both take the same inputs and
    /// return a float32 result; the standard's computes in float32.
    fn model(&self, is_standard: bool) -> Result<Model> {
        let mut builder = GraphBuilder::new("pixels");
        let mut ids = Vec::new();
        for (index, shape) in self.shapes.iter().enumerate() {
            let sizes: Vec<String> = channels_last(shape).iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let mut input = builder.input(&format!("x{index}"), DType::F32, &sizes);
            if self.dtype != DType::F32 {
                input = cast(&mut builder, input, self.dtype)?;
            }
            if is_standard {
                input = cast(&mut builder, input, DType::F32)?;
            }
            if is_standard && shape.len() > 2 {
                input = transposed(&mut builder, input, shape.len(), true)?;
            }
            ids.push(Some(input));
        }
        let op = if is_standard { self.standard } else { self.op };
        let mut result = builder.add(op, &ids, self.attrs, 1, Vec::new())?[0];
        result = match is_standard {
            true => transposed(&mut builder, result, self.shapes[0].len(), false)?,
            false => cast(&mut builder, result, DType::F32)?,
        };
        Ok(Model::from_graph(builder.finish(&[result])?))
    }

    /// Returns the result on a device that has a kernel for the node, and the kernel's name.
    fn run(&self, device: &Arc<dyn Device>, inputs: &[(String, Value)]) -> Result<(Value, String)> {
        // Without rewrites, so that the node itself runs.
        let builder = Session::builder(&self.model(false)?).opt_level(Level::Disabled);
        let session = builder.device(device.clone()).build()?;
        let given: Vec<(&str, Value)> =
            inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let profile = Profile::new();
        let results =
            session.run_with(&given, &RunOptions { profile: Some(&profile), ..RunOptions::default() })?;
        // Without a kernel the profile would list the operators of its decomposition.
        let event = profile.events().into_iter().find(|event| event.op == self.op.1);
        let kernels = event.and_then(|event| event.kernels);
        let kernels = kernels.ok_or_else(|| error!(Fail, "no kernel of {} ran", self.op.1))?;
        Ok((results[0].1.clone(), kernels))
    }

    fn check(&self, device: &Arc<dyn Device>) -> Result<String> {
        let (factor, tolerance) = match self.dtype {
            DType::F32 => (1.0, 1e-5),
            // Significands of 11 and of 8 bits, to which accumulators may be rounded before the
            // epilogue.
            DType::F16 => (1.0, 1.2e-3),
            DType::BF16 => (1.0, 9e-3),
            // Two-digit integers, which pools return exactly.
            _ => (99.0, 0.0),
        };
        let mut inputs = Vec::<(String, Value)>::new();
        for (index, shape) in self.shapes.iter().enumerate() {
            let mut values = numbers(shape.iter().product(), index);
            let least = if self.dtype == DType::U8 { 0.0 } else { -factor };
            values.iter_mut().for_each(|value| *value = (*value * factor).max(least));
            inputs.push((format!("x{index}"), Tensor::from_slice(&channels_last(shape), &values)?.into()));
        }
        let (actual, kernels) = self.run(device, &inputs)?;
        let expected = outputs(&self.model(true)?, cpu()?, &inputs)?;
        let (op, shapes) = (self.op.1, self.shapes);
        let what = format!("{op} of {}, {shapes:?} with the channels first, {:?}", self.dtype, self.attrs);
        assert_close(&actual, &expected[0], tolerance, &what)?;
        Ok(kernels)
    }
}

fn convolution(
    device: &Arc<dyn Device>,
    case: &Windows,
    (dtype, inputs): (DType, usize),
    activation: Option<(&str, &[f32])>,
) -> Result<String> {
    let mut attrs = case.with_group();
    if let Some((name, parameters)) = activation {
        attrs.push(("activation", Attribute::String(name.to_owned())));
        attrs.push(("activation_params", Attribute::Floats(parameters.to_vec())));
    }
    let (bias, result) = ([case.kernel[0]], result_of(case));
    let shapes: [&[usize]; 4] = [case.image, case.kernel, &bias, &result];
    let (op, standard) = ((RUNTIME, "NhwcConv"), (MICROSOFT, "FusedConv"));
    Node { dtype, op, standard, shapes: &shapes[..inputs], attrs: &attrs }.check(device)
}

/// Checks `NhwcConv` of float32: without an epilogue, and with bias, addend and activations.
///
/// # Errors
///
/// The device has no kernel for a case, or there is no CPU provider in the program.
pub fn convolutions(device: &Arc<dyn Device>) -> Result<BTreeSet<String>> {
    let mut kernels = BTreeSet::new();
    for case in CONVS {
        kernels.insert(convolution(device, case, (DType::F32, 2), None)?);
        kernels.insert(convolution(device, case, (DType::F32, 4), Some(("Relu", &[])))?);
        kernels.insert(convolution(device, case, (DType::F32, 4), Some(("LeakyRelu", &[0.25])))?);
    }
    Ok(kernels)
}

/// Checks `NhwcConv` of float16 and bfloat16 with bias, addend and activation, also at the edge
/// cases of tensor-core tiles.
///
/// # Errors
///
/// The device has no kernel for a case, or there is no CPU provider in the program.
pub fn convolutions_of_halves(device: &Arc<dyn Device>) -> Result<BTreeSet<String>> {
    let mut kernels = BTreeSet::new();
    for dtype in [DType::F16, DType::BF16] {
        for case in mma::convolutions().chain(VECTORS).chain(FEW_CHANNELS) {
            kernels.insert(convolution(device, case, (dtype, 4), Some(("Relu", &[])))?);
        }
    }
    Ok(kernels)
}

/// Rows, columns and depth of GEMMs: around tiles of 64, 128 and 256, and few rows with a large
/// depth. The depth is a multiple of the vector width, the number of columns is or is not.
const PRODUCTS: &[[usize; 3]] = &[
    [130, 264, 200],
    [257, 520, 72],
    [128, 128, 64],
    [300, 136, 328],
    [65, 72, 136],
    [70, 200, 64],
    [130, 263, 200],
    [257, 521, 72],
    [385, 250, 712],
    [200, 60, 328],
    [390, 72, 136],
    [67, 75, 136],
    [9, 64, 1704],
    [5, 8, 8],
];

/// GEMMs that keep four multiprocessors busy with large tiles: one tile for each, several, and more
/// than sixteen tile rows.
const LARGE_PRODUCTS: &[[usize; 3]] = &[[250, 504, 136], [250, 376, 72], [900, 760, 200], [2200, 376, 8]];

/// Checks GEMMs of float16 and bfloat16 with bias, residual and activation, with B in both layouts.
///
/// # Errors
///
/// The device has no kernel for a case, or there is no CPU provider in the program.
pub fn products_of_halves(device: &Arc<dyn Device>) -> Result<BTreeSet<String>> {
    let (mut kernels, op) = (BTreeSet::new(), (RUNTIME, "FusedMatMul"));
    for dtype in [DType::F16, DType::BF16] {
        for [rows, columns, depth] in PRODUCTS.iter().chain(LARGE_PRODUCTS) {
            for (transposed, activation) in [(0, "Relu"), (1, "FastGelu")] {
                let right = if transposed == 1 { [*columns, *depth] } else { [*depth, *columns] };
                let shapes: [&[usize]; 4] = [&[*rows, *depth], &right, &[*columns], &[*rows, *columns]];
                let attrs = [
                    ("transB", Attribute::Int(transposed)),
                    ("activation", Attribute::String(activation.to_owned())),
                ];
                kernels
                    .insert(Node { dtype, op, standard: op, shapes: &shapes, attrs: &attrs }.check(device)?);
            }
        }
    }
    Ok(kernels)
}

/// Checks that an infinity and a NaN reach the results of the windows that contain them, and no
/// others.
///
/// # Errors
///
/// The device has no kernel for a case, or there is no CPU provider in the program.
pub fn elements_without_end(device: &Arc<dyn Device>) -> Result<()> {
    let attrs = |kernel: i64| {
        let of = |name, list: &[i64]| (name, Attribute::Ints(list.to_vec()));
        [of("strides", &[2, 2]), of("pads", &[1; 4]), of("kernel_shape", &[kernel; 2])]
    };
    let conv: [&[usize]; 2] = [&[1, 3, 17, 23], &[16, 3, 3, 3]];
    let pool: [&[usize]; 1] = [&[1, 16, 17, 23]];
    for (op, standard, shapes) in
        [("NhwcConv", "Conv", conv.as_slice()), ("NhwcMaxPool", "MaxPool", pool.as_slice())]
    {
        for (dtype, kernel) in [DType::F16, DType::BF16, DType::F32].map(|dtype| (dtype, 3)) {
            let (op, standard, attrs) = ((RUNTIME, op), ("", standard), attrs(kernel));
            let node = Node { dtype, op, standard, shapes, attrs: &attrs };
            let mut inputs = Vec::<(String, Value)>::new();
            for (index, shape) in shapes.iter().enumerate() {
                let mut values = numbers(shape.iter().product(), index);
                if index == 0 {
                    let places = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
                    values.iter_mut().skip(100).step_by(350).zip(places).for_each(|(to, x)| *to = x);
                }
                inputs
                    .push((format!("x{index}"), Tensor::from_slice(&channels_last(shape), &values)?.into()));
            }
            let (actual, kernels) = node.run(device, &inputs)?;
            let expected = outputs(&node.model(true)?, cpu()?, &inputs)?;
            let [actual, expected] =
                [&actual, &expected[0]].map(|value| value.tensor().and_then(|tensor| tensor.to_vec::<f32>()));
            let (actual, expected) = (actual?, expected?);
            for (index, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                let is_same = if expected.is_finite() {
                    (actual - expected).abs() < 0.05
                } else {
                    // Infinities must have the same sign. The bits of a NaN do not matter.
                    actual.total_cmp(expected).is_eq() || actual.is_nan() && expected.is_nan()
                };
                assert!(is_same, "{kernels}: element {index} is {actual}, expected {expected}");
            }
        }
    }
    Ok(())
}

/// Checks `NhwcMaxPool` of floats and 8-bit integers, and `NhwcAveragePool`.
///
/// # Errors
///
/// The device has no kernel for a case, or there is no CPU provider in the program.
pub fn pools(device: &Arc<dyn Device>) -> Result<BTreeSet<String>> {
    let mut kernels = BTreeSet::new();
    let floats = [DType::F32, DType::F16, DType::BF16];
    for case in POOLS {
        let mut attrs = case.attributes();
        let kernel = case.kernel.iter().map(|size| *size as i64).collect();
        attrs.push(("kernel_shape", Attribute::Ints(kernel)));
        // ONNX does not allow `pads` beside `auto_pad`.
        let without_pads: Vec<_> = attrs.iter().filter(|(name, _)| *name != "pads").cloned().collect();
        let with = |attrs: &[(&'static str, Attribute)], name, value| {
            attrs.iter().cloned().chain([(name, value)]).collect::<Vec<_>>()
        };
        let mut all = vec![with(&without_pads, "auto_pad", Attribute::String("SAME_LOWER".to_owned()))];
        all.extend([0, 1].map(|ceil| with(&attrs, "ceil_mode", Attribute::Int(ceil))));
        for attrs in all {
            for dtype in floats.into_iter().chain([DType::I8, DType::U8]) {
                let domain = if floats.contains(&dtype) { RUNTIME } else { MICROSOFT };
                let (op, standard) = ((domain, "NhwcMaxPool"), ("", "MaxPool"));
                kernels.insert(
                    Node { dtype, op, standard, shapes: &[case.image], attrs: &attrs }.check(device)?,
                );
            }
            for (dtype, flag) in floats.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 1)]) {
                let attrs = with(&attrs, "count_include_pad", Attribute::Int(flag));
                let (op, standard) = ((RUNTIME, "NhwcAveragePool"), ("", "AveragePool"));
                kernels.insert(
                    Node { dtype, op, standard, shapes: &[case.image], attrs: &attrs }.check(device)?,
                );
            }
        }
    }
    Ok(kernels)
}

/// Builds a network of this type, between casts from and to float32: convolutions of all kinds,
/// pools, a residual, squeeze-and-excitation, concatenation and a global mean.
fn network(dtype: DType) -> Result<Model> {
    let mut net = Net { builder: GraphBuilder::new("network"), dtype, weights: 0 };
    let x = net.builder.input("x", DType::F32, &["n", "3", "20", "19"]);
    let x = cast(&mut net.builder, x, dtype)?;
    let stem = net.conv(x, &[16, 3, 3, 3], 2, 1)?;
    let stem = net.builder.node("HardSwish", &[stem], &[])?;
    let pooled = net.pool("MaxPool", stem)?;
    let depthwise = net.conv(pooled, &[16, 1, 3, 3], 1, 16)?;
    let depthwise = net.builder.node("Relu", &[depthwise], &[])?;
    let mean = net.builder.node("GlobalAveragePool", &[depthwise], &[])?;
    let squeezed = net.conv(mean, &[8, 16, 1, 1], 1, 1)?;
    let squeezed = net.builder.node("Relu", &[squeezed], &[])?;
    let factor = net.conv(squeezed, &[16, 8, 1, 1], 1, 1)?;
    let factor = net.builder.node("Sigmoid", &[factor], &[])?;
    let scaled = net.builder.node("Mul", &[depthwise, factor], &[])?;
    let projected = net.conv(scaled, &[16, 16, 1, 1], 1, 1)?;
    let sum = net.builder.node("Add", &[projected, pooled], &[])?;
    let sum = net.builder.node("Relu", &[sum], &[])?;
    let averaged = net.pool("AveragePool", sum)?;
    let grouped = net.conv(averaged, &[40, 8, 3, 3], 1, 2)?;
    let both = net.builder.node("Concat", &[grouped, averaged], &[("axis", Attribute::Int(1))])?;
    let last = net.conv(both, &[72, 56, 3, 3], 1, 1)?;
    let mean = net.builder.node("GlobalAveragePool", &[last], &[])?;
    let flat = net.builder.node("Flatten", &[mean], &[])?;
    let outputs = [cast(&mut net.builder, flat, DType::F32)?, cast(&mut net.builder, sum, DType::F32)?];
    Ok(Model::from_graph(net.builder.finish(&outputs)?))
}

struct Net {
    builder: GraphBuilder,
    dtype: DType,
    weights: usize,
}

impl Net {
    /// A convolution with filters of this shape and a bias, padded by half the filter.
    fn conv(&mut self, x: ValueId, filters: &[usize], stride: i64, group: i64) -> Result<ValueId> {
        let mut inputs = vec![x];
        for shape in [filters, &filters[..1]] {
            self.weights += 1;
            let terms = filters[1..].iter().product::<usize>() as f32;
            // Divided by the root of the number of terms, so that activations stay of the order of
            // 1.
            let values = numbers(shape.iter().product(), self.weights).into_iter().map(|x| x / terms.sqrt());
            let weight = self.builder.constant(Tensor::from_slice(shape, &values.collect::<Vec<f32>>())?);
            inputs.push(cast(&mut self.builder, weight, self.dtype)?);
        }
        let pads = filters[2..].iter().map(|size| *size as i64 / 2).collect::<Vec<i64>>().repeat(2);
        let attrs = [
            ("pads", Attribute::Ints(pads)),
            ("strides", Attribute::Ints(vec![stride; 2])),
            ("group", Attribute::Int(group)),
        ];
        self.builder.node("Conv", &inputs, &attrs)
    }

    fn pool(&mut self, op: &str, x: ValueId) -> Result<ValueId> {
        let attrs = [
            ("kernel_shape", Attribute::Ints(vec![3, 2])),
            ("strides", Attribute::Ints(vec![2, 1])),
            ("pads", Attribute::Ints(vec![1, 0, 1, 1])),
        ];
        self.builder.node(op, &[x], &attrs)
    }
}

/// Runs a network on a device that prefers NHWC, for two batch sizes. All of it must run on the
/// device, and only the graph's input and output may be transposed.
///
/// # Errors
///
/// The device does not run it, or there is no CPU provider in the program.
///
/// # Panics
///
/// A result differs from the CPU's, or images are transposed between nodes.
pub fn networks(device: &Arc<dyn Device>) -> Result<()> {
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::F16, 5e-3), (DType::BF16, 4e-2)] {
        let model = network(dtype)?;
        let session = Session::builder(&model).device(device.clone()).device(cpu()?).build()?;
        let steps = session.steps();
        let elsewhere: Vec<_> = steps.iter().filter(|(.., at)| at != device.info().provider).collect();
        assert!(elsewhere.is_empty(), "{elsewhere:?}");
        let count = |op: &str| steps.iter().filter(|(_, other, _)| other == op).count();
        // The two transposes are those of the input and of the output that is an image.
        let counts = ["NhwcConv", "NhwcMaxPool", "NhwcAveragePool", "Transpose"].map(count);
        assert_eq!(counts, [7, 1, 1, 2], "{steps:?}");
        for batch in [1, 3] {
            let image = Tensor::from_slice(&[batch, 3, 20, 19], &numbers(batch * 3 * 20 * 19, batch))?;
            let inputs = [("x".to_owned(), Value::from(image))];
            let expected = outputs(&network(DType::F32)?, cpu()?, &inputs)?;
            let given: Vec<(&str, Value)> =
                inputs.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
            for ((_, actual), expected) in session.run(&given)?.iter().zip(&expected) {
                assert_close(actual, expected, tolerance, &format!("a network of {dtype}"))?;
            }
        }
    }
    Ok(())
}
