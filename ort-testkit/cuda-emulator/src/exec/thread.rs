//! The state of a thread of a block: its registers, local memory and call stack.

use crate::code;
use crate::decode::{Function, Place, special};

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
pub(super) struct Scope {
    pub(super) base: usize,
    pub(super) local: usize,
}

/// A thread of a block.
pub(crate) struct Thread {
    /// Its linear index in the block.
    pub(crate) number: usize,
    pub(super) regs: Vec<u64>,
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
    pub(super) fn new(number: usize) -> Self {
        let (regs, local, frames) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            number,
            regs,
            base: 0,
            local,
            pc: 0,
            function: 0,
            frames,
            state: State::Done,
            carry: false,
            is_early: false,
        }
    }

    /// The bytes of local memory.
    pub(crate) fn local(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.local)
    }

    /// Reads a slot.
    pub(crate) fn get(&self, slot: u32) -> u64 {
        self.regs[self.base + slot as usize]
    }

    /// Writes a slot.
    pub(crate) fn set(&mut self, slot: u32, value: u64) {
        self.regs[self.base + slot as usize] = value;
    }

    /// The index of a slot of the current function among all registers.
    pub(crate) fn place_of(&self, slot: u32) -> usize {
        self.base + slot as usize
    }

    /// Reads a register by that index.
    pub(crate) fn get_at(&self, place: usize) -> u64 {
        self.regs[place]
    }

    /// Writes a register by that index.
    pub(crate) fn set_at(&mut self, place: usize, value: u64) {
        self.regs[place] = value;
    }

    pub(super) fn call(&mut self, functions: &[Function], number: u32) -> std::result::Result<(), u32> {
        let caller = &functions[self.function];
        let site = &caller.calls[number as usize];
        let callee = &functions[site.target];
        let local = self.get(special::LOCAL as u32) as usize;
        let (base, place) = (self.base + caller.template.len(), local + caller.local);
        // Stops runaway recursion.
        if self.frames.len() > 1000 {
            return Err(code::LAUNCH_FAILED);
        }
        // `back` leaves the frame of an earlier callee in place.
        self.regs.truncate(base);
        self.regs.extend_from_slice(&callee.template);
        // The special registers are in the first slots of every frame.
        self.regs.copy_within(self.base..self.base + special::COUNT, base);
        // `Builder::finish` rounds the local memory of a function up to whole units.
        self.local.truncate(place / size_of::<u128>());
        self.local.resize((place + callee.local) / size_of::<u128>(), u128::MAX);
        let (old, new) = (Scope { base: self.base, local }, Scope { base, local: place });
        for (argument, (formal, size)) in site.arguments.iter().zip(&callee.formals) {
            self.transfer(*argument, old, *formal, new, *size);
        }
        self.frames.push(Frame {
            function: self.function,
            pc: self.pc,
            base: self.base,
            local,
            call: number,
        });
        (self.base, self.function, self.pc) = (base, site.target, 0);
        self.set(special::LOCAL as u32, place as u64);
        Ok(())
    }

    pub(super) fn transfer(&mut self, from: Place, old: Scope, to: Place, new: Scope, size: usize) {
        match (from, to) {
            (Place::Slot(a), Place::Slot(d)) => {
                self.regs[new.base + d as usize] = self.regs[old.base + a as usize]
            }
            (Place::Local(a), Place::Local(d)) => {
                let start = old.local + a as usize;
                self.local().copy_within(start..start + size, new.local + d as usize);
            }
            (Place::Slot(a), Place::Local(d)) => {
                let bytes = self.regs[old.base + a as usize].to_le_bytes();
                let (start, size) = (new.local + d as usize, size.min(8));
                self.local()[start..start + size].copy_from_slice(&bytes[..size]);
            }
            (Place::Local(a), Place::Slot(d)) => {
                let (mut bytes, start, size) = ([0; 8], old.local + a as usize, size.min(8));
                bytes[..size].copy_from_slice(&self.local()[start..start + size]);
                self.regs[new.base + d as usize] = u64::from_le_bytes(bytes);
            }
        }
    }

    /// Returns to the caller; false if there is none.
    pub(super) fn back(&mut self, functions: &[Function]) -> bool {
        let Some(frame) = self.frames.pop() else { return false };
        let callee = &functions[self.function];
        let site = &functions[frame.function].calls[frame.call as usize];
        let old = Scope { base: self.base, local: self.get(special::LOCAL as u32) as usize };
        let new = Scope { base: frame.base, local: frame.local };
        for (result, (formal, size)) in site.results.iter().zip(&callee.returns) {
            self.transfer(*formal, old, *result, new, *size);
        }
        (self.base, self.function, self.pc) = (frame.base, frame.function, frame.pc);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::Thread;

    #[test]
    fn local_memory_is_aligned_for_the_largest_access() {
        assert_eq!(align_of_val(Thread::new(0).local.as_slice()), 16);
    }
}
