//! The flags of `ort quantize`, and the quantizer that they describe.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use clap::{Args, ValueEnum};
use ort_runtime::Model;
use ort_runtime::onnx::Weights;
use ort_runtime::quant::{
    Bits, BlockMethod, BlockOptions, DynamicOptions, GptqOptions, HalfOptions, HalfType, LastProduct, Mode,
    NodePattern, Quantizer, RangeRule, Scope, Smooth, StaticBiases, StaticFormat, StaticOptions, StaticType,
    TokenMask, TunedWeights, Wanted,
};

use crate::args::{ModelArgs, size};
use crate::comparison::SampleArgs;
use crate::output::data_path;
use crate::usage::wrong_usage;

/// Writes a quantized model, checks it, and lists what became of each layer.
#[derive(Args)]
pub(crate) struct QuantizeArgs {
    /// The inputs, with which both models run to compare their outputs.
    #[command(flatten)]
    pub(super) model: ModelArgs,
    /// Output file, written atomically. With --compare: the model to compare with.
    pub(super) output: PathBuf,
    /// What weights become.
    #[arg(long, value_enum, required_unless_present_any = ["compare", "budget", "budget_run", "error"])]
    pub(super) mode: Option<ModeArg>,
    /// Compare MODEL with OUTPUT, which any program may have quantized, and write nothing.
    #[arg(long, conflicts_with_all = ["mode", "held_out", "calibration", "format", "ranges", "scope", "smooth", "block", "method",
        "act_order", "bias_correction", "equalise", "mask", "score", "max_drop", "symmetric", "protect_last", "no_protect_last", "per_tensor", "portable", "convert_io",
        "only", "exclude", "external_data", "dry_run", "budget", "budget_run", "error", "exact_errors"])]
    pub(super) compare: bool,
    #[command(flatten)]
    pub(super) bound: BoundArgs,
    #[command(flatten)]
    pub(super) samples: SampleArgs,
    /// Take the ranges from this file if it exists; otherwise write them to it. Its format is that
    /// of onnxruntime.quantization's calibration cache.
    #[arg(long, value_name = "FILE.json")]
    pub(super) calibration: Option<PathBuf>,
    /// What the model consists of [default: qdq for --mode static, nbits for weights alone].
    #[arg(long, value_enum)]
    format: Option<FormatArg>,
    /// Which nodes of a static model in the qdq format read quantized values.
    #[arg(long, value_enum, default_value_t = ScopeArg::Heavy)]
    scope: ScopeArg,
    /// How ranges follow from the samples: minmax, average, percentile (=99.99), entropy or mse.
    /// With `auto`, each value has the rule with which the outputs change least.
    #[arg(long, value_name = "auto|RULE", default_value = "minmax", value_parser = range_rule)]
    pub(super) ranges: RangesArg,
    /// The input of shape [batch, tokens] that is 0 for padding, which then counts in no statistic.
    #[arg(long, value_name = "INPUT", requires = "data")]
    pub(super) mask: Option<String>,
    /// Cross-layer equalisation: channels between two layers get ranges of the same size (dynamic,
    /// static and fp8 mode).
    #[arg(long, conflicts_with = "calibration")]
    pub(super) equalise: bool,
    /// SmoothQuant (static mode): moves outliers of the inputs of products into their weights.
    /// ALPHA from 0 to 1 says how much; `auto` finds it for each input [default: auto; off with
    /// --calibration].
    #[arg(long, value_name = "off|auto|ALPHA", value_parser = smooth, conflicts_with = "calibration")]
    smooth: Option<SmoothArg>,
    /// Weights per scale, for weights alone: 16, 32, 64, 128 or 256.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = block_size)]
    block: usize,
    /// How the scale of a block is chosen (weights alone).
    #[arg(long, value_enum, default_value_t = MethodArg::Mse)]
    pub(super) method: MethodArg,
    /// With --method gptq: round the rows of channels with much energy first.
    #[arg(long)]
    act_order: bool,
    /// Correct the biases of products whose mean outputs the errors of their weights change (static
    /// mode and weights alone, with --data). With `auto`, in static mode, only if the outputs of
    /// the held-out samples change less.
    #[arg(long, value_enum, value_name = "WHEN", num_args = 0..=1, require_equals = true,
        default_value_t = BiasArg::Off, default_missing_value = "on")]
    pub(super) bias_correction: BiasArg,
    /// Blocks without zero points: less memory and, for weights that are not centred, less
    /// accuracy. With --mode static: inputs whose zero point is the middle of their codes.
    #[arg(long)]
    symmetric: bool,
    /// Give the last product 8 bits. The default does so if its result is the answer, and not
    /// normalized first (weights alone).
    #[arg(long, overrides_with = "no_protect_last")]
    protect_last: bool,
    /// Quantize the last product as the others.
    #[arg(long, overrides_with = "protect_last")]
    no_protect_last: bool,
    /// One scale for a whole weight (dynamic and static mode); otherwise one for each output
    /// channel.
    #[arg(long)]
    per_tensor: bool,
    /// Weights of 7 bits (dynamic and static mode), for other runtimes on processors whose products
    /// saturate.
    #[arg(long)]
    portable: bool,
    /// Convert the inputs and outputs of the model, too (fp16 and bf16 mode).
    #[arg(long)]
    convert_io: bool,
    /// Quantize these nodes alone: a name with * and ?, op:OPERATOR, #NUMBER, first or last
    /// (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    only: Vec<NodePattern>,
    /// Keep these nodes in floating point (repeatable).
    #[arg(long, value_name = "PATTERN", value_parser = pattern)]
    exclude: Vec<NodePattern>,
    /// A command that gets the path of a model and prints its score as the last line; higher is
    /// better. The report has the scores of both models.
    #[arg(long, value_name = "COMMAND", conflicts_with = "bound")]
    pub(super) score: Option<String>,
    /// Keep the layers that harm the outputs most in floating point, until the score is at most X
    /// lower.
    #[arg(long, value_name = "X", requires = "score", value_parser = drop_of_score)]
    pub(super) max_drop: Option<f64>,
    /// Store the weights in OUTPUT.data beside the model; so are those of models above 2 GiB.
    #[arg(long)]
    external_data: bool,
    /// List what would become of each layer, and write no model.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Write the report as JSON to this file.
    #[arg(long, value_name = "FILE.json")]
    pub(super) report: Option<PathBuf>,
    /// Print the report as one JSON object instead of a table.
    #[arg(long)]
    pub(super) json: bool,
}

