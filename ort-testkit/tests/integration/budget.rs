//! The session's budget counts device memory, and the device may have less than the budget.

use crate::support::{floats, layer, run_one};
use ort_alloc::Budget;
use ort_core::session::{Model, Session};
use ort_core::{ErrorKind, Result};
use ort_testkit::OpaqueDevice;

#[test]
fn a_run_over_the_budget_is_refused_before_anything_runs() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let model = Model::from_graph(layer()?);
    let builder = Session::builder(&model).device(device.clone()).batch_split(false);
    let session = builder.memory_limit(4096).build()?;
    let before = (device.stats(), device.transfers());
    let problem = run_one(&session, floats(&[1000, 3], &[1.0; 3000])?.into()).err();
    let problem = problem.expect("the run needs more than the limit");
    assert_eq!(problem.kind(), ErrorKind::OutOfMemory);
    assert!(
        problem.to_string().contains("the largest at the peak are 'Relu_2.0' 32000 bytes (31.2 KiB)"),
        "{problem}"
    );
    assert_eq!((device.stats(), device.transfers()), before, "nothing was allocated or copied");
    assert_eq!(run_one(&session, floats(&[1, 3], &[1.0; 3])?.into())?, [3.75, 0.0, 1.0, 1.0]);
    Ok(())
}

/// What is set aside for the run is what its slab and its outputs on the device take, not as much
/// again.
#[test]
fn a_limit_of_exactly_the_plan_suffices() -> Result<()> {
    let model = Model::from_graph(layer()?);
    let builder = || Session::builder(&model).device(OpaqueDevice::new(None)).batch_split(false);
    let counted = Budget::new(None);
    let session = builder().budget(&counted).build()?;
    let needed = counted.in_use() + session.plan(&[("rows", 1000)])?.planned_bytes;
    let rows = || Ok::<_, ort_core::Error>(floats(&[1000, 3], &[1.0; 3000])?.into());
    assert_eq!(run_one(&builder().memory_limit(needed).build()?, rows()?)?.len(), 4000);
    let problem = run_one(&builder().memory_limit(needed - 1).build()?, rows()?).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    Ok(())
}

#[test]
fn weights_on_the_device_count() -> Result<()> {
    let device = OpaqueDevice::new(None);
    let model = Model::from_graph(layer()?);
    let session = Session::builder(&model).device(device.clone()).memory_limit(60).build();
    assert_eq!(session.err().map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    assert_eq!(device.stats().in_use, 0);
    Ok(())
}

#[test]
fn a_device_that_is_full_says_so_and_stays_usable() -> Result<()> {
    let device = OpaqueDevice::new(Some(2048));
    let model = Model::from_graph(layer()?);
    let session = Session::builder(&model).device(device.clone()).build()?;
    let problem = run_one(&session, floats(&[1000, 3], &[1.0; 3000])?.into()).err();
    assert_eq!(problem.map(|problem| problem.kind()), Some(ErrorKind::OutOfMemory));
    assert_eq!(run_one(&session, floats(&[1, 3], &[1.0; 3])?.into())?, [3.75, 0.0, 1.0, 1.0]);
    Ok(())
}
