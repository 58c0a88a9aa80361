//! Progress bar on standard error during an epoch, if that is a terminal.

use std::io::IsTerminal;
use std::time::Instant;

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use ort_runtime::train::Trainer;

use super::data::Pace;
use crate::args::human_bytes;
use crate::output::say;

pub(super) struct Progress {
    bar: Option<ProgressBar>,
    start: Instant,
    samples: std::cell::Cell<usize>,
}

impl Progress {
    /// Creates the bar of an epoch. There is none without a terminal or with `--quiet`.
    pub(super) fn new(epoch: u64, pace: Pace) -> Progress {
        let is_seen = std::io::stderr().is_terminal() && tracing::enabled!(tracing::Level::WARN);
        let bar = is_seen.then(|| {
            let bar = ProgressBar::new(pace.batches() as u64);
            if let Ok(style) =
                ProgressStyle::with_template("{prefix} {bar:24} {pos}/{len}  {msg}  {eta} left")
            {
                bar.set_style(style);
            }
            bar.set_prefix(format!("epoch {epoch}/{}", pace.epochs));
            bar
        });
        Progress { bar, start: Instant::now(), samples: std::cell::Cell::new(0) }
    }

    /// Advances the bar by one batch.
    pub(super) fn step(&self, trainer: &Trainer, loss: f32, samples: usize, resident: Option<u64>) {
        let Some(bar) = &self.bar else { return };
        self.samples.set(self.samples.get() + samples);
        let rate = self.samples.get() as f64 / self.start.elapsed().as_secs_f64().max(1e-9);
        let resident =
            resident.map_or_else(String::new, |bytes| format!("  {}", human_bytes(bytes as usize)));
        let rates = format!("lr {:.2e}  {rate:.0} samples/s{resident}", trainer.learning_rate());
        let skipped = match trainer.loss_scale() {
            Some(scale) => format!("  scale {scale}, {} skipped", trainer.skipped()),
            None => String::new(),
        };
        bar.set_message(format!("loss {loss:.4}  {rates}{skipped}"));
        bar.inc(1);
    }

    /// Prints a line of results above the bar.
    pub(super) fn line(&self, text: &str) -> Result<()> {
        match &self.bar {
            // Without this, the line would be drawn over by the next refresh of the bar.
            Some(bar) => bar.suspend(|| say!("{text}")),
            None => say!("{text}"),
        }
    }

    /// Removes the bar.
    pub(super) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
