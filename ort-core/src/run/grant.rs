//! Admission of runs: reserves the memory of a run before its first node, or refuses the run.
//!
//! A [`Grant`] holds the reserved resources: the host slab, windows for streamed constants, a lock
//! on the packed weights and, under a memory limit, bytes set aside in the budget.
//! [`Executor::frame`] runs one frame with a grant. A split run uses the same grant for all of its
//! parts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ort_alloc::{
    Advance, Budget, Buffer, Category, DeviceId, HostAllocator, allocate_in, exact_bytes, free_memory_bytes,
};

use super::deferred::WeightPacking;
use super::frame::{Frame, FrameMemory, RunEnv, Slabs, device_slabs};
use super::inputs::Given;
use super::streaming::{AvailableMemory, Streaming, WeightLock, WeightResidency};
use super::streaming::{OnDevices, RunWindows};
use super::tables::{StepTables, Tables};
use super::{Executor, RunOptions};
use crate::dim::Bindings;
use crate::ep::dynamic::RunMemory;
use crate::ep::interrupt::{Watch, enter};
use crate::ep::{OutputsFrom, RunControl, guard};
use crate::plan::{Planning, RunPlan, Storage, largest_at_peak};
use crate::program::{Program, Step};
use crate::tensor::{TensorBuffer, byte_count};
use crate::{Error, ErrorKind, MemoryShortage, Result, error};

/// The plan, bindings and inputs of one pass through the program.
pub(crate) struct RunWork<'a> {
    pub(crate) plan: &'a RunPlan,
    pub(crate) bindings: &'a Bindings,
    pub(crate) given: Given<'a>,
}

/// The bytes that a run needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryDemand {
    /// Bytes of the host slab.
    pub(crate) slab: usize,
    /// Bytes of everything else that the run allocates.
    pub(crate) rest: usize,
    /// The part of `rest` on each device: slabs, and values with buffers of their own.
    pub(crate) on_devices: OnDevices,
    /// Whether the run may need more, because some sizes are known only at run time.
    pub(crate) is_open_ended: bool,
}

impl MemoryDemand {
    /// The demand of a run with this plan.
    pub(crate) fn of(program: &Program, plan: &RunPlan) -> MemoryDemand {
        let slabs = plan.slabs.iter().filter(|(memory, _)| *memory != DeviceId::HOST);
        let mut on_devices: OnDevices = slabs.copied().collect();
        for (memory, bytes) in &mut on_devices {
            let slots = program.slots.iter().zip(&plan.slots);
            let own = slots
                .filter(|(slot, planned)| slot.memory == *memory && matches!(planned.storage, Storage::Own));
            for (_, planned) in own {
                let size = planned.dtype.zip(planned.shape.as_deref());
                *bytes = bytes.saturating_add(
                    size.and_then(|(dtype, shape)| byte_count(dtype, shape).ok()).unwrap_or(0),
                );
            }
        }
        add_nested(program, plan, &mut on_devices);
        // Values that kernels and subgraphs allocate themselves may come with tables that no plan
        // counts.
        let hands_over = |step: &Step| step.claim.outputs != OutputsFrom::Plan;
        let is_open_ended = plan.has_dynamic || program.steps.iter().any(hands_over);
        MemoryDemand {
            slab: plan.host_slab(),
            rest: plan.peak() - plan.host_slab(),
            on_devices,
            is_open_ended,
        }
    }

    /// The bytes of the slab and of everything else.
    pub(crate) fn total(&self) -> usize {
        self.slab.saturating_add(self.rest)
    }

    /// The bytes on a device.
    pub(crate) fn on(&self, memory: DeviceId) -> usize {
        self.on_devices.iter().filter(|(device, _)| *device == memory).map(|(_, bytes)| *bytes).sum()
    }

