//! `cargo xtask ops`: generates docs/OPS.md, the operators with their types by provider, from the
//! registry.
//!
//! The facts come from an example of `ort-testkit`, which asks each provider for a sample node of
//! each operator with each type. The versions come from the schemas, and the cases from their
//! tables. Nothing is listed by hand.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::table;
use crate::workspace::{Workspace, capture};

/// The page, relative to the repository's root.
const PAGE: &str = "docs/OPS.md";

/// What to do.
#[derive(clap::Args, Default)]
pub(crate) struct OpsOptions {
    /// Write nothing; fail if the page is stale.
    #[arg(long)]
    pub(crate) check: bool,
}

/// The example's output for one operator.
#[derive(Deserialize)]
struct Operator {
    domain: String,
    op: String,
    since: i64,
    view: bool,
    control: bool,
    constant: bool,
    replaced: bool,
    sampled: bool,
    gradient: String,
    providers: BTreeMap<String, Answer>,
}

/// The answer of one provider.
#[derive(Deserialize)]
struct Answer {
    kernel: bool,
    lowered: bool,
    refusal: Option<String>,
    problem: Option<String>,
    variables: Vec<Variable>,
}

#[derive(Deserialize)]
struct Variable {
    name: String,
    runs: Vec<String>,
    refused: Vec<String>,
}

/// A set of values for each operator, by domain and name.
type ByOperator<T> = BTreeMap<(String, String), BTreeSet<T>>;

/// Writes the page, or with `check` fails if it is stale.
pub(crate) fn run(workspace: &Workspace, options: &OpsOptions) -> Result<()> {
    let printed = capture(&mut Command::new(workspace.build_example("operators")?))?;
    let operators: Vec<Operator> =
        serde_json::from_str(&printed).context("cannot read what the example printed")?;
    let page = page(&operators, &versions(workspace)?, &cases(workspace)?);
    let path = workspace.root.join(PAGE);
    if options.check {
        // A missing page counts as stale.
        if fs::read_to_string(&path).unwrap_or_default() != page {
            bail!("{PAGE} is stale: run `cargo xtask ops`");
        }
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()))?;
    println!("wrote {PAGE}: {} operators", operators.len());
    Ok(())
}

fn text<'a>(entry: &'a Json, name: &str) -> &'a str {
    entry.get(name).and_then(Json::as_str).unwrap_or_default()
}

/// Returns the versions in which the standard changed each operator, without deprecations.
fn versions(workspace: &Workspace) -> Result<ByOperator<i64>> {
    let path = workspace.root.join("ort-core/tests/data/onnx_schemas.json");
    let schemas: Vec<Json> = serde_json::from_str(&fs::read_to_string(path)?)?;
    let mut versions = ByOperator::new();
    // A deprecated version only removes the operator.
    for schema in schemas.iter().filter(|schema| schema.get("deprecated").is_none()) {
        let key = (text(schema, "domain").to_owned(), text(schema, "name").to_owned());
        let version = schema.get("since_version").and_then(Json::as_i64);
        versions.entry(key).or_default().extend(version);
    }
    Ok(versions)
}

/// Returns the opsets for which each operator has a case: a reference case or one of the onnx
/// package.
fn cases(workspace: &Workspace) -> Result<ByOperator<i64>> {
    let mut opsets = ByOperator::new();
    let mut tables = vec![workspace.own("data/package_cases.json")];
    for file in fs::read_dir(workspace.own("data/reference"))? {
        tables.push(file?.path());
    }
    for path in tables {
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let table: Vec<Json> = serde_json::from_str(&fs::read_to_string(&path)?)
            .with_context(|| format!("cannot read {}", path.display()))?;
        for entry in &table {
            let key = (text(entry, "domain").to_owned(), text(entry, "op").to_owned());
            let of_entry = entry.get("opsets").and_then(Json::as_array).into_iter().flatten();
            opsets.entry(key).or_default().extend(of_entry.filter_map(Json::as_i64));
        }
    }
    Ok(opsets)
}

/// Returns each version of an operator with whether a case covers it: one whose opset lies between
/// this version and the next.
fn covered(operator: &Operator, versions: &ByOperator<i64>, cases: &ByOperator<i64>) -> Vec<(i64, bool)> {
    let key = (operator.domain.clone(), operator.op.clone());
    let opsets = cases.get(&key);
    let Some(versions) = versions.get(&key) else {
        // An operator outside the standard has one version, which every case covers.
        return vec![(operator.since, opsets.is_some_and(|opsets| !opsets.is_empty()))];
    };
    // A version is current until the next one changes the operator.
    let ends = versions.iter().skip(1).copied().chain([i64::MAX]);
    let has_case = |from: i64, to: i64| opsets.is_some_and(|opsets| opsets.range(from..to).next().is_some());
    versions.iter().zip(ends).map(|(&from, to)| (from, has_case(from, to))).collect()
}

