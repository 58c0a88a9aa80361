//! Log lines of the engine, for a caller's function or standard error.

use std::ffi::{CString, c_char, c_void};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Once, PoisonError, RwLock};

use ort_sys::{OrtLoggingFunction, OrtLoggingLevel};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

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

    fn write(&self, line: &Line) {
        let [category, id, place, message] = [&line.category, &line.id, &line.place, &line.message]
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

/// A log line.
struct Line {
    severity: i32,
    category: String,
    id: String,
    place: String,
    message: String,
}

/// The least severity that is written: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.
static SEVERITY: AtomicI32 = AtomicI32::new(2);

/// The environment's function, if it has one.
static SINK: RwLock<Option<Sink>> = RwLock::new(None);

/// Sets the least severity of lines.
pub(crate) fn set_severity(severity: i32) {
    SEVERITY.store(severity, Ordering::Relaxed);
}

/// Sets the function that takes the lines; without one they go to standard error.
pub(crate) fn set_sink(sink: Option<Sink>) {
    *SINK.write().unwrap_or_else(PoisonError::into_inner) = sink;
}

/// Takes the engine's lines, unless the process has a logger already.
pub(crate) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let _ = tracing::subscriber::set_global_default(Lines);
    });
}

fn send(line: &Line) {
    // Copied out: a caller's function may call back into the library.
    let sink = *SINK.read().unwrap_or_else(PoisonError::into_inner);
    match sink {
        Some(sink) => sink.write(line),
        None => {
            let letter = ["V", "I", "W", "E", "F"].get(line.severity.clamp(0, 4) as usize).copied();
            let letter = letter.unwrap_or("F");
            let text = format!("[{letter}:{}:{}, {}] {}\n", line.category, line.id, line.place, line.message);
            // The lock of standard error must not be held when another thread forks.
            let _section = ort_runtime::fork::section();
            let _ = std::io::stderr().lock().write_all(text.as_bytes());
        }
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

fn severity_of(level: Level) -> i32 {
    match level {
        Level::TRACE | Level::DEBUG => 0,
        Level::INFO => 1,
        Level::WARN => 2,
        Level::ERROR => 3,
    }
}

/// Sends each event as one line.
struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Other crates log what no program of ONNX Runtime expects to read.
        metadata.target().starts_with("ort_")
            && severity_of(*metadata.level()) >= SEVERITY.load(Ordering::Relaxed)
    }

    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        // The severity may change, so that each event is asked for again.
        match metadata.target().starts_with("ort_") {
            true => Interest::sometimes(),
            false => Interest::never(),
        }
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        // The severity may change, so no level is off for good.
        Some(LevelFilter::TRACE)
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let file = metadata.file().and_then(|file| file.rsplit('/').next()).unwrap_or("engine");
        send(&Line {
            severity: severity_of(*metadata.level()),
            category: "onnxruntime".to_owned(),
            id: String::new(),
            place: format!("{file}:{} {}", metadata.line().unwrap_or_default(), metadata.target()),
            message: text.message + &text.fields,
        });
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The message of an event, and its other fields as ` name=value`.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}
