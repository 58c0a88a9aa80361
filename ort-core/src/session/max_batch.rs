//! Maximum batch size: the largest size of a dimension that fits a memory budget.
//!
//! The search evaluates plans; nothing runs.

use super::Session;
use crate::{ErrorKind, Result, ensure};

/// The search ends here: no run has a dimension this large, because element counts would overflow.
const MOST: i64 = 1 << 48;

impl Session {
    /// Returns the largest size of the symbolic dimension `dim` (such as a batch) with which the
    /// session keeps to `budget` bytes: packed weights, folded constants, activations, workspaces
    /// and outputs. Other dimensions count as 1. `None` if not even size 1 fits. A run that is
    /// split ([`SessionBuilder::batch_split`](super::SessionBuilder::batch_split)) may have a
    /// larger batch.
    ///
    /// ```no_run
    /// # use ort_core::session::{Model, Session};
    /// let model = Model::load("model.onnx")?;
    /// let session = Session::builder(&model).build()?;
    /// println!("batches of {:?} fit into 64 MiB", session.largest_batch("batch", 64 << 20)?);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the model has no such dimension;
    /// [`ErrorKind::NotImplemented`] if sizes of values depend on data, so that no plan knows the
    /// peak.
    pub fn largest_batch(&self, dim: &str, budget: usize) -> Result<Option<i64>> {
        self.largest_size(dim, &[], budget)
    }

    /// [`Self::largest_batch`] with sizes for other dimensions.
    pub fn largest_size(&self, dim: &str, others: &[(&str, i64)], budget: usize) -> Result<Option<i64>> {
        let fits = |size: i64| self.fits_into(dim, size, others, budget);
        if !fits(1)? {
            return Ok(None);
        }
        // Doubling brackets the answer, bisection finds it: the peak grows with the size.
        let mut fitting = 1;
        let mut too_large = 2;
        while too_large <= MOST && fits(too_large)? {
            fitting = too_large;
            too_large *= 2;
        }
        while too_large - fitting > 1 {
            let middle = fitting + (too_large - fitting) / 2;
            match fits(middle)? {
                true => fitting = middle,
                false => too_large = middle,
            }
        }
        Ok(Some(fitting))
    }

    /// Whether a run with this size, together with the session's constants, fits into `budget`
    /// bytes.
    fn fits_into(&self, dim: &str, size: i64, others: &[(&str, i64)], budget: usize) -> Result<bool> {
        let dims: Vec<(&str, i64)> = others.iter().copied().chain([(dim, size)]).collect();
        let bindings = self.bindings(&dims)?;
        let plan = match self.executor.least_plan(&bindings) {
            Ok(plan) => plan,
            // The byte count overflowed. With size 1 the other sizes are the cause, which is the
            // caller's error.
            Err(problem) if problem.kind() == ErrorKind::OutOfMemory && size > 1 => return Ok(false),
            Err(problem) => return Err(problem),
        };
        ensure!(
            !plan.has_dynamic,
            NotImplemented,
            help = "measure runs of several sizes instead: `Session::memory` tells the peak",
            "the peak for {dim}={size} is not known before the run: sizes of values depend on data"
        );
        Ok(plan.peak().saturating_add(self.constant_bytes()) <= budget)
    }
}
