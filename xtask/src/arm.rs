//! `cargo xtask arm`: the tests of the CPU kernels for AArch64, under QEMU's user-mode emulation.
//!
//! It checks NEON on a machine of another architecture, and is a stage of `cargo xtask test`. On
//! AArch64 itself the unit tests check the same.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::cargo_tests::run_tests;
use crate::summary::Summary;
use crate::workspace::Workspace;

/// The name of the stage in the summary.
const SUITE: &str = "AArch64, emulated";

const TARGET: &str = "aarch64-unknown-linux-gnu";
/// The crates with code for each instruction set.
const PACKAGES: [&str; 3] = ["ort-cpu-vector", "ort-cpu-depthwise", "ort-cpu-gemm"];
/// The variables by which cargo finds the linker and the emulator.
const LINKER: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER";
const RUNNER: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER";
const EMULATOR: &str = "qemu-aarch64";
/// The program loader. Its folder's parent is where the emulator finds the libraries.
const LOADER: &str = "ld-linux-aarch64.so.1";

/// The tools.
#[derive(clap::Args)]
pub(crate) struct ArmOptions {
    /// Compile with this rustc, for example one that has the target's standard library.
    #[arg(long, value_name = "FILE", env = "RUSTC", default_value = "rustc")]
    rustc: PathBuf,
}

/// What the tests are built and run with.
struct Tools {
    rustc: PathBuf,
    linker: OsString,
    runner: OsString,
}

impl Default for ArmOptions {
    fn default() -> Self {
        // As clap fills it in.
        ArmOptions { rustc: std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()).into() }
    }
}

/// Builds and runs the tests, or reports what they lack.
pub(crate) fn run(workspace: &Workspace, options: &ArmOptions) -> Result<()> {
    let summary = tests(workspace, options)?;
    println!("{summary}");
    Ok(())
}

/// The stage of `cargo xtask test`, which is skipped if a tool is missing.
pub(crate) fn stage(workspace: &Workspace) -> Result<Summary> {
    if cfg!(target_arch = "aarch64") {
        // The unit tests ran the same tests, without emulation.
        return Ok(Summary::default());
    }
    tests(workspace, &ArmOptions::default())
}

fn tests(workspace: &Workspace, options: &ArmOptions) -> Result<Summary> {
    let tools = match find(&options.rustc) {
        Ok(tools) => tools,
        Err(why) => return Ok(Summary::without(SUITE, PACKAGES.len(), &why)),
    };
    let mut command = workspace.cargo();
    command.args(["test", "--quiet", "--tests", "--target", TARGET]);
    PACKAGES.iter().for_each(|name| {
        command.args(["--package", name]);
    });
    command.env("RUSTC", tools.rustc).env(LINKER, tools.linker).env(RUNNER, tools.runner);
    run_tests(&mut command)
}

/// Finds the tools, or says which one is missing and how to install it.
fn find(rustc: &Path) -> Result<Tools, String> {
    let library = printed(Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]));
    if !library.as_deref().is_some_and(|folder| Path::new(folder).is_dir()) {
        let rustc = rustc.display();
        return Err(format!("{rustc} has no standard library for it: rustup target add {TARGET}"));
    }
    let linker = std::env::var_os(LINKER).unwrap_or_else(|| "aarch64-linux-gnu-gcc".into());
    let loader = printed(Command::new(&linker).arg(format!("-print-file-name={LOADER}")));
    let Some(libraries) = loader.as_deref().and_then(libraries) else {
        let linker = linker.display();
        return Err(format!(
            "{linker} or its C library is missing: apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
        ));
    };
    let runner = match std::env::var_os(RUNNER) {
        Some(runner) => runner,
        None if printed(Command::new(EMULATOR).arg("--version")).is_some() => {
            // `-L` is the root under which QEMU looks for the loader and the libraries of the
            // target.
            format!("{EMULATOR} -L {}", libraries.display()).into()
        }
        None => return Err(format!("{EMULATOR} is missing: apt install qemu-user")),
    };
    Ok(Tools { rustc: rustc.to_owned(), linker, runner })
}

/// Returns what a command prints, without the line end, or `None` if it cannot run or fails.
fn printed(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim_end().to_owned())
}

/// Returns the folder whose `lib` holds the program loader. The linker prints its name alone if it
/// does not find it.
fn libraries(loader: &str) -> Option<&Path> {
    Path::new(loader).parent()?.parent()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_are_above_the_loader() {
        let found = libraries("/usr/lib/../aarch64-linux-gnu/lib/ld-linux-aarch64.so.1");
        assert_eq!(found, Some(Path::new("/usr/lib/../aarch64-linux-gnu")));
        assert_eq!(libraries(LOADER), None);
    }

    #[test]
    fn a_compiler_that_is_not_there_is_named() {
        let why = find(Path::new("/nowhere/rustc")).err().unwrap_or_default();
        assert!(why.starts_with("/nowhere/rustc has no standard library"), "{why}");
    }
}
