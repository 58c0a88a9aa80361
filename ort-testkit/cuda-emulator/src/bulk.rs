//! Mbarriers in shared memory, and TMA copies of tensor boxes that complete on them (NVIDIA, "PTX
//! ISA", "mbarrier" and "Tensor copy").
//!
//! A copy is deferred until every thread of its block has had a turn. A kernel that does not wait
//! for it therefore reads stale data deterministically.

use std::collections::BTreeMap;

use crate::code;
use crate::decode::Space;
use crate::exec::Mem;
use crate::warp::Trouble;

/// The maximum number of arrivals, and of bytes, that a barrier can count.
const MOST: u64 = (1 << 20) - 1;
/// The number of words in a tensor map.
pub(crate) const WORDS: usize = 16;
/// The magic number in the first word of a tensor map.
const MAP: u64 = 0x7E45_0A3D_0A40_F0E5;

type Done<T = ()> = std::result::Result<T, Trouble>;

fn failed<T>(what: &'static str) -> Done<T> {
    Err(Trouble::new(code::LAUNCH_FAILED, what))
}

/// Mbarrier operations and tensor copies; operands are slots.
pub(crate) enum BulkOp {
    Init {
        count: u32,
    },
    /// An arrival, which also raises the count of expected bytes.
    Arrive {
        bytes: Option<u32>,
    },
    TryWait {
        d: u32,
        parity: u32,
    },
    /// A copy to shared memory, from the tensor map at an address, at coordinates.
    Copy {
        to: (u32, i32),
        map: (u32, i32),
        at: Vec<u32>,
    },
}

/// An operation on the barrier at an address.
pub(crate) struct Bulk {
    pub(crate) op: BulkOp,
    pub(crate) barrier: (u32, i32),
}

/// The state of a barrier: the arrivals of each phase, and what is pending in the current one.
#[derive(Clone, Copy)]
struct Barrier {
    count: u64,
    arrivals: u64,
    bytes: i64,
    phase: u64,
}

impl Barrier {
    /// The word that represents the barrier in memory.
    fn word(&self) -> u64 {
        // Arrivals and counts have 20 bits each, and the bytes 21, because they may be negative.
        // The real format is opaque to programs.
        self.phase << 63 | 1 << 62 | self.arrivals << 42 | self.count << 21 | self.bytes as u64 & 0x1F_FFFF
    }

    fn advance(&mut self) {
        // A phase completes when no arrival and no byte is pending.
        if self.arrivals == 0 && self.bytes == 0 {
            (self.arrivals, self.phase) = (self.count, self.phase ^ 1);
        }
    }
}

/// The barriers of a block by their addresses, and the copies in flight.
#[derive(Default)]
pub(crate) struct Barriers {
    all: BTreeMap<u64, Barrier>,
    flights: Vec<Flight>,
}

struct Flight {
    thread: usize,
    to: u64,
    map: TensorMap,
    at: Vec<i64>,
    barrier: u64,
}

