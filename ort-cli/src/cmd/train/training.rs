//! Training loop: epochs, batches, evaluation and checkpoints.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ort_runtime::files::NewFile;
use ort_runtime::train::Trainer;
use ort_runtime::{Profile, Value};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::arguments::TrainArgs;
use super::data::{DataSet, Pace, first_wrong, order};
use super::evaluation::{Score, evaluate, is_all_ignored};
use super::progress::Progress;
use crate::resident;

/// The file that marks a folder as a checkpoint.
const MANIFEST: &str = "training.json";

/// Checks that a checkpoint can be written: creates the folder and a temporary file in it. An
/// obstacle should show before an epoch is spent.
fn can_be_written(folder: &Path) -> Result<()> {
    // The temporary file is dropped at once, which deletes it.
    let made = std::fs::create_dir_all(folder).and_then(|()| NewFile::create_in(folder, MANIFEST));
    made.map(drop).with_context(|| format!("checkpoint {} cannot be written", folder.display()))
}

/// The position of a training run in its data, as stored in a checkpoint.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Position {
    /// The epochs completed.
    epoch: u64,
    /// The batches completed in the current epoch.
    batch: usize,
    /// The sum of the losses of the epoch's samples so far, and their number.
    loss_sum: f64,
    samples: usize,
}

/// The results of an epoch.
#[derive(Serialize)]
pub(super) struct Epoch {
    /// The number of the epoch, from 1.
    pub(super) epoch: u64,
    /// The mean loss of its samples, each computed with the parameters of its step.
    pub(super) loss: f64,
    #[serde(flatten)]
    pub(super) validation: Score,
    pub(super) seconds: f64,
    /// The batches that this process had run by the end of the epoch.
    pub(super) batches: usize,
}

/// What this process did, batch by batch.
#[derive(Default)]
pub(super) struct History {
    pub(super) losses: Vec<f32>,
    pub(super) times: Vec<Duration>,
    pub(super) samples: usize,
    /// The resident memory after each batch.
    pub(super) resident: Vec<Option<u64>>,
    pub(super) epochs: Vec<Epoch>,
}

/// The number of skipped updates in a row at which we give up. By then, dynamic loss scaling has
/// halved the scale 32 times.
const MOST_SKIPPED: u64 = 32;

/// Returns what may have made the loss infinite or NaN, and what to try.
fn advice(updates: u64, batch: &[(&str, Value)]) -> Result<String> {
    for (name, value) in batch {
        // `DataSet::check_numbers` has rejected NaN and positive infinity, so this is negative
        // infinity.
        if let Some((_, number)) = first_wrong(value.tensor()?, f64::is_finite)? {
            return Ok(format!(
                "array '{name}' has {number} in this batch; remove such samples, or if '{name}' is a mask, let it \
                 leave at least one place of each row"
            ));
        }
    }
    Ok(match updates {
        // With the initial weights, the learning rate cannot be the cause.
        0 => "no update was made yet, so that it is not the learning rate: look for a division by 0, a logarithm \
              of 0, or an exponential of large numbers in the model, and scale the data as the model expects it"
            .to_string(),
        _ => "lower --lr, or clip gradients with --clip-norm 1".to_string(),
    })
}

/// A training run in progress.
pub(super) struct Training<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) trainer: Trainer,
    pub(super) data: &'a DataSet,
    pub(super) validation: Option<&'a DataSet>,
    pub(super) pace: Pace,
    pub(super) position: Position,
    pub(super) history: History,
    /// The updates before this process started.
    pub(super) updates_before: u64,
    /// The updates skipped since the last one that was applied.
    pub(super) skipped_in_a_row: u64,
    /// The profile of all batches but the first, if requested.
    pub(super) profile: Option<Arc<Profile>>,
}

