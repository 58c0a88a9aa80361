//! `cargo xtask torch`: tests the backend of `torch.compile` and `ORTModule` with PyTorch.

use anyhow::Result;

use crate::dist;
use crate::python::Python;
use crate::python_package::{self, PythonOptions};
use crate::workspace::{Workspace, run as run_command};

/// The tests that need PyTorch, from the repository's root.
const TESTS: [&str; 8] = [
    "ort-py/tests/test_torch.py",
    "ort-py/tests/test_torch_optim.py",
    "ort-py/tests/test_ortmodule.py",
    "ort-py/tests/test_step_cache.py",
    "ort-py/tests/test_trainer.py",
    "ort-py/tests/test_data_parallel.py",
    "ort-py/tests/test_ray_train.py",
    "ort-py/tests/seeds",
];

/// What to test.
#[derive(clap::Args, Default)]
pub(crate) struct TorchOptions {
    /// Time and weigh training steps beside PyTorch instead; the arguments are those of
    /// `torch_bench.py`.
    #[arg(long)]
    bench: bool,
    /// Arguments of pytest, with paths from the root.
    #[arg(last = true, value_name = "ARGUMENTS")]
    pytest: Vec<String>,
}

/// Builds and installs the package beside PyTorch, and runs the tests; an error if one fails.
pub(crate) fn run(workspace: &Workspace, options: TorchOptions) -> Result<()> {
    let mut pytest = options.pytest;
    if options.bench {
        return bench(workspace, &pytest);
    }
    if pytest.is_empty() {
        pytest.extend(TESTS.map(str::to_owned));
    }
    let python = Python::open_for_torch(workspace)?;
    python_package::run_in(workspace, &PythonOptions::of_pytest(pytest), &python).map(drop)
}

/// Builds and installs the package beside PyTorch, and prints the table of training steps.
fn bench(workspace: &Workspace, arguments: &[String]) -> Result<()> {
    let python = Python::open_for_torch(workspace)?;
    let wheel = dist::build_wheel(workspace, &python, &workspace.target.join("python_wheel"))?;
    python.install_wheels(&[wheel], None)?;
    run_command(python.script("torch_bench.py").args(arguments))
}
