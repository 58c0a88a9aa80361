//! The native part of the Python package `ort_runtime`: sessions, values and bindings.
//!
//! The package has the names of onnxruntime. What does not touch the engine is Python, in
//! `python/ort_runtime`: options, enums, exceptions, metadata. `ort_runtime/capi/__init__.py` adds
//! those names to this module, which then has what programs expect in it.

mod arrays;
mod binding;
mod build;
mod cancel;
mod check;
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

    /// Returns what keeps a model from running, or deviates from the standard, a line each.
    #[pyfunction]
    fn check(py: Python<'_>, model: &Bound<'_, PyAny>) -> PyResult<Vec<String>> {
        super::check::check(py, model)
    }

    /// Writes a model with its packed weights into a file that sessions map.
    #[pyfunction]
    fn compile(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        out: &str,
        options: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        super::check::compile(py, model, out, options)
    }

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
}
