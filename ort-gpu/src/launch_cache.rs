//! The LRU cache of a node's launches.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

/// How many keys a node caches launches for.
const CAPACITY: usize = 8;

/// The launches of a node by key, which has everything that they depend on: shapes, types, contents
/// of host inputs.
pub struct LaunchCache<K, L> {
    /// The most recently used first.
    entries: Mutex<VecDeque<(K, Arc<[L]>)>>,
}

impl<K, L> Default for LaunchCache<K, L> {
    fn default() -> LaunchCache<K, L> {
        LaunchCache { entries: Mutex::default() }
    }
}

impl<K: PartialEq, L> LaunchCache<K, L> {
    /// Returns the launches of a key, and makes them the most recently used.
    pub fn find(&self, key: &K) -> Option<Arc<[L]>> {
        let mut entries = self.entries.lock();
        // At most `CAPACITY` keys, so comparing is cheaper than hashing them.
        let place = entries.iter().position(|(own, _)| own == key)?;
        let found = entries.remove(place)?;
        let launches = found.1.clone();
        entries.push_front(found);
        Some(launches)
    }

    /// Adds the launches of a key that is not in the cache. Drops the least recently used ones if
    /// there are too many.
    pub fn insert(&self, key: K, launches: Arc<[L]>) {
        let mut entries = self.entries.lock();
        entries.push_front((key, launches));
        entries.truncate(CAPACITY);
    }

    /// Returns the launches used last; `None` before the first run.
    pub fn last_used(&self) -> Option<Arc<[L]>> {
        self.entries.lock().front().map(|(_, launches)| launches.clone())
    }

    /// Drops all launches.
    pub fn clear(&mut self) {
        self.entries.get_mut().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_recently_used_launches_are_dropped() {
        let cache = LaunchCache::default();
        for key in 0..CAPACITY {
            cache.insert(key, Arc::from([key]));
        }
        assert_eq!(cache.find(&0).as_deref(), Some(&[0][..]));
        cache.insert(CAPACITY, Arc::from([CAPACITY]));
        assert_eq!(cache.find(&1), None);
        assert_eq!(cache.last_used().as_deref(), Some(&[CAPACITY][..]));
        assert_eq!(cache.find(&0).as_deref(), Some(&[0][..]));
    }
}