/// The bounds, for which weights get different precisions.
#[derive(Args)]
pub(super) struct BoundArgs {
    /// Give each weight the bits that keep the outputs most accurate in a file of at most this
    /// size. Weights have at least the bits of --mode (2 without it), and may stay in floating
    /// point. With --data, the error that each weight causes at the outputs is measured.
    #[arg(long, value_name = "SIZE", value_parser = size, group = "bound")]
    budget: Option<usize>,
    /// The same, for the weights and the planned peak of a run together.
    #[arg(long, value_name = "SIZE", value_parser = size, group = "bound")]
    budget_run: Option<usize>,
    /// Write the smallest model whose outputs differ by at most this share on the held-out samples
    /// of --data: 0.01 is 1 %. The error of the written file is measured.
    #[arg(long, value_name = "X", value_parser = relative_error, group = "bound")]
    error: Option<f64>,
    /// With a bound and --data: measure the error of 8 bits, too. Otherwise it follows from that of
    /// fewer bits, in proportion to the noise of the weight.
    #[arg(long, requires = "bound")]
    pub(super) exact_errors: bool,
}

/// What a mixed model has to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Bound {
    /// The bytes of the file, with its data file.
    File(u64),
    /// The bytes of the weights and the planned peak.
    Run(u64),
    /// The relative error of the outputs.
    Error(f64),
}

impl BoundArgs {
    /// The bound; clap allows one of them.
    pub(super) fn bound(&self) -> Option<Bound> {
        let file = self.budget.map(|bytes| Bound::File(bytes as u64));
        let run = self.budget_run.map(|bytes| Bound::Run(bytes as u64));
        file.or(run).or(self.error.map(Bound::Error))
    }
}

