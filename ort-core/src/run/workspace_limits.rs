//! Workspace limits: plans whose workspaces fit the memory limits.
//!
//! Some kernels can trade workspace for speed, for example by choosing another algorithm of a
//! library. They get less workspace if there is less memory.

use std::sync::Arc;

use ort_alloc::{DeviceId, arena};

use super::Executor;
use super::grant::MemoryDemand;
use super::streaming::OnDevices;
use crate::Result;
use crate::dim::Bindings;
use crate::ep::guard;
use crate::plan::{BoundValues, RunPlan, SlabLimits};

/// The most bytes that a run may take.
struct Limits {
    total: usize,
    on_devices: OnDevices,
}

impl Executor {
    /// Returns the plan for these dimensions and the buffers of an I/O binding.
    ///
    /// Workspaces are as large as kernels want if the run and all constants then stay within the
    /// limits. Otherwise they are as large as the limits allow. If even the plan with the smallest
    /// workspaces exceeds the limits, the bytes of that plan become the limits.
    pub(crate) fn plan_bound(&self, bindings: &Bindings, bound: &BoundValues) -> Result<Arc<RunPlan>> {
        let plan = self.plan_kept(bindings, bound)?;
        // No kernel can run with a smaller workspace than in this plan.
        if !plan.can_shrink {
            return Ok(plan);
        }
        let limits = self.limits_beside_constants()?;
        let need = |plan: &RunPlan| MemoryDemand::of(&self.compiled.program, plan);
        if limits.hold(&need(&plan)) {
            return Ok(plan);
        }
        let within = |room| self.plan_kept(bindings, &BoundValues { room, ..bound.clone() });
        let least = within(SlabLimits::LEAST)?;
        // If even this plan exceeds the limits, its demand becomes the limit. So workspaces may
        // grow only into bytes that it takes anyway.
        let limits = limits.or(&need(&least));
        let plan = within(limits.room(&least, &need(&least)))?;
        // The layout with larger workspaces may still exceed the limits.
        Ok(if limits.hold(&need(&plan)) { plan } else { least })
    }

    /// Returns the plan with the smallest workspaces that kernels can run with.
    pub(crate) fn least_plan(&self, bindings: &Bindings) -> Result<Arc<RunPlan>> {
        let bound = self.compiled.program.bound_values(self.planning);
        let plan = self.plan_kept(bindings, &bound)?;
        match plan.can_shrink {
            true => self.plan_kept(bindings, &BoundValues { room: SlabLimits::LEAST, ..bound }),
            false => Ok(plan),
        }
    }

    /// Returns the bytes that the limits of the session and its devices leave for a run if all
    /// constants stay resident.
    fn limits_beside_constants(&self) -> Result<Limits> {
        let limit = self.budget.limit().unwrap_or(usize::MAX);
        let total = limit.saturating_sub(self.compiled.streams.total_bytes());
        let mut on_devices = OnDevices::new();
        for device in self.compiled.devices.iter().filter(|device| device.memory() != DeviceId::HOST) {
            let memory = device.memory();
            if let Some(limit) = guard::memory_stats(&**device)?.limit {
                let left = limit.saturating_sub(self.compiled.streams.windows.total_bytes_on(memory));
                // Device memory is handed out in granules.
                on_devices.push((memory, left / arena::GRANULE * arena::GRANULE));
            }
        }
        Ok(Limits { total, on_devices })
    }
}

impl Limits {
    /// The limit on a device; a device without one is unbounded.
    fn on(&self, memory: DeviceId) -> usize {
        let own = self.on_devices.iter().find(|(device, _)| *device == memory);
        own.map_or(usize::MAX, |(_, most)| *most)
    }

    /// Whether a run stays within the limits.
    fn hold(&self, need: &MemoryDemand) -> bool {
        need.total() <= self.total && need.on_devices.iter().all(|(memory, bytes)| *bytes <= self.on(*memory))
    }

    /// Returns the limits, raised to the demand of a run.
    fn or(&self, need: &MemoryDemand) -> Limits {
        let on_devices = self.on_devices.iter().map(|(memory, most)| (*memory, need.on(*memory).max(*most)));
        Limits { total: self.total.max(need.total()), on_devices: on_devices.collect() }
    }

    /// Returns how large each slab may be beside everything else in the plan.
    fn room(&self, plan: &RunPlan, need: &MemoryDemand) -> SlabLimits {
        let slab = |(memory, bytes): &(DeviceId, usize)| {
            let in_all = self.total.saturating_sub(need.total().saturating_sub(*bytes));
            let there = self.on(*memory).saturating_sub(need.on(*memory).saturating_sub(*bytes));
            (*memory, in_all.min(there))
        };
        SlabLimits { slabs: plan.slabs.iter().map(slab).collect(), others: 0 }
    }
}
