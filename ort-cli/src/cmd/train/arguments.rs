//! What `ort train` is told, and what that means for the trainer.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use ort_runtime::train::{
    AdamForm, Loss, LossScale, MixedPrecision, Optimizer, PlanRequest, Recompute, Schedule, TrainingOptions,
};

use crate::args::{PrecisionArg, size, threads};
use crate::providers::ProviderArgs;

/// Trains a model.
#[derive(Args)]
pub(crate) struct TrainArgs {
    /// The model file, as it is for inference; training begins with its weights.
    pub(super) model: PathBuf,
    /// Refuse what ONNX does not allow but ONNX Runtime runs, instead of warning of it.
    #[arg(long)]
    pub(super) strict: bool,
    /// The samples: an array for each input of the model, by name, and `labels` or `target` for the
    /// loss. The first axis counts samples.
    #[arg(long, value_name = "FILE.npz", required_unless_present = "check")]
    pub(super) data: Option<PathBuf>,
    /// Samples that are not trained on: their loss is told after each epoch, with cross entropy
    /// also the accuracy.
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
    /// What becomes smaller.
    #[arg(long = "loss", value_enum, value_name = "LOSS", default_value_t = LossKind::CrossEntropy)]
    kind: LossKind,
    /// The model's output that the loss is of, or any value inside of the model [default: the first
    /// output].
    #[arg(long, value_name = "NAME")]
    output_name: Option<String>,
    /// With cross entropy: the share of the target that all classes have alike, 0 to below 1.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    label_smoothing: Option<f32>,
    /// With cross entropy: a label that does not count.
    #[arg(long, value_name = "LABEL", allow_negative_numbers = true)]
    ignore_index: Option<i64>,
    /// With cross entropy: the axis of the classes in the scores [default: 1; the last for scores
    /// of rank 3, as language models have them]. PyTorch's layout [N, C, L] is axis 1.
    #[arg(long, value_name = "AXIS", allow_negative_numbers = true)]
    pub(super) class_axis: Option<i64>,
    /// With kl: what the scores of both are divided by [default: 1].
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,
}

/// `--loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LossKind {
    /// The mean squared difference from `target`.
    Mse,
    /// The mean absolute difference from `target`.
    L1,
    /// Of scores (logits) with `labels`, the int64 numbers of classes.
    CrossEntropy,
    /// Binary cross entropy of scores (logits) with `target`, probabilities.
    Bce,
    /// The divergence from the distribution of a teacher's scores, `target`.
    Kl,
    /// The model's own output, one number.
    Output,
}

#[derive(Args)]
pub(super) struct UpdateArgs {
    /// How parameters follow their gradients.
    #[arg(long, value_enum, value_name = "OPTIMIZER", default_value_t = OptimizerKind::Adamw)]
    optimizer: OptimizerKind,
    /// The learning rate, which the schedule scales.
    #[arg(long, value_name = "X", default_value_t = 1e-3, allow_negative_numbers = true)]
    lr: f32,
    /// With sgd: the share of the last step that is taken again.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    momentum: Option<f32>,
    /// With sgd and a momentum: the gradient as if the step were taken already.
    #[arg(long)]
    nesterov: bool,
    /// The decay of weights [default: 0.01 for adamw and adamw-8bit, else 0].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    weight_decay: Option<f32>,
    /// The learning rate over the updates.
    #[arg(long, value_enum, value_name = "SCHEDULE", default_value_t = ScheduleKind::Constant)]
    schedule: ScheduleKind,
    /// With linear and cosine: the updates that the learning rate rises over [default: 0].
    #[arg(long, value_name = "N")]
    warmup: Option<u64>,
    /// With step: the updates between two falls.
    #[arg(long, value_name = "N", required_if_eq("schedule", "step"))]
    step_every: Option<u64>,
    /// With step: what the learning rate is multiplied by [default: 0.1].
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    step_factor: Option<f64>,
    /// How often all samples are gone through.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub(super) epochs: u64,
    /// The samples of a batch [default: 32, or the size that the model has].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) batch: Option<u32>,
    /// The batches of an update, whose gradients are averaged: N small batches take the memory of
    /// one.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) accumulate: u32,
    /// The largest norm of all gradients together; what is longer is scaled down.
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    clip_norm: Option<f32>,
}

/// `--optimizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OptimizerKind {
    /// Stochastic gradient descent.
    Sgd,
    /// Adam as PyTorch has it.
    Adam,
    /// AdamW as PyTorch has it.
    Adamw,
    /// AdamW as Hugging Face's transformers have it.
    AdamwHf,
    /// AdamW whose states take two bytes for each number instead of eight.
    #[value(name = "adamw-8bit")]
    Adamw8bit,
    /// LAMB, for very large batches.
    Lamb,
    /// Adafactor: hardly any states for matrices.
    Adafactor,
}

