//! Kernel execution. The blocks are spread over the machine's cores; within a block, each thread
//! runs until it must wait.

mod block_memory;
mod interpreter;
mod thread;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::bulk::Barriers;
use crate::decode::{Function, NONE, Op, special};
use crate::warp::{Trouble, WarpOp};
use crate::warpgroup::Groups;
use crate::{Fault, Result, code};

pub(crate) use block_memory::Mem;
pub(crate) use thread::Thread;

use interpreter::run;
use thread::State;

/// The base of shared memory in the generic address space.
pub(crate) const SHARED_WINDOW: u64 = 0x7000_0000_0000_0000;
/// The base of local memory in the generic address space.
pub(crate) const LOCAL_WINDOW: u64 = 0x7100_0000_0000_0000;

/// One launch.
pub(crate) struct Launch<'a> {
    pub(crate) functions: &'a [Function],
    pub(crate) entry: usize,
    /// The module's text, for error messages.
    pub(crate) text: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub(crate) dynamic: usize,
    /// The parameters, as laid out in local memory.
    pub(crate) parameters: Vec<u8>,
    /// Start and end of all accessible device memory, in order.
    pub(crate) table: Vec<(u64, u64)>,
    pub(crate) budget: u64,
    pub(crate) steps: AtomicU64,
}

struct Worker<'a> {
    launch: &'a Launch<'a>,
    mem: Mem<'a>,
    threads: Vec<Thread>,
    /// The state of each warp's `wgmma` operations.
    groups: Vec<Groups>,
}

