//! Products and convolutions that a device computes on tensor cores: of float16 and bfloat16, and
//! of float32 as TF32.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::{Tensor, Value};

use super::pixels::{pixels, result_of};
use super::typed::{self, run};
use super::windows::{CONVS, Windows, of};
use super::{cpu, numbers, outputs};

/// Beside the windows of all convolutions: those at the edges of tiles.
const TILES: &[Windows] = &[
    // Blocks of 128 filters at 128 positions, of 64 and 64, and of 32 filters, each with a little
    // more.
    Windows { pads: &[1; 4], ..of(&[2, 12, 17, 19], &[130, 12, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 16, 9, 15], &[65, 16, 3, 3]) },
    Windows { pads: &[0, 1, 1, 0], ..of(&[3, 8, 9, 5], &[33, 8, 2, 2]) },
    // Sums in parts, by themselves and in groups.
    Windows { pads: &[1; 4], ..of(&[1, 96, 6, 7], &[34, 96, 3, 3]) },
    Windows { group: 2, pads: &[2; 4], ..of(&[1, 128, 4, 4], &[14, 64, 5, 5]) },
    // As many taps as have bits, and more.
    Windows { pads: &[7; 4], ..of(&[1, 2, 12, 13], &[5, 2, 15, 15]) },
    Windows { pads: &[8; 4], ..of(&[1, 2, 12, 13], &[5, 2, 16, 16]) },
];

/// Windows of which gradients and transposed convolutions are taken: in tiles of all sizes by the
/// image and by the filters, with strides, dilations and groups, and with sums in parts.
const BACKWARD: &[Windows] = &[
    Windows { pads: &[1; 4], ..of(&[1, 30, 9, 10], &[130, 30, 3, 3]) },
    Windows { strides: &[2, 2], pads: &[1, 0, 1, 0], ..of(&[1, 70, 23, 24], &[40, 70, 3, 3]) },
    Windows { group: 2, dilations: &[2, 1], pads: &[2, 1, 2, 1], ..of(&[2, 80, 8, 9], &[70, 40, 3, 2]) },
    Windows { strides: &[3, 2], dilations: &[2, 3], ..of(&[2, 9, 15, 16], &[12, 9, 3, 2]) },
    Windows { pads: &[1; 4], ..of(&[1, 4, 40, 40], &[5, 4, 3, 3]) },
    Windows { strides: &[3], pads: &[2, 0], dilations: &[2], ..of(&[2, 5, 31], &[7, 5, 4]) },
    Windows { strides: &[1, 2, 1], pads: &[0, 1, 1, 0, 1, 1], ..of(&[1, 4, 6, 5, 7], &[10, 4, 2, 3, 3]) },
];

/// An operator of the backward pass of a convolution.
#[derive(Clone, Copy)]
enum Backward {
    Input,
    Weights,
    Transposed,
}

impl Backward {
    const ALL: [Backward; 3] = [Backward::Input, Backward::Weights, Backward::Transposed];

    fn operator(self) -> (&'static str, &'static str) {
        match self {
            Backward::Input => (RUNTIME, "ConvGradInput"),
            Backward::Weights => (RUNTIME, "ConvGradWeights"),
            Backward::Transposed => ("", "ConvTranspose"),
        }
    }

    /// The shapes of its two tensors, and what it is told of the sizes of its result.
    fn inputs(self, windows: &Windows) -> ([Vec<usize>; 2], Option<&'static [usize]>) {
        let (result, filters) = (result_of(windows), windows.kernel.to_vec());
        match self {
            Backward::Input => ([result, filters], Some(windows.image)),
            Backward::Weights => ([windows.image.to_vec(), result], Some(windows.kernel)),
            Backward::Transposed => ([result, filters], None),
        }
    }

    /// How many products a sum has.
    fn depth(self, windows: &Windows) -> usize {
        let taps = windows.kernel[2..].iter().product::<usize>();
        match self {
            Backward::Weights => result_of(windows)
                .iter()
                .enumerate()
                .map(|(axis, size)| if axis == 1 { 1 } else { *size })
                .product(),
            _ => windows.kernel[0] / windows.group as usize * taps,
        }
    }
}

fn whole(sizes: &[usize]) -> Vec<i64> {
    sizes.iter().map(|size| *size as i64).collect()
}

/// Sizes of a product and which of its sides are transposed.
type Matrices = ([usize; 3], [bool; 2]);

fn matrices() -> Vec<Matrices> {
    let mut all = Vec::new();
    for left in [false, true] {
        for right in [false, true] {
            // Around tiles of 64 and of 128; of whole vectors, and not.
            for sizes in
                [[5, 7, 1], [64, 64, 32], [65, 67, 33], [66, 130, 48], [260, 258, 20], [257, 259, 17]]
            {
                all.push((sizes, [left, right]));
            }
        }
    }
    all
}

