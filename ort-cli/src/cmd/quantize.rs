//! `ort quantize`: writes a model whose weights are small integers.
//!
//! The static mode first runs the model on samples, to find the ranges of the inputs of products.
//! Before the file appears under its name, both models run on the same inputs, and the difference
//! of their outputs is reported.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use half::f16;
use ort_runtime::onnx::{Source, Weights};
use ort_runtime::quant::{
    Bits, BlockMethod, BlockOptions, Calibration, DynamicOptions, HalfOptions, Layer, Mode, NodePattern,
    Noise, Outcome, Quantizer, RangeRule, StaticOptions, Written, read_ranges, write_ranges,
};
use ort_runtime::{DType, MemoryShortage, Model, Session, Tensor, Value};
use serde::Serialize;

use crate::args::{ModelArgs, human_bytes, table};
use crate::inputs::gather;
use crate::output::{listed, say, say_json, write_file};
use crate::samples::Samples;

/// Writes a quantized model, checks it, and lists what became of each layer.
#[derive(Args)]
pub(crate) struct QuantizeArgs {
    /// The inputs, with which both models run to compare their outputs.
    #[command(flatten)]
    model: ModelArgs,
    /// Output file, written atomically.
    output: PathBuf,
    /// What weights become.
    #[arg(long, value_enum)]
    mode: ModeArg,
    /// Samples, for --mode static and for the comparison: an archive of arrays whose first axis
    /// counts them, or a folder with an archive for each.
    #[arg(long, value_name = "FILE.npz|DIR", conflicts_with_all = ["input", "inputs"])]
    data: Option<PathBuf>,
    /// Use this many samples at most.
    #[arg(long, value_name = "N", default_value_t = 300, requires = "data")]
    samples: usize,
    /// Of these, keep the last N out of the calibration, to compare the outputs with; a quarter at
    /// most.
    #[arg(long, value_name = "N", default_value_t = 32, requires = "data")]
    held_out: usize,
    /// Take the ranges from this file if it exists; otherwise write them to it. Its format is that
    /// of onnxruntime.quantization's calibration cache.
    #[arg(long, value_name = "FILE.json")]
    calibration: Option<PathBuf>,
    /// How ranges follow from the samples: minmax, average, percentile (=99.99), entropy or mse.
    #[arg(long, value_name = "RULE", default_value = "minmax", value_parser = range_rule)]
    ranges: RangeRule,
    /// Weights per scale, for weights alone: 16, 32, 64, 128 or 256.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = block_size)]
    block: usize,
    /// How the scale of a block is chosen (weights alone).
    #[arg(long, value_enum, default_value_t = MethodArg::Mse)]
    method: MethodArg,
    /// Blocks without zero points: less memory and, for weights that are not centred, less
    /// accuracy. With --mode static: inputs whose zero point is the middle of their codes.
    #[arg(long)]
    symmetric: bool,
    /// Quantize the last product as the others; otherwise it has 8 bits, because it makes the
    /// answer.
    #[arg(long)]
    no_protect_last: bool,
    /// One scale for a whole weight (dynamic and static mode); otherwise one for each output
    /// channel.
    #[arg(long)]
    per_tensor: bool,
    /// Weights of 7 bits (dynamic and static mode), for other runtimes on processors whose products
    /// saturate.
    #[arg(long)]
    portable: bool,
    /// Convert the inputs and outputs of the model, too (fp16 mode).
    #[arg(long)]
    convert_io: bool,
    /// Quantize these nodes alone: a name with * and ?, op:OPERATOR or #NUMBER (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    only: Vec<NodePattern>,
    /// Keep these nodes in floating point (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    exclude: Vec<NodePattern>,
    /// Store the weights in OUTPUT.data beside the model; so are those of models above 2 GiB.
    #[arg(long)]
    external_data: bool,
    /// List what would become of each layer, and write no model.
    #[arg(long)]
    dry_run: bool,
    /// Write the report as JSON to this file.
    #[arg(long, value_name = "FILE.json")]
    report: Option<PathBuf>,
    /// Print the report as one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// The values of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MethodArg {
    /// Round to nearest: the scale covers the whole block, as in ONNX Runtime.
    Rtn,
    /// The least squared error: the largest weights of a block may be clipped.
    Mse,
}

