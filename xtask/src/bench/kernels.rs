//! `cargo xtask bench --kernels`: models of one operator or one chain of operators, in the sizes
//! that real models use.
//!
//! Runs are short, so some of the many are undisturbed, and the minimum time counts.

use std::fs;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;

use super::limits::{self, Limits};
use super::options::BenchOptions;
use super::runtime::{Side, Timing};
use super::tables::{Style, decimals, percent};
use crate::python::Python;
use crate::table;
use crate::workspace::{Workspace, prepare_with};

/// The kernels and their sizes.
const TABLE: &str = "data/kernels.json";

/// A row of the script's output.
#[derive(Deserialize)]
struct Kernel {
    name: String,
    /// The stem of the model's and the inputs' file names.
    file: String,
    /// Bytes of inputs, weights and outputs.
    bytes: f64,
    /// Throughput of its element type relative to float32, for compute-bound kernels; absent if the
    /// kernel is bound by memory bandwidth.
    #[serde(default)]
    speed: Option<f64>,
}

const COLUMNS: [&str; 10] = [
    "kernel",
    "ISA",
    "threads",
    "ours us",
    "ORT",
    "OV",
    "ratio to best",
    "ours G/s",
    "% of limit",
    "% of limit, best other",
];

/// Makes the models, times them and prints the table.
pub(super) fn run(workspace: &Workspace, options: &BenchOptions, python: Python) -> Result<()> {
    let folder = workspace.target.join("kernels");
    prepare_with(python.script("make_kernels.py").arg(workspace.own(TABLE)).arg(&folder))?;
    let path = folder.join("kernels.json");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut kernels: Vec<Kernel> =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    // The names here are whole phrases, so a substring selects.
    kernels.retain(|kernel| {
        options.only.is_empty() || options.only.iter().any(|name| kernel.name.contains(name))
    });
    if kernels.is_empty() {
        bail!("no kernel has such a name in {TABLE}");
    }
    let tools = options.tools(workspace, python)?;
    let settings = options.settings();
    let limits = Limits::measure(&tools.ort, &settings)?;
    let mut table = table::new(&COLUMNS);
    let mut rows = Vec::new();
    for kernel in &kernels {
        for &(isa, threads) in &settings {
            let timing = Timing {
                model: folder.join(format!("{}.onnx", kernel.file)),
                inputs: folder.join(format!("{}.npz", kernel.file)),
                isa,
                threads,
                seconds: options.seconds,
                rows: None,
                loads: 0,
            };
            let sides = timing.in_turn(&tools, options.runtimes(), options.rounds);
            let sides = match sides {
                Ok(sides) => sides,
                // A kernel that fails must not lose the measurements of the others.
                Err(error) => {
                    table.add_row([
                        kernel.name.clone(),
                        isa.name().unwrap_or_default().to_owned(),
                        threads.to_string(),
                        format!("{error:#}"),
                    ]);
                    continue;
                }
            };
            let limits = limits::at(&limits, (isa, threads))?;
            let speed = Speed::of(kernel, &sides, limits);
            eprintln!("timed {} with {threads} threads: ratio {}", kernel.name, decimals(speed.ratio));
            table.add_row(speed.cells(kernel, limits, &sides));
            rows.push(json!({
                "kernel": kernel.name,
                "isa": limits.isa(),
                "threads": threads,
                "ours": sides.first(),
                "onnxruntime": sides.get(1),
                "openvino": sides.get(2),
                "ratio": speed.ratio,
                "per_second": speed.per_second,
                "limit_share": speed.share,
            }));
        }
    }
    if options.style() == Style::Json {
        println!("{}", json!({"limits": limits, "rows": rows}));
        return Ok(());
    }
    println!("{table}\n");
    limits.iter().for_each(|limits| println!("{}", limits.describe()));
    println!(
        "G/s: 10^9 operations a second, or bytes (`B`) where those are the bound; weights stay in the caches here, as they do not in a model"
    );
    Ok(())
}

/// Our speed compared with the machine's limit and with the other runtimes.
#[derive(Debug, PartialEq)]
struct Speed {
    ratio: Option<f64>,
    /// Operations per second, or bytes per second if bandwidth bounds the kernel.
    per_second: f64,
    share: f64,
    other_share: Option<f64>,
}

impl Speed {
    fn of(kernel: &Kernel, sides: &[Option<Side>], limits: &Limits) -> Speed {
        let ours = sides.first().and_then(Option::as_ref);
        let seconds = ours.map_or(f64::NAN, |side| side.min_ms * 1e-3);
        let others = sides.iter().skip(1).flatten().map(|side| side.min_ms * 1e-3);
        let best = others.reduce(f64::min);
        let (work, limit) = match kernel.speed {
            Some(speed) => {
                let operations = ours.and_then(|side| side.operations);
                (operations.map_or(f64::NAN, |count| count as f64), limits.flops * speed)
            }
            // The bandwidth depends on the cache that the bytes fit into.
            None => (kernel.bytes, limits.bandwidth(kernel.bytes)),
        };
        Speed {
            ratio: best.map(|best| seconds / best),
            per_second: work / seconds,
            share: work / seconds / limit,
            other_share: best.map(|best| work / best / limit),
        }
    }

    fn cells(&self, kernel: &Kernel, limits: &Limits, sides: &[Option<Side>]) -> Vec<String> {
        let mut cells = vec![kernel.name.clone(), limits.isa(), limits.threads.to_string()];
        cells.extend((0..3).map(|index| {
            let side = sides.get(index).and_then(Option::as_ref);
            side.map_or("-".to_owned(), |side| format!("{:.1}", side.min_ms * 1e3))
        }));
        let unit = if kernel.speed.is_some() { "" } else { " B" };
        cells.extend([
            decimals(self.ratio),
            format!("{:.1}{unit}", self.per_second / 1e9),
            percent(Some(self.share)),
            percent(self.other_share),
        ]);
        cells
    }
}
