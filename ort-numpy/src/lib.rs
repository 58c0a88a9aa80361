//! NumPy's `.npy` files and `.npz` archives, to and from tensors.
//!
//! Both come from anyone, so nothing in them is trusted: a header has at most [`HEADER_BYTES`],
//! memory is asked for only once the data that is there can fill it, and never more than the caller
//! allows. Pickled objects are not read at all: reading them would run code.

// In tests such a panic is a failure like any other; here it would be a defect.
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

// Chosen for `zip`, which has no backend of its own for deflate.
use flate2 as _;

pub use archive::Archive;
pub use header::{HEADER_BYTES, Header};
pub use read::read_npy;
pub use write::{ArchiveWriter, write_npz};
