//! What the tests of this crate share: a device where there is an adapter.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

use std::sync::Arc;

use ort_core::ErrorKind;
use ort_core::ep::ProviderOptions;
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuDevice;
pub(crate) use ort_testkit::on_device::{assert_close, cpu, numbers, outputs};

/// A device of its own on the first adapter; none where there is no adapter, which is a failure in CI.
pub(crate) fn open(options: &[(&str, &str)]) -> Option<Arc<WgpuDevice>> {
    let options: ProviderOptions =
        options.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    match WgpuDevice::open(0, &options) {
        Ok(device) => Some(device),
        Err(problem) => {
            assert_eq!(problem.kind(), ErrorKind::EpFail, "{problem}");
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no adapter: {problem}");
            println!("skipped: {problem}");
            None
        }
    }
}
