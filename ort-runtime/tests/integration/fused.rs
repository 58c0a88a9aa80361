//! Fused operators against their decompositions, over shapes, activations, optional inputs and
//! where operands come from; and the same bits on any number of threads.

use std::sync::Arc;

use crate::support::Without;
use ort_runtime::ep::Device;
use ort_runtime::ir::{Attribute, GraphBuilder};
use ort_runtime::rewrite::Level;
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};
use proptest::prelude::*;
use proptest::sample::select;

/// Where an operand comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Source {
    Caller,
    /// A constant, which kernels may pack.
    Constant,
    /// Another node, so that the result may take over its memory.
    Node,
}

type Operand = Option<(Vec<usize>, Source)>;

#[derive(Debug, Clone)]
struct Case {
    op: (&'static str, &'static str),
    attrs: Vec<(&'static str, Attribute)>,
    operands: Vec<Operand>,
    /// The outputs that somebody reads.
    read: &'static [usize],
}

/// Numbers in (-1, 1) without a pattern.
fn numbers(count: usize, seed: usize) -> Vec<f32> {
    let mix = |index: usize| ((index * 7919 + seed * 104_729 + 17) as u32).wrapping_mul(2_654_435_761) >> 8;
    (0..count).map(|index| mix(index) as f32 / (1 << 23) as f32 - 1.0).collect()
}

impl Case {
    fn model(&self) -> Result<(Model, Vec<(String, Value)>)> {
        let mut builder = GraphBuilder::new("fused");
        let (mut ids, mut inputs) = (Vec::new(), Vec::new());
        for (index, operand) in self.operands.iter().enumerate() {
            let Some((shape, from)) = operand else {
                ids.push(None);
                continue;
            };
            let tensor = Tensor::from_slice(shape, &numbers(shape.iter().product(), index))?;
            if *from == Source::Constant {
                ids.push(Some(builder.constant(tensor)));
                continue;
            }
            let sizes: Vec<String> = shape.iter().map(usize::to_string).collect();
            let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
            let name = format!("in{index}");
            let mut id = builder.input(&name, DType::F32, &sizes);
            if *from == Source::Node {
                id = builder.node("Neg", &[id], &[])?;
            }
            ids.push(Some(id));
            inputs.push((name, tensor.into()));
        }
        let count = self.read.iter().max().map_or(1, |last| last + 1);
        let results = builder.add(self.op, &ids, &self.attrs, count, Vec::new())?;
        // An output of the graph has memory of its own, so it is that of another node.
        let mut outputs = Vec::new();
        for &index in self.read {
            outputs.push(builder.node("Neg", &[results[index]], &[])?);
        }
        Ok((Model::from_graph(builder.finish(&outputs)?), inputs))
    }

    fn check(&self) -> Result<()> {
        let (model, inputs) = self.model()?;
        let inputs: Vec<(&str, Value)> = inputs.iter().map(|(n, v)| (n.as_str(), v.clone())).collect();
        let run = |builder: ort_runtime::SessionBuilder| -> Result<(Session, Vec<Value>)> {
            let session = builder.build()?;
            let results = session.run(&inputs)?.into_iter().map(|(_, result)| result).collect();
            Ok((session, results))
        };
        let (session, expected) = run(Session::builder(&model).opt_level(Level::Disabled).threads(1))?;
        let kernel = session.steps().iter().any(|(_, op, _)| op == self.op.1);
        assert!(kernel, "{self:?} has no kernel");
        for threads in [2, 3] {
            let (_, results) = run(Session::builder(&model).opt_level(Level::Disabled).threads(threads))?;
            for (expected, result) in expected.iter().zip(&results) {
                let (a, b) = (expected.tensor()?.to_vec::<f32>()?, result.tensor()?.to_vec::<f32>()?);
                let same = a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && a.len() == b.len(), "{self:?} differs on {threads} threads");
            }
        }
        // The operators of `com.microsoft` that a decomposition of our own gives are decomposed,
        // too.
        let parts: Arc<dyn Device> = Without::new(&[
            "FusedMatMul",
            "FusedGemm",
            "FusedConv",
            "FusedElementwise",
            "GridAttention",
            "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
        ])?;
        let (_, parts) = run(Session::builder(&model).opt_level(Level::Disabled).threads(1).device(parts))?;
        assert!(parts.len() == self.read.len() && expected.len() == self.read.len());
        let mut pairs = expected.iter().zip(&parts);
        pairs.try_for_each(|(a, b)| compare(a, b, Tolerance { relative: 1e-5, absolute: 1e-5 }))
    }
}

