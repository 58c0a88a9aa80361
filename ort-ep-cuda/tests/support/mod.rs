//! What the tests of this crate share: the driver, which is an emulator of PTX where
//! `ORT_CUDA_DRIVER` names no other, and a device.

#![allow(dead_code, reason = "each test uses some of it")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use ort_core::ep::{Device, ProviderOptions};
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_ep_cuda::CudaDevice;

/// The variable that names the driver's library.
pub(crate) const DRIVER: &str = "ORT_CUDA_DRIVER";

/// Without NVIDIA's libraries, which a machine may have: what is tested are kernels of our own.
pub(crate) const OWN_KERNELS: &[(&str, &str)] = &[("use_cublas", "0"), ("use_cudnn", "0")];

/// Options as they are given, with kernels of our own where they do not say otherwise.
pub(crate) fn options(options: &[(&str, &str)]) -> ProviderOptions {
    let all = OWN_KERNELS.iter().chain(options);
    all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The emulator, which cargo built beside the tests.
pub(crate) fn emulator() -> PathBuf {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let own = std::env::current_exe().unwrap_or_default();
    own.with_file_name(format!("{prefix}ort_cuda_emulator{suffix}"))
}

/// A folder with links to the emulator, which stands in for NVIDIA's libraries under their names,
/// too.
pub(crate) fn libraries(names: &[&str]) -> Result<tempfile::TempDir> {
    let folder = tempfile::tempdir().map_err(|problem| error!(Fail, "{problem}"))?;
    for name in names {
        let linked = std::os::unix::fs::symlink(emulator(), folder.path().join(name));
        linked.map_err(|problem| error!(Fail, "a link {name}: {problem}"))?;
    }
    Ok(folder)
}

/// Whether the driver is the emulator.
pub(crate) fn is_emulated() -> bool {
    std::env::var(DRIVER).is_ok_and(|driver| driver.contains("ort_cuda_emulator"))
}

/// Runs the test of this name in a process of its own that finds a driver: that of the variable,
/// else the emulator. The library of a driver is looked for once in a process, and a test cannot
/// change what its own process is told. In that process, a device that computes float32 as the CPU
/// does.
pub(crate) fn with_device(test: &str) -> Result<Option<Arc<dyn Device>>> {
    with_options(test, &[("use_tf32", "0")])
}

/// The same with a device of these options.
pub(crate) fn with_options(test: &str, given: &[(&str, &str)]) -> Result<Option<Arc<dyn Device>>> {
    with_variables(test, given, &[])
}

/// The same with a device of the oldest compute capability, where it is the emulator's.
pub(crate) fn with_oldest(test: &str) -> Result<Option<Arc<dyn Device>>> {
    with_variables(test, &[], &[("ORT_CUDA_EMULATOR_CAPABILITY", "7.5")])
}

/// The same with a device whose warps multiply in groups of four, where it is the emulator's.
pub(crate) fn with_warpgroups(test: &str) -> Result<Option<Arc<dyn Device>>> {
    with_variables(test, &[], &[("ORT_CUDA_EMULATOR_CAPABILITY", "9.0")])
}

fn with_variables(
    test: &str,
    given: &[(&str, &str)],
    variables: &[(&str, &str)],
) -> Result<Option<Arc<dyn Device>>> {
    if std::env::var_os(DRIVER).is_some() {
        let device: Arc<dyn Device> = CudaDevice::open(0, &options(given))?;
        return Ok(Some(device));
    }
    let emulator = emulator();
    let driver = emulator.to_string_lossy();
    let (said, is_fine) = run(test, &[variables, &[(DRIVER, &*driver)]].concat());
    // A name that no test has would run none, and end well.
    assert!(is_fine && said.contains("1 passed"), "{test}: {said}");
    Ok(None)
}

/// What a test of this program says in a process with these variables, and whether it ended well.
pub(crate) fn run(test: &str, variables: &[(&str, &str)]) -> (String, bool) {
    let Ok(own) = std::env::current_exe() else { return ("no path of this program".to_owned(), false) };
    let mut command = Command::new(own);
    command.args(["--exact", test, "--nocapture"]).envs(variables.iter().copied());
    match command.output() {
        Ok(output) => {
            let text = [output.stdout, output.stderr].concat();
            (String::from_utf8_lossy(&text).into_owned(), output.status.success())
        }
        Err(problem) => (problem.to_string(), false),
    }
}
