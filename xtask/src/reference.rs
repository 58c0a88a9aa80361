//! `cargo xtask reference`: operators and converted models against other implementations, on cases
//! from tables.
//!
//! The tables of operators are `data/reference/*.json`, those of scikit-learn models
//! `data/sklearn/*.json`. The scripts that make the cases, `python/reference_cases.py` and
//! `python/sklearn_cases.py`, document what an entry may hold.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::conformance::{self, Verdict};
use crate::python::Python;
use crate::summary::Summary;
use crate::workspace::{Workspace, run as run_command};

/// The folders of tables, each with the script that makes its cases.
const FOLDERS: [(&str, &str); 2] =
    [("data/reference", "reference_cases.py"), ("data/sklearn", "sklearn_cases.py")];

/// Further files that the cases depend on.
const SHARED: [&str; 3] = ["python/dump_cases.py", "python/exact_products.py", "python/requirements.txt"];

/// What to run.
#[derive(clap::Args, Default)]
pub(crate) struct ReferenceOptions {
    /// Run only these tables, named like their files without `.json`.
    #[arg(long = "table", value_name = "NAME")]
    tables: Vec<String>,
    /// Rewrite data/package_cases.json, the operator versions that the onnx package's cases cover.
    #[arg(long)]
    bless: bool,
    /// Fill output and scratch memory with NaN, so that reads before writes fail.
    #[arg(long)]
    poisoned: bool,
}

/// An entry of a table. Fields that only the scripts read are left out.
#[derive(Deserialize)]
struct Entry {
    opsets: Vec<i64>,
    #[serde(default)]
    reference: serde_json::Value,
    /// An entry of models runs each of its models on each of its data sets.
    models: Option<Vec<String>>,
    data: Option<Vec<String>>,
}

impl Entry {
    /// Returns how many cases the entry makes. With function bodies as reference, the body gets a
    /// case of its own beside each of the operator's.
    fn cases(&self) -> usize {
        let len = |list: &Option<Vec<String>>| list.as_ref().map_or(1, Vec::len);
        let each = if self.reference == "function" { 2 } else { 1 };
        each * self.opsets.len() * len(&self.models) * len(&self.data)
    }
}

/// A table and how many cases it makes.
struct CaseTable {
    name: String,
    path: PathBuf,
    script: &'static str,
    cases: usize,
}

/// Makes the missing cases and runs all of them; an error if one fails, or if a version of an
/// operator has no case.
pub(crate) fn run(workspace: &Workspace, options: &ReferenceOptions) -> Result<Summary> {
    let tables = chosen_tables(workspace, options)?;
    if options.tables.is_empty() {
        check_versions(workspace, &tables, options.bless)?;
    }
    let out = workspace.target.join("reference");
    for table in &tables {
        make(workspace, table, &out)?;
    }
    let ort = workspace.build_ort()?;
    let mut summary = Summary::default();
    for table in &tables {
        let outcomes = conformance::run_suite((&ort, options.poisoned), &out, &table.name)?;
        // The expected count comes from the table, so a script that makes too few cases is found.
        if outcomes.len() != table.cases {
            bail!("{}: {} cases ran instead of {}", table.name, outcomes.len(), table.cases);
        }
        for outcome in outcomes.iter().filter(|outcome| outcome.verdict != Verdict::Pass) {
            println!("WRONG {}: {}", outcome.name, outcome.why);
        }
        let counts = conformance::count(&outcomes);
        println!("{}: {counts}", table.name);
        summary += counts;
    }
    if summary.failed + summary.skipped > 0 {
        bail!("{} cases do not pass", summary.failed + summary.skipped);
    }
    if options.tables.is_empty() && !options.poisoned {
        let folders: Vec<PathBuf> = tables.iter().map(|table| out.join(&table.name)).collect();
        conformance::check_decompositions(workspace, &folders)?;
    }
    Ok(summary)
}

/// Fails unless each version of each standard operator has a case, here or in the onnx package.
fn check_versions(workspace: &Workspace, tables: &[CaseTable], bless: bool) -> Result<()> {
    let mut script = Python::open(workspace)?.script("version_coverage.py");
    if bless {
        script.arg("--write");
    }
    script.args([workspace.own("data/package_cases.json"), workspace.own("conformance.ignore")]);
    // Only the tables of operators cover versions. Scikit-learn's cases are whole models.
    let of_operators = tables.iter().filter(|table| table.script == FOLDERS[0].1);
    run_command(script.args(of_operators.map(|table| &table.path)))
}

/// Returns how many cases all the tables make.
pub(crate) fn count(workspace: &Workspace) -> Result<usize> {
    Ok(chosen_tables(workspace, &ReferenceOptions::default())?.iter().map(|table| table.cases).sum())
}

fn chosen_tables(workspace: &Workspace, options: &ReferenceOptions) -> Result<Vec<CaseTable>> {
    let mut tables = Vec::new();
    for (folder, script) in FOLDERS {
        let folder = workspace.own(folder);
        for file in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = file?.path();
            let Some(name) = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()) else {
                continue;
            };
            if options.tables.is_empty() || options.tables.contains(&name) {
                tables.push(CaseTable { cases: read(&path)?, name, path, script });
            }
        }
    }
    // The order in which a folder lists its files depends on the file system.
    tables.sort_by(|a, b| a.name.cmp(&b.name));
    match options.tables.iter().find(|name| tables.iter().all(|table| table.name != **name)) {
        Some(name) => bail!("there is no table '{name}'"),
        None => Ok(tables),
    }
}

fn read(path: &Path) -> Result<usize> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let entries: Vec<Entry> =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(entries.iter().map(Entry::cases).sum())
}

/// Makes the cases of a table, unless they exist and were made from the same table by the same
/// scripts and packages.
fn make(workspace: &Workspace, table: &CaseTable, out: &Path) -> Result<()> {
    let mut made_by = fs::read_to_string(&table.path)?;
    let script = format!("python/{}", table.script);
    for maker in [script.as_str()].into_iter().chain(SHARED) {
        made_by += &fs::read_to_string(workspace.own(maker))?;
    }
    let folder = out.join(&table.name);
    let stamp = out.join(format!("{}.made_by", table.name));
    if fs::read_to_string(&stamp).ok().as_ref() == Some(&made_by) {
        return Ok(());
    }
    // The suite runs every case in the folder, so those of a former table must go.
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    run_command(Python::open(workspace)?.script(table.script).arg(out).arg(&table.path))?;
    // Written last, so that an interrupted script starts over.
    fs::write(&stamp, made_by).with_context(|| format!("cannot write {}", stamp.display()))
}
