//! Runs cases in ONNX's layout on a wgpu device, with the CPU for what it does not claim, and says how many ran on the device alone.
//!
//! The arguments are folders of cases; `--only TEXT` takes those whose names contain it, `--library` runs them on the provider library. `ORT_WGPU_LIMITS=minimum` runs within the limits that
//! every implementation of WebGPU has. Each line is `PASS name: device`; `PASS name: moved OPERATORS`, which are those that the CPU had a part
//! in because that is cheaper, or `host OPERATORS` where the device does not claim some of them; or `FAIL name: why`; `NONE why` where there is no adapter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ort_core::ep::{Device, ExecutionProvider, ProviderOptions, Reason, load_provider, provider};
use ort_core::rewrite::Level;
use ort_core::session::Session;
use ort_core::{Result, error};
use ort_ep_cpu as _;
use ort_ep_wgpu::WgpuProvider;
use ort_testkit::read_case;

fn main() -> Result<()> {
    let (mut folders, mut only, mut as_library) = (Vec::new(), None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--only" => only = arguments.next(),
            "--library" => as_library = true,
            _ => folders.push(PathBuf::from(argument)),
        }
    }
    let limits = std::env::var("ORT_WGPU_LIMITS").unwrap_or_else(|_| "adapter".to_owned());
    let wgpu: &dyn ExecutionProvider = if as_library { load_provider(&library()?)? } else { &WgpuProvider };
    if let Err(problem) = wgpu.devices() {
        println!("NONE {problem}");
        return Ok(());
    }
    let device = wgpu.open(0, &ProviderOptions::from([("limits".to_owned(), limits)]))?;
    let host = provider("cpu")?.open(0, &ProviderOptions::new())?;
    let devices = [device, host];
    let (mut counts, mut helped) = (BTreeMap::new(), BTreeMap::new());
    for folder in folders {
        for case in cases(&folder)? {
            let name = case.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
            if only.as_ref().is_some_and(|only| !name.contains(only)) {
                continue;
            }
            let verdict = match check(&case, &devices) {
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

/// The library that cargo built beside this example.
fn library() -> Result<PathBuf> {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let own =
        std::env::current_exe().map_err(|problem| error!(Fail, "no path of this program: {problem}"))?;
    let built = own.ancestors().nth(2).map(|folder| folder.join("deps"));
    let built = built.ok_or_else(|| error!(Fail, "{} is in no folder of builds", own.display()))?;
    Ok(built.join(format!("{prefix}ort_wgpu_provider{suffix}")))
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
    /// Whether all of it could run on the device, and went to the host because that is cheaper.
    are_moved: bool,
}

/// Runs a case twice.
fn check(folder: &Path, devices: &[Arc<dyn Device>]) -> Result<OnHost> {
    let case = read_case(folder)?;
    let builder = Session::builder(&case.model).threads(1).opt_level(Level::All);
    let session = devices.iter().fold(builder, |builder, device| builder.device(device.clone())).build()?;
    case.check(&session)?;
    // What was prepared for the first run must do for the second.
    case.check(&session)?;
    let mut placement = session.placement();
    placement.retain(|placed| placed.provider != "wgpu");
    let are_moved = placement.iter().all(|placed| matches!(placed.reason, Reason::Island(_)));
    let mut operators: Vec<String> = placement.into_iter().map(|placed| placed.operator).collect();
    operators.sort();
    operators.dedup();
    Ok(OnHost { operators, are_moved })
}
