//! NVIDIA's libraries over the driver, where they are found: cuBLASLt for products, cuDNN for
//! convolutions. Nothing needs them, and a build needs nothing of them.
//!
//! They are looked for when a device is opened (`search`). What is found and cannot be used,
//! because it is too old, broken or for another driver, is a warning with the reason, and the
//! provider's own kernels serve. Their declarations are here and not those of `cudarc`, which
//! panics where a library or a function is missing, and whose enumerations a later library may go
//! beyond.

mod dnn;
mod load;
mod lt;
mod search;

use std::path::PathBuf;
use std::sync::Arc;

use ort_core::{Result, error};

pub(crate) use dnn::{ConvOptions, Convolution, Dnn, DnnElement, Form, Pass, Search};
use load::{Kind, Loaded};
pub(crate) use lt::{ALIGNMENT, Compute, Element, Epilogue, Layout, Lt, Matmul};

use crate::driver::{Context, Limits, takes_the_systems_driver};
use crate::provider::LibraryOptions;

/// One of NVIDIA's libraries that was looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibraryReport {
    /// What it is called: `cuBLASLt`.
    pub name: &'static str,
    /// The library in use; or why there is none, so that kernels of the provider's own serve.
    pub found: std::result::Result<FoundLibrary, String>,
}

/// A library that is in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// As the library tells it.
    pub version: String,
    /// Where it is.
    pub path: PathBuf,
}

impl LibraryReport {
    /// The same in words.
    pub(crate) fn to_text(&self) -> String {
        match &self.found {
            Ok(found) => format!("{} at {}", found.version, found.path.display()),
            Err(reason) => format!("none, own kernels: {reason}"),
        }
    }
}

/// The libraries of one device.
pub(crate) struct Libraries {
    pub(crate) lt: Option<Arc<Lt>>,
    pub(crate) dnn: Option<Arc<Dnn>>,
    pub(crate) reports: Vec<LibraryReport>,
}

impl Libraries {
    /// Those that options ask for and that work with the device of a context. A folder that was
    /// named and has one not is an error.
    pub(crate) fn open(context: &Arc<Context>, options: &LibraryOptions) -> Result<Libraries> {
        let (lt, report) = open(&lt::KIND, options.cublas, options, &|loaded| Lt::open(loaded, context))?;
        // cuDNN needs cuBLASLt itself: one that is loaded before is the one that it takes.
        let (dnn, of_dnn) = open(&dnn::KIND, options.cudnn, options, &|loaded| {
            Dnn::open(loaded, context, options.convolutions)
        })?;
        Ok(Libraries { lt: lt.map(Arc::new), dnn: dnn.map(Arc::new), reports: vec![report, of_dnn] })
    }
}

impl Libraries {
    /// Whether there are any.
    pub(crate) fn any(&self) -> bool {
        self.lt.is_some() || self.dnn.is_some()
    }
}

/// What would be found without options, as far as that shows without a device.
pub(crate) fn reports() -> Vec<LibraryReport> {
    let options = LibraryOptions::default();
    let lt = open::<lt::LtFunctions, ()>(&lt::KIND, true, &options, &|_| Ok(()));
    let dnn = open::<dnn::DnnFunctions, ()>(&dnn::KIND, true, &options, &|_| Ok(()));
    [lt, dnn].into_iter().flatten().map(|(_, report)| report).collect()
}

/// The first library of a kind that `start` takes.
fn open<F: load::Functions, T>(
    kind: &Kind,
    wanted: bool,
    options: &LibraryOptions,
    start: &dyn Fn(Arc<Loaded<F>>) -> std::result::Result<T, String>,
) -> Result<(Option<T>, LibraryReport)> {
    let none = |reason: String| LibraryReport { name: kind.name, found: Err(reason) };
    if !wanted {
        return Ok((None, none(format!("{} is off", kind.option))));
    }
    // What is only there for NVIDIA's driver would call it beside the one that was named.
    if options.path.is_none() && !takes_the_systems_driver() {
        return Ok((None, none("another driver than the system's is named".to_owned())));
    }
    let mut refused = Vec::new();
    for place in search::places(kind, options.path.as_deref()) {
        let loaded = match Loaded::<F>::open(kind, &place) {
            Ok(loaded) => loaded,
            Err(load::Refusal::Missing) => continue,
            Err(load::Refusal::Unfit(reason)) => {
                refused.push(reason);
                continue;
            }
        };
        let found = loaded.found.clone();
        match start(loaded) {
            Ok(started) => {
                tracing::info!("{} {} at {}", kind.name, found.version, found.path.display());
                return Ok((Some(started), LibraryReport { name: kind.name, found: Ok(found) }));
            }
            Err(reason) => refused.push(format!("{}: {reason}", found.path.display())),
        }
    }
    if let (Some(path), true) = (&options.path, refused.is_empty()) {
        let names = kind.names.join(", ");
        return Err(error!(
            InvalidArgument,
            "there is no {} in library_path '{}'",
            kind.name,
            path.display()
        )
        .help(format!("it has to hold one of {names}; without {} set {} to 0", kind.name, kind.option)));
    }
    if !refused.is_empty() {
        tracing::warn!("{} is not used: {}", kind.name, refused.join("; "));
    }
    let reason = if refused.is_empty() { "not found".to_owned() } else { refused.join("; ") };
    Ok((None, none(reason)))
}

/// What a workspace has to begin at a multiple of (cuBLAS, "cublasLtMatmul").
const WORKSPACE_ALIGNMENT: u64 = 256;

/// The bytes of a workspace that begins anywhere.
fn with_alignment(workspace: usize) -> usize {
    if workspace == 0 { 0 } else { workspace + WORKSPACE_ALIGNMENT as usize }
}

/// Address and bytes of a workspace in memory that begins anywhere.
fn workspace_of((address, bytes): (u64, u64)) -> (u64, usize) {
    let start = address.next_multiple_of(WORKSPACE_ALIGNMENT);
    (start, bytes.saturating_sub(start - address) as usize)
}

/// Whether products of float32 may be computed with shorter fractions on tensor cores, where the
/// library knows how.
pub(crate) fn allows_tf32(limits: &Limits) -> bool {
    limits.tf32
}
