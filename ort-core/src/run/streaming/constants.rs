//! Constant streaming: the device constants of sessions where the memory limit, or the limit of the
//! device, may be too small for all constants.
//!
//! Each run decides which constants stay resident ([`residency`](super::residency)). The others
//! stay in the model's file, and are uploaded into a window before each step that reads them. The
//! window is double-buffered: the constants of the next step are prefetched into one half before
//! the step that reads the other half runs. So a device that can copy and compute concurrently
//! overlaps both. The results are the same as if each upload and each kernel ran
//! alone, in the order of issue.

use std::sync::Arc;

use ort_alloc::{Allocator, Budget, Category, DeviceId, SharedBuffer, allocate_in, arena, exact_bytes};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::residency::{Costs, ResidencyChoice};
use crate::ep::{Device, guard};
use crate::program::{Origin, Program, SlotId};
use crate::tensor::{DeviceRange, Tensor, TensorMut};
use crate::{Error, MemoryShortage, Result, error};

/// The alignment of constants and of window halves.
const ALIGNMENT: usize = 256;

/// Bytes of a run on each device with memory of its own.
// Not inline: every run moves a list, and on the host alone it is empty.
pub(crate) type OnDevices = Vec<(DeviceId, usize)>;

/// The streamable constants of a program, by device.
#[derive(Default)]
pub(crate) struct Windows {
    lanes: Vec<Lane>,
}

/// The streamable constants of one device.
struct Lane {
    device: Arc<dyn Device>,
    memory: Arc<dyn Allocator>,
    constants: Vec<Constant>,
    /// The steps that read constants, in order, each with the indices of those constants.
    uploads: Vec<(usize, Vec<usize>)>,
    costs: Costs,
}

/// A constant in the model's file and, while it is resident, on the device.
struct Constant {
    slot: SlotId,
    name: Arc<str>,
    host: Tensor,
    /// The bytes that it takes on the device.
    bytes: usize,
    resident: Mutex<Option<Tensor>>,
}

/// A run's share of the memory of each device with streamable constants (a lane): which constants
/// stay resident, and the window for the rest.
#[derive(Default)]
pub(crate) struct Shares(Vec<ResidencyChoice>);

/// The resident constants and the windows of a run.
#[derive(Default)]
pub(crate) struct RunWindows {
    /// The resident constants, with their slots.
    residents: Vec<(SlotId, Tensor)>,
    lanes: Vec<RunLane>,
}

/// The constants that pass through the window of one device.
struct RunLane {
    device: Arc<dyn Device>,
    halves: Vec<SharedBuffer>,
    /// By step, in the order of the steps.
    uploads: Vec<(usize, Vec<Streamed>)>,
}

/// A constant at its place in a window half.
struct Streamed {
    slot: SlotId,
    host: Tensor,
    offset: usize,
}

/// The progress of a frame through the windows.
#[derive(Default)]
pub(crate) struct WindowCursor<'a> {
    residents: &'a [(SlotId, Tensor)],
    // Not inline: a frame is moved, and most runs have no window.
    lanes: Vec<LaneCursor<'a>>,
}

struct LaneCursor<'a> {
    lane: &'a RunLane,
    /// Called with the bytes of each constant whose pages of the model's file are no longer needed.
    release: &'a (dyn Fn(&[u8]) + Sync),
    /// The index of the next upload.
    next: usize,
    /// The number of uploads so far, which alternate between the halves.
    made: usize,
    /// The prefetched tensors, with the step that reads them.
    ahead: Option<(usize, Arrived)>,
}

/// The tensors that are on the device now, with their slots.
type Arrived = SmallVec<[(SlotId, Tensor); 2]>;

/// Rounds up to the granule of the device's allocator.
fn rounded(bytes: usize) -> usize {
    bytes.checked_next_multiple_of(arena::GRANULE).unwrap_or(usize::MAX)
}

