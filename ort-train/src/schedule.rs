//! Learning rate schedules.

use ort_core::{Result, ensure};
use serde::{Deserialize, Serialize};

/// A learning rate schedule: a factor on the base learning rate for each update. The shapes are
/// those of Hugging Face's `transformers` and of PyTorch's `StepLR`. Updates count from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Schedule {
    /// A constant rate.
    #[default]
    Constant,
    /// Linear warmup from 0 over `warmup` updates, then linear decay to 0 at `total`.
    Linear {
        /// The number of warmup updates.
        warmup: u64,
        /// The number of updates in the whole training run.
        total: u64,
    },
    /// Linear warmup from 0 over `warmup` updates, then half a cosine down to 0 at `total`.
    Cosine {
        /// The number of warmup updates.
        warmup: u64,
        /// The number of updates in the whole training run.
        total: u64,
    },
    /// Step decay: the rate is multiplied by `factor` after every `every` updates.
    Step {
        /// The number of updates between two decays.
        every: u64,
        /// The factor of each decay.
        factor: f64,
    },
}

impl Schedule {
    /// Returns the factor at an update.
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
                // This saturates, so the rate stays at 0 past `total`.
                total.saturating_sub(update) as f64 / total.saturating_sub(warmup).max(1) as f64
            }
            Schedule::Cosine { warmup, total } => {
                // An earlier arm took the updates of the warmup, so this does not wrap.
                let done = (update - warmup) as f64 / total.saturating_sub(warmup).max(1) as f64;
                // Past `total` the cosine would rise again, so the rate stays at 0 from there on.
                let done = done.min(1.0);
                (0.5 * (1.0 + (std::f64::consts::PI * done).cos())).max(0.0)
            }
            Schedule::Step { every, factor } => factor.powf((update / every.max(1)) as f64),
        }
    }

    /// Checks that warmup ends within the training run and that step decay is well defined.
    pub(crate) fn check(&self) -> Result<()> {
        match *self {
            Schedule::Linear { warmup, total } | Schedule::Cosine { warmup, total } => ensure!(
                warmup <= total,
                InvalidArgument,
                help = "train longer, or shorten the warmup",
                "the warmup has {warmup} updates, but the training run has {total}"
            ),
            Schedule::Step { every, factor } => ensure!(
                every > 0 && factor.is_finite() && factor >= 0.0,
                InvalidArgument,
                "the learning rate is multiplied by {factor} every {every} updates, expected a factor of 0 or more and 1 or more updates"
            ),
            Schedule::Constant => {}
        }
        Ok(())
    }
}
