//! GEMMs and convolutions that a device computes on tensor cores: float16 and bfloat16, and float32
//! as TF32.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::{MICROSOFT, RUNTIME};
use ort_core::tensor::{Tensor, Value};

use super::typed::{self, run};
use super::windows::{CONVS, Windows, channels_last, of, result_of};
use super::{cpu, numbers, outputs};

/// Further windows at the edge cases of tiles.
const TILES: &[Windows] = &[
    // Tiles of 128 filters by 128 positions, of 64 by 64, and of 32 filters, each exceeded by a
    // little.
    Windows { pads: &[1; 4], ..of(&[2, 12, 17, 19], &[130, 12, 3, 3]) },
    Windows { pads: &[1; 4], ..of(&[1, 16, 9, 15], &[65, 16, 3, 3]) },
    Windows { pads: &[0, 1, 1, 0], ..of(&[3, 8, 9, 5], &[33, 8, 2, 2]) },
    // Split accumulation, without and with groups.
    Windows { pads: &[1; 4], ..of(&[1, 96, 6, 7], &[34, 96, 3, 3]) },
    Windows { group: 2, pads: &[2; 4], ..of(&[1, 128, 4, 4], &[14, 64, 5, 5]) },
    // As many taps as the kernels' bit masks hold, and more.
    Windows { pads: &[7; 4], ..of(&[1, 2, 12, 13], &[5, 2, 15, 15]) },
    Windows { pads: &[8; 4], ..of(&[1, 2, 12, 13], &[5, 2, 16, 16]) },
];

/// Windows for gradients and transposed convolutions: tiles of all sizes for image and filters,
/// strides, dilations, groups, and split accumulation.
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

    /// The shapes of its two tensors, and the given sizes of its result, if it needs them.
    fn inputs(self, windows: &Windows) -> ([Vec<usize>; 2], Option<&'static [usize]>) {
        let (result, filters) = (result_of(windows), windows.kernel.to_vec());
        match self {
            Backward::Input => ([result, filters], Some(windows.image)),
            Backward::Weights => ([windows.image.to_vec(), result], Some(windows.kernel)),
            Backward::Transposed => ([result, filters], None),
        }
    }

    /// The number of products that an accumulator adds up.
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

/// The sizes of a GEMM, and which of its sides are transposed.
type Matrices = ([usize; 3], [bool; 2]);

fn matrices() -> Vec<Matrices> {
    let mut all = Vec::new();
    for left in [false, true] {
        for right in [false, true] {
            // Around tiles of 64 and of 128; whole vectors and partial ones.
            for sizes in
                [[5, 7, 1], [64, 64, 32], [65, 67, 33], [66, 130, 48], [260, 258, 20], [257, 259, 17]]
            {
                all.push((sizes, [left, right]));
            }
        }
    }
    all
}

/// Matrices, rows, columns and depth of batches that keep four multiprocessors busy with large
/// tiles.
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

/// All standard windows, and those at the edge cases of tiles.
pub(super) fn convolutions() -> impl Iterator<Item = &'static Windows> {
    CONVS.iter().chain(TILES)
}

/// Checks GEMMs and convolutions of float16 and bfloat16.
///
/// # Panics
///
/// A result differs from the CPU's, or the device does not run a case.
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
        // An addend that broadcasts along the columns of a large GEMM, and a scalar.
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

/// TF32 rounds a factor to eleven significant bits: this is the maximum relative error.
const OF_FACTOR: f64 = 1.0 / 2048.0;

/// One node of float32.
struct Node {
    op: (&'static str, &'static str),
    shapes: Vec<Vec<usize>>,
    /// The sizes of the result, which follow the tensors as an input.
    sizes: Option<&'static [usize]>,
    attrs: Vec<(&'static str, Attribute)>,
    /// The number of products that an accumulator adds up.
    depth: usize,
}

impl Node {
    /// Returns the result on a device, from pseudo-random numbers or their absolute values.
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

    /// Fails unless each result is within the error bound of its factors, and, if these are rounded
    /// to TF32, unless the errors are as large as that rounding makes them.
    fn check(&self, device: &Arc<dyn Device>, host: &Arc<dyn Device>, is_tf32: bool) -> Result<()> {
        let (found, expected) = (self.run(device, false)?, self.run(host, false)?);
        // The activation's slope is at most 1, so error bounds of the accumulators also bound the
        // results.
        let sums = self.run(host, true)?;
        let of_product = if is_tf32 { (1.0 + OF_FACTOR).powi(2) - 1.0 } else { 0.0 };
        // The rounding of each float32 addition, on both sides.
        let of_sum = 2.0 * (self.depth as f64 + 2.0) * f64::from(f32::EPSILON);
        let (mut apart, mut count) = (0.0, 0);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let (error, sum) = (f64::from((found - expected).abs()), f64::from(sums[index]));
            let what = || format!("{:?} of {:?}, {:?}", self.op, self.shapes, self.attrs);
            // Not `>`, because a NaN must fail.
            let is_near = error <= (of_product + of_sum) * sum;
            assert!(is_near, "{}: element {index} is {found}, expected {expected}", what());
            apart += if sum > 0.0 { error / sum } else { 0.0 };
            count += 1;
        }
        // The errors of products are independent, so those of sums grow with the square root of
        // their number. Errors of float32 are a thousandth of that.
        let is_rounded = apart > OF_FACTOR / 16.0 / (self.depth as f64).sqrt() * f64::from(count);
        assert_eq!(is_rounded, is_tf32, "{:?} of {:?} is not of TF32 as it must be", self.op, self.shapes);
        assert_eq!(found.len(), expected.len());
        Ok(())
    }
}

/// Checks GEMMs and convolutions of float32 on a device that computes them in TF32, or not.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
///
/// # Panics
///
/// A result's error exceeds what rounding to TF32, or in float32, explains. With `is_tf32` also if
/// the errors are too small, because then TF32 was not used.
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
        // Kernels do not use tensor cores for depthwise and other small groups, for large windows,
        // or for GEMMs of few rows or columns.
        let is_few = of_group <= 2 || taps > 31 || windows.has_one_place();
        let with_channels_last = Node {
            op: (RUNTIME, "NhwcConv"),
            shapes: shapes.iter().map(|shape| channels_last(shape)).collect(),
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
