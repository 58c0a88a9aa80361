//! The NVIDIA driver under the provider `cuda`: the emulator, unless the environment names a
//! library, such as the real driver of a machine with a GPU.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace::Workspace;

/// The variable that names the driver's library.
const VARIABLE: &str = "ORT_CUDA_DRIVER";

/// Builds the emulator and returns the variable that makes a command use it, or `None` if the
/// environment already names a driver.
pub(crate) fn cuda_driver(workspace: &Workspace) -> Result<Option<(&'static str, PathBuf)>> {
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(None);
    }
    // The example depends on the emulator, so building it builds the emulator.
    workspace.build_example("cuda_cases")?;
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    // Cargo leaves the libraries of dependencies in `deps`.
    let library = workspace.target.join("debug/deps").join(format!("{prefix}ort_cuda_emulator{suffix}"));
    Ok(Some((VARIABLE, library)))
}
