//! The loss scale from update to update.

use serde::{Deserialize, Serialize};

use super::LossScale;

/// A loss scale and what its changes follow from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LossScaler {
    /// What the loss is multiplied by.
    pub(crate) scale: f32,
    /// Updates in a row since the scale changed last.
    in_a_row: u32,
    /// Updates that were left out.
    pub(crate) skipped: u64,
}

impl LossScaler {
    pub(crate) fn new(rule: LossScale) -> LossScaler {
        LossScaler { scale: rule.initial(), in_a_row: 0, skipped: 0 }
    }

    /// After an update, or one that was left out as gradients were not finite.
    pub(crate) fn follow(&mut self, rule: LossScale, is_updated: bool) {
        self.skipped += u64::from(!is_updated);
        let LossScale::Dynamic { growth_factor, backoff_factor, growth_interval, .. } = rule else { return };
        let scale = match is_updated {
            false => self.scale * backoff_factor,
            true => {
                self.in_a_row += 1;
                if self.in_a_row < growth_interval {
                    return;
                }
                self.scale * growth_factor
            }
        };
        self.in_a_row = 0;
        // A scale whose reciprocal is no normal number would change the gradients.
        if scale.is_normal() && (1.0 / scale).is_normal() {
            self.scale = scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scales that PyTorch 2.4.1's `GradScaler` goes through with the same numbers and the same
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
    }
}
