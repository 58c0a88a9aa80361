//! Profiling: the events of the runs of a session.

use ort_runtime::Profile;

/// Collects events from the building of a session on.
pub(crate) struct Profiling {
    profile: Profile,
    start_ns: u64,
}

impl Profiling {
    pub(crate) fn start() -> Profiling {
        Profiling { profile: Profile::new(), start_ns: monotonic_ns() }
    }

    pub(crate) fn profile(&self) -> &Profile {
        &self.profile
    }

    pub(crate) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Returns the events as (node, operator, start, duration, bytes live, depth).
    pub(crate) fn events(&self) -> Vec<(String, String, u64, u64, usize, usize)> {
        let event = |event: ort_runtime::ProfileEvent| {
            let [start, duration] = [event.start, event.duration].map(|time| time.as_micros() as u64);
            (event.node, event.op.to_owned(), start, duration, event.memory.live, event.depth)
        };
        self.profile.events().into_iter().map(event).collect()
    }
}

/// The clock of `time.monotonic_ns()`.
fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
