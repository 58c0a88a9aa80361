//! Convolutions and pools on a wgpu device against those of the CPU.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_testkit::on_device::windows;
use support::open;

#[test]
fn convolutions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    windows::convolutions(&device)
}

#[test]
fn transposed_convolutions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    windows::transposed_convolutions(&device)
}

#[test]
fn pools_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    windows::pools(&device)
}
