//! Reductions, normalizations, softmax and attention on a wgpu device against those of the CPU.

mod support;

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_testkit::on_device::lines;
use support::open;

#[test]
fn reductions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::reductions(&device, &[]);
    Ok(())
}

#[test]
fn softmax_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::softmax(&device, &[]);
    Ok(())
}

#[test]
fn norms_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::norms(&device, &[]);
    Ok(())
}

#[test]
fn attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::attention(&device, &[]);
    Ok(())
}

#[test]
fn multi_head_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::multi_head_attention(&device, &[]);
    Ok(())
}

#[test]
fn group_query_attention_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = open(&[]) else { return Ok(()) };
    let device: Arc<dyn Device> = device;
    lines::group_query_attention(&device, &[]);
    Ok(())
}
