//! The flags of `ort train`, and the training options that they stand for.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use ort_runtime::train::{
    AdamForm, Loss, LossScale, MixedPrecision, Optimizer, PlanRequest, Recompute, Schedule, TrainingOptions,
};

use crate::args::{PrecisionArg, size, threads};
use crate::numbers::{above_zero, below_one, from_zero, integer, positive_u32, positive_u64, whole};
use crate::providers::ProviderArgs;
use crate::usage::wrong_usage;

/// Trains a model.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// The model file, exported for inference; training starts from its weights.
    pub(super) model: PathBuf,
    /// Reject what ONNX forbids but ONNX Runtime accepts, instead of warning.
    #[arg(long)]
    pub(super) strict: bool,
    /// Samples: an array per model input, by name, and `labels` or `target` for the loss. The first
    /// axis counts samples.
    #[arg(long, value_name = "FILE.npz", required_unless_present = "check")]
    pub(super) data: Option<PathBuf>,
    /// Held-out samples: report their loss after each epoch, and the accuracy with cross entropy.
    #[arg(long, value_name = "FILE.npz")]
    pub(super) validation: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Loss")]
    pub(super) loss: LossArgs,
    #[command(flatten, next_help_heading = "Updates")]
    pub(super) update: UpdateArgs,
    #[command(flatten, next_help_heading = "Weights")]
    pub(super) weights: WeightArgs,
    #[command(flatten, next_help_heading = "Run")]
    pub(super) run: RunArgs,
    #[command(flatten, next_help_heading = "Execution providers")]
    pub(super) providers: ProviderArgs,
    #[command(flatten, next_help_heading = "Results")]
    pub(super) results: ResultArgs,
}

#[derive(Args)]
pub(super) struct LossArgs {
    /// Loss to minimize.
    #[arg(long = "loss", value_enum, value_name = "LOSS", default_value_t = LossKind::CrossEntropy)]
    kind: LossKind,
    /// Value the loss is computed from: an output or inner value [default: the first output].
    #[arg(long, value_name = "NAME")]
    output_name: Option<String>,
    /// Label smoothing, from 0 to below 1; cross entropy only.
    #[arg(long, value_name = "X", value_parser = below_one)]
    label_smoothing: Option<f32>,
    /// Label to ignore; cross entropy only.
    #[arg(long, value_name = "LABEL", value_parser = integer)]
    ignore_index: Option<i64>,
    /// Class axis of the logits; cross entropy only [default: 1; the last for rank 3, as in
    /// language models]. PyTorch's layout [N, C, L] is axis 1.
    #[arg(long, value_name = "AXIS", value_parser = integer)]
    pub(super) class_axis: Option<i64>,
    /// Distillation temperature, which divides both logits; kl only [default: 1].
    #[arg(long, value_name = "T", value_parser = above_zero::<f32>)]
    temperature: Option<f32>,
}

/// The values of `--loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LossKind {
    /// Mean squared error against `target`.
    Mse,
    /// Mean absolute error against `target`.
    L1,
    /// Cross entropy of logits against `labels`, int64 classes.
    CrossEntropy,
    /// Binary cross entropy of logits against `target`, probabilities.
    Bce,
    /// KL divergence from a teacher's distribution; `target` holds the teacher's logits.
    Kl,
    /// The model's own output, a single number.
    Output,
}

#[derive(Args)]
pub(super) struct UpdateArgs {
    /// Rule that updates weights from their gradients.
    #[arg(long, value_enum, value_name = "OPTIMIZER", default_value_t = OptimizerKind::Adamw)]
    optimizer: OptimizerKind,
    /// Base learning rate, which the schedule scales.
    #[arg(long, value_name = "X", default_value_t = 1e-3, value_parser = from_zero::<f32>)]
    lr: f32,
    /// Momentum; sgd only.
    #[arg(long, value_name = "X", value_parser = below_one)]
    momentum: Option<f32>,
    /// Use Nesterov momentum; sgd with --momentum only.
    #[arg(long)]
    nesterov: bool,
    /// Weight decay [default: 0.01 for adamw and adamw-8bit, else 0].
    #[arg(long, value_name = "X", value_parser = from_zero::<f32>)]
    weight_decay: Option<f32>,
    /// Learning rate schedule.
    #[arg(long, value_enum, value_name = "SCHEDULE", default_value_t = ScheduleKind::Constant)]
    schedule: ScheduleKind,
    /// Warmup updates; linear and cosine only [default: 0].
    #[arg(long, value_name = "N", value_parser = whole::<u64>)]
    warmup: Option<u64>,
    /// Updates between two decays; step only.
    #[arg(long, value_name = "N", required_if_eq("schedule", "step"), value_parser = positive_u64)]
    step_every: Option<u64>,
    /// Factor of each decay; step only [default: 0.1].
    #[arg(long, value_name = "X", value_parser = from_zero::<f64>)]
    step_factor: Option<f64>,
    /// Number of passes over the samples.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = whole::<u64>)]
    pub(super) epochs: u64,
    /// Batch size [default: 32, or the size that the model fixes].
    #[arg(long, value_name = "N", value_parser = positive_u32)]
    pub(super) batch: Option<u32>,
    /// Gradient accumulation: batches per update. N small batches need the memory of one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = positive_u32)]
    pub(super) accumulate: u32,
    /// Clip gradients to this global norm.
    #[arg(long, value_name = "X", value_parser = above_zero::<f32>)]
    clip_norm: Option<f32>,
}

