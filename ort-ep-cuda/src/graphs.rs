//! Repeated call sequences as CUDA graphs.
//!
//! Between two points at which the host waits or writes, runs with the same input shapes submit the
//! same calls on the same memory. We capture such a sequence as a graph. Sequences are compared by
//! all their parameters and addresses, so a replay never differs from what was captured.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use ort_core::Result;
use rustc_hash::FxHasher;

use crate::driver::{Call, Context, Graph, Stream};

/// The most graphs kept; the least recently used is evicted.
const MOST_GRAPHS: usize = 32;
/// The most sequences remembered after their first occurrence.
const MOST_SEEN: usize = 128;
/// A shorter sequence costs as much as a graph, so we do not capture it.
const SHORTEST: usize = 2;

/// The graph cache of one device.
#[derive(Debug)]
pub(crate) struct Graphs {
    /// The stream that captures; it runs nothing.
    stream: Stream,
    /// Most recently used first.
    kept: VecDeque<CachedGraph>,
    /// The hashes of sequences that occurred once, latest first.
    seen: VecDeque<u64>,
}

#[derive(Debug)]
struct CachedGraph {
    hash: u64,
    calls: Vec<Call>,
    /// `None` if the driver could not capture it.
    graph: Option<Graph>,
}

impl Graphs {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Graphs> {
        Ok(Graphs { stream: Stream::new(context)?, kept: VecDeque::new(), seen: VecDeque::new() })
    }

    /// Returns the graph of a call sequence, capturing it at its second occurrence. Returns `None`
    /// if the calls are to be submitted one by one.
    pub(crate) fn find(&mut self, calls: &[Call]) -> Option<&Graph> {
        if calls.len() < SHORTEST {
            return None;
        }
        let mut hasher = FxHasher::default();
        calls.hash(&mut hasher);
        let hash = hasher.finish();
        // The hash alone could collide: a replay needs equal calls.
        let place = self.kept.iter().position(|kept| kept.hash == hash && kept.calls == calls);
        if let Some(kept) = place.and_then(|place| self.kept.remove(place)) {
            self.kept.push_front(kept);
        } else if let Some(place) = self.seen.iter().position(|seen| *seen == hash) {
            self.seen.remove(place);
            let graph = Graph::capture(&self.stream, calls);
            // A failed capture is kept as `None`, so that we do not try it again on every run.
            let graph = graph.inspect_err(|problem| tracing::warn!("no CUDA graph: {problem}")).ok();
            self.kept.push_front(CachedGraph { hash, calls: calls.to_vec(), graph });
            // The front is the most recently used, so this drops the graph that was unused
            // longest.
            self.kept.truncate(MOST_GRAPHS);
        } else {
            self.seen.push_front(hash);
            self.seen.truncate(MOST_SEEN);
            return None;
        }
        self.kept.front()?.graph.as_ref()
    }

    /// Returns the capture stream.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Drops all graphs.
    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        self.seen.clear();
    }
}
