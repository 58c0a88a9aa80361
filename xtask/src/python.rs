//! Private Python environments, created on demand and kept: one with the ONNX packages, one with
//! PyTorch for training, and one with NVIDIA's compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace::{Workspace, run};

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

    /// Opens the standard environment with the packages of `python/bench_requirements.txt` added,
    /// which only benchmarks need.
    pub(crate) fn open_for_bench(workspace: &Workspace) -> Result<Self> {
        let python = Self::open(workspace)?;
        let requirements = workspace.own("python/bench_requirements.txt");
        let wanted = fs::read_to_string(&requirements)
            .with_context(|| format!("cannot read {}", requirements.display()))?;
        // The stamp is inside, so recreating the environment removes it too.
        let stamp = workspace.target.join("python").join("bench_requirements.installed");
        if fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
            python.install(&requirements)?;
            fs::write(&stamp, wanted).with_context(|| format!("cannot write {}", stamp.display()))?;
        }
        Ok(python)
    }

    fn install(&self, requirements: &Path) -> Result<()> {
        let mut command = Command::new(&self.interpreter);
        // The requirements pin every package, so pip must not resolve dependencies.
        command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--requirement"]);
        run(command.arg(requirements))
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
