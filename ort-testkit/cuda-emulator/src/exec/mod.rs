//! Kernel execution. The blocks are spread over the machine's cores. Within a block, the threads of
//! a warp that are at the same instruction run together until they part or must wait.

mod block_memory;
mod interpreter;
mod thread;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::bulk::Barriers;
use crate::decode::{Function, NONE, Op, special};
use crate::registers::LANES;
use crate::warp::{Trouble, WarpOp};
use crate::warpgroup::Groups;
use crate::{Fault, Result, code};

pub(crate) use block_memory::Mem;
pub(crate) use thread::{Warp, lanes};

use interpreter::{TURN, run};
use thread::{Group, State, Thread};

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
    /// Whether the threads of a warp run one after the other, which shows code that relies on their
    /// running together.
    pub(crate) apart: bool,
    pub(crate) steps: AtomicU64,
}

struct Worker<'a> {
    launch: &'a Launch<'a>,
    mem: Mem<'a>,
    warps: Vec<Warp>,
    /// The state of each warp's `wgmma` operations.
    groups: Vec<Groups>,
}

impl Worker<'_> {
    fn fault(&self, code: u32, number: usize, what: &str) -> Fault {
        let (warp, lane) = (&self.warps[number / LANES], number % LANES);
        let t = &warp.threads[lane];
        let function = &self.launch.functions[t.function];
        let line = function.lines.get(t.pc).copied().unwrap_or(0);
        let text = self.launch.text.lines().nth(line.saturating_sub(1) as usize).unwrap_or("").trim();
        let id = |at: usize| {
            let id: Vec<String> = (at..at + 3).map(|k| warp.get(lane, k as u32).to_string()).collect();
            id.join(",")
        };
        let kernel = &self.launch.functions[self.launch.entry].name;
        let message =
            format!("{kernel}: block {} thread {}: {what} in line {line}: {text}", id(6), id(special::TID));
        Fault::new(code, message)
    }

    /// All threads of the block.
    fn threads(&self) -> impl Iterator<Item = &Thread> {
        self.warps.iter().flat_map(|warp| &warp.threads)
    }

    /// All threads of the block, to change them.
    fn threads_mut(&mut self) -> impl Iterator<Item = &mut Thread> {
        self.warps.iter_mut().flat_map(|warp| &mut warp.threads)
    }

    fn reset(&mut self, index: u64) {
        let Launch { functions, entry, grid, block, dynamic, parameters, .. } = self.launch;
        let function = &functions[*entry];
        // Dynamic shared memory follows the static variables.
        let fixed = function.shared.next_multiple_of(function.dynamic_align);
        let threads = self.threads().count();
        self.mem.reset(fixed + dynamic, threads);
        self.groups.clear();
        self.groups.resize_with(self.warps.len(), Groups::default);
        let (x, rest) = (index % u64::from(grid[0]), index / u64::from(grid[0]));
        let place = [x, rest % u64::from(grid[1]), rest / u64::from(grid[1])];
        for warp in &mut self.warps {
            warp.rows.clear();
            warp.rows.extend(function.template.iter().map(|value| [*value; LANES]));
            for axis in 0..3 {
                warp.rows[special::TID + 3 + axis] = [block[axis].into(); LANES];
                warp.rows[special::TID + 6 + axis] = [place[axis]; LANES];
                warp.rows[special::TID + 9 + axis] = [grid[axis].into(); LANES];
            }
            warp.rows[special::DYNAMIC] = [fixed as u64; LANES];
            warp.rows[special::LOCAL] = [0; LANES];
            warp.rows[special::DYNAMIC_SIZE] = [*dynamic as u64; LANES];
            for (lane, t) in warp.threads.iter_mut().enumerate() {
                t.local.clear();
                // All ones, so that reads before writes show.
                t.local.resize(function.local.max(parameters.len()).div_ceil(size_of::<u128>()), u128::MAX);
                t.local()[..parameters.len()].copy_from_slice(parameters);
                t.frames.clear();
                (t.base, t.pc, t.function, t.state) = (0, 0, *entry, State::Run);
                (t.carry, t.is_early) = (false, false);
                let (n, [bx, by, _]) = (t.number as u32, *block);
                // Threads are numbered with x fastest. The number decides warp and lane.
                let thread = [n % bx, n / bx % by, n / (bx * by)];
                for (axis, number) in thread.into_iter().enumerate() {
                    warp.rows[special::TID + axis][lane] = number.into();
                }
                warp.rows[special::LANE][lane] = lane as u64;
                warp.rows[special::WARP][lane] = (n / LANES as u32).into();
                let (equal, below) = (1u32 << lane, (1u32 << lane) - 1);
                let masks = [equal, below | equal, below, !below, !(below | equal)];
                for (k, mask) in masks.into_iter().enumerate() {
                    warp.rows[special::MASKS + k][lane] = mask.into();
                }
            }
        }
    }

    /// Executes an operation of a warp if all of its threads have reached it; returns whether one
    /// was executed.
    fn together(&mut self, at: usize) -> Result<bool> {
        let functions = self.launch.functions;
        let warp = &mut self.warps[at];
        let live = warp.in_state(|state| state != State::Done);
        let mut open = warp.in_state(|state| state == State::Warp);
        while open != 0 {
            let first = open.trailing_zeros() as usize;
            let (function, pc) = (warp.threads[first].function, warp.threads[first].pc);
            let Op::Warp { number } = functions[function].code[pc] else { return Ok(false) };
            let op = &functions[function].warps[number as usize];
            let slot = op.mask();
            let mask_of = |lane: usize| if slot == NONE { !0 } else { warp.get(lane, slot) as u32 };
            let mask = mask_of(first);
            // Only threads at the same operation with the same mask form a group: others may have
            // diverged.
            let is_here = |lane: &usize| {
                let t = &warp.threads[*lane];
                t.function == function && t.pc == pc && mask_of(*lane) == mask
            };
            let here = lanes(open).filter(is_here).fold(0u32, |here, lane| here | 1 << lane);
            let first_number = at * LANES + first;
            if here & !mask != 0 {
                return Err(self.fault(code::LAUNCH_FAILED, first_number, "a thread is not in its own mask"));
            }
            // Threads of the mask that have exited are not waited for.
            if here == mask & live {
                if let Err(trouble) = op.run(warp, here, &mut self.mem, &mut self.groups[at]) {
                    return Err(self.fault(trouble.code, first_number, trouble.what));
                }
                for lane in lanes(here) {
                    warp.threads[lane].pc += 1;
                    warp.threads[lane].state = State::Run;
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
        let live = self.threads().filter(|t| t.state != State::Done).count();
        let mut waiting: Vec<State> = Vec::new();
        for state in self.threads().map(|t| t.state) {
            // A barrier is counted once, not for each of its threads.
            if matches!(state, State::Barrier(..)) && !waiting.contains(&state) {
                waiting.push(state);
            }
        }
        let mut opened = false;
        for state in waiting {
            let State::Barrier(id, count) = state else { continue };
            let same = |t: &&mut Thread| matches!(t.state, State::Barrier(other, _) if other == id);
            let arrived = self.threads_mut().filter(same).count();
            // Without a count, all threads that have not exited must arrive.
            let needed = if count == 0 { live } else { count as usize };
            if arrived > 0 && arrived >= needed {
                self.threads_mut().filter(same).for_each(|t| t.state = State::Run);
                opened = true;
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
        for at in 0..self.warps.len() {
            for lane in 0..self.warps[at].threads.len() {
                let State::Phase(barrier, parity) = self.warps[at].threads[lane].state else { continue };
                match self.mem.is_over(barrier, parity) {
                    Ok(false) => {}
                    Ok(true) => (self.warps[at].threads[lane].state, progress) = (State::Run, true),
                    Err(trouble) => {
                        return Err(self.fault(trouble.code, at * LANES + lane, trouble.what));
                    }
                }
            }
        }
        Ok(progress)
    }

    /// Gives each thread of a warp that can run a turn; returns whether one ran, and whether one
    /// could still run.
    fn turn(&mut self, at: usize) -> Result<(bool, bool)> {
        let Launch { functions, budget, steps, apart, .. } = self.launch;
        let warp = &mut self.warps[at];
        let live = warp.in_state(|state| state != State::Done);
        let mut open = warp.in_state(|state| state == State::Run);
        let (ran, mut cut, mut left, mut taken) = (open != 0, false, TURN, 0);
        while open != 0 {
            let group = if *apart {
                Group { mask: open & open.wrapping_neg(), meets: usize::MAX }
            } else {
                warp.next_group(open)
            };
            let ended = run(functions, &mut self.mem, warp, group, live, &mut left);
            taken += ended.steps;
            let over = match ended.over {
                Ok(over) => over,
                Err((lane, fault)) => {
                    let what = self.mem.trouble.unwrap_or(Trouble::from(fault).what);
                    return Err(self.fault(fault, at * LANES + lane, what));
                }
            };
            if over != 0 {
                cut |= warp.in_state(|state| state == State::Run) & over != 0;
                open &= !over;
                left = TURN;
            }
        }
        if steps.fetch_add(taken, Relaxed) + taken > *budget {
            return Err(self.fault(code::LAUNCH_TIMEOUT, at * LANES, "too many instructions"));
        }
        Ok((ran, cut))
    }

    fn block(&mut self, index: u64) -> Result<()> {
        self.reset(index);
        loop {
            // Only once per round, so that copies stay in flight until every thread has had a turn.
            let mut progress = self.land()?;
            for at in 0..self.warps.len() {
                loop {
                    let (ran, cut) = self.turn(at)?;
                    let together = self.together(at)?;
                    progress |= ran || together;
                    // After a cut-off turn other warps must run, because this one may spin on what
                    // they write.
                    if cut || !together {
                        break;
                    }
                }
            }
            if self.threads().all(|t| t.state == State::Done) {
                if self.mem.has_flights() {
                    let what = "the block ends before copies that it asked for";
                    return Err(self.fault(code::LAUNCH_FAILED, 0, what));
                }
                return Ok(());
            }
            // All threads wait, and neither a barrier nor a warp operation nor a copy can release
            // one.
            if !self.barrier() && !progress {
                let stuck = self.threads().find(|t| t.state != State::Done);
                let (number, state) = stuck.map_or((0, State::Done), |t| (t.number, t.state));
                return Err(self.fault(code::LAUNCH_FAILED, number, &format!("a deadlock ({state:?})")));
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
        let warps = (0..size).step_by(LANES).map(|first| Warp::new(first, size)).collect();
        let mut worker = Worker { launch, mem, warps, groups: Vec::new() };
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
