//! NVIDIA's optional libraries: cuBLASLt for GEMM, cuDNN for convolutions. Neither the provider nor
//! its build depends on them.
//!
//! They are looked for when a device is opened (`search`). If one is found but too old, broken or
//! built for another driver, we log a warning with the reason and use our own kernels. We declare
//! the functions ourselves rather than through `cudarc`, which panics if a library or function is
//! missing, and whose enumerations a newer library may exceed.

mod dnn;
mod load;
mod lt;
mod report;
mod search;
mod workspace;

use std::sync::Arc;

use ort_core::{Result, error};

pub(crate) use dnn::{ConvOptions, Convolution, Dnn, DnnElement, Form, Pass, Search};
use load::{Kind, Loaded};
pub(crate) use lt::{ALIGNMENT, Compute, Epilogue, Lt, LtElement, LtLayout, Matmul};
pub use report::{FoundLibrary, LibraryReport};

use crate::driver::{Context, Limits, takes_the_systems_driver};
use crate::options::LibraryOptions;

/// The libraries of one device.
pub(crate) struct Libraries {
    pub(crate) lt: Option<Arc<Lt>>,
    pub(crate) dnn: Option<Arc<Dnn>>,
    pub(crate) reports: Vec<LibraryReport>,
}

impl Libraries {
    /// Opens the libraries that the options enable and that work with the context's device. Fails
    /// if the folder of `library_path` lacks one of them.
    pub(crate) fn open(context: &Arc<Context>, options: &LibraryOptions) -> Result<Libraries> {
        let (lt, report) = open(&lt::KIND, options.cublas, options, &|loaded| Lt::open(loaded, context))?;
        // cuDNN loads cuBLASLt itself and takes a copy that is already loaded, so cuBLASLt goes
        // first.
        let (dnn, of_dnn) = open(&dnn::KIND, options.cudnn, options, &|loaded| {
            Dnn::open(loaded, context, options.convolutions)
        })?;
        Ok(Libraries { lt: lt.map(Arc::new), dnn: dnn.map(Arc::new), reports: vec![report, of_dnn] })
    }
}

impl Libraries {
    /// Whether any library is in use.
    pub(crate) fn any(&self) -> bool {
        self.lt.is_some() || self.dnn.is_some()
    }
}

/// Reports what a search without options finds; without a device, libraries are not started.
pub(crate) fn reports() -> Vec<LibraryReport> {
    let options = LibraryOptions::default();
    let lt = open::<lt::LtFunctions, ()>(&lt::KIND, true, &options, &|_| Ok(()));
    let dnn = open::<dnn::DnnFunctions, ()>(&dnn::KIND, true, &options, &|_| Ok(()));
    [lt, dnn].into_iter().flatten().map(|(_, report)| report).collect()
}

/// Opens the first library of a kind that `start` accepts.
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
    // A found library would call the system's driver beside the one named by the variable.
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
            // The search goes on: another copy may fit.
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
    // A library that is simply absent is normal; one that is present but unusable deserves a
    // warning.
    if !refused.is_empty() {
        tracing::warn!("{} is not used: {}", kind.name, refused.join("; "));
    }
    let reason = if refused.is_empty() { "not found".to_owned() } else { refused.join("; ") };
    Ok((None, none(reason)))
}

/// Whether float32 GEMMs and convolutions may run in TF32 on tensor cores, if the library can.
pub(crate) fn allows_tf32(limits: &Limits) -> bool {
    limits.tf32
}
