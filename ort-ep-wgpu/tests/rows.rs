//! Reductions, normalizations, softmax and attention on a wgpu device against those of the CPU.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_testkit::on_device::rows;
use support::open;

#[test]
fn reductions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::reductions(&device, &[]);
    Ok(())
}

#[test]
fn softmax_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::softmax(&device, &[]);
    Ok(())
}

#[test]
fn norms_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::norms(&device, &[]);
    Ok(())
}

#[test]
fn attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::attention(&device, &[]);
    Ok(())
}

#[test]
fn multi_head_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::multi_head_attention(&device, &[]);
    Ok(())
}

#[test]
fn group_query_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    rows::group_query_attention(&device, &[]);
    Ok(())
}
