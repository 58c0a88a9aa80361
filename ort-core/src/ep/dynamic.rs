//! Dynamic memory: one arena per device for values whose size is known only at run time.
//!
//! The budget counts whole regions, free or used. A value that leaves the run is copied out of the
//! arena, so that an output does not pin a region.
//!
//! Under a memory limit the host arena is bypassed. A partly used region pins bytes, and their
//! number depends on the order of requests. So a run could fail with more memory and succeed with
//! less. Each value is then an allocation of its own, and a refused request evicts what the run can
//! do without ([`RunMemory::reserve_for`]).

use std::sync::Arc;

use ort_alloc::{
    AllocError, Allocator, Arena, ArenaConfig, Budget, BudgetedAllocator, Buffer, Category, DeviceId,
    HUGE_PAGE_BYTES, HostAllocator, SharedBuffer, Stats, allocate_in,
};

use crate::tensor::{MapValue, byte_count};
use crate::tensor::{OptionalValue, SequenceValue, SparseTensor, Tensor, Value};
use crate::{Result, ensure, error};

/// Smaller host values come from the heap, which caches such sizes and rounds them up less.
const LEAST: usize = 4 << 10;

/// Idle bytes that arenas with `replace_free_regions` keep between runs. It bounds what a next run
/// of other sizes wastes.
const KEPT: usize = 4 << 20;

/// Alignment of host values and of device values.
const HOST_ALIGNMENT: usize = 64;
pub(crate) const DEVICE_ALIGNMENT: usize = 256;

/// An arena's device, named as ONNX Runtime does: `cpu:0`, `gpu:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaDevice {
    /// Whether it is the host's memory rather than a device's.
    pub is_host: bool,
    /// The index among memories of that kind.
    pub number: usize,
}

/// A session's memory for values that cannot be planned.
pub(crate) struct DynamicMemory {
    /// The host's lane comes first.
    lanes: Vec<DeviceMemory>,
    /// Whether the host arena is bypassed, because a limit counts every byte.
    exact: bool,
}

/// A run's view of the session's dynamic memory.
#[derive(Clone, Copy)]
pub(crate) struct RunMemory<'a> {
    pub(crate) dynamic: &'a DynamicMemory,
    /// The budget that the run counts against; bytes reserved for the run ahead are used first.
    pub(crate) budget: &'a Arc<Budget>,
    /// Evicts memory that the run can do without: at least this many bytes, or all of it. Returns
    /// the bytes freed.
    pub(crate) evict: &'a (dyn Fn(usize) -> usize + Sync),
}

/// Scratch memory of a step whose shapes the plan did not know.
#[derive(Default)]
pub(crate) struct ExtraScratch {
    pub(crate) host: Option<Buffer>,
    pub(crate) device: Option<SharedBuffer>,
    /// Heap bytes that the kernel takes besides.
    pub(crate) heap: usize,
}

/// Where a value is allocated.
#[derive(Clone, Copy)]
pub(crate) struct ValueMemory<'a> {
    pub(crate) memory: RunMemory<'a>,
    pub(crate) source: Source,
}

/// The pool that backs a value.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// The arena, if there is one.
    Arena,
    /// The underlying allocator, because the value may outlive the run or the plan counts its
    /// bytes.
    Outside,
}

/// One device memory with its allocator.
struct DeviceMemory {
    id: DeviceId,
    allocator: Arc<dyn Allocator>,
    /// `None` if every value comes straight from the allocator.
    arena: Option<Arena>,
}

impl DynamicMemory {
    /// Creates arenas over host memory and over these allocators of device memory, or none without
    /// a configuration. Devices that work on host memory share the host's lane.
    /// Under a limit the host arena is bypassed unless the caller configured it.
    pub(crate) fn new(
        budget: &Arc<Budget>,
        allocators: Vec<Arc<dyn Allocator>>,
        config: Option<&ArenaConfig>,
        is_limited: bool,
    ) -> DynamicMemory {
        let mut lanes = vec![DeviceMemory::new(HostAllocator::global().clone(), budget, config)];
        lanes.extend(allocators.into_iter().map(|allocator| DeviceMemory::new(allocator, budget, config)));
        let exact = is_limited && config.is_none_or(|config| *config == ArenaConfig::lean());
        DynamicMemory { lanes, exact }
    }

    /// The counters of each memory's arena.
    pub(crate) fn stats(&self) -> Vec<(DeviceId, Stats)> {
        self.arenas().map(|(id, arena)| (id, arena.stats())).collect()
    }