/// The values of `--optimizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OptimizerKind {
    /// Stochastic gradient descent.
    Sgd,
    /// Adam, as in PyTorch.
    Adam,
    /// AdamW, as in PyTorch.
    Adamw,
    /// AdamW, as in Hugging Face Transformers.
    AdamwHf,
    /// AdamW with 8-bit state: 2 bytes per weight instead of 8.
    #[value(name = "adamw-8bit")]
    Adamw8bit,
    /// LAMB, for very large batches.
    Lamb,
    /// Adafactor: little state for matrices.
    Adafactor,
}

/// The values of `--schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ScheduleKind {
    /// Constant rate.
    Constant,
    /// Linear decay to 0.
    Linear,
    /// Half a cosine down to 0.
    Cosine,
    /// Step decay: multiplied by a factor every N updates.
    Step,
}

#[derive(Args)]
pub(super) struct WeightArgs {
    /// Weights to train; `*` matches any characters, `?` one [default: float initializers of rank 1
    /// or more, except batch-norm statistics and exporter constants]. '*' also trains exporter
    /// constants and scalars, but never Constant nodes.
    #[arg(long, value_name = "PATTERN")]
    train: Vec<String>,
    /// Weights to freeze; they need no gradient and no optimizer state.
    #[arg(long, value_name = "PATTERN")]
    freeze: Vec<String>,
    /// Weights without weight decay, usually biases and scales.
    #[arg(long, value_name = "PATTERN")]
    no_decay: Vec<String>,
    /// Shared weights to untie: each node that reads one trains its own copy. Exporters merge
    /// identical initializers, such as newly initialized LayerNorm scales.
    #[arg(long, value_name = "PATTERN")]
    untie: Vec<String>,
    /// Weights to tie: equal ones train as one, transposed copies included. Exporters fold the
    /// transpose of a tied embedding.
    #[arg(long, value_name = "PATTERN")]
    tie: Vec<String>,
    /// Freeze the running statistics of BatchNormalization and normalize by them, as in evaluation.
    #[arg(long)]
    freeze_statistics: bool,
    /// Disable Dropout nodes.
    #[arg(long)]
    no_dropout: bool,
}

#[derive(Args)]
pub(super) struct RunArgs {
    /// Seed of the sample order and of dropout.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole::<u64>)]
    pub(super) seed: u64,
    /// Keep the samples in file order in every epoch, instead of shuffling them.
    #[arg(long)]
    pub(super) no_shuffle: bool,
    /// Intra-op threads: threads inside one operator [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// Precision of GEMM and convolution on the CPU; bf16 needs AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    precision: PrecisionArg,
    /// Mixed precision: forward and backward pass partly in 16 bits, weights and optimizer state in
    /// float32 [default: all in float32].
    #[arg(long, value_enum, value_name = "PRECISION")]
    mixed_precision: Option<MixedPrecisionArg>,
    /// Loss scale: `dynamic`, or a number [default: dynamic with fp16].
    #[arg(long, value_name = "dynamic|NUMBER", value_parser = loss_scale, requires = "mixed_precision")]
    loss_scale: Option<LossScale>,
    /// Hard limit on parameters, optimizer state, gradients and activations together: bytes, or a
    /// number with KiB, MiB, GiB, KB, MB or GB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory_limit: Option<usize>,
    /// Activations to recompute instead of keeping. 0: only as many as --memory-limit requires.
    /// 1: all between layer boundaries, if that lowers the peak. 2: those that minimize the peak.
    /// Results are bit-identical.
    #[arg(long, value_name = "0|1|2", env = "ORTMODULE_MEMORY_OPT_LEVEL")]
    #[arg(default_value_t = 0, value_parser = memory_opt_level)]
    memory_opt_level: u8,
    /// Subgraphs to recompute, by name: a file with a JSON array such as ["Gelu+:1:-1"], or
    /// comma-separated entries. -v prints the names; -vv or ORTMODULE_LOG_LEVEL=DEVINFO also what
    /// each node keeps.
    #[arg(long, value_name = "FILE.json|ENTRIES", env = "ORTMODULE_MEMORY_OPT_CONFIG")]
    pub(super) memory_opt_config: Option<String>,
    /// Write a checkpoint to this folder after each epoch.
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Also write a checkpoint after every N updates.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = positive_u64)]
    pub(super) checkpoint_every: Option<u64>,
    /// Resume from the checkpoint, even in the middle of an epoch.
    #[arg(long, requires = "checkpoint")]
    pub(super) resume: bool,
    /// Stop after N updates and write a checkpoint for --resume.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = positive_u64)]
    pub(super) stop_after: Option<u64>,
}

