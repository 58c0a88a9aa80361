//! What ends runs early: the flag behind `RunOptions.terminate`, and signals such as Ctrl-C.

use std::cell::{Cell, RefCell};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ort_runtime::ep::CancelToken as Token;
use ort_runtime::ep::interrupt::uptime;
use ort_runtime::fork::{self, PerProcess};
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

/// The native calls that have the interpreter's lock or wait for it. A child of `fork` lacks the
/// threads of the others, so it counts its own.
static ATTACHED: PerProcess<AtomicUsize> = PerProcess::new();

thread_local! {
    /// When signals are handled next; `None` on threads that made no call.
    static NEXT: Cell<Option<Duration>> = const { Cell::new(None) };
    /// What the handler of a signal raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// The native calls of this thread, one inside of another.
    static CALLS: Cell<usize> = const { Cell::new(0) };
    /// Whether the thread is in [`detached`], without the interpreter's lock.
    static IS_AWAY: Cell<bool> = const { Cell::new(false) };
    /// Whether Python handles signals on this thread, and in which process.
    static IS_MAIN: Cell<Option<(usize, bool)>> = const { Cell::new(None) };
}

/// Whether Python handles signals on this thread. In a child of `fork` that is the thread which
/// forked.
fn is_main() -> bool {
    let process = fork::generation();
    match IS_MAIN.get() {
        Some((known, is_main)) if known == process => is_main,
        _ => {
            let is_main = is_main_thread();
            IS_MAIN.set(Some((process, is_main)));
            is_main
        }
    }
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
    let _call = enter(py);
    py.detach(|| {
        let _away = Away::go();
        call()
    })
}

/// A native call from Python. It is dropped when the call returns.
#[must_use]
pub(crate) struct Call(PhantomData<*const ()>);

/// Begins a native call that may run Python's code. While it lasts, the interpreter does not end:
/// CPython ends the threads that wait for its lock by unwinding them, which Rust's frames do not
/// allow.
pub(crate) fn enter(py: Python<'_>) -> Call {
    let calls = CALLS.get();
    CALLS.set(calls + 1);
    if calls == 0 {
        count_in();
        // The interpreter is ending already: this thread does not come back to Python.
        if ends_with_interpreter() {
            py.detach(|| drop(Away::go()));
        }
    }
    Call(PhantomData)
}

impl Drop for Call {
    fn drop(&mut self) {
        let calls = CALLS.get().saturating_sub(1);
        CALLS.set(calls);
        if calls == 0 {
            count_out();
        }
    }
}

/// The part of a native call that needs no interpreter, which may end meanwhile. The thread then
/// stops here.
struct Away;

impl Away {
    fn go() -> Away {
        go_away();
        Away
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        come_back();
    }
}

/// Calls Python's code from inside of [`detached`]. Returns `None` if the interpreter has ended.
pub(crate) fn attached<T>(call: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    come_back();
    let done = Python::try_attach(call);
    go_away();
    done
}

/// Calls Python's code from anywhere in a native call. Returns `None` if the interpreter has ended.
pub(crate) fn with_interpreter<T>(call: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    if IS_AWAY.get() { attached(call) } else { Python::try_attach(call) }
}

fn go_away() {
    IS_AWAY.set(true);
    count_out();
    park_at_exit();
}

fn come_back() {
    IS_AWAY.set(false);
    // Counted before it looks: either it sees the end, or `leave` sees it.
    count_in();
    if ends_with_interpreter() {
        count_out();
        park_at_exit();
    }
}

fn count_in() {
    ATTACHED.get().fetch_add(1, Ordering::SeqCst);
}

fn count_out() {
    // A child of `fork` begins at 0, in the middle of a call if that call's code has forked.
    let one_less = |count: usize| count.checked_sub(1);
    let _ = ATTACHED.get().fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
}

/// Whether this thread must not go back to Python.
fn ends_with_interpreter() -> bool {
    IS_EXITING.load(Ordering::SeqCst) && !is_main()
}

/// Stops a thread that the interpreter does not join, once the interpreter is about to end.
fn park_at_exit() {
    while ends_with_interpreter() {
        std::thread::park();
    }
}

/// Called when the interpreter is about to end: from now on calls of threads that it does not join
/// neither begin nor return. Waits for those that run Python's code or are on their way back to it.
pub(crate) fn leave(py: Python<'_>) {
    IS_EXITING.store(true, Ordering::SeqCst);
    py.detach(|| {
        let last = Instant::now() + PATIENCE;
        while ATTACHED.get().load(Ordering::SeqCst) > 0 && Instant::now() < last {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

/// Handles the signals that came since, if it is time. Python does so on its main thread alone.
fn is_interrupted() -> bool {
    let Some(next) = NEXT.get().filter(|_| is_main()) else { return false };
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