impl Training<'_> {
    /// Resumes from the checkpoint, or makes sure that none is overwritten.
    pub(super) fn begin(&mut self) -> Result<()> {
        let args = self.args;
        let Some(folder) = &args.run.checkpoint else { return Ok(()) };
        let has_one = folder.join(MANIFEST).exists();
        if !self.args.run.resume {
            if has_one {
                bail!(
                    "{} holds a checkpoint; go on from it with --resume, or name another folder",
                    folder.display()
                );
            }
            return can_be_written(folder);
        }
        if !has_one {
            bail!("{} holds no checkpoint; leave --resume out to start", folder.display());
        }
        can_be_written(folder)?;
        let mut properties = self.trainer.load_checkpoint(folder)?;
        let damaged = || format!("checkpoint {} was not made by `ort train`", folder.display());
        let settings = properties.remove("settings").unwrap_or_default();
        for (flag, now) in self.settings() {
            // A flag that is newer than the checkpoint has its default there.
            let then = settings.get(flag).map_or(Some("-"), Json::as_str).with_context(damaged)?;
            if then != now {
                bail!(
                    "checkpoint {}: it was trained with {flag} {then}, not {now}; give the same value, or start in another folder",
                    folder.display()
                );
            }
        }
        let position: Position = serde_json::from_value(Json::Object(properties)).with_context(damaged)?;
        let Position { batch, loss_sum, samples, .. } = position;
        // The checkpoint is a file that anyone may have edited.
        let is_in_data = batch <= self.pace.batches() && samples <= self.pace.rows && loss_sum.is_finite();
        ensure!(is_in_data, "{}: its position is outside of the data", damaged());
        self.position = position;
        self.updates_before = self.trainer.updates();
        Ok(())
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        self.args.settings(self.pace.batch, self.pace.rows)
    }

    /// Trains to the end, or until `--stop-after`.
    pub(super) fn run(&mut self) -> Result<()> {
        while self.position.epoch < self.pace.epochs {
            let progress = Progress::new(self.position.epoch + 1, self.pace);
            let start = Instant::now();
            if !self.epoch(&progress)? {
                progress.clear();
                return self.save();
            }
            self.end_epoch(&progress, start.elapsed())?;
        }
        Ok(())
    }

    /// Trains the rest of an epoch. Returns false if it stopped before the end.
    fn epoch(&mut self, progress: &Progress) -> Result<bool> {
        let order = match self.args.run.no_shuffle {
            true => (0..self.pace.rows).collect(),
            false => order(self.pace.rows, self.trainer.options().seed, self.position.epoch),
        };
        let batches = self.pace.batches();
        for (index, rows) in order.chunks(self.pace.batch).enumerate().take(batches) {
            // Skip the batches that were done before the checkpoint.
            if index < self.position.batch {
                continue;
            }
            if self.is_enough() {
                return Ok(false);
            }
            let before = self.trainer.updates();
            self.step(rows, index + 1 == batches, progress)?;
            self.position.batch = index + 1;
            // Ask only after an update: with accumulation, the count stays the same for several
            // batches.
            if self.trainer.updates() > before && self.is_due() {
                self.save()?;
            }
        }
        Ok(true)
    }

    /// Trains on one batch. The last batch of an epoch applies whatever gradients are pending.
    fn step(&mut self, rows: &[usize], is_last: bool, progress: &Progress) -> Result<()> {
        let batch = self.data.batch(rows)?;
        if is_all_ignored(&batch, self.args.ignored_label())? {
            self.warn_of_ignored();
            // Gradients of earlier batches must not leak into the next epoch.
            if is_last && self.trainer.pending() > 0 {
                self.trainer.apply()?;
            }
            return Ok(());
        }
        let (updates, skipped) = (self.trainer.updates(), self.trainer.skipped());
        let start = Instant::now();
        let loss = self.trainer.train_step(&batch)?;
        if is_last && self.trainer.pending() > 0 {
            self.trainer.apply()?;
        }
        let time = start.elapsed();
        self.check_progress(loss, updates, skipped, &batch)?;
        // A batch that overflows under a loss scale is not part of the epoch's mean.
        if loss.is_finite() {
            self.position.loss_sum += f64::from(loss) * rows.len() as f64;
            self.position.samples += rows.len();
        }
        let resident = resident::measure().now;
        let history = &mut self.history;
        history.losses.push(loss);
        history.times.push(time);
        history.samples += rows.len();
        history.resident.push(resident);
        // The profile starts after the first batch, which warms up.
        if history.losses.len() == 1 {
            self.trainer.set_profile(self.profile.clone());
        }
        progress.step(&self.trainer, loss, rows.len(), resident);
        Ok(())
    }

    fn warn_of_ignored(&self) {
        let Position { epoch, batch, .. } = self.position;
        tracing::warn!(
            "skipping batch {} of epoch {}: --ignore-index leaves out all of its labels",
            batch + 1,
            epoch + 1
        );
    }

    /// Fails if training makes no progress any more. `updates` and `skipped` are the counts before
    /// this batch.
    fn check_progress(
        &mut self,
        loss: f32,
        updates: u64,
        skipped: u64,
        batch: &[(&str, Value)],
    ) -> Result<()> {
        if self.trainer.updates() > updates {
            self.skipped_in_a_row = 0;
        }
        self.skipped_in_a_row += self.trainer.skipped() - skipped;
        let place = format!("in batch {} of epoch {}", self.position.batch + 1, self.position.epoch + 1);
        // With a loss scale, the trainer skips updates whose gradients are not finite.
        if !loss.is_finite() && self.trainer.loss_scale().is_none() {
            let before = match self.history.losses.last() {
                Some(last) => format!(", {last} in the batch before"),
                None => String::new(),
            };
            bail!("the loss is {loss} {place}, after {updates} updates{before}: {}", advice(updates, batch)?);
        }
        if self.skipped_in_a_row >= MOST_SKIPPED {
            bail!(
                "{} updates in a row were skipped, as gradients were not finite; the loss is {loss} {place}, its scale {}: lower --lr or --loss-scale, or take --mixed-precision bf16",
                self.skipped_in_a_row,
                self.trainer.loss_scale().unwrap_or(1.0)
            );
        }
        Ok(())
    }

    fn end_epoch(&mut self, progress: &Progress, time: Duration) -> Result<()> {
        let Position { epoch, loss_sum, samples, .. } = self.position;
        let validation = match self.validation {
            Some(data) => evaluate(&mut self.trainer, data, self.pace, self.args.ignored_label())?,
            None => Score::default(),
        };
        let epoch = Epoch {
            epoch: epoch + 1,
            loss: loss_sum / samples.max(1) as f64,
            validation,
            seconds: time.as_secs_f64(),
            batches: self.history.losses.len(),
        };
        if !self.args.results.json {
            progress.line(&of_epoch(&epoch, self.pace.epochs))?;
        }
        progress.clear();
        // The checkpoint continues at the start of the next epoch.
        self.position = Position { epoch: epoch.epoch, ..Position::default() };
        self.history.epochs.push(epoch);
        self.save()
    }

    /// Returns whether this process has made the updates of `--stop-after`.
    fn is_enough(&self) -> bool {
        // A resumed run counts from its own start, so the same command can be repeated.
        let made = self.trainer.updates().saturating_sub(self.updates_before);
        self.args.run.stop_after.is_some_and(|most| made >= most)
    }

    /// Returns whether `--checkpoint-every` asks for a checkpoint after this update.
    fn is_due(&self) -> bool {
        self.args.run.checkpoint_every.is_some_and(|every| self.trainer.updates().is_multiple_of(every))
    }

    /// Writes a checkpoint if `--checkpoint` names a folder.
    fn save(&mut self) -> Result<()> {
        let args = self.args;
        let Some(folder) = &args.run.checkpoint else { return Ok(()) };
        let Json::Object(mut properties) = serde_json::to_value(self.position)? else {
            bail!("the position is not a JSON object");
        };
        let settings = self.settings().into_iter().map(|(flag, said)| (flag.to_string(), said.into()));
        properties.insert("settings".to_string(), Json::Object(settings.collect::<Map<String, Json>>()));
        Ok(self.trainer.save_checkpoint(folder, &properties)?)
    }
}

/// Formats a loss, with an exponent if it is far from 1.
pub(super) fn short(number: f64) -> String {
    let is_near = number == 0.0 || (1e-4..1e5).contains(&number.abs());
    if is_near { format!("{number:.5}") } else { format!("{number:.4e}") }
}

/// Formats the line of an epoch.
fn of_epoch(epoch: &Epoch, epochs: u64) -> String {
    let width = epochs.to_string().len();
    let mut line = format!("epoch {:width$}/{epochs}  loss {}", epoch.epoch, short(epoch.loss));
    if let Some(loss) = epoch.validation.loss {
        line += &format!("  validation {}", short(loss));
    }
    if let Some(accuracy) = epoch.validation.accuracy {
        line += &format!("  accuracy {:.2} %", accuracy * 100.0);
    }
    line + &format!("  {:.1} s", epoch.seconds)
}
