//! Tables of a run: vectors that the next step or run reuses, so that short runs allocate little.

use ort_alloc::{Part, Slices, emptied};

use super::target::{HandedOver, KnownShapes, Target};
use crate::ep::{InputViews, OutputSlots};
use crate::tensor::Value;

/// The tables of a run.
#[derive(Default)]
pub(crate) struct Tables {
    /// Values with memory of their own, by slot.
    pub(super) owned: Vec<Option<Value>>,
    pub(super) step: StepTables,
}

impl Tables {
    /// The most entries of a table that is kept for the next run. For larger models, the cost of
    /// new tables is negligible.
    const MOST_IDLE_ENTRIES: usize = 256;

    /// Whether the tables are small enough to be kept for the next run.
    pub(crate) fn may_wait(&self) -> bool {
        let most = self.owned.capacity().max(self.step.targets.capacity());
        most.max(self.step.call.inputs.capacity()) <= Tables::MOST_IDLE_ENTRIES
    }

    /// Drops the values.
    pub(crate) fn clear(&mut self) {
        // `fill` would clone a value for each entry.
        self.owned.iter_mut().for_each(|value| *value = None);
    }
}

/// The tables of one step. Between steps they hold no values and borrow nothing.
#[derive(Default)]
pub(crate) struct StepTables {
    /// Where each output goes.
    pub(super) targets: Vec<Target>,
    /// The types and shapes of the outputs.
    pub(super) shapes: KnownShapes,
    pub(super) handed: HandedOver,
    pub(super) call: CallTables,
}

/// The borrows of a kernel call. The vectors are reused from call to call and hold no borrow in
/// between, so their lifetime is `'static`.
#[derive(Default)]
pub(super) struct CallTables {
    /// The host memory that the step reads.
    pub(super) reads: Vec<Part>,
    /// The host memory that the step writes.
    pub(super) writes: Vec<Part>,
    pub(super) slices: Slices<'static>,
    pub(super) inputs: InputViews<'static>,
    pub(super) outputs: OutputSlots<'static>,
}

impl CallTables {
    /// Keeps the vectors of a call that has ended, without their borrowed elements.
    pub(super) fn keep(&mut self, slices: Slices<'_>, inputs: InputViews<'_>, outputs: OutputSlots<'_>) {
        self.slices = slices.emptied();
        self.inputs = emptied(inputs);
        self.outputs = emptied(outputs);
    }
}