/// The values of `--format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FormatArg {
    /// QuantizeLinear and DequantizeLinear around products: only their inputs are rounded.
    Qdq,
    /// Products of integers, such as QLinearConv: faster, and their results are rounded, too.
    Qoperator,
    /// MatMulNBits and GatherBlockQuantized, which read weights in blocks.
    Nbits,
}

/// The values of `--scope`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ScopeArg {
    /// Products alone: a value is rounded once before each.
    Heavy,
    /// Also sums, averages and others whose inputs come from products, for convolutional networks.
    All,
    /// Every operator that onnxruntime.quantization quantizes by default.
    Ort,
}

/// The values of `--ranges`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RangesArg {
    Auto,
    By(RangeRule),
}

impl RangesArg {
    /// The rules to choose from.
    pub(super) fn rules(self) -> Vec<RangeRule> {
        match self {
            RangesArg::By(rule) => vec![rule],
            RangesArg::Auto => vec![
                RangeRule::MinMax,
                RangeRule::SquaredError,
                RangeRule::Percentile(USUAL_PERCENTILE),
                RangeRule::Entropy,
            ],
        }
    }

    /// What the observers of a calibration collect.
    pub(super) fn wanted(self) -> Wanted {
        let histogram = self.rules().iter().any(|rule| rule.wanted().histogram);
        Wanted { histogram, moments: false }
    }
}

/// The percentile of a rule that names none.
const USUAL_PERCENTILE: f64 = 0.9999;

/// The values of `--bias-correction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum BiasArg {
    Off,
    On,
    Auto,
}

/// The values of `--smooth`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SmoothArg {
    Off,
    By(Smooth),
}

/// The values of `--method`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum MethodArg {
    /// Round to nearest: the scale covers the whole block, as in ONNX Runtime.
    Rtn,
    /// The least squared error: the largest weights of a block may be clipped.
    Mse,
    /// Scale and zero point by weighted least squares, as in llama.cpp's k-quants.
    KQuant,
    /// Half-quadratic quantization: zero points in floating point that hardly heed outliers.
    Hqq,
    /// With --data: the rows of a weight make up for the errors of those before (mse).
    Gptq,
    /// With --data: weights of channels with large inputs are scaled up before (mse).
    Awq,
}

impl MethodArg {
    /// Whether it needs samples.
    pub(super) fn is_tuned(self) -> bool {
        matches!(self, MethodArg::Gptq | MethodArg::Awq)
    }
}

/// The values of `--mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum ModeArg {
    /// Weights of 8 bits; the inputs of products are quantized in each run.
    Dynamic,
    /// Weights and the inputs of products have 8 bits, in ranges found with --data.
    Static,
    /// The same in float8 (E4M3FN), which runtimes without such products compute in float32.
    Fp8,
    /// Weights and values in float16; inputs and outputs stay float32.
    Fp16,
    /// The same in bfloat16, which has the range of float32 and fewer digits.
    Bf16,
    /// Weights of 8 bits in blocks; products in floating point.
    Int8,
    /// Weights of 4 bits in blocks; tables and the last product have 8 bits.
    Int4,
    /// Weights of 3 bits in blocks, which take 4, because kernels have no others: such a file is no
    /// smaller, but compresses better. Tables and the last product have 8 bits.
    Int3,
    /// Weights of 2 bits in blocks; tables and the last product have 8 bits.
    Int2,
}

impl QuantizeArgs {
    /// The mode; with a bound and no mode, the one of the fewest bits.
    pub(super) fn mode_or_least(&self) -> ModeArg {
        self.mode.unwrap_or(ModeArg::Int2)
    }

    /// How inputs are smoothed. The ranges of a file are those of a model that is not.
    pub(super) fn smoothing(&self) -> SmoothArg {
        let is_chosen = self.mode == Some(ModeArg::Static) && self.calibration.is_none();
        self.smooth.unwrap_or(if is_chosen { SmoothArg::By(Smooth::Auto) } else { SmoothArg::Off })
    }

