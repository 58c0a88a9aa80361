//! Paths of the workspace, and helpers to run other programs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// A crate of the workspace.
#[derive(Default, Deserialize)]
pub(crate) struct Package {
    /// The crate's name.
    pub(crate) name: String,
    /// Its version.
    pub(crate) version: String,
    /// The path of its manifest.
    pub(crate) manifest_path: PathBuf,
    /// Its cargo features, with what each one enables.
    pub(crate) features: BTreeMap<String, Vec<String>>,
    /// What its manifest depends on.
    pub(crate) dependencies: Vec<Dependency>,
    /// What cargo builds of it.
    pub(crate) targets: Vec<CrateTarget>,
    /// The name under which its build script passes metadata to those of dependents.
    pub(crate) links: Option<String>,
    /// The registries that it may go to; all if there is no list.
    pub(crate) publish: Option<Vec<String>>,
    pub(crate) description: Option<String>,
    pub(crate) license: Option<String>,
    pub(crate) readme: Option<String>,
    pub(crate) keywords: Vec<String>,
    pub(crate) categories: Vec<String>,
}

impl Package {
    /// Its folder.
    pub(crate) fn folder(&self) -> &Path {
        self.manifest_path.parent().unwrap_or(Path::new(""))
    }

    /// Whether it may go to a registry.
    pub(crate) fn is_published(&self) -> bool {
        // Cargo's metadata shows `publish = false` as an empty list.
        self.publish.as_ref().is_none_or(|registries| !registries.is_empty())
    }
}

/// A dependency of a crate.
#[derive(Deserialize)]
pub(crate) struct Dependency {
    /// The name of the other crate.
    pub(crate) name: String,
    /// `dev`, `build`, or nothing for a normal one.
    pub(crate) kind: Option<String>,
}

impl Dependency {
    /// Whether the crate itself needs it.
    pub(crate) fn is_normal(&self) -> bool {
        self.kind.is_none()
    }

    /// Whether the build script needs it.
    pub(crate) fn is_build(&self) -> bool {
        self.kind.as_deref() == Some("build")
    }
}

/// A library, program, test or build script of a crate.
#[derive(Deserialize)]
pub(crate) struct CrateTarget {
    /// What it is: `lib`, `bin`, `test`, `example`, `custom-build` and others.
    #[serde(rename = "kind")]
    pub(crate) kinds: Vec<String>,
    /// Its first source file.
    pub(crate) src_path: PathBuf,
}

/// The workspace, parsed from `cargo metadata`.
#[derive(Deserialize)]
pub(crate) struct Workspace {
    /// The repository's root folder.
    #[serde(rename = "workspace_root")]
    pub(crate) root: PathBuf,
    /// Cargo's target folder, which receives all generated files.
    #[serde(rename = "target_directory")]
    pub(crate) target: PathBuf,
    /// The crates.
    pub(crate) packages: Vec<Package>,
    /// The `ort` binary to use instead of building one.
    #[serde(skip)]
    pub(crate) ort: Option<PathBuf>,
}

impl Workspace {
    /// Runs `cargo metadata`.
    pub(crate) fn discover() -> Result<Self> {
        let mut command = cargo();
        command.args(["metadata", "--format-version=1", "--no-deps"]).stderr(Stdio::inherit());
        let output = command.output().context("cannot run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata failed ({})", output.status);
        }
        serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata printed")
    }

    /// A path inside this crate's folder.
    pub(crate) fn own(&self, path: &str) -> PathBuf {
        self.root.join("xtask").join(path)
    }

    /// `cargo` with the repository's root as working directory.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = cargo();
        command.current_dir(&self.root);
        command
    }

    /// Builds an example of a member in the dev profile and returns its path. No dependency of the
    /// tests is built twice: `--workspace` makes cargo unify features as it does for them, and with
    /// the libraries it passes the same flags for link-time optimization. For an example alone it
    /// passes others to what macros and programs both depend on, such as `proc-macro2`, and so
    /// rebuilds all that is above.
    pub(crate) fn build_example(&self, name: &str) -> Result<PathBuf> {
        run(self.cargo().args(["build", "--quiet", "--workspace", "--lib", "--bins", "--example", name]))?;
        Ok(self.target.join("debug/examples").join(format!("{name}{}", std::env::consts::EXE_SUFFIX)))
    }

    /// Builds the binary `ort` in the dev profile, which takes seconds after an edit, and returns
    /// its path.
    pub(crate) fn build_dev_ort(&self) -> Result<PathBuf> {
        run(self.cargo().args(["build", "--quiet", "--package", "ort-cli"]))?;
        Ok(self.target.join("debug").join(format!("ort{}", std::env::consts::EXE_SUFFIX)))
    }

    /// Builds the release binary `ort` and returns its path.
    pub(crate) fn build_ort(&self) -> Result<PathBuf> {
        // A given binary may be that of another commit, so nothing is built.
        if let Some(given) = &self.ort {
            return Ok(given.clone());
        }
        run(self.cargo().args(["build", "--release", "--quiet", "--package", "ort-cli"]))?;
        Ok(self.target.join("release").join(format!("ort{}", std::env::consts::EXE_SUFFIX)))
    }

    /// Builds the release binary `ort` with the device providers if one of `providers` is not the
    /// CPU. It enables all of them at once, so that there are only two variants to build.
    pub(crate) fn build_ort_with(&self, providers: &[String]) -> Result<PathBuf> {
        if self.ort.is_some() || providers.iter().all(|provider| provider == "cpu") {
            return self.build_ort();
        }
        let mut command = self.cargo();
        command.args(["build", "--release", "--quiet", "--package", "ort-cli", "--features", "cuda,wgpu"]);
        run(&mut command)?;
        // Copied away, because the next build without these features overwrites the binary.
        let release = self.target.join("release");
        let own = release.join(format!("ort_devices{}", std::env::consts::EXE_SUFFIX));
        std::fs::copy(release.join(format!("ort{}", std::env::consts::EXE_SUFFIX)), &own)
            .with_context(|| format!("cannot write {}", own.display()))?;
        Ok(own)
    }
}

fn cargo() -> Command {
    // Cargo sets `CARGO` for the programs that it runs, so the same toolchain builds everything.
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Formats the command as a user would type it, with only the program's file name.
pub(crate) fn describe(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Runs a command with this process's output; an error if it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", describe(command));
    let status = command.status().with_context(|| format!("cannot run {}", describe(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", describe(command));
    }
    Ok(())
}

/// Seconds to wait before the next try of a download.
const PAUSES: [u64; 3] = [5, 20, 60];

/// Runs a command that downloads, and again if it fails. Registries fail for moments, and a suite
/// is left out if its packages are missing.
pub(crate) fn download_with(command: &mut Command) -> Result<()> {
    for pause in PAUSES {
        match run(command) {
            Ok(()) => return Ok(()),
            Err(why) => eprintln!("{why:#}; trying again in {pause} s"),
        }
        std::thread::sleep(Duration::from_secs(pause));
    }
    run(command)
}

/// Runs a command with its standard output sent to standard error, because a preparation's output
/// is not the result.
pub(crate) fn prepare_with(command: &mut Command) -> Result<()> {
    run(command.stdout(std::io::stderr()))
}

/// Runs a command and returns its standard output; an error if it fails.
pub(crate) fn capture(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {}", describe(command)))?;
    if !output.status.success() {
        bail!("`{}` failed ({})", describe(command), output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{}` printed no UTF-8", describe(command)))
}
