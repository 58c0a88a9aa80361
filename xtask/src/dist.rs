//! `cargo xtask dist`: the wheels of the Python package, with their sizes and the glibc that they
//! need.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, run as run_command};

/// The manifest of the package, and the folder of the distribution that owns the name onnxruntime.
const MANIFEST: &str = "ort-py/Cargo.toml";
const ALIAS: &str = "ort-py/alias";

/// What the names of the two wheels start with.
const WHEEL: &str = "ort_runtime-";
const ALIAS_WHEEL: &str = "onnxruntime-";

/// The largest wheel that we ship.
const MAX_BYTES: u64 = 10 << 20;

/// Fails unless both names are the same package.
const IMPORT: &str = "import onnxruntime, ort_runtime; assert onnxruntime is ort_runtime";

/// How a wheel is built.
#[derive(Clone, Copy)]
enum Build {
    /// In the profile `release`, whose crates `ort` shares.
    Tested,
    /// As small as it gets, in twice the time: optimized across crates, and compressed by Zopfli.
    Shipped,
}

/// A version of glibc.
type Glibc = (u32, u32);

/// Which wheels to build.
#[derive(clap::Args)]
pub(crate) struct DistOptions {
    /// Build a wheel for this interpreter, too. The usual wheel is for all of CPython from 3.11 on;
    /// a free-threaded interpreter needs one of its own, and must have NumPy.
    #[arg(long, value_name = "PYTHON")]
    interpreter: Vec<PathBuf>,
}

/// Builds the wheels to `target/dist`; an error if one is too large, needs a newer glibc than its
/// name says, or cannot be imported.
pub(crate) fn run(workspace: &Workspace, options: &DistOptions) -> Result<()> {
    let python = Python::open_for_package(workspace)?;
    let out = workspace.target.join("dist");
    let mut wheels = vec![
        build_wheel_into(workspace, &python, &out, Build::Shipped)?,
        build_alias(workspace, &python, &out)?,
    ];
    check_import(workspace, &python, &wheels)?;
    for interpreter in &options.interpreter {
        let other = Python::of_interpreter(workspace, interpreter);
        let folder = tempfile::tempdir_in(&workspace.target).context("a folder for a wheel")?;
        let built = build_wheel_for(workspace, &python, interpreter, folder.path(), Build::Shipped)?;
        check_import(workspace, &other, &[built.clone(), wheels[1].clone()])?;
        let wheel = out.join(built.file_name().unwrap_or_default());
        fs::rename(&built, &wheel).with_context(|| format!("cannot write {}", wheel.display()))?;
        wheels.push(wheel);
    }
    let mut rows = table::new(&["wheel", "bytes", "limit", "glibc needed", "glibc of the tag"]);
    let mut problems = Vec::new();
    for wheel in &wheels {
        let name = wheel.file_name().unwrap_or_default().to_string_lossy();
        let bytes = fs::metadata(wheel).with_context(|| format!("no {}", wheel.display()))?.len();
        let needed = capture(python.script("wheel_glibc.py").arg(wheel))?;
        let (needed, tagged) = (version(needed.trim(), '.'), tagged_glibc(&name));
        let [shown_needed, shown_tagged] = [needed, tagged].map(shown);
        if bytes > MAX_BYTES {
            problems.push(format!("{name} has {bytes} bytes, and the limit is {MAX_BYTES}"));
        }
        // An installer trusts the tag, and the import fails where glibc is older.
        if needed > tagged {
            problems.push(format!("{name} needs glibc {shown_needed}, which its tag does not say"));
        }
        let (bytes, limit) = (bytes.to_string(), MAX_BYTES.to_string());
        rows.add_row([&*name, &bytes, &limit, &shown_needed, &shown_tagged]);
    }
    println!("{rows}");
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(())
}

/// Builds the wheel of the package for tests into a folder of its own, and returns its path.
///
/// It is a release build in the workspace's target folder. The tests of the package run models, for
/// which the dev profile is too slow, and a profile between the two would compile everything again:
/// in release, cargo shares what it has built for `ort` with the same features.
pub(crate) fn build_wheel(workspace: &Workspace, python: &Python, out: &Path) -> Result<PathBuf> {
    build_wheel_into(workspace, python, out, Build::Tested)
}