/// `--schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ScheduleKind {
    /// The same throughout.
    Constant,
    /// In a line down to 0.
    Linear,
    /// Half a cosine down to 0.
    Cosine,
    /// Times a factor after every so many updates.
    Step,
}

#[derive(Args)]
pub(super) struct WeightArgs {
    /// Weights that are trained, by name; `*` is any characters, `?` one [default: all floats of
    /// rank 1 or more but buffers and constants of exporters]. '*' trains those and scalars, too,
    /// but never constants that nodes give.
    #[arg(long, value_name = "PATTERN")]
    train: Vec<String>,
    /// Weights that stay as they are; they take no gradient and no state.
    #[arg(long, value_name = "PATTERN")]
    freeze: Vec<String>,
    /// Weights without weight decay, as biases and scales often are.
    #[arg(long, value_name = "PATTERN")]
    no_decay: Vec<String>,
    /// Weights that several nodes read, each of which then trains a copy of its own. Exporters
    /// merge initializers of equal numbers, such as the scales of fresh normalizations.
    #[arg(long, value_name = "PATTERN")]
    untie: Vec<String>,
    /// Weights of equal numbers that train as one, a transposed copy included: exporters fold the
    /// transpose of a tied embedding.
    #[arg(long, value_name = "PATTERN")]
    tie: Vec<String>,
    /// Batch normalizations keep their running statistics and normalize by them, as in evaluation:
    /// for fine-tuning and for small batches.
    #[arg(long)]
    freeze_statistics: bool,
    /// Dropout nodes drop nothing.
    #[arg(long)]
    no_dropout: bool,
}

#[derive(Args)]
pub(super) struct RunArgs {
    /// Where random numbers begin: the order of samples, and what drops.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
    /// Take the samples in their order in each epoch, instead of in one that follows from --seed.
    #[arg(long)]
    pub(super) no_shuffle: bool,
    /// Threads inside one operator [default: the cores this process may use].
    #[arg(long, value_name = "N", value_parser = threads)]
    threads: Option<usize>,
    /// How the CPU provider multiplies float matrices; bf16 needs a CPU with AVX512-BF16.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Fp32)]
    precision: PrecisionArg,
    /// Forward and backward passes partly in 16 bits, from weights and states in float32 [default:
    /// all in float32].
    #[arg(long, value_enum, value_name = "PRECISION")]
    mixed_precision: Option<MixedPrecisionArg>,
    /// What the loss is multiplied by before it is differentiated: `dynamic`, or a number [default:
    /// dynamic with fp16].
    #[arg(long, value_name = "dynamic|NUMBER", value_parser = loss_scale, requires = "mixed_precision")]
    loss_scale: Option<LossScale>,
    /// A hard bound on parameters, states, gradients and activations together: bytes, or with KiB,
    /// MiB, GiB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(super) memory_limit: Option<usize>,
    /// What is computed again in the backward pass instead of being kept for it: 0 what
    /// --memory-limit asks for, 1 all between layers, 2 whatever makes the peak the lowest. Results
    /// are the same, bit for bit.
    #[arg(long, value_name = "0|1|2", env = "ORTMODULE_MEMORY_OPT_LEVEL")]
    #[arg(default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2))]
    memory_opt_level: u8,
    /// Subgraphs that are computed again, by name: a file with a JSON array such as ["Gelu+:1:-1"],
    /// or the entries themselves with commas between them; -v prints the names, -vv or
    /// ORTMODULE_LOG_LEVEL=DEVINFO also what is kept, node by node.
    #[arg(long, value_name = "FILE.json|ENTRIES", env = "ORTMODULE_MEMORY_OPT_CONFIG")]
    pub(super) memory_opt_config: Option<String>,
    /// Keep all that the training needs to go on in this folder, after each epoch.
    #[arg(long, value_name = "DIR")]
    pub(super) checkpoint: Option<PathBuf>,
    /// Also after every N updates.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) checkpoint_every: Option<u64>,
    /// Go on from the checkpoint, in the middle of an epoch where it is in one.
    #[arg(long, requires = "checkpoint")]
    pub(super) resume: bool,
    /// End after so many updates, with a checkpoint; `--resume` goes on.
    #[arg(long, value_name = "N", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) stop_after: Option<u64>,
}

/// `--mixed-precision`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MixedPrecisionArg {
    /// bfloat16.
    Bf16,
    /// float16, with a loss scale.
    Fp16,
}

