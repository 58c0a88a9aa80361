//! Memory for values whose size only the run tells: an arena for each memory that the session works
//! on.
//!
//! Regions count in the budget, free or not. What leaves a run is copied out of them, so that an
//! output keeps no region.
//!
//! Under a limit the host's arena is bypassed: a region that is only partly used would pin bytes,
//! and how many depends on the order of requests, so that a run could fail with more memory where
//! it succeeds with less. There each value is an allocation of its own, and what a refused request
//! needs comes out of what can be evicted ([`RunMemory::reserve_for`]).

use std::sync::Arc;

use ort_alloc::{
    AllocError, Allocator, Arena, ArenaConfig, Budget, BudgetedAllocator, Buffer, Category, DeviceId,
    HUGE_PAGE_BYTES, HostAllocator, SharedBuffer, Stats, allocate_in,
};

use super::{Device, guard};
use crate::tensor::{MapValue, byte_count};
use crate::tensor::{OptionalValue, SequenceValue, SparseTensor, Tensor, Value};
use crate::{Result, ensure, error};

/// Smaller values of the host come from the heap, which keeps such sizes at hand and rounds them
/// less.
const LEAST: usize = 4 << 10;

/// Free bytes that arenas which replace free regions keep between runs. Sizes of the next run that
/// do not fit what the last one left then cost no more than this.
const KEPT: usize = 4 << 20;

/// Alignment of values of the host, and of devices.
const HOST_ALIGNMENT: usize = 64;
pub(crate) const DEVICE_ALIGNMENT: usize = 256;

/// A memory with an arena, as ONNX Runtime names them: `cpu:0`, `gpu:0`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaDevice {
    /// Whether it is the host's, instead of that of a device.
    pub is_host: bool,
    /// Which of that kind, from 0.
    pub number: usize,
}

/// The memory of one session for what cannot be planned.
pub(crate) struct DynamicMemory {
    /// The host's first.
    lanes: Vec<Lane>,
    /// Whether values of the host are allocations of their own, as a limit counts every byte.
    exact: bool,
}

/// The memory of one run for what cannot be planned.
#[derive(Clone, Copy)]
pub(crate) struct RunMemory<'a> {
    pub(crate) dynamic: &'a DynamicMemory,
    /// What the run counts against: bytes set aside for it come first.
    pub(crate) budget: &'a Arc<Budget>,
    /// Frees memory that the run can do without, at least the bytes asked for if there are any;
    /// returns how many.
    pub(crate) evict: &'a (dyn Fn(usize) -> usize + Sync),
}

/// Scratch memory of a step that no plan knew.
#[derive(Default)]
pub(crate) struct ExtraScratch {
    pub(crate) host: Option<Buffer>,
    pub(crate) device: Option<SharedBuffer>,
    /// Bytes that the kernel takes of the heap.
    pub(crate) heap: usize,
}

/// Where a value goes.
#[derive(Clone, Copy)]
pub(crate) struct ValueMemory<'a> {
    pub(crate) memory: RunMemory<'a>,
    pub(crate) source: Source,
}

/// Where the memory of a value comes from.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// The arena, if there is one.
    Arena,
    /// The allocator: the value may outlive the run, or its plan counts it.
    Outside,
}

/// One memory.
struct Lane {
    id: DeviceId,
    allocator: Arc<dyn Allocator>,
    /// None where each value comes straight from the allocator.
    arena: Option<Arena>,
}

impl DynamicMemory {
    /// Arenas over the host's memory and that of the devices; without a configuration there are
    /// none. Under a limit the host's is left out unless it was asked for with settings of its own.
    pub(crate) fn new(
        budget: &Arc<Budget>,
        devices: &[Arc<dyn Device>],
        config: Option<&ArenaConfig>,
        is_limited: bool,
    ) -> Result<DynamicMemory> {
        let mut lanes = vec![Lane::new(HostAllocator::global().clone(), budget, config)];
        for device in devices {
            if lanes.iter().all(|lane| lane.id != device.memory()) {
                lanes.push(Lane::new(guard::allocator(&**device)?, budget, config));
            }
        }
        let exact = is_limited && config.is_none_or(|config| *config == ArenaConfig::lean());
        Ok(DynamicMemory { lanes, exact })
    }

    /// The counters of each memory's arena.
    pub(crate) fn stats(&self) -> Vec<(DeviceId, Stats)> {
        self.arenas().map(|(id, arena)| (id, arena.stats())).collect()
    }

