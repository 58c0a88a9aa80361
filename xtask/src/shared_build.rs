//! The check that the release builds of `ort` and of the Python package share their crates.
//!
//! Cargo compiles a crate once for each set of features of it and of the crates below it. The two
//! builds name different packages, so each unifies features on its own. `ort-report/Cargo.toml`
//! depends on what makes them the same.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, capture};

/// The packages of the two builds, with the features that maturin adds (`[tool.maturin]` in
/// `ort-py/pyproject.toml`).
const BUILDS: [(&str, &[&str]); 2] = [("ort-cli", &[]), ("ort-py", &["--features", "pyo3/extension-module"])];

/// Crates that the builds do not share, because their features differ on purpose: the facade has
/// training in one and wgpu in the other.
const OWN: [&str; 1] = ["ort-runtime"];

/// Where features that one build lacks belong.
const HELP: &str = "see ort-report/Cargo.toml";

/// A crate with its features.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Unit {
    /// Its name and version.
    name: String,
    features: BTreeSet<String>,
    is_member: bool,
}

/// What each crate of a build depends on.
type Graph = BTreeMap<Unit, BTreeSet<Unit>>;

/// Returns the crates of the workspace that would be compiled for each of the two builds, with the
/// features that differ.
pub(crate) fn differences(workspace: &Workspace) -> Result<Vec<String>> {
    let root = workspace.root.display().to_string();
    let mut graphs = Vec::new();
    for (package, features) in BUILDS {
        let mut command = workspace.cargo();
        command.args(["tree", "--offline", "--edges", "normal,build", "--prefix", "depth"]);
        command.args(["--format", "|{p}|{f}", "--package", package]).args(features);
        graphs.push(parse(&capture(&mut command)?, &root).with_context(|| format!("the tree of {package}"))?);
    }
    let [first, second] = graphs.as_slice() else { bail!("two builds are compared, not {}", graphs.len()) };
    Ok(compare(first, second))
}

/// Parses the output of `cargo tree`: lines of a depth, a crate and its features. A crate that was
/// shown before ends in `(*)`, and what it depends on is left out.
fn parse(tree: &str, root: &str) -> Result<Graph> {
    let mut graph = Graph::new();
    let mut above: Vec<Unit> = Vec::new();
    for line in tree.lines().filter(|line| !line.is_empty()) {
        let mut parts = line.trim_end_matches(" (*)").splitn(3, '|');
        let (Some(depth), Some(name), Some(features)) = (parts.next(), parts.next(), parts.next()) else {
            bail!("cargo printed `{line}`");
        };
        let depth: usize = depth.parse().with_context(|| format!("cargo printed `{line}`"))?;
        let unit = Unit {
            // A path or the word `(proc-macro)` follows the version.
            name: name.split(" (").next().unwrap_or(name).to_owned(),
            features: features.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect(),
            is_member: name.contains(&format!("({root}")),
        };
        above.truncate(depth);
        if let Some(parent) = above.last() {
            graph.entry(parent.clone()).or_default().insert(unit.clone());
        }
        graph.entry(unit.clone()).or_default();
        above.push(unit);
    }
    Ok(graph)
}

/// Compares the members that both builds have: their own features, and those of all crates below.
fn compare(first: &Graph, second: &Graph) -> Vec<String> {
    // Each crate that differs, with the members that are compiled twice for it.
    let mut found: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let is_shared =
        |unit: &&Unit| unit.is_member && !OWN.iter().any(|own| unit.name.split(' ').next() == Some(own));
    for member in first.keys().filter(is_shared) {
        let same_name = second.keys().filter(|unit| unit.name == member.name);
        let others: BTreeSet<&Unit> = same_name.flat_map(|unit| below(second, unit)).collect();
        if others.is_empty() {
            continue;
        }
        let own = below(first, member);
        for name in own.symmetric_difference(&others).map(|unit| &unit.name).collect::<BTreeSet<_>>() {
            found.entry(difference(name, &own, &others)).or_default().push(&member.name);
        }
    }
    found
        .into_iter()
        .map(|(what, members)| format!("{what}, so {} compiled twice: {HELP}", list(&members)))
        .collect()
}

