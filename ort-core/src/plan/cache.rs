//! The plan cache: plans by bindings and bound buffers, with LRU eviction above a size limit.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{BoundValues, RunPlan};
use crate::Result;
use crate::dim::Bindings;
use crate::program::Program;

/// The bytes of plans that a program keeps.
const LIMIT: usize = 4 << 20;

/// The plan caches of all programs that were compiled together.
pub(crate) struct PlanCaches(Vec<PlanCache>);

impl PlanCaches {
    /// Creates caches for N programs, numbered from 0.
    pub(crate) fn new(programs: usize) -> PlanCaches {
        PlanCaches((0..programs).map(|_| PlanCache::default()).collect())
    }

    /// Returns the plan of a program for these bindings; calls `make` if it is not cached.
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

/// The plans of one program, the most recently used one last.
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
        // The bound values are part of the key: the plan depends on the memories of inputs and
        // outputs, and on the limits on workspaces.
        if let Some(index) = plans.iter().position(|entry| entry.0 == *bindings && entry.1 == *bound) {
            // The entry moves to the end, because eviction starts at the front.
            let entry = plans.remove(index);
            let plan = entry.2.clone();
            plans.push(entry);
            return Ok(plan);
        }
        // We make the plan without the lock, so that other runs can use the cache meanwhile. Two
        // runs may then make the same plan, which does no harm.
        drop(plans);
        let plan = Arc::new(make()?);
        let mut plans = self.0.lock();
        plans.push((bindings.clone(), bound.clone(), plan.clone()));
        let mut bytes: usize = plans.iter().map(|entry| entry.2.own_bytes()).sum();
        // The newest plan stays even if it exceeds the limit alone.
        while bytes > LIMIT && plans.len() > 1 {
            bytes -= plans.remove(0).2.own_bytes();
        }
        Ok(plan)
    }

    fn clear(&self) {
        self.0.lock().clear();
    }
}
