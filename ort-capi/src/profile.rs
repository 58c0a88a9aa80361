//! Profiles: the Chrome trace of a session.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime as Clock, UNIX_EPOCH};

use ort_runtime::onnxruntime::name_of;
use ort_runtime::{Profile, ProfileEvent};
use serde_json::json;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::status::{Failure, Outcome, code};

/// Collects the events of a session's runs until the file is written.
pub(crate) struct Profiling {
    path: PathBuf,
    profile: Profile,
    start_ns: u64,
    is_over: AtomicBool,
}

impl Profiling {
    /// Begins a profile, in a file that is named by the prefix and the time.
    pub(crate) fn start(prefix: &Path) -> Profiling {
        let mut name = prefix.as_os_str().to_owned();
        name.push(format!("_{}.json", now()));
        let start = Clock::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Profiling {
            path: PathBuf::from(name),
            profile: Profile::new(),
            start_ns: u64::try_from(start.as_nanos()).unwrap_or(u64::MAX),
            is_over: AtomicBool::new(false),
        }
    }

    /// What collects the events of a run; `None` once it is over.
    pub(crate) fn profile(&self) -> Option<&Profile> {
        (!self.is_over.load(Ordering::Acquire)).then_some(&self.profile)
    }

    pub(crate) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Writes the file once, and returns its path.
    pub(crate) fn finish(&self) -> Outcome<PathBuf> {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            let written = write(&self.path, &self.profile.events());
            self.profile.clear();
            written.map_err(|problem| {
                Failure::new(
                    code::FAIL,
                    format!("cannot write the profile {}: {problem}", self.path.display()),
                )
            })?;
        }
        Ok(self.path.clone())
    }
}

fn write(path: &Path, events: &[ProfileEvent]) -> std::io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(b"[\n")?;
    for (place, event) in events.iter().enumerate() {
        let line = json!({
            "cat": "Node",
            "pid": std::process::id(),
            "tid": 0,
            "dur": event.duration.as_micros() as u64,
            "ts": event.start.as_micros() as u64,
            "ph": "X",
            "name": format!("{}_kernel_time", event.node),
            "args": { "op_name": event.op, "provider": name_of(event.provider), "live_bytes": event.memory.live },
        });
        let separator = if place == 0 { "" } else { ",\n" };
        write!(file, "{separator}{line}")?;
    }
    file.write_all(b"\n]\n")?;
    file.flush()
}

/// The time in UTC, as in `2026-11-28_03-11-19_123`.
fn now() -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = SystemTime.format_time(&mut Writer::new(&mut text));
    let text = text.replace('T', "_").replace([':', '.'], "-");
    text.get(..19).unwrap_or(&text).to_owned()
}
