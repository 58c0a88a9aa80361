//! Randomly seeded hash maps, for keys that come from models and inputs.
//!
//! Random seeds prevent hash flooding: with an unseeded hash, a file with 820 KB of colliding keys
//! took ten seconds to load. Maps keyed by our own ids (values, nodes, slots) keep the faster
//! unseeded hash. Iteration order differs from map to map, so no result may depend on it.

use foldhash::fast::RandomState;

/// A hash map whose hash no file can predict.
pub type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// A hash set whose hash no file can predict.
pub type HashSet<T> = std::collections::HashSet<T, RandomState>;