    /// Whether biases are corrected, or may be.
    pub(super) fn corrects_bias(&self) -> bool {
        self.bias_correction != BiasArg::Off
    }

    /// Whether a decision depends on how much the outputs change.
    pub(super) fn needs_error(&self) -> bool {
        self.bias_correction == BiasArg::Auto || self.max_drop.is_some()
    }

    /// The mask of the padding in samples.
    pub(super) fn mask(&self, model: &Model) -> Result<Option<Arc<TokenMask>>> {
        let mask = self.mask.as_ref().map(|input| TokenMask::new(model, input)).transpose()?;
        Ok(mask.map(Arc::new))
    }

    /// Where the weights go.
    pub(super) fn weights(&self) -> Weights {
        if self.external_data { Weights::Beside { least: 1024 } } else { Weights::Inside }
    }

    /// Refuses to replace a file that is read, before hours of calibration.
    pub(super) fn check_outputs(&self) -> Result<()> {
        let mut outputs: Vec<PathBuf> = self.report.iter().cloned().collect();
        if !self.compare {
            outputs.extend(self.calibration.iter().filter(|path| !path.exists()).cloned());
            outputs.push(self.output.clone());
            outputs.extend((self.weights() != Weights::Inside).then(|| data_path(&self.output)));
        }
        Ok(self.model.source()?.check_outputs(outputs.iter().map(PathBuf::as_path))?)
    }

