//! Gradients against central finite differences, on the CPU, in `double`.

use crate::gradient_support::{Build, Given, STEP, TOLERANCE, check, doubles, expanded, gradient};
use crate::support::{ints, session};
use ort_runtime::ir::{Attribute, GraphBuilder, ValueId};
use ort_runtime::spec::Registry;
use ort_runtime::{DType, ErrorKind, Result, Tensor, Value};

type Attrs = &'static [(&'static str, f32)];

const ALL: &[f64] = &[-2.3, -0.7, -0.2, 0.3, 0.45, 1.6, 3.2];
const INNER: &[f64] = &[-0.9, -0.5, -0.1, 0.2, 0.4, 0.6, 0.8];
const POSITIVE: &[f64] = &[0.1, 0.5, 0.9, 1.3, 1.8, 2.5, 4.0];
const ABOVE_ONE: &[f64] = &[1.1, 1.5, 1.9, 2.3, 2.8, 3.5, 4.0];
const OTHER: &[f64] = &[0.7, -1.9, 1.1, -0.6, 2.2, 0.9, -1.3];

/// Every differentiable operator that has a formula, with float attributes and its operands.
const ELEMENTWISE: &[(&str, Attrs, &[&[f64]])] = &[
    ("Abs", &[], &[ALL]),
    ("Acos", &[], &[INNER]),
    ("Acosh", &[], &[ABOVE_ONE]),
    ("Add", &[], &[ALL, OTHER]),
    ("Asin", &[], &[INNER]),
    ("Asinh", &[], &[ALL]),
    ("Atan", &[], &[ALL]),
    ("Atanh", &[], &[INNER]),
    ("Ceil", &[], &[ALL]),
    ("Celu", &[("alpha", 0.7)], &[ALL]),
    ("Cos", &[], &[ALL]),
    ("Cosh", &[], &[ALL]),
    ("Div", &[], &[ALL, OTHER]),
    ("Elu", &[("alpha", 1.3)], &[ALL]),
    ("Erf", &[], &[ALL]),
    ("Exp", &[], &[ALL]),
    ("Floor", &[], &[ALL]),
    ("Gelu", &[], &[ALL]),
    ("HardSigmoid", &[("alpha", 0.3)], &[ALL]),
    ("HardSwish", &[], &[ALL]),
    ("LeakyRelu", &[("alpha", 0.1)], &[ALL]),
    ("Log", &[], &[POSITIVE]),
    ("Mish", &[], &[ALL]),
    ("Mod", &[], &[ALL, OTHER]),
    ("Mul", &[], &[ALL, OTHER]),
    ("Neg", &[], &[ALL]),
    ("PRelu", &[], &[ALL, OTHER]),
    ("Pow", &[], &[POSITIVE, OTHER]),
    ("Reciprocal", &[], &[ALL]),
    ("Relu", &[], &[ALL]),
    ("Round", &[], &[ALL]),
    ("Selu", &[], &[ALL]),
    ("Shrink", &[("bias", 0.2), ("lambd", 0.4)], &[ALL]),
    ("Sigmoid", &[], &[ALL]),
    ("Sign", &[], &[ALL]),
    ("Sin", &[], &[ALL]),
    ("Sinh", &[], &[ALL]),
    ("Softplus", &[], &[ALL]),
    ("Softsign", &[], &[ALL]),
    ("Sqrt", &[], &[POSITIVE]),
    ("Sub", &[], &[ALL, OTHER]),
    ("SwiGLU", &[("alpha", 1.2)], &[ALL, OTHER]),
    ("Swish", &[("alpha", 0.8)], &[ALL]),
    ("Tan", &[], &[INNER]),
    ("Tanh", &[], &[ALL]),
    ("ThresholdedRelu", &[("alpha", 0.4)], &[ALL]),
];

/// Formulas of booleans, which are not differentiable, and `Where`, whose condition is one (it has
/// its own row below).
const WITHOUT: &[&str] = &[
    "And",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "IsNaN",
    "Less",
    "LessOrEqual",
    "Not",
    "Or",
    "Where",
    "Xor",
];

