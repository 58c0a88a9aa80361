//! Private Python environments, created on demand and kept: one with the ONNX packages and our own
//! package, two with PyTorch, and one with NVIDIA's compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, download_with, run};

/// Interpreters to try, in order of preference.
const INTERPRETERS: [&str; 4] = ["python3.11", "python3.12", "python3.13", "python3"];
/// The oldest Python that the pinned packages support.
const OLDEST: (u32, u32) = (3, 11);

/// A virtual environment with the packages of a requirements file in `python/`.
pub(crate) struct Python {
    interpreter: PathBuf,
    scripts: PathBuf,
}

impl Python {
    /// Opens the environment of all commands except training and CUDA compilation.
    pub(crate) fn open(workspace: &Workspace) -> Result<Self> {
        Self::open_in(workspace.target.join("python"), workspace, "python/requirements.txt")
    }

    /// Opens the environment with PyTorch and ONNX Runtime for training, which need older packages
    /// than the others.
    pub(crate) fn open_for_training(workspace: &Workspace) -> Result<Self> {
        Self::open_in(workspace.target.join("python_train"), workspace, "python/train_requirements.txt")
    }

    /// Opens the environment with NVIDIA's compiler and assembler, which need no GPU.
    pub(crate) fn open_for_cuda(workspace: &Workspace) -> Result<Self> {
        Self::open_in(workspace.target.join("python_cuda"), workspace, "python/cuda_requirements.txt")
    }

    /// Opens the environment with Ray and Spark; Spark needs Java.
    pub(crate) fn open_for_cluster(workspace: &Workspace) -> Result<Self> {
        Self::open_in(workspace.target.join("python_cluster"), workspace, "python/cluster_requirements.txt")
    }

    /// Opens the environment with a current PyTorch, for the tests of the package's backend. The
    /// CUDA libraries that it links are stand-ins.
    pub(crate) fn open_for_torch(workspace: &Workspace) -> Result<Self> {
        let folder = workspace.target.join("python_torch");
        let python = Self::open_in(folder.clone(), workspace, "python/torch_requirements.txt")?;
        // The stamp is inside, so recreating the environment removes it too.
        let stamp = folder.join("stand_ins.installed");
        if !stamp.exists() {
            run(&mut python.script("torch_libraries.py"))?;
            fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(python)
    }

    /// Opens the training environment with the extensions that ORTModule needs, compiled once for
    /// the installed PyTorch, which takes minutes.
    pub(crate) fn open_for_train_bench(workspace: &Workspace) -> Result<Self> {
        let python = Self::open_for_training(workspace)?;
        // The stamp is inside, so recreating the environment removes it too.
        let stamp = workspace.target.join("python_train").join("ortmodule_extensions.installed");
        if !stamp.exists() {
            let mut command = Command::new(&python.interpreter);
            run(command.args(["-m", "onnxruntime.training.ortmodule.torch_cpp_extensions.install"]))?;
            fs::write(&stamp, "").with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(python)
    }

    /// Opens an environment, creating it if it is missing or was made from other requirements. An
    /// error says why that failed: no interpreter, or the packages are not available.
    fn open_in(folder: PathBuf, workspace: &Workspace, requirements: &str) -> Result<Self> {
        let requirements = workspace.own(requirements);
        let wanted = fs::read_to_string(&requirements)
            .with_context(|| format!("cannot read {}", requirements.display()))?;
        // The installed requirements are copied into the environment as the last step, so an
        // interrupted installation starts over.
        let stamp = folder.join("requirements.installed");
        let binaries = folder.join(if cfg!(windows) { "Scripts" } else { "bin" });
        let interpreter = binaries.join(format!("python{}", std::env::consts::EXE_SUFFIX));
        let python = Self { interpreter, scripts: workspace.own("python") };
        if fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
            let system = system_interpreter()?;
            // `--clear` removes the packages of former requirements.
            run(Command::new(system).args(["-m", "venv", "--clear"]).arg(&folder))?;
            python.install(&requirements)?;
            fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(python)
    }

    /// Opens the standard environment with what only benchmarks need.
    pub(crate) fn open_for_bench(workspace: &Workspace) -> Result<Self> {
        Self::open_with(workspace, "bench_requirements")
    }

    /// Opens the standard environment with what builds and tests the Python package. That package
    /// is installed there, too: no module of it has a name of onnxruntime's.
    pub(crate) fn open_for_package(workspace: &Workspace) -> Result<Self> {
        Self::open_with(workspace, "package_requirements")
    }

    /// Opens the standard environment with what makes the data of quantized models.
    pub(crate) fn open_for_quantize_bench(workspace: &Workspace) -> Result<Self> {
        Self::open_with(workspace, "quantize_requirements")
    }

    /// Opens the standard environment with the packages of one more file in `python/` added.
    fn open_with(workspace: &Workspace, name: &str) -> Result<Self> {
        let python = Self::open(workspace)?;
        let requirements = workspace.own(&format!("python/{name}.txt"));
        let wanted = fs::read_to_string(&requirements)
            .with_context(|| format!("cannot read {}", requirements.display()))?;
        // The stamp is inside, so recreating the environment removes it too.
        let stamp = workspace.target.join("python").join(format!("{name}.installed"));
        if fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
            python.install(&requirements)?;
            fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(python)
    }

    /// An interpreter with the packages that it has.
    pub(crate) fn of_interpreter(workspace: &Workspace, interpreter: &Path) -> Self {
        Self { interpreter: interpreter.to_owned(), scripts: workspace.own("python") }
    }

    fn install(&self, requirements: &Path) -> Result<()> {
        let mut command = Command::new(&self.interpreter);
        // The requirements pin every package, so pip must not resolve dependencies.
        command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--requirement"]);
        download_with(command.arg(requirements))
    }

    /// Installs wheels in place of others of their names: into the environment, or into a folder.
    pub(crate) fn install_wheels(&self, wheels: &[PathBuf], folder: Option<&Path>) -> Result<()> {
        let mut command = self.module("pip");
        // The environment has the dependencies already.
        command.args(["install", "--quiet", "--no-deps", "--no-index", "--force-reinstall"]);
        if let Some(folder) = folder {
            command.arg("--target").arg(folder);
        }
        run(command.args(wheels))
    }

    /// The path of the interpreter.
    pub(crate) fn interpreter(&self) -> &Path {
        &self.interpreter
    }

    /// The interpreter, as a command without arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.interpreter);
        // The interpreters that it starts write no bytecode into the working tree, either.
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// A command that runs a module of the environment.
    pub(crate) fn module(&self, name: &str) -> Command {
        let mut command = self.command();
        command.args(["-m", name]);
        command
    }

    /// A command that runs one of our scripts.
    pub(crate) fn script(&self, name: &str) -> Command {
        let mut command = Command::new(&self.interpreter);
        // `-B` writes no bytecode beside the scripts, so the working tree stays clean.
        command.arg("-B").arg(self.scripts.join(name));
        command
    }
}

fn system_interpreter() -> Result<&'static str> {
    for name in INTERPRETERS {
        let probe = "import sys; print(sys.version_info[0], sys.version_info[1])";
        let Ok(output) = Command::new(name).args(["-c", probe]).output() else { continue };
        let text = String::from_utf8_lossy(&output.stdout);
        let mut numbers = text.split_whitespace().filter_map(|word| word.parse::<u32>().ok());
        if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
            && (major, minor) >= OLDEST
        {
            return Ok(name);
        }
    }
    bail!("no Python {}.{} or newer found (tried {})", OLDEST.0, OLDEST.1, INTERPRETERS.join(", "))
}
