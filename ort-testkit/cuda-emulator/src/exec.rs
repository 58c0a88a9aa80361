//! Runs kernels: blocks in turn over the machine's threads, and a block's threads until each must
//! wait.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use parking_lot::Mutex;

use crate::bulk::{Barriers, Bulk, BulkOp, WORDS};
use crate::convert::convert;
use crate::decode::{Function, NONE, Op, Place, Space, special};
use crate::warp::{Trouble, WarpOp};
use crate::warpgroup::Groups;
use crate::{Fault, Result, code};

/// Where a block's memory begins among generic addresses.
pub(crate) const SHARED_WINDOW: u64 = 0x7000_0000_0000_0000;
/// Where a thread's memory begins among generic addresses.
pub(crate) const LOCAL_WINDOW: u64 = 0x7100_0000_0000_0000;

/// One launch.
pub(crate) struct Launch<'a> {
    pub(crate) functions: &'a [Function],
    pub(crate) entry: usize,
    /// The module's text, for messages.
    pub(crate) text: &'a str,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    /// Bytes of a block's memory that the launch asks for.
    pub(crate) dynamic: usize,
    /// The parameters as they lie in the thread's memory.
    pub(crate) parameters: Vec<u8>,
    /// All device memory: start and end.
    pub(crate) table: Vec<(u64, u64)>,
    pub(crate) budget: u64,
    pub(crate) steps: AtomicU64,
}

/// Memory as a block sees it.
pub(crate) struct Mem<'a> {
    table: &'a [(u64, u64)],
    /// By the instruction: the piece that it used last.
    recent: [(u64, u64); 64],
    shared: Vec<u64>,
    shared_size: u64,
    /// The last write of each 16 bytes of shared memory, where products read it by themselves.
    writes: Option<Vec<Write>>,
    /// The fences between threads' writes and such reads: how many there were, and which was a
    /// thread's last.
    clock: u64,
    fences: Vec<u64>,
    pub(crate) barriers: Barriers,
    /// What happened, where a fault's code does not say it.
    trouble: Option<&'static str>,
}

/// A thread and the fences before it wrote, all threads' together.
#[derive(Clone, Copy)]
struct Write {
    thread: usize,
    clock: u64,
}

