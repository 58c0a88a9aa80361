//! The largest size of a dimension that fits into a number of bytes, from plans alone: nothing
//! runs.

use super::Session;
use crate::{ErrorKind, Result, ensure};

/// No run has a dimension of this size: element counts would not be numbers any more.
const MOST: i64 = 1 << 48;

impl Session {
    /// The largest size of the symbolic dimension `dim` (in elements, such as a batch) with which
    /// the session keeps to `budget` bytes: packed weights, folded constants, activations,
    /// workspaces and outputs. Other dimensions count as 1. None if not even 1 fits. It is the
    /// largest that runs as a whole: a run that is split
    /// ([`SessionBuilder::batch_split`](super::SessionBuilder::batch_split)) may be larger.
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
    /// [`ErrorKind::InvalidArgument`] where the model has no such dimension;
    /// [`ErrorKind::NotImplemented`] where the sizes of values depend on data, so that no plan
    /// tells the peak.
    pub fn largest_batch(&self, dim: &str, budget: usize) -> Result<Option<i64>> {
        self.largest_size(dim, &[], budget)
    }

    /// The same with sizes of other dimensions.
    pub fn largest_size(&self, dim: &str, others: &[(&str, i64)], budget: usize) -> Result<Option<i64>> {
        let fits = |size: i64| self.fits_into(dim, size, others, budget);
        if !fits(1)? {
            return Ok(None);
        }
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

    fn fits_into(&self, dim: &str, size: i64, others: &[(&str, i64)], budget: usize) -> Result<bool> {
        let dims: Vec<(&str, i64)> = others.iter().copied().chain([(dim, size)]).collect();
        let bindings = self.bindings(&dims)?;
        let plan = match self.executor.least_plan(&bindings) {
            Ok(plan) => plan,
            // More bytes than there are numbers for.
            Err(problem) if problem.kind() == ErrorKind::OutOfMemory && size > 1 => return Ok(false),
            Err(problem) => return Err(problem),
        };
        ensure!(
            !plan.has_dynamic,
            NotImplemented,
            help = "measure runs of several sizes instead: `Session::memory` tells the peak",
            "the peak is not known ahead with {dim} of {size}: sizes of values depend on data"
        );
        Ok(plan.peak().saturating_add(self.constant_bytes()) <= budget)
    }
}