/// The values of `--mixed-precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MixedPrecisionArg {
    /// bfloat16.
    Bf16,
    /// float16, with a loss scale.
    Fp16,
}

/// Parses `--memory-opt-level`.
fn memory_opt_level(text: &str) -> Result<u8, String> {
    let level = text.parse().ok().filter(|level: &u8| *level <= 2);
    level.ok_or_else(|| format!("`{text}` is not a level: use 0, 1 or 2"))
}

/// Parses `--loss-scale`.
fn loss_scale(text: &str) -> Result<LossScale> {
    if text == "dynamic" {
        return Ok(LossScale::dynamic());
    }
    let number = text.parse().ok().filter(|number: &f32| number.is_normal() && *number > 0.0);
    Ok(LossScale::Constant(number.context("expected dynamic, or a number above 0 such as 1024")?))
}

#[derive(Args)]
pub(super) struct ResultArgs {
    /// Write the trained model for inference.
    #[arg(long, value_name = "FILE.onnx")]
    pub(super) save: Option<PathBuf>,
    /// Plot the loss and the resident memory of each batch.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    /// Only report what prevents training.
    #[arg(long, conflicts_with_all = ["data", "validation", "save", "plot", "checkpoint"])]
    pub(super) check: bool,
    /// Profile all batches but the first: mean time per operator, and of the N slowest nodes.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "10", value_parser = whole::<usize>)]
    #[arg(conflicts_with_all = ["json", "check", "validation"])]
    pub(super) profile: Option<usize>,
    /// Print one JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

impl TrainArgs {
    /// Returns the training options. The schedule ends after `updates`.
    pub(super) fn options(&self, updates: u64) -> Result<TrainingOptions> {
        let (update, weights, run) = (&self.update, &self.weights, &self.run);
        Ok(TrainingOptions {
            loss: self.loss.loss()?,
            output: self.loss.output_name.clone(),
            optimizer: update.optimizer()?,
            learning_rate: update.lr,
            schedule: update.schedule(updates)?,
            trainable: weights.train.clone(),
            frozen: weights.freeze.clone(),
            no_decay: weights.no_decay.clone(),
            untied: weights.untie.clone(),
            tied: weights.tie.clone(),
            freeze_statistics: weights.freeze_statistics,
            clip_norm: update.clip_norm,
            accumulate: update.accumulate as usize,
            dropout: !weights.no_dropout,
            seed: run.seed,
            memory_limit: run.memory_limit,
            recompute: run.recompute()?,
            providers: self.providers.requests()?,
            threads: run.threads,
            precision: run.precision.into(),
            mixed_precision: run.mixed_precision.map(|precision| match precision {
                MixedPrecisionArg::Bf16 => MixedPrecision::Bf16,
                MixedPrecisionArg::Fp16 => MixedPrecision::Fp16,
            }),
            loss_scale: run.loss_scale,
            additional_outputs: Vec::new(),
        })
    }

    /// Returns the path of the samples.
    pub(super) fn data(&self) -> Result<&Path> {
        self.data.as_deref().context("--data FILE.npz is missing")
    }

    /// Returns the label to ignore.
    pub(super) fn ignored_label(&self) -> Option<i64> {
        self.loss.ignore_index
    }

    /// Returns the names of the loss and the optimizer.
    pub(super) fn names(&self) -> (String, String) {
        (name_of(self.loss.kind), name_of(self.update.optimizer))
    }

    /// Checks that the result files can be written, before any work is done.
    pub(super) fn check_places(&self) -> Result<()> {
        for (flag, path) in [("--save", &self.results.save), ("--plot", &self.results.plot)] {
            let Some(path) = path else { continue };
            let folder =
                path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            ensure!(
                folder.is_dir(),
                "{flag} {}: there is no folder {}; create it, or name another",
                path.display(),
                folder.display()
            );
            ensure!(!path.is_dir(), "{flag} {}: it is a folder; name a file", path.display());
        }
        Ok(())
    }