impl Mem<'_> {
    /// The location of a barrier's word.
    fn word_of(&mut self, address: u64) -> Done<*mut u64> {
        Ok(self.resolve(&mut [], Space::Shared, address, 8, 0)?.cast())
    }

    fn put_barrier(&mut self, address: u64, barrier: Barrier) -> Done {
        let word = self.word_of(address)?;
        // SAFETY: `word_of` resolved the address to eight aligned bytes of shared memory.
        unsafe { word.write(barrier.word()) };
        self.barriers.all.insert(address, barrier);
        Ok(())
    }

    fn barrier_at(&mut self, address: u64) -> Done<Barrier> {
        let word = self.word_of(address)?;
        let Some(barrier) = self.barriers.all.get(&address).copied() else {
            return failed("a barrier that no mbarrier.init made");
        };
        // SAFETY: `word_of` resolved the address to eight aligned bytes of shared memory.
        if unsafe { word.read() } != barrier.word() {
            return failed("a barrier that was written over");
        }
        Ok(barrier)
    }

    pub(crate) fn init_barrier(&mut self, address: u64, count: u64) -> Done {
        if !(1..=MOST).contains(&count) {
            return failed("a barrier of no arrivals, or of too many");
        }
        if self.barriers.flights.iter().any(|flight| flight.barrier == address) {
            return failed("a barrier that copies on their way arrive at is made again");
        }
        self.put_barrier(address, Barrier { count, arrivals: count, bytes: 0, phase: 0 })
    }

    pub(crate) fn arrive(&mut self, address: u64, bytes: u64) -> Done {
        let mut barrier = self.barrier_at(address)?;
        if barrier.arrivals == 0 {
            return failed("more arrivals than the barrier counts");
        }
        // `expect_tx` counts before the arrival, so the phase cannot complete between them.
        barrier.bytes += bytes as i64;
        if barrier.bytes > MOST as i64 {
            return failed("more bytes than a barrier can count");
        }
        barrier.arrivals -= 1;
        barrier.advance();
        self.put_barrier(address, barrier)
    }

    /// Whether the phase with this parity has completed.
    pub(crate) fn is_over(&mut self, address: u64, parity: u64) -> Done<bool> {
        let barrier = self.barrier_at(address)?;
        // The current phase is incomplete, so the completed one is that of the other parity.
        if parity > 1 { failed("a parity that is not 0 or 1") } else { Ok(barrier.phase != parity) }
    }

    /// Starts a copy of a box.
    pub(crate) fn copy_box(
        &mut self,
        thread: usize,
        [to, barrier]: [u64; 2],
        words: [u64; WORDS],
        at: Vec<i64>,
    ) -> Done {
        self.barrier_at(barrier)?;
        let Some(map) = TensorMap::of(words) else { return failed("no tensor map") };
        if map.sizes.len() != at.len() {
            return failed("a copy of another rank than its tensor map");
        }
        if !to.is_multiple_of(128) {
            return Err(Trouble::new(code::MISALIGNED_ADDRESS, "a copy to no multiple of 128 bytes"));
        }
        // Check the destination now, so that the fault names the instruction that started the copy.
        for offset in (0..map.box_bytes()).step_by(16) {
            self.resolve(&mut [], Space::Shared, to + offset, 16, 0)?;
        }
        self.barriers.flights.push(Flight { thread, to, map, at, barrier });
        Ok(())
    }

    /// Performs all copies in flight; returns whether there were any, or the thread whose copy is
    /// invalid, and why.
    pub(crate) fn land(&mut self) -> std::result::Result<bool, (usize, Trouble)> {
        let flights = std::mem::take(&mut self.barriers.flights);
        for flight in &flights {
            self.land_one(flight).map_err(|trouble| (flight.thread, trouble))?;
        }
        Ok(!flights.is_empty())
    }

    /// Whether copies are in flight.
    pub(crate) fn has_flights(&self) -> bool {
        !self.barriers.flights.is_empty()
    }

    fn land_one(&mut self, flight: &Flight) -> Done {
        let Flight { to, map, at, .. } = flight;
        let (inner, width) = (map.boxes[0], map.width);
        for line in 0..map.boxes[1..].iter().product::<u64>() {
            let from = map.line(at, line);
            for chunk in 0..inner * width / 16 {
                let place = map.mixed(to + (line * inner * width) + chunk * 16);
                let first = at[0] + (chunk * 16 / width) as i64;
                let bytes = self.chunk(map, from, first)?;
                let to = self.resolve(&mut [], Space::Shared, place, 16, 0)?;
                // SAFETY: `resolve` checked that 16 aligned bytes of shared memory are there.
                unsafe { to.cast::<[u8; 16]>().write(bytes) };
                self.written_by_copy(place);
            }
        }
        let mut barrier = self.barrier_at(flight.barrier)?;
        // May go below zero: the bytes of a copy can arrive before the thread that expects them.
        barrier.bytes -= map.box_bytes() as i64;
        if barrier.bytes < -(MOST as i64) {
            return failed("more bytes than a barrier can count");
        }
        barrier.advance();
        self.put_barrier(flight.barrier, barrier)
    }

    /// Reads 16 bytes from element `first` of a row on. Elements out of bounds are zero, as is the
    /// whole chunk if the row is.
    fn chunk(&mut self, map: &TensorMap, line: Option<u64>, first: i64) -> Done<[u8; 16]> {
        let mut bytes = [0; 16];
        let Some(line) = line else { return Ok(bytes) };
        let width = map.width as usize;
        for (at, to) in bytes.chunks_mut(width).enumerate() {
            let element = first + at as i64;
            if !(0..map.sizes[0] as i64).contains(&element) {
                continue;
            }
            let from =
                self.resolve(&mut [], Space::Global, line + element as u64 * map.width, map.width, 0)?;
            // SAFETY: `resolve` checked that `width` bytes of device memory are there.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), width) };
        }
        Ok(bytes)
    }
}

