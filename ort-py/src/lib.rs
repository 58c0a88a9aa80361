//! The native part of the Python package `ort_runtime`: sessions, values and bindings.
//!
//! The package has the API of onnxruntime. Code that does not touch the engine is Python, in
//! `python/ort_runtime`: options, enums, exceptions, metadata. `ort_runtime/capi/__init__.py` adds
//! those names to this module, which then has what programs expect in it.

mod arrays;
mod binding;
mod bound;
mod build;
mod calibrate;
mod cancel;
mod check;
mod convert;
mod device;
mod dlpack;
mod dtypes;
mod error;
mod generate;
mod log;
mod metadata;
mod ort_value;
mod ort_value_vector;
mod plan;
mod profile;
mod providers;
mod quantize;
mod schemas;
mod session;
mod sparse;
mod training;

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyList};

#[pymodule(gil_used = false)]
mod onnxruntime_pybind11_state {
    #[pymodule_export]
    use super::binding::SessionIOBinding;
    #[pymodule_export]
    use super::calibrate::{Calibration, ChannelCalibration, HessianCalibration, quantize_blocks};
    #[pymodule_export]
    use super::cancel::CancelToken;
    #[pymodule_export]
    use super::generate::TextGenerator;
    #[pymodule_export]
    use super::ort_value::OrtValue;
    #[pymodule_export]
    use super::ort_value_vector::OrtValueVector;
    #[pymodule_export]
    use super::plan::Plan;
    #[pymodule_export]
    use super::quantize::{
        quantize_matmul_2bits, quantize_matmul_4bits, quantize_matmul_8bits, quantize_matmul_bnb4,
        quantize_qdq_matmul_2bits, quantize_qdq_matmul_4bits,
    };
    #[pymodule_export]
    use super::session::InferenceSession;
    #[pymodule_export]
    use super::sparse::SparseTensor;
    #[pymodule_export]
    use super::training::{
        CheckpointState, TrainingModule, TrainingOptimizer, TrainingScheduler, write_artifacts,
    };

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

    /// Writes a model as it is optimized, with weights where a function says.
    #[pyfunction]
    fn save_located(
        py: Python<'_>,
        model: &Bound<'_, PyAny>,
        out: &str,
        options: &Bound<'_, PyAny>,
        locate: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        super::check::save_located(py, model, out, options, locate)
    }

    /// Returns the names of the providers that work here, CPU last.
    #[pyfunction]
    fn get_available_providers(py: Python<'_>) -> Vec<String> {
        cancel::detached(py, providers::available)
    }

    /// Returns the names of all providers that any build has, CPU last.
    #[pyfunction]
    fn get_all_providers() -> Vec<String> {
        providers::all()
    }

    /// Returns `GPU` if a provider of GPUs works here, otherwise `CPU`.
    #[pyfunction]
    fn get_device(py: Python<'_>) -> &'static str {
        cancel::detached(py, providers::device)
    }

    /// Reports an exception that no caller can handle, as Python does for destructors.
    #[pyfunction]
    fn write_unraisable(error: Bound<'_, PyAny>, source: &Bound<'_, PyAny>) {
        PyErr::from_value(error).write_unraisable(source.py(), Some(source));
    }

    /// Lets only the engine's log lines of this severity on be written.
    #[pyfunction]
    fn set_engine_log_severity(severity: i32) {
        log::set_severity(severity);
    }

    /// Called when the module is imported.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        log::install();
        // numpy's functions are looked up at the first use, which may be too late at exit.
        let _ = numpy::PyArrayDescr::of::<u8>(module.py());
        let leave = PyCFunction::new_closure(module.py(), None, None, |args, _| cancel::leave(args.py()))?;
        module.py().import("atexit")?.call_method1("register", (leave,))?;
        Ok(())
    }

    /// Returns the names of the rewrite rules above level basic: those whose operators other
    /// runtimes may lack, or that suit one device.
    #[pyfunction]
    fn get_rewrite_rules_above_basic() -> Vec<&'static str> {
        let sets = ort_runtime::rewrite::rule_sets().iter();
        let basic: Vec<&str> = sets
            .filter(|set| set.level <= ort_runtime::rewrite::Level::Basic)
            .flat_map(|set| set.rules.iter().map(|rule| rule.name))
            .collect();
        ort_runtime::rewrite::rule_names().filter(|name| !basic.contains(name)).collect()
    }

    /// Sets the seed of random operators that have none of their own.
    #[pyfunction]
    fn set_seed(seed: i64) {
        ort_runtime::random::set_seed(seed);
    }

    /// Loads a library that has a provider, under a name for sessions.
    #[pyfunction]
    fn register_execution_provider_library(py: Python<'_>, name: &str, path: PathBuf) -> PyResult<()> {
        providers::register(py, name, &path.to_string_lossy())
    }

    /// Forgets a library's provider.
    #[pyfunction]
    fn unregister_execution_provider_library(py: Python<'_>, name: &str) -> PyResult<()> {
        providers::unregister(py, name)
    }

    /// Returns the newest schema of each operator.
    #[pyfunction]
    fn get_all_operator_schema(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
        schemas::operator_schemas(py)
    }

    /// Returns the kernels of the CPU.
    #[pyfunction]
    fn get_all_opkernel_def(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
        schemas::kernel_definitions(py)
    }

    /// Returns the version of onnxruntime whose interface the package has. Programs compare it.
    #[pyfunction]
    fn get_version_string() -> &'static str {
        ort_runtime::onnxruntime::INTERFACE_VERSION
    }

    /// Returns the version of the runtime itself.
    #[pyfunction]
    fn get_runtime_version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }

    /// Returns what the module was built from.
    #[pyfunction]
    fn get_build_info() -> String {
        let linked: Vec<&str> = ort_runtime::ep::providers().iter().map(|provider| provider.name()).collect();
        // Programs look for these words.
        format!("ORT Build Info: ort-runtime {}, providers: {}", env!("CARGO_PKG_VERSION"), linked.join(", "))
    }
}
