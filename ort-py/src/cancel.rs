//! The flag behind `RunOptions.terminate`.

use std::sync::atomic::{AtomicBool, Ordering};

use ort_runtime::ep::CancelToken as Token;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::session::token_name;

/// Ends the runs that have it, until it is cleared.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
#[derive(Default)]
pub(crate) struct CancelToken {
    token: Mutex<Token>,
    is_set: AtomicBool,
}

impl CancelToken {
    /// Returns the token of a caller's run options.
    pub(crate) fn of_options<'py>(
        options: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, CancelToken>>> {
        options.map(|options| Ok(options.getattr(token_name(options.py()))?.cast_into()?)).transpose()
    }

    /// The engine's token.
    pub(crate) fn token(&self) -> Token {
        self.token.lock().clone()
    }

    pub(crate) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Acquire)
    }
}

#[pymethods]
impl CancelToken {
    #[new]
    fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Ends the runs that have this token, and those that begin with it.
    fn cancel(&self) {
        self.is_set.store(true, Ordering::Release);
        self.token.lock().cancel();
    }

    /// Lets later runs pass.
    fn reset(&self) {
        // A token cannot be taken back, so later runs have a new one.
        if self.is_set.swap(false, Ordering::AcqRel) {
            *self.token.lock() = Token::default();
        }
    }

    /// Whether runs end.
    #[getter]
    fn is_cancelled(&self) -> bool {
        self.is_set()
    }
}
