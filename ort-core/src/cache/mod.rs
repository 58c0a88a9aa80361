//! The compile cache: packed weights and folded constants in mapped files, which processes share
//! and which save packing at load time.
//!
//! A folder holds one [`Entry`] per model and settings, named by a hash of the model's content and
//! of what packing depends on. An entry is written under a temporary name and renamed when
//! complete. So readers see all of it or nothing, the last of two writers wins, and mappings of an
//! old entry stay valid. Never modify an entry in place: that changes the weights of sessions that
//! map it, and truncating it kills their processes.
//!
//! Compilation with an entry takes blobs in the order in which compilation without one produces
//! them ([`Store`]). An entry may also contain the model's own files; then it is a
//! [`CompiledModel`]. Private data of a device, such as pipelines, is stored in files of the same
//! format beside the entries ([`DeviceCache`]).

mod content;
mod device;
mod entry;
mod key;
mod model;
mod store;
mod watch;

pub(crate) use content::{Content, Identity, hash_of};
pub use device::{DeviceCache, Fingerprint};
pub(crate) use entry::{Entry, Reading};
pub(crate) use key::{Folder, Key};
pub(crate) use model::{CompiledModel, begin, cannot_write, check_place};
pub(crate) use store::{Role, Store, tag};
pub(crate) use watch::FileWatch;
