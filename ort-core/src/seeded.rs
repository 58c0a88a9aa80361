//! Hash maps that are keyed by what comes from models and inputs.
//!
//! Each is seeded at random, so that a file cannot hold keys that all collide: with an unseeded
//! hash 820 KB of them took ten seconds. Maps by our own ids (values, nodes, slots) keep the faster
//! unseeded hash. The order of iteration differs from map to map; no result may depend on it.

use foldhash::fast::RandomState;

/// A map that no file can foresee.
pub type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// A set that no file can foresee.
pub type HashSet<T> = std::collections::HashSet<T, RandomState>;
