//! On-demand weight packing, for sessions whose memory limit cannot hold all packed weights at
//! once.
//!
//! Each run decides which weights stay packed: the largest first, if they fit beside its
//! activations. The others pass through a window one at a time: they are packed from the model's
//! file right before their step, and freed after it. Results are bit-identical either way.
//!
//! An `RwLock` serializes the runs that pack or evict weights or device constants
//! ([`constants`](super::constants)). Runs that have nothing to pack or evict share the lock.
//!
//! Packed weights are evicted for values whose size is known only at run time. A run that may have
//! such values takes the lock exclusively, so that it may evict all weights that no step is using
//! ([`Streams::evict`]). Such a run fails midway only if its values do not fit beside the window,
//! with all other weights evicted.

use std::sync::Arc;
use std::time::Instant;

use ort_alloc::Budget;
use ort_alloc::fork::PerProcess;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::ep::{
    Account, CompileCx, CompileSettings, Device, Executable, NodeView, Owner, Packing, Precision, guard,
};
use crate::program::{Program, Step, StreamedKernel, Work};
use crate::run::streaming::{OnDevices, Shares, Windows};
use crate::tensor::Tensor;
use crate::{ErrorKind, Result, error};

/// What a run needs to pack weights.
#[derive(Clone, Copy)]
pub(crate) struct Streaming<'a> {
    pub(crate) streams: &'a Streams,
    /// By step: whether its weights stay packed.
    pub(crate) keep: &'a [bool],
    /// The budget that packed weights count in.
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) threads: usize,
    /// Called with bytes of weights whose pages of the model's file are no longer needed.
    pub(crate) release: &'a (dyn Fn(&[u8]) + Sync),
    /// Frees memory that the run can spare, at least the requested bytes if there are that many.
    /// Returns the bytes freed.
    pub(crate) evict: &'a (dyn Fn(usize) -> usize + Sync),
}

/// Which weights a run keeps packed, and the memory for the rest.
#[derive(Default)]
pub(crate) struct WeightResidency {
    /// By step: whether its weights stay packed.
    pub(crate) keep: Vec<bool>,
    /// The bytes of the window; zero if all weights stay.
    pub(crate) window: usize,
    /// The most bytes that the run packs or uploads and holds at once, beyond those in memory
    /// already.
    pub(crate) to_pack: usize,
    /// Whether packed weights or resident constants have to be evicted.
    must_evict: bool,
    /// The resident device constants, and their windows.
    pub(crate) shares: Shares,
}

/// The memory that is free for a run's weights.
pub(crate) struct AvailableMemory {
    /// Bytes of the session's budget beside the run's activations.
    pub(crate) bytes: usize,
    /// The bytes that the run takes on each device.
    pub(crate) on_devices: OnDevices,
    /// The share, in eighths, that constants may take of the device memory beyond the least that
    /// they need.
    pub(crate) eighths: usize,
    /// Whether the run may need more memory, because some sizes are known only at run time.
    pub(crate) is_open_ended: bool,
}

