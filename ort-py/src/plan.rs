//! `Plan`: what a run allocates, before it runs.

use ort_report::{in_line, plan_json, plan_svg, plan_text, sizes_text};
use ort_runtime::plan::PlanReport;
use ort_runtime::{Session, human_bytes};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The memory plan of a run with given sizes. `print(plan)` shows what `ort plan` prints.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct Plan {
    report: PlanReport,
    /// The name of the model's graph, which is the title of the drawing.
    model: String,
    /// The memory limit of the session.
    limit: Option<usize>,
}

/// Reads a dict of sizes by name.
pub(crate) fn sizes_by_name(dims: &Bound<'_, PyDict>) -> PyResult<Vec<(String, i64)>> {
    // Taken out at once: reading a size may run code that changes the dict.
    let entries: Vec<(Bound<'_, PyAny>, Bound<'_, PyAny>)> = dims.iter().collect();
    entries.iter().map(|(name, size)| Ok((name.extract()?, size.extract()?))).collect()
}

impl Plan {
    /// Plans a run of a session with these sizes, which takes over the memory of some inputs.
    pub(crate) fn of(session: &Session, dims: &[(&str, i64)], donated: &[&str]) -> ort_runtime::Result<Plan> {
        let limit = session.memory().limit;
        Ok(Plan {
            report: session.plan_donating(dims, donated)?,
            model: session.model().graph().name.clone(),
            // A session without a limit says that it is the largest number.
            limit: (limit < usize::MAX).then_some(limit),
        })
    }
}

#[pymethods]
impl Plan {
    /// The most bytes that a run allocates; `None` if sizes are known only at run time.
    #[getter]
    fn peak_bytes(&self) -> Option<usize> {
        self.report.peak_bytes
    }

    /// The plan as `ort plan --json` writes it.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (plan_json(&self.report).to_string(),))
    }

    /// A drawing of the plan: steps to the right, addresses upwards.
    fn to_svg(&self) -> String {
        plan_svg(&self.model, &self.report)
    }

    /// The drawing, for notebooks.
    fn _repr_svg_(&self) -> String {
        self.to_svg()
    }

    fn __str__(&self) -> String {
        plan_text(&self.report, self.limit)
    }

    fn __repr__(&self) -> String {
        let bound = if self.report.peak_bytes.is_none() { "at least " } else { "" };
        let peak = human_bytes(self.report.planned_bytes);
        let sizes = match self.report.dims.is_empty() {
            true => String::new(),
            false => format!(", {}", sizes_text(&self.report.dims)),
        };
        in_line(&format!("<Plan peak {bound}{peak}{sizes}>")).into_owned()
    }
}
