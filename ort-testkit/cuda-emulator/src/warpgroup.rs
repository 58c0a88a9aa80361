//! `wgmma`: asynchronous matrix multiplies of a warpgroup, with operands in shared memory (NVIDIA,
//! "PTX ISA", "Asynchronous Warpgroup Level Matrix Instructions").
//!
//! Each warp computes its own sixteen rows immediately, from what shared memory holds at that time.
//! Until the program waits, the accumulator registers hold [`POISON`], and the operands must not
//! change. This detects a program that does not wait.

use half::{bf16, f16};

use crate::code;
use crate::decode::Space;
use crate::exec::{Mem, Warp};
use crate::registers::LANES;
use crate::warp::{Element, Trouble};

/// The content of accumulators that were not waited for: a NaN.
const POISON: u64 = 0x7FC0_DEAD;
/// The depth K of one `wgmma`.
const DEPTH: usize = 16;
/// The rows of the accumulator tile that one warp computes.
const ROWS: usize = 16;

/// An operation of a warpgroup.
pub(crate) enum GroupOp {
    Fence,
    Commit,
    /// Waits until at most this many groups are pending.
    Wait(u64),
    Multiply(Product),
}

/// `wgmma.mma_async` with both operands in shared memory.
pub(crate) struct Product {
    pub(crate) element: Element,
    pub(crate) d: Vec<u32>,
    /// The slots of the matrix descriptors.
    pub(crate) sides: [u32; 2],
    /// The slot of the predicate `scale-d`: whether to accumulate or to start from zero.
    pub(crate) adds: u32,
    pub(crate) negative: [bool; 2],
    /// Whether each matrix is MN-major instead of K-major.
    pub(crate) across: [bool; 2],
}

/// The pending operations of a warp.
#[derive(Default)]
pub(crate) struct Groups {
    is_fenced: bool,
    /// The number of committed groups.
    committed: u64,
    flights: Vec<Flight>,
}

/// A pending `wgmma`.
struct Flight {
    /// The number of its group, once committed.
    group: Option<u64>,
    /// The accumulator registers and their results. The results are empty if a later `wgmma`
    /// continued to accumulate from them.
    d: Vec<usize>,
    sums: Vec<[f32; 32]>,
    sides: [Side; 2],
    seen: u64,
}

/// A matrix operand in shared memory: rows of `a`, or columns of `b`, which are called rows here.
#[derive(Clone, Copy)]
struct Side {
    start: u64,
    leading: u64,
    stride: u64,
    /// The number of 16-byte chunks that swizzling permutes among each other; 1 without swizzling.
    width: u64,
    across: bool,
    first: usize,
    rows: usize,
}

impl Side {
    /// Decodes a descriptor ("Matrix Descriptor Format").
    fn new(bits: u64, across: bool, first: usize, rows: usize) -> Result<Side, Trouble> {
        // Each field holds bits 4 to 17 of an address or of an offset.
        let field = |at: u32| (bits >> at & 0x3FFF) << 4;
        // By bits 62 and 63: no swizzling, then patterns of 128, 64 and 32 bytes.
        let width = [1, 8, 4, 2][(bits >> 62) as usize];
        if width > 1 && bits >> 49 & 7 != 0 {
            return Err(Trouble::new(code::LAUNCH_FAILED, "a pattern that does not begin at its boundary"));
        }
        Ok(Side { start: field(0), leading: field(16), stride: field(32), width, across, first, rows })
    }

    /// The chunks of eight elements: the address of each, its first row and its position along K
    /// ("Canonical Layouts").
    fn chunks(&self) -> impl Iterator<Item = (u64, usize, usize)> + '_ {
        let count = self.rows * DEPTH / 8;
        (0..count).map(|at| {
            let (row, k) = if self.across { (at / DEPTH * 8, at % DEPTH) } else { (at / 2, at % 2 * 8) };
            let place = self.start + self.offset((self.first + row) as u64, k as u64);
            (place ^ (place >> 7 & (self.width - 1)) << 4, row, k)
        })
    }

    /// The offset of a chunk before swizzling.
    fn offset(&self, row: u64, k: u64) -> u64 {
        let Side { leading, stride, width, .. } = *self;
        // A core matrix is eight rows of 16 bytes. The offsets are those between core matrices.
        match (self.across, width) {
            (false, 1) => row % 8 * 16 + row / 8 * stride + k / 8 * leading,
            (false, _) => row % 8 * 16 * width + row / 8 * stride + k / 8 * 16,
            (true, 1) => row / 8 * stride + k % 8 * 16 + k / 8 * leading,
            (true, _) => {
                let chunk = row / 8;
                chunk % width * 16 + chunk / width * leading + k % 8 * 16 * width + k / 8 * stride
            }
        }
    }

    /// Passes each element to `take`, with its row and its position along K; returns a hash of the
    /// elements.
    fn read(&self, mem: &mut Mem, mut take: impl FnMut(usize, usize, u16)) -> Result<u64, Trouble> {
        let mut seen = 0u64;
        for (address, row, k) in self.chunks() {
            let from = mem.resolve(&mut [], Space::Shared, address, 16, 0)?;
            // SAFETY: `resolve` checked that 16 aligned bytes are there.
            let values = unsafe { from.cast::<[u16; 8]>().read() };
            for (at, value) in values.into_iter().enumerate() {
                // FNV-1a, to compare the operands again on completion.
                seen = (seen ^ u64::from(value)).wrapping_mul(0x100_0000_01B3);
                if self.across { take(row + at, k, value) } else { take(row, k + at, value) }
            }
        }
        Ok(seen)
    }

    /// Refuses memory that a thread wrote without a later proxy fence of its own or of the reader.
    fn check_fences(&self, mem: &Mem, reader: usize) -> Result<(), Trouble> {
        if self.chunks().all(|(address, ..)| mem.is_fenced(address, reader)) {
            return Ok(());
        }
        Err(Trouble::new(code::LAUNCH_FAILED, "shared memory that was written without fence.proxy.async"))
    }
}

