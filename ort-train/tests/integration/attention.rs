//! Attention in a training: one operator where it can be, so that no scores are kept, and what it
//! was where it cannot.

use crate::support::Recording;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Attribute, Graph, GraphBuilder, ValueId};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_train::{Loss, TrainingGraph, TrainingOptions};

fn count(graph: &Graph, op: &str) -> usize {
    graph.nodes.iter().filter(|node| node.spec.name == op).count()
}

#[test]
fn that_of_exported_transformers_is_one_operator() -> Result<()> {
    for name in ["bert", "gpt"] {
        let recording = Recording::load(name);
        let layers = count(recording.model.graph(), "Softmax");
        let training = TrainingGraph::new(&recording.model, &recording.options())?;
        assert!(layers > 0, "{name} has attention");
        assert_eq!(count(training.graph(), "TrainingAttention"), layers, "{name}");
        assert_eq!(count(training.graph(), "TrainingAttentionGrad"), layers, "{name}");
    }
    Ok(())
}

/// A graph from queries that a trained weight is multiplied by.
type Build = fn(&mut GraphBuilder, [ValueId; 3]) -> Result<ValueId>;

fn softmax(b: &mut GraphBuilder, scores: ValueId, values: ValueId) -> Result<ValueId> {
    let weights = b.node("Softmax", &[scores], &[("axis", Attribute::Int(-1))])?;
    b.node("MatMul", &[weights, values], &[])
}

fn scores(b: &mut GraphBuilder, [q, k, _]: [ValueId; 3]) -> Result<ValueId> {
    let turned = b.node("Transpose", &[k], &[("perm", Attribute::Ints(vec![0, 1, 3, 2]))])?;
    b.node("MatMul", &[q, turned], &[])
}

/// Each with the number of operators that attention becomes.
const CASES: [(&str, Build, usize); 8] = [
    (
        "plain",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            softmax(b, s, v)
        },
        1,
    ),
    (
        "keys that stand transposed",
        |b, [q, k, v]| {
            let order = vec![0, 1, 3, 2];
            let k = b.node("Transpose", &[k], &[("perm", Attribute::Ints(order))])?;
            let k = b.node("Identity", &[k], &[])?;
            let s = b.node("MatMul", &[q, k], &[])?;
            softmax(b, s, v)
        },
        1,
    ),
    (
        "a factor",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let factor = b.constant(Tensor::scalar(0.5f32)?);
            let s = b.node("Mul", &[factor, s], &[])?;
            softmax(b, s, v)
        },
        1,
    ),
    (
        "a factor for each key",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let factor = b.constant(Tensor::from_slice(&[5], &[0.5f32; 5])?);
            let s = b.node("Mul", &[s, factor], &[])?;
            softmax(b, s, v)
        },
        0,
    ),
    (
        "a mask of truth values, the other way round",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let hidden = b.constant(Tensor::from_bools(&[1, 5], &[false, true, false, false, true])?);
            let fill = b.constant(Tensor::scalar(-1e9f32)?);
            let s = b.node("Where", &[hidden, fill, s], &[])?;
            softmax(b, s, v)
        },
        1,
    ),
    (
        "a mask that makes more of the scores",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let mask = b.constant(Tensor::from_slice(&[4, 1, 1, 5], &[0.5f32; 20])?);
            let s = b.node("Add", &[s, mask], &[])?;
            softmax(b, s, v)
        },
        0,
    ),
    (
        "a mask that is trained",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let s = b.node("Add", &[s, q], &[])?;
            softmax(b, s, v)
        },
        0,
    ),
    (
        "scores that are read again",
        |b, [q, k, v]| {
            let s = scores(b, [q, k, v])?;
            let y = softmax(b, s, v)?;
            b.node("Add", &[y, s], &[])
        },
        0,
    ),
];

#[test]
fn what_suits_is_one_operator_and_nothing_else() -> Result<()> {
    for (name, build, expected) in CASES {
        let mut builder = GraphBuilder::new("attention");
        let given = ["x", "k", "v"].map(|name| builder.input(name, DType::F32, &["1", "2", "5", "5"]));
        let [x, k, v] = given;
        let graph = builder.graph_mut();
        let weight = graph.add_constant("weight", Tensor::from_slice(&[5, 5], &[0.1f32; 25])?);
        let q = builder.node("MatMul", &[x, weight], &[])?;
        let y = build(&mut builder, [q, k, v])?;
        let model = Model::from_graph(builder.finish(&[y])?);
        let options = TrainingOptions { loss: Loss::Mse, ..TrainingOptions::default() };
        let training = TrainingGraph::new(&model, &options)?;
        assert_eq!(count(training.graph(), "TrainingAttention"), expected, "{name}");
        assert_eq!(count(training.graph(), "Softmax"), 1 - expected, "{name}");
    }
    Ok(())
}
