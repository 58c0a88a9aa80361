//! The interpreter loop: runs one thread until it must wait.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::block_memory::Mem;
use super::thread::{State, Thread};
use crate::bulk::{Bulk, BulkOp, WORDS};
use crate::code;
use crate::convert::convert;
use crate::decode::{Function, NONE, Op, Space, special};
use crate::warp::Trouble;

/// How many instructions a thread may run before other threads have a turn.
pub(super) const TURN: u64 = 1 << 20;

/// Loads `1 << log` bytes; 8 bytes if `log` is 3 or more.
///
/// # Safety
///
/// `at` is valid for reading and writing that many bytes and aligned to their number. No thread
/// accesses them other than through atomics while this runs.
pub(super) unsafe fn load(at: *mut u8, log: u8) -> u64 {
    // SAFETY: the caller got `at` from `resolve`, which checked `1 << log` aligned bytes; other
    // blocks access them through atomics only.
    unsafe {
        match log {
            0 => u64::from(AtomicU8::from_ptr(at).load(Relaxed)),
            1 => u64::from(AtomicU16::from_ptr(at.cast()).load(Relaxed)),
            2 => u64::from(AtomicU32::from_ptr(at.cast()).load(Relaxed)),
            _ => AtomicU64::from_ptr(at.cast()).load(Relaxed),
        }
    }
}

/// Stores the low `1 << log` bytes of `value`; 8 bytes if `log` is 3 or more.
///
/// # Safety
///
/// As [`load`].
pub(super) unsafe fn store(at: *mut u8, log: u8, value: u64) {
    // SAFETY: the caller got `at` from `resolve`, which checked `1 << log` aligned bytes; other
    // blocks access them through atomics only.
    unsafe {
        match log {
            0 => AtomicU8::from_ptr(at).store(value as u8, Relaxed),
            1 => AtomicU16::from_ptr(at.cast()).store(value as u16, Relaxed),
            2 => AtomicU32::from_ptr(at.cast()).store(value as u32, Relaxed),
            _ => AtomicU64::from_ptr(at.cast()).store(value, Relaxed),
        }
    }
}

/// Runs a thread until it waits, ends or has used its turn; returns the number of instructions.
#[allow(clippy::too_many_lines, reason = "the dispatch loop of an interpreter: one arm for each instruction")]
pub(super) fn run(
    functions: &[Function],
    mem: &mut Mem,
    t: &mut Thread,
    live: u32,
) -> (u64, std::result::Result<(), u32>) {
    let mut left = TURN;
    let mut code = functions[t.function].code.as_ptr();
    let mut regs = t.regs[t.base..].as_mut_ptr();
    let mut pc = t.pc;
    // SAFETY of both: `Builder` hands out only slots below the template's length, and `reset` and
    // `call` give each frame that many registers.
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
            // Addresses of these spaces have 32 bits, so the sum with an offset wraps there.
            if $space == Space::Local && $base != special::LOCAL as u32 || $space == Space::Shared {
                address &= 0xFFFF_FFFF;
            }
            match mem.resolve(t.local(), $space, address, $size, pc) {
                Ok(at) => at,
                Err(fault) => leave!(pc - 1, Err(fault)),
            }
        }};
    }
    while left > 0 {
        left -= 1;
        // SAFETY: `Builder::finish` resolved all labels to instructions, and a function's last
        // instruction leaves it.
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
                // In 128 bits a carry or a borrow shows above the mask.
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
                // SAFETY: `resolve` checked the location.
                set!(d, unsafe { load(at, log) });
            }
            Op::Store { space, log, a, base, offset } => {
                let (at, value) = (place!(space, base, offset, 1u64 << log), get!(a));
                // SAFETY: `resolve` checked the location.
                unsafe { store(at, log, value) };
                mem.written(at, 1 << log, t.number);
            }
            Op::LoadMany { space, log, count, list, base, offset } => {
                let at = place!(space, base, offset, u64::from(count) << log);
                let slots = functions[t.function].lists[list as usize];
                for k in 0..count as usize {
                    // SAFETY: `resolve` checked the location of the whole vector.
                    set!(slots[k], unsafe { load(at.add(k << log), log) });
                }
            }
            Op::StoreMany { space, log, count, list, base, offset } => {
                let at = place!(space, base, offset, u64::from(count) << log);
                let slots = functions[t.function].lists[list as usize];
                for k in 0..count as usize {
                    let value = get!(slots[k]);
                    // SAFETY: `resolve` checked the location of the whole vector.
                    unsafe { store(at.add(k << log), log, value) };
                }
                mem.written(at, u64::from(count) << log, t.number);
            }
            Op::Copy { to, from, to_offset, from_offset, size, real } => {
                let size = u64::from(size);
                // Bytes beyond the source size are zero-filled; none of the source is read if it is
                // 0.
                let real = if real == NONE { size } else { (get!(real) & 0xFFFF_FFFF).min(size) };
                let to = place!(Space::Shared, to, to_offset, size);
                if real > 0 {
                    let from = place!(Space::Global, from, from_offset, size);
                    for k in 0..real as usize {
                        // SAFETY: `resolve` checked both locations.
                        unsafe { store(to.add(k), 0, load(from.add(k), 0)) };
                    }
                }
                for k in real as usize..size as usize {
                    // SAFETY: `resolve` checked the location.
                    unsafe { store(to.add(k), 0, 0) };
                }
                mem.written(to, size, t.number);
            }
            Op::Atomic { number } => {
                let atom = &functions[t.function].atoms[number as usize];
                let at = place!(atom.space, atom.base, atom.offset, 1u64 << atom.log);
                let compare = if atom.compare == NONE { 0 } else { get!(atom.compare) };
                let value = get!(atom.value);
                // SAFETY: `resolve` checked the location.
                let old = unsafe { atom.run(at, value, compare) };
                mem.written(at, 1 << atom.log, t.number);
                if atom.d != NONE {
                    set!(atom.d, old);
                }
            }
            Op::Warp { .. } => {
                // The instruction counter stays at the operation until the whole warp executes it.
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
                // The callee has another frame, and the registers may have moved.
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

/// Executes an operation on a barrier, or starts a copy; returns whether the thread's turn is over.
/// A wait that fails returns false once, and the thread continues in its next turn; if it waits
/// again, it blocks. This detects both kernels that ignore the result and deadlocks.
pub(super) fn bulk(bulk: &Bulk, mem: &mut Mem, t: &mut Thread) -> std::result::Result<bool, Trouble> {
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
                let from = mem.resolve(t.local(), Space::Generic, address + 8 * place as u64, 8, 0)?;
                // SAFETY: `resolve` checked that eight aligned bytes are there.
                *word = unsafe { load(from, 3) };
            }
            mem.copy_box(t.number, [to, barrier], words, at)?;
        }
    }
    Ok(false)
}