/// The lock on packed weights for the duration of a run: shared if the run has nothing to pack or
/// evict, else exclusive.
pub(crate) enum WeightLock<'a> {
    Shared { _guard: RwLockReadGuard<'a, ()> },
    Alone { _guard: RwLockWriteGuard<'a, ()> },
}

/// The streamed kernels of a program.
pub(crate) struct Streams {
    /// The steps and the bytes that they pack, the largest first.
    steps: Vec<(usize, usize)>,
    precision: Precision,
    owner: Arc<Owner>,
    /// Held during a run. A run that packs or evicts weights holds it exclusively.
    ///
    /// A child of `fork` has a lock of its own, because it has no run that could release the
    /// parent's.
    turns: PerProcess<RwLock<()>>,
    /// The streamable device constants.
    pub(crate) windows: Windows,
}

impl Streaming<'_> {
    /// Whether the weights of a step stay packed.
    pub(crate) fn keeps(&self, index: usize) -> bool {
        self.keep.get(index).copied().unwrap_or(false)
    }

    /// Compiles the kernel with its weights packed. If values of unknown size have taken the memory
    /// that was set aside for these weights, evicts others and tries again.
    pub(crate) fn make(&self, view: NodeView<'_>, device: &dyn Device) -> Result<Box<dyn Executable>> {
        loop {
            let problem = match self.try_make(view, device) {
                Err(problem) if problem.kind() == ErrorKind::OutOfMemory => problem,
                made => return made,
            };
            // An allocator that failed without numbers may succeed once anything is freed.
            let missing = problem.shortage().map_or(1, |shortage| shortage.missing());
            if (self.evict)(missing) == 0 {
                return Err(problem);
            }
        }
    }

    /// Compiles the kernel within the free memory.
    fn try_make(&self, view: NodeView<'_>, device: &dyn Device) -> Result<Box<dyn Executable>> {
        let settings = CompileSettings { threads: self.threads, precision: self.streams.precision };
        let account = Account { budget: self.budget, owner: &self.streams.owner };
        compile_packed((view, device), settings, account, self.release)
    }
}

