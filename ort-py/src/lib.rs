//! The native part of the Python package `ort_runtime`: sessions, values and bindings.
//!
//! The package has the names of onnxruntime. What does not touch the engine is Python, in
//! `python/ort_runtime`: options, enums, exceptions, metadata. This module re-exports those names,
//! so that `ort_runtime.capi.onnxruntime_pybind11_state` has what programs expect in it.

mod arrays;
mod binding;
mod build;
mod cancel;
mod convert;
mod device;
mod dtypes;
mod error;
mod metadata;
mod ort_value;
mod plan;
mod profile;
mod session;
mod sparse;

use pyo3::prelude::*;

/// The modules of the package whose public names this one has, too.
const REEXPORTED: [&str; 4] = ["_errors", "_enums", "_options", "_metadata"];

#[pymodule(gil_used = false)]
mod onnxruntime_pybind11_state {
    #[pymodule_export]
    use super::binding::SessionIOBinding;
    #[pymodule_export]
    use super::cancel::CancelToken;
    #[pymodule_export]
    use super::ort_value::{OrtValue, OrtValueVector};
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::session::InferenceSession;
    #[pymodule_export]
    use super::sparse::SparseTensor;

    use super::*;

    /// Returns the names of the providers of this build, CPU last.
    #[pyfunction]
    fn get_available_providers() -> Vec<&'static str> {
        build::available()
    }

    /// Returns the version.
    #[pyfunction]
    fn get_version_string() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// Returns what the module was built from.
    #[pyfunction]
    fn get_build_info() -> String {
        format!("ort-runtime {}, providers: {}", env!("CARGO_PKG_VERSION"), build::available().join(", "))
    }

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        for name in REEXPORTED {
            let from = py.import(format!("ort_runtime.capi.{name}").as_str())?;
            for (name, value) in from.dict() {
                let public = name.extract::<String>()?;
                if !public.starts_with('_') && value.getattr_opt("__module__")?.is_some() {
                    module.add(public.as_str(), value)?;
                }
            }
        }
        Ok(())
    }
}
