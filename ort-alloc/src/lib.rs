//! Memory management for ort-runtime: allocators, an arena, a static memory planner and budgets.
//!
//! The crate knows bytes, devices and time steps, but no graphs and no operators.
//!
//! - [`Allocator`], [`Buffer`] and [`SharedBuffer`]: owned memory regions, of the host or of
//!   devices whose memory the host cannot access. [`HostAllocator`] is the host's.
//! - [`Heap`]: the optional global allocator, chosen by cargo feature. Trimming can make it return
//!   its free pages.
//! - [`Arena`]: a best-fit arena with coalescing over any allocator, for sizes unknown before the
//!   run.
//! - [`plan`](fn@plan): the static planner. It assigns offsets in one slab per lane from lifetimes
//!   and sizes, and proves that nothing overlaps.
//! - [`split_disjoint`]: borrows the parts of slabs that one operation reads and writes.
//! - [`Buffer::foreign`] and [`dlpack`]: zero-copy use of memory that others own.
//! - [`MappedFile`]: memory-mapped weights.
//! - [`Budget`]: the memory limit that everything counts against.
//! - [`fork`]: locks that are safe to use in a child of `fork`.
//!
//! # Example
//!
//! Three values of a chain of operations share one slab, which counts against a budget:
//!
//! ```
//! use std::sync::Arc;
//! use ort_alloc::{Allocator, Budget, BudgetedAllocator, Category, HostAllocator, Interval};
//! use ort_alloc::{Slices, plan, split_disjoint};
//!
//! let values = [
//!     Interval { bytes: 1000, first: 0, last: 1, ..Interval::default() },
//!     Interval { bytes: 500, first: 1, last: 2, ..Interval::default() },
//!     Interval { bytes: 1000, first: 2, last: 3, ..Interval::default() },
//! ];
//! let plan = plan(&values)?;
//! let slab_bytes = plan.lanes[0].bytes;
//! assert_eq!(slab_bytes, 1512); // the third value lies where the first one was; both begin at a multiple of 64
//!
//! let allocator = BudgetedAllocator {
//!     inner: Arc::<HostAllocator>::default(),
//!     budget: Budget::new(Some(2000)),
//!     category: Category::Slab,
//! };
//! let mut slab = allocator.allocate(slab_bytes, 64)?;
//! let place = |index: usize| plan.offsets[index]..plan.offsets[index] + values[index].bytes;
//! if let Some(bytes) = slab.bytes_mut() {
//!     let mut slices = split_disjoint([bytes], &[(0, place(0))], &[(0, place(1))], Slices::default())?;
//!     slices.writes[0].copy_from_slice(&slices.reads[0][..500]);
//! }
//! assert!(allocator.allocate(1000, 64).is_err()); // over the budget; the allocator stays usable
//! drop(slab);
//! assert_eq!(allocator.budget.in_use(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]

mod allocator;
pub mod arena;
pub mod budget;
mod budgeted;
mod buffer;
mod category;
mod device_id;
pub mod dlpack;
mod error;
mod foreign;
pub mod fork;
mod heap;
mod host;
mod machine;
pub mod mmap;
pub mod plan;
mod recycle;
mod region;
mod split;
mod stats;
mod sync;
mod units;

pub use allocator::Allocator;
pub use arena::{Arena, ArenaConfig, ExtendStrategy};
pub use budget::{Advance, Budget, Reservation};
pub use budgeted::{BudgetedAllocator, allocate_in};
pub use buffer::{Buffer, SharedBuffer};
pub use category::Category;
pub use device_id::DeviceId;
pub use error::AllocError;
pub use heap::Heap;
pub use host::{HostAllocator, TrimOnDrop, fail_writes_beyond_file_size_limit};
pub use machine::{free_memory_bytes, host_memory_bytes, processors};
pub use mmap::{Advice, MapError, MappedFile, open_regular};
pub use plan::{Alias, Interval, LanePlan, Overlap, Plan, PlanError, Proof, Strategy, plan, verify};
pub use recycle::Recycler;
pub use region::{HOST_ALIGNMENT, HUGE_PAGE_BYTES};
pub use split::{OverlapError, Part, Slices, emptied, split_disjoint};
pub use stats::Stats;
pub use units::{exact_bytes, human_bytes};
