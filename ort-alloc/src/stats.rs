//! Counters of allocators.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Counters of an allocator, named as in ONNX Runtime's `GetStats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Allocations served so far.
    pub num_allocs: u64,
    /// Reservations so far: allocations that bypass an arena's regions.
    pub num_reserves: u64,
    /// The arena's regions: incremented with each extension, decremented with each region released.
    pub num_arena_extensions: u64,
    /// How often free regions were released.
    pub num_arena_shrinkages: u64,
    /// Bytes in live buffers, after rounding.
    pub in_use: usize,
    /// Bytes obtained from the underlying allocator, live or free.
    pub total_allocated: usize,
    /// The high-water mark of `in_use`.
    pub max_in_use: usize,
    /// The largest allocation so far, after rounding.
    pub max_alloc_size: usize,
    /// The upper limit of `total_allocated`; `None` for no limit.
    pub limit: Option<usize>,
}

impl fmt::Display for Stats {
    /// Writes one line per counter with the name padded to 26 columns, as ONNX Runtime does.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = self.limit.map_or(u64::MAX, |limit| limit as u64);
        let lines = [
            ("Limit:", limit),
            ("InUse:", self.in_use as u64),
            ("TotalAllocated:", self.total_allocated as u64),
            ("MaxInUse:", self.max_in_use as u64),
            ("NumAllocs:", self.num_allocs),
            ("NumReserves:", self.num_reserves),
            ("NumArenaExtensions:", self.num_arena_extensions),
            ("NumArenaShrinkages:", self.num_arena_shrinkages),
            ("MaxAllocSize:", self.max_alloc_size as u64),
        ];
        lines.iter().try_for_each(|(name, value)| writeln!(formatter, "{name:<26}{value}"))
    }
}

/// Lock-free counters of an allocator without regions.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    num_allocs: AtomicU64,
    in_use: AtomicUsize,
    max_in_use: AtomicUsize,
    max_alloc_size: AtomicUsize,
}

impl Counters {
    pub(crate) fn allocated(&self, bytes: usize) {
        self.num_allocs.fetch_add(1, Ordering::Relaxed);
        let in_use = self.in_use.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        self.max_in_use.fetch_max(in_use, Ordering::Relaxed);
        self.max_alloc_size.fetch_max(bytes, Ordering::Relaxed);
    }

    pub(crate) fn freed(&self, bytes: usize) {
        self.in_use.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self) -> Stats {
        let in_use = self.in_use.load(Ordering::Relaxed);
        Stats {
            num_allocs: self.num_allocs.load(Ordering::Relaxed),
            in_use,
            total_allocated: in_use,
            max_in_use: self.max_in_use.load(Ordering::Relaxed),
            max_alloc_size: self.max_alloc_size.load(Ordering::Relaxed),
            ..Stats::default()
        }
    }
}
