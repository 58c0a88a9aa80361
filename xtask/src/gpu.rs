//! `cargo xtask gpu`: packages the CUDA tests and benchmarks for a machine with an NVIDIA GPU that
//! has no network, no Rust and no copy of this repository.
//!
//! The folder holds programs, cases, models without weights, and `run.py`, which unpacks the
//! models, fills their weights, runs everything there and prints a table of results and bounds.
//! That script (`xtask/python/gpu_run.py`) decides what runs and for how long.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::artifacts::artifacts;
use crate::conformance;
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, prepare_with};

const PACKAGE: &str = "ort-ep-cuda";
/// The libraries that tests load: the emulator for tests of driver errors, and the provider as a
/// library.
const EMULATOR: &str = "ort_cuda_emulator";
const LIBRARY: &str = "ort_cuda_provider";
/// The scripts, with their names in the folder.
const SCRIPTS: [(&str, &str); 6] = [
    ("gpu_run.py", "run.py"),
    ("gpu_machine.py", "gpu_machine.py"),
    ("gpu_parts.py", "gpu_parts.py"),
    ("gpu_speed.py", "gpu_speed.py"),
    ("gpu_torch.py", "gpu_torch.py"),
    ("gpu_fill.py", "gpu_fill.py"),
];
const KNOWN_FAILURES: &str = "conformance_cuda.ignore";
/// An error about the size names this many of the largest files.
const NAMED: usize = 5;

/// The destination, and its maximum size.
#[derive(clap::Args)]
pub(crate) struct GpuOptions {
    /// Write to this folder, replacing it [default: target/gpu].
    #[arg(long, value_name = "FOLDER")]
    to: Option<PathBuf>,
    /// Fail if the folder would take more than this many MiB.
    #[arg(long, value_name = "MIB", default_value_t = 60.0)]
    limit: f64,
}

/// A program of the folder: its name there, and the file that cargo built.
#[derive(Debug, PartialEq, Eq)]
struct Program {
    name: String,
    built: PathBuf,
}

/// Builds and packages everything in a temporary folder, and moves it into place only once it is
/// complete.
pub(crate) fn run(workspace: &Workspace, options: &GpuOptions) -> Result<()> {
    let to = options.to.clone().unwrap_or_else(|| workspace.target.join("gpu"));
    // A path such as `..` has no name, so nothing can be renamed to it.
    let Some(parent) = to.parent().filter(|_| to.file_name().is_some()) else {
        bail!("--to {} is no folder of its own", to.display());
    };
    let python = Python::open(workspace)?;
    let cases = conformance::dump(workspace)?;
    let programs = build(workspace)?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    // In the parent, so that the new folder can be renamed into place on the same file system.
    let temporary = tempfile::tempdir_in(parent).context("no temporary folder")?;
    let (named, new) = (temporary.path().join("bin"), temporary.path().join("gpu"));
    for folder in [&named, &new] {
        fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    programs.iter().try_for_each(|program| copy(&program.built, &named.join(&program.name)))?;
    let mut script = python.script("gpu_bundle.py");
    script.arg(&new).arg(workspace.root.join("models")).arg(&named).arg(cases.join("node"));
    prepare_with(&mut script)?;
    for (from, name) in SCRIPTS {
        copy(&workspace.own("python").join(from), &new.join(name))?;
    }
    copy(&workspace.own(KNOWN_FAILURES), &new.join(KNOWN_FAILURES))?;
    let files = files(&new)?;
    check_size(&files, options.limit)?;
    // The old folder is moved, not deleted. It goes with the temporary folder, after the new one
    // is in place.
    if to.exists() {
        fs::rename(&to, temporary.path().join("old"))
            .with_context(|| format!("cannot replace {}", to.display()))?;
    }
    fs::rename(&new, &to).with_context(|| format!("cannot write {}", to.display()))?;
    print(&files, &to);
    Ok(())
}

/// Builds `ort` with the provider, the provider's tests and examples, and the emulator.
fn build(workspace: &Workspace) -> Result<Vec<Program>> {
    let ort = workspace.build_ort_with(&["cuda".to_owned()])?;
    let mut command = workspace.cargo();
    command.args(["test", "--release", "--quiet", "--no-run", "--message-format=json", "--package", PACKAGE]);
    let mut programs = programs(&capture(&mut command)?)?;
    programs.push(Program { name: format!("ort{}", std::env::consts::EXE_SUFFIX), built: ort });
    Ok(programs)
}

/// Returns the tests and examples that a build made, and the libraries that the tests look for
/// beside themselves.
fn programs(messages: &str) -> Result<Vec<Program>> {
    let mut found = Vec::new();
    for artifact in artifacts(messages)? {
        if let Some(built) = &artifact.executable {
            let is_example = artifact.is_example();
            if is_example || artifact.is_test {
                // A test may have the name of an example, hence the prefix.
                let name = if is_example { artifact.name } else { format!("test_{}", artifact.name) };
                found.push(Program { name, built: built.clone() });
            }
        } else if [EMULATOR, LIBRARY].contains(&artifact.name.as_str()) {
            let is_library = |path: &PathBuf| {
                path.extension().is_some_and(|own| own.to_str() == Some(std::env::consts::DLL_EXTENSION))
            };
            for built in artifact.files.into_iter().filter(is_library) {
                let name = built.file_name().unwrap_or_default().to_string_lossy().into_owned();
                found.push(Program { name, built });
            }
        }
    }
    let has = |start: &str| found.iter().any(|program| program.name.starts_with(start));
    let has_library = |name: &str| found.iter().any(|program| program.name.contains(name));
    // Missing programs would show only on the machine with the GPU.
    if !has("test_") || !has("cuda_cases") || !has_library(EMULATOR) || !has_library(LIBRARY) {
        bail!("the build made no tests, no example cuda_cases, no {EMULATOR} or no {LIBRARY}");
    }
    Ok(found)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display())).map(drop)
}

