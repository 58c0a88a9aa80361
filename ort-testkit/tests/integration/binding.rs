//! Bindings of a session whose values lie in several memories.

use crate::support::{floats, scaled};
use ort_alloc::DeviceId;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, RunOptions, Session};
use ort_core::tensor::TensorBuffer;
use ort_testkit::{OpaqueDevice, Target};
use std::sync::Arc;

/// A product and its negative that the device computes, with readers on both sides.
fn session(device: &Arc<OpaqueDevice>) -> Result<Session> {
    let mut builder = GraphBuilder::new("products");
    let x = builder.input("x", DType::F32, &["1", "3"]);
    let product = scaled(&mut builder, x, 3, 2.0)?;
    let root = builder.node("Sqrt", &[product], &[])?;
    let negative = builder.node("Neg", &[product], &[])?;
    Target::mixed(device)?.session(&Model::from_graph(builder.finish(&[root, negative])?))
}

#[test]
fn outputs_of_a_device_come_to_bound_buffers() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = session(&device)?;
    let mut binding = session.io_binding();
    binding.bind_input("x", TensorBuffer::new(DType::F32, &[1, 3])?)?;
    binding.bind_output("Sqrt_1.0", DeviceId::HOST)?;
    binding.bind_output("Neg_2.0", TensorBuffer::new(DType::F32, &[1, 3])?)?;
    for factor in [1.0, 2.0f32] {
        let x = [2.0 * factor, 8.0 * factor, 0.5 * factor];
        binding.input_mut("x")?.as_mut_slice::<f32>()?.copy_from_slice(&x);
        session.run_with_binding(&mut binding, &RunOptions::default())?;
        let expected = session.run(&[("x", floats(&[1, 3], &x)?.into())])?;
        for ((name, bound), (_, plain)) in binding.get_outputs()?.iter().zip(&expected) {
            assert_eq!(bound.tensor()?.to_vec::<f32>()?, plain.tensor()?.to_vec::<f32>()?, "{name}");
        }
    }
    Ok(())
}

#[test]
fn each_device_is_waited_for() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = session(&device)?;
    let binding = session.io_binding();
    binding.synchronize_inputs()?;
    assert_eq!(device.waits(), 1);
    binding.synchronize_outputs()?;
    assert_eq!(device.waits(), 2);
    Ok(())
}