    /// Bytes of completely free regions.
    pub(crate) fn idle_bytes(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.idle_bytes()).sum()
    }

    /// Bytes of all regions, free or used.
    pub(crate) fn held_bytes(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.stats().total_allocated).sum()
    }

    /// Frees all idle regions; returns their bytes.
    pub(crate) fn trim(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.trim()).sum()
    }

    /// Called after each run. Frees regions that recent runs did not use. An arena with
    /// `replace_free_regions` frees all idle regions if they exceed `KEPT`.
    pub(crate) fn sweep(&self) {
        for (_, arena) in self.arenas() {
            match arena.config().replace_free_regions && arena.idle_bytes() > KEPT {
                true => arena.trim(),
                false => arena.sweep(),
            };
        }
    }

    /// Returns an error if the session has no arena on any of these devices. One is enough, because
    /// programs name all devices that a session may have, as in `cpu:0;gpu:0`.
    pub(crate) fn check_shrink(&self, devices: &[ArenaDevice]) -> Result<()> {
        if devices.iter().any(|device| self.arena_of(device).is_some()) {
            return Ok(());
        }
        for device in devices {
            let kind = if device.is_host { "cpu" } else { "gpu" };
            ensure!(
                self.arena_of(device).is_some(),
                InvalidArgument,
                help = "name devices of this session, and keep its arenas enabled",
                "Did not find an arena based allocator registered for device-id combination in the memory arena shrink list: {kind}:{}",
                device.number
            );
        }
        Ok(())
    }

    pub(crate) fn shrink(&self, devices: &[ArenaDevice]) {
        for arena in devices.iter().filter_map(|device| self.arena_of(device)) {
            arena.trim();
        }
    }

    fn arena_of(&self, device: &ArenaDevice) -> Option<&Arena> {
        let mut lanes = self.lanes.iter().filter(|lane| (lane.id == DeviceId::HOST) == device.is_host);
        lanes.nth(device.number)?.arena.as_ref()
    }

    fn arenas(&self) -> impl Iterator<Item = (DeviceId, &Arena)> {
        self.lanes.iter().filter_map(|lane| Some((lane.id, lane.arena.as_ref()?)))
    }

    fn lane(&self, memory: DeviceId) -> Result<&DeviceMemory> {
        let lane = self.lanes.iter().find(|lane| lane.id == memory);
        lane.ok_or_else(|| error!(Fail, "no device owns the memory of an output"))
    }
}

