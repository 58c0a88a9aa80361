//! `cargo xtask reference`: operators against other implementations, on one-node cases from tables.
//!
//! The tables are `data/reference/*.json`; `python/reference_cases.py` says what an entry may hold and makes the cases.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::conformance::{self, Verdict};
use crate::python::Python;
use crate::summary::Summary;
use crate::workspace::{Workspace, run as run_command};

/// The scripts and pins that cases follow from, beside their table.
const MAKERS: [&str; 3] = ["python/reference_cases.py", "python/dump_cases.py", "python/requirements.txt"];

/// What to run.
#[derive(clap::Args, Default)]
pub(crate) struct Options {
    /// Only these tables, named as their files are without `.json`.
    #[arg(long = "table", value_name = "NAME")]
    tables: Vec<String>,
}

/// An entry of a table; the fields that only the script reads are left out.
#[derive(Deserialize)]
struct Entry {
    opsets: Vec<i64>,
    #[serde(default)]
    reference: serde_json::Value,
}

impl Entry {
    /// How many cases it makes: with function bodies for a reference, one of the body for each of the operator.
    fn cases(&self) -> usize {
        if self.reference == "function" { 2 * self.opsets.len() } else { self.opsets.len() }
    }
}

/// A table and how many cases it makes.
struct Table {
    name: String,
    path: PathBuf,
    cases: usize,
}

/// Makes the cases that are not there yet and runs all; an error where one fails.
pub(crate) fn run(workspace: &Workspace, options: &Options) -> Result<Summary> {
    let tables = chosen_tables(workspace, options)?;
    let out = workspace.target.join("reference");
    for table in &tables {
        make(workspace, table, &out)?;
    }
    let ort = workspace.build_ort()?;
    let mut summary = Summary::default();
    for table in &tables {
        let outcomes = conformance::run_suite(&ort, &out, &table.name)?;
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
    if options.tables.is_empty() {
        let folders: Vec<PathBuf> = tables.iter().map(|table| out.join(&table.name)).collect();
        conformance::check_decompositions(workspace, &folders)?;
    }
    Ok(summary)
}

/// How many cases all the tables make.
pub(crate) fn count(workspace: &Workspace) -> Result<usize> {
    Ok(chosen_tables(workspace, &Options::default())?.iter().map(|table| table.cases).sum())
}

fn chosen_tables(workspace: &Workspace, options: &Options) -> Result<Vec<Table>> {
    let folder = workspace.own("data/reference");
    let mut tables = Vec::new();
    for file in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = file?.path();
        let Some(name) = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()) else { continue };
        if options.tables.is_empty() || options.tables.contains(&name) {
            tables.push(Table { cases: read(&path)?, name, path });
        }
    }
    tables.sort_by(|a, b| a.name.cmp(&b.name));
    match options.tables.iter().find(|name| tables.iter().all(|table| table.name != **name)) {
        Some(name) => bail!("there is no table '{name}' in {}", folder.display()),
        None => Ok(tables),
    }
}

fn read(path: &Path) -> Result<usize> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let entries: Vec<Entry> =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(entries.iter().map(Entry::cases).sum())
}

/// Makes the cases of a table unless they are there, made from the same table by the same scripts and packages.
fn make(workspace: &Workspace, table: &Table, out: &Path) -> Result<()> {
    let mut made_by = fs::read_to_string(&table.path)?;
    for maker in MAKERS {
        made_by += &fs::read_to_string(workspace.own(maker))?;
    }
    let folder = out.join(&table.name);
    let stamp = out.join(format!("{}.made_by", table.name));
    if fs::read_to_string(&stamp).ok().as_ref() == Some(&made_by) {
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    run_command(Python::open(workspace)?.script("reference_cases.py").arg(out).arg(&table.path))?;
    fs::write(&stamp, made_by).with_context(|| format!("cannot write {}", stamp.display()))
}
