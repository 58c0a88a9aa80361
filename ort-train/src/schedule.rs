//! Learning rates over the updates of a training.

use ort_core::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The learning rate of each update as a share of the optimizer's own, as the schedules of Hugging
/// Face's `transformers` and PyTorch's `StepLR` have it. Updates count from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Schedule {
    /// The same throughout.
    #[default]
    Constant,
    /// Up from 0 over `warmup` updates, then in a line down to 0 at `total`.
    Linear {
        /// The updates that it rises over.
        warmup: u64,
        /// The updates of the whole training.
        total: u64,
    },
    /// Up from 0 over `warmup` updates, then half a cosine down to 0 at `total`.
    Cosine {
        /// The updates that it rises over.
        warmup: u64,
        /// The updates of the whole training.
        total: u64,
    },
    /// Times `factor` after every `every` updates.
    Step {
        /// The updates between two falls.
        every: u64,
        /// What it is multiplied by.
        factor: f64,
    },
}

impl Schedule {
    /// The share at an update.
    ///
    /// ```
    /// use ort_train::Schedule;
    ///
    /// let schedule = Schedule::Linear { warmup: 2, total: 6 };
    /// let shares: Vec<f64> = (0..7).map(|update| schedule.factor(update)).collect();
    /// assert_eq!(shares, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]);
    /// ```
    pub fn factor(&self, update: u64) -> f64 {
        let rise = |warmup: u64| update as f64 / warmup.max(1) as f64;
        match *self {
            Schedule::Constant => 1.0,
            Schedule::Linear { warmup, .. } | Schedule::Cosine { warmup, .. } if update < warmup => {
                rise(warmup)
            }
            Schedule::Linear { warmup, total } => {
                total.saturating_sub(update) as f64 / total.saturating_sub(warmup).max(1) as f64
            }
            Schedule::Cosine { warmup, total } => {
                let done = (update - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                let done = done.min(1.0);
                (0.5 * (1.0 + (std::f64::consts::PI * done).cos())).max(0.0)
            }
            Schedule::Step { every, factor } => factor.powf((update / every.max(1)) as f64),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        match *self {
            Schedule::Linear { warmup, total } | Schedule::Cosine { warmup, total } => ensure!(
                warmup <= total,
                InvalidArgument,
                help = "make the training longer, or the rise shorter",
                "a rise over {warmup} of {total} updates"
            ),
            Schedule::Step { every, factor } => ensure!(
                every > 0 && factor.is_finite() && factor >= 0.0,
                InvalidArgument,
                "a learning rate times {factor} after every {every} updates"
            ),
            Schedule::Constant => {}
        }
        Ok(())
    }
}
