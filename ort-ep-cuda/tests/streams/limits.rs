//! Constants that do not fit pass through a window in the device's memory: in every way of copying
//! and launching, with the same bits.

use std::sync::Arc;

use crate::support::{options, with_device};
use ort_core::Result;
use ort_core::ep::Device;
use ort_core::session::Model;
use ort_ep_cuda::CudaDevice;
use ort_testkit::device_limits::{
    constants_come_and_go, device_keeps_to_limits, products, session_keeps_to_limits,
};

const WAYS: [&[(&str, &str)]; 4] = [
    &[],
    &[("do_copy_in_default_stream", "0")],
    &[("enable_cuda_graph", "1")],
    &[("do_copy_in_default_stream", "0"), ("enable_cuda_graph", "1")],
];

/// A device of this way, whose arena takes no more than what is asked for.
fn open(way: &[(&str, &str)], limit: Option<usize>) -> Result<Arc<dyn Device>> {
    let limit = limit.map(|bytes| bytes.to_string());
    let mut all = [way, &[("arena_extend_strategy", "kSameAsRequested")]].concat();
    all.extend(limit.as_deref().map(|limit| ("gpu_mem_limit", limit)));
    let device: Arc<dyn Device> = CudaDevice::open(0, &options(&all))?;
    Ok(device)
}

#[test]
fn a_session_keeps_to_its_limit() -> Result<()> {
    if with_device("limits::a_session_keeps_to_its_limit")?.is_none() {
        return Ok(());
    }
    let model = Model::from_graph(products()?);
    WAYS.iter().try_for_each(|way| session_keeps_to_limits(&model, &|limit| open(way, limit)))
}

#[test]
fn a_device_keeps_to_its_limit() -> Result<()> {
    if with_device("limits::a_device_keeps_to_its_limit")?.is_none() {
        return Ok(());
    }
    let model = Model::from_graph(products()?);
    WAYS.iter().try_for_each(|way| device_keeps_to_limits(&model, 1, &|limit| open(way, limit)))
}

#[test]
fn what_a_larger_run_takes_comes_again() -> Result<()> {
    if with_device("limits::what_a_larger_run_takes_comes_again")?.is_none() {
        return Ok(());
    }
    let model = Model::from_graph(products()?);
    WAYS.iter().try_for_each(|way| constants_come_and_go(&model, &|limit| open(way, limit)))
}
