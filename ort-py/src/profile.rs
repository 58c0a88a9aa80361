//! Profiling: the events of the runs of a session.

use std::sync::atomic::{AtomicBool, Ordering};

use ort_runtime::onnxruntime::name_of;
use ort_runtime::tensor::byte_count;
use ort_runtime::{EventTensor, Profile, ProfileEvent};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::dtypes::type_name;

/// Collects events from the building of a session on.
pub(crate) struct Profiling {
    profile: Profile,
    start_ns: u64,
    is_over: AtomicBool,
}

impl Profiling {
    pub(crate) fn start() -> Profiling {
        let start_ns = monotonic_ns();
        Profiling { profile: Profile::new(), start_ns, is_over: AtomicBool::new(false) }
    }

    /// What collects the events of a run; `None` once it is over.
    pub(crate) fn profile(&self) -> Option<&Profile> {
        (!self.is_over()).then_some(&self.profile)
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Drops the events, and collects no more.
    pub(crate) fn stop(&self) {
        self.is_over.store(true, Ordering::Release);
        self.profile.clear();
    }

    pub(crate) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Returns the events as dicts.
    pub(crate) fn events<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for event in self.profile.events() {
            list.append(dict_of(py, &event)?)?;
        }
        Ok(list)
    }
}

fn dict_of<'py>(py: Python<'py>, event: &ProfileEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("node", &event.node)?;
    dict.set_item("op", event.op)?;
    dict.set_item("provider", name_of(event.provider))?;
    dict.set_item("start_us", event.start.as_micros() as u64)?;
    dict.set_item("duration_us", event.duration.as_micros() as u64)?;
    dict.set_item("live_bytes", event.memory.live)?;
    dict.set_item("depth", event.depth)?;
    for (name, tensors) in [("inputs", &event.inputs), ("outputs", &event.outputs)] {
        let shapes = PyList::empty(py);
        for tensor in tensors {
            let shape = PyDict::new(py);
            shape.set_item(type_name(tensor.dtype), tensor.shape.to_vec())?;
            shapes.append(shape)?;
        }
        dict.set_item(name, shapes)?;
    }
    let bytes = |tensors: &[EventTensor], is_constant: bool| -> usize {
        let chosen = tensors.iter().filter(|tensor| tensor.is_constant == is_constant);
        chosen.map(|tensor| byte_count(tensor.dtype, &tensor.shape).unwrap_or(0)).sum()
    };
    dict.set_item("parameter_bytes", bytes(&event.inputs, true))?;
    dict.set_item("activation_bytes", bytes(&event.inputs, false))?;
    dict.set_item("output_bytes", bytes(&event.outputs, false))?;
    Ok(dict)
}

/// The clock of `time.monotonic_ns()`.
fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