/// Compiles a kernel with its weights packed, and releases the file pages of these weights.
pub(crate) fn compile_packed(
    (view, device): (NodeView<'_>, &dyn Device),
    settings: CompileSettings,
    account: Account<'_>,
    release: &dyn Fn(&[u8]),
) -> Result<Box<dyn Executable>> {
    let mut compile = CompileCx::new(view, device, settings, account, Packing::Now)?;
    compile.release = release;
    let kernel = guard::compile(device, &mut compile)?;
    let consumed = compile.consumed;
    for (index, _) in consumed.iter().enumerate().filter(|(_, consumed)| **consumed) {
        if let Some(bytes) = view.constant(index).and_then(Tensor::bytes) {
            release(bytes);
        }
    }
    Ok(kernel)
}

impl Streams {
    /// Collects the streamed kernels of a program.
    pub(crate) fn of(
        program: &Program,
        (precision, owner): (Precision, &Arc<Owner>),
        windows: Windows,
    ) -> Streams {
        let steps = program.steps.iter().enumerate();
        let mut steps: Vec<_> =
            steps.filter_map(|(index, step)| Some((index, streamed(step)?.packed_bytes))).collect();
        steps.sort_by_key(|&(index, bytes)| (std::cmp::Reverse(bytes), index));
        Streams { steps, precision, owner: owner.clone(), turns: PerProcess::default(), windows }
    }

    /// The owner of the program's packed weights.
    pub(crate) fn owner(&self) -> &Arc<Owner> {
        &self.owner
    }

    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.windows.is_empty()
    }

    /// The fewest bytes of streamable weights and constants that a run needs beside its
    /// activations.
    pub(crate) fn least_bytes(&self) -> usize {
        self.least_packed_bytes().saturating_add(self.windows.least_bytes())
    }

    /// The bytes of all streamable weights and constants.
    pub(crate) fn total_bytes(&self) -> usize {
        self.packed_bytes().saturating_add(self.windows.total_bytes())
    }

    /// The bytes of the window for packed weights: the size of the largest.
    fn least_packed_bytes(&self) -> usize {
        self.steps.first().map_or(0, |(_, bytes)| *bytes)
    }

    /// The bytes of all streamable packed weights.
    pub(crate) fn packed_bytes(&self) -> usize {
        self.steps.iter().map(|(_, bytes)| bytes).sum()
    }

    /// The bytes of streamable packed weights that a run has to pack again if it has `free` bytes
    /// beside its activations.
    pub(crate) fn streamed_bytes(&self, free: usize) -> usize {
        let keep = self.choose(free);
        let streamed = self.steps.iter().filter(|(step, _)| keep.get(*step) != Some(&true));
        streamed.map(|(_, bytes)| bytes).sum()
    }

    /// Returns the shares of device constants, and the bytes left for packed weights.
    pub(crate) fn shares(&self, free: &AvailableMemory) -> Result<(Shares, usize)> {
        // Device constants come first, but the window for packed weights always remains.
        let bytes = free.bytes.saturating_sub(self.least_packed_bytes());
        let shares = self.windows.choose(bytes, &free.on_devices, free.eighths)?;
        let left = free.bytes.saturating_sub(shares.kept_bytes().saturating_add(shares.window_bytes()));
        Ok((shares, left))
    }

    /// The bytes of streamable weights that are packed now.
    pub(crate) fn resident_bytes(&self, program: &Program) -> usize {
        let kernels = self.kernels(program).filter(|kernel| kernel.resident.lock().is_some());
        kernels.map(|kernel| kernel.packed_bytes).sum()
    }

    /// Returns by step whether its weights stay packed. The weights that stay and the window fit in
    /// `free` bytes.
    pub(crate) fn choose(&self, free: usize) -> Vec<bool> {
        let mut left = free;
        let mut window = 0;
        let mut keep = vec![false; self.steps.iter().map(|(step, _)| step + 1).max().unwrap_or(0)];
        for (place, &(step, bytes)) in self.steps.iter().enumerate() {
            // The steps are sorted by size, so the first that does not stay sets the window. Until
            // then, leave room for the next one to pass through.
            let next =
                if window > 0 { window } else { self.steps.get(place + 1).map_or(0, |(_, next)| *next) };
            let stays = bytes.saturating_add(next) <= left;
            match stays {
                true => left -= bytes,
                false => window = window.max(bytes),
            }
            if let Some(keep) = keep.get_mut(step) {
                *keep = stays;
            }
        }
        keep
    }

    /// Waits for the weight lock, and evicts the weights that do not fit.
    ///
    /// `free` returns the memory that is free beside the run's activations, and the caller's choice
    /// for that memory. An error refuses the run. `free` is called while the lock is held. It is
    /// called again once the lock is exclusive, because other runs may pack in between.
    pub(crate) fn turn<'s, C>(
        &'s self,
        program: &Program,
        free: impl Fn() -> Result<(AvailableMemory, C)>,
        until: Option<Instant>,
    ) -> Result<(WeightResidency, C, Option<WeightLock<'s>>)> {
        if self.is_empty() {
            let (_, chosen) = free()?;
            return Ok((WeightResidency::default(), chosen, None));
        }
        let turns = self.turns.get();
        // Shared first: once every weight that stays is packed, a run only reads.
        let guard = in_time(until, || turns.read(), |until| turns.try_read_until(until))?;
        let (there, chosen) = free()?;
        let room = self.room(program, &there)?;
        // Values of unknown size may evict weights that a concurrent run counts on.
        let may_evict = there.is_open_ended && !self.steps.is_empty();
        if room.to_pack == 0 && !room.must_evict && !may_evict {
            return Ok((room, chosen, Some(WeightLock::Shared { _guard: guard })));
        }
        drop(guard);
        let guard = in_time(until, || turns.write(), |until| turns.try_write_until(until))?;
        let (there, chosen) = free()?;
        let room = self.room(program, &there)?;
        self.windows.evict_unkept(&room.shares);
        let goes = self
            .kernels(program)
            .zip(&self.steps)
            .filter(|(_, (step, _))| room.keep.get(*step) != Some(&true));
        goes.for_each(|(kernel, _)| *kernel.resident.lock() = None);
        Ok((room, chosen, Some(WeightLock::Alone { _guard: guard })))
    }

    /// Evicts packed weights that no step is using, the smallest first, until `bytes` are free or
    /// none is left. Returns the bytes freed. Only for a run that holds the lock exclusively.
    pub(crate) fn evict(&self, program: &Program, bytes: usize) -> usize {
        let mut gone = 0;
        for &(step, packed) in self.steps.iter().rev() {
            if gone >= bytes {
                break;
            }
            // `try_lock` fails only while another thread queries the memory.
            let kernel = program.steps.get(step).and_then(streamed);
            let Some(mut resident) = kernel.and_then(|kernel| kernel.resident.try_lock()) else { continue };
            // Another reference means that a step is running the kernel.
            if resident.as_ref().is_some_and(|kernel| Arc::strong_count(kernel) == 1) {
                *resident = None;
                gone += packed;
            }
        }
        gone
    }

    /// Returns which weights would stay packed in the free memory, and what has to be packed and
    /// evicted for this.
    fn room(&self, program: &Program, free: &AvailableMemory) -> Result<WeightResidency> {
        let (shares, left) = self.shares(free)?;
        let keep = self.choose(left);
        let mut room = WeightResidency::default();
        (room.to_pack, room.must_evict) = self.windows.pending_allocation(&shares);
        for (kernel, &(step, bytes)) in self.kernels(program).zip(&self.steps) {
            let is_resident = kernel.resident.lock().is_some();
            match keep.get(step) {
                Some(true) if is_resident => {}
                Some(true) => room.to_pack += bytes,
                _ => {
                    room.window = room.window.max(bytes);
                    room.must_evict |= is_resident;
                }
            }
        }
        room.to_pack += room.window;
        Ok(WeightResidency { keep, shares, ..room })
    }

    /// The step that packs the most bytes, and the largest constant of each device, as text for
    /// error messages, with their bytes.
    pub(crate) fn largest(&self, program: &Program) -> Vec<(String, usize)> {
        let first = self.steps.first().and_then(|&(step, bytes)| {
            Some((format!("weights of {}", program.steps.get(step)?.name), bytes))
        });
        first.into_iter().chain(self.windows.largest()).collect()
    }

    /// The streamed kernels, in the order of `steps`.
    fn kernels<'p>(&'p self, program: &'p Program) -> impl Iterator<Item = &'p StreamedKernel> {
        self.steps.iter().filter_map(|(index, _)| streamed(program.steps.get(*index)?))
    }
}