    /// The maximum of two demands, field by field.
    pub(crate) fn or(self, other: MemoryDemand) -> MemoryDemand {
        let mut on_devices = self.on_devices;
        for (memory, bytes) in other.on_devices {
            match on_devices.iter_mut().find(|(known, _)| *known == memory) {
                Some((_, known)) => *known = bytes.max(*known),
                None => on_devices.push((memory, bytes)),
            }
        }
        MemoryDemand {
            slab: self.slab.max(other.slab),
            rest: self.rest.max(other.rest),
            on_devices,
            is_open_ended: self.is_open_ended || other.is_open_ended,
        }
    }
}

/// The memory that a run holds from before its first node until its end.
pub(crate) struct Grant<'s> {
    room: WeightResidency,
    slab: Buffer,
    windows: RunWindows,
    advance: Option<Advance>,
    deadline: Option<Instant>,
    /// Whether the run may evict packed weights: it holds the weight lock exclusively.
    may_evict: bool,
    /// The last field, because the next run may start only after this one has freed its memory.
    _turn: Option<WeightLock<'s>>,
}

impl Grant<'_> {
    /// Whether some weights are packed again each time a step needs them.
    pub(crate) fn streams(&self) -> bool {
        self.room.window > 0
    }

    /// Whether the run streams weights or constants from the model's files.
    fn reads_in_passing(&self) -> bool {
        self.room.window > 0 || self.room.shares.window_bytes() > 0
    }
}

