//! Tables of a run: lists that the next step or run reuses, so that short runs allocate little.

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
    /// The most entries of a table that waits for the next run. Larger models run for so long that
    /// making new ones does not count.
    const MOST_IDLE_ENTRIES: usize = 256;

    /// Whether they are small enough to wait for the next run.
    pub(crate) fn may_wait(&self) -> bool {
        let most = self.owned.capacity().max(self.step.targets.capacity());
        most.max(self.step.call.inputs.capacity()) <= Tables::MOST_IDLE_ENTRIES
    }

    /// Drops the values.
    pub(crate) fn clear(&mut self) {
        // `fill` would copy a whole value for each.
        self.owned.iter_mut().for_each(|value| *value = None);
    }
}

/// The tables of one step. Between steps they hold no values and borrow nothing.
#[derive(Default)]
pub(super) struct StepTables {
    /// Where each output goes.
    pub(super) targets: Vec<Target>,
    /// The types and shapes of the outputs.
    pub(super) shapes: KnownShapes,
    pub(super) handed: HandedOver,
    pub(super) call: CallTables,
}

/// What a kernel call borrows. The lists keep their memory from call to call, but no borrow, which
/// is why the lifetime is `'static`.
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
    /// Keeps the lists of a call that has ended, without what they borrow.
    pub(super) fn keep(&mut self, slices: Slices<'_>, inputs: InputViews<'_>, outputs: OutputSlots<'_>) {
        self.slices = slices.emptied();
        self.inputs = emptied(inputs);
        self.outputs = emptied(outputs);
    }
}