impl Worker<'_> {
    fn fault(&self, code: u32, thread: usize, what: &str) -> Fault {
        let t = &self.threads[thread];
        let function = &self.launch.functions[t.function];
        let line = function.lines.get(t.pc).copied().unwrap_or(0);
        let text = self.launch.text.lines().nth(line.saturating_sub(1) as usize).unwrap_or("").trim();
        let id = |at: usize| {
            let id: Vec<String> = (at..at + 3).map(|k| t.get(k as u32).to_string()).collect();
            id.join(",")
        };
        let kernel = &self.launch.functions[self.launch.entry].name;
        let message =
            format!("{kernel}: block {} thread {}: {what} in line {line}: {text}", id(6), id(special::TID));
        Fault::new(code, message)
    }

    fn reset(&mut self, index: u64) {
        let Launch { functions, entry, grid, block, dynamic, parameters, .. } = self.launch;
        let function = &functions[*entry];
        // Dynamic shared memory follows the static variables.
        let fixed = function.shared.next_multiple_of(function.dynamic_align);
        self.mem.reset(fixed + dynamic, self.threads.len());
        self.groups.clear();
        self.groups.resize_with(self.threads.len().div_ceil(32), Groups::default);
        let (x, rest) = (index % u64::from(grid[0]), index / u64::from(grid[0]));
        let place = [x, rest % u64::from(grid[1]), rest / u64::from(grid[1])];
        for (number, t) in self.threads.iter_mut().enumerate() {
            t.regs.clear();
            t.regs.extend_from_slice(&function.template);
            t.local.clear();
            // All ones, so that reads before writes show.
            t.local.resize(function.local.max(parameters.len()).div_ceil(size_of::<u128>()), u128::MAX);
            t.local()[..parameters.len()].copy_from_slice(parameters);
            t.frames.clear();
            (t.base, t.pc, t.function, t.state) = (0, 0, *entry, State::Run);
            (t.carry, t.is_early) = (false, false);
            let (n, [bx, by, _]) = (number as u32, *block);
            // Threads are numbered with x fastest. The number decides warp and lane.
            let thread = [n % bx, n / bx % by, n / (bx * by)];
            for axis in 0..3 {
                t.regs[special::TID + axis] = thread[axis].into();
                t.regs[special::TID + 3 + axis] = block[axis].into();
                t.regs[special::TID + 6 + axis] = place[axis];
                t.regs[special::TID + 9 + axis] = grid[axis].into();
            }
            let lane = n % 32;
            t.regs[special::LANE] = lane.into();
            t.regs[special::WARP] = (n / 32).into();
            let (equal, below) = (1u32 << lane, (1u32 << lane) - 1);
            for (k, mask) in [equal, below | equal, below, !below, !(below | equal)].into_iter().enumerate() {
                t.regs[special::MASKS + k] = mask.into();
            }
            t.regs[special::DYNAMIC] = fixed as u64;
            t.regs[special::LOCAL] = 0;
            t.regs[special::DYNAMIC_SIZE] = *dynamic as u64;
        }
    }

    /// Executes a warp operation if all of its threads have reached it; returns whether one was
    /// executed.
    fn together(&mut self, start: usize, end: usize) -> Result<bool> {
        let functions = self.launch.functions;
        let (mut live, mut waiting) = (0u32, 0u32);
        for (lane, t) in self.threads[start..end].iter().enumerate() {
            live |= u32::from(t.state != State::Done) << lane;
            waiting |= u32::from(t.state == State::Warp) << lane;
        }
        let mut open = waiting;
        while open != 0 {
            let first = start + open.trailing_zeros() as usize;
            let (function, pc) = (self.threads[first].function, self.threads[first].pc);
            let Op::Warp { number } = functions[function].code[pc] else { return Ok(false) };
            let op = &functions[function].warps[number as usize];
            let slot = op.mask();
            let mask_of = |t: &Thread| if slot == NONE { !0 } else { t.get(slot) as u32 };
            let mask = mask_of(&self.threads[first]);
            // Only threads at the same operation with the same mask form a group: others may have
            // diverged.
            let mut here = 0u32;
            for (lane, t) in self.threads[start..end].iter().enumerate() {
                let same =
                    t.state == State::Warp && t.function == function && t.pc == pc && mask_of(t) == mask;
                here |= u32::from(same) << lane;
            }
            if here & !mask != 0 {
                return Err(self.fault(code::LAUNCH_FAILED, first, "a thread is not in its own mask"));
            }
            // Threads of the mask that have exited are not waited for.
            if here == mask & live {
                let lanes = &mut self.threads[start..end];
                if let Err(trouble) = op.run(lanes, here, &mut self.mem, &mut self.groups[start / 32]) {
                    return Err(self.fault(trouble.code, first, trouble.what));
                }
                for (lane, t) in lanes.iter_mut().enumerate() {
                    if here >> lane & 1 != 0 {
                        t.pc += 1;
                        t.state = State::Run;
                    }
                }
                return Ok(true);
            }
            // `here` contains `first`, so each round removes a lane and the loop ends.
            open &= !here;
        }
        Ok(false)
    }

    /// Releases barriers that all of their threads have reached; returns whether one opened.
    fn barrier(&mut self) -> bool {
        let live = self.threads.iter().filter(|t| t.state != State::Done).count();
        let mut opened = false;
        // Each barrier that stays closed is counted once, not for each of its threads.
        let mut closed = Vec::new();
        for at in 0..self.threads.len() {
            let state = self.threads[at].state;
            let State::Barrier(id, count) = state else { continue };
            if closed.contains(&state) {
                continue;
            }
            let same = |t: &&mut Thread| matches!(t.state, State::Barrier(other, _) if other == id);
            let waiting = self.threads.iter_mut().filter(same).count();
            // Without a count, all threads that have not exited must arrive.
            let needed = if count == 0 { live } else { count as usize };
            if waiting >= needed {
                self.threads.iter_mut().filter(same).for_each(|t| t.state = State::Run);
                opened = true;
            } else {
                closed.push(state);
            }
        }
        opened
    }

    /// Performs the copies in flight and wakes the threads that waited for them; returns whether
    /// there was progress.
    fn land(&mut self) -> Result<bool> {
        let has_landed = self.mem.land();
        let mut progress =
            has_landed.map_err(|(thread, trouble)| self.fault(trouble.code, thread, trouble.what))?;
        for thread in 0..self.threads.len() {
            let State::Phase(barrier, parity) = self.threads[thread].state else { continue };
            match self.mem.is_over(barrier, parity) {
                Ok(false) => {}
                Ok(true) => (self.threads[thread].state, progress) = (State::Run, true),
                Err(trouble) => return Err(self.fault(trouble.code, thread, trouble.what)),
            }
        }
        Ok(progress)
    }

    fn block(&mut self, index: u64) -> Result<()> {
        self.reset(index);
        let count = self.threads.len();
        let mut steps = 0;
        loop {
            // Only once per round, so that copies stay in flight until every thread has had a turn.
            let mut progress = self.land()?;
            for start in (0..count).step_by(32) {
                let end = (start + 32).min(count);
                loop {
                    let (mut ran, mut cut) = (false, false);
                    let mut live = 0u32;
                    for (lane, t) in self.threads[start..end].iter().enumerate() {
                        live |= u32::from(t.state != State::Done) << lane;
                    }
                    for at in start..end {
                        if self.threads[at].state != State::Run {
                            continue;
                        }
                        ran = true;
                        let (used, result) =
                            run(self.launch.functions, &mut self.mem, &mut self.threads[at], live);
                        steps += used;
                        cut |= self.threads[at].state == State::Run;
                        if let Err(fault) = result {
                            let what = self.mem.trouble.unwrap_or(Trouble::from(fault).what);
                            return Err(self.fault(fault, at, what));
                        }
                    }
                    if ran {
                        let total = self.launch.steps.fetch_add(steps, Relaxed) + steps;
                        steps = 0;
                        if total > self.launch.budget {
                            return Err(self.fault(code::LAUNCH_TIMEOUT, start, "too many instructions"));
                        }
                    }
                    let together = self.together(start, end)?;
                    progress |= ran || together;
                    // After a cut-off turn other warps must run, because this one may spin on what
                    // they write.
                    if cut || !together {
                        break;
                    }
                }
            }
            if self.threads.iter().all(|t| t.state == State::Done) {
                if self.mem.has_flights() {
                    let what = "the block ends before copies that it asked for";
                    return Err(self.fault(code::LAUNCH_FAILED, 0, what));
                }
                return Ok(());
            }
            // All threads wait, and neither a barrier nor a warp operation nor a copy can release
            // one.
            if !self.barrier() && !progress {
                let at = self.threads.iter().position(|t| t.state != State::Done).unwrap_or(0);
                let what = format!("a deadlock ({:?})", self.threads[at].state);
                return Err(self.fault(code::LAUNCH_FAILED, at, &what));
            }
        }
    }
}

