//! What ends runs early: the flag behind `RunOptions.terminate`, and signals such as Ctrl-C.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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

/// How long the interpreter waits at its end for calls that are on their way back.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether the interpreter is about to end.
static IS_EXITING: AtomicBool = AtomicBool::new(false);

/// The calls that have left the engine and wait for the interpreter's lock.
static RETURNING: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// When signals are handled next; `None` on threads that made no call.
    static NEXT: Cell<Option<Duration>> = const { Cell::new(None) };
    /// What the handler of a signal raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether Python handles signals on this thread.
    static IS_MAIN: bool = is_main_thread();
}

#[cfg(target_os = "linux")]
fn is_main_thread() -> bool {
    u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()) == Ok(std::process::id())
}

#[cfg(not(target_os = "linux"))]
fn is_main_thread() -> bool {
    true
}

/// Calls the engine without the interpreter's lock. A signal whose handler raises, as Ctrl-C does,
/// ends the call with that exception.
pub(crate) fn interruptibly<T: Send>(
    py: Python<'_>,
    token: Token,
    call: impl FnOnce(Token) -> T + Send,
) -> PyResult<T> {
    // The handler of a signal may make a call of its own, inside of this one.
    let outer = NEXT.replace(Some(uptime() + SIGNAL_INTERVAL));
    let done = detached(py, || call(token.polling(is_interrupted)));
    NEXT.set(outer);
    match RAISED.take() {
        Some(error) => Err(error),
        None => Ok(done),
    }
}

/// Calls the engine without the interpreter's lock.
pub(crate) fn detached<T: Send>(py: Python<'_>, call: impl FnOnce() -> T + Send) -> T {
    let done = py.detach(|| {
        park_at_exit();
        let done = call();
        RETURNING.fetch_add(1, Ordering::AcqRel);
        if ends_with_interpreter() {
            RETURNING.fetch_sub(1, Ordering::AcqRel);
            park_at_exit();
        }
        done
    });
    RETURNING.fetch_sub(1, Ordering::AcqRel);
    done
}

/// Whether this thread must not go back to Python.
fn ends_with_interpreter() -> bool {
    IS_EXITING.load(Ordering::Acquire) && !IS_MAIN.with(|is_main| *is_main)
}

/// Stops a thread that the interpreter does not join, once the interpreter is about to end. CPython
/// would end it by unwinding, which Rust does not allow.
fn park_at_exit() {
    while ends_with_interpreter() {
        std::thread::park();
    }
}

/// Called when the interpreter is about to end: from now on calls of threads that it does not join
/// do not return. Those that are on their way do.
pub(crate) fn leave(py: Python<'_>) {
    IS_EXITING.store(true, Ordering::Release);
    py.detach(|| {
        let last = Instant::now() + PATIENCE;
        while RETURNING.load(Ordering::Acquire) > 0 && Instant::now() < last {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// The time since some moment. On Linux it is exact to a few milliseconds, and takes a few
/// nanoseconds to read: runs ask between all steps.
fn uptime() -> Duration {
    #[cfg(target_os = "linux")]
    {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        Duration::try_from(now).unwrap_or_default()
    }
    #[cfg(not(target_os = "linux"))]
    {
        static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }
}

/// Handles the signals that came since, if it is time. Python does so on its main thread alone.
fn is_interrupted() -> bool {
    let Some(next) = NEXT.get().filter(|_| IS_MAIN.with(|is_main| *is_main)) else { return false };
    if RAISED.with_borrow(|raised| raised.is_some()) {
        return true;
    }
    if uptime() < next {
        return false;
    }
    let handled = Python::try_attach(|py| py.check_signals());
    NEXT.set(Some(uptime() + SIGNAL_INTERVAL));
    match handled {
        Some(Err(error)) => {
            RAISED.set(Some(error));
            true
        }
        _ => false,
    }
}