    /// Returns the settings that a resumed training run must share with its checkpoint, as flags
    /// and values.
    pub(super) fn settings(&self, batch: usize, samples: usize) -> Vec<(&'static str, String)> {
        let (update, weights, (loss, optimizer)) = (&self.update, &self.weights, self.names());
        let number = |number: Option<f32>| number.map_or("-".to_string(), |number| number.to_string());
        // A checkpoint may be older than a flag. A missing setting counts as "-", so "-" must mean
        // "not given".
        let flag = |given: bool| if given { "true" } else { "-" }.to_string();
        let list = |patterns: &[String]| match patterns {
            [] => "-".to_string(),
            patterns => patterns.join(","),
        };
        vec![
            ("--loss", loss),
            ("--output-name", self.loss.output_name.clone().unwrap_or("-".to_string())),
            ("--label-smoothing", number(self.loss.label_smoothing)),
            ("--class-axis", self.loss.class_axis.map_or("-".to_string(), |axis| axis.to_string())),
            ("--ignore-index", self.loss.ignore_index.map_or("-".to_string(), |label| label.to_string())),
            ("--temperature", number(self.loss.temperature)),
            ("--optimizer", optimizer),
            ("--lr", update.lr.to_string()),
            ("--momentum", number(update.momentum)),
            ("--nesterov", update.nesterov.to_string()),
            ("--weight-decay", number(update.weight_decay)),
            ("--schedule", update.schedule_in_words()),
            ("--batch", batch.to_string()),
            ("--accumulate", update.accumulate.to_string()),
            ("--clip-norm", number(update.clip_norm)),
            ("--train", weights.train.join(",")),
            ("--freeze", weights.freeze.join(",")),
            ("--no-decay", weights.no_decay.join(",")),
            ("--untie", list(&weights.untie)),
            ("--tie", list(&weights.tie)),
            ("--freeze-statistics", flag(weights.freeze_statistics)),
            ("--no-dropout", weights.no_dropout.to_string()),
            ("--seed", self.run.seed.to_string()),
            ("--no-shuffle", flag(self.run.no_shuffle)),
            ("--precision", name_of(self.run.precision)),
            ("--mixed-precision", self.run.mixed_precision.map_or("-".to_string(), name_of)),
            ("--loss-scale", self.run.loss_scale_in_words()),
            ("samples in --data", samples.to_string()),
        ]
    }
}

impl RunArgs {
    fn loss_scale_in_words(&self) -> String {
        match self.loss_scale {
            None => "-".to_string(),
            Some(LossScale::Constant(scale)) => scale.to_string(),
            Some(LossScale::Dynamic { .. }) => "dynamic".to_string(),
        }
    }

