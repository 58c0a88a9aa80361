//! `ConvGradInput` and `ConvGradWeights`: the kernels in `float` against the convolutions that they
//! are made of in `double`, and the same bits on any number of threads.

use crate::support::{ints, numbers};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// A convolution: shapes of image and weights, places of results, strides, dilations, pads before
/// each axis, groups.
struct Case {
    name: &'static str,
    image: &'static [usize],
    weight: &'static [usize],
    results: &'static [usize],
    strides: &'static [i64],
    dilations: &'static [i64],
    pads: &'static [i64],
    group: i64,
}

#[rustfmt::skip]
const CASES: &[Case] = &[
    Case { name: "dense", image: &[2, 3, 7, 9], weight: &[5, 3, 3, 3], results: &[7, 9], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 1 },
    Case { name: "many results", image: &[2, 3, 40, 24], weight: &[5, 3, 3, 3], results: &[40, 24], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 1 },
    Case { name: "several pieces", image: &[3, 40, 24, 24], weight: &[8, 40, 5, 5], results: &[24, 24], strides: &[1, 1], dilations: &[1, 1], pads: &[2, 2], group: 1 },
    Case { name: "pieces across images", image: &[9, 150, 7, 7], weight: &[8, 150, 5, 5], results: &[7, 7], strides: &[1, 1], dilations: &[1, 1], pads: &[2, 2], group: 1 },
    Case { name: "small images", image: &[5, 16, 2, 2], weight: &[24, 16, 3, 3], results: &[2, 2], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 1 },
    Case { name: "strides", image: &[3, 4, 9, 11], weight: &[6, 4, 3, 5], results: &[5, 4], strides: &[2, 3], dilations: &[1, 1], pads: &[1, 2], group: 1 },
    Case { name: "dilations", image: &[2, 3, 9, 8], weight: &[4, 3, 3, 2], results: &[5, 5], strides: &[1, 1], dilations: &[2, 3], pads: &[0, 0], group: 1 },
    Case { name: "asymmetric pads", image: &[2, 2, 6, 5], weight: &[3, 2, 4, 3], results: &[6, 5], strides: &[1, 1], dilations: &[1, 1], pads: &[2, 0], group: 1 },
    Case { name: "windows that leave the end out", image: &[1, 2, 8, 9], weight: &[2, 2, 2, 3], results: &[2, 3], strides: &[3, 2], dilations: &[1, 1], pads: &[0, 0], group: 1 },
    Case { name: "groups", image: &[2, 6, 5, 4], weight: &[4, 3, 3, 3], results: &[5, 4], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 2 },
    Case { name: "groups of large images", image: &[2, 6, 9, 12], weight: &[4, 3, 3, 3], results: &[9, 12], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 2 },
    Case { name: "depthwise", image: &[2, 5, 19, 35], weight: &[5, 1, 3, 3], results: &[19, 35], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 5 },
    Case { name: "depthwise with strides", image: &[3, 4, 10, 40], weight: &[4, 1, 5, 5], results: &[5, 20], strides: &[2, 2], dilations: &[1, 1], pads: &[2, 2], group: 4 },
    Case { name: "depthwise with dilations", image: &[3, 4, 9, 9], weight: &[4, 1, 3, 3], results: &[5, 3], strides: &[1, 2], dilations: &[2, 2], pads: &[0, 0], group: 4 },
    Case { name: "depthwise on small images", image: &[4, 6, 2, 2], weight: &[6, 1, 5, 5], results: &[2, 2], strides: &[1, 1], dilations: &[1, 1], pads: &[2, 2], group: 6 },
    Case { name: "two filters a channel", image: &[2, 3, 6, 6], weight: &[6, 1, 3, 3], results: &[6, 6], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 3 },
    Case { name: "pointwise", image: &[3, 7, 9, 9], weight: &[5, 7, 1, 1], results: &[9, 9], strides: &[1, 1], dilations: &[1, 1], pads: &[0, 0], group: 1 },
    Case { name: "pointwise in groups", image: &[3, 8, 8, 8], weight: &[6, 4, 1, 1], results: &[8, 8], strides: &[1, 1], dilations: &[1, 1], pads: &[0, 0], group: 2 },
    Case { name: "pointwise on small images", image: &[3, 7, 3, 2], weight: &[5, 7, 1, 1], results: &[3, 2], strides: &[1, 1], dilations: &[1, 1], pads: &[0, 0], group: 1 },
    Case { name: "pointwise with strides", image: &[3, 7, 6, 5], weight: &[5, 7, 1, 1], results: &[3, 3], strides: &[2, 2], dilations: &[1, 1], pads: &[0, 0], group: 1 },
    Case { name: "one pixel", image: &[4, 6, 1, 1], weight: &[5, 6, 1, 1], results: &[1, 1], strides: &[1, 1], dilations: &[1, 1], pads: &[0, 0], group: 1 },
    Case { name: "signals", image: &[2, 3, 17], weight: &[4, 3, 5], results: &[9], strides: &[2], dilations: &[1], pads: &[2], group: 1 },
    Case { name: "depthwise signals", image: &[2, 3, 33], weight: &[3, 1, 4], results: &[33], strides: &[1], dilations: &[1], pads: &[1], group: 3 },
    Case { name: "volumes", image: &[2, 2, 3, 4, 3], weight: &[3, 2, 2, 3, 2], results: &[4, 4, 4], strides: &[1, 1, 1], dilations: &[1, 1, 1], pads: &[1, 1, 1], group: 1 },
    Case { name: "one image", image: &[1, 3, 5, 5], weight: &[4, 3, 3, 3], results: &[5, 5], strides: &[1, 1], dilations: &[1, 1], pads: &[1, 1], group: 1 },
];

