//! Sizes that only a run tells and that contradict what an operator requires: one error each, of
//! the kind that ONNX Runtime reports. The same model runs on sizes that fit.

use crate::support::{ints, session};
use ort_runtime::ir::{Attribute, Capture, Graph, GraphBuilder, Subgraph, ValueId, ValueType};
use ort_runtime::onnx::proto::tensor_shape_proto::{Dimension, dimension};
use ort_runtime::onnx::proto::{
    GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorShapeProto, TypeProto, ValueInfoProto,
    type_proto,
};
use ort_runtime::{DType, ErrorKind, Model, Result, Session, Tensor, Value};
use prost::Message;

const INVALID: ErrorKind = ErrorKind::InvalidArgument;
const FAIL: ErrorKind = ErrorKind::Fail;

/// An input of one node.
#[derive(Clone, Copy, Debug)]
enum Input {
    /// Floats, all of whose sizes are symbols.
    Floats(&'static [usize]),
    /// Integers of 32 or 64 bits, all zeros.
    Int32s(&'static [usize]),
    Int64s(&'static [usize]),
    Bytes(&'static [usize]),
    /// A constant.
    Constant(&'static [i64]),
    Scale,
    Omitted,
}
use Input::{Bytes, Constant, Floats as F, Int32s as I32, Int64s as I64, Omitted as NONE, Scale};

/// One node, inputs that fit, inputs that do not, and the error.
struct Case {
    op: &'static str,
    attrs: Vec<(&'static str, Attribute)>,
    outputs: usize,
    fits: Vec<Input>,
    wrong: Vec<Input>,
    kind: ErrorKind,
    text: &'static str,
}

fn case(
    op: &'static str,
    attrs: &[(&'static str, Attribute)],
    fits: &[Input],
    wrong: &[Input],
    (kind, text): (ErrorKind, &'static str),
) -> Case {
    let outputs = if op == "Split" { 2 } else { 1 };
    Case { op, attrs: attrs.to_vec(), outputs, fits: fits.to_vec(), wrong: wrong.to_vec(), kind, text }
}

fn int(name: &'static str, value: i64) -> (&'static str, Attribute) {
    (name, Attribute::Int(value))
}

fn text(name: &'static str, value: &str) -> (&'static str, Attribute) {
    (name, Attribute::String(value.to_string()))
}

fn cases() -> Vec<Case> {
    let inner = (INVALID, "the inner size of B is 4, expected 3");
    let too_large =
        (INVALID, "the extent of the kernel along an axis of the padded image is 3, expected 2 at most");
    let pads = ("pads", Attribute::Ints(vec![1, 1, 1, 1]));
    let relu = text("activation", "Relu");
    let kernel = ("kernel_shape", Attribute::Ints(vec![2, 2]));
    vec![
        case("Gemm", &[], &[F(&[2, 3]), F(&[3, 5])], &[F(&[2, 3]), F(&[4, 5])], inner),
        case("Gemm", &[int("transB", 1)], &[F(&[2, 3]), F(&[5, 3])], &[F(&[2, 3]), F(&[5, 4])], inner),
        case("Gemm", &[int("transA", 1)], &[F(&[3, 2]), F(&[3, 5])], &[F(&[3, 2]), F(&[4, 5])], inner),
        case(
            "ms.FusedGemm",
            std::slice::from_ref(&relu),
            &[F(&[2, 3]), F(&[3, 5])],
            &[F(&[2, 3]), F(&[4, 5])],
            inner,
        ),
        case(
            "DepthToSpace",
            &[int("blocksize", 2)],
            &[F(&[1, 8, 2, 3])],
            &[F(&[1, 9, 2, 3])],
            (INVALID, "size 9 is not a multiple of 4"),
        ),
        case(
            "SpaceToDepth",
            &[int("blocksize", 2)],
            &[F(&[1, 2, 4, 6])],
            &[F(&[1, 2, 5, 6])],
            (INVALID, "size 5 is not a multiple of 2"),
        ),
        case(
            "Conv",
            &[],
            &[F(&[1, 2, 5, 5]), F(&[6, 2, 3, 3]), F(&[6])],
            &[F(&[1, 2, 5, 5]), F(&[6, 2, 3, 3]), F(&[7])],
            (FAIL, "the length of the bias is 7, expected 6"),
        ),
        case(
            "ConvTranspose",
            &[],
            &[F(&[1, 2, 5, 5]), F(&[2, 3, 3, 3]), F(&[3])],
            &[F(&[1, 2, 5, 5]), F(&[2, 3, 3, 3]), F(&[4])],
            (INVALID, "the length of the bias is 4, expected 3"),
        ),
        case(
            "Conv",
            &[],
            &[F(&[1, 1, 3, 3]), F(&[1, 1, 3, 3])],
            &[F(&[1, 1, 3, 2]), F(&[1, 1, 3, 3])],
            too_large,
        ),
        case(
            "Conv",
            &[pads.clone(), ("strides", Attribute::Ints(vec![3, 3]))],
            &[F(&[1, 1, 2, 1]), F(&[1, 1, 4, 3])],
            &[F(&[1, 1, 0, 1]), F(&[1, 1, 3, 3])],
            too_large,
        ),
        case(
            "Conv",
            &[text("auto_pad", "VALID"), ("dilations", Attribute::Ints(vec![2]))],
            &[F(&[1, 1, 3]), F(&[1, 1, 2])],
            &[F(&[1, 1, 2]), F(&[1, 1, 2])],
            too_large,
        ),
        case(
            "ConvInteger",
            &[],
            &[Bytes(&[1, 1, 3]), Bytes(&[1, 1, 3])],
            &[Bytes(&[1, 1, 2]), Bytes(&[1, 1, 3])],
            too_large,
        ),
        case(
            "ms.FusedConv",
            std::slice::from_ref(&relu),
            &[F(&[1, 1, 3]), F(&[1, 1, 3])],
            &[F(&[1, 1, 2]), F(&[1, 1, 3])],
            too_large,
        ),
        case(
            "ConvTranspose",
            std::slice::from_ref(&pads),
            &[F(&[1, 1, 2, 2]), F(&[1, 1, 2, 2])],
            &[F(&[1, 1, 2, 2]), F(&[1, 1, 1, 2])],
            (INVALID, "the padding along a spatial axis is 2, expected 1 at most"),
        ),
        case(
            "ms.FusedConv",
            std::slice::from_ref(&relu),
            &[F(&[1, 2, 5, 5]), F(&[6, 2, 3, 3]), F(&[6]), F(&[1, 6, 3, 3])],
            &[F(&[1, 2, 5, 5]), F(&[6, 2, 3, 3]), F(&[6]), F(&[1, 6, 1, 3])],
            (FAIL, "a size of Z is 1, expected 3"),
        ),
        // As many elements as fit, in other places.
        case(
            "Concat",
            &[int("axis", 2)],
            &[F(&[2, 3, 1]), F(&[2, 3, 2])],
            &[F(&[2, 3, 1]), F(&[3, 2, 1])],
            (FAIL, "a size of an input, on another axis than the concat axis, is 3, expected 2"),
        ),
        case(
            "Concat",
            &[int("axis", 2)],
            &[F(&[2, 3, 1]), F(&[5, 3, 0])],
            &[F(&[2, 3, 1]), F(&[3, 2, 1])],
            (FAIL, "on another axis than the concat axis"),
        ),
        case(
            "ms.QLinearConcat",
            &[int("axis", 1)],
            &[Scale, Bytes(&[]), Bytes(&[2, 3]), Scale, Bytes(&[]), Bytes(&[2, 1]), Scale, Bytes(&[])],
            &[Scale, Bytes(&[]), Bytes(&[2, 3]), Scale, Bytes(&[]), Bytes(&[1, 1]), Scale, Bytes(&[])],
            (FAIL, "on another axis than the concat axis, is 1, expected 2"),
        ),
        case(
            "Split",
            &[],
            &[F(&[6]), Constant(&[2, 4])],
            &[F(&[5]), Constant(&[2, 4])],
            (FAIL, "the sum of split [2, 4] is 6, expected 5"),
        ),
        case(
            "Pad",
            &[text("mode", "reflect")],
            &[F(&[3]), Constant(&[2, 2])],
            &[F(&[2]), Constant(&[2, 2])],
            (INVALID, "pads 2 and 2 reflect an axis of 2 elements, expected 1 at most"),
        ),
        case(
            "ScatterElements",
            &[],
            &[F(&[3, 3]), I64(&[2, 3]), F(&[2, 3])],
            &[F(&[3, 3]), I64(&[2, 3]), F(&[3, 2])],
            (INVALID, "size 0 of input 'updates' is 3, expected 2"),
        ),
        case(
            "NegativeLogLikelihoodLoss",
            &[],
            &[F(&[3, 5, 2]), I64(&[3, 2])],
            &[F(&[3, 5, 2]), I64(&[2, 3])],
            (INVALID, "size 0 of input 'target' is 2, expected 3"),
        ),
        case(
            "MaxUnpool",
            &[kernel],
            &[F(&[1, 1, 2, 2]), I64(&[1, 1, 2, 2])],
            &[F(&[1, 1, 2, 2]), I64(&[1, 2, 1, 2])],
            (FAIL, "size 1 of input 'I' is 2, expected 1"),
        ),
        case(
            "LSTM",
            &[int("hidden_size", 3)],
            &[F(&[1, 3, 2]), F(&[1, 12, 2]), F(&[1, 12, 3])],
            &[F(&[1, 3, 2]), F(&[1, 2, 12]), F(&[1, 12, 3])],
            (INVALID, "size 1 of input 'W' is 2, expected 12"),
        ),
        case(
            "GRU",
            &[int("hidden_size", 3)],
            &[F(&[1, 3, 2]), F(&[1, 9, 2]), F(&[1, 9, 3]), NONE, NONE, F(&[1, 3, 3])],
            &[F(&[1, 3, 2]), F(&[1, 9, 2]), F(&[1, 9, 3]), NONE, NONE, F(&[3, 1, 3])],
            (FAIL, "size 0 of input 'initial_h' is 3, expected 1"),
        ),
        case(
            "DeformConv",
            &[],
            &[F(&[1, 1, 3, 3]), F(&[1, 1, 2, 2]), F(&[1, 8, 2, 2])],
            &[F(&[1, 1, 3, 3]), F(&[1, 1, 2, 2]), F(&[1, 2, 8, 2])],
            (FAIL, "size 1 of input 'offset' is 2, expected 8"),
        ),
        case(
            "ms.BiasAdd",
            &[],
            &[F(&[2, 3, 4]), F(&[4]), F(&[2, 3, 4])],
            &[F(&[2, 3, 4]), F(&[4]), F(&[1, 3, 4])],
            (INVALID, "a size of the skip is 1, expected 2"),
        ),
        case(
            "ms.BiasDropout",
            &[],
            &[F(&[2, 4]), F(&[4]), F(&[2, 4])],
            &[F(&[2, 4]), F(&[4]), F(&[1, 4])],
            (INVALID, "a size of the residual is 1, expected 2"),
        ),
        case(
            "ms.BiasGelu",
            &[],
            &[F(&[2, 4]), F(&[4])],
            &[F(&[2, 4]), F(&[1])],
            (INVALID, "the length of the bias is 1, expected 4"),
        ),
        case(
            "ms.FastGelu",
            &[],
            &[F(&[2, 4]), F(&[4])],
            &[F(&[2, 4]), F(&[1])],
            (INVALID, "the length of the bias is 1, expected 4"),
        ),
        case(
            "ms.BiasSplitGelu",
            &[],
            &[F(&[1, 2, 6]), F(&[6])],
            &[F(&[1, 2, 5]), F(&[5])],
            (INVALID, "the last dimension 5 is not a multiple of 2"),
        ),
        case(
            "ms.GatedAdd",
            &[],
            &[F(&[2, 4]), F(&[2, 4]), F(&[2, 1])],
            &[F(&[2, 4]), F(&[1, 4]), F(&[2, 1])],
            (FAIL, "a dimension of Y is 1, expected 2"),
        ),
        case(
            "ms.GatedAdd",
            &[],
            &[F(&[2, 4]), F(&[2, 4]), F(&[2, 1])],
            &[F(&[2, 4]), F(&[2, 4]), F(&[2, 4])],
            (FAIL, "the last dimension of the gate is 4, expected 1"),
        ),
        case(
            "ms.SkipLayerNormalization",
            &[],
            &[F(&[2, 3, 8]), F(&[1, 3, 8]), F(&[8])],
            &[F(&[2, 3, 8]), F(&[2, 1, 8]), F(&[8])],
            (INVALID, "a size of the skip is 1, expected 3"),
        ),
        case(
            "ms.EmbedLayerNormalization",
            &[],
            &[I32(&[2, 3]), I32(&[2, 3]), F(&[5, 8]), F(&[6, 8]), F(&[2, 8]), F(&[8]), F(&[8])],
            &[I32(&[2, 3]), I32(&[1, 3]), F(&[5, 8]), F(&[6, 8]), F(&[2, 8]), F(&[8]), F(&[8])],
            (INVALID, "the batch of segment_ids is 1, expected 2"),
        ),
        case(
            "ms.EmbedLayerNormalization",
            &[],
            &[I32(&[2, 6]), NONE, F(&[5, 8]), F(&[6, 8]), NONE, F(&[8]), F(&[8])],
            &[I32(&[2, 7]), NONE, F(&[5, 8]), F(&[6, 8]), NONE, F(&[8]), F(&[8])],
            (INVALID, "is 7, expected 6 at most"),
        ),
        case(
            "ms.DecoderMaskedMultiHeadAttention",
            &[int("num_heads", 2)],
            &[F(&[2, 1, 8]), F(&[2, 1, 8]), F(&[2, 1, 8])],
            &[F(&[2, 2, 8]), F(&[2, 1, 8]), F(&[2, 1, 8])],
            (INVALID, "the length of query is 2, expected 1"),
        ),
    ]
}

/// A graph of one node, and values of its inputs.
fn one_node(case: &Case, inputs: &[Input]) -> Result<(Graph, Vec<(String, Value)>)> {
    let (domain, op) = match case.op.strip_prefix("ms.") {
        Some(op) => ("com.microsoft", op),
        None => ("", case.op),
    };
    let mut builder = GraphBuilder::new(op);
    let (mut ids, mut values): (Vec<Option<ValueId>>, Vec<(String, Value)>) = (Vec::new(), Vec::new());
    for (index, input) in inputs.iter().enumerate() {
        let zeros = |dtype: DType, shape: &[usize]| {
            let bytes = dtype.byte_len(shape.iter().product()).expect("a few bytes");
            Tensor::from_bytes(dtype, shape, vec![0; bytes].into())
        };
        let tensor = match *input {
            F(shape) => zeros(DType::F32, shape)?,
            I32(shape) => zeros(DType::I32, shape)?,
            I64(shape) => zeros(DType::I64, shape)?,
            Bytes(shape) => zeros(DType::U8, shape)?,
            Scale => Tensor::scalar(1.0f32)?,
            Constant(elements) => {
                ids.push(Some(builder.constant(ints(elements)?)));
                continue;
            }
            NONE => {
                ids.push(None);
                continue;
            }
        };
        let name = format!("x{index}");
        let sizes: Vec<String> = (0..tensor.shape().len()).map(|axis| format!("{name}_{axis}")).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        ids.push(Some(builder.input(&name, tensor.dtype(), &sizes)));
        values.push((name, tensor.into()));
    }
    let outputs = builder.add((domain, op), &ids, &case.attrs, case.outputs, Vec::new())?;
    // Views of an input run no kernel that could check them.
    let results: Result<Vec<ValueId>> =
        outputs.iter().map(|output| builder.node("Identity", &[*output], &[])).collect();
    Ok((builder.finish(&results?)?, values))
}

fn run(session: &Session, values: &[(String, Value)]) -> Result<()> {
    let values: Vec<(&str, Value)> =
        values.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    session.run(&values).map(|_| ())
}

#[test]
fn contradictory_sizes_are_refused_and_others_run() -> Result<()> {
    let mut problems = Vec::new();
    for case in cases() {
        let (graph, fits) = one_node(&case, &case.fits)?;
        let (_, wrong) = one_node(&case, &case.wrong)?;
        let session = session(graph)?;
        // The error belongs to one set of sizes, so the session stays usable.
        for _ in 0..2 {
            if let Err(problem) = run(&session, &fits) {
                problems.push(format!("{} of {:?}: {problem}", case.op, case.fits));
            }
            match run(&session, &wrong) {
                Ok(()) => problems.push(format!("{} of {:?} is accepted", case.op, case.wrong)),
                Err(problem) => {
                    let op = case.op.trim_start_matches("ms.");
                    let is_named = problem.nodes().last().is_some_and(|(_, node)| node == op);
                    if problem.kind() != case.kind || !problem.to_string().contains(case.text) || !is_named {
                        problems.push(format!("{} of {:?}: {problem:?}", case.op, case.wrong));
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

fn zeros(shape: &[usize]) -> Result<Value> {
    Ok(Tensor::from_vec(shape, vec![0.0f32; shape.iter().product()])?.into())
}

/// `if c { Gemm(a, b) } else { a }`, in which the branch captures both.
fn branches() -> Result<Graph> {
    let mut main = GraphBuilder::new("main");
    let condition = main.input("c", DType::Bool, &["k"]);
    let outer = [main.input("a", DType::F32, &["m", "n"]), main.input("b", DType::F32, &["o", "p"])];
    let branch = |attr: &'static str, op: &str| -> Result<Subgraph> {
        let mut graph = Graph::new(attr);
        let inner = [0, 1].map(|index| graph.add_value(format!("captured_{index}"), ValueType::Unknown));
        let captures = outer.iter().zip(&inner).map(|(&outer, &inner)| Capture { outer, inner }).collect();
        let mut builder = GraphBuilder::extend(graph);
        let result = match op {
            "Gemm" => builder.node(op, &inner, &[])?,
            _ => builder.node(op, &inner[..1], &[])?,
        };
        Ok(Subgraph { attr, graph: builder.finish_subgraph(&[result]), captures })
    };
    let both = vec![branch("then_branch", "Gemm")?, branch("else_branch", "Neg")?];
    let chosen = main.add(("", "If"), &[Some(condition)], &[], 1, both)?;
    main.finish(&chosen)
}

#[test]
fn sizes_of_a_branch_count_only_if_it_is_taken() -> Result<()> {
    let session = session(branches()?)?;
    let condition = |holds: &[bool]| Tensor::from_bools(&[holds.len()], holds).map(Value::from);
    let run = |holds: &[bool], rows: usize| {
        session.run(&[("c", condition(holds)?), ("a", zeros(&[2, 3])?), ("b", zeros(&[rows, 5])?)])
    };
    assert_eq!(run(&[true], 3)?[0].1.tensor()?.shape(), [2, 5]);
    assert_eq!(run(&[false], 4)?[0].1.tensor()?.shape(), [2, 3]);
    let problem = run(&[true], 4).unwrap_err();
    assert_eq!(problem.kind(), INVALID, "{problem}");
    assert_eq!(problem.nodes().map(|(_, op)| op).collect::<Vec<_>>(), ["If", "Gemm"]);
    assert!(problem.to_string().contains("the inner size of B is 4, expected 3"), "{problem}");
    for holds in [&[true, false][..], &[]] {
        let problem = run(holds, 3).unwrap_err();
        assert_eq!(problem.kind(), FAIL, "{problem}");
        assert!(problem.to_string().contains("expected one element"), "{problem}");
    }
    Ok(())
}

/// A branch of one node on captured values, or of `Neg` of the first.
fn branch_of(attr: &'static str, node: Option<&Unplannable>, outer: &[ValueId]) -> Result<Subgraph> {
    let mut graph = Graph::new(attr);
    let inner: Vec<ValueId> = (0..outer.len())
        .map(|index| graph.add_value(format!("captured_{index}"), ValueType::Unknown))
        .collect();
    let captures = outer.iter().zip(&inner).map(|(&outer, &inner)| Capture { outer, inner }).collect();
    let mut builder = GraphBuilder::extend(graph);
    let result = match node {
        Some((op, attrs, ..)) => builder.node(op, &inner, attrs)?,
        None => builder.node("Neg", &inner[..1], &[])?,
    };
    Ok(Subgraph { attr, graph: builder.finish_subgraph(&[result]), captures })
}

/// An operator, its attributes, two shapes that its kernel refuses to plan, and the error.
type Unplannable =
    (&'static str, Vec<(&'static str, Attribute)>, [&'static [usize]; 2], ErrorKind, &'static str);

/// Operators whose kernels compare the sizes.
fn unplannable() -> Vec<Unplannable> {
    let equation = vec![text("equation", "ij,jk->ik")];
    vec![
        ("MatMul", vec![], [&[2, 3], &[4, 5]], FAIL, "[2, 3]"),
        ("MatMul", vec![], [&[2, 1, 3], &[3, 3, 5]], FAIL, "[2, 1, 3]"),
        ("Conv", vec![], [&[1, 3, 8, 8], &[4, 5, 3, 3]], FAIL, "channels"),
        ("ConvTranspose", vec![], [&[1, 3, 8, 8], &[4, 5, 3, 3]], INVALID, "channels"),
        ("Einsum", equation, [&[2, 3], &[4, 5]], INVALID, "4"),
    ]
}

/// `if c { node(a, b) } else { -a }`, in a loop body too.
#[test]
fn what_no_kernel_can_plan_is_an_error_of_the_branch_that_is_taken() -> Result<()> {
    for case in unplannable() {
        let (op, _, shapes, kind, message) = &case;
        for nested in [false, true] {
            let mut main = GraphBuilder::new("main");
            let mut outer = Vec::new();
            for (name, shape) in ["a", "b"].iter().zip(shapes) {
                let sizes: Vec<String> = (0..shape.len()).map(|axis| format!("{name}_{axis}")).collect();
                let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
                outer.push(main.input(name, DType::F32, &sizes));
            }
            let (control, result) = match nested {
                false => {
                    let condition = main.input("c", DType::Bool, &[]);
                    let branches = vec![
                        branch_of("then_branch", Some(&case), &outer)?,
                        branch_of("else_branch", None, &outer)?,
                    ];
                    ("If", main.add(("", "If"), &[Some(condition)], &[], 1, branches)?)
                }
                true => {
                    // Without an iteration there is nothing to refuse.
                    let trips = main.input("c", DType::I64, &[]);
                    let body = branch_of("body", Some(&case), &outer)?;
                    let mut builder = GraphBuilder::extend(body.graph);
                    builder.input("number", DType::I64, &[]);
                    let holds = builder.input("holds", DType::Bool, &[]);
                    let result = builder.graph().nodes[0].outputs[0].expect("the node has an output");
                    let graph = builder.finish_subgraph(&[holds, result]);
                    let body = Subgraph { graph, ..body };
                    ("Loop", main.add(("", "Loop"), &[Some(trips), None], &[], 1, vec![body])?)
                }
            };
            let session = session(main.finish(&result)?)?;
            let run = |taken: bool| {
                let c = match nested {
                    false => Tensor::from_bools(&[], &[taken])?,
                    true => Tensor::scalar(i64::from(taken))?,
                };
                session.run(&[("c", c.into()), ("a", zeros(shapes[0])?), ("b", zeros(shapes[1])?)])
            };
            for _ in 0..2 {
                let shape = run(false)?[0].1.tensor()?.shape().to_vec();
                if !nested {
                    assert_eq!(shape, shapes[0], "{op}");
                }
                let problem = run(true).expect_err(op);
                assert_eq!(problem.kind(), *kind, "{problem:?}");
                assert_eq!(problem.nodes().map(|(_, op)| op).collect::<Vec<_>>(), [control, *op]);
                assert!(problem.to_string().contains(message), "{problem}");
            }
        }
    }
    Ok(())
}

/// The inner size of the GEMM is the number of nonzero elements, which no plan knows.
#[test]
fn sizes_that_depend_on_data_are_checked_in_the_run() -> Result<()> {
    let mut builder = GraphBuilder::new("counted");
    let x = builder.input("x", DType::F32, &["m"]);
    let a = builder.input("a", DType::F32, &["2", "n"]);
    let places = builder.node("NonZero", &[x], &[])?;
    let places = builder.node("Cast", &[places], &[int("to", 1)])?;
    let column = builder.node("Transpose", &[places], &[])?;
    let result = builder.node("Gemm", &[a, column], &[])?;
    let session = Session::builder(&Model::from_graph(builder.finish(&[result])?)).threads(1).build()?;
    for (elements, fits) in [([1.0f32, 2.0, 3.0], true), ([1.0, 0.0, 3.0], false)] {
        let x = Tensor::from_slice(&[3], &elements)?;
        let outcome = session.run(&[("x", x.into()), ("a", zeros(&[2, 3])?)]);
        assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
        if let Err(problem) = outcome {
            assert_eq!(problem.kind(), INVALID, "{problem}");
            assert!(problem.to_string().contains("the inner size of B is 2, expected 3"), "{problem}");
        }
    }
    Ok(())
}

/// `int2` packs four elements into a byte, so 35 and 36 of them take as many bytes.
#[test]
fn a_reshape_counts_packed_elements() -> Result<()> {
    let mut builder = GraphBuilder::new("packed");
    let x = builder.input("x", DType::I2, &["a", "b", "c"]);
    let shape = builder.constant(ints(&[5, -1])?);
    let result = builder.node("Reshape", &[x, shape], &[])?;
    let session = session(builder.finish(&[result])?)?;
    for (last, fits) in [(5, true), (6, false)] {
        let shape = [2, 3, last];
        let bytes = DType::I2.byte_len(shape.iter().product()).expect("a few bytes");
        let x = Tensor::from_bytes(DType::I2, &shape, vec![0; bytes].into())?;
        let outcome = session.run(&[("x", x.into())]);
        assert_eq!(outcome.is_ok(), fits, "{outcome:?}");
    }
    Ok(())
}

/// `Split` of a vector of this size, or of size `n`, into `count` parts, at an opset.
fn split_at(opset: i64, size: Option<i64>, count: usize) -> Result<Model> {
    let value = match size {
        Some(size) => dimension::Value::DimValue(size),
        None => dimension::Value::DimParam("n".into()),
    };
    let shape = TensorShapeProto { dim: vec![Dimension { value: Some(value), ..Dimension::default() }] };
    let tensor = type_proto::Tensor { elem_type: Some(DType::F32.onnx_code()), shape: Some(shape) };
    let ty = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..TypeProto::default() };
    let parts: Vec<String> = (0..count).map(|index| format!("y{index}")).collect();
    let output = |name: &String| ValueInfoProto { name: Some(name.clone()), ..ValueInfoProto::default() };
    let graph = GraphProto {
        name: Some("g".into()),
        input: vec![ValueInfoProto { r#type: Some(ty), ..output(&"x".into()) }],
        output: parts.iter().map(output).collect(),
        node: vec![NodeProto {
            op_type: Some("Split".into()),
            input: vec!["x".into()],
            output: parts,
            ..NodeProto::default()
        }],
        ..GraphProto::default()
    };
    let proto = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(opset) }],
        graph: Some(graph),
        ..ModelProto::default()
    };
    Model::from_bytes(proto.encode_to_vec())
}

/// Only since version 18 the last part may be smaller.
#[test]
fn early_versions_split_evenly() -> Result<()> {
    for opset in [1, 2, 11, 13] {
        for (size, count) in [(6, 3), (6, 1), (0, 2)] {
            for known in [Some(size), None] {
                let session = Session::builder(&split_at(opset, known, count)?).threads(1).build()?;
                let outputs = session.run(&[("x", zeros(&[size as usize])?)])?;
                for (_, part) in &outputs {
                    assert_eq!(part.tensor()?.shape(), [size as usize / count], "opset {opset}");
                }
            }
        }
        for (size, count) in [(7, 3), (7, 2), (2, 3), (9, 4)] {
            let text = format!("the size of the split axis {size} is not a multiple of {count}");
            let loading = split_at(opset, Some(size), count).map(|_| ()).unwrap_err();
            let session = Session::builder(&split_at(opset, None, count)?).threads(1).build()?;
            let running = session.run(&[("x", zeros(&[size as usize])?)]).unwrap_err();
            for problem in [loading, running] {
                assert_eq!(problem.kind(), FAIL, "opset {opset}: {problem}");
                assert!(problem.to_string().contains(&text), "opset {opset}: {problem}");
            }
        }
    }
    Ok(())
}