    /// The quantizer. That of the static mode has no ranges yet.
    pub(super) fn quantizer(&self, mode: ModeArg) -> Result<Quantizer> {
        self.refuse_stray_flags(mode)?;
        let has_ranges = self.calibration.as_deref().is_some_and(Path::exists);
        if mode == ModeArg::Fp8 && self.samples.data.is_none() && !has_ranges {
            wrong_usage!(
                "--mode fp8 needs --data with samples; without any, take --mode fp16, or int8 for weights alone"
            );
        }
        let is_even = matches!(
            self.ranges,
            RangesArg::Auto | RangesArg::By(RangeRule::Entropy | RangeRule::SquaredError)
        );
        if mode == ModeArg::Fp8 && is_even {
            wrong_usage!(
                "--ranges auto, entropy and mse count on evenly spaced codes, and those of --mode fp8 are not; take \
                 minmax, average or percentile"
            );
        }
        if mode == ModeArg::Static && self.samples.data.is_none() && !has_ranges {
            wrong_usage!(
                "--mode static needs --data with samples; without any, take --mode dynamic, or int8 or int4 for \
                 weights alone"
            );
        }
        if self.method.is_tuned() && self.samples.data.is_none() {
            wrong_usage!(
                "--method gptq and awq need --data with samples; without any, take --method mse or hqq"
            );
        }
        self.check_bound()?;
        if self.corrects_bias() && self.samples.data.is_none() {
            wrong_usage!("--bias-correction needs --data with samples; give some, or leave it out");
        }
        if self.corrects_bias() && self.method == MethodArg::Awq {
            wrong_usage!(
                "--bias-correction does not go with --method awq; take --method gptq, or leave it out"
            );
        }
        if has_ranges && (self.corrects_bias() || self.ranges == RangesArg::Auto) {
            wrong_usage!(
                "--bias-correction and --ranges auto need runs of samples, and the ranges of --calibration are read \
                 without any; leave one of them out"
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
                    MethodArg::Mse | MethodArg::Gptq | MethodArg::Awq => BlockMethod::SquaredError,
                    MethodArg::KQuant => BlockMethod::KQuant,
                    MethodArg::Hqq => BlockMethod::HalfQuadratic,
                },
                last: self.last_product(),
                tuned: TunedWeights::default(),
            })
        };
        let half = |ty| Mode::Half(HalfOptions { ty, converts_io: self.convert_io, ranges: BTreeMap::new() });
        let mode = match mode {
            ModeArg::Dynamic => Mode::Dynamic(DynamicOptions { per_tensor, reduce_range }),
            ModeArg::Static | ModeArg::Fp8 => Mode::Static(StaticOptions {
                ty: if mode == ModeArg::Fp8 { StaticType::Float8 } else { StaticType::Int8 },
                format: match self.format {
                    Some(FormatArg::Qoperator) => StaticFormat::QOperator,
                    Some(FormatArg::Qdq | FormatArg::Nbits) | None => StaticFormat::Qdq,
                },
                ranges: BTreeMap::new(),
                scope: match self.scope {
                    ScopeArg::Heavy => Scope::Heavy,
                    ScopeArg::All => Scope::All,
                    ScopeArg::Ort => Scope::Default,
                },
                smoothing: BTreeMap::new(),
                biases: StaticBiases::default(),
                per_tensor,
                reduce_range,
                is_symmetric: self.symmetric,
            }),
            ModeArg::Fp16 => half(HalfType::Float16),
            ModeArg::Bf16 => half(HalfType::BFloat16),
            ModeArg::Int8 => blocks(Bits::Eight),
            ModeArg::Int4 => blocks(Bits::Four),
            ModeArg::Int3 => blocks(Bits::Three),
            ModeArg::Int2 => blocks(Bits::Two),
        };
        Ok(Quantizer { mode, only: self.only.clone(), exclude: self.exclude.clone() })
    }

    /// Refuses bounds without what they need.
    fn check_bound(&self) -> Result<()> {
        let Some(bound) = self.bound.bound() else { return Ok(()) };
        let has_samples = self.samples.data.is_some();
        if matches!(bound, Bound::Error(_)) && !has_samples {
            wrong_usage!(
                "--error needs --data with samples, on which it is measured; without any, take --budget"
            );
        }
        if self.bound.exact_errors && !has_samples {
            wrong_usage!("--exact-errors needs --data with samples; give some, or leave it out");
        }
        if has_samples && self.no_protect_last {
            wrong_usage!(
                "--no-protect-last has no effect here: with --data, the last product gets the bits that its \
                 measured error is worth; leave it out"
            );
        }
        Ok(())
    }

    /// What becomes of the last product.
    fn last_product(&self) -> LastProduct {
        // With a bound and samples, its error is measured instead.
        let is_measured = self.bound.bound().is_some() && self.samples.data.is_some();
        match self.protect_last {
            true => LastProduct::Protected,
            false if self.no_protect_last || is_measured => LastProduct::AsOthers,
            false => LastProduct::Head,
        }
    }

    /// The options of GPTQ.
    pub(super) fn gptq(&self) -> GptqOptions {
        // With more bits, sweeps take time and gain nothing.
        let sweeps = if self.mode_or_least() == ModeArg::Int2 { 3 } else { 0 };
        let (act_order, corrects_bias) = (self.act_order, self.corrects_bias());
        GptqOptions { act_order, sweeps, corrects_bias, ..GptqOptions::default() }
    }

    /// A flag without effect would look as if it had one.
    fn refuse_stray_flags(&self, mode: ModeArg) -> Result<()> {
        let is_dynamic = mode == ModeArg::Dynamic;
        let is_static = mode == ModeArg::Static;
        let is_half = matches!(mode, ModeArg::Fp16 | ModeArg::Bf16);
        let is_float8 = mode == ModeArg::Fp8;
        let is_blocks = !is_dynamic && !is_static && !is_float8 && !is_half;
        let stray = [
            ("--symmetric", (is_dynamic || is_float8 || is_half) && self.symmetric),
            ("--protect-last", !is_blocks && self.protect_last),
            ("--no-protect-last", !is_blocks && self.no_protect_last),
            ("--per-tensor", (is_blocks || is_half) && self.per_tensor),
            ("--portable", (is_blocks || is_float8 || is_half) && self.portable),
            ("--method", !is_blocks && self.method != MethodArg::Mse),
            ("--bias-correction", (is_dynamic || is_half) && self.corrects_bias()),
            ("--bias-correction=auto", is_blocks && self.bias_correction == BiasArg::Auto),
            ("--equalise", (is_blocks || is_half) && self.equalise),
            ("--mask", is_dynamic && self.mask.is_some()),
            ("--max-drop", is_half && self.max_drop.is_some()),
            ("--calibration", !is_static && !is_float8 && self.calibration.is_some()),
            ("--convert-io", !is_half && self.convert_io),
            ("--ranges", !is_static && !is_float8 && self.ranges != RangesArg::By(RangeRule::MinMax)),
            ("--scope", (!is_static && !is_float8) && self.scope != ScopeArg::Heavy),
            ("--format nbits", !is_blocks && self.format == Some(FormatArg::Nbits)),
            ("--format", !is_static && self.format.is_some_and(|format| format != FormatArg::Nbits)),
            ("--smooth", !is_static && self.smooth.is_some()),
            ("--budget, --budget-run or --error", !is_blocks && self.bound.bound().is_some()),
        ];
        if let Some((flag, _)) = stray.iter().find(|(_, is_stray)| *is_stray) {
            wrong_usage!("{flag} has no effect in this --mode; leave it out");
        }
        if self.act_order && self.method != MethodArg::Gptq {
            wrong_usage!("--act-order has no effect without --method gptq; leave it out");
        }
        if self.symmetric && self.method == MethodArg::Hqq {
            wrong_usage!(
                "--method hqq searches zero points, and --symmetric has none; leave one of them out"
            );
        }
        if self.report.as_ref() == Some(&self.output) {
            wrong_usage!("--report and the output are the same file; name two");
        }
        Ok(())
    }
}

