//! The interpreter loop: runs lanes of a warp that are at the same instruction until they part or
//! must wait.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use super::block_memory::Mem;
use super::thread::{Group, State, Thread, Warp, lanes};
use crate::bulk::{Bulk, BulkOp, WORDS};
use crate::code;
use crate::convert::convert;
use crate::decode::{Function, NONE, Op, Space, special};
use crate::registers::Row;
use crate::warp::Trouble;

/// How many instructions lanes may run before other threads have a turn.
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

/// From how many lanes on an instruction computes all lanes of a row and keeps those that it needs.
const MANY: u32 = 8;

/// How lanes that ran together ended.
pub(super) struct Ended {
    /// The instructions that they executed, each lane counted.
    pub(super) steps: u64,
    /// The lanes whose turn is over, or the lane that failed and one of [`code`]. The other lanes
    /// have parted, or have met lanes that waited for them.
    pub(super) over: std::result::Result<u32, (usize, u32)>,
}

/// Runs the lanes of a group until they part, meet others, must wait or have executed `left`
/// instructions. `live` are the lanes of the warp that have not ended.
#[allow(clippy::too_many_lines, reason = "the dispatch loop of an interpreter: one arm for each instruction")]
pub(super) fn run(
    functions: &[Function],
    mem: &mut Mem,
    warp: &mut Warp,
    Group { mask, mut meets }: Group,
    live: u32,
    left: &mut u64,
) -> Ended {
    let first = mask.trailing_zeros() as usize;
    let Thread { mut function, mut base, mut pc, .. } = warp.threads[first];
    let mut steps = 0;
    let mut code = functions[function].code.as_ptr();
    let mut rows = warp.rows[base..].as_mut_ptr();
    // The lanes that the next instruction leaves out, because its guard is false there.
    let mut guarded = 0;
    // SAFETY of both: `Builder` hands out only slots below the template's length, and `reset` and
    // `call` give each frame that many rows. A row is borrowed for one expression, and written
    // after others are read.
    macro_rules! row {
        ($slot:expr) => {
            // SAFETY: see above.
            unsafe { &*rows.add($slot as usize) }
        };
    }
    macro_rules! row_mut {
        ($slot:expr) => {
            // SAFETY: see above.
            unsafe { &mut *rows.add($slot as usize) }
        };
    }
    // The lanes keep their place until they run again.
    macro_rules! leave {
        ($at:expr, $over:expr) => {{
            lanes(mask).for_each(|lane| warp.threads[lane].pc = $at);
            return Ended { steps, over: $over };
        }};
    }
    macro_rules! place {
        ($lane:expr, $space:expr, $base:expr, $offset:expr, $size:expr) => {{
            let mut address = row!($base)[$lane].wrapping_add(i64::from($offset) as u64);
            // Addresses of these spaces have 32 bits, so the sum with an offset wraps there.
            if $space == Space::Local && $base != special::LOCAL as u32 || $space == Space::Shared {
                address &= 0xFFFF_FFFF;
            }
            match mem.resolve(warp.threads[$lane].local(), $space, address, $size, pc) {
                Ok(at) => at,
                Err(fault) => leave!(pc - 1, Err(($lane, fault))),
            }
        }};
    }
    // An instruction and its guard stay together.
    while *left > 0 || guarded != 0 {
        if pc >= meets && guarded == 0 {
            leave!(pc, Ok(0));
        }
        *left = left.saturating_sub(1);
        // SAFETY: `Builder::finish` resolved all labels to instructions, and a function's last
        // instruction leaves it.
        let op = unsafe { &*code.add(pc) };
        pc += 1;
        let active = mask & !std::mem::take(&mut guarded);
        steps += u64::from(active.count_ones());
        macro_rules! apply {
            ($d:expr, $f:expr, $($operand:expr),+) => {
                if active.count_ones() >= MANY {
                    let values = $f.all($(row!($operand)),+);
                    merge(row_mut!($d), &values, active);
                } else {
                    lanes(active).for_each(|lane| row_mut!($d)[lane] = $f.one($(row!($operand)[lane]),+));
                }
            };
        }
        match *op {
            Op::Mov { d, a } => merge(row_mut!(d), &{ *row!(a) }, active),
            Op::F1 { f, d, a } => apply!(d, f, a),
            Op::F2 { f, d, a, b } => apply!(d, f, a, b),
            Op::F3 { f, d, a, b, c } => apply!(d, f, a, b, c),
            Op::F4 { f, d, a, b, c, e } => apply!(d, f, a, b, c, e),
            Op::Select { d, a, b, p } => {
                let (yes, no, p) = (*row!(a), *row!(b), *row!(p));
                let values = std::array::from_fn(|lane| if p[lane] & 1 != 0 { yes[lane] } else { no[lane] });
                merge(row_mut!(d), &values, active);
            }
            Op::Cvt { d, a, how } => {
                lanes(active).for_each(|lane| row_mut!(d)[lane] = convert(how, row!(a)[lane]));
            }
            Op::Carry { subtract, wide, with, out, d, a, b } => {
                for lane in lanes(active) {
                    let given = with && warp.threads[lane].carry;
                    let (sum, carry) = add_carry(subtract, wide, given, row!(a)[lane], row!(b)[lane]);
                    row_mut!(d)[lane] = sum;
                    if out {
                        warp.threads[lane].carry = carry;
                    }
                }
            }
            Op::Clock { d } => lanes(active).for_each(|lane| row_mut!(d)[lane] = TURN - *left),
            Op::Active { d } => lanes(active).for_each(|lane| row_mut!(d)[lane] = u64::from(live)),
            Op::Skip { p, when } => {
                let skips = chosen(row!(p), when) & active;
                // SAFETY: as above; no function ends with a guard.
                let next = unsafe { &*code.add(pc) };
                if skips == mask {
                    pc += 1;
                } else if skips == 0 || next.stays() {
                    guarded = skips;
                } else {
                    lanes(mask).for_each(|lane| {
                        warp.threads[lane].pc = pc + usize::from(skips >> lane & 1 != 0);
                    });
                    return Ended { steps, over: Ok(0) };
                }
            }
            Op::Bra { to } => pc = to as usize,
            Op::BraIf { p, when, to } => {
                let jumps = chosen(row!(p), when) & active;
                if jumps == mask {
                    pc = to as usize;
                } else if jumps != 0 {
                    lanes(mask).for_each(|lane| {
                        warp.threads[lane].pc = if jumps >> lane & 1 != 0 { to as usize } else { pc };
                    });
                    return Ended { steps, over: Ok(0) };
                }
            }
            Op::BraTable { a, table } => {
                let table = &functions[function].tables[table as usize];
                for lane in lanes(mask) {
                    let Some(to) = table.get(row!(a)[lane] as u32 as usize) else {
                        leave!(pc - 1, Err((lane, code::LAUNCH_FAILED)));
                    };
                    warp.threads[lane].pc = *to as usize;
                }
                return Ended { steps, over: Ok(0) };
            }
            Op::Load { space, log, d, base, offset } => {
                for lane in lanes(active) {
                    let at = place!(lane, space, base, offset, 1u64 << log);
                    // SAFETY: `resolve` checked the location.
                    row_mut!(d)[lane] = unsafe { load(at, log) };
                }
            }
            Op::Store { space, log, a, base, offset } => {
                for lane in lanes(active) {
                    let at = place!(lane, space, base, offset, 1u64 << log);
                    let value = row!(a)[lane];
                    // SAFETY: `resolve` checked the location.
                    unsafe { store(at, log, value) };
                    mem.written(at, 1 << log, warp.threads[lane].number);
                }
            }
            Op::LoadMany { space, log, count, list, base, offset } => {
                let slots = functions[function].lists[list as usize];
                for lane in lanes(active) {
                    let at = place!(lane, space, base, offset, u64::from(count) << log);
                    for k in 0..count as usize {
                        // SAFETY: `resolve` checked the location of the whole vector.
                        row_mut!(slots[k])[lane] = unsafe { load(at.add(k << log), log) };
                    }
                }
            }
            Op::StoreMany { space, log, count, list, base, offset } => {
                let slots = functions[function].lists[list as usize];
                for lane in lanes(active) {
                    let at = place!(lane, space, base, offset, u64::from(count) << log);
                    for k in 0..count as usize {
                        let value = row!(slots[k])[lane];
                        // SAFETY: `resolve` checked the location of the whole vector.
                        unsafe { store(at.add(k << log), log, value) };
                    }
                    mem.written(at, u64::from(count) << log, warp.threads[lane].number);
                }
            }
            Op::Copy { to, from, to_offset, from_offset, size, real } => {
                let size = u64::from(size);
                for lane in lanes(active) {
                    // Bytes beyond the source size are zero-filled. None of the source is read if
                    // it is 0.
                    let given = if real == NONE { size } else { (row!(real)[lane] & 0xFFFF_FFFF).min(size) };
                    let to = place!(lane, Space::Shared, to, to_offset, size);
                    if given > 0 {
                        let from = place!(lane, Space::Global, from, from_offset, size);
                        // SAFETY: `resolve` checked both locations and aligned them to the size, of
                        // which `given` is no larger.
                        unsafe { copy(to, from, given) };
                    }
                    // SAFETY: `resolve` checked the location.
                    unsafe { clear(to, given, size) };
                    mem.written(to, size, warp.threads[lane].number);
                }
            }
            Op::Atomic { number } => {
                let atom = &functions[function].atoms[number as usize];
                for lane in lanes(active) {
                    let at = place!(lane, atom.space, atom.base, atom.offset, 1u64 << atom.log);
                    let compare = if atom.compare == NONE { 0 } else { row!(atom.compare)[lane] };
                    let value = row!(atom.value)[lane];
                    // SAFETY: `resolve` checked the location.
                    let old = unsafe { atom.run(at, value, compare) };
                    mem.written(at, 1 << atom.log, warp.threads[lane].number);
                    if atom.d != NONE {
                        row_mut!(atom.d)[lane] = old;
                    }
                }
            }
            Op::Warp { .. } => {
                // The instruction counter stays at the operation until the whole warp executes it.
                lanes(mask).for_each(|lane| warp.threads[lane].state = State::Warp);
                leave!(pc - 1, Ok(mask));
            }
            Op::Barrier { id, count } => {
                for lane in lanes(mask) {
                    let count = if count == NONE { 0 } else { row!(count)[lane] as u32 };
                    warp.threads[lane].state = State::Barrier(row!(id)[lane] as u32, count);
                }
                leave!(pc, Ok(mask));
            }
            Op::Bulk { number } => {
                let mut over = 0;
                for lane in lanes(mask) {
                    match bulk(&functions[function].bulks[number as usize], mem, warp, lane) {
                        Ok(waits) => over |= u32::from(waits) << lane,
                        Err(trouble) => {
                            mem.trouble = Some(trouble.what);
                            leave!(pc - 1, Err((lane, trouble.code)));
                        }
                    }
                }
                if over != 0 {
                    leave!(pc, Ok(over));
                }
            }
            Op::Call { number } => {
                for lane in lanes(mask) {
                    warp.threads[lane].pc = pc;
                    if let Err(fault) = warp.call(functions, number, lane) {
                        leave!(pc - 1, Err((lane, fault)));
                    }
                }
                // The callee has another frame, and the rows may have moved.
                Thread { function, base, pc, .. } = warp.threads[first];
                (code, rows) = (functions[function].code.as_ptr(), warp.rows[base..].as_mut_ptr());
                // No lane waits in a frame further in.
                meets = usize::MAX;
            }
            Op::Ret => {
                let mut over = 0;
                for lane in lanes(mask) {
                    if !warp.back(functions, lane) {
                        warp.threads[lane].state = State::Done;
                        over |= 1 << lane;
                    }
                }
                // The lanes may return to different calls.
                return Ended { steps, over: Ok(over) };
            }
            Op::Exit => {
                lanes(mask).for_each(|lane| warp.threads[lane].state = State::Done);
                leave!(pc, Ok(mask));
            }
            Op::ProxyFence => lanes(active).for_each(|lane| mem.fence(warp.threads[lane].number)),
            Op::Trap => leave!(pc - 1, Err((first, code::LAUNCH_FAILED))),
            Op::Nothing => {}
        }
    }
    leave!(pc, Ok(mask))
}