/// The activations without jumps, with parameters.
fn activations() -> impl Strategy<Value = Vec<(&'static str, Attribute)>> {
    let table: [(&str, &[f32]); 17] = [
        ("", &[]),
        ("Celu", &[1.5]),
        ("Clip", &[-0.25, 0.75]),
        ("Elu", &[0.5]),
        ("FastGelu", &[]),
        ("Gelu", &[]),
        ("HardSigmoid", &[0.3, 0.4]),
        ("HardSwish", &[]),
        ("LeakyRelu", &[0.2]),
        ("Mish", &[]),
        ("Relu", &[]),
        ("Selu", &[1.5, 1.25]),
        ("Sigmoid", &[]),
        ("Softplus", &[]),
        ("Softsign", &[]),
        ("Swish", &[1.7]),
        ("Tanh", &[]),
    ];
    select(table.to_vec()).prop_map(|(name, values)| {
        let mut attrs = vec![("activation", Attribute::String(name.to_string()))];
        if !values.is_empty() {
            attrs.push(("activation_params", Attribute::Floats(values.to_vec())));
        }
        attrs
    })
}

fn from() -> impl Strategy<Value = Source> {
    select(vec![Source::Caller, Source::Constant, Source::Node])
}

fn maybe(shape: Vec<usize>) -> impl Strategy<Value = Operand> {
    proptest::option::of(from()).prop_map(move |from| from.map(|from| (shape.clone(), from)))
}

fn products() -> impl Strategy<Value = Case> {
    let sizes = (1_usize..24, select(vec![1, 5, 47, 48, 49, 100]), select(vec![1, 7, 64, 500]));
    let batches = (proptest::collection::vec(1_usize..4, 0..3), any::<bool>());
    let flags = (any::<bool>(), any::<bool>(), select(vec![1.0_f32, 0.5]));
    (sizes, batches, flags, activations(), from()).prop_flat_map(
        |((m, n, k), (batch, one_right), (trans_a, trans_b, alpha), mut attrs, right)| {
            let matrix = |rows, columns, exchanged| if exchanged { [columns, rows] } else { [rows, columns] };
            let a = [&batch[..], &matrix(m, k, trans_a)].concat();
            let b = match one_right {
                true => matrix(k, n, trans_b).to_vec(),
                false => [&batch[..], &matrix(k, n, trans_b)].concat(),
            };
            attrs.push(("alpha", Attribute::Float(alpha)));
            attrs.push(("transA", Attribute::Int(i64::from(trans_a))));
            attrs.push(("transB", Attribute::Int(i64::from(trans_b))));
            let result = [&batch[..], &[m, n]].concat();
            (maybe(vec![n]), maybe(result)).prop_map(move |(bias, residual)| Case {
                op: ("ort-runtime", "FusedMatMul"),
                attrs: attrs.clone(),
                operands: vec![Some((a.clone(), Source::Caller)), Some((b.clone(), right)), bias, residual],
                read: &[0],
            })
        },
    )
}