impl Windows {
    /// Collects the streamable constants of a program.
    pub(crate) fn of(program: &Program, devices: &[Arc<dyn Device>]) -> Result<Windows> {
        let mut lanes: Vec<Lane> = Vec::new();
        for device in devices {
            let memory = device.memory();
            // Devices that share a memory share a lane.
            if lanes.iter().all(|lane| lane.memory.device() != memory) {
                lanes.extend(Lane::of(program, device)?);
            }
        }
        Ok(Windows { lanes })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The fewest bytes of constants that a run needs beside its activations.
    pub(crate) fn least_bytes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.costs.least()).sum()
    }

    /// The bytes of all streamable constants.
    pub(crate) fn total_bytes(&self) -> usize {
        self.lanes.iter().map(|lane| lane.costs.total()).sum()
    }

    /// The bytes of all streamable constants on a device.
    pub(crate) fn total_bytes_on(&self, memory: DeviceId) -> usize {
        let lanes = self.lanes.iter().filter(|lane| lane.memory.device() == memory);
        lanes.map(|lane| lane.costs.total()).sum()
    }

    /// The bytes of constants that are resident now.
    pub(crate) fn resident_bytes(&self) -> usize {
        self.lanes.iter().map(Lane::resident_bytes).sum()
    }

    /// Chooses which constants stay resident within `free` bytes of the session's budget, beside
    /// what `run` takes on each device. If a device has a limit, its constants get the least that
    /// they need, plus `eighths` / 8 of the memory that is then left.
    ///
    /// # Errors
    ///
    /// The limit of a device is too small for the run plus the least that constants need.
    pub(crate) fn choose(&self, free: usize, run: &OnDevices, eighths: usize) -> Result<Shares> {
        let mut left = free;
        let mut others = self.least_bytes();
        let mut chosen = Vec::with_capacity(self.lanes.len());
        for lane in &self.lanes {
            let least = lane.costs.least();
            // The devices after this one still get the least that they need.
            others = others.saturating_sub(least);
            let of_run = run.iter().filter(|(memory, _)| *memory == lane.memory.device());
            let there = lane.available(of_run.map(|(_, bytes)| *bytes).sum(), least)?;
            let there = match eighths {
                8.. => there,
                // Divided first, because the product could overflow.
                _ => least.saturating_add(there.saturating_sub(least) / 8 * eighths),
            };
            let own = lane.costs.choose(there.min(left.saturating_sub(others)));
            left = left.saturating_sub(own.total());
            chosen.push(own);
        }
        Ok(Shares(chosen))
    }

    /// Returns the most bytes that a run allocates for its share beyond the resident constants, and
    /// whether it has to evict constants.
    pub(crate) fn pending_allocation(&self, shares: &Shares) -> (usize, bool) {
        let (mut bytes, mut must_evict) = (0usize, false);
        for (lane, chosen) in self.lanes.iter().zip(&shares.0) {
            bytes = bytes.saturating_add(chosen.window());
            for (constant, keep) in lane.constants.iter().zip(&chosen.keep) {
                match (constant.resident.lock().is_some(), keep) {
                    (false, true) => bytes = bytes.saturating_add(constant.bytes),
                    (true, false) => must_evict = true,
                    _ => {}
                }
            }
        }
        (bytes, must_evict)
    }

    /// Evicts the constants that do not stay.
    pub(crate) fn evict_unkept(&self, shares: &Shares) {
        for (lane, chosen) in self.lanes.iter().zip(&shares.0) {
            let goes = lane.constants.iter().zip(&chosen.keep).filter(|(_, keep)| !**keep);
            goes.for_each(|(constant, _)| *constant.resident.lock() = None);
        }
    }

    /// Evicts all constants, and trims the devices' allocators.
    pub(crate) fn evict_all(&self) {
        for lane in &self.lanes {
            lane.constants.iter().for_each(|constant| *constant.resident.lock() = None);
            lane.memory.trim();
        }
    }

    /// Whether a device has a memory limit of its own. If so, its memory may be fragmented, so that
    /// less can be allocated than the limit leaves.
    pub(crate) fn have_limits(&self) -> bool {
        // A device that cannot report this may have a limit.
        self.lanes.iter().any(|lane| lane.has_limit().unwrap_or(true))
    }

    /// Uploads the resident constants and allocates the windows. If a device has a limit, also
    /// checks that the run's own demand can be allocated beside them.
    pub(crate) fn open(
        &self,
        shares: &Shares,
        run: &OnDevices,
        budget: &Arc<Budget>,
        release: &dyn Fn(&[u8]),
    ) -> Result<RunWindows> {
        let mut opened = RunWindows::default();
        for (lane, chosen) in self.lanes.iter().zip(&shares.0) {
            // Held until the window and the resident constants are allocated, so that all of them
            // have to fit at once.
            let mut tried = Vec::new();
            if lane.has_limit()? {
                let of_run = run.iter().filter(|(memory, _)| *memory == lane.memory.device());
                for (_, bytes) in of_run {
                    tried.push(lane.memory.allocate(*bytes, ALIGNMENT)?);
                }
            }
            let window = RunLane::open(lane, chosen, budget)?;
            for (constant, _) in lane.constants.iter().zip(&chosen.keep).filter(|(_, keep)| **keep) {
                opened.residents.push((constant.slot, lane.resident(constant, budget, release)?));
            }
            opened.lanes.extend(window);
        }
        Ok(opened)
    }

    /// The largest constant of each device, as text for error messages, with its bytes.
    pub(crate) fn largest(&self) -> impl Iterator<Item = (String, usize)> {
        self.lanes.iter().filter_map(|lane| {
            let largest = lane.constants.iter().max_by_key(|constant| constant.bytes)?;
            Some((format!("constant {} on {}", largest.name, lane.device.info().name), largest.bytes))
        })
    }
}

