//! Which inputs of products share their statistics, and which statistics are taken together.

use std::collections::BTreeMap;

/// Inputs by the weights that they are multiplied with: those of one weight are a group.
pub(super) struct InputGroups<V, W, S> {
    /// The values and the size of each. A group that became part of another has no values.
    groups: Vec<(Vec<V>, S)>,
    of_value: BTreeMap<V, usize>,
    of_weight: BTreeMap<W, usize>,
}

impl<V, W, S> Default for InputGroups<V, W, S> {
    fn default() -> Self {
        InputGroups { groups: Vec::new(), of_value: BTreeMap::new(), of_weight: BTreeMap::new() }
    }
}

impl<V: Clone + Ord, W: Ord, S> InputGroups<V, W, S> {
    /// Adds a product of a value and a weight, which has statistics of this size.
    pub(super) fn add(&mut self, value: V, weight: W, size: S) {
        let (one, other) = (self.of_value.get(&value), self.of_weight.get(&weight));
        let place = match (one.copied(), other.copied()) {
            (Some(one), Some(other)) => self.joined(one.min(other), one.max(other)),
            (Some(place), None) | (None, Some(place)) => place,
            (None, None) => {
                self.groups.push((Vec::new(), size));
                self.groups.len() - 1
            }
        };
        self.of_weight.insert(weight, place);
        if self.of_value.insert(value.clone(), place).is_none()
            && let Some((values, _)) = self.groups.get_mut(place)
        {
            values.push(value);
        }
    }

    /// Makes two groups one.
    fn joined(&mut self, into: usize, from: usize) -> usize {
        if into != from {
            let values = self.groups.get_mut(from).map(|(values, _)| std::mem::take(values));
            if let Some((into, _)) = self.groups.get_mut(into) {
                into.extend(values.unwrap_or_default());
            }
            let places = self.of_value.values_mut().chain(self.of_weight.values_mut());
            places.filter(|place| **place == from).for_each(|place| *place = into);
        }
        into
    }

    /// The groups, with their sizes.
    pub(super) fn into_groups(self) -> impl Iterator<Item = (Vec<V>, S)> {
        self.groups.into_iter().filter(|(values, _)| !values.is_empty())
    }
}

/// Parts of a list, of which each takes this much memory at most, or has one element.
pub(super) fn parts<T>(
    all: impl Iterator<Item = T>,
    memory: usize,
    bytes: impl Fn(&T) -> usize,
) -> Vec<Vec<T>> {
    let mut parts: Vec<Vec<T>> = Vec::new();
    let mut room = 0;
    for element in all {
        let size = bytes(&element);
        if parts.is_empty() || size > room {
            parts.push(Vec::new());
            room = memory;
        }
        room = room.saturating_sub(size);
        if let Some(part) = parts.last_mut() {
            part.push(element);
        }
    }
    parts
}