fn gemms() -> impl Strategy<Value = Case> {
    let sizes = (1_usize..24, select(vec![1, 5, 48, 100]), select(vec![1, 7, 500]));
    let scale = (any::<bool>(), any::<bool>(), select(vec![1.0_f32, 0.5]), select(vec![0.0_f32, 1.0, 0.25]));
    (sizes, scale, from(), 0..6_usize).prop_map(|((m, n, k), (ta, tb, alpha, beta), right, addend)| {
        let matrix =
            |rows, columns, exchanged| if exchanged { vec![columns, rows] } else { vec![rows, columns] };
        let addends =
            [None, Some(vec![]), Some(vec![n]), Some(vec![m, 1]), Some(vec![1, n]), Some(vec![m, n])];
        let addend = addends.get(addend).cloned().flatten().map(|shape| (shape, Source::Caller));
        Case {
            op: ("com.microsoft", "FusedGemm"),
            attrs: vec![
                ("activation", Attribute::String("LeakyRelu".to_string())),
                ("activation_alpha", Attribute::Float(0.25)),
                ("alpha", Attribute::Float(alpha)),
                ("beta", Attribute::Float(beta)),
                ("transA", Attribute::Int(i64::from(ta))),
                ("transB", Attribute::Int(i64::from(tb))),
            ],
            operands: vec![Some((matrix(m, k, ta), Source::Caller)), Some((matrix(k, n, tb), right)), addend],
            read: &[0],
        }
    })
}