/// `--loss-scale`.
fn loss_scale(text: &str) -> Result<LossScale> {
    if text == "dynamic" {
        return Ok(LossScale::dynamic());
    }
    let number = text.parse().ok().filter(|number: &f32| number.is_normal() && *number > 0.0);
    Ok(LossScale::Constant(number.context("expected dynamic, or a number above 0 such as 1024")?))
}

#[derive(Args)]
pub(super) struct ResultArgs {
    /// Write the trained model, for inference.
    #[arg(long, value_name = "FILE.onnx")]
    pub(super) save: Option<PathBuf>,
    /// Draw the loss and the resident memory over the batches.
    #[arg(long, value_name = "FILE.svg")]
    pub(super) plot: Option<PathBuf>,
    /// Only say what in the model stands in the way of training.
    #[arg(long, conflicts_with_all = ["data", "validation", "save", "plot", "checkpoint"])]
    pub(super) check: bool,
    /// Tell the time per operator and of the slowest N nodes of a batch, as a mean over all but the
    /// first.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "10", conflicts_with_all = ["json", "check", "validation"])]
    pub(super) profile: Option<usize>,
    /// One JSON object.
    #[arg(long)]
    pub(super) json: bool,
}

impl TrainArgs {
    /// What the training is to be; the schedule ends after `updates`.
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

    /// The samples.
    pub(super) fn data(&self) -> Result<&Path> {
        self.data.as_deref().context("--data FILE.npz is missing")
    }

    /// The label that does not count.
    pub(super) fn ignored_label(&self) -> Option<i64> {
        self.loss.ignore_index
    }

    /// What the loss and the optimizer are called.
    pub(super) fn names(&self) -> (String, String) {
        (name_of(self.loss.kind), name_of(self.update.optimizer))
    }

    /// Refuses places for results that cannot be written to, before any work is done.
    pub(super) fn check_places(&self) -> Result<()> {
        for (flag, path) in [("--save", &self.results.save), ("--plot", &self.results.plot)] {
            let Some(path) = path else { continue };
            let folder =
                path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            ensure!(folder.is_dir(), "{flag} {}: there is no folder {}", path.display(), folder.display());
            ensure!(!path.is_dir(), "{flag} {}: it is a folder; name a file", path.display());
        }
        Ok(())
    }

    /// All that a training that goes on must have alike, as flags and what they say.
    pub(super) fn settings(&self, batch: usize, samples: usize) -> Vec<(&'static str, String)> {
        let (update, weights, (loss, optimizer)) = (&self.update, &self.weights, self.names());
        let number = |number: Option<f32>| number.map_or("-".to_string(), |number| number.to_string());
        // "-" is what a checkpoint from before a flag existed counts as.
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
        ensure!(
            self.memory_opt_level == 0,
            "level {} of memory optimization chooses subgraphs by itself: leave the level out, or --memory-opt-config",
            self.memory_opt_level
        );
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
        let (beta1, beta2, decay) = (0.9, 0.999, self.weight_decay.unwrap_or(0.0));
        Ok(match self.optimizer {
            OptimizerKind::Sgd => Optimizer::Sgd {
                momentum: self.momentum.unwrap_or(0.0),
                nesterov: self.nesterov,
                weight_decay: decay,
            },
            OptimizerKind::Adam => adam(AdamForm::Adam, 1e-8, decay),
            OptimizerKind::Adamw => adam(AdamForm::Torch, 1e-8, self.weight_decay.unwrap_or(0.01)),
            OptimizerKind::AdamwHf => adam(AdamForm::HuggingFace, 1e-6, decay),
            OptimizerKind::Adamw8bit => {
                let weight_decay = self.weight_decay.unwrap_or(0.01);
                Optimizer::AdamW8bit { beta1, beta2, epsilon: 1e-8, weight_decay }
            }
            OptimizerKind::Lamb => Optimizer::Lamb { beta1, beta2, epsilon: 1e-6, weight_decay: decay },
            OptimizerKind::Adafactor => {
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

    /// A number of updates that the schedule can have, where it is not known how many there will
    /// be.
    pub(super) fn warmup_at_least(&self) -> u64 {
        self.warmup.unwrap_or(0)
    }

    /// What the learning rates follow from: of those that fall over the whole training also how
    /// long it is.
    fn schedule_in_words(&self) -> String {
        let warmup = self.warmup.unwrap_or(0);
        let name = name_of(self.schedule);
        match self.schedule {
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

/// A choice as it is typed.
fn name_of(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_string())
}

/// Refuses a flag that would have no effect.
fn only_with(flag: &str, given: bool, applies: bool, with: &str) -> Result<()> {
    if given && !applies {
        bail!("{flag} goes with {with}; leave it out");
    }
    Ok(())
}
