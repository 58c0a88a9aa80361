//! NumPy's file formats: `.npy` arrays and `.npz` archives, read into tensors and written from
//! them.
//!
//! Files are untrusted input. A header has at most [`HEADER_BYTES`]. Memory is allocated only after
//! the file is known to hold enough data to fill it, and never beyond the caller's limit. Pickled
//! objects are rejected, because reading a pickle runs code.

// Tests may panic: there a panic is an ordinary failure. In library code it would be a bug.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![forbid(unsafe_code)]

mod archive;
mod header;
mod read;
mod write;

// `zip` has no deflate backend of its own. This dependency selects one for it.
use flate2 as _;

pub use archive::Archive;
pub use header::{HEADER_BYTES, Header};
pub use read::read_npy;
pub use write::{ArchiveWriter, write_npz};
