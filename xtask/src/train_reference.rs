//! `cargo xtask train-reference`: what the tests of training hold ours against, made anew by
//! PyTorch and ONNX Runtime.

use anyhow::Result;

use crate::python::Python;
use crate::workspace::{Workspace, run as run_command};

/// Where the tests find it.
const DATA: &str = "ort-train/tests/data";

/// The scripts that write it.
const SCRIPTS: [&str; 3] = ["train_reference.py", "digits.py", "train_api_reference.py"];

/// Writes the models, their data and what PyTorch's training of them comes to.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let python = Python::open_for_training(workspace)?;
    for script in SCRIPTS {
        run_command(python.script(script).arg(workspace.root.join(DATA)))?;
    }
    Ok(())
}