/// Takes a lock, or fails once the deadline has passed.
fn in_time<G>(
    until: Option<Instant>,
    lock: impl FnOnce() -> G,
    try_lock: impl FnOnce(Instant) -> Option<G>,
) -> Result<G> {
    match until {
        None => Ok(lock()),
        Some(until) => try_lock(until).ok_or_else(|| {
            error!(Cancelled, "the deadline passed while another run had the packed weights")
                .help("raise the memory limit, so that all packed weights stay")
        }),
    }
}

/// The streamed kernel of a step, if it has one.
fn streamed(step: &Step) -> Option<&StreamedKernel> {
    match &step.work {
        Work::Streamed(kernel) => Some(kernel),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// If the window alone fits, it also fits beside the weights that stay. If all weights fit,
        /// all stay.
        #[test]
        fn what_stays_fits_beside_the_window(sizes in prop::collection::vec(1usize..100, 1..20), free in 0usize..1500) {
            let mut steps: Vec<_> = sizes.into_iter().enumerate().collect();
            steps.sort_by_key(|&(index, bytes)| (std::cmp::Reverse(bytes), index));
            let streams = Streams { steps, precision: Precision::Fp32, owner: Arc::default(), turns: PerProcess::default(), windows: Windows::default() };
            let keep = streams.choose(free);
            let of = |stays: bool| {
                let chosen = streams.steps.iter().filter(|(step, _)| keep[*step] == stays);
                chosen.map(|(_, bytes)| *bytes).collect::<Vec<usize>>()
            };
            let (kept, window): (usize, usize) = (of(true).iter().sum(), of(false).into_iter().max().unwrap_or(0));
            prop_assert!(free < streams.least_bytes() || kept + window <= free);
            prop_assert_eq!(free >= streams.total_bytes(), window == 0);
            prop_assert_eq!(kept + streams.streamed_bytes(free), streams.total_bytes());
        }
    }
}