    fn recompute(&self) -> Result<Recompute> {
        let Some(config) = self.memory_opt_config.as_deref().filter(|config| !config.is_empty()) else {
            return Ok(Recompute::of_level(self.memory_opt_level)?);
        };
        if self.memory_opt_level != 0 {
            wrong_usage!(
                "level {} of memory optimization chooses subgraphs by itself: leave the level out, or --memory-opt-config",
                self.memory_opt_level
            );
        }
        // An entry contains colons. So may a path, but then the file exists.
        let is_inline = config.contains(':') && !Path::new(config).exists();
        let requests = if is_inline { PlanRequest::parse_list(config)? } else { PlanRequest::read(config)? };
        Ok(Recompute::Plans(requests))
    }
}

impl LossArgs {
    fn loss(&self) -> Result<Loss> {
        let classes = self.kind == LossKind::CrossEntropy;
        only_with("--label-smoothing", self.label_smoothing.is_some(), classes, "--loss cross-entropy")?;
        only_with("--ignore-index", self.ignore_index.is_some(), classes, "--loss cross-entropy")?;
        only_with("--class-axis", self.class_axis.is_some(), classes, "--loss cross-entropy")?;
        let teacher = self.kind == LossKind::Kl;
        only_with("--temperature", self.temperature.is_some(), teacher, "--loss kl")?;
        Ok(match self.kind {
            LossKind::Mse => Loss::Mse,
            LossKind::L1 => Loss::L1,
            LossKind::CrossEntropy => Loss::CrossEntropy {
                label_smoothing: self.label_smoothing.unwrap_or(0.0),
                ignore_index: self.ignore_index,
                class_axis: self.class_axis,
            },
            LossKind::Bce => Loss::BceWithLogits,
            LossKind::Kl => Loss::KlDivergence { temperature: self.temperature.unwrap_or(1.0) },
            LossKind::Output => Loss::Output,
        })
    }
}

impl UpdateArgs {
    fn optimizer(&self) -> Result<Optimizer> {
        let sgd = self.optimizer == OptimizerKind::Sgd;
        only_with("--momentum", self.momentum.is_some(), sgd, "--optimizer sgd")?;
        only_with("--nesterov", self.nesterov, sgd, "--optimizer sgd")?;
        let has_momentum = self.momentum.is_some_and(|momentum| momentum > 0.0);
        only_with("--nesterov", self.nesterov, has_momentum, "--momentum above 0")?;
        // These betas are the defaults of both PyTorch and Hugging Face.
        let (beta1, beta2, decay) = (0.9, 0.999, self.weight_decay.unwrap_or(0.0));
        Ok(match self.optimizer {
            OptimizerKind::Sgd => Optimizer::Sgd {
                momentum: self.momentum.unwrap_or(0.0),
                nesterov: self.nesterov,
                weight_decay: decay,
            },
            // Epsilon and the default decay are those of PyTorch, or of Hugging Face.
            OptimizerKind::Adam => adam(AdamForm::Adam, 1e-8, decay),
            OptimizerKind::Adamw => adam(AdamForm::Torch, 1e-8, self.weight_decay.unwrap_or(0.01)),
            OptimizerKind::AdamwHf => adam(AdamForm::HuggingFace, 1e-6, decay),
            OptimizerKind::Adamw8bit => {
                let weight_decay = self.weight_decay.unwrap_or(0.01);
                Optimizer::AdamW8bit { beta1, beta2, epsilon: 1e-8, weight_decay }
            }
            OptimizerKind::Lamb => Optimizer::Lamb { beta1, beta2, epsilon: 1e-6, weight_decay: decay },
            OptimizerKind::Adafactor => {
                // The exponent -0.8 and the clip threshold 1 are the values of the Adafactor paper.
                Optimizer::Adafactor { beta2_decay: -0.8, clip_threshold: 1.0, weight_decay: decay }
            }
        })
    }

    fn schedule(&self, total: u64) -> Result<Schedule> {
        let kind = self.schedule;
        let falls = kind == ScheduleKind::Step;
        let rises = matches!(kind, ScheduleKind::Linear | ScheduleKind::Cosine);
        only_with("--warmup", self.warmup.is_some(), rises, "--schedule linear or cosine")?;
        only_with("--step-every", self.step_every.is_some(), falls, "--schedule step")?;
        only_with("--step-factor", self.step_factor.is_some(), falls, "--schedule step")?;
        let warmup = self.warmup.unwrap_or(0);
        Ok(match kind {
            ScheduleKind::Constant => Schedule::Constant,
            ScheduleKind::Linear => Schedule::Linear { warmup, total },
            ScheduleKind::Cosine => Schedule::Cosine { warmup, total },
            ScheduleKind::Step => Schedule::Step {
                every: self.step_every.unwrap_or(0),
                factor: self.step_factor.unwrap_or(0.1),
            },
        })
    }

    /// Returns a number of updates that the schedule accepts if the real number is unknown.
    pub(super) fn warmup_at_least(&self) -> u64 {
        self.warmup.unwrap_or(0)
    }

    /// Returns the schedule as flags. If the rate decays over the whole training run, its length is
    /// included.
    fn schedule_in_words(&self) -> String {
        let warmup = self.warmup.unwrap_or(0);
        let name = name_of(self.schedule);
        match self.schedule {
            // This rate does not depend on the length, so a resumed run may ask for more epochs.
            ScheduleKind::Constant => name,
            ScheduleKind::Linear | ScheduleKind::Cosine => {
                format!("{name} --warmup {warmup} --epochs {}", self.epochs)
            }
            ScheduleKind::Step => format!(
                "{name} --step-every {} --step-factor {}",
                self.step_every.unwrap_or(0),
                self.step_factor.unwrap_or(0.1)
            ),
        }
    }
}

fn adam(form: AdamForm, epsilon: f32, weight_decay: f32) -> Optimizer {
    Optimizer::Adam { beta1: 0.9, beta2: 0.999, epsilon, weight_decay, correct_bias: true, form }
}

/// Returns the name of a choice on the command line.
fn name_of(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
}

/// Rejects a flag that would have no effect.
fn only_with(flag: &str, given: bool, applies: bool, with: &str) -> Result<()> {
    if given && !applies {
        wrong_usage!("{flag} goes with {with}; leave {flag} out, or add {with}");
    }
    Ok(())
}
