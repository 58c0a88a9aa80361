//! A stub of worker affinity, which affects no result.

pub(crate) struct Affinity;

impl Affinity {
    pub(crate) fn new() -> Affinity {
        Affinity
    }

    pub(crate) fn add_this_worker(&self) {}

    pub(crate) fn leave_this_one_to_the_caller(&self) {}
}