/// Writes the active lanes of a row.
#[inline(always)]
fn merge(row: &mut Row, values: &Row, active: u32) {
    if active == u32::MAX {
        *row = *values;
        return;
    }
    for (lane, (old, new)) in row.iter_mut().zip(values).enumerate() {
        *old = if active >> lane & 1 != 0 { *new } else { *old };
    }
}

/// Returns the lanes in which a predicate equals `when`.
#[inline(always)]
fn chosen(predicate: &Row, when: bool) -> u32 {
    let bits = predicate.iter().enumerate().fold(0, |bits, (lane, p)| bits | ((*p & 1) as u32) << lane);
    if when { bits } else { !bits }
}

/// Adds or subtracts integers of 32 or 64 bits with a carry; returns the result and its carry.
fn add_carry(subtract: bool, wide: bool, carry: bool, a: u64, b: u64) -> (u64, bool) {
    let bits = if wide { 64 } else { 32 };
    // In 128 bits a carry or a borrow shows above the mask.
    let mask = (1u128 << bits) - 1;
    let (a, b, carry) = (u128::from(a) & mask, u128::from(b) & mask, u128::from(carry));
    let sum = if subtract { a.wrapping_sub(b).wrapping_sub(carry) } else { a + b + carry };
    ((sum & mask) as u64, sum & !mask != 0)
}

