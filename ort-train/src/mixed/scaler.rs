//! Loss scaler: adapts the loss scale from update to update.

use serde::{Deserialize, Serialize};

use super::LossScale;

/// The current loss scale and the counters that change it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LossScaler {
    /// The factor on the loss.
    pub(crate) scale: f32,
    /// The number of updates in a row since the scale last changed.
    in_a_row: u32,
    /// The number of skipped updates.
    pub(crate) skipped: u64,
}

impl LossScaler {
    /// Starts at the initial scale.
    pub(crate) fn new(rule: LossScale) -> LossScaler {
        LossScaler { scale: rule.initial(), in_a_row: 0, skipped: 0 }
    }

    /// Adapts the scale after an update, or after one that was skipped because gradients were not
    /// finite.
    pub(crate) fn follow(&mut self, rule: LossScale, is_updated: bool) {
        self.skipped += u64::from(!is_updated);
        let LossScale::Dynamic { growth_factor, backoff_factor, growth_interval, .. } = rule else { return };
        let scale = match is_updated {
            false => self.scale * backoff_factor,
            true => {
                // A checkpoint may hold any count.
                self.in_a_row = self.in_a_row.saturating_add(1);
                if self.in_a_row < growth_interval {
                    return;
                }
                self.scale * growth_factor
            }
        };
        self.in_a_row = 0;
        // The update multiplies gradients by the reciprocal, so a subnormal or infinite one would
        // change them.
        if scale.is_normal() && (1.0 / scale).is_normal() {
            self.scale = scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected scales are those of PyTorch 2.4.1's `GradScaler` with the same parameters and
    /// overflows.
    #[test]
    fn as_grad_scaler_has_it() {
        let rule = LossScale::Dynamic {
            initial: 1024.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 3,
        };
        let updated = [true, true, false, true, true, true, false, false, true, true, true, true];
        let expected: [f32; 12] = [1024., 1024., 512., 512., 512., 1024., 512., 256., 256., 256., 512., 512.];
        let mut scaler = LossScaler::new(rule);
        for (is_updated, expected) in updated.into_iter().zip(expected) {
            scaler.follow(rule, is_updated);
            assert_eq!(scaler.scale, expected);
        }
        assert_eq!(scaler.skipped, 3);
    }

    #[test]
    fn it_stays_a_number() {
        let (rule, mut scaler) = (LossScale::dynamic(), LossScaler::new(LossScale::dynamic()));
        (0..400).for_each(|_| scaler.follow(rule, false));
        assert!(scaler.scale > 0.0 && (1.0 / scaler.scale).is_finite());
        let rule =
            LossScale::Dynamic { initial: 1.0, growth_factor: 4.0, backoff_factor: 0.5, growth_interval: 1 };
        (0..400).for_each(|_| scaler.follow(rule, true));
        assert!(scaler.scale.is_finite());
        scaler.in_a_row = u32::MAX;
        scaler.follow(rule, true);
        assert_eq!(scaler.in_a_row, 0);
    }
}
