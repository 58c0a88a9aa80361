//! A block's view of memory: shared, local and device memory.

use crate::bulk::Barriers;
use crate::code;
use crate::decode::Space;

/// Memory as a block addresses it.
pub(crate) struct Mem<'a> {
    pub(super) table: &'a [(u64, u64)],
    /// A cache of allocations: the one that each instruction used last, by the low bits of its
    /// number.
    pub(super) recent: [(u64, u64); 64],
    /// Shared memory, in units of the largest access, for the alignment of its base.
    pub(super) shared: Vec<u128>,
    pub(super) shared_size: u64,
    /// The last writer of each 16 bytes of shared memory. Tracked only if the module has `wgmma`,
    /// which reads shared memory through the async proxy.
    pub(super) writes: Option<Vec<Write>>,
    /// A clock of proxy fences: their count, and the time of each thread's last one.
    pub(super) clock: u64,
    pub(super) fences: Vec<u64>,
    pub(crate) barriers: Barriers,
    /// The reason of a fault, if its code is not specific enough.
    pub(super) trouble: Option<&'static str>,
}

/// A thread, and the number of fences of all threads before it wrote.
#[derive(Clone, Copy)]
pub(super) struct Write {
    pub(super) thread: usize,
    pub(super) clock: u64,
}

impl Mem<'_> {
    pub(super) fn reset(&mut self, shared: usize, threads: usize) {
        self.shared_size = shared as u64;
        self.shared.clear();
        self.shared.resize(shared.div_ceil(16) + 1, !0);
        // Memory that was never written counts as written before all fences.
        (self.clock, self.fences) = (1, vec![1; threads]);
        self.barriers = Barriers::default();
        if let Some(writes) = &mut self.writes {
            writes.clear();
            writes.resize(shared.div_ceil(16), Write { thread: 0, clock: 0 });
        }
    }

    /// Records a thread's write.
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

    /// Forgets the writers of 16 bytes, because `wgmma` sees what an async copy wrote without a
    /// fence.
    pub(crate) fn written_by_copy(&mut self, address: u64) {
        if let Some(write) = self.writes.as_mut().and_then(|writes| writes.get_mut((address / 16) as usize)) {
            *write = Write { thread: 0, clock: 0 };
        }
    }

    pub(super) fn fence(&mut self, thread: usize) {
        self.clock += 1;
        self.fences[thread] = self.clock;
    }

    /// Whether a proxy fence of the writer or the reader followed the last write of 16 bytes.
    pub(crate) fn is_fenced(&self, address: u64, reader: usize) -> bool {
        let write = self.writes.as_ref().and_then(|writes| writes.get((address / 16) as usize));
        write.is_none_or(|write| self.fences[write.thread].max(self.fences[reader]) > write.clock)
    }

    /// Translates an address, if `size` bytes there are accessible and aligned.
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
            // `size` is a power of two, so this mask tests alignment.
            return Err(code::MISALIGNED_ADDRESS);
        }
        let (space, address) = match (space, address >> 56) {
            // Device addresses are host addresses, whose top byte is zero.
            (Space::Generic, 0x70) => (Space::Shared, address & 0xFF_FFFF_FFFF_FFFF),
            (Space::Generic, 0x71) => (Space::Local, address & 0xFF_FFFF_FFFF_FFFF),
            _ => (space, address),
        };
        // A subtraction, because `address + size` may wrap.
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
                // Most instructions access the same allocation again, which saves the binary
                // search.
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
