//! Log lines of the engine, in the form of ONNX Runtime's.

use std::cell::Cell;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

/// A log line.
#[derive(Debug)]
pub struct Line {
    /// 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.
    pub severity: i32,
    /// The file, its line and the module, as in `cache.rs:12 ort_core::cache`.
    pub place: String,
    /// The message, with its fields as ` name=value`.
    pub message: String,
}

impl Line {
    /// The letter that stands for the severity.
    pub fn letter(&self) -> &'static str {
        ["V", "I", "W", "E"].get(self.severity.max(0) as usize).copied().unwrap_or("F")
    }
}

/// The lowest severity that is written.
static SEVERITY: AtomicI32 = AtomicI32::new(2);

/// Sets the lowest severity of lines, as in [`Line::severity`].
pub fn set_severity(severity: i32) {
    SEVERITY.store(severity, Ordering::Relaxed);
}

/// Returns the lowest severity of lines of this thread.
pub fn severity() -> i32 {
    OWN_SEVERITY.get().unwrap_or_else(|| SEVERITY.load(Ordering::Relaxed))
}

thread_local! {
    /// The lowest severity for this thread, if it has one of its own.
    static OWN_SEVERITY: Cell<Option<i32>> = const { Cell::new(None) };
}

/// Sets the lowest severity for this thread, `None` for that of the process. Returns the last one.
pub fn set_thread_severity(severity: Option<i32>) -> Option<i32> {
    OWN_SEVERITY.replace(severity)
}

/// Sends the engine's lines to `write`, except those of the modules in `without`. Does nothing if
/// the process has a logger, whose lines are then its own affair.
pub fn install(write: fn(&Line), without: &'static [&'static str]) {
    let _ = tracing::subscriber::set_global_default(Lines { write, without });
}

/// Writes text to standard error. A closed one is no reason to fail.
pub fn write_to_stderr(text: &str) {
    // The lock of standard error must not be held when another thread forks.
    let _section = ort_alloc::fork::section();
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
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
struct Lines {
    write: fn(&Line),
    without: &'static [&'static str],
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Other crates log what no program of ONNX Runtime expects to read.
        metadata.target().starts_with("ort_") && severity_of(*metadata.level()) >= severity()
    }

    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        // The severity may change, so each event is asked for again.
        match metadata.target().starts_with("ort_") && !self.without.contains(&metadata.target()) {
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
        (self.write)(&Line {
            severity: severity_of(*metadata.level()),
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
