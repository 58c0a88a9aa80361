//! A pointwise convolution and the depthwise one that reads it, as one operator: the bits of the
//! two, on any number of threads, at any limit and in any precision; where the rule applies; and
//! what is never whole in memory.

use std::sync::Arc;

use crate::support::{self, Without};
use ort_runtime::ep::{Device, Precision};
use ort_runtime::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::{DType, Error, ErrorKind, Model, Result, Session, SessionBuilder, Tensor};

const OP: &str = "FusedPointwiseDepthwise";

/// Numbers in (-1, 1) without a pattern.
fn numbers(shape: &[usize], seed: usize) -> Result<Tensor> {
    let mix = |index: usize| ((index * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    let count = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|index| mix(index) as f32 / (1 << 23) as f32 - 1.0).collect();
    Tensor::from_slice(shape, &values)
}

/// Both convolutions; the activations are inner and outer.
#[derive(Debug, Clone, Copy)]
struct Case {
    image: [usize; 4],
    filters: usize,
    kernel: [usize; 2],
    strides: [i64; 2],
    dilations: [i64; 2],
    pads: [i64; 4],
    activations: [(&'static str, &'static [f32]); 2],
    biases: [bool; 2],
}

const CLIP: (&str, &[f32]) = ("Clip", &[0.0, 0.75]);

const BASE: Case = Case {
    image: [1, 16, 30, 40],
    filters: 24,
    kernel: [3, 3],
    strides: [1, 1],
    dilations: [1, 1],
    pads: [1, 1, 1, 1],
    activations: [("Relu", &[]), ("Relu", &[])],
    biases: [true, true],
};

const CASES: &[Case] = &[
    BASE,
    Case { strides: [2, 2], activations: [CLIP, CLIP], ..BASE },
    Case { kernel: [5, 5], pads: [2, 2, 2, 2], activations: [("HardSwish", &[]), ("Swish", &[1.0])], ..BASE },
    Case {
        kernel: [7, 7],
        pads: [3, 3, 3, 3],
        strides: [2, 2],
        activations: [("Swish", &[1.0]), ("Gelu", &[])],
        ..BASE
    },
    // Padding that is asymmetric, more than the kernel, or none; no bias, so that rows beyond the
    // image must be 0.
    Case { pads: [0, 2, 1, 0], biases: [false, true], ..BASE },
    Case { pads: [4, 0, 5, 3], activations: [("Sigmoid", &[]), ("", &[])], ..BASE },
    Case { pads: [0; 4], strides: [2, 2], biases: [true, false], ..BASE },
    // Windows that are not read where they lie, or that leave rows out.
    Case { dilations: [2, 3], pads: [2, 3, 2, 3], ..BASE },
    Case { kernel: [2, 3], strides: [3, 2], pads: [0, 1, 1, 1], ..BASE },
    Case { kernel: [1, 1], strides: [2, 3], pads: [0; 4], ..BASE },
    // Channels that fill no vector and no tile, and more than one task.
    Case { image: [3, 5, 33, 17], filters: 7, activations: [("", &[]), ("Relu", &[])], ..BASE },
    Case { image: [2, 1, 9, 200], filters: 131, kernel: [5, 5], pads: [2, 2, 2, 2], strides: [2, 2], ..BASE },
    Case { image: [1, 400, 24, 24], filters: 48, ..BASE },
    Case { image: [1, 24, 56, 56], filters: 144, activations: [CLIP, CLIP], ..BASE },
    // One row, one column, one pixel.
    Case { image: [2, 8, 1, 300], filters: 40, ..BASE },
    Case { image: [2, 8, 300, 1], filters: 40, strides: [2, 2], ..BASE },
    Case { image: [1, 8, 1, 1], filters: 40, kernel: [5, 5], pads: [2, 2, 2, 2], ..BASE },
    Case { image: [1, 64, 7, 7], filters: 320, ..BASE },
    // Images that several threads cut across, their windows reaching into each other's rows.
    Case {
        image: [1, 6, 111, 100],
        filters: 20,
        kernel: [5, 5],
        strides: [2, 2],
        pads: [3, 2, 0, 1],
        activations: [CLIP, ("HardSwish", &[])],
        ..BASE
    },
    Case {
        image: [1, 3, 90, 81],
        filters: 9,
        dilations: [9, 2],
        pads: [9, 2, 9, 2],
        biases: [false, true],
        ..BASE
    },
    // Columns of a product that lie a power of two apart.
    Case { image: [1, 20, 64, 64], filters: 40, ..BASE },
];

fn ends(names: [&'static str; 2], (name, params): (&str, &[f32])) -> Vec<(&'static str, Attribute)> {
    if name.is_empty() {
        return Vec::new();
    }
    vec![(names[0], Attribute::String(name.to_string())), (names[1], Attribute::Floats(params.to_vec()))]
}

impl Case {
    fn sizes(&self) -> Vec<String> {
        self.image.iter().map(usize::to_string).collect()
    }

    /// The image and the weights: W1, W2, B1, B2.
    fn operands(&self, builder: &mut GraphBuilder, sizes: &[&str]) -> Result<[Option<ValueId>; 5]> {
        let image = builder.input("x", DType::F32, sizes);
        let [height, width] = self.kernel;
        let w1 = builder.constant(numbers(&[self.filters, self.image[1], 1, 1], 1)?);
        let w2 = builder.constant(numbers(&[self.filters, 1, height, width], 2)?);
        let biases = [numbers(&[self.filters], 3)?, numbers(&[self.filters], 4)?];
        let [b1, b2] = biases.map(|bias| builder.constant(bias));
        let [has_b1, has_b2] = self.biases;
        Ok([Some(image), Some(w1), Some(w2), has_b1.then_some(b1), has_b2.then_some(b2)])
    }

    fn windows(&self) -> Vec<(&'static str, Attribute)> {
        vec![
            ("group", Attribute::Int(self.filters as i64)),
            ("strides", Attribute::Ints(self.strides.to_vec())),
            ("dilations", Attribute::Ints(self.dilations.to_vec())),
            ("pads", Attribute::Ints(self.pads.to_vec())),
        ]
    }

    /// The one operator.
    fn one(&self) -> Result<Graph> {
        let mut builder = GraphBuilder::new("one");
        let sizes = self.sizes();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        let operands = self.operands(&mut builder, &sizes)?;
        let mut attrs = self.windows();
        attrs.extend(ends(["inner_activation", "inner_activation_params"], self.activations[0]));
        attrs.extend(ends(["activation", "activation_params"], self.activations[1]));
        let result = builder.add(("ort-runtime", OP), &operands, &attrs, 1, Vec::new())?;
        builder.finish(&result)
    }

    /// Both operators, of an image with these sizes; `other` is a further output.
    fn two(
        &self,
        sizes: &[&str],
        other: Option<fn(&mut GraphBuilder, ValueId) -> Result<ValueId>>,
    ) -> Result<Graph> {
        let mut builder = GraphBuilder::new("two");
        let [x, w1, w2, b1, b2] = self.operands(&mut builder, sizes)?;
        let mut conv = |inputs: &[Option<ValueId>], mut attrs: Vec<(&'static str, Attribute)>, activation| {
            attrs.extend(ends(["activation", "activation_params"], activation));
            Ok::<_, Error>(builder.add(("com.microsoft", "FusedConv"), inputs, &attrs, 1, Vec::new())?[0])
        };
        let between = conv(&[x, w1, b1], Vec::new(), self.activations[0])?;
        let result = conv(&[Some(between), w2, b2], self.windows(), self.activations[1])?;
        let mut outputs = vec![result];
        outputs.extend(other.map(|other| other(&mut builder, between)).transpose()?);
        builder.finish(&outputs)
    }

    fn bits(&self, session: &Session) -> Result<Vec<u32>> {
        let results = session.run(&[("x", numbers(&self.image, 9)?.into())])?;
        Ok(results[0].1.tensor()?.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect())
    }
}

fn as_it_is(model: &Model) -> SessionBuilder {
    Session::builder(model).opt_level(Level::Disabled)
}

#[test]
fn one_operator_gives_the_bits_of_two() -> Result<()> {
    let parts: Arc<dyn Device> = Without::new(&[OP])?;
    for precision in [Precision::Fp32, Precision::Bf16] {
        for case in CASES {
            let model = Model::from_graph(case.one()?);
            let expected =
                match as_it_is(&model).device(parts.clone()).precision(precision).threads(1).build() {
                    Ok(session) => case.bits(&session)?,
                    Err(error) if precision == Precision::Bf16 => {
                        assert!(error.to_string().contains("AVX512-BF16"), "{error}");
                        eprintln!("this CPU has no products of bfloat16");
                        return Ok(());
                    }
                    Err(error) => return Err(error),
                };
            for threads in [1, 2, 3, 7] {
                let session = as_it_is(&model).precision(precision).threads(threads).build()?;
                assert!(session.steps().iter().all(|(_, op, _)| op == OP), "{case:?} has no kernel");
                assert!(
                    case.bits(&session)? == expected,
                    "{case:?} differs on {threads} threads in {precision:?}"
                );
                let apart =
                    as_it_is(&model).device(parts.clone()).precision(precision).threads(threads).build()?;
                assert!(
                    case.bits(&apart)? == expected,
                    "{case:?} as two differs on {threads} threads in {precision:?}"
                );
            }
        }
    }
    Ok(())
}

/// Where the rule applies: the case, the sizes of its image as the model knows them, a further
/// output, and whether it does.
#[test]
fn the_rule_applies_where_it_pays() -> Result<()> {
    type Other = Option<fn(&mut GraphBuilder, ValueId) -> Result<ValueId>>;
    let large = Case { image: [1, 16, 112, 112], filters: 96, ..BASE };
    let small = Case { image: [1, 160, 7, 7], filters: 960, ..BASE };
    let known: &[&str] = &["batch", "16", "112", "112"];
    let table: [(Case, &[&str], Other, bool); 7] = [
        (large, known, None, true),
        (large, &["1", "16", "h", "w"], None, true),
        (small, &["1", "160", "7", "7"], None, false),
        (Case { dilations: [2, 2], ..large }, known, None, false),
        // What ends without an activation may still get one.
        (Case { activations: [("Relu", &[]), ("", &[])], ..large }, known, None, false),
        // Somebody else reads what lies between, or it is an output.
        (large, known, Some(|builder, between| builder.node("Neg", &[between], &[])), false),
        (large, known, Some(|_, between| Ok(between)), false),
    ];
    for (case, sizes, other, applies) in table {
        let model = Model::from_graph(case.two(sizes, other)?);
        let session = Session::builder(&model).threads(2).build()?;
        let is_one = session.steps().iter().any(|(_, op, _)| op == OP);
        assert_eq!(is_one, applies, "{case:?} {sizes:?}");
        assert_eq!(
            case.bits(&session)?,
            case.bits(&as_it_is(&model).threads(1).build()?)?,
            "{case:?} {sizes:?}"
        );
        // What is saved for other runtimes has no operator of our own.
        let (saved, _) = Session::builder(&model).optimized()?;
        assert!(saved.nodes.iter().all(|node| node.spec.domain != "ort-runtime"), "{case:?} {sizes:?}");
    }
    Ok(())
}

/// The plan of both holds what lies between, 4,816,896 bytes; that of the one a few rows of it for
/// each thread, and never more than all.
#[test]
fn what_lies_between_is_never_whole() -> Result<()> {
    let case = Case { image: [1, 16, 112, 112], filters: 96, strides: [2, 2], ..BASE };
    let model = Model::from_graph(case.two(&["1", "16", "112", "112"], None)?);
    let between = 4 * 96 * 112 * 112;
    let peak = |builder: SessionBuilder| -> Result<usize> { Ok(builder.build()?.plan(&[])?.planned_bytes) };
    for threads in [1, 2, 16, 64] {
        let two = peak(as_it_is(&model).threads(threads))?;
        let one = peak(Session::builder(&model).threads(threads))?;
        assert!(two >= between && one <= two, "{threads} threads: {one} of {two}");
        assert!(
            threads > 2 || one <= two - between + (512 << 10) * threads,
            "{threads} threads: {one} of {two}"
        );
    }
    Ok(())
}

/// Its weights are packed as those of others are: mapped from a cache, or streamed under a limit.
#[test]
fn weights_come_from_a_cache_or_through_a_window() -> Result<()> {
    let case = Case { image: [1, 200, 40, 40], filters: 400, ..BASE };
    let (folder, model) = support::mapped(&case.two(&["1", "200", "40", "40"], None)?)?;
    let plain = Session::builder(&model).threads(2).build()?;
    let (expected, packed) = (case.bits(&plain)?, plain.memory().packed);
    assert!(packed >= 4 * 200 * 400, "the weights are packed: {packed}");
    for _ in 0..2 {
        let cached = Session::builder(&model).threads(2).cache_dir(folder.path()).build()?;
        assert_eq!((cached.memory().packed, case.bits(&cached)?), (0, expected.clone()));
    }
    let whole = plain.plan(&[])?.planned_bytes + packed;
    let limited = Session::builder(&model).threads(2).memory_limit(whole - packed / 2);
    let refused = limited.build().and_then(|session| case.bits(&session));
    match refused {
        Ok(bits) => assert_eq!(bits, expected),
        // One weight passes through the window, so that it is needed whole.
        Err(error) => assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}"),
    }
    Ok(())
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let good: [&[&str]; 5] =
        [&["1", "16", "h", "w"], &["24", "16", "1", "1"], &["24", "1", "3", "3"], &["24"], &["24"]];
    let table: [(usize, &[&str], &str); 7] = [
        (0, &["1", "15", "h", "w"], "the number of channels of W1"),
        (0, &["16"], "rank"),
        (1, &["24", "16", "1", "3"], "expected 1 along each axis"),
        (2, &["23", "1", "3", "3"], "the number of filters of W2"),
        (2, &["24", "2", "3", "3"], "has 2 channels, expected 1"),
        (3, &["25"], "the length of B1"),
        (4, &["25"], "the length of the bias"),
    ];
    let build = |shapes: [&[&str]; 5], activation: &str| -> Result<Graph> {
        let mut builder = GraphBuilder::new("refused");
        let inputs = shapes.iter().enumerate();
        let inputs: Vec<_> =
            inputs.map(|(at, shape)| Some(builder.input(&format!("x{at}"), DType::F32, shape))).collect();
        let attrs =
            [("group", Attribute::Int(24)), ("inner_activation", Attribute::String(activation.to_string()))];
        let results = builder.add(("ort-runtime", OP), &inputs, &attrs, 1, Vec::new())?;
        builder.finish(&results)
    };
    assert!(build(good, "Relu").is_ok());
    let refusals = table.into_iter().map(|(at, shape, expected)| {
        let mut shapes = good;
        shapes[at] = shape;
        (build(shapes, "Relu"), expected)
    });
    for (result, expected) in refusals.chain([(build(good, "Reluu"), "Reluu")]) {
        let problem = result.err().map(|error| (error.kind(), error.to_string()));
        let refused =
            problem.as_ref().is_some_and(|(kind, text)| *kind == ErrorKind::Fail && text.contains(expected));
        assert!(refused, "{expected}: {problem:?}");
    }
}