/// Copies `count` bytes, in the largest units that divide them.
///
/// # Safety
///
/// Both places have `count` bytes, are aligned to 8 if that divides `count`, and to 4 if that does.
unsafe fn copy(to: *mut u8, from: *mut u8, count: u64) {
    let log = count.trailing_zeros().min(3) as u8;
    for at in (0..count as usize).step_by(1 << log) {
        // SAFETY: the caller guarantees the bytes and their alignment.
        unsafe { store(to.add(at), log, load(from.add(at), log)) };
    }
}

/// Fills the bytes from `start` to `end` with zeros.
///
/// # Safety
///
/// The place has `end` bytes.
unsafe fn clear(to: *mut u8, start: u64, end: u64) {
    for at in start as usize..end as usize {
        // SAFETY: the caller guarantees the bytes; one needs no alignment.
        unsafe { store(to.add(at), 0, 0) };
    }
}

/// Executes an operation on a barrier, or starts a copy; returns whether the thread's turn is over.
/// A wait that fails returns false once, and the thread continues in its next turn; if it waits
/// again, it blocks. This detects both kernels that ignore the result and deadlocks.
pub(super) fn bulk(
    bulk: &Bulk,
    mem: &mut Mem,
    warp: &mut Warp,
    lane: usize,
) -> std::result::Result<bool, Trouble> {
    let in_shared = |warp: &Warp, (base, offset): (u32, i32)| {
        warp.get(lane, base).wrapping_add(offset as u64) & 0xFFFF_FFFF
    };
    let barrier = in_shared(warp, bulk.barrier);
    let number = |warp: &Warp, slot: u32| warp.get(lane, slot) & 0xFFFF_FFFF;
    match &bulk.op {
        BulkOp::Init { count } => mem.init_barrier(barrier, number(warp, *count))?,
        BulkOp::Arrive { bytes } => mem.arrive(barrier, bytes.map_or(0, |slot| number(warp, slot)))?,
        BulkOp::TryWait { d, parity } => {
            let parity = number(warp, *parity);
            let is_over = mem.is_over(barrier, parity)?;
            warp.set(lane, *d, is_over.into());
            let t = &mut warp.threads[lane];
            if !is_over && t.is_early {
                t.state = State::Phase(barrier, parity);
            }
            t.is_early = !is_over && !t.is_early;
            return Ok(!is_over);
        }
        BulkOp::Copy { to, map: (base, offset), at } => {
            let (to, address) =
                (in_shared(warp, *to), warp.get(lane, *base).wrapping_add(i64::from(*offset) as u64));
            let at = at.iter().map(|slot| i64::from(warp.get(lane, *slot) as i32)).collect();
            let mut words = [0; WORDS];
            if !address.is_multiple_of(64) {
                return Err(Trouble::new(
                    code::MISALIGNED_ADDRESS,
                    "a tensor map at no multiple of 64 bytes",
                ));
            }
            for (place, word) in words.iter_mut().enumerate() {
                let from = mem.resolve(
                    warp.threads[lane].local(),
                    Space::Generic,
                    address + 8 * place as u64,
                    8,
                    0,
                )?;
                // SAFETY: `resolve` checked that eight aligned bytes are there.
                *word = unsafe { load(from, 3) };
            }
            mem.copy_box(warp.threads[lane].number, [to, barrier], words, at)?;
        }
    }
    Ok(false)
}
