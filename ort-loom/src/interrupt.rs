//! A stub of run interruption: the models have no deadline.

use std::any::Any;

pub(crate) const TASK_UNITS: usize = 0;

#[derive(Clone)]
pub(crate) struct Watch;

pub(crate) struct Interrupted;

impl Interrupted {
    pub(crate) fn is(payload: &(dyn Any + Send)) -> bool {
        payload.is::<Interrupted>()
    }
}

pub(crate) fn current() -> Option<Watch> {
    None
}

pub(crate) fn follow(_watch: &Option<Watch>) {}

pub(crate) fn spend(_units: usize) {}

pub(crate) fn spending<I>(_units: usize, items: I) -> I {
    items
}