impl Shares {
    /// The bytes of the constants that stay resident.
    pub(crate) fn kept_bytes(&self) -> usize {
        self.0.iter().map(|chosen| chosen.kept).sum()
    }

    /// The bytes of all windows.
    pub(crate) fn window_bytes(&self) -> usize {
        self.0.iter().map(ResidencyChoice::window).sum()
    }

    /// The bytes that each run uploads.
    pub(crate) fn streamed_bytes(&self) -> usize {
        self.0.iter().map(|chosen| chosen.streamed).sum()
    }
}

impl Lane {
    /// Returns `None` if the device has no streamable constants.
    fn of(program: &Program, device: &Arc<dyn Device>) -> Result<Option<Lane>> {
        let mut constants = Vec::new();
        let mut places = vec![None; program.slots.len()];
        for (index, (slot, place)) in program.slots.iter().zip(&mut places).enumerate() {
            let Origin::Streamed(host) = &slot.origin else { continue };
            if slot.memory == device.memory() {
                *place = Some(constants.len());
                let name = program.graph.value(slot.value).name.clone();
                let (slot, bytes) = (SlotId(index as u32), rounded(host.byte_count()));
                constants.push(Constant {
                    slot,
                    name,
                    host: host.clone(),
                    bytes,
                    resident: Mutex::default(),
                });
            }
        }
        let mut readers = vec![Vec::new(); constants.len()];
        let mut uploads: Vec<(usize, Vec<usize>)> = Vec::new();
        for (index, step) in program.steps.iter().enumerate() {
            let mut read: Vec<usize> =
                step.reads().filter_map(|slot| places.get(slot.index()).copied().flatten()).collect();
            // A step that reads a constant twice uploads it once.
            read.sort_unstable();
            read.dedup();
            for constant in &read {
                readers.get_mut(*constant).into_iter().for_each(|readers| readers.push(uploads.len()));
            }
            if !read.is_empty() {
                uploads.push((index, read));
            }
        }
        let sizes = constants.iter().map(|constant| constant.bytes).collect();
        let costs = Costs::new(sizes, readers, uploads.len());
        if costs.is_empty() {
            return Ok(None);
        }
        let (device, memory) = (device.clone(), guard::allocator(&**device)?);
        Ok(Some(Lane { device, memory, constants, uploads, costs }))
    }

    /// Whether the device limits its memory.
    fn has_limit(&self) -> Result<bool> {
        Ok(guard::memory_stats(&*self.device)?.limit.is_some())
    }

    fn resident_bytes(&self) -> usize {
        let resident = self.constants.iter().filter(|constant| constant.resident.lock().is_some());
        resident.map(|constant| constant.bytes).sum()
    }

    /// Returns the bytes that the device's limit leaves for constants and window beside a run.
    /// Fails if they are fewer than `least`.
    fn available(&self, of_run: usize, least: usize) -> Result<usize> {
        let stats = guard::memory_stats(&*self.device)?;
        let Some(limit) = stats.limit else { return Ok(usize::MAX) };
        // Resident constants may be evicted, so their bytes are available.
        let others = stats.in_use.saturating_sub(self.resident_bytes());
        let available = limit.saturating_sub(others);
        let of_run = rounded(of_run);
        if let Some(there) = available.checked_sub(of_run).filter(|there| *there >= least) {
            return Ok(there);
        }
        let (name, needed) = (&self.device.info().name, of_run.saturating_add(least));
        let shortage = MemoryShortage { needed, available, limit, largest: Vec::new() };
        let advice =
            format!("raise the device's memory limit to {}", exact_bytes(shortage.sufficient_limit()));
        Err(Error::out_of_memory(&format!("the run on {name}"), shortage).help(advice))
    }

    /// Returns a resident constant. Uploads it if it is not on the device yet, and then releases
    /// the file pages that the upload has read.
    fn resident(&self, constant: &Constant, budget: &Arc<Budget>, release: &dyn Fn(&[u8])) -> Result<Tensor> {
        // Held during the upload, so that concurrent runs share one copy.
        let mut resident = constant.resident.lock();
        if let Some(tensor) = &*resident {
            return Ok(tensor.clone());
        }
        let host = &constant.host;
        let memory = allocate_in(budget, Category::Weights, &*self.memory, constant.bytes, ALIGNMENT)?;
        let tensor = upload(&*self.device, host, &memory.freeze(), 0)?;
        if let Some(bytes) = host.bytes() {
            release(bytes);
        }
        *resident = Some(tensor.clone());
        Ok(tensor)
    }
}

