//! Constants pass through a window in a device's memory where a limit does not hold all of them.

#![allow(clippy::expect_used, reason = "without a folder there is nothing to test")]

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::Model;
use ort_ep_cpu as _;
use ort_testkit::OpaqueDevice;
use ort_testkit::device_limits::{
    constants_come_and_go, device_keeps_to_limits, products, session_keeps_to_limits,
};

fn open(limit: Option<usize>) -> Result<Arc<dyn Device>> {
    Ok(OpaqueDevice::new(limit))
}

/// From a file, so that what is streamed is read from its pages again.
fn mapped() -> Result<(tempfile::TempDir, Model)> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("products.onnx");
    save(&products()?, &ModelInfo::default(), &file, &Weights::Inside)?;
    let model = Model::load(&file)?;
    Ok((folder, model))
}

#[test]
fn a_session_keeps_to_its_limit() -> Result<()> {
    session_keeps_to_limits(&Model::from_graph(products()?), &open)?;
    session_keeps_to_limits(&mapped()?.1, &open)
}

#[test]
fn a_device_keeps_to_its_limit() -> Result<()> {
    device_keeps_to_limits(&mapped()?.1, 1, &open)
}

#[test]
fn what_a_larger_run_takes_comes_again() -> Result<()> {
    constants_come_and_go(&mapped()?.1, &open)
}
