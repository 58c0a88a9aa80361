//! Views and results in place share the device's memory as they share the host's.

use crate::support::{axis, floats, ints};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::plan::ValueKind;
use ort_core::session::Model;
use ort_testkit::{OpaqueDevice, Target};

#[test]
fn parts_of_a_device_value_are_not_copied() -> Result<()> {
    let mut builder = GraphBuilder::new("parts");
    let x = builder.input("x", DType::F32, &["2", "4"]);
    let positive = builder.node("Relu", &[x], &[])?;
    let parts = builder.add(("", "Split"), &[Some(positive)], &axis(0), 2, Vec::new())?;
    let shape = builder.constant(ints(&[2, 2])?);
    let square = builder.node("Reshape", &[parts[1], shape], &[])?;
    let turned = builder.node("Transpose", &[square], &[])?;
    let negative = builder.node("Neg", &[parts[0]], &[])?;
    let graph = builder.finish(&[turned, negative])?;
    for target in [Target::opaque(&OpaqueDevice::new(None)), Target::cpu()?] {
        let session = target.session(&Model::from_graph(graph.clone()))?;
        let plan = session.plan(&[])?;
        let steps: Vec<&str> = plan.steps.iter().map(|step| step.op.as_str()).collect();
        assert!(!steps.contains(&"Split") && !steps.contains(&"Reshape"), "{steps:?}");
        let views = plan.values.iter().filter(|value| value.kind == ValueKind::View).count();
        assert_eq!(views, 3);
        let x = floats(&[2, 4], &[1.0, -1.0, 2.0, -2.0, 3.0, 4.0, -5.0, 6.0])?;
        let outputs = session.run(&[("x", x.into())])?;
        assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [3.0, 0.0, 4.0, 6.0]);
        assert_eq!(outputs[1].1.tensor()?.to_vec::<f32>()?, [-1.0, 0.0, -2.0, 0.0]);
        assert_eq!(plan.peak_bytes, Some(session.memory().activations_peak), "{}", target.name);
    }
    Ok(())
}

#[test]
fn parts_of_a_weight_on_the_device_are_not_copied() -> Result<()> {
    let mut builder = GraphBuilder::new("weight_parts");
    let x = builder.input("x", DType::F32, &["1", "2"]);
    let weight = builder.constant(floats(&[2, 2], &[1.0, 2.0, 30.0, 40.0])?);
    let rows = builder.add(("", "Split"), &[Some(weight)], &axis(0), 2, Vec::new())?;
    let sum = builder.node("Add", &[x, rows[1]], &[])?;
    let graph = builder.finish(&[sum])?;
    let device = OpaqueDevice::new(None);
    let session = Target::opaque(&device).session(&Model::from_graph(graph))?;
    let outputs = session.run(&[("x", floats(&[1, 2], &[0.5, 0.25])?.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [30.5, 40.25]);
    Ok(())
}

#[test]
fn a_chain_takes_one_buffer() -> Result<()> {
    let mut builder = GraphBuilder::new("chain");
    let x = builder.input("x", DType::F32, &["16"]);
    let mut value = builder.node("Neg", &[x], &[])?;
    for _ in 0..5 {
        value = builder.node("Relu", &[value], &[])?;
    }
    let graph = builder.finish(&[value])?;
    let device = OpaqueDevice::new(None);
    let session = Target::opaque(&device).session(&Model::from_graph(graph))?;
    let outputs = session.run(&[("x", floats(&[16], &[-2.0; 16])?.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [2.0; 16]);
    assert_eq!(device.stats().max_in_use, 64, "x is copied there, and everything else is in place of it");
    Ok(())
}
