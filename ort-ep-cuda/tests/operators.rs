//! Operators on a CUDA device against those of the CPU, at the edges of their kernels.

mod support;

use ort_core::Result;
use ort_testkit::on_device::{lines, products, windows};
use support::with_device;

#[test]
fn products_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("products_are_those_of_the_cpu")? else { return Ok(()) };
    products::products(&device)
}

#[test]
fn convolutions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("convolutions_are_those_of_the_cpu")? else { return Ok(()) };
    windows::convolutions(&device)
}

#[test]
fn pools_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("pools_are_those_of_the_cpu")? else { return Ok(()) };
    windows::pools(&device)
}

#[test]
fn reductions_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("reductions_are_those_of_the_cpu")? else { return Ok(()) };
    lines::reductions(&device, &[]);
    Ok(())
}

#[test]
fn softmax_is_that_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("softmax_is_that_of_the_cpu")? else { return Ok(()) };
    lines::softmax(&device, &[]);
    Ok(())
}

#[test]
fn norms_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("norms_are_those_of_the_cpu")? else { return Ok(()) };
    lines::norms(&device, &["LRN", "MeanVarianceNormalization"]);
    Ok(())
}

#[test]
fn running_sums_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("running_sums_are_those_of_the_cpu")? else { return Ok(()) };
    lines::cumulative(&device, &[]);
    Ok(())
}

#[test]
fn edges_of_lines_are_those_of_the_cpu() -> Result<()> {
    let Some(device) = with_device("edges_of_lines_are_those_of_the_cpu")? else { return Ok(()) };
    lines::edges(&device, &[]);
    Ok(())
}