fn page(operators: &[Operator], versions: &ByOperator<i64>, cases: &ByOperator<i64>) -> String {
    let providers: BTreeSet<&String> =
        operators.iter().flat_map(|operator| operator.providers.keys()).collect();
    let domains: BTreeSet<&str> = operators.iter().map(|operator| operator.domain.as_str()).collect();
    let mut counts = table::new(&["domain", "operators", "versions", "with a case", "types", "refused"]);
    let mut tables = String::new();
    for domain in domains {
        let of_domain: Vec<&Operator> =
            operators.iter().filter(|operator| operator.domain == domain).collect();
        let name = if domain.is_empty() { "ai.onnx" } else { domain };
        let mut columns = vec!["operator", "versions", "form", "runs as", "gradient"];
        columns.extend(providers.iter().map(|provider| provider.as_str()));
        let mut rows = table::new(&columns);
        let mut sums = [0; 4];
        for operator in &of_domain {
            let covered = covered(operator, versions, cases);
            sums[0] += covered.len();
            sums[1] += covered.iter().filter(|(_, case)| *case).count();
            for variable in operator.providers.get(COUNTED).into_iter().flat_map(|answer| &answer.variables) {
                sums[2] += variable.runs.len() + variable.refused.len();
                // Loading removes these operators, so no provider has to run them.
                sums[3] += if operator.replaced || operator.constant { 0 } else { variable.refused.len() };
            }
            let marks =
                covered.iter().map(|(version, case)| format!("{version}{}", if *case { "*" } else { "" }));
            let marks: Vec<String> = marks.collect();
            let form = operator.since.to_string();
            let mut row =
                vec![operator.op.clone(), marks.join(" "), form, runs_as(operator), gradient(operator)];
            row.extend(providers.iter().map(|provider| {
                operator.providers.get(*provider).map_or_else(String::new, |answer| types(operator, answer))
            }));
            rows.add_row(row);
        }
        let sums = sums.map(|sum| sum.to_string());
        counts.add_row([vec![name.to_owned(), of_domain.len().to_string()], sums.to_vec()].concat());
        _ = write!(tables, "\n## {name}\n\n{rows}\n");
    }
    format!("{HEAD}\n{counts}\n{LEGEND}{tables}")
}

/// The provider that the totals count, and whose answers fill the column *runs as*.
const COUNTED: &str = "cpu";

const HEAD: &str = "# Operators

Which operators run, in which versions, and with which types on each provider. Made by `cargo xtask ops` from the
registry of operators and the answers of the providers, built with all their features; `cargo xtask ops --check` fails when it is stale.
";

const LEGEND: &str = "
- *versions*: the opset versions in which the standard changed the operator; a model of any of them loads. `*`: there
  is a case for it that passes, a reference case or one of the `onnx` package. `cargo xtask reference` fails where a version has none.
- *form*: the version whose form nodes have after loading.
- *types*, *refused*, *runs as*: on the CPU. A *kernel*; *parts*, other operators that it is decomposed into; a *view*, which moves nothing where the
  plan can do without; *control* flow with graphs of its own; *replaced* when
  loaded, by its successor; a *constant* of the graph when loaded.
- *gradient*: the derivative of its *formula*, a *rule* of its own, that of the *parts* that it is made of, *zero*, or *none*, and why.
- A provider's column: for each type variable how many of the types run with every valid choice of the other types,
  or all but which. A variable that follows from others is left out.
";

fn runs_as(operator: &Operator) -> String {
    let any = |has: fn(&Answer) -> bool| operator.providers.get(COUNTED).is_some_and(has);
    let marks = [
        (any(|answer| answer.kernel), "kernel"),
        (any(|answer| answer.lowered), "parts"),
        (operator.view, "view"),
        (operator.control, "control"),
        (operator.constant, "constant"),
        (operator.replaced, "replaced"),
    ];
    let marks: Vec<&str> = marks.iter().filter(|(holds, _)| *holds).map(|(_, mark)| *mark).collect();
    marks.join(", ")
}

fn gradient(operator: &Operator) -> String {
    if operator.replaced { "as its successor".to_owned() } else { operator.gradient.clone() }
}

fn types(operator: &Operator, answer: &Answer) -> String {
    if operator.replaced {
        return "as its successor".to_owned();
    }
    if operator.constant {
        return "all".to_owned();
    }
    if !operator.sampled || answer.problem.is_some() {
        return "not asked".to_owned();
    }
    let asked = answer.variables.iter().filter(|variable| variable.runs.len() + variable.refused.len() > 0);
    let cells: Vec<String> = asked.map(variable_types).collect();
    // An operator without type variables runs with all types, unless it is refused.
    match (&answer.refusal, cells.is_empty()) {
        (Some(_), _) => "none".to_owned(),
        (None, true) => "all".to_owned(),
        (None, false) => cells.join("; "),
    }
}

fn variable_types(variable: &Variable) -> String {
    let (name, runs) = (&variable.name, variable.runs.len());
    match (runs, variable.refused.len()) {
        (_, 0) => format!("{name}: all {runs}"),
        (0, _) => format!("{name}: none"),
        // The shorter of both lists keeps the cell readable.
        (_, refused) if refused <= runs => format!("{name}: all but {}", variable.refused.join(", ")),
        _ => format!("{name}: only {}", variable.runs.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_told_by_the_shorter_list() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let table: [(&[&str], &[&str], &str); 4] = [
            (&["float", "double"], &[], "T: all 2"),
            (&["float", "double"], &["bool"], "T: all but bool"),
            (&["float"], &["bool", "int8"], "T: only float"),
            (&[], &["bool"], "T: none"),
        ];
        for (runs, refused, expected) in table {
            let variable = Variable { name: "T".to_owned(), runs: names(runs), refused: names(refused) };
            assert_eq!(variable_types(&variable), expected);
        }
    }

    #[test]
    fn a_case_covers_the_version_that_its_opset_is_in() {
        let key = || (String::new(), "Abs".to_owned());
        let versions = ByOperator::from([(key(), BTreeSet::from([1, 6, 13]))]);
        let cases = ByOperator::from([(key(), BTreeSet::from([5, 21]))]);
        let operator = Operator {
            domain: String::new(),
            op: "Abs".to_owned(),
            since: 13,
            view: false,
            control: false,
            constant: false,
            replaced: false,
            sampled: true,
            gradient: String::new(),
            providers: BTreeMap::new(),
        };
        assert_eq!(covered(&operator, &versions, &cases), [(1, true), (6, false), (13, true)]);
    }
}
