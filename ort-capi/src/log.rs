//! Log lines of the engine, for a caller's function or standard error.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Arc, Once, PoisonError, RwLock};

use ort_runtime::onnxruntime::log::{self, Line};
use ort_sys::{OrtLoggingFunction, OrtLoggingLevel};

pub(crate) use log::set_severity;

/// A function of a caller that takes log lines.
#[derive(Clone, Copy)]
pub(crate) struct Sink {
    function: OrtLoggingFunction,
    parameter: *mut c_void,
}

// SAFETY: the header demands that logging functions may be called from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

impl Sink {
    pub(crate) fn new(function: OrtLoggingFunction, parameter: *mut c_void) -> Sink {
        Sink { function, parameter }
    }

    fn write(&self, line: &Line, id: &str) {
        let [category, id, place, message] = [CATEGORY, id, &line.place, &line.message]
            .map(|text| CString::new(text.replace('\0', "\\0")).unwrap_or_default());
        let pointer = |text: &CString| -> *const c_char { text.as_ptr() };
        // SAFETY: the caller keeps the function and its parameter valid; the texts live longer than
        // the call.
        unsafe {
            (self.function)(
                self.parameter,
                level_of(line.severity),
                pointer(&category),
                pointer(&id),
                pointer(&place),
                pointer(&message),
            );
        }
    }
}

const CATEGORY: &str = "onnxruntime";

/// What a session logs with, in place of the environment.
pub(crate) struct SessionLog {
    pub(crate) sink: Option<Sink>,
    pub(crate) severity: Option<i32>,
    pub(crate) id: String,
}

thread_local! {
    /// The log of the session that this thread builds or runs.
    static SESSION: RefCell<Option<Arc<SessionLog>>> = const { RefCell::new(None) };
}

/// The time in which a thread logs for a session.
pub(crate) struct Scope {
    before: Option<Arc<SessionLog>>,
    severity: Option<i32>,
}

impl Scope {
    /// Lets the lines of this thread be the session's. `severity` is that of one run.
    pub(crate) fn enter(log: &Arc<SessionLog>, severity: Option<i32>) -> Scope {
        let severity = log::set_thread_severity(severity.or(log.severity));
        Scope { before: SESSION.replace(Some(log.clone())), severity }
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        SESSION.replace(self.before.take());
        log::set_thread_severity(self.severity);
    }
}

/// The environment's function, if it has one.
static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sets the function that takes the lines; without one they go to standard error.
pub(crate) fn set_sink(sink: Option<Sink>) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
}

/// Takes the engine's lines, unless the process has a logger already.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| log::install(send, &[]));
}

pub(crate) fn send(line: &Line) {
    // Copied out: a caller's function may call back into the library.
    let session = SESSION.with_borrow(Clone::clone);
    let (own, id) = session.as_ref().map_or((None, ""), |log| (log.sink, log.id.as_str()));
    match own.or(*SINK.read().unwrap_or_else(PoisonError::into_inner)) {
        Some(sink) => sink.write(line, id),
        None => {
            let (letter, place, message) = (line.letter(), &line.place, &line.message);
            log::write_to_stderr(&format!("[{letter}:{CATEGORY}:{id}, {place}] {message}\n"));
        }
    }
}

/// Logs a warning, unless the log leaves warnings out.
pub(crate) fn warn(place: &str, message: impl Into<String>) {
    const WARNING: i32 = 2;
    if WARNING >= log::severity() {
        send(&Line { severity: WARNING, place: place.to_owned(), message: message.into() });
    }
}

fn level_of(severity: i32) -> OrtLoggingLevel {
    match severity {
        ..=0 => OrtLoggingLevel::ORT_LOGGING_LEVEL_VERBOSE,
        1 => OrtLoggingLevel::ORT_LOGGING_LEVEL_INFO,
        2 => OrtLoggingLevel::ORT_LOGGING_LEVEL_WARNING,
        3 => OrtLoggingLevel::ORT_LOGGING_LEVEL_ERROR,
        4.. => OrtLoggingLevel::ORT_LOGGING_LEVEL_FATAL,
    }
}