/// The values of `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    /// Weights of 8 bits; the inputs of products are quantized in each run.
    Dynamic,
    /// Weights and the inputs of products have 8 bits, in ranges found with --data.
    Static,
    /// Weights and values in float16; inputs and outputs stay float32.
    Fp16,
    /// Weights of 8 bits in blocks; products in floating point.
    Int8,
    /// Weights of 4 bits in blocks; tables and the last product have 8 bits.
    Int4,
    /// Weights of 2 bits in blocks; tables and the last product have 8 bits.
    Int2,
}

impl QuantizeArgs {
    /// The quantizer. That of the static mode has no ranges yet.
    fn quantizer(&self) -> Result<Quantizer> {
        let is_dynamic = self.mode == ModeArg::Dynamic;
        let is_static = self.mode == ModeArg::Static;
        let is_half = self.mode == ModeArg::Fp16;
        let is_blocks = !is_dynamic && !is_static && !is_half;
        // A flag without effect would look as if it had one.
        let stray = [
            ("--symmetric", (is_dynamic || is_half) && self.symmetric),
            ("--no-protect-last", !is_blocks && self.no_protect_last),
            ("--per-tensor", (is_blocks || is_half) && self.per_tensor),
            ("--portable", (is_blocks || is_half) && self.portable),
            ("--method", !is_blocks && self.method != MethodArg::Mse),
            ("--calibration", !is_static && self.calibration.is_some()),
            ("--convert-io", !is_half && self.convert_io),
            ("--ranges", !is_static && self.ranges != RangeRule::MinMax),
        ];
        if let Some((flag, _)) = stray.iter().find(|(_, is_stray)| *is_stray) {
            bail!("{flag} has no effect in this --mode; leave it out");
        }
        let has_ranges = self.calibration.as_deref().is_some_and(Path::exists);
        if is_static && self.data.is_none() && !has_ranges {
            bail!(
                "--mode static needs --data with samples; without any, take --mode dynamic, or int8 or int4 for \
                 weights alone"
            );
        }
        let (per_tensor, reduce_range) = (self.per_tensor, self.portable);
        let blocks = |bits| {
            Mode::Blocks(BlockOptions {
                bits,
                block_size: self.block,
                is_symmetric: self.symmetric,
                method: match self.method {
                    MethodArg::Rtn => BlockMethod::MinMax,
                    MethodArg::Mse => BlockMethod::SquaredError,
                },
                protects_last: !self.no_protect_last,
            })
        };
        let mode = match self.mode {
            ModeArg::Dynamic => Mode::Dynamic(DynamicOptions { per_tensor, reduce_range }),
            ModeArg::Static => Mode::Static(StaticOptions {
                ranges: BTreeMap::new(),
                per_tensor,
                reduce_range,
                is_symmetric: self.symmetric,
            }),
            ModeArg::Fp16 => Mode::Half(HalfOptions { converts_io: self.convert_io }),
            ModeArg::Int8 => blocks(Bits::Eight),
            ModeArg::Int4 => blocks(Bits::Four),
            ModeArg::Int2 => blocks(Bits::Two),
        };
        Ok(Quantizer { mode, only: self.only.clone(), exclude: self.exclude.clone() })
    }
}

/// The inputs of the runs.
struct Inputs {
    samples: Option<Samples>,
    /// The samples for the calibration come first.
    calibration: usize,
    used: usize,
}

