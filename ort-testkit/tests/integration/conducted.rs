//! Control flow whose values lie on a device: results, where they lie between iterations, and what
//! the plan knows of their memory.

use std::sync::Arc;

use ort_core::Result;
use ort_core::ep::Device;
use ort_ep_cpu as _;
use ort_testkit::OpaqueDevice;
use ort_testkit::on_device::control;

#[test]
fn results_are_those_of_the_cpu() -> Result<()> {
    let opaque = OpaqueDevice::new(None);
    let device: Arc<dyn Device> = opaque.clone();
    control::results(&device)?;
    assert_eq!(opaque.stats().in_use, 0);
    Ok(())
}

#[test]
fn loops_have_the_bits_of_their_iterations() -> Result<()> {
    let device: Arc<dyn Device> = OpaqueDevice::new(None);
    control::bits(&device)
}

#[test]
fn values_stay_on_the_device_between_iterations() -> Result<()> {
    let opaque = OpaqueDevice::new(None);
    let device: Arc<dyn Device> = opaque.clone();
    for (op, runs) in control::counts(&device, || opaque.transfers())? {
        let [few, many] = runs.map(|(before, after)| {
            (after.uploads - before.uploads, after.downloads - before.downloads, after.within - before.within)
        });
        assert_eq!((few.0, few.1), (many.0, many.1), "{op}: uploads and downloads of 2 and of 9 iterations");
        assert!(few.2 < many.2, "{op}: outputs of iterations are put together on the device");
    }
    Ok(())
}

#[test]
fn the_plan_counts_what_bodies_take_on_the_device() -> Result<()> {
    let device: Arc<dyn Device> = OpaqueDevice::new(None);
    let (planned, taken, slab) = control::planned(&device)?;
    assert_eq!(planned, Some(taken));
    // The slab of the body has the product, and what is added to it.
    assert!(slab >= 2 * 2 * 8 * 4, "{slab}");
    Ok(())
}