/// A tensor in memory, and the box of it that a copy reads.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TensorMap {
    pub(crate) address: u64,
    /// Bytes of an element.
    pub(crate) width: u64,
    /// Elements along each axis, the innermost first.
    pub(crate) sizes: Vec<u64>,
    /// Strides in bytes along each axis but the first.
    pub(crate) steps: Vec<u64>,
    pub(crate) boxes: Vec<u64>,
    /// The number of 16-byte chunks that swizzling permutes among each other: 1, 2, 4 or 8.
    pub(crate) mixes: u64,
}

impl TensorMap {
    /// Encodes the map as in memory, if its values are valid.
    pub(crate) fn words(&self) -> Option<[u64; WORDS]> {
        let Self { address, width, sizes, steps, boxes, mixes } = self;
        let rank = sizes.len();
        let inner = boxes.first()? * width;
        // The conditions of `cuTensorMapEncodeTiled` without interleaving.
        let fits = (1..=5).contains(&rank)
            && steps.len() == rank - 1
            && boxes.len() == rank
            && *address != 0
            && address.is_multiple_of(16)
            && sizes.iter().all(|size| (1..=1 << 32).contains(size))
            && steps.iter().all(|step| step.is_multiple_of(16) && *step < 1 << 40)
            && boxes.iter().all(|count| (1..=256).contains(count))
            && inner.is_multiple_of(16)
            && (*mixes == 1 || inner <= mixes * 16);
        if !fits {
            return None;
        }
        let mut words = [0; WORDS];
        // Word 0 is a magic number, 1 the address, 2 rank, width and swizzle. Sizes start at
        // word 3, strides at word 8, and boxes of 16 bits at word 12.
        (words[0], words[1], words[2]) = (MAP, *address, rank as u64 | width << 8 | mixes << 16);
        for (axis, size) in sizes.iter().enumerate() {
            words[3 + axis] = *size;
            words[12 + axis / 4] |= boxes[axis] << (axis % 4 * 16);
        }
        words[8..8 + steps.len()].copy_from_slice(steps);
        Some(words)
    }

    fn of(words: [u64; WORDS]) -> Option<TensorMap> {
        let field = |at: u32| words[2] >> at & 0xFF;
        let rank = field(0) as usize;
        if words[0] != MAP || !(1..=5).contains(&rank) {
            return None;
        }
        let boxes = (0..rank).map(|axis| words[12 + axis / 4] >> (axis % 4 * 16) & 0xFFFF).collect();
        let (sizes, steps) = (words[3..3 + rank].to_vec(), words[8..8 + rank - 1].to_vec());
        Some(TensorMap { address: words[1], width: field(8), sizes, steps, boxes, mixes: field(16) })
    }

    fn box_bytes(&self) -> u64 {
        self.boxes.iter().product::<u64>() * self.width
    }

    /// Returns the address of a row of a box at coordinates, or `None` out of the tensor's bounds.
    fn line(&self, at: &[i64], mut number: u64) -> Option<u64> {
        let mut from = self.address;
        for axis in 1..self.sizes.len() {
            let place = at[axis] + (number % self.boxes[axis]) as i64;
            number /= self.boxes[axis];
            // Coordinates may be negative: a box at the border of a padded image.
            if !(0..self.sizes[axis] as i64).contains(&place) {
                return None;
            }
            from += place as u64 * self.steps[axis - 1];
        }
        Some(from)
    }

    /// Applies the swizzle to an address.
    fn mixed(&self, address: u64) -> u64 {
        // Bits 4 to 6 number the chunks of a row of 128 bytes, and bits 7 to 9 the rows.
        address ^ (address >> 7 & (self.mixes - 1)) << 4
    }
}