    /// Bytes of regions that are wholly free.
    pub(crate) fn idle_bytes(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.idle_bytes()).sum()
    }

    /// Bytes of all regions.
    pub(crate) fn held_bytes(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.stats().total_allocated).sum()
    }

    /// Gives back all regions that are wholly free.
    pub(crate) fn trim(&self) -> usize {
        self.arenas().map(|(_, arena)| arena.trim()).sum()
    }

    /// What a finished run leaves: gives back the regions that the last runs did not use, and all
    /// where that is much.
    pub(crate) fn sweep(&self) {
        for (_, arena) in self.arenas() {
            match arena.config().replace_free_regions && arena.idle_bytes() > KEPT {
                true => arena.trim(),
                false => arena.sweep(),
            };
        }
    }

    /// Refuses to shrink arenas that there are not.
    pub(crate) fn check_shrink(&self, devices: &[ArenaDevice]) -> Result<()> {
        for device in devices {
            let kind = if device.is_host { "cpu" } else { "gpu" };
            ensure!(
                self.arena_of(device).is_some(),
                InvalidArgument,
                help = "name memories that the session has, and leave its arenas on",
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

    fn lane(&self, memory: DeviceId) -> Result<&Lane> {
        let lane = self.lanes.iter().find(|lane| lane.id == memory);
        lane.ok_or_else(|| error!(Fail, "no device owns the memory of an output"))
    }
}

impl RunMemory<'_> {
    /// Memory of unknown size: from the arena, or from the allocator under it where the arena
    /// cannot grow or the value is small.
    fn allocate(&self, device: DeviceId, category: Category, bytes: usize) -> Result<Buffer> {
        let lane = self.dynamic.lane(device)?;
        let in_arena = device != DeviceId::HOST || (bytes >= LEAST && !self.dynamic.exact);
        let arena = lane.arena.as_ref().filter(|_| in_arena);
        match arena.and_then(|arena| arena.allocate(bytes, lane.alignment()).ok()) {
            Some(buffer) => Ok(buffer),
            None => self.allocate_outside(device, category, bytes),
        }
    }

    /// Scratch memory of the host, or of the device that a step runs on.
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

    /// Memory of its own, never of the arena.
    pub(crate) fn allocate_outside(
        &self,
        device: DeviceId,
        category: Category,
        bytes: usize,
    ) -> Result<Buffer> {
        let lane = self.dynamic.lane(device)?;
        self.reserve_for(|| allocate_in(self.budget, category, &*lane.allocator, bytes, lane.alignment()))
    }

    /// What takes something out of the budget. Where there is too little, free regions go back,
    /// then what can be evicted, the least that may do, and it is tried again: a request fails only
    /// if it does not fit beside what the run cannot do without.
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

    /// A value that leaves the run: what is in a region is copied out of it.
    pub(crate) fn detach(&self, value: Value, outputs: &dyn Allocator) -> Result<Value> {
        if self.dynamic.arenas().all(|(_, arena)| arena.stats().in_use == 0) {
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
            Value::Sparse(SparseTensor { values, indices, shape }) => Value::Sparse(SparseTensor {
                values: self.detach_tensor(values, outputs)?,
                indices: self.detach_tensor(indices, outputs)?,
                shape,
            }),
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

/// Asks the heap once for bytes that the budget grants. Tables and libraries allocate without a way
/// to fail: where the system has less than a limit allows, the process would end.
pub(crate) fn ask_heap(bytes: usize) -> Result<(), AllocError> {
    if bytes >= HUGE_PAGE_BYTES {
        HostAllocator::global().allocate(bytes, HOST_ALIGNMENT)?;
    }
    Ok(())
}

impl ValueMemory<'_> {
    /// Memory for the value; its bytes may be those of an earlier one.
    pub(crate) fn allocate(&self, device: DeviceId, category: Category, bytes: usize) -> Result<Buffer> {
        match self.source {
            Source::Arena => self.memory.allocate(device, category, bytes),
            Source::Outside => self.memory.allocate_outside(device, category, bytes),
        }
    }

    /// Whether memory of the host may hold the bytes of an earlier value, rather than zeros.
    pub(crate) fn is_reused(&self) -> bool {
        matches!(self.source, Source::Arena) && !self.memory.dynamic.exact
    }
}

impl Lane {
    fn new(allocator: Arc<dyn Allocator>, budget: &Arc<Budget>, config: Option<&ArenaConfig>) -> Lane {
        let over = |config: &ArenaConfig| {
            let (inner, budget) = (allocator.clone(), budget.clone());
            let inner = BudgetedAllocator { inner, budget, category: Category::Dynamic };
            Arena::new(Arc::new(inner), config.clone())
        };
        Lane { id: allocator.device(), arena: config.map(over), allocator }
    }

    fn alignment(&self) -> usize {
        if self.id == DeviceId::HOST { HOST_ALIGNMENT } else { DEVICE_ALIGNMENT }
    }
}