impl Case {
    fn upstream(&self) -> Vec<usize> {
        [&[self.image[0], self.weight[0]], self.results].concat()
    }

    /// Pads behind each axis with which a convolution has as many results as the case says.
    fn pads(&self) -> Vec<i64> {
        let behind = self.results.iter().enumerate().map(|(axis, results)| {
            let reach = (*results as i64 - 1) * self.strides[axis]
                + (self.weight[axis + 2] as i64 - 1) * self.dilations[axis]
                + 1;
            (reach - self.pads[axis] - self.image[axis + 2] as i64).max(0)
        });
        self.pads.iter().copied().chain(behind).collect()
    }

    /// Both gradients of an image, weights and an upstream gradient of this type.
    fn graph(&self, dtype: DType) -> Result<Graph> {
        let mut builder = GraphBuilder::new(self.name);
        let input = |builder: &mut GraphBuilder, name: &str, shape: &[usize]| {
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            builder.input(name, dtype, &sizes)
        };
        let image = input(&mut builder, "image", self.image);
        let weight = input(&mut builder, "weight", self.weight);
        let upstream = input(&mut builder, "upstream", &self.upstream());
        let attrs = [
            ("strides", Attribute::Ints(self.strides.to_vec())),
            ("dilations", Attribute::Ints(self.dilations.to_vec())),
            ("pads", Attribute::Ints(self.pads())),
            ("group", Attribute::Int(self.group)),
        ];
        let mut outputs = Vec::new();
        for (op, inputs, shape) in [
            ("ConvGradInput", [upstream, weight], self.image),
            ("ConvGradWeights", [image, upstream], self.weight),
        ] {
            let sizes: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
            let shape = builder.constant(ints(&sizes)?);
            let inputs = [inputs[0], inputs[1], shape].map(Some);
            outputs.extend(builder.add(("ort-runtime", op), &inputs, &attrs, 1, Vec::new())?);
        }
        builder.finish(&outputs)
    }

    /// The gradients in this type, on `threads` threads, of whole numbers times `scale`.
    fn run(&self, dtype: DType, threads: usize, scale: f32) -> Result<Vec<Tensor>> {
        let model = Model::from_graph(self.graph(dtype)?);
        let session = Session::builder(&model).threads(threads).build()?;
        let shapes =
            [("image", self.image.to_vec()), ("weight", self.weight.to_vec()), ("upstream", self.upstream())];
        let mut given: Vec<(&str, Value)> = Vec::new();
        for (seed, (name, shape)) in shapes.into_iter().enumerate() {
            let elements = numbers(&shape, seed)?.to_vec::<f32>()?.into_iter().map(|number| number * scale);
            let tensor = match dtype {
                DType::F64 => Tensor::from_vec(&shape, elements.map(f64::from).collect::<Vec<f64>>())?,
                _ => Tensor::from_vec(&shape, elements.collect::<Vec<f32>>())?,
            };
            given.push((name, tensor.into()));
        }
        session.run(&given)?.into_iter().map(|(_, value)| value.tensor().cloned()).collect()
    }
}

#[test]
fn kernels_agree_with_convolutions() -> Result<()> {
    for case in CASES {
        let (actual, expected) = (case.run(DType::F32, 2, 1.0)?, case.run(DType::F64, 2, 1.0)?);
        for ((what, actual), expected) in ["image", "weights"].iter().zip(actual).zip(expected) {
            assert_eq!(actual.shape(), expected.shape(), "{}, by {what}", case.name);
            let (actual, expected) = (actual.to_vec::<f32>()?, expected.to_vec::<f64>()?);
            // Whole numbers, whose sums are exact.
            for (place, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                assert_eq!(f64::from(*actual), *expected, "{}, by {what}, at {place}", case.name);
            }
        }
    }
    Ok(())
}

/// Fractions, whose sums depend on their order.
#[test]
fn threads_do_not_change_bits() -> Result<()> {
    for case in CASES {
        let bits = |threads| -> Result<Vec<Vec<u32>>> {
            let all = case.run(DType::F32, threads, 1.0 / 7.0)?;
            all.iter().map(|one| Ok(one.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())).collect()
        };
        let one = bits(1)?;
        for threads in [2, 3] {
            assert_eq!(bits(threads)?, one, "{} on {threads} threads", case.name);
        }
    }
    Ok(())
}

/// An upstream gradient of no images leaves weights alone.
#[test]
fn no_images_have_a_gradient_of_zeros() -> Result<()> {
    const NONE: Case = Case {
        name: "none",
        image: &[0, 3, 5, 5],
        weight: &[4, 3, 3, 3],
        results: &[5, 5],
        strides: &[1, 1],
        dilations: &[1, 1],
        pads: &[1, 1],
        group: 1,
    };
    let gradients = NONE.run(DType::F32, 2, 1.0)?;
    assert_eq!(gradients[0].shape(), NONE.image);
    assert_eq!(gradients[1].to_vec::<f32>()?, vec![0.0; 4 * 3 * 9]);
    Ok(())
}
