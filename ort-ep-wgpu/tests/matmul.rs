//! Matrix products on a wgpu device against those of the CPU.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_testkit::on_device::products;
use support::open;

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    products::products(&device)
}

#[test]
fn sums_of_products_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    products::einsum(&device)
}
