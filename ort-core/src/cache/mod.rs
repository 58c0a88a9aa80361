//! The compiled cache: packed weights and folded constants in files that are mapped, so that
//! processes share them and loading packs nothing.
//!
//! A folder holds an [`Entry`] for each model and settings, named by a hash of the model's content
//! and of what the packing depends on. An entry is written into a file of another name, which takes
//! the entry's name once it is whole: readers see all of it or nothing, of two writers the last one
//! stays, and what others have mapped stays theirs. It is never changed in place: whoever does that
//! changes the weights of sessions that have it mapped, and whoever truncates it ends their
//! processes.
//!
//! Compiling with an entry takes blobs from it in the order in which compiling without one makes
//! them ([`Store`]). An entry may hold the model's own files, too: then it is a [`CompiledModel`].
//! What a device keeps for itself, as pipelines, lies in files of the same form beside the entries
//! ([`DeviceCache`]).

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
pub(crate) use model::{CompiledModel, begin, cannot_write};
pub(crate) use store::{Role, Store, tag};
pub(crate) use watch::FileWatch;
