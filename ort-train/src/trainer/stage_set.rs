//! The compiled stages of a training run, by kind.

use crate::stage::Stage;

/// The compiled stages of a training run. At most one of them owns the tensors at a time.
#[derive(Default)]
pub(super) struct Stages {
    pub(super) step: Option<Stage>,
    pub(super) accumulate: Option<Stage>,
    pub(super) apply: Option<Stage>,
    pub(super) evaluate: Option<Stage>,
    pub(super) attached: Option<StageKind>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StageKind {
    Step,
    Accumulate,
    Apply,
    Evaluate,
}

impl Stages {
    pub(super) fn get(&mut self, kind: StageKind) -> &mut Option<Stage> {
        match kind {
            StageKind::Step => &mut self.step,
            StageKind::Accumulate => &mut self.accumulate,
            StageKind::Apply => &mut self.apply,
            StageKind::Evaluate => &mut self.evaluate,
        }
    }
}
