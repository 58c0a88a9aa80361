//! Plans by the bindings of the dimensions and what lies in bound buffers, the most recent kept
//! within a bound of bytes.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{BoundValues, RunPlan};
use crate::Result;
use crate::dim::Bindings;
use crate::program::Program;

/// The bytes of plans that a program keeps.
const LIMIT: usize = 4 << 20;

/// The plans of all programs that were compiled together.
pub(crate) struct PlanCaches(Vec<PlanCache>);

impl PlanCaches {
    /// Caches for N programs, numbered from 0.
    pub(crate) fn new(programs: usize) -> PlanCaches {
        PlanCaches((0..programs).map(|_| PlanCache::default()).collect())
    }

    /// The plan of a program for these bindings, made by `make` where it is not kept.
    pub(crate) fn get(
        &self,
        program: &Program,
        bindings: &Bindings,
        bound: &BoundValues,
        make: impl FnOnce() -> Result<RunPlan>,
    ) -> Result<Arc<RunPlan>> {
        match self.0.get(program.number) {
            Some(cache) => cache.get(bindings, bound, make),
            None => make().map(Arc::new),
        }
    }

    pub(crate) fn clear(&self) {
        self.0.iter().for_each(PlanCache::clear);
    }
}

#[derive(Default)]
struct PlanCache(Mutex<Vec<(Bindings, BoundValues, Arc<RunPlan>)>>);

impl PlanCache {
    fn get(
        &self,
        bindings: &Bindings,
        bound: &BoundValues,
        make: impl FnOnce() -> Result<RunPlan>,
    ) -> Result<Arc<RunPlan>> {
        let mut plans = self.0.lock();
        if let Some(index) = plans.iter().position(|entry| entry.0 == *bindings && entry.1 == *bound) {
            // The most recent stands last.
            let entry = plans.remove(index);
            let plan = entry.2.clone();
            plans.push(entry);
            return Ok(plan);
        }
        drop(plans);
        let plan = Arc::new(make()?);
        let mut plans = self.0.lock();
        plans.push((bindings.clone(), bound.clone(), plan.clone()));
        let mut bytes: usize = plans.iter().map(|entry| entry.2.own_bytes()).sum();
        while bytes > LIMIT && plans.len() > 1 {
            bytes -= plans.remove(0).2.own_bytes();
        }
        Ok(plan)
    }

    fn clear(&self) {
        self.0.lock().clear();
    }
}