/// Builds the wheel of the package into a folder of its own, and returns its path.
fn build_wheel_into(workspace: &Workspace, python: &Python, out: &Path, build: Build) -> Result<PathBuf> {
    // Wheels of former versions would stay beside the new one.
    if out.exists() {
        fs::remove_dir_all(out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    build_wheel_for(workspace, python, python.interpreter(), out, build)
}

/// Builds the wheel of the package for an interpreter into a folder.
fn build_wheel_for(
    workspace: &Workspace,
    python: &Python,
    interpreter: &Path,
    out: &Path,
    build: Build,
) -> Result<PathBuf> {
    let mut maturin = python.module("maturin");
    maturin.current_dir(&workspace.root).args(["build", "--manifest-path", MANIFEST]);
    maturin.args(["--profile", if matches!(build, Build::Shipped) { "wheel" } else { "release" }]);
    maturin.arg("--interpreter").arg(interpreter).arg("--out").arg(out);
    maturin.args(["--compression-level", "9"]);
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        // One copy of functions that are alike saves three per cent of the module. Rust's own
        // linker knows how, and it is the default on this platform alone.
        maturin.args(["--", "-C", "link-arg=-Wl,--icf=all"]);
    }
    run_command(&mut maturin)?;
    let wheel = find_wheel(out, WHEEL)?;
    if matches!(build, Build::Shipped) {
        run_command(python.script("compress_wheel.py").arg(&wheel))?;
    }
    Ok(wheel)
}

/// Builds the wheel of the alias, which is Python alone.
fn build_alias(workspace: &Workspace, python: &Python, out: &Path) -> Result<PathBuf> {
    let mut pip = python.module("pip");
    // Its build backend is in the environment, so nothing is downloaded.
    pip.args(["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]);
    run_command(pip.arg(out).arg(workspace.root.join(ALIAS)))?;
    find_wheel(out, ALIAS_WHEEL)
}

/// Installs the wheels into a folder and imports both names from there.
fn check_import(workspace: &Workspace, python: &Python, wheels: &[PathBuf]) -> Result<()> {
    let folder = tempfile::tempdir_in(&workspace.target).context("a folder for the wheels")?;
    python.install_wheels(wheels, Some(folder.path()))?;
    // The folder comes before the environment, which has an onnxruntime of its own.
    run_command(python.command().env("PYTHONPATH", folder.path()).args(["-c", IMPORT]))
}

/// Returns the wheel in a folder whose name starts like this.
fn find_wheel(folder: &Path, start: &str) -> Result<PathBuf> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let is_named = path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with(start));
        if is_named && path.extension().is_some_and(|extension| extension == "whl") {
            return Ok(path);
        }
    }
    bail!("no wheel {start}*.whl was built in {}", folder.display())
}

/// Returns the oldest glibc that the name of a wheel promises to run with, from tags such as
/// `manylinux_2_34_x86_64`.
fn tagged_glibc(name: &str) -> Option<Glibc> {
    name.split("manylinux_").skip(1).filter_map(|tag| version(tag, '_')).min()
}

/// Parses the first two numbers of a text.
fn version(text: &str, separator: char) -> Option<Glibc> {
    let mut numbers = text.split(separator).map(|number| number.parse::<u32>().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn shown(version: Option<Glibc>) -> String {
    version.map_or_else(|| "-".to_owned(), |(major, minor)| format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_name_the_oldest_glibc() {
        let cases = [
            ("a-1-cp311-abi3-manylinux_2_34_x86_64.whl", Some((2, 34))),
            ("a-1-cp311-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", Some((2, 17))),
            ("a-1-cp311-abi3-manylinux_2_28_aarch64.manylinux_2_17_aarch64.whl", Some((2, 17))),
            ("a-1-cp311-abi3-linux_x86_64.whl", None),
            ("a-1-py3-none-any.whl", None),
        ];
        for (name, expected) in cases {
            assert_eq!(tagged_glibc(name), expected, "{name}");
        }
        assert_eq!(version("2.34", '.'), Some((2, 34)));
        assert_eq!(version("", '.'), None);
    }

    #[test]
    fn a_wheel_is_found_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["onnxruntime-1.31.1.whl", "ort_runtime-0.1.0.txt", "ort_runtime-0.1.0.whl"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(find_wheel(folder.path(), WHEEL).unwrap().ends_with("ort_runtime-0.1.0.whl"));
        assert!(find_wheel(folder.path(), ALIAS_WHEEL).unwrap().ends_with("onnxruntime-1.31.1.whl"));
        assert!(find_wheel(folder.path(), "other-").is_err());
    }
}
