//! Outputs that are the new values of inputs, in a device's memory.

use std::sync::Arc;

use ort_alloc::DeviceId;
use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::Device;
use ort_core::ir::GraphBuilder;
use ort_core::session::{Model, OutputTarget, RunOptions, Session, SharedMemory};
use ort_core::tensor::{Tensor, TensorBuffer};

use super::cpu;

/// `new = weight - x`, and `late = -(weight * x)`, whose node comes last in the graph.
fn model() -> Result<Model> {
    let mut b = GraphBuilder::new("step");
    let weight = b.input("weight", DType::F32, &["4"]);
    let x = b.input("x", DType::F32, &["4"]);
    let new = b.node("Sub", &[weight, x], &[])?;
    let product = b.node("Mul", &[weight, x], &[])?;
    let late = b.node("Neg", &[product], &[])?;
    let mut graph = b.finish(&[new, late])?;
    graph.value_mut(new).name = "new".into();
    graph.value_mut(late).name = "late".into();
    Ok(Model::from_graph(graph))
}

/// A weight is updated in place on the device, after all nodes that read its old value.
pub fn in_place(device: &Arc<dyn Device>) -> Result<()> {
    let devices = [device.clone(), cpu()?];
    let memory = SharedMemory::of(&devices);
    let session = Session::builder(&model()?).device(device.clone()).device(cpu()?);
    let session = session.update("weight", "new").build()?;
    // The nodes that read `x` are on the device, too.
    assert_eq!(session.input_memories(), [device.memory(); 2]);

    let host = TensorBuffer::copy_of(&Tensor::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?)?;
    let weight = memory.copy_in(device.memory(), &host)?;
    let mut binding = session.io_binding();
    binding.bind_input("weight", weight)?;
    binding.bind_input("x", Tensor::from_slice(&[4], &[1.0f32, 1.0, 2.0, 2.0])?)?;
    binding.bind_output("new", OutputTarget::Input("weight".to_string()))?;
    binding.bind_output("late", DeviceId::HOST)?;
    // The second run reads what the first one wrote: [0, 1, 1, 2].
    for late in [[-1.0, -2.0, -6.0, -8.0], [0.0, -1.0, -2.0, -4.0]] {
        session.run_with_binding(&mut binding, &RunOptions::default())?;
        assert_eq!(binding.output("late")?.tensor()?.to_vec::<f32>()?, late);
    }
    // The plan without a binding is the one of these runs.
    let planned = session.plan(&[])?.peak_bytes;
    assert_eq!(planned, Some(session.memory().activations_peak));

    let buffers = binding.take_buffers();
    let on_device = buffers.iter().find(|(name, _)| name == "weight").map(|(_, buffer)| buffer).unwrap();
    assert_eq!(on_device.memory(), device.memory());
    let back = memory.copy_in(DeviceId::HOST, on_device)?;
    assert_eq!(back.view().to_vec::<f32>()?, [-1.0, 0.0, -1.0, 0.0]);
    Ok(())
}

/// A weight in another memory than the one in which its new value is computed is refused.
pub fn elsewhere(device: &Arc<dyn Device>) -> Result<()> {
    let session = Session::builder(&model()?).device(device.clone()).device(cpu()?);
    let session = session.update("weight", "new").build()?;
    let mut binding = session.io_binding();
    binding.bind_input("weight", TensorBuffer::new(DType::F32, &[4])?)?;
    binding.bind_input("x", Tensor::from_slice(&[4], &[1.0f32; 4])?)?;
    binding.bind_output("new", OutputTarget::Input("weight".to_string()))?;
    let problem = session.run_with_binding(&mut binding, &RunOptions::default()).unwrap_err().to_string();
    assert!(problem.contains("'new' cannot be in the memory of input 'weight'"), "{problem}");
    assert!(problem.contains(&device.memory().to_string()), "{problem}");
    Ok(())
}
