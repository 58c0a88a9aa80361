//! Runs cases in ONNX's layout on a device, with the CPU as fallback, and reports which ran on the
//! device alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort_core::ep::{Device, ExecutionProvider, ProviderOptions, load_provider, provider};
use ort_core::placement::Reason;
use ort_core::rewrite::Level;
use ort_core::session::Session;
use ort_core::{Result, error};

use crate::read_case;

/// Runs cases as this example's arguments say. They are folders; `--only TEXT` selects cases whose
/// names contain it; `--library` loads the provider from the library of this name, which cargo
/// built beside the example. The output is that of [`run_device_cases`].
///
/// # Errors
///
/// There is no such library, or an error of [`run_device_cases`].
pub fn device_cases_as_told(
    on: &'static dyn ExecutionProvider,
    library: &str,
    options: &ProviderOptions,
) -> Result<()> {
    let (mut folders, mut only, mut as_library) = (Vec::new(), None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only = arguments.next(),
            "--library" => as_library = true,
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    let on = if as_library { built_provider(library)? } else { on };
    run_device_cases(on, options, &folders, only.as_deref())
}

/// Loads the provider from the library of this name, which cargo built beside the example.
///
/// # Errors
///
/// There is no such library, or it cannot be used.
pub fn built_provider(library: &str) -> Result<&'static dyn ExecutionProvider> {
    load_provider(&built_library(library)?)
}

fn built_library(name: &str) -> Result<PathBuf> {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let own =
        std::env::current_exe().map_err(|problem| error!(Fail, "no path of this program: {problem}"))?;
    // The example is in `examples` of the build folder, and the library in `deps` beside it.
    let built = own.ancestors().nth(2).map(|folder| folder.join("deps"));
    let built = built.ok_or_else(|| error!(Fail, "{} is in no folder of builds", own.display()))?;
    Ok(built.join(format!("{prefix}{name}{suffix}")))
}

/// Runs the cases in folders whose names contain `only` on a provider's first device and the CPU,
/// and prints a line for each.
///
/// A line is one of these:
///
/// - `PASS name: device`: all of it ran on the device.
/// - `PASS name: moved OPERATORS`: the device claims all of it, but the CPU ran these operators in
///   part because that is cheaper.
/// - `PASS name: host OPERATORS`: the device does not claim some of these operators.
/// - `FAIL name: why`
/// - `NONE why`: there is no device.
///
/// # Errors
///
/// The device cannot be opened, there is no CPU provider in the program, or a folder cannot be
/// read.
pub fn run_device_cases(
    on: &dyn ExecutionProvider,
    options: &ProviderOptions,
    folders: &[PathBuf],
    only: Option<&str>,
) -> Result<()> {
    if let Err(problem) = on.devices() {
        println!("NONE {problem}");
        return Ok(());
    }
    let host = provider("cpu")?.open(0, &ProviderOptions::new())?;
    // The device comes first, so the CPU runs only what it does not claim.
    let devices = [on.open(0, options)?, host];
    let (mut counts, mut helped) = (BTreeMap::new(), BTreeMap::new());
    for folder in folders {
        for case in cases(folder)? {
            let name = case.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            if only.is_some_and(|only| !name.contains(only)) {
                continue;
            }
            let verdict = match check(&case, on.name(), &devices) {
                Ok(OnHost { operators, .. }) if operators.is_empty() => {
                    println!("PASS {name}: device");
                    "device"
                }
                Ok(OnHost { operators, are_moved }) => {
                    let place = if are_moved { "moved" } else { "host" };
                    println!("PASS {name}: {place} {}", operators.join(" "));
                    operators.into_iter().for_each(|op| *helped.entry(op).or_insert(0) += 1);
                    place
                }
                Err(problem) => {
                    // `cargo xtask conformance` reads one line for each case.
                    println!("FAIL {name}: {}", problem.to_string().replace('\n', " "));
                    "failed"
                }
            };
            *counts.entry(verdict).or_insert(0) += 1;
        }
    }
    let mut helped: Vec<(String, usize)> = helped.into_iter().collect();
    helped.sort_by_key(|(op, count)| (std::cmp::Reverse(*count), op.clone()));
    let helped: Vec<String> = helped.iter().map(|(op, count)| format!("{op} {count}")).collect();
    println!("operators on the host: {}", helped.join(", "));
    println!("{counts:?}");
    Ok(())
}

fn cases(folder: &Path) -> Result<Vec<PathBuf>> {
    let problem = |problem: std::io::Error| error!(NoSuchFile, "{}: {problem}", folder.display());
    let entries = std::fs::read_dir(folder).map_err(problem)?;
    let mut cases: Vec<PathBuf> =
        entries.map(|entry| Ok(entry.map_err(problem)?.path())).collect::<Result<_>>()?;
    cases.retain(|case| case.join("model.onnx").is_file());
    cases.sort();
    Ok(cases)
}

/// What the host ran of a case.
struct OnHost {
    operators: Vec<String>,
    /// Whether the device claims all of it, and placement moved it to the host because that is
    /// cheaper.
    are_moved: bool,
}

/// Runs a case twice.
fn check(folder: &Path, name: &str, devices: &[Arc<dyn Device>]) -> Result<OnHost> {
    let case = read_case(folder)?;
    let builder = Session::builder(&case.model).threads(1).opt_level(Level::All);
    let session = devices.iter().fold(builder, |builder, device| builder.device(device.clone())).build()?;
    case.check(&session)?;
    // The second run reuses what the first one prepared.
    case.check(&session)?;
    let mut placement = session.placement();
    placement.retain(|placed| placed.provider != name);
    // This holds for no nodes as well, but the caller asks for `operators` first.
    let are_moved = placement.iter().all(|placed| matches!(placed.reason, Reason::Cluster(_)));
    let mut operators: Vec<String> = placement.into_iter().map(|placed| placed.operator).collect();
    operators.sort();
    operators.dedup();
    Ok(OnHost { operators, are_moved })
}
