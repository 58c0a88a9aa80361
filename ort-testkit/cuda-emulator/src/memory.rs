//! The memory of the emulated device: pieces of host memory, whose device addresses are their host addresses.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

/// All that is allocated.
pub(crate) struct Memory {
    pieces: BTreeMap<u64, Piece>,
    used: u64,
}

struct Piece {
    size: u64,
    device: bool,
    /// None for memory that is there from the call that allocates it to the one that frees it.
    pooled: Option<Pooled>,
}

/// A piece of a pool, which streams allocate and free.
struct Pooled {
    pool: u64,
    /// Whether a stream has reached its allocation, and not the end of it.
    live: bool,
    /// The stream that was asked to free it: from there on that stream may be given it again.
    freed_in: Option<u64>,
    /// What streams were asked for and have not done.
    pending: u32,
}

const ALIGN: usize = 512;

/// The bytes that a pool reserves for pieces of one size are multiples of this.
const POOLED: u64 = 256;

impl Memory {
    pub(crate) const fn new() -> Self {
        Self { pieces: BTreeMap::new(), used: 0 }
    }

    /// Bytes that count against the device's memory.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// A piece filled with 0xFF; `device`: it counts against `limit`.
    pub(crate) fn allocate(&mut self, size: u64, device: bool, limit: u64) -> Option<u64> {
        self.add(Piece { size, device, pooled: None }, limit)
    }

    fn add(&mut self, piece: Piece, limit: u64) -> Option<u64> {
        let Piece { size, device, .. } = piece;
        if size == 0 || (device && self.used.checked_add(size)? > limit) {
            return None;
        }
        let layout = Layout::from_size_align(usize::try_from(size).ok()?, ALIGN).ok()?;
        // SAFETY: the layout's size is not zero.
        let pointer = unsafe { alloc(layout) };
        if pointer.is_null() {
            return None;
        }
        // SAFETY: `pointer` is the start of `size` bytes.
        unsafe { pointer.write_bytes(0xFF, layout.size()) };
        self.pieces.insert(pointer as u64, piece);
        self.used += if device { size } else { 0 };
        Some(pointer as u64)
    }

    /// Whether a piece began there and is freed now.
    pub(crate) fn free(&mut self, address: u64, device: bool) -> bool {
        match self.pieces.get(&address) {
            Some(piece) if piece.device == device && piece.pooled.is_none() => self.remove(address),
            _ => return false,
        }
        true
    }

    fn remove(&mut self, address: u64) {
        let Some(Piece { size, device, .. }) = self.pieces.remove(&address) else { return };
        self.used -= if device { size } else { 0 };
        if let Ok(layout) = Layout::from_size_align(size as usize, ALIGN) {
            // SAFETY: the piece came from `alloc` with this layout and left the map just now.
            unsafe { dealloc(address as *mut u8, layout) };
        }
    }

    /// Whether all `size` bytes lie in one piece.
    pub(crate) fn holds(&self, address: u64, size: u64) -> bool {
        self.piece_of(address, size).is_some()
    }

    /// Whether they do, in a piece that streams have reached and not freed.
    pub(crate) fn is_live(&self, address: u64, size: u64) -> bool {
        self.piece_of(address, size).is_some_and(Piece::is_live)
    }

    fn piece_of(&self, address: u64, size: u64) -> Option<&Piece> {
        let (start, piece) = self.pieces.range(..=address).next_back()?;
        address.checked_add(size).is_some_and(|end| end <= start + piece.size).then_some(piece)
    }

    /// The end of the piece of the host that begins there.
    pub(crate) fn piece(&self, address: u64) -> Option<u64> {
        self.pieces.get(&address).filter(|piece| !piece.device).map(|piece| address + piece.size)
    }

    /// Start and end of all pieces that kernels may use, in order.
    pub(crate) fn table(&self) -> Vec<(u64, u64)> {
        let live = self.pieces.iter().filter(|(_, piece)| piece.is_live());
        live.map(|(start, piece)| (*start, start + piece.size)).collect()
    }

    /// A piece of a pool, not to be used before its stream reaches it: one that the stream was asked to free before, or a new one.
    pub(crate) fn allocate_in(&mut self, pool: u64, stream: u64, size: u64, limit: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(POOLED)?;
        let again = self.pieces.iter_mut().find_map(|(start, piece)| {
            let pooled = piece.pooled.as_mut()?;
            let fits = pooled.pool == pool && piece.size == size && pooled.freed_in == Some(stream);
            fits.then(|| {
                (pooled.freed_in, pooled.pending) = (None, pooled.pending + 1);
                *start
            })
        });
        let pooled = Pooled { pool, live: false, freed_in: None, pending: 1 };
        again.or_else(|| self.add(Piece { size, device: true, pooled: Some(pooled) }, limit))
    }

    /// Whether the piece of a pool that begins there can be freed: a stream is asked to.
    pub(crate) fn ask_free(&mut self, address: u64, stream: u64) -> bool {
        let piece = self.pieces.get_mut(&address).and_then(|piece| piece.pooled.as_mut());
        let Some(pooled) = piece.filter(|pooled| pooled.freed_in.is_none()) else { return false };
        (pooled.freed_in, pooled.pending) = (Some(stream), pooled.pending + 1);
        true
    }

    /// A stream has reached the allocation of a piece, whose bytes are nothing yet, or its end.
    pub(crate) fn reach(&mut self, address: u64, live: bool) {
        let Some(piece) = self.pieces.get_mut(&address) else { return };
        if live {
            // SAFETY: the piece is there.
            unsafe { (address as *mut u8).write_bytes(0xFF, piece.size as usize) };
        }
        if let Some(pooled) = &mut piece.pooled {
            (pooled.live, pooled.pending) = (live, pooled.pending.saturating_sub(1));
        }
    }

    /// The bytes of a pool: all, and those that nobody was asked to free.
    pub(crate) fn of_pool(&self, pool: u64) -> (u64, u64) {
        let own = self.pieces.values().filter_map(|piece| Some((piece.size, piece.pooled.as_ref()?)));
        own.filter(|(_, pooled)| pooled.pool == pool).fold((0, 0), |(all, used), (size, pooled)| {
            (all + size, used + if pooled.freed_in.is_none() { size } else { 0 })
        })
    }

    /// Gives back pieces of a pool that are free, until it has so many bytes.
    pub(crate) fn trim(&mut self, pool: u64, keep: u64) {
        let is_free = |piece: &Piece| {
            piece.pooled.as_ref().is_some_and(|pooled| {
                pooled.pool == pool && pooled.freed_in.is_some() && pooled.pending == 0 && !pooled.live
            })
        };
        let mut all = self.of_pool(pool).0;
        let free =
            self.pieces.iter().filter(|(_, piece)| is_free(piece)).map(|(start, piece)| (*start, piece.size));
        for (address, size) in free.collect::<Vec<_>>() {
            if all > keep {
                self.remove(address);
                all -= size;
            }
        }
    }
}

impl Piece {
    fn is_live(&self) -> bool {
        self.pooled.as_ref().is_none_or(|pooled| pooled.live)
    }
}
