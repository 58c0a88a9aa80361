//! Sequences of calls that come again, as CUDA graphs.
//!
//! Between two points at which the host waits or writes, a run asks for the same calls on the same
//! memory whenever its inputs have the shapes of an earlier run: then they are one graph. A
//! sequence is compared with all its parameters and addresses, so that nothing but what was
//! captured is ever replayed.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use ort_core::Result;
use rustc_hash::FxHasher;

use crate::driver::{Call, Context, Graph, Stream};

/// Graphs that are kept; the one that was not used for longest goes first.
const MOST_GRAPHS: usize = 32;
/// Sequences that were met once and are remembered.
const MOST_SEEN: usize = 128;
/// Shorter sequences cost no less as a graph.
const SHORTEST: usize = 2;

/// The graphs of one device.
#[derive(Debug)]
pub(crate) struct Graphs {
    /// Captures, and runs nothing.
    stream: Stream,
    /// The last used first.
    kept: VecDeque<Kept>,
    /// What was met once, the last first.
    seen: VecDeque<u64>,
}

#[derive(Debug)]
struct Kept {
    hash: u64,
    calls: Vec<Call>,
    /// None where the driver could not capture it.
    graph: Option<Graph>,
}

impl Graphs {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Graphs> {
        Ok(Graphs { stream: Stream::new(context)?, kept: VecDeque::new(), seen: VecDeque::new() })
    }

    /// The graph of these calls, captured where they come for the second time; none where they are
    /// to be asked for one by one.
    pub(crate) fn find(&mut self, calls: &[Call]) -> Option<&Graph> {
        if calls.len() < SHORTEST {
            return None;
        }
        let mut hasher = FxHasher::default();
        calls.hash(&mut hasher);
        let hash = hasher.finish();
        let place = self.kept.iter().position(|kept| kept.hash == hash && kept.calls == calls);
        if let Some(kept) = place.and_then(|place| self.kept.remove(place)) {
            self.kept.push_front(kept);
        } else if let Some(place) = self.seen.iter().position(|seen| *seen == hash) {
            self.seen.remove(place);
            let graph = Graph::capture(&self.stream, calls);
            let graph = graph.inspect_err(|problem| tracing::warn!("no CUDA graph: {problem}")).ok();
            self.kept.push_front(Kept { hash, calls: calls.to_vec(), graph });
            self.kept.truncate(MOST_GRAPHS);
        } else {
            self.seen.push_front(hash);
            self.seen.truncate(MOST_SEEN);
            return None;
        }
        self.kept.front()?.graph.as_ref()
    }

    /// The stream that captures.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Forgets all graphs.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        self.seen.clear();
    }
}
