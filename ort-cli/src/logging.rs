//! Warnings and more on standard error: one line each, bounded, with nothing in it that steers a
//! terminal but our own colour of the level.

use std::fmt;
use std::io::IsTerminal;

use ort_runtime::shown;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::output::LINE_BYTES;

/// Sends what is logged from this level on to standard error, coloured on a terminal unless
/// `NO_COLOR` says otherwise.
pub(crate) fn start(level: LevelFilter) {
    let is_coloured =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    lines.with_ansi(false).event_format(Line { is_coloured }).init();
}

/// An event as `LEVEL module: message field=value`.
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
        // Names in messages come from model files.
        let mut fields = String::new();
        context.format_fields(Writer::new(&mut fields), event)?;
        let (level, target) = (event.metadata().level(), event.metadata().target());
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
