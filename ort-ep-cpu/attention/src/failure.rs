//! The error of a parallel loop.

use ort_core::{Error, Result};
use parking_lot::Mutex;

/// The first error of any task, because the parallel loops return none.
#[derive(Default)]
pub(crate) struct Failure(Mutex<Option<Error>>);

impl Failure {
    pub(crate) fn keep(&self, result: Result<()>) {
        if let Err(error) = result {
            self.0.lock().get_or_insert(error);
        }
    }

    pub(crate) fn into_result(self) -> Result<()> {
        self.0.into_inner().map_or(Ok(()), Err)
    }
}