impl Executor {
    /// Runs the program once, unsplit: reserves the memory and calls `run` with a frame.
    pub(crate) fn execute<T>(
        &self,
        work: RunWork<'_>,
        memory: (&mut [Option<TensorBuffer>], &mut Tables),
        options: &RunOptions<'_>,
        run: impl FnOnce(&mut Frame<'_>, &mut StepTables) -> Result<T>,
    ) -> Result<T> {
        let whole = |available: usize| {
            let need = MemoryDemand::of(&self.compiled.program, work.plan);
            self.check_fits(work.plan, &need, available)?;
            Ok((need, ()))
        };
        let (mut grant, ()) = self.grant(options, whole)?;
        let done = self.frame(&mut grant, work, memory, options, run)?;
        self.end(grant, options);
        Ok(done)
    }

    /// Waits for the weight lock and reserves the memory of the run, or refuses the run before its
    /// first node. `choose` gets the available bytes and returns the demand. The model's files are
    /// checked here, because every run calls this function.
    pub(crate) fn grant<C>(
        &self,
        options: &RunOptions<'_>,
        choose: impl Fn(usize) -> Result<(MemoryDemand, C)>,
    ) -> Result<(Grant<'_>, C)> {
        self.files.check_files(false)?;
        self.kept.dynamic.check_shrink(&options.shrink_arenas)?;
        let deadline = options.deadline.or_else(|| self.limits.until());
        let windows = &self.compiled.streams.windows;
        for eighths in (0..=8).rev() {
            let granted = match self.try_grant(deadline, &choose, eighths) {
                // Other processes may have freed memory since the limit was read.
                Err(problem) if problem.shortage().is_some() && self.follow_machine() => {
                    self.try_grant(deadline, &choose, eighths)
                }
                granted => granted,
            };
            match granted {
                // A device's memory may be fragmented, so that less can be allocated than its limit
                // leaves. Evict all constants, and retry with an eighth less for them.
                Err(problem) if is_fragmented(&problem) && eighths > 0 && windows.have_limits() => {
                    windows.evict_all();
                }
                granted => return granted,
            }
        }
        Err(error!(Fail, "no attempt to reserve the run's memory succeeded or failed"))
    }

    /// Raises the budget of a session without a limit of its own to the memory that is free on the
    /// machine now. Returns whether the budget has grown.
    pub(crate) fn follow_machine(&self) -> bool {
        let Some((budget, free)) = self.machine.as_ref().zip(free_memory_bytes()) else { return false };
        // Free memory does not include the bytes that the session holds already.
        budget.raise_limit(free.saturating_add(budget.in_use()))
    }

    /// Tries to grant the run. On devices with a limit, constants get the least that they need,
    /// plus `eighths` / 8 of the memory that is then left.
    fn try_grant<C>(
        &self,
        deadline: Option<Instant>,
        choose: &impl Fn(usize) -> Result<(MemoryDemand, C)>,
        eighths: usize,
    ) -> Result<(Grant<'_>, C)> {
        let (streams, program) = (&self.compiled.streams, &self.compiled.program);
        let free = || {
            let available = self.free_bytes();
            let (need, chosen) = choose(available)?;
            // Leave as many bytes free as earlier runs had to evict for values of unknown size.
            // Otherwise weights would be packed only to be evicted.
            let open_end = if need.is_open_ended { self.kept.evicted.load(Ordering::Relaxed) } else { 0 };
            let bytes = available.saturating_sub(need.total());
            // The windows still get the least that they need.
            let bytes = bytes.saturating_sub(open_end).max(streams.least_bytes().min(bytes));
            let on_devices = need.on_devices.clone();
            Ok((
                AvailableMemory { bytes, on_devices, eighths, is_open_ended: need.is_open_ended },
                (need, chosen),
            ))
        };
        let (room, (need, chosen), turn) = streams.turn(program, free, deadline)?;
        let slab = self.take_slab(&need, room.to_pack)?;
        // Under a memory limit, set aside the bytes that the run will allocate, so that other runs
        // cannot make it fail midway.
        let advance = match self.kept.outputs {
            None => Some(self.budget.advance(need.rest.saturating_add(room.to_pack))?),
            Some(_) => None,
        };
        let budget = advance.as_ref().map_or(&self.budget, Advance::budget);
        let release = |bytes: &[u8]| self.files.release(bytes);
        let windows = streams.windows.open(&room.shares, &need.on_devices, budget, &release)?;
        let may_evict = matches!(turn, Some(WeightLock::Alone { .. }));
        Ok((Grant { room, _turn: turn, slab, windows, advance, deadline, may_evict }, chosen))
    }

    /// The budget that a granted run allocates from: the bytes set aside for it, or else the
    /// session's budget.
    pub(crate) fn budget_of<'b>(&'b self, grant: &'b Grant<'_>) -> &'b Arc<Budget> {
        grant.advance.as_ref().map_or(&self.budget, Advance::budget)
    }

    /// Calls `run` with a frame that works in the granted memory.
    pub(crate) fn frame<T>(
        &self,
        grant: &mut Grant<'_>,
        work: RunWork<'_>,
        (bound, tables): (&mut [Option<TensorBuffer>], &mut Tables),
        options: &RunOptions<'_>,
        run: impl FnOnce(&mut Frame<'_>, &mut StepTables) -> Result<T>,
    ) -> Result<T> {
        let RunWork { plan, bindings, given } = work;
        let Grant { room, slab, windows, advance, deadline, may_evict, .. } = grant;
        let may_evict = *may_evict;
        let evict = |bytes: usize| self.evict(bytes, may_evict);
        let budget = advance.as_ref().map_or(&self.budget, Advance::budget);
        let control = RunControl {
            cancel: options.cancel.clone(),
            deadline: *deadline,
            budget: budget.clone(),
            threads: self.threads,
        };
        let release = |bytes: &[u8]| self.files.release(bytes);
        let streaming = (!self.compiled.streams.is_empty()).then_some(Streaming {
            streams: &self.compiled.streams,
            keep: &room.keep,
            budget,
            threads: self.threads,
            release: &release,
            evict: &evict,
        });
        let memory = RunMemory { dynamic: &self.kept.dynamic, budget, evict: &evict };
        let env = RunEnv {
            control: &control,
            devices: &self.compiled.devices,
            plans: &self.compiled.plans,
            profile: options.profile,
            observer: options.observer,
            outputs: self.output_allocator(),
            planning: self.planning,
            depth: 0,
            poison: self.poison,
            memory,
            outlives_run: true,
            packing: WeightPacking {
                weights: &self.compiled.deferred,
                devices: &self.compiled.devices,
                control: &control,
                files: &self.files,
            },
            streaming,
        };
        let host = slab.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        let devices = device_slabs(plan, &env, None)?;
        let windows = windows.pass(&release);
        let memory = FrameMemory {
            slabs: Slabs { host, devices: &devices },
            windows,
            bound,
            owned: &mut tables.owned,
        };
        let mut frame = Frame::new((&self.compiled.program, plan, bindings), &env, given, memory);
        let (cancel, deadline) = (control.cancel.clone(), control.deadline);
        let _watch = enter(Watch { what: "the run", cancel, deadline });
        // Each kernel has a panic guard of its own. This one turns a panic anywhere else in the run
        // into an error, too. On an error the slab is dropped instead of kept.
        let done = guard::call(|| "a run".to_string(), || run(&mut frame, &mut tables.step));
        done.map_err(|problem| with_least_limit(problem, self.planning))
    }

    /// Frees at least `bytes` of memory that a run can spare, or all of it if there is less. Frees
    /// idle slabs first, then packed weights if `may_evict_weights`. Returns the bytes freed.
    pub(crate) fn evict(&self, bytes: usize, may_evict_weights: bool) -> usize {
        // The slabs are taken out first, so that the lock is not held while they are freed.
        let slabs = std::mem::take(&mut *self.kept.slabs.lock());
        let idle: usize = slabs.iter().map(Buffer::len).sum();
        drop(slabs);
        if idle >= bytes || !may_evict_weights {
            return idle;
        }
        let packed = self.compiled.streams.evict(&self.compiled.program, bytes - idle);
        self.kept.evicted.fetch_add(packed, Ordering::Relaxed);
        idle + packed
    }

    /// Ends a run: keeps its slab for the next one, releases the pages of streamed weights, and
    /// shrinks the arenas that the options name.
    pub(crate) fn end(&self, grant: Grant<'_>, options: &RunOptions<'_>) {
        if grant.reads_in_passing() {
            // The pages that streaming has read would add up to the whole file.
            self.files.release_all();
        }
        self.kept.run_ended(Some(grant.slab).filter(|_| self.planning != Planning::Off));
        self.kept.dynamic.shrink(&options.shrink_arenas);
        self.compiled.devices.iter().for_each(|device| guard::end_of_run(&**device));
    }

    /// The bytes that a run may take: the unused budget, idle slabs and arena regions, and packed
    /// weights and constants that may be evicted.
    pub(crate) fn free_bytes(&self) -> usize {
        let streams = &self.compiled.streams;
        let packed =
            streams.resident_bytes(&self.compiled.program).saturating_add(streams.windows.resident_bytes());
        let idle = self.kept.slab_bytes().saturating_add(self.kept.dynamic.idle_bytes());
        self.budget.available().saturating_add(idle).saturating_add(packed)
    }

    /// Refuses an unsplit run that `available` bytes cannot hold.
    fn check_fits(&self, plan: &RunPlan, need: &MemoryDemand, available: usize) -> Result<()> {
        let needed = need.total().saturating_add(self.compiled.streams.least_bytes());
        if needed <= available {
            return Ok(());
        }
        let largest = largest_at_peak(plan, &self.compiled.program);
        Err(self.shortage("the run", (needed, available), largest, None))
    }

    /// Returns the error for a run that needs more than is available. `subject` is the run in
    /// words, `largest` has its largest values, and `unsplit` says why the batch was not split.
    pub(crate) fn shortage(
        &self,
        subject: &str,
        (needed, available): (usize, usize),
        mut largest: Vec<(String, usize)>,
        unsplit: Option<String>,
    ) -> Error {
        largest.extend(self.compiled.streams.largest(&self.compiled.program));
        largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        largest.truncate(5);
        let (_, limit) = self.budget.tightest();
        let shortage = MemoryShortage { needed, available, limit, largest };
        let unsplit = unsplit.map_or_else(String::new, |why| format!("; {why}"));
        let raise = format!("raise the memory limit to {}", exact_bytes(shortage.sufficient_limit()));
        let window = self.compiled.streams.least_bytes();
        let advice = match window > available {
            // No dimension changes the size of a weight.
            true => format!(
                "{raise}; smaller dimensions are not enough, because the largest packed weight needs {}",
                exact_bytes(window)
            ),
            false => format!("{raise}, or use smaller dimensions{unsplit}"),
        };
        Error::out_of_memory(subject, shortage).help(advice)
    }

    /// Returns a slab for a run: an idle one that fits and is at most about twice too large, or a
    /// new one. Leaves `to_pack` bytes free for weights.
    fn take_slab(&self, need: &MemoryDemand, to_pack: usize) -> Result<Buffer> {
        const SLACK: usize = 1 << 20;
        let bytes = need.slab;
        // The bytes that the run allocates beside its slab.
        let rest = need.rest.saturating_add(to_pack);
        if self.budget.available() < rest.saturating_add(bytes) {
            // Arena regions count in the budget even while they are free.
            self.kept.dynamic.trim();
        }
        let mut idle = self.kept.slabs.lock();
        let fits = |buffer: &Buffer| buffer.len() >= bytes && buffer.len() <= bytes.saturating_mul(2) + SLACK;
        let mut found = idle.iter().position(fits).map(|index| idle.swap_remove(index));
        if found.is_none() {
            // No idle slab fits. An idle slab beside the new one would only add to the resident
            // size.
            idle.pop();
        }
        // If the budget is short, free idle slabs. The slab that was found goes last; it may be
        // larger than this run needs.
        while self.budget.available() < rest && idle.pop().is_some() {}
        if self.budget.available() < rest {
            found = None;
        }
        if let Some(slab) = found {
            return Ok(slab);
        }
        while self.budget.available() < rest.saturating_add(bytes) && idle.pop().is_some() {}
        drop(idle);
        Ok(allocate_in(&self.budget, Category::Slab, &**HostAllocator::global(), bytes, 64)?)
    }
}

