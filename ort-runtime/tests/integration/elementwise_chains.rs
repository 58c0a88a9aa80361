//! Chains of elementwise operators: which become one node, and that they compute the same.

use ort_runtime::ir::{GraphBuilder, ValueId};
use ort_runtime::rewrite::Level;
use ort_runtime::tensor::{Tolerance, compare};
use ort_runtime::{DType, Model, Result, Session, Tensor, Value};

/// Builds on a value of shape `[4, 64]` and one of `[64]`.
type Build = fn(&mut GraphBuilder, [ValueId; 2]) -> Result<Vec<ValueId>>;

struct Case {
    name: &'static str,
    build: Build,
    /// The operators of the nodes that are left.
    left: &'static [&'static str],
}

const CASES: &[Case] = &[
    Case {
        name: "what one node reads",
        build: |b, [x, a]| {
            let scaled = b.node("Mul", &[x, a], &[])?;
            Ok(vec![b.node("Sigmoid", &[scaled], &[])?])
        },
        left: &["FusedElementwise"],
    },
    Case {
        name: "a cheap formula for each of its readers, while its input lives",
        build: |b, [x, a]| {
            let scaled = b.node("Mul", &[x, a], &[])?;
            let (one, two) = (b.node("Relu", &[scaled], &[])?, b.node("Sigmoid", &[scaled], &[])?);
            let both = b.node("Sub", &[one, two], &[])?;
            Ok(vec![b.node("Mul", &[both, x], &[])?])
        },
        left: &["FusedElementwise"],
    },
    Case {
        name: "a cheap formula for readers far apart",
        build: |b, [x, a]| {
            let scaled = b.node("Mul", &[x, a], &[])?;
            let one = b.node("Relu", &[scaled], &[])?;
            let between = b.node("Softmax", &[one], &[])?;
            let two = b.node("Sigmoid", &[scaled], &[])?;
            let both = b.node("Sub", &[between, two], &[])?;
            Ok(vec![b.node("Mul", &[both, x], &[])?])
        },
        left: &["FusedElementwise", "Softmax", "FusedElementwise"],
    },
    Case {
        name: "a formula whose input would live longer",
        build: |b, [x, a]| {
            let input = b.node("Softmax", &[x], &[])?;
            let scaled = b.node("Mul", &[input, a], &[])?;
            let one = b.node("Relu", &[scaled], &[])?;
            let between = b.node("Softmax", &[one], &[])?;
            let two = b.node("Sigmoid", &[scaled], &[])?;
            Ok(vec![b.node("Sub", &[between, two], &[])?])
        },
        left: &["Softmax", "Mul", "Relu", "Softmax", "FusedElementwise"],
    },
    Case {
        name: "a formula that another kind of operator reads, too",
        build: |b, [x, a]| {
            let scaled = b.node("Mul", &[x, a], &[])?;
            let one = b.node("Softmax", &[scaled], &[])?;
            let two = b.node("Sigmoid", &[scaled], &[])?;
            let both = b.node("Sub", &[one, two], &[])?;
            Ok(vec![b.node("Mul", &[both, x], &[])?])
        },
        left: &["Mul", "Softmax", "FusedElementwise"],
    },
    Case {
        name: "a formula that costs much",
        build: |b, [x, a]| {
            let scaled = b.node("Div", &[x, a], &[])?;
            let one = b.node("Relu", &[scaled], &[])?;
            let between = b.node("Softmax", &[one], &[])?;
            let two = b.node("Sigmoid", &[scaled], &[])?;
            let both = b.node("Sub", &[between, two], &[])?;
            Ok(vec![b.node("Mul", &[both, x], &[])?])
        },
        left: &["Div", "Relu", "Softmax", "FusedElementwise"],
    },
    Case {
        name: "a formula that the caller gets",
        build: |b, [x, a]| {
            let scaled = b.node("Mul", &[x, a], &[])?;
            let (one, two) = (b.node("Relu", &[scaled], &[])?, b.node("Sigmoid", &[scaled], &[])?);
            let both = b.node("Sub", &[one, two], &[])?;
            Ok(vec![b.node("Mul", &[both, x], &[])?, scaled])
        },
        left: &["Mul", "FusedElementwise"],
    },
];

#[test]
fn chains_become_one_node_where_that_takes_no_memory() -> Result<()> {
    let numbers = |count: usize| (0..count).map(|index| ((index * 37) % 101) as f32 / 25.0 - 2.01).collect();
    for Case { name, build, left } in CASES {
        let mut b = GraphBuilder::new("chain");
        let given = [b.input("x", DType::F32, &["4", "64"]), b.input("a", DType::F32, &["64"])];
        let outputs = build(&mut b, given)?;
        let model = Model::from_graph(b.finish(&outputs)?);
        let session = |level| Session::builder(&model).threads(1).opt_level(level).build();
        let (plain, fused) = (session(Level::Disabled)?, session(Level::All)?);
        let mut operators: Vec<String> = fused.steps().into_iter().map(|(_, operator, _)| operator).collect();
        let mut expected = left.to_vec();
        operators.sort_unstable();
        expected.sort_unstable();
        assert_eq!(operators, expected, "{name}");
        let inputs: [(&str, Value); 2] = [
            ("x", Tensor::from_vec(&[4, 64], numbers(256))?.into()),
            ("a", Tensor::from_vec(&[64], numbers(64))?.into()),
        ];
        for ((_, expected), (_, actual)) in plain.run(&inputs)?.iter().zip(&fused.run(&inputs)?) {
            compare(actual, expected, Tolerance { relative: 1e-6, absolute: 1e-6 })?;
        }
        let (peak, unfused) = (fused.plan(&[])?.planned_bytes, plain.plan(&[])?.planned_bytes);
        assert!(peak <= unfused, "{name}: {peak} bytes, {unfused} without chains");
    }
    Ok(())
}
