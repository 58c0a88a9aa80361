//! What the tests of this crate share: a device where there is an adapter.

#![allow(dead_code, unused_imports, reason = "each test uses some of it")]

use std::sync::Arc;

use ort_core::ep::{DeviceInfo, ExecutionProvider, ProviderOptions};
use ort_core::{ErrorKind, Result, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::{WgpuDevice, WgpuProvider};
pub(crate) use ort_testkit::on_device::{assert_close, cpu, numbers, outputs};
use ort_testkit::skip_test;

/// Set where a machine without an adapter is a failure: the tests are skipped without it.
const MUST_RUN: &str = "ORT_TEST_NEEDS_ADAPTER";
/// Set in a process that is to find GL alone.
const ON_GL: &str = "ORT_TEST_ON_GL";

/// A device of its own on the first adapter; none if there is no adapter.
pub(crate) fn open(options: &[(&str, &str)]) -> Option<Arc<WgpuDevice>> {
    let options: ProviderOptions =
        options.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
    match WgpuDevice::open(0, &options) {
        Ok(device) => Some(device),
        Err(problem) => {
            assert_eq!(problem.kind(), ErrorKind::EpFail, "{problem}");
            skip(&problem.to_string());
            None
        }
    }
}

/// Says that the calling test does not run; a failure where it must.
pub(crate) fn skip(why: &str) {
    assert!(std::env::var_os(MUST_RUN).is_none(), "{MUST_RUN} is set, and the test cannot run: {why}");
    skip_test(why);
}

/// Does `work`, the whole of the test of this name, on the adapter that there is; if that is none
/// of GL, also in a process that finds GL alone, which a machine with Vulkan would not meet.
pub(crate) fn also_on_gl(test: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    work()?;
    let backend =
        |device: &DeviceInfo| device.facts.iter().any(|(name, value)| name == "backend" && value == "gl");
    let here = WgpuProvider.devices().unwrap_or_default();
    if std::env::var_os(ON_GL).is_some() || here.is_empty() || here.iter().all(backend) {
        return Ok(());
    }
    let own = std::env::current_exe().map_err(|problem| error!(Fail, "{problem}"))?;
    let mut command = std::process::Command::new(own);
    command.args(["--exact", test, "--nocapture"]).env(ON_GL, "1");
    // The loader of Vulkan takes these for the only drivers.
    command.envs(["VK_DRIVER_FILES", "VK_ICD_FILENAMES"].map(|variable| (variable, "/nonexistent")));
    let output = command.output().map_err(|problem| error!(Fail, "{problem}"))?;
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    // A name that no test has would run none, and end well.
    assert!(output.status.success() && said.contains("1 passed"), "{test}: {said}");
    let skipped = said.lines().find_map(|line| line.strip_prefix("SKIPPED ")?.split_once(": "));
    if let Some((_, why)) = skipped {
        skip_test(&format!("on GL: {why}"));
    }
    Ok(())
}
