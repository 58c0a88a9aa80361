//! Values that several memories need are copied once each way.

use crate::support::{count, floats, scaled};
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::Model;
use ort_core::tensor::Value;
use ort_testkit::{OpaqueDevice, Target, Transfers};

#[test]
fn two_readers_on_different_devices_share_one_copy() -> Result<()> {
    let mut builder = GraphBuilder::new("readers");
    let x = builder.input("x", DType::F32, &["1", "3"]);
    let doubled = scaled(&mut builder, x, 3, 2.0)?;
    let root = builder.node("Sqrt", &[doubled], &[])?;
    let negative = builder.node("Neg", &[doubled], &[])?;
    let power = builder.node("Exp", &[doubled], &[])?;
    let graph = builder.finish(&[root, negative, power])?;
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph))?;
    assert_eq!(count(&session, "Copy", "opaque"), 3, "x up, the product down, the negative down");
    let outputs = session.run(&[("x", floats(&[1, 3], &[0.0, 0.5, 2.0])?.into())])?;
    let expected: [&[f32]; 3] =
        [&[0.0, 1.0, 2.0], &[0.0, -1.0, -4.0], &[1.0, std::f32::consts::E, 54.598_15]];
    for ((_, value), expected) in outputs.iter().zip(expected) {
        let actual = value.tensor()?.to_vec::<f32>()?;
        let near = actual.iter().zip(expected).all(|(a, e)| (a - e).abs() <= 1e-6 * e.abs());
        assert!(near, "{actual:?}, expected {expected:?}");
    }
    Ok(())
}

#[test]
fn several_readers_on_a_device_share_one_copy() -> Result<()> {
    let mut builder = GraphBuilder::new("readers");
    let x = builder.input("x", DType::F32, &["2", "2"]);
    let root = builder.node("Sqrt", &[x], &[])?;
    let square = builder.node("MatMul", &[root, root], &[])?;
    let cube = builder.node("MatMul", &[square, root], &[])?;
    let weight = builder.constant(floats(&[2, 2], &[1.0, 0.0, 0.0, 3.0])?);
    let left = builder.node("MatMul", &[weight, cube], &[])?;
    let both = builder.node("MatMul", &[left, weight], &[])?;
    let graph = builder.finish(&[both])?;
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph))?;
    assert_eq!(
        device.transfers(),
        Transfers { uploads: 1, downloads: 0, within: 0, bytes: 16 },
        "the weight, once"
    );
    assert_eq!(count(&session, "Copy", "opaque"), 2, "the root up, the result down");
    let outputs = session.run(&[("x", floats(&[2, 2], &[4.0, 0.0, 0.0, 1.0])?.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [8.0, 0.0, 0.0, 9.0]);
    assert_eq!(device.transfers(), Transfers { uploads: 2, downloads: 1, within: 0, bytes: 48 });
    Ok(())
}

#[test]
fn graph_inputs_and_device_values_may_be_outputs() -> Result<()> {
    let mut builder = GraphBuilder::new("outputs");
    let x = builder.input("x", DType::F32, &["2"]);
    let weight = builder.constant(floats(&[2], &[10.0, 20.0])?);
    let sum = builder.node("Add", &[x, weight], &[])?;
    let negative = builder.node("Neg", &[sum], &[])?;
    let graph = builder.finish(&[sum, x, negative, weight, sum])?;
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph))?;
    let x = floats(&[2], &[1.0, 2.0])?;
    let outputs = session.run(&[("x", x.into())])?;
    drop(session);
    let values: Vec<Vec<f32>> =
        outputs.iter().map(|(_, value)| value.tensor()?.to_vec()).collect::<Result<_>>()?;
    assert_eq!(values, [[11.0, 22.0], [1.0, 2.0], [-11.0, -22.0], [10.0, 20.0], [11.0, 22.0]]);
    assert!(outputs.iter().all(|(_, value)| matches!(value, Value::Tensor(t) if t.bytes().is_some())));
    assert_eq!(device.stats().in_use, 0, "outputs keep no device memory");
    Ok(())
}

#[test]
fn a_weight_is_uploaded_once_when_the_session_is_made() -> Result<()> {
    let mut builder = GraphBuilder::new("weights");
    let x = builder.input("x", DType::F32, &["1", "2"]);
    let weight = builder.constant(floats(&[2, 2], &[1.0, 0.0, 0.0, 2.0])?);
    let product = builder.node("MatMul", &[x, weight], &[])?;
    let sum = builder.node("Add", &[product, weight], &[])?;
    let power = builder.node("Pow", &[sum, weight], &[])?;
    let graph = builder.finish(&[power])?;
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(graph))?;
    assert_eq!(count(&session, "Add", "opaque"), 1, "the second of its readers there");
    assert_eq!((device.transfers().uploads, device.stats().in_use), (1, 16));
    let outputs = session.run(&[("x", floats(&[1, 2], &[3.0, 1.0])?.into())])?;
    assert_eq!(outputs[0].1.tensor()?.to_vec::<f32>()?, [4.0, 1.0, 1.0, 16.0]);
    assert_eq!(device.transfers().uploads, 2, "a run uploads its input only");
    Ok(())
}