/// Runs all blocks.
pub(crate) fn launch(launch: &Launch) -> Result<()> {
    let blocks: u64 = launch.grid.iter().map(|n| u64::from(*n)).product();
    let size: usize = launch.block.iter().map(|n| *n as usize).product();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let failed: Mutex<Option<Fault>> = Mutex::new(None);
    let has_groups =
        launch.functions.iter().flat_map(|function| &function.warps).any(|op| matches!(op, WarpOp::Group(_)));
    let work = || {
        let table = launch.table.as_slice();
        let mem = Mem {
            table,
            recent: [(0, 0); 64],
            shared: Vec::new(),
            shared_size: 0,
            // Only `wgmma` needs the writers, so other modules skip the tracking.
            writes: has_groups.then(Vec::new),
            clock: 0,
            fences: Vec::new(),
            barriers: Barriers::default(),
            trouble: None,
        };
        let threads = (0..size).map(Thread::new).collect();
        let mut worker = Worker { launch, mem, threads, groups: Vec::new() };
        while !stop.load(Relaxed) {
            let index = next.fetch_add(1, Relaxed);
            if index >= blocks {
                break;
            }
            if let Err(fault) = worker.block(index) {
                // The first fault is reported. The other workers end after their blocks.
                stop.store(true, Relaxed);
                failed.lock().get_or_insert(fault);
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    std::thread::scope(|scope| {
        for _ in 1..cores.min(blocks) {
            scope.spawn(work);
        }
        work();
    });
    match failed.into_inner() {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}
