//! Bounds on what a model may cost before it has proved to be worth it.
//!
//! A file of a few bytes can name any number of nodes, any depth and any size. These bounds refuse
//! what no sensible model needs; each error says which bound it was, and a caller who trusts the
//! model raises that one.

use std::time::{Duration, Instant};

use crate::{Error, Result, error};

/// Bounds for loading a model and for running sessions on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes that the messages of a model may take in memory once they are decoded, where that is
    /// more than 64 times the file. Weights inside the file are not counted: they stay where they
    /// are.
    pub bytes: u64,
    /// Nodes in all, those of subgraphs and of inlined functions included.
    pub nodes: usize,
    /// Subgraphs and function calls inside one another. Of subgraphs alone a file can hold about
    /// 30, however much is allowed: the decoder goes no deeper.
    pub nesting: usize,
    /// Nodes that inlined functions may add.
    pub function_nodes: usize,
    /// Bytes of constants that are written out while loading: the zeros of sparse initializers.
    pub folded_bytes: usize,
    /// How long loading, building a session and each run may take, each by itself; for ever where
    /// it is none.
    pub deadline: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            bytes: 64 << 20,
            nodes: 2_000_000,
            nesting: 64,
            function_nodes: 200_000,
            folded_bytes: 64 << 20,
            deadline: Some(Duration::from_secs(3600)),
        }
    }
}

impl Limits {
    /// When what begins now must be done.
    pub fn until(&self) -> Option<Instant> {
        self.deadline.and_then(|deadline| Instant::now().checked_add(deadline))
    }
}

impl Limits {
    /// The same with the time that is left until then.
    pub(crate) fn ending(self, until: Option<Instant>) -> Limits {
        Limits { deadline: until.map(|until| until.saturating_duration_since(Instant::now())), ..self }
    }
}

/// Tells that a limit was reached and how to raise it.
pub(crate) trait Raise {
    /// Adds the advice to raise the limit called `name`.
    fn raise(self, name: &str) -> Self;
}

impl Raise for Error {
    fn raise(self, name: &str) -> Error {
        self.help(format!("raise the limit `{name}` (Limits::{name}) if you trust the model"))
    }
}

/// How many nodes are visited between two looks at the clock.
pub(crate) const NODES_PER_DEADLINE_CHECK: usize = 64;

/// An error once `until` has passed, while a model is loaded or compiled.
pub(crate) fn check_deadline(until: Option<Instant>, what: &str) -> Result<()> {
    let late = until.is_some_and(|until| Instant::now() >= until);
    if late {
        return Err(error!(Cancelled, "{what} the model passed its deadline").raise("deadline"));
    }
    Ok(())
}

/// Refuses more than `most` of something.
pub(crate) fn at_most(count: usize, most: usize, name: &str, what: impl FnOnce() -> String) -> Result<()> {
    if count > most {
        return Err(error!(InvalidGraph, "{}, at most {most} are allowed", what()).raise(name));
    }
    Ok(())
}
