//! Sets of channels that are removed together: the outputs of layers, as far as elementwise
//! operators hand them on.

use std::collections::BTreeMap;

/// Where the channels of a value are. Axes are counted from the last one, as broadcasting does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChannelAxis {
    pub(super) space: usize,
    pub(super) from_end: usize,
    /// The neighbouring elements of each channel, after a `Flatten`.
    pub(super) repeat: usize,
}

/// An axis of a constant from which channels are removed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) node: usize,
    pub(super) input: usize,
    pub(super) axis: usize,
    pub(super) space: usize,
    pub(super) repeat: usize,
}

/// The channels of a model.
#[derive(Default)]
pub(super) struct ChannelSpaces {
    parents: Vec<usize>,
    counts: Vec<usize>,
    /// Why the channels stay.
    blocked: Vec<Option<String>>,
    /// The layers whose outputs they are, by node.
    pub(super) producers: Vec<(usize, usize)>,
    /// The layers whose inputs they are, by node.
    pub(super) consumers: Vec<(usize, usize)>,
    pub(super) cuts: Vec<Cut>,
    /// Depthwise convolutions, whose groups are the channels.
    pub(super) depthwise: Vec<(usize, usize)>,
    /// `Reshape` nodes whose second size is the number of channels times this.
    pub(super) reshapes: Vec<(usize, usize, usize)>,
    pub(super) of_value: BTreeMap<String, ChannelAxis>,
}

impl ChannelSpaces {
    /// A new set of channels.
    pub(super) fn create(&mut self, count: usize) -> usize {
        let space = self.parents.len();
        self.parents.push(space);
        self.counts.push(count);
        self.blocked.push(None);
        space
    }

    /// The set that this one is part of.
    pub(super) fn root(&self, space: usize) -> usize {
        let mut space = space;
        while let Some(parent) = self.parents.get(space).filter(|parent| **parent != space) {
            space = *parent;
        }
        space
    }

    pub(super) fn count(&self, space: usize) -> usize {
        self.counts.get(self.root(space)).copied().unwrap_or_default()
    }

    /// Channels that are added to each other are removed together.
    pub(super) fn tie(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        let (into, from) = (one.min(other), one.max(other));
        if into == from {
            return;
        }
        if let Some(reason) = self.reason(from).map(str::to_string) {
            self.block(into, &reason);
        }
        if let Some(parent) = self.parents.get_mut(from) {
            *parent = into;
        }
    }

    /// Keeps the channels. The first reason is reported.
    pub(super) fn block(&mut self, space: usize, reason: &str) {
        let root = self.root(space);
        if let Some(blocked) = self.blocked.get_mut(root) {
            blocked.get_or_insert_with(|| reason.to_string());
        }
    }

    /// Why the channels stay.
    pub(super) fn reason(&self, space: usize) -> Option<&str> {
        self.blocked.get(self.root(space))?.as_deref()
    }

    /// The sets of channels that may be removed.
    pub(super) fn open(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.parents.len()).filter(|space| self.root(*space) == *space && self.reason(*space).is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_share_their_reasons() {
        let mut spaces = ChannelSpaces::default();
        let all: Vec<usize> = (0..5).map(|_| spaces.create(8)).collect();
        spaces.tie(all[3], all[1]);
        spaces.block(all[4], "an output");
        spaces.tie(all[3], all[2]);
        assert_eq!([1, 2, 3].map(|space| spaces.root(space)), [1; 3]);
        assert_eq!(spaces.open().collect::<Vec<_>>(), [0, 1]);
        spaces.tie(all[4], all[2]);
        spaces.block(all[3], "later");
        assert_eq!([1, 3, 4].map(|space| spaces.reason(space)), [Some("an output"); 3]);
        assert_eq!(spaces.open().collect::<Vec<_>>(), [0]);
    }
}
