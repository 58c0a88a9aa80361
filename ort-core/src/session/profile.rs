//! Times of single nodes during a run.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::program::Step;

/// One node's run.
#[derive(Clone, Debug)]
pub struct ProfileEvent {
    /// The node's name.
    pub node: String,
    /// Its operator.
    pub op: &'static str,
    /// When it began, since the profile was made.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
}

/// Collects the events of one or more runs.
#[derive(Debug)]
pub struct Profile {
    origin: Instant,
    events: Mutex<Vec<ProfileEvent>>,
}

impl Default for Profile {
    fn default() -> Self {
        Profile { origin: Instant::now(), events: Mutex::new(Vec::new()) }
    }
}

impl Profile {
    /// An empty profile that begins now.
    pub fn new() -> Profile {
        Profile::default()
    }

    pub(crate) fn record(&self, step: &Step, start: Instant) {
        let event = ProfileEvent {
            node: step.name.to_string(),
            op: step.op,
            start: start.duration_since(self.origin),
            duration: start.elapsed(),
        };
        self.events.lock().push(event);
    }

    /// The events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<ProfileEvent> {
        self.events.lock().clone()
    }
}
