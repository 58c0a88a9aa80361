//! `cargo xtask capi`: the shared library with ONNX Runtime's C API, and its clients.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, capture, run as run_command};

/// The most bytes of the library without symbols.
const MOST_BYTES: u64 = 25 << 20;

/// What the library exports, and nothing else.
const EXPORTS: [&str; 3] = [
    "OrtGetApiBase",
    "OrtSessionOptionsAppendExecutionProvider_CPU",
    "OrtSessionOptionsAppendExecutionProvider_CUDA",
];

const SONAME: &str = "libonnxruntime.so.1";

/// Builds and checks the library, runs its clients, and compares times with ONNX Runtime's library.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let mut table = table::new(&["check", "result"]);
    let library = build(workspace)?;
    table.add_row(["size", &format!("{:.1} MiB", size(&library)? as f64 / (1 << 20) as f64)]);
    exports(&library)?;
    table.add_row(["exports", &EXPORTS.join(", ")]);
    dynamic_section(&library)?;
    table.add_row(["soname", SONAME]);
    let folder = workspace.target.join("capi");
    let libraries = link(&folder, &library)?;
    table.add_row(["onnxruntime-node", &node(workspace, &folder, &libraries)?]);
    println!("{table}");
    bench(workspace, &folder, &library)
}

/// Builds the library in release and returns its path.
fn build(workspace: &Workspace) -> Result<PathBuf> {
    run_command(workspace.cargo().args(["build", "--quiet", "--release", "--package", "ort-capi"]))?;
    Ok(workspace.target.join("release/libonnxruntime.so"))
}

fn size(library: &Path) -> Result<u64> {
    let bytes = fs::metadata(library).with_context(|| library.display().to_string())?.len();
    ensure!(bytes <= MOST_BYTES, "{} has {bytes} bytes; the most is {MOST_BYTES}", library.display());
    Ok(bytes)
}

fn exports(library: &Path) -> Result<()> {
    let listed = capture(
        Command::new("nm").args(["--dynamic", "--defined-only", "--format=just-symbols"]).arg(library),
    )?;
    let mut names: Vec<&str> = listed.lines().collect();
    names.sort_unstable();
    ensure!(names == EXPORTS, "the library exports {names:?}, expected {EXPORTS:?} without versions");
    Ok(())
}

/// Checks the name by which clients find the library, and that it is never unloaded: the threads of
/// its pool sleep in its code.
fn dynamic_section(library: &Path) -> Result<()> {
    let section = capture(Command::new("readelf").args(["--dynamic", "--wide"]).arg(library))?;
    for word in [format!("[{SONAME}]"), "NODELETE".to_owned()] {
        ensure!(section.contains(&word), "the dynamic section lacks {word}");
    }
    Ok(())
}

/// Makes a folder in which clients find the library.
fn link(folder: &Path, library: &Path) -> Result<PathBuf> {
    let libraries = folder.join("lib");
    fs::create_dir_all(&libraries)?;
    fs::copy(library, libraries.join(SONAME))?;
    Ok(libraries)
}

/// Runs the client for Node. The package has ONNX Runtime's library inside, which it finds last.
fn node(workspace: &Workspace, folder: &Path, libraries: &Path) -> Result<String> {
    let modules = folder.join("node_modules");
    if !modules.join("onnxruntime-node").exists() {
        let mut install = Command::new("npm");
        install
            .args(["install", "--silent", "--ignore-scripts", "--prefix"])
            .arg(folder)
            .arg("onnxruntime-node@1");
        if install.status().map_or(true, |status| !status.success()) {
            return Ok("skipped: npm cannot install onnxruntime-node".to_owned());
        }
    }
    let crate_folder = workspace.root.join("ort-capi");
    let mut client = Command::new("node");
    client.arg(crate_folder.join("clients/client.js")).arg(&modules).arg(crate_folder.join("tests/data"));
    Ok(capture(client.env("LD_LIBRARY_PATH", libraries))?.trim().to_owned())
}

/// A call, with the least and the median microseconds that it takes.
struct Timed {
    call: String,
    least: f64,
    median: f64,
}

/// Times the same program with both libraries, in turn.
fn bench(workspace: &Workspace, folder: &Path, library: &Path) -> Result<()> {
    let program = folder.join("bench");
    let source = workspace.root.join("ort-capi/clients/bench.c");
    run_command(Command::new("cc").args(["-O2", "-o"]).arg(&program).arg(source).arg("-ldl"))?;
    let Some(theirs) = onnx_runtime(workspace) else {
        println!("times are not compared: the Python environment has no library of ONNX Runtime");
        return Ok(());
    };
    const ROUNDS: usize = 3;
    let model = workspace.root.join("ort-capi/tests/data/models/add_3.onnx");
    let times = |library: &Path| timed(&capture(Command::new(&program).arg(library).arg(&model))?);
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        rounds.push((times(library)?, times(&theirs)?));
    }
    let mut table = table::new(&["call", "ours, least / median, us", "ONNX Runtime", "ratio of medians"]);
    let Some((first, _)) = rounds.first() else { bail!("no rounds") };
    for (place, call) in first.iter().enumerate() {
        let least = |of: &dyn Fn(&Timed) -> f64, ours: bool| {
            let round = |(own, other): &(Vec<Timed>, Vec<Timed>)| {
                (if ours { own } else { other }).get(place).map_or(f64::NAN, of)
            };
            rounds.iter().map(round).fold(f64::INFINITY, f64::min)
        };
        let (own, other) = (least(&|timed| timed.median, true), least(&|timed| timed.median, false));
        table.add_row([
            call.call.clone(),
            format!("{:.2} / {own:.2}", least(&|timed| timed.least, true)),
            format!("{:.2} / {other:.2}", least(&|timed| timed.least, false)),
            format!("{:.2}", own / other),
        ]);
    }
    println!("{table}");
    Ok(())
}

/// Reads the lines of the program: the call, and two numbers in the last columns.
fn timed(text: &str) -> Result<Vec<Timed>> {
    let line = |line: &str| {
        let mut words = line.rsplit(' ').filter(|word| !word.is_empty());
        let median = words.next()?.parse().ok()?;
        let least = words.next()?.parse().ok()?;
        Some(Timed { call: line.get(..16)?.trim().to_owned(), least, median })
    };
    text.lines()
        .map(line)
        .collect::<Option<_>>()
        .with_context(|| format!("not the output of the program: {text}"))
}

/// The library in ONNX Runtime's Python package.
fn onnx_runtime(workspace: &Workspace) -> Option<PathBuf> {
    let python = Python::open(workspace).ok()?;
    let script = "import onnxruntime, pathlib; \
                  print(*pathlib.Path(onnxruntime.__file__).parent.glob('capi/libonnxruntime.so.1*'))";
    let found = capture(python.command().args(["-c", script])).ok()?;
    found.split_whitespace().next().map(PathBuf::from)
}