impl RunLane {
    /// Allocates the window and lays out the uploads in it; `None` if everything stays resident.
    fn open(lane: &Lane, chosen: &ResidencyChoice, budget: &Arc<Budget>) -> Result<Option<RunLane>> {
        if chosen.halves == 0 {
            return Ok(None);
        }
        let mut uploads = Vec::new();
        for (step, read) in &lane.uploads {
            let mut offset = 0;
            let mut streamed = Vec::new();
            let passes = |constant: &&usize| chosen.keep.get(**constant) == Some(&false);
            for constant in read.iter().filter(passes).filter_map(|constant| lane.constants.get(*constant)) {
                streamed.push(Streamed { slot: constant.slot, host: constant.host.clone(), offset });
                // A multiple of the granule, so that the next offset is aligned.
                offset += constant.bytes;
            }
            if !streamed.is_empty() {
                uploads.push((*step, streamed));
            }
        }
        let half = || {
            allocate_in(budget, Category::Weights, &*lane.memory, chosen.half, ALIGNMENT)
                .map(SharedBuffer::from)
        };
        let halves = (0..chosen.halves).map(|_| half()).collect::<Result<_, _>>()?;
        Ok(Some(RunLane { device: lane.device.clone(), halves, uploads }))
    }
}

impl RunWindows {
    /// Starts the uploads of a frame through the windows.
    pub(crate) fn pass<'a>(&'a self, release: &'a (dyn Fn(&[u8]) + Sync)) -> WindowCursor<'a> {
        let lanes = self.lanes.iter();
        let lanes = lanes.map(|lane| LaneCursor { lane, release, next: 0, made: 0, ahead: None });
        WindowCursor { residents: &self.residents, lanes: lanes.collect() }
    }
}

impl<'a> WindowCursor<'a> {
    /// Whether no constants pass through a window.
    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The resident constants, with their slots.
    pub(crate) fn residents(&self) -> &'a [(SlotId, Tensor)] {
        self.residents
    }

    /// Returns the constants that a step reads, and uploads them unless they were prefetched. Then
    /// prefetches the constants of the next step for which `runs` is true.
    pub(crate) fn arrive(&mut self, step: usize, runs: &dyn Fn(usize) -> bool) -> Result<Arrived> {
        let mut arrived = Arrived::new();
        for passing in &mut self.lanes {
            // Nothing is prefetched for the first step of a frame, or if the window has only one
            // half.
            if passing.ahead.as_ref().is_none_or(|(ahead, _)| *ahead != step) {
                let Some(own) = passing.upload(&|reader| reader == step)? else { continue };
                passing.ahead = Some(own);
            }
            arrived.extend(passing.ahead.take().into_iter().flat_map(|(_, tensors)| tensors));
            // Prefetch into the other half before the step that reads this half is issued.
            if passing.lane.halves.len() > 1 {
                passing.ahead = passing.upload(&|reader| reader > step && runs(reader))?;
            }
        }
        Ok(arrived)
    }
}

impl LaneCursor<'_> {
    /// Uploads the constants of the next step that `is_next` accepts, and skips the steps before
    /// it.
    fn upload(&mut self, is_next: &dyn Fn(usize) -> bool) -> Result<Option<(usize, Arrived)>> {
        let rest = self.lane.uploads.get(self.next..).unwrap_or_default();
        let Some(place) = rest.iter().position(|(reader, _)| is_next(*reader)) else { return Ok(None) };
        let Some((step, streamed)) = rest.get(place) else { return Ok(None) };
        let half = self.lane.halves.get(self.made % self.lane.halves.len().max(1));
        let half = half.ok_or_else(|| error!(Fail, "a window without halves"))?;
        let mut arrived = Arrived::new();
        for Streamed { slot, host, offset } in streamed {
            arrived.push((*slot, upload(&*self.lane.device, host, half, *offset)?));
            // The pages are read from the file again if a later step reads the constant.
            if let Some(bytes) = host.bytes() {
                (self.release)(bytes);
            }
        }
        self.next += place + 1;
        self.made += 1;
        Ok(Some((*step, arrived)))
    }
}

/// Uploads a host tensor to a device buffer at byte `offset`.
fn upload(device: &dyn Device, host: &Tensor, buffer: &SharedBuffer, offset: usize) -> Result<Tensor> {
    let (dtype, shape) = (host.dtype(), host.shape());
    let range = DeviceRange { buffer, offset, len: host.byte_count() };
    guard::copy(device, host.view(), TensorMut::device(dtype, shape, range))?;
    Tensor::from_device_at(dtype, shape, (buffer.clone(), offset))
}
