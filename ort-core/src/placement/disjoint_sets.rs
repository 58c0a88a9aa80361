//! Union-find: which nodes are connected.

#![allow(clippy::indexing_slicing, reason = "nodes are below the count that the sets were made with")]

/// Union-find over nodes. The root of a set is its first node.
pub(super) struct DisjointSets(Vec<usize>);

impl DisjointSets {
    /// Sets of one node each.
    pub(super) fn new(count: usize) -> DisjointSets {
        DisjointSets((0..count).collect())
    }

    /// The root of a node's set.
    pub(super) fn root(&mut self, node: usize) -> usize {
        let mut at = node;
        while self.0[at] != at {
            // Path halving.
            self.0[at] = self.0[self.0[at]];
            at = self.0[at];
        }
        at
    }

    /// Unites the sets of two nodes.
    pub(super) fn join(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.0[one.max(other)] = one.min(other);
    }
}
