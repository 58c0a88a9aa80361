//! Per-node profiling: the time and memory of each node during a run.

use std::time::{Duration, Instant};

use ort_alloc::fork::Mutex;

use crate::dtype::DType;
use crate::program::Step;
use crate::tensor::Shape;

/// The execution of one node.
#[derive(Clone, Debug)]
pub struct ProfileEvent {
    /// The node's name.
    pub node: String,
    /// Its operator.
    pub op: &'static str,
    /// The provider that ran it.
    pub provider: &'static str,
    /// The tensors that it read.
    pub inputs: Vec<EventTensor>,
    /// The tensors that it computed.
    pub outputs: Vec<EventTensor>,
    /// When the node started, counted from the creation of the profile.
    pub start: Duration,
    /// How long it took.
    pub duration: Duration,
    /// The bytes that it allocated and freed.
    pub memory: EventMemory,
    /// Its subgraph nesting depth; 0 in the model's graph. The memory of a subgraph is a part of
    /// the memory of its node.
    pub depth: usize,
    /// What computed the node, if the provider reports it: kernels, or a library and its algorithm.
    pub kernels: Option<String>,
}

/// A tensor that a node reads or computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventTensor {
    /// The element type.
    pub dtype: DType,
    /// The sizes.
    pub shape: Shape,
    /// Whether it is a constant of the graph, such as a weight.
    pub is_constant: bool,
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

/// What the run knows about a step that has ended.
pub(crate) struct Seen {
    pub(crate) provider: &'static str,
    pub(crate) inputs: Vec<EventTensor>,
    pub(crate) outputs: Vec<EventTensor>,
    pub(crate) memory: EventMemory,
    pub(crate) depth: usize,
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
    pub(crate) fn record(&self, step: &Step, start: Instant, seen: Seen) {
        let Seen { provider, inputs, outputs, memory, depth } = seen;
        let event = ProfileEvent {
            node: step.name.to_string(),
            op: step.op,
            provider,
            inputs,
            outputs,
            start: start.duration_since(self.origin),
            duration: start.elapsed(),
            memory,
            depth,
            kernels: step.work.kernel().and_then(|kernel| kernel.kernels()),
        };
        self.events.lock().push(event);
    }

    /// Drops the events so far.
    pub fn clear(&self) {
        *self.events.lock() = Vec::new();
    }

    /// Returns the events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<ProfileEvent> {
        self.events.lock().clone()
    }
}
