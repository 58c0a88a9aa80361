//! Device memory: allocations of host memory, whose device addresses are their host addresses.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

/// All allocations.
pub(crate) struct Memory {
    pieces: BTreeMap<u64, Piece>,
    /// The blocks of the pools, by number.
    blocks: BTreeMap<u64, Block>,
    next_block: u64,
    used: u64,
}

/// Device memory that a pool holds and allocates from. A block only counts bytes: each allocation
/// in it is host memory of its own.
struct Block {
    pool: u64,
    size: u64,
}

struct Piece {
    size: u64,
    device: bool,
    /// `None` for memory that is live from the call that allocates it to the call that frees it.
    pooled: Option<Pooled>,
}

/// A stream-ordered allocation of a pool.
struct Pooled {
    pool: u64,
    block: u64,
    /// Whether a stream has reached its allocation, but not its free.
    live: bool,
    /// The stream whose free was queued; from there on that stream may reuse the memory.
    freed_in: Option<u64>,
    /// The queued allocations and frees that streams have not reached.
    pending: u32,
}

const ALIGN: usize = 512;

/// The granularity of allocations from a pool.
const POOLED: u64 = 256;
/// The granularity in which a pool takes memory from the device and returns it, as in the driver.
pub(crate) const POOL_GRANULE: u64 = 32 << 20;

impl Memory {
    pub(crate) const fn new() -> Self {
        Self { pieces: BTreeMap::new(), blocks: BTreeMap::new(), next_block: 0, used: 0 }
    }

    /// Bytes that count against the device's memory.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Allocates memory filled with 0xFF. Only device memory counts against `limit`.
    pub(crate) fn allocate(&mut self, size: u64, device: bool, limit: u64) -> Option<u64> {
        self.add(Piece { size, device, pooled: None }, limit)
    }