impl RunMemory<'_> {
    /// Allocates memory of unplanned size from the arena. Small host values, and those for which
    /// the arena cannot grow, come from the underlying allocator.
    fn allocate(&self, device: DeviceId, category: Category, bytes: usize) -> Result<Buffer> {
        let lane = self.dynamic.lane(device)?;
        let in_arena = device != DeviceId::HOST || (bytes >= LEAST && !self.dynamic.exact);
        let arena = lane.arena.as_ref().filter(|_| in_arena);
        // The arena may fail because a new region exceeds the limit, while the value alone fits.
        match arena.and_then(|arena| arena.allocate(bytes, lane.alignment()).ok()) {
            Some(buffer) => Ok(buffer),
            None => self.allocate_outside(device, category, bytes),
        }
    }

    /// Allocates scratch memory on the host or on the step's device.
    pub(crate) fn scratch(&self, device: DeviceId, bytes: usize, heap: usize) -> Result<ExtraScratch> {
        if bytes == 0 {
            return Ok(ExtraScratch { heap, ..ExtraScratch::default() });
        }
        let buffer = self.allocate(device, Category::Workspace, bytes)?;
        Ok(match device {
            DeviceId::HOST => ExtraScratch { host: Some(buffer), device: None, heap },
            _ => ExtraScratch { host: None, device: Some(buffer.freeze()), heap },
        })
    }

    /// Allocates from the underlying allocator, never from the arena.
    pub(crate) fn allocate_outside(
        &self,
        device: DeviceId,
        category: Category,
        bytes: usize,
    ) -> Result<Buffer> {
        let lane = self.dynamic.lane(device)?;
        self.reserve_for(|| allocate_in(self.budget, category, &*lane.allocator, bytes, lane.alignment()))
    }

    /// Takes something out of the budget, and evicts on refusal. It frees idle regions first, then
    /// evicts just what is missing and tries again. So a request fails only if it does not fit
    /// beside what the run cannot do without.
    pub(crate) fn reserve_for<T>(&self, take: impl Fn() -> Result<T, AllocError>) -> Result<T> {
        if let Ok(taken) = take() {
            return Ok(taken);
        }
        self.dynamic.trim();
        loop {
            let refusal = match take() {
                Ok(taken) => return Ok(taken),
                Err(refusal) => refusal,
            };
            // Other refusals are not about bytes, so eviction cannot help.
            let missing = match &refusal {
                AllocError::BudgetExceeded { needed, available, .. } => needed.saturating_sub(*available),
                AllocError::OutOfMemory { requested, .. } => *requested,
                AllocError::Unsupported { .. }
                | AllocError::Failed { .. }
                | AllocError::Interrupted { .. } => 0,
            };
            if missing == 0 || (self.evict)(missing) == 0 {
                return Err(refusal.into());
            }
        }
    }

    /// Copies a value that leaves the run out of its arena region.
    pub(crate) fn detach(&self, value: Value, outputs: &dyn Allocator) -> Result<Value> {
        // No arena memory is in use, so no tensor can be in a region: skip the walk.
        if self.dynamic.arenas().all(|(_, arena)| arena.in_use() == 0) {
            return Ok(value);
        }
        let again = |value: Box<Value>| self.detach(*value, outputs).map(Box::new);
        Ok(match value {
            Value::Tensor(tensor) => Value::Tensor(self.detach_tensor(tensor, outputs)?),
            Value::Sequence(SequenceValue { element_type, elements }) => {
                let elements = elements.into_iter().map(|element| self.detach(element, outputs));
                let elements = elements.collect::<Result<_>>()?;
                Value::Sequence(SequenceValue { element_type, elements })
            }
            Value::Optional(OptionalValue { element_type, element }) => {
                let element = element.map(again).transpose()?;
                Value::Optional(OptionalValue { element_type, element })
            }
            Value::Map(MapValue { keys, values }) => Value::Map(MapValue { keys, values: again(values)? }),
            Value::Sparse(sparse) => {
                let SparseTensor { values, indices, shape } = *sparse;
                let values = self.detach_tensor(values, outputs)?;
                let indices = self.detach_tensor(indices, outputs)?;
                Value::Sparse(Box::new(SparseTensor { values, indices, shape }))
            }
        })
    }

    fn detach_tensor(&self, tensor: Tensor, outputs: &dyn Allocator) -> Result<Tensor> {
        let mut arenas = self.dynamic.arenas();
        let Some(bytes) = tensor.bytes().filter(|bytes| arenas.any(|(_, arena)| arena.holds(bytes))) else {
            return Ok(tensor);
        };
        let len = byte_count(tensor.dtype(), tensor.shape())?;
        let copy = || allocate_in(self.budget, Category::Output, outputs, len, HOST_ALIGNMENT);
        let mut buffer = self.reserve_for(copy)?;
        let to = buffer.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        to.copy_from_slice(bytes);
        Tensor::from_buffer(tensor.dtype(), tensor.shape(), buffer)
    }
}

/// Probes the system for bytes that the budget granted: maps and unmaps them. Tables and libraries
/// allocate infallibly, so the process would abort if the system has less memory than the limit
/// allows.
pub(crate) fn ask_heap(bytes: usize) -> Result<(), AllocError> {
    // From this size on the allocator maps memory by itself. Smaller ones come from the heap.
    if bytes >= HUGE_PAGE_BYTES {
        HostAllocator::global().allocate(bytes, HOST_ALIGNMENT)?;
    }
    Ok(())
}

impl ValueMemory<'_> {
    /// Allocates memory for the value. It may hold stale bytes of an earlier one.
    pub(crate) fn allocate(&self, device: DeviceId, category: Category, bytes: usize) -> Result<Buffer> {
        match self.source {
            Source::Arena => self.memory.allocate(device, category, bytes),
            Source::Outside => self.memory.allocate_outside(device, category, bytes),
        }
    }

    /// Whether host memory from here may hold stale bytes rather than zeros.
    pub(crate) fn is_reused(&self) -> bool {
        matches!(self.source, Source::Arena) && !self.memory.dynamic.exact
    }
}

impl DeviceMemory {
    fn new(
        allocator: Arc<dyn Allocator>,
        budget: &Arc<Budget>,
        config: Option<&ArenaConfig>,
    ) -> DeviceMemory {
        let over = |config: &ArenaConfig| {
            let (inner, budget) = (allocator.clone(), budget.clone());
            let inner = BudgetedAllocator { inner, budget, category: Category::Dynamic };
            Arena::new(Arc::new(inner), config.clone())
        };
        DeviceMemory { id: allocator.device(), arena: config.map(over), allocator }
    }

    fn alignment(&self) -> usize {
        if self.id == DeviceId::HOST { HOST_ALIGNMENT } else { DEVICE_ALIGNMENT }
    }
}