fn block_size(text: &str) -> Result<usize, String> {
    let size = text.parse().ok().filter(|size| [16, 32, 64, 128, 256].contains(size));
    size.ok_or_else(|| format!("`{text}` is not one of 16, 32, 64, 128, 256"))
}

fn pattern(text: &str) -> Result<NodePattern, String> {
    text.parse().map_err(|problem: ort_runtime::Error| problem.to_string())
}

fn relative_error(text: &str) -> Result<f64, String> {
    let error = text.parse().ok().filter(|error: &f64| *error > 0.0 && *error <= 1.0);
    error.ok_or_else(|| format!("`{text}` is not a share above 0 and up to 1, such as 0.01 for 1 %"))
}

fn smooth(text: &str) -> Result<SmoothArg, String> {
    match text {
        "off" => Ok(SmoothArg::Off),
        "auto" => Ok(SmoothArg::By(Smooth::Auto)),
        _ => {
            let alpha = text.parse().ok().filter(|alpha| (0.0..=1.0).contains(alpha));
            let alpha = alpha.ok_or_else(|| format!("`{text}` is not off, auto or a number from 0 to 1"))?;
            Ok(SmoothArg::By(Smooth::Alpha(alpha)))
        }
    }
}

fn drop_of_score(text: &str) -> Result<f64, String> {
    let drop = text.parse().ok().filter(|drop: &f64| *drop >= 0.0 && drop.is_finite());
    drop.ok_or_else(|| format!("`{text}` is not a number of at least 0"))
}

fn range_rule(text: &str) -> Result<RangesArg, String> {
    let percent = |text: &str| text.parse().ok().map(|percent: f64| percent / 100.0);
    let rule = match text.split_once('=') {
        Some(("percentile", percent_text)) => percent(percent_text).map(RangeRule::Percentile),
        Some(_) => None,
        None => match text {
            "auto" => return Ok(RangesArg::Auto),
            "minmax" => Some(RangeRule::MinMax),
            "average" => Some(RangeRule::Average),
            "percentile" => Some(RangeRule::Percentile(USUAL_PERCENTILE)),
            "entropy" => Some(RangeRule::Entropy),
            "mse" => Some(RangeRule::SquaredError),
            _ => None,
        },
    };
    let is_valid = |rule: &RangeRule| match rule {
        RangeRule::Percentile(share) => (0.5..=1.0).contains(share),
        _ => true,
    };
    rule.filter(is_valid).map(RangesArg::By).ok_or_else(|| {
        format!("`{text}` is not one of auto, minmax, average, percentile=99.99 (50 to 100), entropy, mse")
    })
}