/// Lists the files of a folder, recursively, with their sizes, the largest first.
fn files(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(&next).with_context(|| format!("cannot read {}", next.display()))? {
            let entry = entry?;
            let kind = entry.metadata()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else {
                let name = entry.path().strip_prefix(folder).map(Path::to_owned).unwrap_or_default();
                found.push((name, kind.len()));
            }
        }
    }
    // Equal sizes sort by name, so that the output does not depend on the file system.
    found.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    Ok(found)
}

/// Fails if the files, sorted with the largest first, exceed `limit` MiB in total.
fn check_size(files: &[(PathBuf, u64)], limit: f64) -> Result<()> {
    let total = mebibytes(files.iter().map(|(_, bytes)| bytes).sum());
    if total <= limit {
        return Ok(());
    }
    let largest: Vec<String> = files
        .iter()
        .take(NAMED)
        .map(|(name, bytes)| format!("{} {:.1} MiB", name.display(), mebibytes(*bytes)))
        .collect();
    bail!(
        "the folder would take {total:.1} MiB, more than --limit {limit} allows; the largest are {}",
        largest.join(", ")
    )
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn print(files: &[(PathBuf, u64)], to: &Path) {
    let mut rows = table::new(&["file", "bytes"]);
    for (name, bytes) in files {
        rows.add_row([name.display().to_string(), bytes.to_string()]);
    }
    println!("{rows}");
    let total = mebibytes(files.iter().map(|(_, bytes)| bytes).sum());
    println!(
        "{} is {total:.1} MiB; on the machine with the GPU: python3 {}/run.py --help",
        to.display(),
        to.file_name().unwrap_or_default().to_string_lossy()
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artifact(name: &str, kind: &str, test: bool, executable: &str, filenames: &str) -> String {
        format!(
            r#"{{"reason":"compiler-artifact","manifest_path":"/w/Cargo.toml","target":{{"name":"{name}","kind":["{kind}"]}},"profile":{{"test":{test}}},"executable":{executable},"filenames":[{filenames}]}}"#
        )
    }

    #[test]
    fn programs_are_tests_examples_and_the_emulator() {
        let built =
            |name: &str| format!("/t/{}{name}{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
        let (library, provider) = (built(EMULATOR), built(LIBRARY));
        let lines = [
            artifact("ort_core", "lib", false, "null", r#""/t/libort_core.rlib""#),
            artifact(EMULATOR, "cdylib", false, "null", &format!(r#""{library}","/t/{EMULATOR}.rlib""#)),
            artifact(LIBRARY, "cdylib", false, "null", &format!(r#""{provider}""#)),
            artifact("ort_ep_cuda", "lib", true, r#""/t/ort_ep_cuda-1""#, ""),
            artifact("faults", "test", true, r#""/t/faults-2""#, ""),
            artifact("cuda_cases", "example", false, r#""/t/cuda_cases""#, ""),
            artifact("build-script-build", "custom-build", false, r#""/t/build""#, ""),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let found = programs(&lines.join("\n")).unwrap();
        let found: Vec<(&str, &Path)> =
            found.iter().map(|program| (program.name.as_str(), program.built.as_path())).collect();
        let named = |library| Path::new(library).file_name().unwrap().to_str().unwrap();
        let expected = [
            (named(&library), library.as_str()),
            (named(&provider), provider.as_str()),
            ("test_ort_ep_cuda", "/t/ort_ep_cuda-1"),
            ("test_faults", "/t/faults-2"),
            ("cuda_cases", "/t/cuda_cases"),
        ];
        assert_eq!(found, expected.map(|(name, built)| (name, Path::new(built))));
        // Without one of these the folder could not do its job, so packaging must fail.
        for left_out in [1, 2, 5] {
            let others = lines.iter().enumerate().filter(|(at, _)| *at != left_out).map(|(_, line)| line);
            assert!(programs(&others.cloned().collect::<Vec<_>>().join("\n")).is_err());
        }
        assert!(programs("error: no json").is_err());
    }

    #[test]
    fn a_folder_that_is_too_large_names_its_largest_files() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("models")).unwrap();
        for (name, bytes) in [("models/a", 3 << 19), ("b", 1 << 20), ("c", 1 << 19)] {
            fs::write(folder.path().join(name), vec![0; bytes]).unwrap();
        }
        let found = files(folder.path()).unwrap();
        assert_eq!(found.iter().map(|(_, bytes)| *bytes).collect::<Vec<_>>(), [3 << 19, 1 << 20, 1 << 19]);
        assert!(check_size(&found, 3.0).is_ok());
        let message = check_size(&found, 2.9).unwrap_err().to_string();
        assert!(message.contains("3.0 MiB") && message.contains("models/a 1.5 MiB, b 1.0 MiB"), "{message}");
    }
}
