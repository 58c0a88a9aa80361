//! Runs the cases in folders in ONNX's layout whose operators have both a kernel and a
//! decomposition, decomposed, against what the cases expect in their tolerance; `ort test` runs the
//! kernels. The arguments are the folders.

#[path = "../tests/integration/both_ways_support/mod.rs"]
mod both_ways_support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use both_ways_support::operators;
use ort_core::spec::OpSpec;
use ort_core::{Result, ensure, error};
use ort_testkit::{Target, read_case};

fn main() -> Result<()> {
    let (cpu, both) = (Target::cpu()?, operators()?);
    let (mut runs, mut problems) = (BTreeMap::new(), Vec::new());
    for folder in std::env::args_os().skip(1) {
        for case in cases(Path::new(&folder))? {
            let names = decomposed(&case, &cpu, &both).unwrap_or_else(|(names, problem)| {
                problems.push(format!("{}: {problem}", case.display()));
                names
            });
            names.into_iter().for_each(|name| *runs.entry(name).or_insert(0) += 1);
        }
    }
    println!("decomposed in cases: {runs:?}");
    ensure!(problems.is_empty(), Fail, "{} problems:\n{}", problems.len(), problems.join("\n"));
    ensure!(!runs.is_empty(), Fail, "no case has an operator with a kernel and a decomposition");
    Ok(())
}

fn cases(folder: &Path) -> Result<Vec<PathBuf>> {
    let problem = |problem: std::io::Error| error!(NoSuchFile, "{}: {problem}", folder.display());
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(problem)?
        .map(|entry| Ok(entry.map_err(problem)?.path()))
        .collect::<Result<_>>()?;
    cases.retain(|case| case.join("model.onnx").is_file());
    cases.sort();
    Ok(cases)
}

type Names = Vec<&'static str>;

/// Runs a case with all such operators of its graph decomposed; those that there are.
fn decomposed(
    folder: &Path,
    cpu: &Target,
    both: &[&'static OpSpec],
) -> Result<Names, (Names, ort_core::Error)> {
    // A case that cannot be read is one that `ort test` reports.
    let Ok(case) = read_case(folder) else { return Ok(Vec::new()) };
    let nodes = &case.model.graph().nodes;
    let has = |spec: &&&'static OpSpec| nodes.iter().any(|node| std::ptr::eq(node.spec, **spec));
    let there: Vec<&'static OpSpec> = both.iter().filter(has).copied().collect();
    if there.is_empty() {
        return Ok(Vec::new());
    }
    let names: Names = there.iter().map(|spec| spec.name).collect();
    let outcome = cpu.without(&there).session(&case.model).and_then(|session| case.check(&session));
    outcome.map(|()| names.clone()).map_err(|problem| (names, problem))
}
