//! The driver that the provider `cuda` runs on: an emulator, unless the environment names another
//! one, as that of a machine with a GPU.

use std::path::PathBuf;

use anyhow::Result;

use crate::workspace::Workspace;

/// The variable that names the driver's library.
const VARIABLE: &str = "ORT_CUDA_DRIVER";

/// What the environment of a command has to have beside its own so that it finds a driver. The
/// emulator is built.
pub(crate) fn cuda_driver(workspace: &Workspace) -> Result<Option<(&'static str, PathBuf)>> {
    if std::env::var_os(VARIABLE).is_some() {
        return Ok(None);
    }
    // The example is tried on the emulator, which so is built with it.
    workspace.build_example("cuda_cases")?;
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = workspace.target.join("debug/deps").join(format!("{prefix}ort_cuda_emulator{suffix}"));
    Ok(Some((VARIABLE, library)))
}
