//! Convolutions and pools over windows of all kinds.

use std::sync::Arc;

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::{Attribute, GraphBuilder};
use ort_core::session::Model;
use ort_core::spec::MICROSOFT;
use ort_core::tensor::{Tensor, Value};

use super::{assert_close, cpu, numbers, outputs};

const ONNX: &str = "";

/// A convolution or a pool; an empty list stands for the operator's default.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    pub(super) image: &'static [usize],
    /// The filters' shape, or a pool's kernel.
    pub(super) kernel: &'static [usize],
    pub(super) strides: &'static [i64],
    pub(super) pads: &'static [i64],
    pub(super) dilations: &'static [i64],
    pub(super) group: i64,
}

pub(super) const fn of(image: &'static [usize], kernel: &'static [usize]) -> Windows {
    Windows { image, kernel, strides: &[], pads: &[], dilations: &[], group: 1 }
}

pub(super) const CONVS: &[Windows] = &[
    // 3x3 and 7x7, with strides, odd sizes and asymmetric padding.
    Windows { pads: &[1; 4], ..of(&[2, 10, 13, 11], &[18, 10, 3, 3]) },
    Windows { strides: &[2, 2], pads: &[0, 1, 2, 1], ..of(&[1, 7, 23, 19], &[9, 7, 3, 3]) },
    Windows { strides: &[2, 2], pads: &[3; 4], ..of(&[1, 3, 45, 37], &[16, 3, 7, 7]) },
    Windows {
        strides: &[2, 1],
        pads: &[1, 0, 0, 2],
        dilations: &[2, 3],
        ..of(&[1, 12, 9, 9], &[20, 12, 3, 3])
    },
    // Pointwise: few positions and many, with a larger kernel, and with a stride.
    of(&[2, 40, 7, 7], &[24, 40, 1, 1]),
    of(&[1, 4, 64, 64], &[96, 4, 1, 1]),
    of(&[1, 3, 50, 50], &[80, 3, 2, 2]),
    Windows { strides: &[2, 2], ..of(&[1, 16, 15, 15], &[33, 16, 1, 1]) },
    // One output position or a few, and two filters.
    of(&[1, 150, 1, 1], &[70, 150, 1, 1]),
    of(&[2, 20, 7, 7], &[9, 20, 7, 7]),
    Windows { pads: &[1; 4], ..of(&[1, 70, 12, 12], &[2, 70, 3, 3]) },
    // A large depth for few positions.
    Windows { pads: &[1; 4], ..of(&[1, 64, 5, 5], &[20, 64, 3, 3]) },
    Windows { strides: &[2, 1], pads: &[1, 0, 1, 1], ..of(&[2, 51, 4, 5], &[6, 51, 3, 3]) },
    of(&[1, 300, 3, 4], &[10, 300, 1, 1]),
    // Grouped and depthwise, also with a depth multiplier.
    Windows { group: 2, pads: &[1; 4], ..of(&[1, 8, 9, 9], &[12, 4, 3, 3]) },
    Windows { group: 8, strides: &[2, 2], pads: &[1; 4], ..of(&[2, 8, 15, 9], &[8, 1, 3, 3]) },
    Windows { group: 6, pads: &[2; 4], ..of(&[2, 6, 14, 14], &[12, 1, 5, 5]) },
    // One and three spatial axes.
    Windows { strides: &[3], pads: &[2, 0], dilations: &[2], ..of(&[2, 5, 31], &[7, 5, 4]) },
    Windows { group: 6, pads: &[1, 1], ..of(&[1, 6, 40], &[6, 1, 3]) },
    Windows {
        strides: &[1, 2, 1],
        pads: &[1, 0, 1, 1, 1, 0],
        group: 3,
        ..of(&[2, 3, 5, 6, 7], &[6, 1, 3, 2, 3])
    },
    Windows { strides: &[2, 1, 1], pads: &[0, 1, 1, 0, 1, 1], ..of(&[1, 4, 6, 5, 7], &[10, 4, 2, 3, 3]) },
];

