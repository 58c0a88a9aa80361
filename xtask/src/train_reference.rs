//! `cargo xtask train-reference`: regenerates the reference data of the training tests with PyTorch
//! and ONNX Runtime.

use anyhow::Result;

use crate::python::Python;
use crate::workspace::{Workspace, run as run_command};

/// The folder in which the tests look for it.
const DATA: &str = "ort-train/tests/data";

/// The scripts that write it.
const SCRIPTS: [&str; 3] = ["train_reference.py", "digits.py", "train_api_reference.py"];

/// Writes the models, their data and the results of training them in PyTorch and ONNX Runtime.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let python = Python::open_for_training(workspace)?;
    for script in SCRIPTS {
        run_command(python.script(script).arg(workspace.root.join(DATA)))?;
    }
    Ok(())
}