impl Inputs {
    fn open(args: &QuantizeArgs, model: &Model) -> Result<Inputs> {
        let Some(path) = &args.data else { return Ok(Inputs { samples: None, calibration: 0, used: 1 }) };
        let samples = Samples::open(path, &model.inputs(), args.model.memory_limit)?;
        let used = samples.count().min(args.samples.max(1));
        let held_out = args.held_out.min(used / 4);
        Ok(Inputs { samples: Some(samples), calibration: used - held_out, used })
    }

    /// Those that the outputs are compared with: held out, or the last one if there are too few.
    fn compared(&self, args: &QuantizeArgs, model: &Model) -> Result<Vec<Sample>> {
        let Some(samples) = &self.samples else { return Ok(vec![gather(&args.model, model)?]) };
        (self.calibration.min(self.used - 1)..self.used).map(|index| samples.get(index)).collect()
    }
}

/// The inputs of a run.
type Sample = Vec<(String, Value)>;

/// Finds the ranges of the inputs of products.
fn calibrate(
    args: &QuantizeArgs,
    (quantizer, source): (&mut Quantizer, &Source),
    (model, inputs): (&Model, &Inputs),
) -> Result<Option<Calibrated>> {
    let names = match &quantizer.mode {
        Mode::Static(_) => quantizer.activations(source)?,
        _ => return Ok(None),
    };
    let Mode::Static(options) = &mut quantizer.mode else { return Ok(None) };
    if let Some(path) = args.calibration.as_deref().filter(|path| path.exists()) {
        options.ranges = read_ranges(path)?;
        return Ok(None);
    }
    let Some(samples) = &inputs.samples else { return Ok(None) };
    let calibration = Calibration::new(names, args.ranges.wanted());
    let session = Calibration::session(args.model.builder(model)?)?;
    for index in 0..inputs.calibration {
        let sample = samples.get(index)?;
        calibration
            .run(&session, &named(&sample))
            .map_err(|problem| problem.within(format!("sample {index}")))?;
    }
    let grid = options.activations();
    let mut report = Calibrated { samples: inputs.calibration, not_finite: Vec::new() };
    for (name, observer) in calibration.into_observers() {
        let counts = observer.counts();
        if counts.nan + counts.infinite > 0 {
            report.not_finite.push(name.clone());
        }
        if let Some(range) = args.ranges.range(&observer, &grid)? {
            options.ranges.insert(name, range);
        }
    }
    if let Some(path) = &args.calibration {
        write_ranges(path, &options.ranges, args.ranges)?;
    }
    Ok(Some(report))
}

