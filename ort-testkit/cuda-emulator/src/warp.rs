//! Warp-level operations and atomics (NVIDIA, "PTX ISA").

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::SeqCst};

use half::{bf16, f16};

use crate::code;
use crate::decode::{NONE, Space};
use crate::exec::{Mem, Warp, lanes};
use crate::number::Float;
use crate::registers::{F2, LANES};
use crate::warpgroup::{GroupOp, Groups};

/// Why an instruction failed: one of [`code`], and a message.
pub(crate) struct Trouble {
    pub(crate) code: u32,
    pub(crate) what: &'static str,
}

impl Trouble {
    pub(crate) fn new(code: u32, what: &'static str) -> Self {
        Trouble { code, what }
    }
}

impl From<u32> for Trouble {
    fn from(code: u32) -> Self {
        let what = match code {
            code::ILLEGAL_ADDRESS => "memory that is not allocated",
            code::MISALIGNED_ADDRESS => "a misaligned address",
            _ => "a trap or a stack too deep",
        };
        Trouble::new(code, what)
    }
}

/// The mode of `shfl`.
#[derive(Clone, Copy)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

/// The element type of a matrix operand.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
}

/// The shape and types of an `mma`.
#[derive(Clone, Copy)]
pub(crate) struct Mma {
    depth: usize,
    a: Element,
    b: Element,
    /// Whether the accumulator is f16.
    half: bool,
}

impl Mma {
    /// Looks up a supported `mma` by its shape and the types of c, b, a and d.
    pub(crate) fn find(shape: &str, formats: &[&str]) -> Option<Self> {
        let &[c, b, a, d] = formats else { return None };
        let depth = match shape {
            "m16n8k32" => 32,
            "m16n8k16" => 16,
            "m16n8k8" => 8,
            "m16n8k4" => 4,
            _ => return None,
        };
        let element = |name: &str| match name {
            "f16" => Some(Element::F16),
            "bf16" => Some(Element::Bf16),
            "tf32" => Some(Element::Tf32),
            "s8" => Some(Element::S8),
            "u8" => Some(Element::U8),
            _ => None,
        };
        let (a, b) = (element(a)?, element(b)?);
        let fits = match (a, b) {
            (Element::F16, Element::F16) => [8, 16].contains(&depth) && ["f16", "f32"].contains(&d) && c == d,
            (Element::Bf16, Element::Bf16) => [8, 16].contains(&depth) && d == "f32" && c == d,
            (Element::Tf32, Element::Tf32) => [4, 8].contains(&depth) && d == "f32" && c == d,
            (Element::S8 | Element::U8, Element::S8 | Element::U8) => {
                [16, 32].contains(&depth) && d == "s32" && c == d
            }
            _ => false,
        };
        fits.then_some(Mma { depth, a, b, half: d == "f16" })
    }
}

/// An operation of a warp.
pub(crate) enum WarpOp {
    Sync { mask: u32 },
    Shuffle { how: Shuffle, d: u32, p: u32, a: u32, lane: u32, clamp: u32, mask: u32 },
    Vote { how: u8, d: u32, a: u32, mask: u32 },
    Reduce { f: F2, d: u32, a: u32, mask: u32 },
    Matrix { d: Vec<u32>, transpose: bool, base: u32, offset: i32, generic: bool },
    StoreMatrix { a: Vec<u32>, transpose: bool, base: u32, offset: i32, generic: bool },
    Group(GroupOp),
    Multiply { kind: Mma, d: Vec<u32>, a: Vec<u32>, b: Vec<u32>, c: Vec<u32> },
}

impl WarpOp {
    /// The slot with the mask of participating threads, or [`NONE`] for the whole warp.
    pub(crate) fn mask(&self) -> u32 {
        match self {
            WarpOp::Sync { mask }
            | WarpOp::Shuffle { mask, .. }
            | WarpOp::Vote { mask, .. }
            | WarpOp::Reduce { mask, .. } => *mask,
            _ => NONE,
        }
    }