/// Matrices, rows, columns and steps of batches that keep four processors busy with large tiles.
const BATCHES: [[usize; 4]; 2] = [[4, 120, 248, 72], [6, 250, 376, 40]];

fn sides(([rows, columns, depth], [left, right]): Matrices) -> [[usize; 2]; 2] {
    let side = |transposed: bool, [down, across]: [usize; 2]| {
        if transposed { [across, down] } else { [down, across] }
    };
    [side(left, [rows, depth]), side(right, [depth, columns])]
}

fn flags([left, right]: [bool; 2]) -> Vec<(&'static str, Attribute)> {
    let flag = |value: bool| Attribute::Int(i64::from(value));
    vec![("transA", flag(left)), ("transB", flag(right))]
}

/// The windows of all convolutions, and those at the edges of tiles.
pub(super) fn convolutions() -> impl Iterator<Item = &'static Windows> {
    CONVS.iter().chain(TILES)
}

/// Products and convolutions of float16 and bfloat16.
///
/// # Panics
///
/// Where results differ from those of the CPU, or the device does not run one of them.
pub fn halves(device: &Arc<dyn Device>) {
    let mut cases = Vec::new();
    for dtype in [DType::F16, DType::BF16] {
        for matrices in matrices() {
            let ([rows, columns, _], transposed) = matrices;
            let [left, right] = sides(matrices);
            let inputs = [&left[..], &right, &[columns], &[rows, columns]].map(|shape| run(dtype, shape));
            let case = typed::case("FusedMatMul", inputs.into(), &flags(transposed));
            cases.push(typed::Case { domain: RUNTIME, ..case });
        }
        for [matrices, rows, columns, depth] in BATCHES {
            for transposed in [false, true] {
                let right = if transposed { [matrices, columns, depth] } else { [matrices, depth, columns] };
                let shapes: [&[usize]; 4] =
                    [&[matrices, rows, depth], &right, &[columns], &[matrices, rows, columns]];
                let inputs = shapes.map(|shape| run(dtype, shape)).into();
                let case = typed::case("FusedMatMul", inputs, &flags([false, transposed]));
                cases.push(typed::Case { domain: RUNTIME, ..case });
            }
        }
        // Addends of a large product that are the same along its columns, and everywhere.
        for addend in [&[250, 1][..], &[1]] {
            let inputs = [&[250, 72][..], &[72, 376], addend].map(|shape| run(dtype, shape)).into();
            let factors = [("alpha", Attribute::Float(0.5)), ("beta", Attribute::Float(-2.0))];
            cases.push(typed::case("Gemm", inputs, &factors));
        }
        for windows in convolutions() {
            let shapes = [windows.image, windows.kernel, &windows.kernel[..1]];
            let inputs = shapes.map(|shape| run(dtype, shape)).into();
            cases.push(typed::case("Conv", inputs, &windows.with_group()));
        }
        for windows in BACKWARD {
            for backward in Backward::ALL {
                let ((domain, op), (shapes, sizes)) = (backward.operator(), backward.inputs(windows));
                let given = shapes.iter().map(|shape| run(dtype, shape));
                let inputs = given.chain(sizes.map(|sizes| typed::ints(&whole(sizes)))).collect();
                let case = typed::case(op, inputs, &windows.with_group());
                cases.push(typed::Case { domain, ..case });
            }
        }
    }
    typed::check_all(device, &cases);
}

/// A factor is rounded to eleven bits in TF32: it is apart from itself by this part of it.
const OF_FACTOR: f64 = 1.0 / 2048.0;

/// One node of float32.
struct Node {
    op: (&'static str, &'static str),
    shapes: Vec<Vec<usize>>,
    /// Behind the tensors, what is known of the sizes of the result.
    sizes: Option<&'static [usize]>,
    attrs: Vec<(&'static str, Attribute)>,
    /// How many products a sum has.
    depth: usize,
}

impl Node {
    /// The result on a device, of numbers or of their absolute values.
    fn run(&self, device: &Arc<dyn Device>, absolute: bool) -> Result<Vec<f32>> {
        let mut builder = GraphBuilder::new("tf32");
        let (mut ids, mut inputs) = (Vec::new(), Vec::<(String, Value)>::new());
        for (index, shape) in self.shapes.iter().enumerate() {
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let name = format!("x{index}");
            ids.push(Some(builder.input(&name, DType::F32, &sizes)));
            let mut values = numbers(shape.iter().product(), index);
            if absolute {
                values.iter_mut().for_each(|value| *value = value.abs());
            }
            inputs.push((name, Tensor::from_slice(shape, &values)?.into()));
        }
        if let Some(sizes) = self.sizes {
            let sizes = whole(sizes);
            ids.push(Some(builder.constant(Tensor::from_slice(&[sizes.len()], &sizes)?)));
        }
        let found = builder.add(self.op, &ids, &self.attrs, 1, Vec::new())?;
        let model = Model::from_graph(builder.finish(&found)?);
        outputs(&model, device.clone(), &inputs)?[0].tensor()?.to_vec()
    }