impl GroupOp {
    /// Executes it for a whole warp.
    pub(crate) fn run(&self, warp: &mut Warp, mem: &mut Mem, groups: &mut Groups) -> Result<(), Trouble> {
        match self {
            GroupOp::Fence => groups.is_fenced = true,
            GroupOp::Commit => {
                let open = groups.flights.iter_mut().filter(|flight| flight.group.is_none());
                open.for_each(|flight| flight.group = Some(groups.committed));
                groups.committed += 1;
            }
            GroupOp::Wait(left) => groups.wait(*left, warp, mem)?,
            GroupOp::Multiply(product) => product.run(warp, mem, groups)?,
        }
        Ok(())
    }
}

impl Groups {
    fn wait(&mut self, left: u64, warp: &mut Warp, mem: &mut Mem) -> Result<(), Trouble> {
        // The last `left` groups may stay pending.
        let is_done = |flight: &Flight| flight.group.is_some_and(|group| group + left < self.committed);
        let (done, flights): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.flights).into_iter().partition(is_done);
        self.flights = flights;
        for flight in done {
            let [left, right] = &flight.sides;
            // One hash is rotated, because equal operands would cancel otherwise.
            let seen = left.read(mem, |_, _, _| ())? ^ right.read(mem, |_, _, _| ())?.rotate_left(1);
            if seen != flight.seen {
                return Err(Trouble::new(
                    code::LAUNCH_FAILED,
                    "shared memory that was written while it was read",
                ));
            }
            for (slot, sums) in flight.d.iter().zip(&flight.sums) {
                warp.set_row(*slot, sums.map(|sum| sum.to_bits().into()));
            }
        }
        Ok(())
    }

    /// The current or pending value of accumulators, from which a `wgmma` continues.
    fn sums(&mut self, d: &[usize], warp: &Warp) -> Vec<[f32; 32]> {
        let own = |flight: &&mut Flight| flight.d == d && !flight.sums.is_empty();
        if let Some(flight) = self.flights.iter_mut().find(own) {
            return std::mem::take(&mut flight.sums);
        }
        let of = |row: &usize| warp.row(*row).map(|bits| f32::from_bits(bits as u32));
        d.iter().map(of).collect()
    }
}

impl Product {
    fn run(&self, warp: &mut Warp, mem: &mut Mem, groups: &mut Groups) -> Result<(), Trouble> {
        if !groups.is_fenced {
            return Err(Trouble::new(code::LAUNCH_FAILED, "no wgmma.fence before the first product"));
        }
        let given = |lane: usize| [self.sides[0], self.sides[1], self.adds].map(|slot| warp.get(lane, slot));
        let [a, b, adds] = given(0);
        if (0..LANES).any(|lane| given(lane) != [a, b, adds]) {
            return Err(Trouble::new(code::LAUNCH_FAILED, "threads with different descriptors"));
        }
        let (reader, columns) = (warp.threads[0].number, self.d.len() * 2);
        // Warp w of the warpgroup computes rows 16 w to 16 w + 15 of the tile.
        let left = Side::new(a, self.across[0], reader / 32 % 4 * ROWS, ROWS)?;
        let right = Side::new(b, self.across[1], 0, columns)?;
        // `wgmma` reads through the async proxy, so plain writes need a fence before it.
        left.check_fences(mem, reader)?;
        right.check_fences(mem, reader)?;
        let (mut of_a, mut of_b) = ([[0f32; DEPTH]; ROWS], vec![[0f32; 256]; DEPTH]);
        let number = |bits: u16, negative: bool| {
            let number = match self.element {
                Element::Bf16 => bf16::from_bits(bits).to_f32(),
                _ => f16::from_bits(bits).to_f32(),
            };
            if negative { -number } else { number }
        };
        let seen = left.read(mem, |row, k, bits| of_a[row][k] = number(bits, self.negative[0]))?
            ^ right
                .read(mem, |column, k, bits| of_b[k][column] = number(bits, self.negative[1]))?
                .rotate_left(1);
        // By their index among all registers of a thread, because the wait may be in another
        // frame.
        let d: Vec<usize> = self.d.iter().map(|slot| warp.row_of(0, *slot)).collect();
        let mut sums = groups.sums(&d, warp);
        if adds & 1 == 0 {
            sums.iter_mut().for_each(|sums| *sums = [0.0; 32]);
        }
        multiply(&of_a, &of_b, &mut sums);
        d.iter().for_each(|row| warp.set_row(*row, [POISON; LANES]));
        groups.flights.push(Flight { group: None, d, sums, sides: [left, right], seen });
        Ok(())
    }
}

/// Accumulates the product into `sums`, which holds one accumulator register after the other, with
/// all lanes of each ("Matrix Fragments for wgmma.mma_async.m64nNk16").
fn multiply(a: &[[f32; DEPTH]; ROWS], b: &[[f32; 256]], sums: &mut [[f32; 32]]) {
    let columns = sums.len() * 2;
    for (row, of_row) in a.iter().enumerate() {
        let mut out = [0f64; 256];
        for (x, of_k) in of_row.iter().zip(b) {
            for (out, y) in out[..columns].iter_mut().zip(of_k) {
                *out += f64::from(*x) * f64::from(*y);
            }
        }
        for (column, out) in out[..columns].iter().enumerate() {
            let register = column / 8 * 4 + row / 8 * 2 + column % 2;
            let sum = &mut sums[register][row % 8 * 4 + column % 8 / 2];
            *sum = (f64::from(*sum) + out) as f32;
        }
    }
}