const TRANSPOSED: &[Windows] = &[
    Windows { strides: &[2, 2], pads: &[1; 4], ..of(&[1, 130, 5, 4], &[130, 6, 4, 4]) },
    Windows { strides: &[2, 2], pads: &[1; 4], ..of(&[1, 6, 7, 5], &[6, 8, 4, 4]) },
    Windows { strides: &[3, 2], pads: &[0, 1, 1, 0], group: 2, ..of(&[2, 6, 7, 5], &[6, 4, 3, 3]) },
    Windows {
        strides: &[2, 2],
        pads: &[1, 2, 0, 1],
        dilations: &[2, 2],
        ..of(&[1, 4, 6, 6], &[4, 20, 3, 3])
    },
    Windows { strides: &[4, 3], pads: &[1, 2, 0, 1], dilations: &[2, 3], ..of(&[1, 4, 6, 6], &[4, 5, 5, 3]) },
    Windows { strides: &[2], pads: &[1, 0], dilations: &[3], group: 2, ..of(&[1, 4, 9], &[4, 5, 4]) },
    Windows { strides: &[2, 1, 2], pads: &[1, 0, 1, 0, 1, 1], ..of(&[1, 3, 4, 3, 5], &[3, 4, 3, 2, 3]) },
];

pub(super) const POOLS: &[Windows] = &[
    Windows { strides: &[2, 2], pads: &[1; 4], ..of(&[2, 3, 15, 12], &[3, 3]) },
    Windows { strides: &[2, 2], pads: &[1; 4], ..of(&[2, 32, 7, 8], &[3, 3]) },
    Windows { strides: &[2, 2], pads: &[0, 1, 1, 0], ..of(&[1, 16, 9, 11], &[2, 2]) },
    Windows { pads: &[1; 4], ..of(&[1, 16, 5, 6], &[3, 3]) },
    Windows { strides: &[2, 3], pads: &[0, 1, 1, 0], dilations: &[2, 1], ..of(&[1, 4, 11, 13], &[2, 3]) },
    Windows { strides: &[3], ..of(&[2, 3, 31], &[4]) },
    Windows { strides: &[2, 2, 2], pads: &[1, 0, 1, 0, 1, 1], ..of(&[1, 2, 6, 7, 5], &[2, 3, 2]) },
];

impl Windows {
    pub(super) fn attributes(&self) -> Vec<(&'static str, Attribute)> {
        let lists = [("strides", self.strides), ("pads", self.pads), ("dilations", self.dilations)];
        let given = lists.into_iter().filter(|(_, list)| !list.is_empty());
        given.map(|(name, list)| (name, Attribute::Ints(list.to_vec()))).collect()
    }

    /// The attributes of a convolution.
    pub(super) fn with_group(&self) -> Vec<(&'static str, Attribute)> {
        let mut attrs = self.attributes();
        attrs.push(("group", Attribute::Int(self.group)));
        attrs
    }

    /// Whether the filters cover the whole image, for a small batch.
    pub(super) fn has_one_place(&self) -> bool {
        self.image[0] <= 4 && self.image[2..] == self.kernel[2..] && self.pads.is_empty()
    }
}

/// Runs one node on both devices, with inputs of these shapes.
fn check(
    device: &Arc<dyn Device>,
    (domain, op): (&str, &str),
    shapes: &[&[usize]],
    attrs: &[(&str, Attribute)],
    results: usize,
) -> Result<()> {
    let mut builder = GraphBuilder::new("windows");
    let (mut ids, mut inputs) = (Vec::new(), Vec::<(String, Value)>::new());
    for (index, shape) in shapes.iter().enumerate() {
        let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        let name = format!("x{index}");
        ids.push(Some(builder.input(&name, DType::F32, &sizes)));
        let values = numbers(shape.iter().product(), index);
        inputs.push((name, Tensor::from_slice(shape, &values)?.into()));
    }
    let found = builder.add((domain, op), &ids, attrs, results, Vec::new())?;
    let model = Model::from_graph(builder.finish(&found)?);
    let (actual, expected) = (outputs(&model, device.clone(), &inputs)?, outputs(&model, cpu()?, &inputs)?);
    let what = format!("{op} of {shapes:?} with {attrs:?}");
    assert_close(&actual[0], &expected[0], 1e-4, &what)?;
    if let (Some(actual), Some(expected)) = (actual.get(1), expected.get(1)) {
        let indices = |value: &Value| value.tensor()?.to_vec::<i64>();
        assert_eq!(indices(actual)?, indices(expected)?, "{what}");
    }
    Ok(())
}