fn convolutions() -> impl Strategy<Value = Case> {
    // Batch, groups, channels and filters of a group, spatial axes.
    let sizes = (1_usize..3, select(vec![1, 1, 2, 8]), 1_usize..5, 1_usize..5, 1_usize..4);
    let windows = (1_usize..4, 1_usize..3, 0_usize..2, 1_usize..3, 4_usize..20);
    (sizes, windows, activations(), from()).prop_flat_map(
        |(
            (batch, groups, channels, filters, axes),
            (kernel, stride, pad, dilation, size),
            mut attrs,
            weight,
        )| {
            let size = size.min([20, 12, 6][axes - 1]).max(1 + dilation * (kernel - 1));
            let ints = |value: usize, count: usize| Attribute::Ints(vec![value as i64; count]);
            attrs.push(("group", Attribute::Int(groups as i64)));
            attrs.push(("strides", ints(stride, axes)));
            attrs.push(("dilations", ints(dilation, axes)));
            attrs.push(("pads", ints(pad, 2 * axes)));
            let output = (size + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
            let image = [&[batch, groups * channels][..], &vec![size; axes]].concat();
            let weights = [&[groups * filters, channels][..], &vec![kernel; axes]].concat();
            let result = [&[batch, groups * filters][..], &vec![output; axes]].concat();
            (maybe(vec![groups * filters]), maybe(result)).prop_map(move |(bias, addend)| Case {
                op: ("com.microsoft", "FusedConv"),
                attrs: attrs.clone(),
                operands: vec![
                    Some((image.clone(), Source::Caller)),
                    Some((weights.clone(), weight)),
                    bias,
                    addend,
                ],
                read: &[0],
            })
        },
    )
}

fn formulas() -> impl Strategy<Value = Case> {
    let table = vec![
        (1, "mul(x0, sigmoid(x0))"),
        (2, "mul(add(x0, x1), sigmoid(mul(add(x0, x1), 1.702)))"),
        (
            3,
            "mul(add(mul(x0, x1), x2), min(max(add(mul(add(mul(x0, x1), x2), 0.16666666666666666), 0.5), 0.0), 1.0))",
        ),
        (2, "mul(mul(add(x0, x1), 0.5), add(erf(mul(add(x0, x1), 0.7071067811865476)), 1.0))"),
        (3, "div(sub(x0, x1), sqrt(add(mul(x2, x2), 1e-5)))"),
        (2, "select(less(x0, x1), x0, exp(x1))"),
        (4, "max(mul(x0, x1), add(tanh(x2), x3))"),
    ];
    let shapes = proptest::collection::vec(select(vec![1_usize, 2, 3, 17, 70]), 1..5);
    (select(table), shapes).prop_flat_map(|((count, formula), shape)| {
        let rank = shape.len();
        let operand = (proptest::collection::vec(any::<bool>(), rank), 0..=rank, from()).prop_map(
            move |(repeated, dropped, from)| {
                let sizes = shape.iter().zip(repeated).map(|(size, one)| if one { 1 } else { *size });
                Some((sizes.skip(dropped).collect(), from))
            },
        );
        proptest::collection::vec(operand, count).prop_map(move |operands| Case {
            op: ("ort-runtime", "FusedElementwise"),
            attrs: vec![("formula", Attribute::String(formula.to_string()))],
            operands,
            read: &[0],
        })
    })
}

/// Outputs of a norm that are read: the result, the mean, the factor, the sum.
const READ: [&[usize]; 5] = [&[0], &[0, 3], &[0, 1, 2, 3], &[0, 2], &[3, 0]];

fn norms() -> impl Strategy<Value = Case> {
    let sizes = (1_usize..4, 1_usize..9, select(vec![1, 8, 70, 300]), 0_usize..3);
    (sizes, any::<bool>(), from(), from(), select(READ.to_vec())).prop_flat_map(
        |((batch, rows, width, repeated), layer, input, skip, read)| {
            let shape = vec![batch, rows, width];
            let skip_shape = [shape.clone(), vec![1, rows, width], vec![rows, width]][repeated].clone();
            (maybe(vec![width]), maybe(vec![width])).prop_map(move |(beta, bias)| {
                let gamma = Some((vec![width], Source::Constant));
                let sides = [Some((shape.clone(), input)), Some((skip_shape.clone(), skip))];
                let rest = if layer { vec![gamma, beta, bias] } else { vec![gamma, bias] };
                let op = if layer { "SkipLayerNormalization" } else { "SkipSimplifiedLayerNormalization" };
                Case {
                    op: ("com.microsoft", op),
                    attrs: vec![("epsilon", Attribute::Float(1e-3))],
                    operands: sides.into_iter().chain(rest).collect(),
                    read,
                }
            })
        },
    )
}

/// Attention to a grid of keys, by head or by token. Queries of another node give way to results.
fn grid_attentions() -> impl Strategy<Value = Case> {
    let heads = (1_usize..3, 1_usize..3, 1_usize..4, any::<bool>());
    let sizes = (select(vec![1, 4, 5, 49, 130]), [1_usize..16, 1_usize..16], select(vec![1, 16, 40]));
    (heads, sizes, from()).prop_map(
        |((batch, key_heads, group, by_token), (queries, [rows, columns], size), from)| {
            let heads = group * key_heads;
            let side = |heads: usize, rows: usize, size: usize| match by_token {
                true => vec![batch, rows, heads * size],
                false => vec![batch, heads, rows, size],
            };
            let keys = rows * columns;
            let shapes = [
                side(heads, queries, size),
                side(key_heads, keys, size),
                side(key_heads, keys, size),
                vec![batch, heads, queries, rows],
                vec![batch, heads, queries, columns],
            ];
            let mut attrs = vec![("scale", Attribute::Float(0.7))];
            if by_token {
                attrs.push(("q_num_heads", Attribute::Int(heads as i64)));
                attrs.push(("kv_num_heads", Attribute::Int(key_heads as i64)));
            }
            Case {
                op: ("ort-runtime", "GridAttention"),
                attrs,
                operands: shapes.into_iter().map(|shape| Some((shape, from))).collect(),
                read: &[0],
            }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    #[test]
    fn products_agree_with_their_parts(case in products()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }

    #[test]
    fn gemms_agree_with_their_parts(case in gemms()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }

    #[test]
    fn convolutions_agree_with_their_parts(case in convolutions()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }

    #[test]
    fn formulas_agree_with_their_parts(case in formulas()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }

    #[test]
    fn grid_attentions_agree_with_their_parts(case in grid_attentions()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }

    #[test]
    fn norms_agree_with_their_parts(case in norms()) {
        case.check().map_err(|error| TestCaseError::fail(error.to_string()))?;
    }
}

/// An addend whose memory the result takes over, where the weights are the product's left side and
/// its right side.
#[test]
fn addends_lie_where_the_result_goes() -> Result<()> {
    for (batch, channels, filters, image) in
        [(1, 1, 3, vec![2]), (2, 8, 48, vec![7, 7]), (1, 16, 8, vec![20, 20]), (2, 24, 64, vec![2, 3, 4])]
    {
        for bias in [None, Some((vec![filters], Source::Caller))] {
            let shape = |channels| [&[batch, channels][..], &image].concat();
            let weight = [&[filters, channels][..], &vec![1; image.len()]].concat();
            let case = Case {
                op: ("com.microsoft", "FusedConv"),
                attrs: vec![("activation", Attribute::String("Relu".to_string()))],
                operands: vec![
                    Some((shape(channels), Source::Caller)),
                    Some((weight, Source::Constant)),
                    bias,
                    Some((shape(filters), Source::Node)),
                ],
                read: &[0],
            };
            case.check()?;
        }
    }
    Ok(())
}

/// A depth at which a column-major left-hand side is packed part by part.
#[test]
fn sums_in_parts_are_those_of_doubles() -> Result<()> {
    let [m, n, k] = [600, 33, 900];
    let operand = |shape: &[usize], from| Some((shape.to_vec(), from));
    let sides = [operand(&[k, m], Source::Caller), operand(&[k, n], Source::Caller)];
    let addends = [operand(&[n], Source::Caller), operand(&[m, n], Source::Node)];
    let (half, exchanged) = (("alpha", Attribute::Float(0.5)), ("transA", Attribute::Int(1)));
    let product = Case {
        op: ("ort-runtime", "FusedMatMul"),
        attrs: vec![half.clone(), exchanged.clone()],
        operands: sides.iter().chain(&addends).cloned().collect(),
        read: &[0],
    };
    let gemm = Case {
        op: ("com.microsoft", "FusedGemm"),
        attrs: vec![
            ("activation", Attribute::String("Relu".to_string())),
            ("beta", Attribute::Float(0.25)),
            half,
            exchanged,
        ],
        operands: sides.iter().chain(&addends[1..]).cloned().collect(),
        read: &[0],
    };
    let [a, b] = [numbers(k * m, 0), numbers(k * n, 1)];
    let sum = |row: usize, column: usize| -> f64 {
        (0..k).map(|step| f64::from(a[step * m + row]) * f64::from(b[step * n + column])).sum()
    };
    let (bias, residual, addend) = (numbers(n, 2), numbers(m * n, 3), numbers(m * n, 2));
    for case in [product, gemm] {
        case.check()?;
        let (model, inputs) = case.model()?;
        let inputs: Vec<(&str, Value)> = inputs.iter().map(|(n, v)| (n.as_str(), v.clone())).collect();
        let results = Session::builder(&model).opt_level(Level::Disabled).build()?.run(&inputs)?;
        let expected = (0..m * n).map(|place| {
            let sum = 0.5 * sum(place / n, place % n);
            // Operands and results of other nodes are negated.
            -match case.op.1 {
                "FusedMatMul" => sum + f64::from(bias[place % n]) - f64::from(residual[place]),
                _ => (sum - 0.25 * f64::from(addend[place])).max(0.0),
            }
        });
        let expected: Vec<f32> = expected.map(|value| value as f32).collect();
        let expected = Tensor::from_slice(&[m, n], &expected)?.into();
        compare(&results[0].1, &expected, Tolerance { relative: 1e-5, absolute: 1e-5 })?;
    }
    Ok(())
}
