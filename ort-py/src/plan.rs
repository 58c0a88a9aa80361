//! `Plan`: what a run allocates, before it runs.

use ort_runtime::plan::PlanReport;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// The memory plan of a run with given sizes.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct Plan(PlanReport);

impl Plan {
    pub(crate) fn new(report: PlanReport) -> Plan {
        Plan(report)
    }
}

#[pymethods]
impl Plan {
    /// The most bytes that a run allocates; `None` if sizes are known only at run time.
    #[getter]
    fn peak_bytes(&self) -> Option<usize> {
        self.0.peak_bytes
    }

    /// The plan as a dict of its numbers.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let report = &self.0;
        let dict = PyDict::new(py);
        dict.set_item("peak_bytes", report.peak_bytes)?;
        dict.set_item("planned_bytes", report.planned_bytes)?;
        dict.set_item("file_order_bytes", report.file_order_bytes)?;
        dict.set_item("lower_bound_bytes", report.lower_bound_bytes)?;
        dict.set_item("weights_bytes", report.weights_bytes)?;
        dict.set_item("symbolic_peak", &report.symbolic_peak)?;
        dict.set_item("dims", PyDict::from_sequence(PyList::new(py, &report.dims)?.as_any())?)?;
        dict.set_item("largest", &report.largest)?;
        Ok(dict)
    }
}
