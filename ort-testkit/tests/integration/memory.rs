//! The host never touches the device's memory, and all of it goes back.

use crate::support::{floats, layer, layer_data, round_trip, run_one};
use ort_core::ep::{CancelToken, Device};
use ort_core::session::{Model, RunOptions};
use ort_core::tensor::{Tensor, TensorMut};
use ort_core::{ErrorKind, Result};
use ort_testkit::{OpaqueDevice, Target};

#[test]
fn the_host_sees_a_handle_and_no_bytes() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let mut buffer = device.allocator().allocate(16, 64)?;
    assert!(buffer.bytes().is_none() && buffer.bytes_mut().is_none());
    assert!(buffer.handle().is_some());
    let there = Tensor::from_buffer(ort_core::dtype::DType::F32, &[4], buffer)?;
    assert!(there.bytes().is_none() && there.view().bytes().is_err() && !there.view().is_host());
    assert!(there.to_vec::<f32>().is_err());

    let elements = [1.0f32, 2.0, 3.0, 4.0];
    let range = there.view().device_range().expect("the tensor is in the device's memory");
    device.copy(floats(&[4], &elements)?.view(), TensorMut::device(there.dtype(), &[4], range))?;
    let mut back = [0u8; 16];
    device.copy(there.view(), TensorMut::host(there.dtype(), &[4], &mut back))?;
    let expected: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
    assert_eq!(back.to_vec(), expected);
    Ok(())
}

#[test]
fn another_devices_memory_is_refused() -> Result<()> {
    let (device, other) = (OpaqueDevice::new(None), OpaqueDevice::new(None));
    assert_ne!(device.memory(), other.memory());
    let theirs = Tensor::from_buffer(ort_core::dtype::DType::F32, &[1], other.allocator().allocate(4, 64)?)?;
    let mut bytes = [0u8; 4];
    let problem = device.copy(theirs.view(), TensorMut::host(theirs.dtype(), &[1], &mut bytes)).err();
    assert!(problem.is_some_and(|problem| problem.to_string().contains("was handed to")));
    Ok(())
}

#[test]
fn weights_stay_for_the_session_and_activations_for_the_run() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(layer()?))?;
    let weights = device.stats().in_use;
    assert_eq!(weights, 12 * 4 + 4 * 4);
    let (input, expected) = layer_data()?;
    for _ in 0..3 {
        assert_eq!(run_one(&session, input.clone())?, expected.tensor()?.to_vec::<f32>()?);
    }
    session.trim();
    assert_eq!(device.stats().in_use, weights);
    assert!(device.stats().max_in_use > weights);
    drop(session);
    assert_eq!(device.stats().in_use, 0);
    Ok(())
}

#[test]
fn a_run_that_ends_early_gives_its_memory_back() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let session = Target::mixed(&device)?.session(&Model::from_graph(round_trip()?))?;
    let weights = device.stats().in_use;
    let cancel = CancelToken::new();
    cancel.cancel();
    let options = RunOptions { cancel, ..RunOptions::default() };
    let x = floats(&[2, 2], &[1.0; 4])?;
    let problem = session.run_with(&[("x", x.into())], &options).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::Cancelled));
    assert_eq!(device.stats().in_use, weights);
    Ok(())
}