/// Adds to the demand on each device the most bytes that a subgraph needs there beside its slab.
/// The slabs of subgraphs are ranges of the run's own slabs.
fn add_nested(program: &Program, plan: &RunPlan, on_devices: &mut OnDevices) {
    if on_devices.is_empty() {
        return;
    }
    let mut most: OnDevices = on_devices.iter().map(|(memory, _)| (*memory, 0)).collect();
    for (step, planned) in program.steps.iter().zip(&plan.steps) {
        for (nested, plan) in step.nested.iter().zip(&planned.nested) {
            for (memory, bytes) in MemoryDemand::of(&nested.program, plan).on_devices {
                let slab = plan.slabs.iter().find(|slab| slab.0 == memory).map_or(0, |slab| slab.1);
                if let Some((_, most)) = most.iter_mut().find(|(known, _)| *known == memory) {
                    *most = bytes.saturating_sub(slab).max(*most);
                }
            }
        }
    }
    for ((_, bytes), (_, more)) in on_devices.iter_mut().zip(most) {
        *bytes = bytes.saturating_add(more);
    }
}

/// Adds to an out-of-memory error the memory that the run needed up to that node.
fn with_least_limit(problem: Error, planning: Planning) -> Error {
    let Some(limit) = problem.shortage().map(MemoryShortage::sufficient_limit) else { return problem };
    let limit = exact_bytes(limit);
    let raise = format!("raise the memory limit to at least {limit}, which the run needs up to this node");
    problem.help_of_run(match planning {
        Planning::Off => format!("{raise}; memory patterns are off, so no run is planned, and later nodes may need more; \
             turn them on to know the limit"),
        _ => format!(
            "{raise}; the sizes of some values are known only once they are computed, and later ones may need more"
        ),
    })
}

/// Whether an allocator failed although every limit had room. The reason is then fragmentation.
fn is_fragmented(problem: &Error) -> bool {
    problem.kind() == ErrorKind::OutOfMemory && problem.shortage().is_none()
}