    /// Executes it for the threads of `active`.
    #[allow(clippy::too_many_lines, reason = "one arm for each operation of a warp")]
    pub(crate) fn run(
        &self,
        warp: &mut Warp,
        active: u32,
        mem: &mut Mem,
        groups: &mut Groups,
    ) -> Result<(), Trouble> {
        match self {
            WarpOp::Sync { .. } => {}
            WarpOp::Shuffle { how, d, p, a, lane, clamp, .. } => {
                // All lanes are read before one is written, because `d` may be the register `a`.
                // The value of an inactive lane is undefined in PTX; all ones make it show.
                let mut values = [0xFFFF_FFFF; LANES];
                lanes(active).for_each(|k| values[k] = warp.get(k, *a));
                for k in lanes(active) {
                    let (by, c) = (warp.get(k, *lane) as i64 & 31, warp.get(k, *clamp));
                    // Bits 8 to 12 split the warp into segments. Bits 0 to 4 limit the source lane
                    // within its segment.
                    let (segment, limit) = ((c >> 8 & 31) as i64, (c & 31) as i64);
                    let at = k as i64;
                    // `maxLane` of the pseudocode in the ISA.
                    let last = (at & segment) | (limit & !segment & 31);
                    let (from, inside) = match how {
                        Shuffle::Up => (at - by, at - by >= last),
                        Shuffle::Down => (at + by, at + by <= last),
                        Shuffle::Butterfly => (at ^ by, at ^ by <= last),
                        Shuffle::Index => {
                            let from = (at & segment) | (by & !segment & 31);
                            (from, from <= last)
                        }
                    };
                    let from = if inside { from } else { at };
                    warp.set(k, *d, values.get(from as usize).copied().unwrap_or(0xFFFF_FFFF));
                    if *p != NONE {
                        warp.set(k, *p, u64::from(inside));
                    }
                }
            }
            WarpOp::Vote { how, d, a, .. } => {
                let mut ballot = 0u32;
                for k in lanes(active) {
                    ballot |= ((warp.get(k, *a) & 1) as u32) << k;
                }
                // The order in which `sync.rs` numbers `all`, `any`, `uni` and `ballot`.
                let out = match how {
                    0 => u32::from(ballot == active),
                    1 => u32::from(ballot != 0),
                    2 => u32::from(ballot == active || ballot == 0),
                    _ => ballot,
                };
                lanes(active).for_each(|k| warp.set(k, *d, u64::from(out)));
            }
            WarpOp::Reduce { f, d, a, .. } => {
                let values = lanes(active).map(|k| warp.get(k, *a));
                let out = values.reduce(|a, b| f.one(a, b)).unwrap_or(0);
                lanes(active).for_each(|k| warp.set(k, *d, out));
            }
            WarpOp::Group(_)
            | WarpOp::Matrix { .. }
            | WarpOp::StoreMatrix { .. }
            | WarpOp::Multiply { .. }
                // These instructions are `.aligned`: PTX requires that all threads of the warp
                // execute them.
                if active != !0 =>
            {
                return Err(Trouble::new(code::LAUNCH_FAILED, "a thread of the warp is missing"));
            }
            WarpOp::Group(op) => op.run(warp, mem, groups)?,
            WarpOp::Matrix { d, transpose, base, offset, generic } => {
                let space = if *generic { Space::Generic } else { Space::Shared };
                for (matrix, d) in d.iter().enumerate() {
                    let mut rows = [[0u16; 8]; 8];
                    for (row, values) in rows.iter_mut().enumerate() {
                        // Threads 8 m to 8 m + 7 hold the addresses of the rows of matrix m.
                        let lane = 8 * matrix + row;
                        let mut address = warp.get(lane, *base).wrapping_add(i64::from(*offset) as u64);
                        if !generic {
                            address &= 0xFFFF_FFFF;
                        }
                        let thread = &mut warp.threads[lane];
                        let pc = thread.pc;
                        let from = mem.resolve(thread.local(), space, address, 16, pc)?;
                        for (k, value) in values.iter_mut().enumerate() {
                            // SAFETY: `resolve` checked that 16 aligned bytes are there.
                            *value = unsafe { from.cast::<u16>().add(k).read() };
                        }
                    }
                    for k in 0..LANES {
                        // Thread k holds two neighbours of row k / 4.
                        let (row, column) = (k / 4, 2 * (k % 4));
                        let (x, y) = if *transpose {
                            (rows[column][row], rows[column + 1][row])
                        } else {
                            (rows[row][column], rows[row][column + 1])
                        };
                        warp.set(k, *d, u64::from(x) | u64::from(y) << 16);
                    }
                }
            }
            WarpOp::StoreMatrix { a, transpose, base, offset, generic } => {
                let space = if *generic { Space::Generic } else { Space::Shared };
                for (matrix, a) in a.iter().enumerate() {
                    let mut rows = [[0u16; 8]; 8];
                    for k in 0..LANES {
                        let (row, column, pair) = (k / 4, 2 * (k % 4), warp.get(k, *a));
                        for (at, half) in [pair as u16, (pair >> 16) as u16].into_iter().enumerate() {
                            if *transpose {
                                rows[column + at][row] = half;
                            } else {
                                rows[row][column + at] = half;
                            }
                        }
                    }
                    for (row, values) in rows.iter().enumerate() {
                        let lane = 8 * matrix + row;
                        let mut address = warp.get(lane, *base).wrapping_add(i64::from(*offset) as u64);
                        if !generic {
                            address &= 0xFFFF_FFFF;
                        }
                        let thread = &mut warp.threads[lane];
                        let (number, pc) = (thread.number, thread.pc);
                        let to = mem.resolve(thread.local(), space, address, 16, pc)?;
                        // SAFETY: `resolve` checked that 16 aligned bytes are there.
                        unsafe { to.cast::<[u16; 8]>().write(*values) };
                        mem.written(to, 16, number);
                    }
                }
            }
            WarpOp::Multiply { kind, d, a, b, c } => multiply(*kind, warp, [d, a, b, c])?,
        }
        Ok(())
    }
}

