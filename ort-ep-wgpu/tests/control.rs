//! Control flow on a wgpu device against that of the CPU.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_testkit::on_device::control;
use support::open;

#[test]
fn control_flow_on_the_device_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    control::results(&device)?;
    control::bits(&device)
}
