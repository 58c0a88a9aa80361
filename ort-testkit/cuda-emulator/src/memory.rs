//! The memory of the emulated device: pieces of host memory, whose device addresses are their host addresses.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

/// All that is allocated.
pub(crate) struct Memory {
    pieces: BTreeMap<u64, (u64, bool)>,
    used: u64,
}

const ALIGN: usize = 512;

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
        self.pieces.insert(pointer as u64, (size, device));
        self.used += if device { size } else { 0 };
        Some(pointer as u64)
    }

    /// Whether a piece began there and is freed now.
    pub(crate) fn free(&mut self, address: u64, device: bool) -> bool {
        match self.pieces.get(&address) {
            Some((_, kind)) if *kind == device => {}
            _ => return false,
        }
        let Some((size, _)) = self.pieces.remove(&address) else { return false };
        self.used -= if device { size } else { 0 };
        if let Ok(layout) = Layout::from_size_align(size as usize, ALIGN) {
            // SAFETY: the piece came from `alloc` with this layout and left the map just now.
            unsafe { dealloc(address as *mut u8, layout) };
        }
        true
    }

    /// Whether all `size` bytes lie in one piece.
    pub(crate) fn holds(&self, address: u64, size: u64) -> bool {
        let Some((start, (length, _))) = self.pieces.range(..=address).next_back() else { return false };
        address.checked_add(size).is_some_and(|end| end <= start + length)
    }

    /// The end of the piece of the host that begins there.
    pub(crate) fn piece(&self, address: u64) -> Option<u64> {
        self.pieces.get(&address).filter(|(_, device)| !device).map(|(size, _)| address + size)
    }

    /// Start and end of all pieces, in order.
    pub(crate) fn table(&self) -> Vec<(u64, u64)> {
        self.pieces.iter().map(|(start, (size, _))| (*start, start + size)).collect()
    }
}
