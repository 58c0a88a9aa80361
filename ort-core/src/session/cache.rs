//! Plans by the bindings of the dimensions and what lies in bound buffers, the most recent kept within a bound of bytes.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::Result;
use crate::dim::Bindings;
use crate::plan::{BoundValues, RunPlan};

/// The bytes of plans that a program keeps.
const LIMIT: usize = 4 << 20;

#[derive(Default)]
pub(crate) struct PlanCache(Mutex<Vec<(Bindings, BoundValues, Arc<RunPlan>)>>);

impl PlanCache {
    /// The plan for these bindings, made by `make` where it is not kept.
    pub(crate) fn get(
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

    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}
