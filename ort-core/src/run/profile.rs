//! Times of single nodes during a run.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::program::Step;

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
    /// What it did to the memory of the run.
    pub memory: EventMemory,
    /// How many subgraphs it is in; what those hold is in a part of the memory of the node that
    /// they belong to.
    pub depth: usize,
    /// What computed it, where its provider tells: kernels, or a library and its algorithm.
    pub kernels: Option<String>,
}

/// Bytes of values, workspaces and outputs: of the graph that the node is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventMemory {
    /// What begins to live with the node: its outputs, unless they are in the place of inputs, and
    /// its workspace.
    pub allocated: usize,
    /// What lives no longer than it.
    pub freed: usize,
    /// What is alive while it runs.
    pub live: usize,
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

    pub(crate) fn record(&self, step: &Step, start: Instant, memory: EventMemory, depth: usize) {
        let event = ProfileEvent {
            node: step.name.to_string(),
            op: step.op,
            start: start.duration_since(self.origin),
            duration: start.elapsed(),
            memory,
            depth,
            kernels: step.work.kernel().and_then(|kernel| kernel.kernels()),
        };
        self.events.lock().push(event);
    }

    /// The events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<ProfileEvent> {
        self.events.lock().clone()
    }
}