fn named(sample: &Sample) -> Vec<(&str, Value)> {
    sample.iter().map(|(name, value)| (name.as_str(), value.clone())).collect()
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<ExitCode> {
    let (input, output) = (&args.model.model, &args.output);
    // Writing is atomic, so this would succeed and leave no original to go back to.
    if input.canonicalize().ok() == output.canonicalize().ok() && output.exists() {
        bail!("{} would replace the model that is read; give another file to write", output.display());
    }
    let mut quantizer = args.quantizer()?;
    let source = args.model.source()?;
    let model = args.model.load()?;
    let inputs = Inputs::open(args, &model)?;
    let calibration = calibrate(args, (&mut quantizer, &source), (&model, &inputs))?;
    let quantization = quantizer.quantize(&source)?;
    let bytes_before = quantization.bytes_before();
    let layers = quantization.layers().to_vec();
    let mut report = Report { layers: Vec::new(), calibration, checked: None, written: None };
    let mut noises = BTreeMap::new();
    if !args.dry_run {
        // Runs before anything is written: a model that does not run is not worth the time.
        let original = Ran::of(args, &model, &inputs.compared(args, &model)?)?;
        drop((model, inputs));
        let weights = if args.external_data { Weights::Beside { least: 1024 } } else { Weights::Inside };
        let mut checked = None;
        let written = quantization.write(output, &weights, &mut |model| {
            checked = Some(compare(args, &original, model)?);
            Ok(())
        })?;
        (report.checked, report.written) = (checked, Some(Sizes::of(bytes_before, &written)));
        noises = written.noises;
    }
    report.layers = layers.into_iter().map(|layer| Row::of(layer, &noises)).collect();
    if let Some(path) = &args.report {
        write_file(path, |file| {
            serde_json::to_writer_pretty(&mut *file, &report)?;
            Ok(writeln!(file)?)
        })?;
    }
    if args.json {
        say_json(&report)?
    } else {
        report.print(args)?
    }
    Ok(ExitCode::SUCCESS)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    layers: Vec<Row>,
    /// Absent from modes that need none.
    calibration: Option<Calibrated>,
    /// Absent from a dry run.
    checked: Option<Checked>,
    written: Option<Sizes>,
}

/// A calibration.
#[derive(Serialize)]
struct Calibrated {
    samples: usize,
    /// The values of which elements were NaN or infinite, which no range contains.
    not_finite: Vec<String>,
}

/// A layer.
#[derive(Serialize)]
struct Row {
    node: String,
    operator: String,
    shape: Vec<usize>,
    /// Absent from a layer that stays.
    precision: Option<String>,
    bytes_before: usize,
    bytes_after: usize,
    /// The ratio of the weight to its change, in decibels.
    weight_decibels: Option<f64>,
    /// Why the layer stays.
    kept: Option<String>,
}

/// The files.
#[derive(Serialize)]
struct Sizes {
    /// With data files.
    bytes_before: usize,
    model_bytes: u64,
    data_bytes: u64,
}

/// Both models on the same inputs.
#[derive(Clone, Copy, Serialize)]
struct Checked {
    /// How often both ran.
    runs: usize,
    planned_peak_before: Option<usize>,
    planned_peak: Option<usize>,
    weights_before: usize,
    weights: usize,
    /// The norm of the difference of the outputs over that of the original's.
    relative_error: Option<f64>,
}

impl Row {
    fn of(layer: Layer, noises: &BTreeMap<String, Noise>) -> Row {
        let Layer { node, operator, shape, outcome } = layer;
        let mut row = Row {
            node,
            operator,
            shape,
            precision: None,
            bytes_before: 0,
            bytes_after: 0,
            weight_decibels: None,
            kept: None,
        };
        match outcome {
            Outcome::Quantized { precision, before, after, codes } => {
                (row.precision, row.bytes_before, row.bytes_after) = (Some(precision), before, after);
                // JSON has no infinity, which is the ratio of a weight that did not change.
                let decibels = noises.get(&codes).map(Noise::decibels);
                row.weight_decibels = decibels.filter(|decibels| decibels.is_finite());
            }
            Outcome::Kept { reason } => row.kept = Some(reason),
        }
        row
    }
}

impl Sizes {
    fn of(bytes_before: usize, written: &Written) -> Sizes {
        Sizes { bytes_before, model_bytes: written.model, data_bytes: written.data }
    }
}

impl Report {
    fn print(&self, args: &QuantizeArgs) -> Result<()> {
        let mut rows = table(&["layer", "operator", "weight", "becomes", "bytes", "after", "weight dB"]);
        for row in &self.layers {
            let shape: Vec<String> = row.shape.iter().map(ToString::to_string).collect();
            let becomes = match (&row.precision, &row.kept) {
                (Some(precision), _) => precision.clone(),
                (None, reason) => format!("stays: {}", reason.as_deref().unwrap_or_default()),
            };
            let bytes =
                |bytes: usize| if row.precision.is_some() { bytes.to_string() } else { String::new() };
            let (before, after) = (bytes(row.bytes_before), bytes(row.bytes_after));
            let decibels = row.weight_decibels.map_or(String::new(), |decibels| format!("{decibels:.1}"));
            let (node, operator) = (row.node.clone(), row.operator.clone());
            rows.add_row([node, operator, shape.join("x"), becomes, before, after, decibels]);
        }
        say!("{rows}")?;
        if let Some(calibration) = self.calibration.as_ref().filter(|done| !done.not_finite.is_empty()) {
            say!(
                "NaN or infinite elements of {} were left out of their ranges",
                listed(&calibration.not_finite)
            )?;
        }
        if let Some(checked) = &self.checked {
            let peak = |bytes: Option<usize>| bytes.map_or("unknown".to_string(), human_bytes);
            say!(
                "weights {} became {}; peak of the run {} became {}",
                human_bytes(checked.weights_before),
                human_bytes(checked.weights),
                peak(checked.planned_peak_before),
                peak(checked.planned_peak)
            )?;
            match checked.relative_error {
                Some(error) => say!("the outputs differ by {:.3} % in {} runs", 100.0 * error, checked.runs)?,
                None => say!("the outputs are not floating point, or all zero")?,
            }
        }
        match &self.written {
            Some(sizes) => say!(
                "a file of {} became {}; written to {}",
                human_bytes(sizes.bytes_before),
                human_bytes((sizes.model_bytes + sizes.data_bytes) as usize),
                args.output.display()
            ),
            None => say!("a dry run; nothing was written"),
        }
    }
}

/// Runs of a model.
struct Ran {
    inputs: Vec<Sample>,
    outputs: Vec<Sample>,
    /// The largest planned peak.
    peak: Option<usize>,
    weights: usize,
}

/// The memory of a single comparing run, unless it needs more. Under a limit, weights are packed
/// for the step that reads them, so that a large model does not take its size in memory.
const MEMORY_OF_ONE_RUN: usize = 64 << 20;

impl Ran {
    fn of(args: &QuantizeArgs, model: &Model, inputs: &[Sample]) -> Result<Ran> {
        let is_free = args.model.memory_limit.is_none() && inputs.len() == 1;
        let mut limit = is_free.then_some(MEMORY_OF_ONE_RUN);
        for _ in 0..2 {
            let problem = match Ran::within(args, model, (inputs, limit)) {
                Err(problem) if limit.is_some() => problem,
                done => return done,
            };
            let shortage =
                problem.downcast_ref::<ort_runtime::Error>().and_then(|problem| problem.shortage());
            limit = Some(shortage.map(MemoryShortage::sufficient_limit).ok_or(problem)?);
        }
        Ran::within(args, model, (inputs, None))
    }

    fn within(
        args: &QuantizeArgs,
        model: &Model,
        (inputs, limit): (&[Sample], Option<usize>),
    ) -> Result<Ran> {
        let mut builder = args.model.builder(model)?;
        if let Some(limit) = limit {
            builder = builder.memory_limit(limit);
        }
        let session: Session = builder.build()?;
        let (mut peak, mut weights, mut outputs) = (Some(0), 0, Vec::new());
        for sample in inputs {
            let plan = session.plan_for_inputs(&named(sample))?;
            peak = peak.and_then(|peak: usize| Some(peak.max(plan.peak_bytes?)));
            weights = plan.weights_bytes;
            outputs.push(session.run(&named(sample))?);
        }
        Ok(Ran { inputs: inputs.to_vec(), outputs, peak, weights })
    }
}

/// Runs the quantized model on the inputs of the original.
fn compare(args: &QuantizeArgs, original: &Ran, model: &Model) -> ort_runtime::Result<Checked> {
    let inputs: Vec<Sample> =
        original.inputs.iter().map(|sample| fitted(model, sample)).collect::<ort_runtime::Result<_>>()?;
    let ran = Ran::of(args, model, &inputs)
        .map_err(|problem| ort_runtime::Error::new(ort_runtime::ErrorKind::Fail, format!("{problem:#}")))?;
    let (mut squares, mut errors, mut not_finite) = (0.0, 0.0, 0);
    let outputs = original.outputs.iter().flatten().zip(ran.outputs.iter().flatten());
    for ((_, before), (_, after)) in outputs {
        let (Value::Tensor(before), Value::Tensor(after)) = (before, after) else { continue };
        let (Some(before), Some(after)) = (numbers(before)?, numbers(after)?) else { continue };
        for (before, after) in before.into_iter().zip(after) {
            if before.is_finite() && after.is_finite() {
                squares += before * before;
                errors += (before - after) * (before - after);
            } else if before.is_finite() {
                not_finite += 1;
            }
        }
    }
    if not_finite > 0 {
        let text =
            format!("{not_finite} elements of the outputs are NaN or infinite, but not the original's");
        return Err(ort_runtime::Error::new(ort_runtime::ErrorKind::Fail, text).help(
            "keep the nodes that overflow in float32 with --exclude, or give real inputs with --inputs or --data",
        ));
    }
    Ok(Checked {
        runs: ran.outputs.len(),
        planned_peak_before: original.peak,
        planned_peak: ran.peak,
        weights_before: original.weights,
        weights: ran.weights,
        relative_error: (squares > 0.0).then(|| (errors / squares).sqrt()),
    })
}

/// A sample in the types of the model: float16 where that was float32 before.
fn fitted(model: &Model, sample: &Sample) -> ort_runtime::Result<Sample> {
    let specs = model.inputs();
    let is_half =
        |name: &str| specs.iter().any(|spec| spec.name == name && spec.ty.dtype() == Some(DType::F16));
    let fit = |(name, value): &(String, Value)| -> ort_runtime::Result<(String, Value)> {
        let narrowed = match value {
            Value::Tensor(tensor) if tensor.dtype() == DType::F32 && is_half(name) => {
                let halves = tensor.to_vec::<f32>()?.into_iter().map(f16::from_f32).collect();
                Tensor::from_vec::<f16>(tensor.shape(), halves)?.into()
            }
            value => value.clone(),
        };
        Ok((name.clone(), narrowed))
    };
    sample.iter().map(fit).collect()
}

/// The elements of a tensor of floating-point numbers.
fn numbers(tensor: &Tensor) -> ort_runtime::Result<Option<Vec<f64>>> {
    Ok(match tensor.dtype() {
        DType::F32 => Some(tensor.to_vec::<f32>()?.into_iter().map(f64::from).collect()),
        DType::F16 => Some(tensor.to_vec::<f16>()?.into_iter().map(f64::from).collect()),
        DType::F64 => Some(tensor.to_vec::<f64>()?),
        _ => None,
    })
}

fn block_size(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|size| [16, 32, 64, 128, 256].contains(size));
    size.ok_or_else(|| format!("`{text}` is not one of 16, 32, 64, 128, 256"))
}

fn pattern(text: &str) -> Result<NodePattern, String> {
    text.parse().map_err(|problem: ort_runtime::Error| problem.to_string())
}

fn range_rule(text: &str) -> Result<RangeRule, String> {
    let percent = |text: &str| text.parse().ok().map(|percent: f64| percent / 100.0);
    let rule = match text.split_once('=') {
        Some(("percentile", percent_text)) => percent(percent_text).map(RangeRule::Percentile),
        Some(_) => None,
        None => match text {
            "minmax" => Some(RangeRule::MinMax),
            "average" => Some(RangeRule::Average),
            "percentile" => Some(RangeRule::Percentile(0.9999)),
            "entropy" => Some(RangeRule::Entropy),
            "mse" => Some(RangeRule::SquaredError),
            _ => None,
        },
    };
    let is_valid = |rule: &RangeRule| match rule {
        RangeRule::Percentile(share) => (0.5..=1.0).contains(share),
        _ => true,
    };
    rule.filter(is_valid).ok_or_else(|| {
        format!("`{text}` is not one of minmax, average, percentile=99.99 (50 to 100), entropy, mse")
    })
}
