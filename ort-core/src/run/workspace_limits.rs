//! Plans whose workspaces keep to what limits leave: kernels that have a choice, as that of a
//! library's algorithms, get less where there is less.

use std::sync::Arc;

use ort_alloc::{DeviceId, arena};

use super::Executor;
use super::grant::MemoryDemand;
use super::streaming::OnDevices;
use crate::Result;
use crate::dim::Bindings;
use crate::ep::guard;
use crate::plan::{BoundValues, RunPlan, WorkspaceRoom};

/// The most that a run may take.
struct Limits {
    total: usize,
    on_devices: OnDevices,
}

impl Executor {
    /// The plan where some inputs and outputs lie in buffers of a binding. Its workspaces are as
    /// large as kernels want them where that keeps to the limits beside all constants, else as
    /// large as these leave; never so large that the run takes more for it than it has to.
    pub(crate) fn plan_bound(&self, bindings: &Bindings, bound: &BoundValues) -> Result<Arc<RunPlan>> {
        let plan = self.plan_kept(bindings, bound)?;
        if !plan.can_shrink {
            return Ok(plan);
        }
        let limits = self.limits_beside_constants()?;
        let need = |plan: &RunPlan| MemoryDemand::of(&self.compiled.program, plan);
        if limits.hold(&need(&plan)) {
            return Ok(plan);
        }
        let within = |room| self.plan_kept(bindings, &BoundValues { room, ..bound.clone() });
        let least = within(WorkspaceRoom::LEAST)?;
        // Where even that is too much it is what is taken, of which workspaces may fill what is
        // free.
        let limits = limits.or(&need(&least));
        let plan = within(limits.room(&least, &need(&least)))?;
        Ok(if limits.hold(&need(&plan)) { plan } else { least })
    }

    /// The plan whose workspaces are no larger than kernels cannot do without.
    pub(crate) fn least_plan(&self, bindings: &Bindings) -> Result<Arc<RunPlan>> {
        let bound = self.compiled.program.bound_values(self.planning);
        let plan = self.plan_kept(bindings, &bound)?;
        match plan.can_shrink {
            true => self.plan_kept(bindings, &BoundValues { room: WorkspaceRoom::LEAST, ..bound }),
            false => Ok(plan),
        }
    }

    /// What the limits of the session and of its devices leave to runs where all constants stay.
    fn limits_beside_constants(&self) -> Result<Limits> {
        let limit = self.budget.limit().unwrap_or(usize::MAX);
        let total = limit.saturating_sub(self.compiled.streams.total_bytes());
        let mut on_devices = OnDevices::new();
        for device in self.compiled.devices.iter().filter(|device| device.memory() != DeviceId::HOST) {
            let memory = device.memory();
            if let Some(limit) = guard::memory_stats(&**device)?.limit {
                let left = limit.saturating_sub(self.compiled.streams.windows.total_bytes_on(memory));
                on_devices.push((memory, left / arena::GRANULE * arena::GRANULE));
            }
        }
        Ok(Limits { total, on_devices })
    }
}

impl Limits {
    fn on(&self, memory: DeviceId) -> usize {
        let own = self.on_devices.iter().find(|(device, _)| *device == memory);
        own.map_or(usize::MAX, |(_, most)| *most)
    }

    /// Whether a run keeps to them.
    fn hold(&self, need: &MemoryDemand) -> bool {
        need.total() <= self.total && need.on_devices.iter().all(|(memory, bytes)| *bytes <= self.on(*memory))
    }

    /// The same, or what a run takes where that is more.
    fn or(&self, need: &MemoryDemand) -> Limits {
        let on_devices = self.on_devices.iter().map(|(memory, most)| (*memory, need.on(*memory).max(*most)));
        Limits { total: self.total.max(need.total()), on_devices: on_devices.collect() }
    }

    /// How large each slab may be beside all else that a plan takes.
    fn room(&self, plan: &RunPlan, need: &MemoryDemand) -> WorkspaceRoom {
        let slab = |(memory, bytes): &(DeviceId, usize)| {
            let in_all = self.total.saturating_sub(need.total().saturating_sub(*bytes));
            let there = self.on(*memory).saturating_sub(need.on(*memory).saturating_sub(*bytes));
            (*memory, in_all.min(there))
        };
        WorkspaceRoom { slabs: plan.slabs.iter().map(slab).collect(), others: 0 }
    }
}