impl Mem<'_> {
    fn reset(&mut self, shared: usize, threads: usize) {
        self.shared_size = shared as u64;
        self.shared.clear();
        self.shared.resize(shared.div_ceil(8) + 2, !0);
        // What was never written lies before all fences.
        (self.clock, self.fences) = (1, vec![1; threads]);
        self.barriers = Barriers::default();
        if let Some(writes) = &mut self.writes {
            writes.clear();
            writes.resize(shared.div_ceil(16), Write { thread: 0, clock: 0 });
        }
    }

    /// Remembers that a thread wrote somewhere.
    #[inline(always)]
    pub(crate) fn written(&mut self, at: *mut u8, size: u64, thread: usize) {
        let Some(writes) = &mut self.writes else { return };
        let offset = (at as u64).wrapping_sub(self.shared.as_ptr() as u64);
        if offset < self.shared_size {
            let clock = self.clock;
            writes[(offset / 16) as usize..=((offset + size - 1) / 16) as usize]
                .fill(Write { thread, clock });
        }
    }

    /// Forgets what threads wrote in 16 bytes: products see what a copy brought.
    pub(crate) fn written_by_copy(&mut self, address: u64) {
        if let Some(write) = self.writes.as_mut().and_then(|writes| writes.get_mut((address / 16) as usize)) {
            *write = Write { thread: 0, clock: 0 };
        }
    }

    fn fence(&mut self, thread: usize) {
        self.clock += 1;
        self.fences[thread] = self.clock;
    }

    /// Whether a fence of the writer or the reader came after the last write of 16 bytes.
    pub(crate) fn is_fenced(&self, address: u64, reader: usize) -> bool {
        let write = self.writes.as_ref().and_then(|writes| writes.get((address / 16) as usize));
        write.is_none_or(|write| self.fences[write.thread].max(self.fences[reader]) > write.clock)
    }

    /// Where `size` bytes lie, if they are all there and aligned.
    #[inline(always)]
    pub(crate) fn resolve(
        &mut self,
        local: &mut [u8],
        space: Space,
        address: u64,
        size: u64,
        pc: usize,
    ) -> std::result::Result<*mut u8, u32> {
        if address & (size - 1) != 0 {
            return Err(code::MISALIGNED_ADDRESS);
        }
        let (space, address) = match (space, address >> 56) {
            (Space::Generic, 0x70) => (Space::Shared, address & 0xFF_FFFF_FFFF_FFFF),
            (Space::Generic, 0x71) => (Space::Local, address & 0xFF_FFFF_FFFF_FFFF),
            _ => (space, address),
        };
        let inside = |length: u64| address < length && size <= length - address;
        match space {
            Space::Shared if inside(self.shared_size) => {
                Ok(self.shared.as_mut_ptr().cast::<u8>().wrapping_add(address as usize))
            }
            Space::Local if inside(local.len() as u64) => {
                Ok(local.as_mut_ptr().wrapping_add(address as usize))
            }
            Space::Shared | Space::Local => Err(code::ILLEGAL_ADDRESS),
            _ => {
                let recent = &mut self.recent[pc & 63];
                if address < recent.0 || address >= recent.1 {
                    let after = self.table.partition_point(|piece| piece.0 <= address);
                    let Some(piece) = after.checked_sub(1).map(|at| self.table[at]) else {
                        return Err(code::ILLEGAL_ADDRESS);
                    };
                    *recent = piece;
                }
                if address >= recent.0 && address < recent.1 && size <= recent.1 - address {
                    Ok(address as *mut u8)
                } else {
                    Err(code::ILLEGAL_ADDRESS)
                }
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Run,
    Barrier(u32, u32),
    /// Until a phase of the barrier at an address is over.
    Phase(u64, u64),
    Warp,
    Done,
}

struct Frame {
    function: usize,
    pc: usize,
    base: usize,
    local: usize,
    call: u32,
}

/// A thread of a block.
pub(crate) struct Thread {
    /// Its number in the block.
    pub(crate) number: usize,
    regs: Vec<u64>,
    base: usize,
    pub(crate) local: Vec<u8>,
    pub(crate) pc: usize,
    function: usize,
    frames: Vec<Frame>,
    state: State,
    carry: bool,
    /// Whether the last wait for a phase was in vain.
    is_early: bool,
}

impl Thread {
    fn new(number: usize) -> Self {
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

    /// What a slot holds.
    pub(crate) fn get(&self, slot: u32) -> u64 {
        self.regs[self.base + slot as usize]
    }

    /// Gives a slot a value.
    pub(crate) fn set(&mut self, slot: u32, value: u64) {
        self.regs[self.base + slot as usize] = value;
    }

    /// Where a slot of the function that runs lies among all.
    pub(crate) fn place_of(&self, slot: u32) -> usize {
        self.base + slot as usize
    }

    /// What lies there.
    pub(crate) fn get_at(&self, place: usize) -> u64 {
        self.regs[place]
    }

    /// Puts a value there.
    pub(crate) fn set_at(&mut self, place: usize, value: u64) {
        self.regs[place] = value;
    }

    fn call(&mut self, functions: &[Function], number: u32) -> std::result::Result<(), u32> {
        let caller = &functions[self.function];
        let site = &caller.calls[number as usize];
        let callee = &functions[site.target];
        let local = self.get(special::LOCAL as u32) as usize;
        let (base, place) = (self.base + caller.template.len(), local + caller.local);
        if self.frames.len() > 1000 {
            return Err(code::LAUNCH_FAILED);
        }
        self.regs.truncate(base);
        self.regs.extend_from_slice(&callee.template);
        self.regs.copy_within(self.base..self.base + special::COUNT, base);
        self.local.truncate(place);
        self.local.resize(place + callee.local, 0xFF);
        for (argument, (formal, size)) in site.arguments.iter().zip(&callee.formals) {
            self.transfer(*argument, (self.base, local), *formal, (base, place), *size);
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

    fn transfer(&mut self, from: Place, old: (usize, usize), to: Place, new: (usize, usize), size: usize) {
        match (from, to) {
            (Place::Slot(a), Place::Slot(d)) => self.regs[new.0 + d as usize] = self.regs[old.0 + a as usize],
            (Place::Local(a), Place::Local(d)) => {
                let start = old.1 + a as usize;
                self.local.copy_within(start..start + size, new.1 + d as usize);
            }
            (Place::Slot(a), Place::Local(d)) => {
                let bytes = self.regs[old.0 + a as usize].to_le_bytes();
                let (start, size) = (new.1 + d as usize, size.min(8));
                self.local[start..start + size].copy_from_slice(&bytes[..size]);
            }
            (Place::Local(a), Place::Slot(d)) => {
                let (mut bytes, start, size) = ([0; 8], old.1 + a as usize, size.min(8));
                bytes[..size].copy_from_slice(&self.local[start..start + size]);
                self.regs[new.0 + d as usize] = u64::from_le_bytes(bytes);
            }
        }
    }

    /// Whether there was a caller.
    fn back(&mut self, functions: &[Function]) -> bool {
        let Some(frame) = self.frames.pop() else { return false };
        let callee = &functions[self.function];
        let site = &functions[frame.function].calls[frame.call as usize];
        let (old, new) = ((self.base, self.get(special::LOCAL as u32) as usize), (frame.base, frame.local));
        for (result, (formal, size)) in site.results.iter().zip(&callee.returns) {
            self.transfer(*formal, old, *result, new, *size);
        }
        (self.base, self.function, self.pc) = (frame.base, frame.function, frame.pc);
        true
    }
}

/// Instructions that a thread runs before others have their turn, where it does not wait.
const TURN: u64 = 1 << 20;

unsafe fn load(at: *mut u8, log: u8) -> u64 {
    // SAFETY: the caller says that as many aligned bytes lie there; other threads write them as
    // atomics alone.
    unsafe {
        match log {
            0 => u64::from(AtomicU8::from_ptr(at).load(Relaxed)),
            1 => u64::from(AtomicU16::from_ptr(at.cast()).load(Relaxed)),
            2 => u64::from(AtomicU32::from_ptr(at.cast()).load(Relaxed)),
            _ => AtomicU64::from_ptr(at.cast()).load(Relaxed),
        }
    }
}

unsafe fn store(at: *mut u8, log: u8, value: u64) {
    // SAFETY: the caller says that as many aligned bytes lie there; other threads read them as
    // atomics alone.
    unsafe {
        match log {
            0 => AtomicU8::from_ptr(at).store(value as u8, Relaxed),
            1 => AtomicU16::from_ptr(at.cast()).store(value as u16, Relaxed),
            2 => AtomicU32::from_ptr(at.cast()).store(value as u32, Relaxed),
            _ => AtomicU64::from_ptr(at.cast()).store(value, Relaxed),
        }
    }
}

/// Runs a thread until it waits, ends or has had its turn; the number of instructions comes back.
fn run(
    functions: &[Function],
    mem: &mut Mem,
    t: &mut Thread,
    live: u32,
) -> (u64, std::result::Result<(), u32>) {
    let mut left = TURN;
    let mut code = functions[t.function].code.as_ptr();
    let mut regs = t.regs[t.base..].as_mut_ptr();
    let mut pc = t.pc;
    // SAFETY of both: `Builder` gives out slots below the template's length alone, and a frame has
    // as many.
    macro_rules! get {
        ($slot:expr) => {
            // SAFETY: see above.
            unsafe { *regs.add($slot as usize) }
        };
    }
    macro_rules! set {
        ($slot:expr, $value:expr) => {{
            let value: u64 = $value;
            // SAFETY: see above.
            unsafe { *regs.add($slot as usize) = value }
        }};
    }
    macro_rules! float {
        ($slot:expr) => {
            f32::from_bits(get!($slot) as u32)
        };
    }
    macro_rules! leave {
        ($at:expr, $result:expr) => {{
            t.pc = $at;
            return (TURN - left, $result);
        }};
    }
    macro_rules! place {
        ($space:expr, $base:expr, $offset:expr, $size:expr) => {{
            let mut address = get!($base).wrapping_add(i64::from($offset) as u64);
            if $space == Space::Local && $base != special::LOCAL as u32 || $space == Space::Shared {
                address &= 0xFFFF_FFFF;
            }
            match mem.resolve(&mut t.local, $space, address, $size, pc) {
                Ok(at) => at,
                Err(fault) => leave!(pc - 1, Err(fault)),
            }
        }};
    }
    while left > 0 {
        left -= 1;
        // SAFETY: labels are resolved to instructions, and the last instruction of a function
        // leaves it.
        let op = unsafe { &*code.add(pc) };
        pc += 1;
        match *op {
            Op::Mov { d, a } => set!(d, get!(a)),
            Op::F1 { f, d, a } => set!(d, f(get!(a))),
            Op::F2 { f, d, a, b } => set!(d, f(get!(a), get!(b))),
            Op::F3 { f, d, a, b, c } => set!(d, f(get!(a), get!(b), get!(c))),
            Op::F4 { f, d, a, b, c, e } => set!(d, f(get!(a), get!(b), get!(c), get!(e))),
            Op::Add32 { d, a, b } => set!(d, get!(a).wrapping_add(get!(b)) & 0xFFFF_FFFF),
            Op::Add64 { d, a, b } => set!(d, get!(a).wrapping_add(get!(b))),
            Op::Mad32 { d, a, b, c } => {
                set!(d, get!(a).wrapping_mul(get!(b)).wrapping_add(get!(c)) & 0xFFFF_FFFF);
            }
            Op::Wide { d, a, b } => set!(d, (get!(a) as i32 as i64 * get!(b) as i32 as i64) as u64),
            Op::And32 { d, a, b } => set!(d, get!(a) & get!(b) & 0xFFFF_FFFF),
            Op::AddF { d, a, b } => set!(d, u64::from((float!(a) + float!(b)).to_bits())),
            Op::MulF { d, a, b } => set!(d, u64::from((float!(a) * float!(b)).to_bits())),
            Op::FmaF { d, a, b, c } => {
                set!(d, u64::from(float!(a).mul_add(float!(b), float!(c)).to_bits()));
            }
            Op::Select { d, a, b, p } => set!(d, if get!(p) & 1 != 0 { get!(a) } else { get!(b) }),
            Op::Cvt { d, a, how } => set!(d, convert(how, get!(a))),
            Op::Carry { subtract, wide, with, out, d, a, b } => {
                let bits = if wide { 64 } else { 32 };
                let mask = (1u128 << bits) - 1;
                let (a, b) = (u128::from(get!(a)) & mask, u128::from(get!(b)) & mask);
                let carry = u128::from(with && t.carry);
                let sum = if subtract { a.wrapping_sub(b).wrapping_sub(carry) } else { a + b + carry };
                set!(d, (sum & mask) as u64);
                if out {
                    t.carry = sum & !mask != 0;
                }
            }
            Op::Clock { d } => set!(d, TURN - left),
            Op::Active { d } => set!(d, u64::from(live)),
            Op::Skip { p, when } => pc += usize::from((get!(p) & 1 != 0) == when),
            Op::Bra { to } => pc = to as usize,
            Op::BraIf { p, when, to } => {
                if (get!(p) & 1 != 0) == when {
                    pc = to as usize;
                }
            }
            Op::BraTable { a, table } => {
                let index = get!(a) as u32 as usize;
                match functions[t.function].tables[table as usize].get(index) {
                    Some(to) => pc = *to as usize,
                    None => leave!(pc - 1, Err(code::LAUNCH_FAILED)),
                }
            }
            Op::Load { space, log, d, base, offset } => {
                let at = place!(space, base, offset, 1u64 << log);
                // SAFETY: `resolve` found the place.
                set!(d, unsafe { load(at, log) });
            }
            Op::Store { space, log, a, base, offset } => {
                let (at, value) = (place!(space, base, offset, 1u64 << log), get!(a));
                // SAFETY: `resolve` found the place.
                unsafe { store(at, log, value) };
                mem.written(at, 1 << log, t.number);
            }
            Op::LoadMany { space, log, count, list, base, offset } => {
                let at = place!(space, base, offset, u64::from(count) << log);
                let slots = functions[t.function].lists[list as usize];
                for k in 0..count as usize {
                    // SAFETY: `resolve` found the place of all.
                    set!(slots[k], unsafe { load(at.add(k << log), log) });
                }
            }
            Op::StoreMany { space, log, count, list, base, offset } => {
                let at = place!(space, base, offset, u64::from(count) << log);
                let slots = functions[t.function].lists[list as usize];
                for k in 0..count as usize {
                    let value = get!(slots[k]);
                    // SAFETY: `resolve` found the place of all.
                    unsafe { store(at.add(k << log), log, value) };
                }
                mem.written(at, u64::from(count) << log, t.number);
            }
            Op::Copy { to, from, to_offset, from_offset, size, real } => {
                let size = u64::from(size);
                let real = if real == NONE { size } else { (get!(real) & 0xFFFF_FFFF).min(size) };
                let to = place!(Space::Shared, to, to_offset, size);
                if real > 0 {
                    let from = place!(Space::Global, from, from_offset, size);
                    for k in 0..real as usize {
                        // SAFETY: `resolve` found both places.
                        unsafe { store(to.add(k), 0, load(from.add(k), 0)) };
                    }
                }
                for k in real as usize..size as usize {
                    // SAFETY: `resolve` found the place.
                    unsafe { store(to.add(k), 0, 0) };
                }
                mem.written(to, size, t.number);
            }
            Op::Atomic { number } => {
                let atom = &functions[t.function].atoms[number as usize];
                let at = place!(atom.space, atom.base, atom.offset, 1u64 << atom.log);
                let compare = if atom.compare == NONE { 0 } else { get!(atom.compare) };
                let value = get!(atom.value);
                // SAFETY: `resolve` found the place.
                let old = unsafe { atom.run(at, value, compare) };
                mem.written(at, 1 << atom.log, t.number);
                if atom.d != NONE {
                    set!(atom.d, old);
                }
            }
            Op::Warp { .. } => {
                t.state = State::Warp;
                leave!(pc - 1, Ok(()));
            }
            Op::Barrier { id, count } => {
                let count = if count == NONE { 0 } else { get!(count) as u32 };
                t.state = State::Barrier(get!(id) as u32, count);
                leave!(pc, Ok(()));
            }
            Op::Bulk { number } => {
                t.pc = pc;
                let waits = bulk(&functions[t.function].bulks[number as usize], mem, t);
                match waits {
                    Ok(false) => {}
                    Ok(true) => leave!(pc, Ok(())),
                    Err(trouble) => {
                        mem.trouble = Some(trouble.what);
                        leave!(pc - 1, Err(trouble.code));
                    }
                }
            }
            Op::Call { number } => {
                t.pc = pc;
                if let Err(fault) = t.call(functions, number) {
                    leave!(pc - 1, Err(fault));
                }
                code = functions[t.function].code.as_ptr();
                regs = t.regs[t.base..].as_mut_ptr();
                pc = 0;
            }
            Op::Ret => {
                if !t.back(functions) {
                    t.state = State::Done;
                    leave!(pc, Ok(()));
                }
                code = functions[t.function].code.as_ptr();
                regs = t.regs[t.base..].as_mut_ptr();
                pc = t.pc;
            }
            Op::Exit => {
                t.state = State::Done;
                leave!(pc, Ok(()));
            }
            Op::ProxyFence => mem.fence(t.number),
            Op::Trap => leave!(pc - 1, Err(code::LAUNCH_FAILED)),
            Op::Nothing => {}
        }
    }
    leave!(pc, Ok(()))
}

/// Runs an operation on a barrier, or asks for a copy; whether the thread's turn is over. The first
/// wait in vain is told as such, and the thread goes on in its next turn; at the second one it
/// waits: so that both who does not look at the answer and a deadlock are found.
fn bulk(bulk: &Bulk, mem: &mut Mem, t: &mut Thread) -> std::result::Result<bool, Trouble> {
    let in_shared =
        |t: &Thread, (base, offset): (u32, i32)| t.get(base).wrapping_add(offset as u64) & 0xFFFF_FFFF;
    let barrier = in_shared(t, bulk.barrier);
    let number = |t: &Thread, slot: u32| t.get(slot) & 0xFFFF_FFFF;
    match &bulk.op {
        BulkOp::Init { count } => mem.init_barrier(barrier, number(t, *count))?,
        BulkOp::Arrive { bytes } => mem.arrive(barrier, bytes.map_or(0, |slot| number(t, slot)))?,
        BulkOp::TryWait { d, parity } => {
            let parity = number(t, *parity);
            let is_over = mem.is_over(barrier, parity)?;
            t.set(*d, is_over.into());
            if !is_over && t.is_early {
                t.state = State::Phase(barrier, parity);
            }
            t.is_early = !is_over && !t.is_early;
            return Ok(!is_over);
        }
        BulkOp::Copy { to, map: (base, offset), at } => {
            let (to, address) = (in_shared(t, *to), t.get(*base).wrapping_add(i64::from(*offset) as u64));
            let at = at.iter().map(|slot| i64::from(t.get(*slot) as i32)).collect();
            let mut words = [0; WORDS];
            if !address.is_multiple_of(64) {
                return Err(Trouble::new(
                    code::MISALIGNED_ADDRESS,
                    "a tensor map at no multiple of 64 bytes",
                ));
            }
            for (place, word) in words.iter_mut().enumerate() {
                let from = mem.resolve(&mut t.local, Space::Generic, address + 8 * place as u64, 8, 0)?;
                // SAFETY: `resolve` says that eight aligned bytes lie there.
                *word = unsafe { load(from, 3) };
            }
            mem.copy_box(t.number, [to, barrier], words, at)?;
        }
    }
    Ok(false)
}

struct Worker<'a> {
    launch: &'a Launch<'a>,
    mem: Mem<'a>,
    threads: Vec<Thread>,
    /// What each warp has asked for.
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
            t.local.extend_from_slice(parameters);
            t.local.resize(function.local.max(parameters.len()), 0xFF);
            t.frames.clear();
            (t.base, t.pc, t.function, t.state) = (0, 0, *entry, State::Run);
            (t.carry, t.is_early) = (false, false);
            let (n, [bx, by, _]) = (number as u32, *block);
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

    /// Whether a warp's operation was done.
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
            let mut here = 0u32;
            for (lane, t) in self.threads[start..end].iter().enumerate() {
                let same =
                    t.state == State::Warp && t.function == function && t.pc == pc && mask_of(t) == mask;
                here |= u32::from(same) << lane;
            }
            if here & !mask != 0 {
                return Err(self.fault(code::LAUNCH_FAILED, first, "a thread is not in its own mask"));
            }
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
            open &= !here;
        }
        Ok(false)
    }

    /// Whether a barrier opened.
    fn barrier(&mut self) -> bool {
        let live = self.threads.iter().filter(|t| t.state != State::Done).count();
        let mut opened = false;
        for at in 0..self.threads.len() {
            let State::Barrier(id, count) = self.threads[at].state else { continue };
            let same = |t: &&mut Thread| matches!(t.state, State::Barrier(other, _) if other == id);
            let waiting = self.threads.iter_mut().filter(same).count();
            let needed = if count == 0 { live } else { count as usize };
            if waiting >= needed {
                self.threads.iter_mut().filter(same).for_each(|t| t.state = State::Run);
                opened = true;
            } else if count == 0 {
                break;
            }
        }
        opened
    }

    /// Ends copies, and wakes the threads that waited for them; whether there was one.
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
