//! Log lines of the engine, in the form of those that the package writes.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The least severity that is written: 0 verbose, 1 info, 2 warning, 3 error, 4 fatal.
static SEVERITY: AtomicUsize = AtomicUsize::new(2);

/// Sets the least severity of lines.
pub(crate) fn set_severity(severity: usize) {
    SEVERITY.store(severity, Ordering::Relaxed);
}

/// Lets the engine's lines go to standard error, unless the process has a logger already.
pub(crate) fn install() {
    // Another module of the process may have set one; its lines are its own affair.
    let _ = tracing::subscriber::set_global_default(Lines);
}

fn severity_of(level: Level) -> usize {
    match level {
        Level::TRACE | Level::DEBUG => 0,
        Level::INFO => 1,
        Level::WARN => 2,
        Level::ERROR => 3,
    }
}

/// Writes each event as one line.
struct Lines;

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Other crates log what no program of onnxruntime expects to read.
        metadata.target().starts_with("ort_")
            && severity_of(*metadata.level()) >= SEVERITY.load(Ordering::Relaxed)
    }

    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        // The severity may change, so that each event is asked for again. The package itself logs
        // the warnings about a model, with the severity that the session's options ask for.
        let target = metadata.target();
        match target.starts_with("ort_") && target != "ort_core::onnx::warnings" {
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
        let severity = severity_of(*metadata.level());
        let letter = ["V", "I", "W", "E"].get(severity).copied().unwrap_or("F");
        let file = metadata.file().and_then(|file| file.rsplit('/').next()).unwrap_or("engine");
        let line = metadata.line().unwrap_or_default();
        let mut text = Text::default();
        event.record(&mut text);
        let place = format!("{letter}:onnxruntime:, {file}:{line} {}", metadata.target());
        let line = format!("{} [{place}] {}{}\n", now(), text.message, text.fields);
        // The lock of standard error must not be held when another thread forks.
        let _section = ort_runtime::fork::section();
        // A closed standard error is no reason to fail.
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
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

/// The time in UTC, as in `2026-11-28 03:11:19.123456`.
fn now() -> String {
    let mut text = String::new();
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    text.replace('T', " ").trim_end_matches('Z').to_owned()
}
