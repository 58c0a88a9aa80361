//! `cargo xtask cluster`: the Python package on Ray and Spark, each with two nodes on this machine.

use anyhow::{Context, Result};

use crate::python::Python;
use crate::python_package::run_pytest;
use crate::workspace::Workspace;
use crate::{dist, models};

/// The tests, from the repository's root.
const TESTS: &str = "ort-py/cluster_tests";

/// The models of the large jobs.
const MODELS: [&str; 2] = ["minilm_l6", "mobilenet_v2"];

/// What to test.
#[derive(clap::Args)]
pub(crate) struct ClusterOptions {
    /// Arguments of pytest, such as `-k ray`.
    #[arg(last = true, value_name = "ARGUMENTS")]
    pytest: Vec<String>,
}

/// Builds and installs the package beside Ray and Spark, and runs the tests; an error if one fails.
pub(crate) fn run(workspace: &Workspace, options: &ClusterOptions) -> Result<()> {
    let builder = Python::open_for_package(workspace)?;
    let wheel = dist::build_wheel(workspace, &builder, &workspace.target.join("python_wheel"))?;
    models::make(workspace, &Python::open(workspace)?, &MODELS.map(str::to_owned))?;
    let python = Python::open_for_cluster(workspace)?;
    python.install_wheels(&[wheel], None)?;
    // Workers import the tests' modules, and keep their caches out of the user's home.
    let caches = tempfile::tempdir_in(&workspace.target).context("a folder for caches")?;
    let mut pytest = python.module("pytest");
    pytest.current_dir(workspace.root.join(TESTS)).args(["-q", "-rfEs", "-p", "no:cacheprovider"]);
    pytest.env("PYTHONPATH", workspace.root.join(TESTS)).env("XDG_CACHE_HOME", caches.path());
    pytest.env("ORT_MODELS", models::folder(workspace));
    // Spark's workers are of this interpreter.
    pytest.env("PYSPARK_PYTHON", python.interpreter()).args(&options.pytest);
    let summary = run_pytest(&mut pytest)?;
    println!("{summary}");
    Ok(())
}
