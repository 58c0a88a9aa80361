//! The training itself: epochs of batches, evaluations and checkpoints.

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

/// The file that makes a folder a checkpoint.
const MANIFEST: &str = "training.json";

/// Makes the folder, and a file in it that is dropped: what is in the way is to be seen before an
/// epoch is spent.
fn can_be_written(folder: &Path) -> Result<()> {
    let made = std::fs::create_dir_all(folder).and_then(|()| NewFile::create_in(folder, MANIFEST));
    made.map(drop).with_context(|| format!("checkpoint {} cannot be written", folder.display()))
}

/// Where a training is in its data, as it is kept in a checkpoint.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Position {
    /// Epochs that are done.
    epoch: u64,
    /// Batches of the next one that are done.
    batch: usize,
    /// The sum of losses of its samples so far, and how many those are.
    loss_sum: f64,
    samples: usize,
}

/// What an epoch came to.
#[derive(Serialize)]
pub(super) struct Epoch {
    /// From 1.
    pub(super) epoch: u64,
    /// The mean loss of its samples, each with the parameters as they were then.
    pub(super) loss: f64,
    #[serde(flatten)]
    pub(super) validation: Score,
    pub(super) seconds: f64,
    /// Batches that this call had run by its end.
    pub(super) batches: usize,
}

/// What this call did, batch by batch.
#[derive(Default)]
pub(super) struct History {
    pub(super) losses: Vec<f32>,
    pub(super) times: Vec<Duration>,
    pub(super) samples: usize,
    /// What of the process was resident after each batch.
    pub(super) resident: Vec<Option<u64>>,
    pub(super) epochs: Vec<Epoch>,
}

/// Updates in a row that are left out until nothing is to be hoped for: a loss scale has fallen by
/// 2^32 then.
const MOST_SKIPPED: u64 = 32;

/// What may have made a loss infinite or NaN, and what to try.
fn advice(updates: u64, batch: &[(&str, Value)]) -> Result<String> {
    for (name, value) in batch {
        // NaN and positive infinity were refused before the training.
        if let Some((_, number)) = first_wrong(value.tensor()?, f64::is_finite)? {
            return Ok(format!(
                "array '{name}' has {number} in this batch; remove such samples, or if '{name}' is a mask, let it \
                 leave at least one place of each row"
            ));
        }
    }
    Ok(match updates {
        0 => "no update was made yet, so that it is not the learning rate: look for a division by 0, a logarithm \
              of 0, or an exponential of large numbers in the model, and scale the data as the model expects it"
            .to_string(),
        _ => "lower --lr, or clip gradients with --clip-norm 1".to_string(),
    })
}

/// A training on its way.
pub(super) struct Training<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) trainer: Trainer,
    pub(super) data: &'a DataSet,
    pub(super) validation: Option<&'a DataSet>,
    pub(super) pace: Pace,
    pub(super) position: Position,
    pub(super) history: History,
    /// Updates before this call.
    pub(super) updates_before: u64,
    /// Updates that were left out since the last that was made.
    pub(super) skipped_in_a_row: u64,
    /// Times of the nodes of all batches but the first, where they are asked for.
    pub(super) profile: Option<Arc<Profile>>,
}

impl Training<'_> {
    /// Goes on from the checkpoint, or sees to it that none is overwritten.
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
            bail!("{} holds no checkpoint; leave --resume out to begin", folder.display());
        }
        can_be_written(folder)?;
        let mut properties = self.trainer.load_checkpoint(folder)?;
        let damaged = || format!("checkpoint {} was not made by `ort train`", folder.display());
        let settings = properties.remove("settings").unwrap_or_default();
        for (flag, now) in self.settings() {
            // What flags are for that were not there yet, is as it is without them.
            let then = settings.get(flag).map_or(Some("-"), Json::as_str).with_context(damaged)?;
            if then != now {
                bail!(
                    "checkpoint {}: it is of a training with {flag} {then}, not {now}; give the same, or begin anew in another folder",
                    folder.display()
                );
            }
        }
        let position: Position = serde_json::from_value(Json::Object(properties)).with_context(damaged)?;
        let Position { batch, loss_sum, samples, .. } = position;
        let is_in_data = batch <= self.pace.batches() && samples <= self.pace.rows && loss_sum.is_finite();
        ensure!(is_in_data, "{}: its place in the data is not in it", damaged());
        self.position = position;
        self.updates_before = self.trainer.updates();
        Ok(())
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        self.args.settings(self.pace.batch, self.pace.rows)
    }

    /// Trains to the end, or as long as is asked for.
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

    /// The rest of an epoch; false where the training is to stop before its end.
    fn epoch(&mut self, progress: &Progress) -> Result<bool> {
        let order = match self.args.run.no_shuffle {
            true => (0..self.pace.rows).collect(),
            false => order(self.pace.rows, self.trainer.options().seed, self.position.epoch),
        };
        let batches = self.pace.batches();
        for (index, rows) in order.chunks(self.pace.batch).enumerate().take(batches) {
            if index < self.position.batch {
                continue;
            }
            if self.is_enough() {
                return Ok(false);
            }
            let before = self.trainer.updates();
            self.step(rows, index + 1 == batches, progress)?;
            self.position.batch = index + 1;
            if self.trainer.updates() > before && self.is_due() {
                self.save()?;
            }
        }
        Ok(true)
    }

    /// One batch; the last of an epoch updates whatever gradients there are.
    fn step(&mut self, rows: &[usize], is_last: bool, progress: &Progress) -> Result<()> {
        let batch = self.data.batch(rows)?;
        if is_all_ignored(&batch, self.args.ignored_label())? {
            self.warn_of_ignored();
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
        if history.losses.len() == 1 {
            self.trainer.set_profile(self.profile.clone());
        }
        progress.step(&self.trainer, loss, rows.len(), resident);
        Ok(())
    }

    fn warn_of_ignored(&self) {
        let Position { epoch, batch, .. } = self.position;
        tracing::warn!("batch {} of epoch {} is left out: none of its labels counts", batch + 1, epoch + 1);
    }

    /// Refuses to go on where nothing is learned any more; `updates` and `skipped` are those before
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
        // With a loss scale gradients that are not finite are left out.
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
            progress.line(&super::report::of_epoch(&epoch, self.pace.epochs))?;
        }
        progress.clear();
        self.position = Position { epoch: epoch.epoch, ..Position::default() };
        self.history.epochs.push(epoch);
        self.save()
    }

    /// Whether this call has made the updates that it may.
    fn is_enough(&self) -> bool {
        let made = self.trainer.updates().saturating_sub(self.updates_before);
        self.args.run.stop_after.is_some_and(|most| made >= most)
    }

    /// Whether a checkpoint is to be written after this update.
    fn is_due(&self) -> bool {
        self.args.run.checkpoint_every.is_some_and(|every| self.trainer.updates().is_multiple_of(every))
    }

    /// Writes a checkpoint, where there is to be one.
    fn save(&mut self) -> Result<()> {
        let args = self.args;
        let Some(folder) = &args.run.checkpoint else { return Ok(()) };
        let Json::Object(mut properties) = serde_json::to_value(self.position)? else {
            bail!("the position is no object");
        };
        let settings = self.settings().into_iter().map(|(flag, said)| (flag.to_string(), said.into()));
        properties.insert("settings".to_string(), Json::Object(settings.collect::<Map<String, Json>>()));
        Ok(self.trainer.save_checkpoint(folder, &properties)?)
    }
}
