//! Resource limits for loading and running untrusted models.
//!
//! A file of a few bytes can declare any number of nodes, any nesting depth and any size. The
//! limits refuse what no sensible model needs. Each error names its limit, and a caller who trusts
//! the model raises that one.

use std::time::{Duration, Instant};

use crate::{Error, Result, error};

/// Limits for loading a model and for running sessions on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes that a model's decoded messages may take in memory, or 64 times the file size
    /// if that is more. Weights stored in the file do not count, because they are not copied.
    pub bytes: u64,
    /// The most nodes in total, including those of subgraphs and of inlined functions.
    pub nodes: usize,
    /// The deepest nesting of subgraphs and function calls. With subgraphs alone a file cannot
    /// exceed about 30, whatever this limit is, because the protobuf decoder goes no deeper.
    pub nesting: usize,
    /// The most nodes that inlined functions may add.
    pub function_nodes: usize,
    /// The most bytes of constants materialized while loading: sparse initializers made dense.
    pub folded_bytes: usize,
    /// The time limit of loading, of building a session and of each run, each on its own. `None`
    /// means no limit.
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
    /// Returns the deadline of work that starts now.
    pub fn until(&self) -> Option<Instant> {
        self.deadline.and_then(|deadline| Instant::now().checked_add(deadline))
    }
}

impl Limits {
    /// Returns the same limits with the time left until `until` as the deadline.
    pub(crate) fn ending(self, until: Option<Instant>) -> Limits {
        Limits { deadline: until.map(|until| until.saturating_duration_since(Instant::now())), ..self }
    }
}

/// Adds the advice to raise a limit to an error.
pub(crate) trait Raise {
    /// Adds the advice to raise the limit `name`.
    fn raise(self, name: &str) -> Self;
}

impl Raise for Error {
    fn raise(self, name: &str) -> Error {
        // Of the limits, the command line has this one alone.
        let flag = if name == "deadline" { ", or --deadline of `ort`" } else { "" };
        self.help(format!("raise the limit `{name}` (Limits::{name}{flag}) if you trust the model"))
    }
}

/// The number of nodes visited between two reads of the clock.
pub(crate) const NODES_PER_DEADLINE_CHECK: usize = 64;

/// Returns an error once `until` has passed while a model is loaded or compiled.
pub(crate) fn check_deadline(until: Option<Instant>, what: &str) -> Result<()> {
    let late = until.is_some_and(|until| Instant::now() >= until);
    if late {
        return Err(error!(Cancelled, "{what} the model passed its deadline").raise("deadline"));
    }
    Ok(())
}

/// Refuses a `count` above `most`. `name` is the limit to raise.
pub(crate) fn at_most(count: usize, most: usize, name: &str, what: impl FnOnce() -> String) -> Result<()> {
    if count > most {
        return Err(error!(InvalidGraph, "{}, at most {most} are allowed", what()).raise(name));
    }
    Ok(())
}
