//! Log output on standard error: one bounded line per event.
//!
//! Messages contain names from model files. Terminal control characters in them are escaped; only
//! our own level colour remains.

use std::fmt;
use std::io::{IsTerminal, Write as _};

use ort_runtime::shown;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::output::LINE_BYTES;

/// Starts logging to standard error from this level on. A terminal gets colours unless `NO_COLOR`
/// is set.
pub(crate) fn start(level: LevelFilter) {
    let is_coloured =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    // `Line` writes the only escape sequences.
    lines.with_ansi(false).event_format(Line { is_coloured }).init();
}

/// Writes a line about the work that was done, unless the user wants errors alone.
pub(crate) fn note(text: &str) {
    if tracing::enabled!(Level::WARN) {
        // If standard error is closed, no one reads it.
        let _ = writeln!(std::io::stderr(), "{}", shown(text, LINE_BYTES));
    }
}

/// The event format `LEVEL module: message field=value`.
struct Line {
    is_coloured: bool,
}

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Format the fields into a string first, so that names from model files can be escaped.
        let mut fields = String::new();
        context.format_fields(Writer::new(&mut fields), event)?;
        let (level, target) = (event.metadata().level(), event.metadata().target());
        // The bound holds after escaping, so a long name cannot flood the terminal.
        let fields = shown(&fields, LINE_BYTES);
        match colour(level).filter(|_| self.is_coloured) {
            Some(colour) => writeln!(writer, "\x1b[{colour}m{level:>5}\x1b[0m {target}: {fields}"),
            None => writeln!(writer, "{level:>5} {target}: {fields}"),
        }
    }
}

fn colour(level: &Level) -> Option<u8> {
    match *level {
        Level::ERROR => Some(31),
        Level::WARN => Some(33),
        Level::INFO => Some(32),
        _ => None,
    }
}
