//! The state of the threads of a warp: their registers, local memory and call stacks.

use crate::code;
use crate::decode::{Function, Place, special};
use crate::registers::{LANES, Row};

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum State {
    Run,
    Barrier(u32, u32),
    /// Waiting for a phase of the barrier at an address: address and parity.
    Phase(u64, u64),
    Warp,
    Done,
}

pub(super) struct Frame {
    pub(super) function: usize,
    pub(super) pc: usize,
    pub(super) base: usize,
    pub(super) local: usize,
    pub(super) call: u32,
}

/// Where a function's registers and local memory start.
#[derive(Clone, Copy)]
struct Scope {
    base: usize,
    local: usize,
}

/// A thread of a block. Its registers are a column of its warp's.
pub(crate) struct Thread {
    /// Its linear index in the block.
    pub(crate) number: usize,
    /// The row of its current function's first register.
    pub(super) base: usize,
    /// Local memory, in units of the largest access: PTX aligns addresses within it, so its base
    /// is aligned, too.
    pub(super) local: Vec<u128>,
    pub(crate) pc: usize,
    pub(super) function: usize,
    pub(super) frames: Vec<Frame>,
    pub(super) state: State,
    pub(super) carry: bool,
    /// Whether its last wait for a phase failed.
    pub(super) is_early: bool,
}

impl Thread {
    fn new(number: usize) -> Self {
        Self {
            number,
            base: 0,
            local: Vec::new(),
            pc: 0,
            function: 0,
            frames: Vec::new(),
            state: State::Done,
            carry: false,
            is_early: false,
        }
    }

    /// The bytes of local memory.
    pub(crate) fn local(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.local)
    }
}

/// The threads of a warp, by lane, and their registers.
pub(crate) struct Warp {
    pub(crate) threads: Vec<Thread>,
    /// The registers of all frames, with a column for each lane.
    pub(super) rows: Vec<Row>,
}

/// Lanes at the same instruction of the same frame, which run together.
#[derive(Clone, Copy)]
pub(super) struct Group {
    pub(super) mask: u32,
    /// Where the next lanes of the same frame wait for these.
    pub(super) meets: usize,
}

/// Returns the lanes of a mask.
pub(crate) fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (lane < u32::BITS).then_some(lane as usize)
    })
}

impl Warp {
    /// The threads from `first` to the end of the warp or of the block.
    pub(super) fn new(first: usize, block: usize) -> Self {
        let threads = (first..block.min(first + LANES)).map(Thread::new).collect();
        Self { threads, rows: Vec::new() }
    }

    /// The lanes whose threads are in one of some states.
    pub(super) fn in_state(&self, is_one: impl Fn(State) -> bool) -> u32 {
        let bit = |(lane, thread): (usize, &Thread)| u32::from(is_one(thread.state)) << lane;
        self.threads.iter().enumerate().map(bit).fold(0, |mask, bit| mask | bit)
    }

    /// Chooses the lanes of `open` that run next: those in the innermost function, and there those
    /// that are furthest behind, so that lanes that parted meet again.
    pub(super) fn next_group(&self, open: u32) -> Group {
        let place = |lane: usize| {
            let thread = &self.threads[lane];
            (std::cmp::Reverse(thread.base), thread.function, thread.pc)
        };
        let Some(first) = lanes(open).map(place).min() else { return Group { mask: 0, meets: 0 } };
        let (mut mask, mut meets) = (0, usize::MAX);
        for lane in lanes(open) {
            let at = place(lane);
            if at == first {
                mask |= 1 << lane;
            } else if (at.0, at.1) == (first.0, first.1) {
                meets = meets.min(at.2);
            }
        }
        Group { mask, meets }
    }

    /// Reads a slot of the lane's current function.
    pub(crate) fn get(&self, lane: usize, slot: u32) -> u64 {
        self.rows[self.threads[lane].base + slot as usize][lane]
    }

    /// Writes a slot of the lane's current function.
    pub(crate) fn set(&mut self, lane: usize, slot: u32, value: u64) {
        self.rows[self.threads[lane].base + slot as usize][lane] = value;
    }

    /// Returns the row of a slot of the lane's current function.
    pub(crate) fn row_of(&self, lane: usize, slot: u32) -> usize {
        self.threads[lane].base + slot as usize
    }

    /// Reads a register in all lanes.
    pub(crate) fn row(&self, row: usize) -> &Row {
        &self.rows[row]
    }

    /// Writes a register in all lanes.
    pub(crate) fn set_row(&mut self, row: usize, values: Row) {
        self.rows[row] = values;
    }

