//! Where memory comes from: device identities, the [`Allocator`] trait and its statistics.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::{AllocError, Buffer};

/// Names one memory space. Two buffers with the same id can be read by the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u32);

impl DeviceId {
    /// Memory that the host reads and writes directly.
    pub const HOST: Self = Self(0);
}

impl fmt::Display for DeviceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::HOST => formatter.write_str("host"),
            Self(id) => write!(formatter, "device {id}"),
        }
    }
}

/// A source of memory on one device.
pub trait Allocator: Send + Sync {
    /// The device whose memory this hands out.
    fn device(&self) -> DeviceId;

    /// Gives a region of exactly `bytes` bytes that starts at a multiple of `alignment`.
    ///
    /// # Errors
    ///
    /// [`AllocError::OutOfMemory`] or [`AllocError::BudgetExceeded`] where the memory cannot be
    /// had, and [`AllocError::Unsupported`] where `alignment` is no power of two or is more than
    /// the device offers.
    fn allocate(&self, bytes: usize, alignment: usize) -> Result<Buffer, AllocError>;

    /// What has been handed out so far.
    fn stats(&self) -> Stats;

    /// Gives memory that nobody holds back to the operating system (or to the allocator underneath)
    /// and returns how many bytes went back.
    fn trim(&self) -> usize;
}

/// Counters of an allocator, by the names that ONNX Runtime's `GetStats` gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Allocations served since the start.
    pub num_allocs: u64,
    /// Reservations: allocations that bypass an arena's regions.
    pub num_reserves: u64,
    /// Regions an arena holds now: one more with each extension, one fewer with each region given
    /// back.
    pub num_arena_extensions: u64,
    /// Times that free regions went back.
    pub num_arena_shrinkages: u64,
    /// Bytes in live buffers, after rounding.
    pub in_use: usize,
    /// Bytes held from the source underneath, live or free.
    pub total_allocated: usize,
    /// The largest value of `in_use` so far.
    pub max_in_use: usize,
    /// The largest single allocation so far, after rounding.
    pub max_alloc_size: usize,
    /// The most that `total_allocated` may become; `None` for no limit.
    pub limit: Option<usize>,
}

impl fmt::Display for Stats {
    /// One line per counter, the name padded to 26 columns, as ONNX Runtime dumps them.
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

/// The counters of an allocator that serves each request by itself, kept without a lock.
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