/// Checks `Conv` and `FusedConv`.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
pub fn convolutions(device: &Arc<dyn Device>) -> Result<()> {
    for case in CONVS {
        let mut attrs = case.with_group();
        let bias = [case.kernel[0]];
        check(device, (ONNX, "Conv"), &[case.image, case.kernel], &attrs, 1)?;
        attrs.push(("activation", Attribute::String("LeakyRelu".to_owned())));
        attrs.push(("activation_params", Attribute::Floats(vec![0.25])));
        check(device, (MICROSOFT, "FusedConv"), &[case.image, case.kernel, &bias], &attrs, 1)?;
    }
    Ok(())
}

/// Checks `ConvTranspose`.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
pub fn transposed_convolutions(device: &Arc<dyn Device>) -> Result<()> {
    for case in TRANSPOSED {
        let attrs = case.with_group();
        // The filters of `ConvTranspose` are [channels in, channels out of a group, ...].
        let bias = [case.kernel[1] * case.group as usize];
        check(device, (ONNX, "ConvTranspose"), &[case.image, case.kernel, &bias], &attrs, 1)?;
    }
    Ok(())
}

/// Checks pools.
///
/// # Errors
///
/// The device does not run a case, or there is no CPU provider in the program.
pub fn pools(device: &Arc<dyn Device>) -> Result<()> {
    for case in POOLS {
        let mut attrs = case.attributes();
        let kernel = case.kernel.iter().map(|size| *size as i64).collect();
        attrs.push(("kernel_shape", Attribute::Ints(kernel)));
        for ceil in [0, 1] {
            attrs.push(("ceil_mode", Attribute::Int(ceil)));
            for flag in [0, 1] {
                attrs.push(("storage_order", Attribute::Int(flag)));
                check(device, (ONNX, "MaxPool"), &[case.image], &attrs, 2)?;
                attrs.pop();
                attrs.push(("count_include_pad", Attribute::Int(flag)));
                check(device, (ONNX, "AveragePool"), &[case.image], &attrs, 1)?;
                attrs.pop();
            }
            for power in [1, 2, 3] {
                attrs.push(("p", Attribute::Int(power)));
                check(device, (ONNX, "LpPool"), &[case.image], &attrs, 1)?;
                attrs.pop();
            }
            attrs.pop();
        }
        for op in ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"] {
            check(device, (ONNX, op), &[case.image], &[], 1)?;
        }
    }
    Ok(())
}

/// The NHWC shape of an image; a shape of one axis is not an image.
pub(super) fn channels_last(shape: &[usize]) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if shape.len() > 2 {
        shape[1..].rotate_left(1);
    }
    shape
}

/// The NCHW shape of a convolution's result.
pub(super) fn result_of(case: &Windows) -> Vec<usize> {
    let axes = case.image.len() - 2;
    let number =
        |list: &[i64], place: usize, default: usize| list.get(place).map_or(default, |x| *x as usize);
    let size = |axis: usize| {
        // Pads list the starts of all axes, then their ends.
        let pads = number(case.pads, axis, 0) + number(case.pads, axes + axis, 0);
        // A dilated kernel spans (kernel - 1) * dilation + 1 elements.
        let extent = (case.kernel[axis + 2] - 1) * number(case.dilations, axis, 1) + 1;
        (case.image[axis + 2] + pads - extent) / number(case.strides, axis, 1) + 1
    };
    [case.image[0], case.kernel[0]].into_iter().chain((0..axes).map(size)).collect()
}