/// Returns a crate and all that it depends on.
fn below<'a>(graph: &'a Graph, unit: &'a Unit) -> BTreeSet<&'a Unit> {
    let (mut found, mut waiting) = (BTreeSet::new(), vec![unit]);
    while let Some(unit) = waiting.pop() {
        if found.insert(unit) {
            waiting.extend(graph.get(unit).into_iter().flatten());
        }
    }
    found
}

/// Says what a crate has in one build alone.
fn difference(name: &str, first: &BTreeSet<&Unit>, second: &BTreeSet<&Unit>) -> String {
    let of = |units: &BTreeSet<&Unit>| -> Vec<BTreeSet<String>> {
        units.iter().filter(|unit| unit.name == name).map(|unit| unit.features.clone()).collect()
    };
    let [first, second] = [of(first), of(second)];
    let all = |sets: &[BTreeSet<String>]| sets.iter().flatten().cloned().collect::<BTreeSet<String>>();
    let (here, there) = (all(&first), all(&second));
    let mut parts = Vec::new();
    for ((build, _), only) in BUILDS.iter().zip([&here - &there, &there - &here]) {
        if !only.is_empty() {
            let only: Vec<String> = only.into_iter().collect();
            parts.push(format!("{} for {build} alone", only.join(",")));
        }
    }
    match parts.is_empty() {
        // A library and a build script may each have features of their own.
        true => format!("{name} is built {} and {} times", first.len(), second.len()),
        false => format!("{name} has {}", parts.join(" and ")),
    }
}

/// Returns the first members of a list, and the number of the others.
fn list(members: &[&str]) -> String {
    match members {
        [one] => format!("{one} is"),
        [first, others @ ..] => format!("{first} and {} more are", others.len()),
        [] => "none is".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLI: &str = "\
0|ort-cli v0.1.0 (/repo/ort-cli)|
1|ort-runtime v0.1.0 (/repo/ort-runtime)|train
2|ort-core v0.1.0 (/repo/ort-core)|
3|indexmap v2.14.2|default,std
4|hashbrown v0.17.1|
3|derive v1.0.0 (proc-macro)|default
2|ort-train v0.1.0 (/repo/ort-train)|
3|ort-core v0.1.0 (/repo/ort-core)| (*)
3|safetensors v0.8.0|std
";
    const PY: &str = "\
0|ort-py v0.1.0 (/repo/ort-py)|
1|ort-runtime v0.1.0 (/repo/ort-runtime)|wgpu
2|ort-core v0.1.0 (/repo/ort-core)|
3|indexmap v2.14.2|default,std
4|hashbrown v0.17.1|inline-more
3|derive v1.0.0 (proc-macro)|default
1|safetensors v0.8.0|
";

    #[test]
    fn a_crate_below_a_shared_one_is_named_with_its_features() {
        let [cli, py] = [CLI, PY].map(|tree| parse(tree, "/repo").unwrap());
        // Only `ort-train` depends on safetensors, and the facade differs on purpose.
        assert_eq!(
            compare(&cli, &py),
            ["hashbrown v0.17.1 has inline-more for ort-py alone, so ort-core v0.1.0 is compiled twice: \
                 see ort-report/Cargo.toml"]
        );
        assert_eq!(compare(&cli, &cli), Vec::<String>::new());
    }

    #[test]
    fn a_crate_that_is_shown_again_keeps_what_it_depends_on() {
        let graph = parse(CLI, "/repo").unwrap();
        let train = graph.keys().find(|unit| unit.name == "ort-train v0.1.0").unwrap();
        let names: Vec<&str> = below(&graph, train).iter().map(|unit| unit.name.as_str()).collect();
        assert!(names.contains(&"hashbrown v0.17.1") && train.is_member, "{names:?}");
        assert!(parse("1 ort-core", "/repo").is_err());
    }

    #[test]
    fn the_builds_share_their_crates() {
        let found = differences(&Workspace::discover().unwrap()).unwrap();
        assert!(found.is_empty(), "{}", found.join("\n"));
    }
}