    fn add(&mut self, piece: Piece, limit: u64) -> Option<u64> {
        let (size, counted) = (piece.size, piece.counted());
        if size == 0 || (counted > 0 && self.used.checked_add(counted)? > limit) {
            return None;
        }
        let layout = Layout::from_size_align(usize::try_from(size).ok()?, ALIGN).ok()?;
        // SAFETY: the layout's size is not zero.
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return None;
        }
        // SAFETY: `alloc` returned `layout.size()` bytes at `pointer`, which is not null.
        // All ones are a NaN in every floating-point type, so a kernel that reads before it writes
        // is found.
        unsafe { pointer.write_bytes(0xFF, layout.size()) };
        self.pieces.insert(pointer as u64, piece);
        self.used += counted;
        Some(pointer as u64)
    }

    /// Frees an allocation; returns whether one starts there.
    pub(crate) fn free(&mut self, address: u64, device: bool) -> bool {
        match self.pieces.get(&address) {
            Some(piece) if piece.device == device && piece.pooled.is_none() => self.remove(address),
            _ => return false,
        }
        true
    }

    fn remove(&mut self, address: u64) {
        let Some(piece) = self.pieces.remove(&address) else { return };
        self.used -= piece.counted();
        if let Ok(layout) = Layout::from_size_align(piece.size as usize, ALIGN) {
            // SAFETY: the allocation came from `alloc` with this layout, and was removed from the
            // map just now.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    /// Whether all `size` bytes are in one allocation.
    pub(crate) fn holds(&self, address: u64, size: u64) -> bool {
        self.piece_of(address, size).is_some()
    }

    /// Whether they are in an allocation that is live: streams have reached it and not freed it.
    pub(crate) fn is_live(&self, address: u64, size: u64) -> bool {
        self.piece_of(address, size).is_some_and(Piece::is_live)
    }

    fn piece_of(&self, address: u64, size: u64) -> Option<&Piece> {
        let (start, piece) = self.pieces.range(..=address).next_back()?;
        // A size near 2^64 must not wrap to an address inside the allocation.
        address.checked_add(size).is_some_and(|end| end <= start + piece.size).then_some(piece)
    }

    /// The end of the host allocation that starts there.
    pub(crate) fn piece(&self, address: u64) -> Option<u64> {
        self.pieces.get(&address).filter(|piece| !piece.device).map(|piece| address + piece.size)
    }

    /// Start and end of all live allocations, in order.
    pub(crate) fn table(&self) -> Vec<(u64, u64)> {
        let live = self.pieces.iter().filter(|(_, piece)| piece.is_live());
        live.map(|(start, piece)| (*start, start + piece.size)).collect()
    }

    /// Allocates from a pool: memory whose free the same stream has queued, or new memory. It is
    /// not live before the stream reaches it.
    pub(crate) fn allocate_in(&mut self, pool: u64, stream: u64, size: u64, limit: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(POOLED)?;
        let room = self.room(pool, stream);
        let fits = |block: u64| room.get(&block).is_some_and(|room| *room >= size);
        let again = self.pieces.iter_mut().find_map(|(start, piece)| {
            let pooled = piece.pooled.as_mut()?;
            // The same stream executes the free before this allocation, so it may reuse the memory
            // at once.
            let is_it = pooled.pool == pool
                && piece.size == size
                && pooled.freed_in == Some(stream)
                && fits(pooled.block);
            is_it.then(|| {
                (pooled.freed_in, pooled.pending) = (None, pooled.pending + 1);
                *start
            })
        });
        if again.is_some() {
            return again;
        }
        let found = room.keys().copied().find(|block| fits(*block));
        let block = found.or_else(|| self.add_block(pool, size, limit))?;
        // The new allocation may reuse their bytes.
        self.remove_idle(block);
        let pooled = Pooled { pool, block, live: false, freed_in: None, pending: 1 };
        self.add(Piece { size, device: true, pooled: Some(pooled) }, limit)
    }

    /// Returns the bytes of each block of a pool that a stream may allocate: all except those in
    /// use, and those freed in another stream that has not reached the free.
    fn room(&self, pool: u64, stream: u64) -> BTreeMap<u64, u64> {
        let own = self.blocks.iter().filter(|(_, block)| block.pool == pool);
        let mut room: BTreeMap<u64, u64> = own.map(|(number, block)| (*number, block.size)).collect();
        for piece in self.pieces.values() {
            let Some(pooled) = &piece.pooled else { continue };
            let is_free = pooled.is_idle() || pooled.freed_in == Some(stream);
            if let Some(left) = room.get_mut(&pooled.block).filter(|_| !is_free) {
                // Another stream counts both what a stream freed and what that stream allocated in
                // its place, which may exceed the block.
                *left = left.saturating_sub(piece.size);
            }
        }
        room
    }

    fn add_block(&mut self, pool: u64, size: u64, limit: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(POOL_GRANULE)?;
        if self.used.checked_add(size)? > limit {
            return None;
        }
        self.used += size;
        self.next_block += 1;
        self.blocks.insert(self.next_block, Block { pool, size });
        Some(self.next_block)
    }

    /// Removes the allocations of a block whose free has executed.
    fn remove_idle(&mut self, block: u64) {
        let is_idle =
            |piece: &Piece| piece.pooled.as_ref().is_some_and(|own| own.block == block && own.is_idle());
        let idle = self.pieces.iter().filter(|(_, piece)| is_idle(piece)).map(|(start, _)| *start);
        idle.collect::<Vec<_>>().into_iter().for_each(|address| self.remove(address));
    }

    /// Queues the free of a pool allocation; returns whether one starts there that was not freed
    /// yet.
    pub(crate) fn ask_free(&mut self, address: u64, stream: u64) -> bool {
        let piece = self.pieces.get_mut(&address).and_then(|piece| piece.pooled.as_mut());
        let Some(pooled) = piece.filter(|pooled| pooled.freed_in.is_none()) else { return false };
        (pooled.freed_in, pooled.pending) = (Some(stream), pooled.pending + 1);
        true
    }

    /// A stream has reached the allocation, whose contents are undefined, or the free.
    pub(crate) fn reach(&mut self, address: u64, live: bool) {
        let Some(piece) = self.pieces.get_mut(&address) else { return };
        if live {
            // SAFETY: `pieces` holds the allocation, so its `size` bytes are allocated.
            unsafe { (address as *mut u8).write_bytes(0xFF, piece.size as usize) };
        }
        if let Some(pooled) = &mut piece.pooled {
            (pooled.live, pooled.pending) = (live, pooled.pending.saturating_sub(1));
        }
    }

    /// The bytes that a pool holds, and those of them not freed yet.
    pub(crate) fn of_pool(&self, pool: u64) -> (u64, u64) {
        let held = self.blocks.values().filter(|block| block.pool == pool).map(|block| block.size).sum();
        let own = self.pieces.values().filter(|piece| {
            piece.pooled.as_ref().is_some_and(|pooled| pooled.pool == pool && pooled.freed_in.is_none())
        });
        (held, own.map(|piece| piece.size).sum())
    }

    /// Returns free blocks of a pool to the device, while it keeps at least `keep` bytes.
    pub(crate) fn trim(&mut self, pool: u64, keep: u64) {
        let mut held = self.of_pool(pool).0;
        let own = self.blocks.iter().filter(|(_, block)| block.pool == pool);
        for (number, size) in own.map(|(number, block)| (*number, block.size)).collect::<Vec<_>>() {
            let mut of_block = self.pieces.values().filter_map(|piece| piece.pooled.as_ref());
            let is_free = of_block.all(|pooled| pooled.block != number || pooled.is_idle());
            if is_free && held - size >= keep {
                self.remove_idle(number);
                self.blocks.remove(&number);
                self.used -= size;
                held -= size;
            }
        }
    }
}

impl Pooled {
    /// Whether its free has executed.
    fn is_idle(&self) -> bool {
        self.freed_in.is_some() && self.pending == 0 && !self.live
    }
}

impl Piece {
    fn is_live(&self) -> bool {
        self.pooled.as_ref().is_none_or(|pooled| pooled.live)
    }
    /// The bytes that count against the device's memory. Those of pools are counted by block.
    fn counted(&self) -> u64 {
        if self.device && self.pooled.is_none() { self.size } else { 0 }
    }
}