    /// Fails unless each result is as near as its factors let it be, and, where these are rounded,
    /// no nearer.
    fn check(&self, device: &Arc<dyn Device>, host: &Arc<dyn Device>, is_tf32: bool) -> Result<()> {
        let (found, expected) = (self.run(device, false)?, self.run(host, false)?);
        // With an activation whose slope is at most 1, errors of sums bound those of results.
        let sums = self.run(host, true)?;
        let of_product = if is_tf32 { (1.0 + OF_FACTOR).powi(2) - 1.0 } else { 0.0 };
        // Of each addition in float32, on both sides.
        let of_sum = 2.0 * (self.depth as f64 + 2.0) * f64::from(f32::EPSILON);
        let (mut apart, mut count) = (0.0, 0);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (error, sum) = (f64::from((found - expected).abs()), f64::from(sums[index]));
            let what = || format!("{:?} of {:?}, {:?}", self.op, self.shapes, self.attrs);
            // Not `>`: a NaN must fail.
            let is_near = error <= (of_product + of_sum) * sum;
            assert!(is_near, "{}: element {index} is {found}, expected {expected}", what());
            apart += if sum > 0.0 { error / sum } else { 0.0 };
            count += 1;
        }
        // Errors of products are independent: those of sums grow as the root of their number. Those
        // of float32 are a thousandth of that.
        let is_rounded = apart > OF_FACTOR / 16.0 / (self.depth as f64).sqrt() * f64::from(count);
        assert_eq!(is_rounded, is_tf32, "{:?} of {:?} is not of TF32 as it must be", self.op, self.shapes);
        assert_eq!(found.len(), expected.len());
        Ok(())
    }
}

/// Products and convolutions of float32 on a device that takes them as TF32, or not.
///
/// # Errors
///
/// The device does not run one of them, or there is no CPU provider in the program.
///
/// # Panics
///
/// Where results are further from those of the CPU than factors of TF32, or of float32, explain;
/// and where they are as near as those of float32, with `is_tf32`.
pub fn floats(device: &Arc<dyn Device>, is_tf32: bool) -> Result<()> {
    let host = cpu()?;
    for matrices in matrices() {
        let ([_, _, depth], transposed) = matrices;
        let shapes: Vec<Vec<usize>> = sides(matrices).map(Vec::from).into();
        let mut attrs = flags(transposed);
        attrs.push(("activation", Attribute::String("Relu".to_owned())));
        Node { op: (RUNTIME, "FusedMatMul"), shapes, sizes: None, attrs, depth }
            .check(device, &host, is_tf32)?;
    }
    for windows in convolutions() {
        let [filters, channels, kernel @ ..] = windows.kernel else { continue };
        let taps: usize = kernel.iter().sum();
        let of_group = filters / windows.group as usize;
        let shapes = vec![windows.image.to_vec(), windows.kernel.to_vec(), vec![*filters]];
        let mut attrs = windows.with_group();
        attrs.push(("activation", Attribute::String("LeakyRelu".to_owned())));
        attrs.push(("activation_params", Attribute::Floats(vec![0.25])));
        let depth = channels * kernel.iter().product::<usize>();
        // Filters of depthwise and other small groups, and large windows, are not for tensor cores,
        // nor are products of few rows or columns.
        let is_few = of_group <= 2 || taps > 31 || windows.has_one_place();
        let with_channels_last = Node {
            op: (RUNTIME, "NhwcConv"),
            shapes: shapes.iter().map(|shape| pixels(shape)).collect(),
            sizes: None,
            attrs: attrs.clone(),
            depth,
        };
        with_channels_last.check(device, &host, is_tf32 && !is_few)?;
        let node = Node { op: (MICROSOFT, "FusedConv"), shapes, sizes: None, attrs, depth };
        node.check(device, &host, is_tf32 && !is_few)?;
    }
    for windows in BACKWARD {
        for backward in Backward::ALL {
            let (op, (shapes, sizes)) = (backward.operator(), backward.inputs(windows));
            let (attrs, depth) = (windows.with_group(), backward.depth(windows));
            Node { op, shapes: shapes.into(), sizes, attrs, depth }.check(device, &host, is_tf32)?;
        }
    }
    Ok(())
}
