//! Run options.

use std::time::Instant;

use super::{Profile, ValueObserver};
use crate::ep::CancelToken;
use crate::ep::dynamic::ArenaDevice;
use crate::{Result, advise, ensure, error};

/// The options of one run.
#[derive(Clone, Debug, Default)]
pub struct RunOptions<'a> {
    /// Cancelling this token ends the run.
    pub cancel: CancelToken,
    /// The time at which the run fails with an error. By default, it is the start of the run plus
    /// the session's [`Limits::deadline`](crate::Limits::deadline).
    pub deadline: Option<Instant>,
    /// Collects a profile event for each node.
    pub profile: Option<&'a Profile>,
    /// Sees each value of the run.
    pub observer: Option<&'a dyn ValueObserver>,
    /// The memories whose arenas free their unused regions after the run.
    pub shrink_arenas: Vec<ArenaDevice>,
}

impl RunOptions<'_> {
    /// Sets a run option by its key, as ONNX Runtime's `add_run_config_entry` does.
    ///
    /// The only key is `memory.enable_memory_arena_shrinkage`. Its value, such as `cpu:0;gpu:0`,
    /// lists the memories whose arenas free their unused regions after the run. `gpu` numbers the
    /// devices with memory of their own.
    ///
    /// # Errors
    ///
    /// The key is unknown, or the list is malformed. A run fails later if the session does not have
    /// an arena in the list.
    pub fn add_run_config_entry(&mut self, key: &str, value: &str) -> Result<()> {
        ensure!(
            RUN_ENTRIES.contains(&key),
            InvalidArgument,
            help = advise("options of a run", key, RUN_ENTRIES),
            "there is no option '{key}' of a run"
        );
        self.shrink_arenas = shrink_devices(value)?;
        Ok(())
    }
}

/// Parses ONNX Runtime's list of arenas to shrink, such as `cpu:0;gpu:0`.
pub(crate) fn shrink_devices(list: &str) -> Result<Vec<ArenaDevice>> {
    let mut devices = Vec::new();
    // ONNX Runtime allows a semicolon at the end.
    for device in list.strip_suffix(';').unwrap_or(list).split(';') {
        let (kind, number) = device.split_once(':').unwrap_or((device, "0"));
        ensure!(
            matches!(kind, "cpu" | "gpu"),
            InvalidArgument,
            help = "give devices as in cpu:0;gpu:0",
            "Unsupported device specified in the memory arena shrink list: {kind}"
        );
        let number = number.parse().map_err(|_| {
            error!(InvalidArgument, "Unsupported device id in the memory arena shrink list: {number}")
                .help("give devices as in cpu:0;gpu:0")
        })?;
        devices.push(ArenaDevice { is_host: kind == "cpu", number });
    }
    Ok(devices)
}

/// The keys of the run options.
pub(crate) const RUN_ENTRIES: [&str; 1] = ["memory.enable_memory_arena_shrinkage"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_arenas_names_memories() {
        for (list, count) in [("cpu", 1), ("cpu:0;gpu:1", 2), ("cpu:0;", 1)] {
            assert_eq!(shrink_devices(list).map(|devices| devices.len()).ok(), Some(count), "{list}");
        }
        for list in ["foo", "cpu:x", "cpu:-1", "cpu:0;;", ""] {
            assert!(shrink_devices(list).is_err(), "{list}");
        }
    }
}