fn value(element: Element, bits: u64) -> f64 {
    match element {
        Element::F16 => f16::from_bits(bits as u16).wide(),
        Element::Bf16 => bf16::from_bits(bits as u16).wide(),
        // Tensor cores ignore the low 13 bits.
        Element::Tf32 => f64::from(f32::from_bits(bits as u32 & !0x1FFF)),
        Element::S8 => f64::from(bits as i8),
        Element::U8 => f64::from(bits as u8),
    }
}

fn multiply(kind: Mma, warp: &mut Warp, slots: [&[u32]; 4]) -> Result<(), u32> {
    let [d, a, b, c] = slots;
    let per = match kind.a {
        Element::F16 | Element::Bf16 => 2,
        Element::Tf32 => 1,
        Element::S8 | Element::U8 => 4,
    };
    let sums = if kind.half { 2 } else { 4 };
    // Each of the four lanes of a group holds `per` elements along K in a register.
    let steps = kind.depth / (4 * per);
    if a.len() != 2 * steps || b.len() != steps || c.len() != sums || d.len() != sums {
        return Err(code::LAUNCH_FAILED);
    }
    // Gather the fragments of all lanes into whole matrices first; the layouts are those of the
    // ISA.
    let (mut left, mut right) = ([[0f64; 32]; 16], [[0f64; 8]; 32]);
    for lane in 0..LANES {
        let (group, inner) = (lane / 4, lane % 4);
        for e in 0..per {
            let shift = 32 / per * e;
            for (k, slot) in a.iter().enumerate() {
                let bits = warp.get(lane, *slot) >> shift;
                left[group + 8 * (k & 1)][inner * per + e + (k >> 1) * 4 * per] = value(kind.a, bits);
            }
            for (k, slot) in b.iter().enumerate() {
                right[inner * per + e + k * 4 * per][group] = value(kind.b, warp.get(lane, *slot) >> shift);
            }
        }
    }
    // PTX leaves order and precision of the sums open. In f64 they are exact for integers, and more
    // precise than in f32 otherwise.
    let mut products = [[0f64; 8]; 16];
    for (left, products) in left.iter().zip(&mut products) {
        for (x, right) in left[..kind.depth].iter().zip(&right) {
            products.iter_mut().zip(right).for_each(|(sum, y)| *sum += x * y);
        }
    }
    let integer = matches!(kind.a, Element::S8 | Element::U8);
    for lane in 0..LANES {
        let (group, inner) = (lane / 4, lane % 4);
        let mut out = [0u64; 4];
        for (k, out) in out.iter_mut().enumerate() {
            let (row, column) = (group + 8 * (k >> 1), 2 * inner + (k & 1));
            let sum = products[row][column];
            *out = if kind.half {
                let bits = (warp.get(lane, c[k >> 1]) >> (16 * (k & 1))) as u16;
                u64::from(f16::narrow(f16::from_bits(bits).wide() + sum).to_bits())
            } else if integer {
                // Without `.satfinite` the accumulator wraps.
                u64::from((warp.get(lane, c[k]) as i32).wrapping_add(sum as i64 as i32) as u32)
            } else {
                u64::from(((f64::from(f32::from_bits(warp.get(lane, c[k]) as u32)) + sum) as f32).to_bits())
            };
        }
        if kind.half {
            warp.set(lane, d[0], out[0] | out[1] << 16);
            warp.set(lane, d[1], out[2] | out[3] << 16);
        } else {
            for (slot, out) in d.iter().zip(out) {
                warp.set(lane, *slot, out);
            }
        }
    }
    Ok(())
}

/// An atomic read-modify-write: it stores `f` of the old value and `value`.
pub(crate) struct Atom {
    pub(crate) f: F2,
    pub(crate) log: u8,
    pub(crate) space: Space,
    pub(crate) d: u32,
    pub(crate) base: u32,
    pub(crate) offset: i32,
    pub(crate) value: u32,
    /// `cas` stores only if the old value equals this one.
    pub(crate) compare: u32,
}

impl Atom {
    /// Executes it; returns the old value.
    ///
    /// # Safety
    ///
    /// `at` points to `1 << log` aligned bytes that stay allocated during the call.
    pub(crate) unsafe fn run(&self, at: *mut u8, value: u64, compare: u64) -> u64 {
        macro_rules! update {
            ($atomic:ty, $t:ty) => {{
                // SAFETY: the caller guarantees that `at` is aligned, allocated, and accessed
                // atomically.
                let cell = unsafe { <$atomic>::from_ptr(at.cast()) };
                if self.compare != NONE {
                    let (Ok(old) | Err(old)) =
                        cell.compare_exchange(compare as $t, value as $t, SeqCst, SeqCst);
                    return u64::from(old);
                }
                let mut old = cell.load(SeqCst);
                loop {
                    match cell.compare_exchange(old, self.f.one(u64::from(old), value) as $t, SeqCst, SeqCst)
                    {
                        Ok(old) => return u64::from(old),
                        Err(now) => old = now,
                    }
                }
            }};
        }
        match self.log {
            1 => update!(AtomicU16, u16),
            2 => update!(AtomicU32, u32),
            _ => update!(AtomicU64, u64),
        }
    }
}
