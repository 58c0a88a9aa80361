//! What ends runs early: the flag behind `RunOptions.terminate`, and signals such as Ctrl-C.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ort_runtime::ep::CancelToken as Token;
use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;

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
        let token = |options: &Bound<'py, PyAny>| {
            Ok(options.getattr(intern!(options.py(), "_token"))?.cast_into()?)
        };
        options.map(token).transpose()
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

/// How often a call of the engine lets Python handle its signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// When signals are handled next; `None` on threads that made no call.
    static NEXT: Cell<Option<Instant>> = const { Cell::new(None) };
    /// What the handler of a signal raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Calls the engine without the interpreter's lock. A signal whose handler raises, as Ctrl-C does,
/// ends the call with that exception.
pub(crate) fn interruptibly<T: Send>(
    py: Python<'_>,
    token: Token,
    call: impl FnOnce(Token) -> T + Send,
) -> PyResult<T> {
    // The function asks on the thread of this call only, so that no other needs the lock.
    NEXT.set(Some(Instant::now() + SIGNAL_INTERVAL));
    let done = py.detach(|| call(token.polling(is_interrupted)));
    NEXT.set(None);
    match RAISED.take() {
        Some(error) => Err(error),
        None => Ok(done),
    }
}

/// Handles the signals that came since, if it is time. Python does so on its main thread alone.
fn is_interrupted() -> bool {
    let Some(next) = NEXT.get() else { return false };
    if RAISED.with_borrow(|raised| raised.is_some()) {
        return true;
    }
    let now = Instant::now();
    if now < next {
        return false;
    }
    NEXT.set(Some(now + SIGNAL_INTERVAL));
    match Python::attach(|py| py.check_signals()) {
        Ok(()) => false,
        Err(error) => {
            RAISED.set(Some(error));
            true
        }
    }
}
