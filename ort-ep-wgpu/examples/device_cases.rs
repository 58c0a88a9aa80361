//! Runs cases in ONNX's layout on a wgpu device, with the CPU for what it does not claim, and says how many ran on the device alone.
//!
//! The arguments are folders of cases; `--only TEXT` takes those whose names contain it, `--library` runs them on the provider library. `ORT_WGPU_LIMITS=minimum` runs within the limits that
//! every implementation of WebGPU has. The lines are those of [`run_device_cases`].

use std::path::PathBuf;

use ort_core::ep::{ExecutionProvider, ProviderOptions, load_provider};
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuProvider;
use ort_testkit::run_device_cases;

fn main() -> Result<()> {
    let (mut folders, mut only, mut as_library) = (Vec::new(), None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only = arguments.next(),
            "--library" => as_library = true,
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    let limits = std::env::var("ORT_WGPU_LIMITS").unwrap_or_else(|_| "adapter".to_owned());
    let wgpu: &dyn ExecutionProvider = if as_library { load_provider(&library()?)? } else { &WgpuProvider };
    let options = ProviderOptions::from([("limits".to_owned(), limits)]);
    run_device_cases(wgpu, &options, &folders, only.as_deref())
}

/// The library that cargo built beside this example.
fn library() -> Result<PathBuf> {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let own =
        std::env::current_exe().map_err(|problem| error!(Fail, "no path of this program: {problem}"))?;
    let built = own.ancestors().nth(2).map(|folder| folder.join("deps"));
    let built = built.ok_or_else(|| error!(Fail, "{} is in no folder of builds", own.display()))?;
    Ok(built.join(format!("{prefix}ort_wgpu_provider{suffix}")))
}