#[test]
fn the_table_holds_every_formula() -> Result<()> {
    let records = Registry::global()?.records();
    let formulas = records.iter().filter(|record| record.scalar.is_some() && record.domain.is_empty());
    let mut names: Vec<&str> = formulas.map(|record| record.name).collect();
    let mut listed: Vec<&str> =
        ELEMENTWISE.iter().map(|(op, ..)| *op).chain(WITHOUT.iter().copied()).collect();
    names.sort_unstable();
    listed.sort_unstable();
    assert_eq!(names, listed);
    Ok(())
}

#[test]
fn elementwise_operators() -> Result<()> {
    let mut problems = Vec::new();
    for (op, attrs, operands) in ELEMENTWISE {
        if let Err(problem) = elementwise(op, attrs, operands) {
            problems.push(format!("{op}: {problem}"));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

/// One row: all operands have the length of the first. The builder takes a plain function, so the
/// graph is built here.
fn elementwise(op: &str, attrs: Attrs, operands: &[&[f64]]) -> Result<()> {
    let attrs: Vec<(&str, Attribute)> =
        attrs.iter().map(|(name, value)| (*name, Attribute::Float(*value))).collect();
    let mut variants = vec![attrs.clone()];
    match op {
        "Mod" => variants = vec![vec![("fmod", Attribute::Int(1))]],
        "Gelu" => variants.push(vec![("approximate", Attribute::String("tanh".to_string()))]),
        _ => {}
    }
    for attrs in variants {
        let mut builder = GraphBuilder::new(op);
        let names = ["a", "b"];
        let inputs: Vec<ValueId> =
            operands.iter().zip(names).map(|(_, name)| builder.input(name, DType::F64, &["n"])).collect();
        let y = builder.node(op, &inputs, &attrs)?;
        let scale = Tensor::from_slice(&[7], &[1.0f64, -2.0, 0.5, 3.0, 1.5, -1.0, 2.0])?;
        let scale = builder.constant(scale);
        let scaled = builder.node("Mul", &[y, scale], &[])?;
        let mut outputs = gradient(&mut builder, &names[..operands.len()], "Mul_1.0", &inputs)?;
        outputs.insert(0, scaled);
        let session = session(expanded(builder, &outputs)?)?;
        let run = |operands: &[Vec<f64>]| -> Result<Vec<(String, Value)>> {
            let tensors = operands.iter().map(|all| Tensor::from_slice(&[all.len()], all));
            let tensors = tensors.collect::<Result<Vec<Tensor>>>()?;
            let inputs: Vec<(&str, Value)> =
                names.iter().zip(tensors).map(|(name, tensor)| (*name, tensor.into())).collect();
            session.run(&inputs)
        };
        let at: Vec<Vec<f64>> = operands.iter().map(|all| all.to_vec()).collect();
        let outputs = run(&at)?;
        for index in 0..operands.len() {
            // All places move at once: each result depends on its own alone.
            let moved = |offset: f64| -> Result<Vec<f64>> {
                let mut operands = at.clone();
                operands[index].iter_mut().for_each(|element| *element += offset);
                doubles(&run(&operands)?, 0)
            };
            let (above, below) = (moved(STEP)?, moved(-STEP)?);
            for (place, actual) in doubles(&outputs, index + 1)?.into_iter().enumerate() {
                let expected = (above[place] - below[place]) / (2.0 * STEP);
                let near = (actual - expected).abs() <= TOLERANCE * expected.abs().max(1.0);
                if !near {
                    let x = operands[index][place];
                    return Err(ort_runtime::Error::new(
                        ErrorKind::Fail,
                        format!("gradient {index} at {x} is {actual}, differences give {expected}"),
                    ));
                }
            }
        }
    }
    Ok(())
}

const SIX: &[f64] = &[0.5, -1.2, 2.0, 0.3, -0.7, 1.1];
const TWELVE: &[f64] = &[0.5, -1.2, 2.0, 0.3, -0.7, 1.1, 0.9, 0.2, -0.4, 1.3, -2.1, 0.6];

#[test]
fn structures() -> Result<()> {
    let table: &[(&str, Build, &[Given<'_>])] = &[
        ("row", |b, x| b.node("Mul", x, &[]), &[(&[2, 3], SIX), (&[3], &[1.5, -0.5, 2.0])]),
        ("column", |b, x| b.node("Div", x, &[]), &[(&[2, 3], SIX), (&[2, 1], &[1.5, -0.5])]),
        ("scalar", |b, x| b.node("Sub", x, &[]), &[(&[], &[0.7]), (&[2, 3], SIX)]),
        (
            "both ways",
            |b, x| b.node("Mul", x, &[]),
            &[(&[2, 1], &[1.5, -0.5]), (&[1, 1, 3], &[1.0, 2.0, -3.0])],
        ),
        (
            "chain",
            |b, x| {
                let sine = b.node("Sin", x, &[])?;
                let power = b.node("Exp", &[sine], &[])?;
                b.node("Tanh", &[power], &[])
            },
            &[(&[2, 3], SIX)],
        ),
        (
            "diamond",
            |b, x| {
                let (left, right) = (b.node("Sin", x, &[])?, b.node("Exp", x, &[])?);
                let product = b.node("Mul", &[left, right], &[])?;
                b.node("Add", &[product, left], &[])
            },
            &[(&[2, 3], SIX)],
        ),
        (
            "where",
            |b, x| {
                let condition = b.node("Less", x, &[])?;
                b.node("Where", &[condition, x[0], x[1]], &[])
            },
            &[(&[2, 3], SIX), (&[3], &[0.1, 0.2, 0.4])],
        ),
        ("sum", |b, x| b.node("Sum", x, &[]), &[(&[2, 3], SIX), (&[3], &[0.1, 0.2, 0.4])]),
        ("mean", |b, x| b.node("Mean", x, &[]), &[(&[2, 3], SIX), (&[3], &[0.1, 0.2, 0.4])]),
        ("matrices", |b, x| b.node("MatMul", x, &[]), &[(&[2, 3], SIX), (&[3, 4], TWELVE)]),
        ("batch by matrix", |b, x| b.node("MatMul", x, &[]), &[(&[2, 2, 3], TWELVE), (&[3, 2], SIX)]),
        ("batches", |b, x| b.node("MatMul", x, &[]), &[(&[2, 2, 3], TWELVE), (&[1, 3, 2], SIX)]),
        (
            "matrix by vector",
            |b, x| b.node("MatMul", x, &[]),
            &[(&[2, 2, 3], TWELVE), (&[3], &[1.0, 2.0, -1.0])],
        ),
        ("vector by matrix", |b, x| b.node("MatMul", x, &[]), &[(&[3], &[1.0, 2.0, -1.0]), (&[3, 2], SIX)]),
        ("vectors", |b, x| b.node("MatMul", x, &[]), &[(&[3], &[1.0, 2.0, -1.0]), (&[3], &[0.5, 1.5, 0.2])]),
        (
            "gemm",
            |b, x| {
                let attrs = [("alpha", Attribute::Float(0.5)), ("beta", Attribute::Float(2.0))];
                b.node("Gemm", x, &attrs)
            },
            &[(&[2, 3], SIX), (&[3, 4], TWELVE), (&[4], &[1.0, 2.0, 3.0, 4.0])],
        ),
        (
            "gemm, transposed",
            |b, x| {
                let attrs = [("transA", Attribute::Int(1)), ("transB", Attribute::Int(1))];
                b.node("Gemm", x, &attrs)
            },
            &[(&[3, 2], SIX), (&[4, 3], TWELVE), (&[2, 1], &[1.0, 2.0])],
        ),
        (
            "gemm, one transposed",
            |b, x| b.node("Gemm", x, &[("transB", Attribute::Int(1))]),
            &[(&[2, 3], SIX), (&[4, 3], TWELVE)],
        ),
        (
            "movement",
            |b, x| {
                let shape = b.constant(ints(&[3, -1])?);
                let flat = b.node("Reshape", &[x[0], shape], &[])?;
                let turned = b.node("Transpose", &[flat], &[])?;
                let axes = b.constant(ints(&[1])?);
                let deep = b.node("Unsqueeze", &[turned, axes], &[])?;
                let again = b.node("Identity", &[deep], &[])?;
                let shape = b.constant(ints(&[2, 4, 3])?);
                let wide = b.node("Expand", &[again, shape], &[])?;
                b.node("Mul", &[wide, x[1]], &[])
            },
            &[(&[2, 3], SIX), (&[4, 3], TWELVE)],
        ),
        (
            "permutation",
            |b, x| {
                let turned = b.node("Transpose", &[x[0]], &[("perm", Attribute::Ints(vec![2, 0, 1]))])?;
                b.node("Mul", &[turned, x[1]], &[])
            },
            &[(&[2, 2, 3], TWELVE), (&[3, 2, 2], TWELVE)],
        ),
        (
            "row sums",
            |b, x| {
                let axes = b.constant(ints(&[-1])?);
                b.node("ReduceSum", &[x[0], axes], &[("keepdims", Attribute::Int(0))])
            },
            &[(&[2, 3], SIX)],
        ),
        (
            "column means",
            |b, x| {
                let axes = b.constant(ints(&[0])?);
                b.node("ReduceMean", &[x[0], axes], &[])
            },
            &[(&[2, 3], SIX)],
        ),
        (
            "mean of all",
            |b, x| b.node("ReduceMean", x, &[("keepdims", Attribute::Int(0))]),
            &[(&[2, 3], SIX)],
        ),
        ("softmax", |b, x| b.node("Softmax", x, &[]), &[(&[2, 3], SIX)]),
        ("log softmax", |b, x| b.node("LogSoftmax", x, &[("axis", Attribute::Int(0))]), &[(&[2, 3], SIX)]),
    ];
    for (name, build, given) in table {
        let sizes: Vec<Vec<String>> =
            given.iter().map(|(shape, _)| shape.iter().map(usize::to_string).collect()).collect();
        let dims: Vec<Vec<&str>> =
            sizes.iter().map(|sizes| sizes.iter().map(String::as_str).collect()).collect();
        let dims: Vec<&[&str]> = dims.iter().map(Vec::as_slice).collect();
        check(name, *build, given, &dims)?;
    }
    Ok(())
}

#[test]
fn broadcasting_that_only_the_run_knows() -> Result<()> {
    let one: Given<'_> = (&[1, 3], &[0.4, -0.8, 1.7]);
    let multiply: Build = |b, x| b.node("Mul", x, &[]);
    check("one row", multiply, &[(&[2, 3], SIX), one], &[&["n", "3"], &["m", "3"]])?;
    check("equal rows", multiply, &[(&[2, 3], SIX), (&[2, 3], SIX)], &[&["n", "3"], &["m", "3"]])?;
    check("higher rank", multiply, &[one, (&[2, 2, 3], TWELVE)], &[&["m", "3"], &["k", "n", "3"]])
}

#[test]
fn second_order_and_other_points() -> Result<()> {
    let mut builder = GraphBuilder::new("cube");
    let x = builder.input("x", DType::F64, &["n"]);
    let other = builder.input("other", DType::F64, &["m"]);
    let square = builder.node("Mul", &[x, x], &[])?;
    builder.node("Mul", &[square, x], &[])?;
    let first = gradient(&mut builder, &["x"], "Mul_1.0", &[x])?;
    let second = gradient(&mut builder, &["x"], "Gradient_2.0", &[x])?;
    let elsewhere = gradient(&mut builder, &["x"], "Mul_1.0", &[other])?;
    let inner = gradient(&mut builder, &["x", "Mul_0.0"], "Mul_1.0", &[other, other])?;
    let outputs = [first, second, elsewhere, inner].concat();
    let session = session(expanded(builder, &outputs)?)?;
    let x = Tensor::from_slice(&[2], &[2.0, -3.0])?;
    let other = Tensor::from_slice(&[1], &[5.0])?;
    let outputs = session.run(&[("x", x.into()), ("other", other.into())])?;
    // x^3 has the slopes 3 x^2 and 6 x; of s * x the slope by x is s, and by s it is x.
    let expected: [&[f64]; 5] = [&[12.0, 27.0], &[12.0, -18.0], &[75.0], &[5.0], &[5.0]];
    for (index, expected) in expected.iter().enumerate() {
        assert_eq!(doubles(&outputs, index)?, *expected, "output {index}");
    }
    Ok(())
}

#[test]
fn what_does_not_depend_has_zeros() -> Result<()> {
    let mut builder = GraphBuilder::new("zeros");
    let x = builder.input("x", DType::F64, &["n"]);
    let floor = builder.node("Floor", &[x], &[])?;
    let shape = builder.node("Shape", &[x], &[])?;
    let code = i64::from(DType::F64.onnx_code());
    let size = builder.node("Cast", &[shape], &[("to", Attribute::Int(code))])?;
    builder.node("Mul", &[floor, size], &[])?;
    let outputs = gradient(&mut builder, &["x"], "Mul_3.0", &[x])?;
    let session = session(expanded(builder, &outputs)?)?;
    let outputs = session.run(&[("x", Tensor::from_slice(&[3], &[1.5, 2.5, -0.5])?.into())])?;
    assert_eq!(doubles(&outputs, 0)?, [0.0; 3]);
    Ok(())
}

#[test]
fn kinks_and_infinities_stay_numbers() -> Result<()> {
    for (op, x, expected) in [
        ("Relu", [0.0, f64::INFINITY], [0.0, 1.0]),
        ("Abs", [0.0, f64::NEG_INFINITY], [0.0, -1.0]),
        ("Elu", [0.0, 1000.0], [1.0, 1.0]),
        ("Softplus", [-1000.0, 1000.0], [0.0, 1.0]),
    ] {
        let mut builder = GraphBuilder::new(op);
        let input = builder.input("x", DType::F64, &["2"]);
        builder.node(op, &[input], &[])?;
        let outputs = gradient(&mut builder, &["x"], &format!("{op}_0.0"), &[input])?;
        let outputs =
            session(expanded(builder, &outputs)?)?.run(&[("x", Tensor::from_slice(&[2], &x)?.into())])?;
        assert_eq!(doubles(&outputs, 0)?, expected, "{op}");
    }
    Ok(())
}

#[test]
fn dropout_hands_on_what_it_kept() -> Result<()> {
    for training in [true, false] {
        let mut builder = GraphBuilder::new("dropout");
        let x = builder.input("x", DType::F64, &["n"]);
        let ratio = builder.constant(Tensor::scalar(0.25f64)?);
        let mode = builder.constant(Tensor::scalar(training)?);
        let (inputs, seed) = ([Some(x), Some(ratio), Some(mode)], [("seed", Attribute::Int(7))]);
        let y = builder.add(("", "Dropout"), &inputs, &seed, 1, Vec::new())?;
        let mut outputs = gradient(&mut builder, &["x"], "Dropout_0.0", &[x])?;
        outputs.extend(y);
        let session = session(expanded(builder, &outputs)?)?;
        let x: Vec<f64> = (1..=100).map(f64::from).collect();
        let outputs = session.run(&[("x", Tensor::from_slice(&[100], &x)?.into())])?;
        let (slopes, y) = (doubles(&outputs, 0)?, doubles(&outputs, 1)?);
        let dropped = y.iter().filter(|y| **y == 0.0).count();
        assert_eq!((5..60).contains(&dropped), training, "{dropped} of 100 were dropped");
        for ((x, y), slope) in x.iter().zip(y).zip(slopes) {
            assert!((slope * x - y).abs() < 1e-9, "the slope at {x} is {slope}, the result {y}");
        }
    }
    Ok(())
}

#[test]
fn mistakes_are_named() -> Result<()> {
    let problem = |xs: &[&str], y: &str| -> Result<String> {
        let mut builder = GraphBuilder::new("mistakes");
        let x = builder.input("x", DType::F64, &["n"]);
        let code = Attribute::Int(i64::from(DType::F64.onnx_code()));
        builder.node("BitCast", &[x], &[("to", code)])?;
        let outputs = gradient(&mut builder, xs, y, &[x])?;
        Ok(expanded(builder, &outputs).err().map(|problem| problem.to_string()).unwrap_or_default())
    };
    assert_eq!(
        problem(&["x"], "BitCast_0.0")?,
        "not implemented: node 'Gradient_1' (Gradient): no gradient through BitCast: its output is the same bits as another type \
         (1 node, first 'BitCast_0'); differentiate by what comes after these nodes, or replace them"
    );
    assert_eq!(
        problem(&["w"], "BitCast_0.0")?,
        "invalid graph: node 'Gradient_1' (Gradient): the graph has no tensor 'w'"
    );
    assert!(problem(&["x", "x"], "BitCast_0.0")?.contains("1 inputs for 2 tensors"));
    assert!(problem(&["x"], "Gradient_1.0")?.contains("part of the gradient"));
    Ok(())
}
