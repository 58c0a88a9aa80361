//! Branches mix devices like the graph around them, and their device memory is planned.

use crate::support::{branch, count, floats, scaled};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::{Graph, GraphBuilder};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_testkit::{OpaqueDevice, Target};

/// `-(c ? -(h * h) : sqrt(h))` with h = 2x: a device value captured by both branches.
fn graph() -> Result<Graph> {
    let mut builder = GraphBuilder::new("choice");
    let condition = builder.input("c", DType::Bool, &[]);
    let x = builder.input("x", DType::F32, &["n", "1"]);
    let double = scaled(&mut builder, x, 1, 2.0)?;
    let then = branch("then_branch", double, |b, h| {
        let square = b.node("Mul", &[h, h], &[])?;
        scaled(b, square, 1, -1.0)
    })?;
    let otherwise = branch("else_branch", double, |b, h| b.node("Sqrt", &[h], &[]))?;
    let chosen = builder.add(("", "If"), &[Some(condition)], &[], 1, vec![then, otherwise])?;
    let result = scaled(&mut builder, chosen[0], 1, -1.0)?;
    builder.finish(&[result])
}

#[test]
fn branches_run_on_their_own_devices() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph()?))?;
    assert_eq!(count(&session, "If", "cpu"), 1);
    assert_eq!(count(&session, "MatMul", "opaque"), 2);
    let x = floats(&[3, 1], &[0.5, 2.0, 8.0])?;
    for (condition, expected) in [(true, [1.0f32, 16.0, 256.0]), (false, [-1.0, -2.0, -4.0])] {
        let condition = Tensor::from_bools(&[], &[condition])?;
        let outputs = session.run(&[("c", condition.into()), ("x", x.clone().into())])?;
        assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, expected);
    }
    drop(session);
    assert_eq!(device.stats().in_use, 0);
    Ok(())
}

#[test]
fn the_plan_counts_the_branches_device_memory() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph()?))?;
    let planned = session.plan(&[("n", 1000)])?.peak_bytes;
    let x = floats(&[1000, 1], &[1.0; 1000])?;
    let mut measured = Vec::new();
    for condition in [false, true] {
        let condition = Tensor::from_bools(&[], &[condition])?;
        session.run(&[("c", condition.into()), ("x", x.clone().into())])?;
        measured.push(session.memory().activations_peak);
    }
    assert_eq!(planned, Some(measured[1]), "the branch on the device takes the most: {measured:?}");
    Ok(())
}
