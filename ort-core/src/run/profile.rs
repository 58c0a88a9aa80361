//! Per-node profiling: the time and memory of each node during a run.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::program::Step;

/// The execution of one node.
#[derive(Clone, Debug)]
pub struct ProfileEvent {
    /// The node's name.
    pub node: String,
    /// Its operator.
    pub op: &'static str,
    /// When it started, counted from the creation of the profile.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// What it did to the run's memory.
    pub memory: EventMemory,
    /// Its subgraph nesting depth; 0 in the model's graph. The memory of a subgraph is a part of
    /// the memory of the node that it belongs to.
    pub depth: usize,
    /// What computed it, if the provider tells: kernels, or a library and its algorithm.
    pub kernels: Option<String>,
}

/// Bytes of values, workspaces and outputs in the graph that the node is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventMemory {
    /// Bytes that become live with the node: its outputs, unless computed in place of inputs, and
    /// its workspace.
    pub allocated: usize,
    /// Bytes that die with the node.
    pub freed: usize,
    /// Bytes that are live while the node runs.
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
    /// Creates an empty profile; its events are timed from now on.
    pub fn new() -> Profile {
        Profile::default()
    }

    /// Records a step that began at `start` and has just ended.
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

    /// Returns the events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<ProfileEvent> {
        self.events.lock().clone()
    }
}