    /// Enters a function in one lane.
    pub(super) fn call(
        &mut self,
        functions: &[Function],
        number: u32,
        lane: usize,
    ) -> std::result::Result<(), u32> {
        let Thread { function, base: caller_base, pc, .. } = self.threads[lane];
        let caller = &functions[function];
        let site = &caller.calls[number as usize];
        let callee = &functions[site.target];
        let local = self.get(lane, special::LOCAL as u32) as usize;
        let (base, place) = (caller_base + caller.template.len(), local + caller.local);
        // Stops runaway recursion.
        if self.threads[lane].frames.len() > 1000 {
            return Err(code::LAUNCH_FAILED);
        }
        // Other lanes may be in deeper frames.
        let needed = base + callee.template.len();
        self.rows.resize(self.rows.len().max(needed), [0; LANES]);
        for (at, value) in callee.template.iter().enumerate() {
            // The special registers are in the first slots of every frame.
            let value = if at < special::COUNT { self.rows[caller_base + at][lane] } else { *value };
            self.rows[base + at][lane] = value;
        }
        let thread = &mut self.threads[lane];
        // `Builder::finish` rounds the local memory of a function up to whole units. `back` leaves
        // that of an earlier callee in place.
        thread.local.truncate(place / size_of::<u128>());
        thread.local.resize((place + callee.local) / size_of::<u128>(), u128::MAX);
        let (old, new) = (Scope { base: caller_base, local }, Scope { base, local: place });
        for (argument, (formal, size)) in site.arguments.iter().zip(&callee.formals) {
            self.transfer(lane, (*argument, old), (*formal, new), *size);
        }
        let thread = &mut self.threads[lane];
        thread.frames.push(Frame { function, pc, base: caller_base, local, call: number });
        (thread.base, thread.function, thread.pc) = (base, site.target, 0);
        self.set(lane, special::LOCAL as u32, place as u64);
        Ok(())
    }

    /// Copies an argument or a result of one lane between frames.
    fn transfer(&mut self, lane: usize, from: (Place, Scope), to: (Place, Scope), size: usize) {
        let local = self.threads[lane].local();
        match (from, to) {
            ((Place::Slot(a), old), (Place::Slot(d), new)) => {
                self.rows[new.base + d as usize][lane] = self.rows[old.base + a as usize][lane];
            }
            ((Place::Local(a), old), (Place::Local(d), new)) => {
                let start = old.local + a as usize;
                local.copy_within(start..start + size, new.local + d as usize);
            }
            ((Place::Slot(a), old), (Place::Local(d), new)) => {
                let bytes = self.rows[old.base + a as usize][lane].to_le_bytes();
                let (start, size) = (new.local + d as usize, size.min(8));
                local[start..start + size].copy_from_slice(&bytes[..size]);
            }
            ((Place::Local(a), old), (Place::Slot(d), new)) => {
                let mut bytes = [0; 8];
                let (start, size) = (old.local + a as usize, size.min(8));
                bytes[..size].copy_from_slice(&local[start..start + size]);
                self.rows[new.base + d as usize][lane] = u64::from_le_bytes(bytes);
            }
        }
    }

    /// Returns to the caller in one lane; false if there is none.
    pub(super) fn back(&mut self, functions: &[Function], lane: usize) -> bool {
        let Some(frame) = self.threads[lane].frames.pop() else { return false };
        let Thread { function, base, .. } = self.threads[lane];
        let callee = &functions[function];
        let site = &functions[frame.function].calls[frame.call as usize];
        let old = Scope { base, local: self.get(lane, special::LOCAL as u32) as usize };
        let new = Scope { base: frame.base, local: frame.local };
        for (result, (formal, size)) in site.results.iter().zip(&callee.returns) {
            self.transfer(lane, (*formal, old), (*result, new), *size);
        }
        let thread = &mut self.threads[lane];
        (thread.base, thread.function, thread.pc) = (frame.base, frame.function, frame.pc);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::{Thread, Warp};

    #[test]
    fn local_memory_is_aligned_for_the_largest_access() {
        assert_eq!(align_of_val(Thread::new(0).local.as_slice()), 16);
    }

    #[test]
    fn the_lanes_furthest_behind_run_first() {
        let mut warp = Warp::new(0, 4);
        // Function, first register and instruction of each lane: two in a callee, two behind each
        // other in the caller.
        for (thread, at) in warp.threads.iter_mut().zip([(0, 0, 9), (1, 30, 7), (0, 0, 5), (1, 30, 8)]) {
            (thread.function, thread.base, thread.pc) = at;
        }
        // Open lanes; those that run, and the instruction where others wait for them.
        let cases = [(0b1111, 0b0010, 8), (0b1101, 0b1000, usize::MAX), (0b0101, 0b0100, 9)];
        for (open, mask, meets) in cases {
            let group = warp.next_group(open);
            assert_eq!((group.mask, group.meets), (mask, meets), "{open:b}");
        }
    }
}
