//! `cargo xtask features`: checks every combination of the facade's cargo features, tests some of
//! them, and checks every crate alone.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::table;
use crate::workspace::{Workspace, run as run_command};

const FACADE: &str = "ort-runtime";
/// The maximum number of features up to which all combinations are checked; above it, only the
/// tested ones are.
const MOST_FOR_ALL_COMBINATIONS: usize = 6;

/// Features that choose the heap. They exclude each other, and are mostly checked rather than
/// tested, because they change no result.
pub(crate) const HEAPS: [&str; 2] = ["mimalloc", "jemalloc"];

/// Checks and tests each combination.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let Some(facade) = workspace.packages.iter().find(|package| package.name == FACADE) else {
        bail!("there is no crate {FACADE}");
    };
    // A `dep:` feature has no name of its own; `default` is a combination of the others.
    let names = facade.features.keys().map(String::as_str);
    let features: Vec<&str> = names.filter(|name| *name != "default" && !HEAPS.contains(name)).collect();
    let (checked, tested) = (combinations(&features), edges(&features));
    let mut rows = table::new(&["features of the facade", "check, s", "test, s"]);
    for combination in &checked {
        let features = combination.join(",");
        let flags = ["--package", FACADE, "--no-default-features", "--features", &features];
        let seconds = |arguments: &[&str]| -> Result<String> {
            let start = Instant::now();
            run_command(workspace.cargo().args(arguments).args(flags))?;
            Ok(format!("{:.0}", start.elapsed().as_secs_f64()))
        };
        let check = seconds(&["check", "--quiet", "--all-targets"])?;
        let test = if tested.contains(combination) { seconds(&["test", "--quiet"])? } else { "-".to_owned() };
        rows.add_row([if features.is_empty() { "none" } else { &features }, &check, &test]);
    }
    // One crate at a time: cargo unifies features over a workspace, which hides a missing one.
    for package in &workspace.packages {
        run_command(workspace.cargo().args([
            "check",
            "--quiet",
            "--all-targets",
            "--package",
            &package.name,
        ]))?;
    }
    for heap in HEAPS {
        let binary = ["check", "--quiet", "--package", "ort-cli", "--features", heap];
        run_command(workspace.cargo().args(binary))?;
        // Trimming differs between heaps, so its tests run with each.
        let tests = ["test", "--quiet", "--package", "ort-alloc", "--lib", "--features", heap, "heap"];
        run_command(workspace.cargo().args(tests))?;
    }
    println!("{rows}");
    println!(
        "{} combinations of {} features, {} of them tested, {} heaps and all {} crates are fine",
        checked.len(),
        features.len(),
        tested.len(),
        HEAPS.len(),
        workspace.packages.len()
    );
    Ok(())
}

/// Returns the combinations to check: all of them, if there are few features.
fn combinations<'a>(features: &[&'a str]) -> Vec<Vec<&'a str>> {
    let count = features.len();
    if count > MOST_FOR_ALL_COMBINATIONS {
        return edges(features);
    }
    let chosen = |bits: usize| (0..count).filter(|at| bits >> at & 1 == 1).map(|at| features[at]).collect();
    (0..1 << count).map(chosen).collect()
}

/// Returns the combinations to test: none, each alone, all but one, and all.
fn edges<'a>(features: &[&'a str]) -> Vec<Vec<&'a str>> {
    let without =
        |at: usize| features.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, name)| *name).collect();
    let mut list = vec![Vec::new()];
    list.extend(features.iter().map(|name| vec![*name]));
    list.extend((0..features.len()).map(without));
    list.push(features.to_vec());
    // With two features or fewer, these lists overlap.
    list.sort();
    list.dedup();
    list
}

#[cfg(test)]
mod tests {
    use super::{combinations, edges};

    #[test]
    fn few_features_are_combined_in_all_ways() {
        assert_eq!(combinations(&[]), [Vec::<&str>::new()]);
        assert_eq!(combinations(&["a", "b"]), [vec![], vec!["a"], vec!["b"], vec!["a", "b"]]);
        assert_eq!(combinations(&["a", "b", "c", "d"]).len(), 16);
    }

    #[test]
    fn features_are_tested_alone_left_out_and_together() {
        let list = edges(&["a", "b", "c", "d", "e"]);
        assert_eq!(list.len(), 1 + 5 + 5 + 1);
        assert!(list.contains(&vec!["b", "c", "d", "e"]));
        assert_eq!(edges(&["a", "b"]), [vec![], vec!["a"], vec!["a", "b"], vec!["b"]]);
        let all = combinations(&["a", "b", "c", "d", "e"]);
        assert!(all.len() == 32 && list.iter().all(|tested| all.contains(tested)));
        assert_eq!(combinations(&["a", "b", "c", "d", "e", "f", "g"]).len(), 1 + 7 + 7 + 1);
    }
}
