//! The plan cache: plans by bindings and bound buffers, with LRU eviction above a size limit.

use std::collections::VecDeque;
use std::sync::Arc;

use ort_alloc::fork::Mutex;

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

/// The plans of one program.
#[derive(Default)]
struct PlanCache(Mutex<CachedPlans>);

#[derive(Default)]
struct CachedPlans {
    /// The most recently used plan last.
    entries: VecDeque<CachedPlan>,
    /// The bytes of all plans.
    bytes: usize,
}

struct CachedPlan {
    /// The bound values are part of the key: the plan depends on the memories of inputs and
    /// outputs, and on the limits on workspaces.
    key: (Bindings, BoundValues),
    plan: Arc<RunPlan>,
    bytes: usize,
}

impl CachedPlans {
    /// Returns the plan of a key, which becomes the most recently used one.
    fn find(&mut self, bindings: &Bindings, bound: &BoundValues) -> Option<Arc<RunPlan>> {
        let is_it = |entry: &CachedPlan| entry.key.0 == *bindings && entry.key.1 == *bound;
        // From the end: most runs have the sizes of the run before.
        let index = self.entries.iter().rposition(is_it)?;
        if index + 1 < self.entries.len() {
            let entry = self.entries.remove(index)?;
            self.entries.push_back(entry);
        }
        self.entries.back().map(|entry| entry.plan.clone())
    }

    /// Adds a plan. Returns the least recently used ones that no longer fit.
    fn add(&mut self, entry: CachedPlan) -> Vec<CachedPlan> {
        self.bytes += entry.bytes;
        self.entries.push_back(entry);
        let mut evicted = Vec::new();
        // The newest plan stays even if it alone exceeds the limit.
        while self.bytes > LIMIT
            && self.entries.len() > 1
            && let Some(oldest) = self.entries.pop_front()
        {
            self.bytes -= oldest.bytes;
            evicted.push(oldest);
        }
        evicted
    }
}

impl PlanCache {
    fn get(
        &self,
        bindings: &Bindings,
        bound: &BoundValues,
        make: impl FnOnce() -> Result<RunPlan>,
    ) -> Result<Arc<RunPlan>> {
        let known = self.0.lock().find(bindings, bound);
        if let Some(plan) = known {
            return Ok(plan);
        }
        // We make the plan without the lock, so that other runs can use the cache meanwhile. Two
        // runs may then make the same plan, which does no harm.
        let plan = Arc::new(make()?);
        let key = (bindings.clone(), bound.clone());
        let entry = CachedPlan { key, plan: plan.clone(), bytes: plan.own_bytes() };
        let evicted = self.0.lock().add(entry);
        // Freed after the lock is released, because other runs and forks wait for it.
        drop(evicted);
        Ok(plan)
    }

    fn clear(&self) {
        let plans = std::mem::take(&mut *self.0.lock());
        drop(plans);
    }
}
