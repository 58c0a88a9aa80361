//! Recomputation planning: turns a request into a session that meets it.
//!
//! The simulation proposes choices. A choice is applied only if the plan of the edited graph
//! confirms it.

use ort_alloc::exact_bytes;
use ort_core::dim::Bindings;
use ort_core::ir::{Graph, ValueId};
use ort_core::session::Session;
use ort_core::{Error, MemoryShortage, Result, error};

use super::choose::{Choice, between_cuts};
use super::clusters::{PlanRow, requested, rows};
use super::level::Recompute;
use super::patterns::{ActivationPattern, patterns};
use super::{Joint, cheapest, least, recomputed, sliced};
use crate::kept_outputs::KeptOutputs;

/// The effect of recomputation, at the sizes that it was chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecomputeReport {
    /// The peak of activations in bytes without recomputation.
    pub peak_before: usize,
    /// The peak with recomputation.
    pub peak: usize,
    /// The number of recomputed values.
    pub values: usize,
    /// The estimated extra time of a step, as a fraction of the time without recomputation.
    pub extra_time: f64,
    /// The number of weights whose gradients are computed and applied in slices.
    pub sliced: usize,
}

/// The number of times that the simulation is asked for a lower target. Plans have gaps
/// (fragmentation) that it does not model, so a choice may miss its target.
const TRIES: usize = 10;

/// The targets below the lowest simulated peak that are tried as well, in percent of that peak.
const BELOW: [u64; 2] = [96, 90];

/// A session with its recomputation.
pub(crate) struct Planned {
    pub(crate) session: Session,
    pub(crate) report: RecomputeReport,
    pub(crate) rows: Vec<PlanRow>,
    pub(crate) patterns: Vec<ActivationPattern>,
    /// The total bytes of a step: kept bytes, constants and activations.
    needed: usize,
}

/// The request that recomputation is planned for.
#[derive(Clone, Copy)]
pub(crate) struct Request<'a> {
    pub(crate) recompute: &'a Recompute,
    /// Whether the recomputation tables are wanted.
    pub(crate) tabulate: bool,
    /// The bytes that count against the limit in addition to the session's.
    pub(crate) kept: usize,
    /// The limit on all bytes of a step.
    pub(crate) limit: Option<usize>,
    pub(crate) dims: &'a [(&'a str, i64)],
    /// The outputs whose buffers exist throughout a step.
    pub(crate) outputs: KeptOutputs<'a>,
}

/// Builds a session for a graph, within a limit of its own in bytes.
type Build<'a> = &'a dyn Fn(Graph, Option<usize>) -> Result<Session>;

/// [`Build`] with the limit of a search.
type Make<'a> = &'a dyn Fn(Graph) -> Result<Session, Refused>;

/// The reason why a search found no session.
enum Refused {
    /// No plan fits. The smallest needs this many bytes in total.
    Step(usize),
    /// Not even the session's constants fit. They need at least this many bytes.
    Constants(usize),
    Other(Error),
}

impl From<Error> for Refused {
    fn from(problem: Error) -> Refused {
        Refused::Other(problem)
    }
}

impl Refused {
    /// Classifies an error of a session build. A shortage during a build is one of constants.
    fn of_build(problem: Error) -> Refused {
        match problem.shortage() {
            Some(shortage) => Refused::Constants(shortage.sufficient_limit()),
            None => Refused::Other(problem),
        }
    }
}

/// If a step must be small, gradients larger than this fraction (1/N) of the peak of activations
/// are sliced.
const SLICES: usize = 32;

/// Returns the session of a prepared graph with the requested recomputation. The first output must
/// be the loss.
///
/// # Errors
///
/// No choice fits the limit. The error names the smallest limit that some choice fits.
pub(crate) fn planned(graph: &Graph, build: Build<'_>, request: &Request<'_>) -> Result<Planned> {
    let within = |bytes: usize| bytes.saturating_sub(request.kept);
    match search(graph, build, request.limit.map(within), request) {
        Ok(found) => {
            let is_asked = *request.recompute != Recompute::AsLimited && !request.tabulate;
            if is_asked && found.report.values == 0 && found.report.sliced == 0 {
                let peak = found.report.peak;
                tracing::warn!(
                    peak,
                    "the requested recomputation does not lower the peak, so nothing is recomputed"
                );
            }
            Ok(found)
        }
        Err(Refused::Other(problem)) => Err(problem),
        Err(Refused::Step(needed)) => match lowered(graph, build, needed, request)? {
            Ok(found) => Ok(found),
            Err(needed) => Err(refused(graph, build, needed, request)?),
        },
        Err(Refused::Constants(_)) => {
            let needed = least_beside_constants(graph, build, request)?;
            Err(refused(graph, build, needed, request)?)
        }
    }
}

/// Returns the error for a limit, which names the smallest sufficient one.
fn refused(graph: &Graph, build: Build<'_>, needed: usize, request: &Request<'_>) -> Result<Error> {
    let limit = request.limit.unwrap_or(usize::MAX);
    let session = build(graph.clone(), Some(usize::MAX))?;
    let is_known = request.outputs.peak(&session, request.dims)?.is_known;
    let shortage = MemoryShortage { needed, available: limit, limit, largest: Vec::new() };
    let more = match is_known {
        true => "the smallest limit that holds a step",
        false => "the smallest limit that is known before a step: the sizes of some values depend on data",
    };
    let advice =
        format!("raise the memory limit to {}, {more}, or make the batch smaller", exact_bytes(needed));
    Ok(Error::out_of_memory("a training step", shortage).help(advice))
}

/// Searches below the smallest known need, again and again, until a search finds nothing. If a
/// session found on the way fits the request's limit, it is returned. Otherwise the inner error is
/// the smallest need.
fn lowered(
    graph: &Graph,
    build: Build<'_>,
    mut least: usize,
    request: &Request<'_>,
) -> Result<Result<Planned, usize>> {
    let own = request.limit.map(|limit| limit.saturating_sub(request.kept));
    while least > 0 {
        // One byte less than what suffices, which only a better choice meets.
        let below = Request { limit: Some(least - 1), ..*request };
        let found = match search(graph, build, own, &below) {
            Ok(found) if request.limit.is_none_or(|limit| found.needed <= limit) => return Ok(Ok(found)),
            Ok(found) => found.needed,
            Err(Refused::Step(needed)) => needed,
            Err(Refused::Constants(_)) => break,
            Err(Refused::Other(problem)) => return Err(problem),
        };
        if found >= least {
            break;
        }
        least = found;
    }
    Ok(Err(least))
}

/// Returns the smallest sufficient limit if not even the constants fit. A trial limit that holds
/// them shows what a step needs besides.
fn least_beside_constants(graph: &Graph, build: Build<'_>, request: &Request<'_>) -> Result<usize> {
    let mut own = build(graph.clone(), Some(usize::MAX))?.constant_bytes();
    loop {
        let limit = request.kept.saturating_add(own);
        let request = Request { limit: Some(limit), ..*request };
        match search(graph, build, Some(own), &request) {
            Ok(found) => return Ok(found.needed),
            Err(Refused::Step(needed)) => {
                return Ok(lowered(graph, build, needed, &request)?
                    .map_or_else(|needed| needed, |found| found.needed));
            }
            // The need for constants was only a lower bound. Each round raises it, so this ends.
            Err(Refused::Constants(least)) if least > own => own = least,
            Err(Refused::Constants(_)) => return Ok(limit),
            Err(Refused::Other(problem)) => return Err(problem),
        }
    }
}

/// Searches for a session that fits the request's limit. The session itself gets `own` bytes.
fn search(
    graph: &Graph,
    build: Build<'_>,
    own: Option<usize>,
    request: &Request<'_>,
) -> Result<Planned, Refused> {
    let make = |graph: Graph| build(graph, own).map_err(Refused::of_build);
    let session = make(graph.clone())?;
    let before = peak_of(&session, request)?;
    let whole = chosen(graph, session, &make, before, request);
    let is_most = *request.recompute == Recompute::Most;
    let is_named = matches!(request.recompute, Recompute::Plans(_) | Recompute::Layers);
    let is_short = match &whole {
        Ok(found) => is_most || found.report.values > 0 && !is_named,
        Err(refused) => matches!(refused, Refused::Step(_)),
    };
    // Slices are tried only if memory is short: for the lowest peak, if a limit required
    // recomputation, or if nothing fitted.
    let slices = if is_short { sliced(graph, before / SLICES)? } else { None };
    let Some((graph, weights)) = slices else { return whole };
    let parts = make(graph.clone()).and_then(|session| chosen(&graph, session, &make, before, request));
    let parts = parts.map(|mut parts| {
        parts.report.sliced = weights;
        parts
    });
    match (whole, parts) {
        (Ok(whole), Ok(parts)) => {
            let [one, other] = [&whole, &parts].map(|planned| &planned.report);
            let is_better = if is_most { other.peak < one.peak } else { other.extra_time < one.extra_time };
            Ok(if is_better { parts } else { whole })
        }
        (Err(Refused::Step(one)), Err(Refused::Step(other))) => Err(Refused::Step(one.min(other))),
        (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
        (Err(refused), Err(_)) => Err(refused),
    }
}

/// Returns the session of a graph with recomputation, or without it if that is as good. `before` is
/// the peak of the unedited step.
fn chosen(
    graph: &Graph,
    session: Session,
    make: Make<'_>,
    before: usize,
    request: &Request<'_>,
) -> Result<Planned, Refused> {
    let own = peak_of(&session, request)?;
    let held = request.kept.saturating_add(session.constant_bytes());
    let as_it_is = RecomputeReport { peak_before: before, peak: own, ..RecomputeReport::default() };
    let needed = held.saturating_add(own);
    let fits = |needed: usize| request.limit.is_none_or(|limit| needed <= limit);
    // The common case returns before any simulation.
    if *request.recompute == Recompute::AsLimited && fits(needed) && !request.tabulate {
        return Ok(Planned { session, report: as_it_is, rows: Vec::new(), patterns: Vec::new(), needed });
    }
    let loss = graph.outputs.first().copied().ok_or_else(|| error!(Fail, "the graph has no loss"))?;
    let bindings = session.bindings(request.dims)?;
    let size_of = |id: ValueId| sizes(graph, &bindings, id);
    let joint = Joint::new(graph, session.live_steps(request.dims)?, loss, &size_of);
    let table = |dropped: &[bool]| match request.tabulate {
        true => (rows(&joint, dropped), patterns(&joint, dropped)),
        false => (Vec::new(), Vec::new()),
    };
    let attempt = |choice: &Choice| -> Result<Planned, Refused> {
        let session = make(recomputed(&joint, &choice.dropped))?;
        let peak = peak_of(&session, request)?;
        let values = choice.dropped.iter().filter(|dropped| **dropped).count();
        // A graph of free nodes has no time to compare with.
        let extra_time = choice.outcome.seconds / joint.all_seconds().max(f64::MIN_POSITIVE);
        let report = RecomputeReport { peak_before: before, peak, values, extra_time, sliced: 0 };
        let (rows, patterns) = table(&choice.dropped);
        let needed = request.kept.saturating_add(session.constant_bytes()).saturating_add(peak);
        Ok(Planned { session, report, rows, patterns, needed })
    };
    let room = request.limit.map_or(usize::MAX, |limit| limit.saturating_sub(held));
    // A limit that is known to suffice must never be rejected. So the named need is at most
    // `known`, even if the plans of edited graphs need more.
    let within = |known: usize| match within(&joint, room, request, &attempt) {
        Err(Refused::Step(least)) => Err(Refused::Step(least.min(known))),
        found => found,
    };
    let found = match request.recompute {
        Recompute::AsLimited if !fits(needed) => return within(needed),
        Recompute::AsLimited => None,
        Recompute::Layers => Some(attempt(&between_cuts(&joint))?),
        Recompute::Most => Some(lowest(&joint, &attempt)?),
        Recompute::Plans(requests) => Some(attempt(&Choice::of(&joint, requested(&joint, requests)?, 0))?),
    };
    let none = vec![false; joint.maker.len()];
    let as_it_is = || {
        let (rows, patterns) = table(&none);
        Planned { session, report: as_it_is, rows, patterns, needed }
    };
    // A plan that does not lower the peak is not applied.
    let found = match found.filter(|found| found.report.peak < own) {
        Some(found) => found,
        None => as_it_is(),
    };
    match fits(found.needed) {
        true => Ok(found),
        false => within(found.needed),
    }
}

/// Returns the fastest choice whose plan fits the room that the limit leaves to activations.
fn within(
    joint: &Joint<'_>,
    room: usize,
    request: &Request<'_>,
    attempt: &dyn Fn(&Choice) -> Result<Planned, Refused>,
) -> Result<Planned, Refused> {
    let limit = request.limit.unwrap_or(usize::MAX);
    let mut target = room;
    for _ in 0..TRIES {
        // A plan needs what the simulation says, plus gaps.
        let choice = cheapest(joint, target as u64).filter(|choice| choice.outcome.peak <= room as u64);
        let Some(choice) = choice else { break };
        let found = attempt(&choice)?;
        if found.needed <= limit {
            return Ok(found);
        }
        // The target falls by the overshoot, but by at least 1/256 so that a few tries make a
        // difference.
        let less = (found.needed - limit).max(target / 256);
        target = target.saturating_sub(less);
    }
    let found = lowest(joint, attempt)?;
    match found.needed <= limit {
        true => Ok(found),
        false => Err(Refused::Step(found.needed)),
    }
}

/// Returns the choice whose plan has the lowest peak. The simulation does not model the gaps in
/// plans, so lower targets are tried as well.
fn lowest(
    joint: &Joint<'_>,
    attempt: &dyn Fn(&Choice) -> Result<Planned, Refused>,
) -> Result<Planned, Refused> {
    let simulated = least(joint);
    let less = BELOW.iter().filter_map(|percent| cheapest(joint, simulated.outcome.peak / 100 * percent));
    let others: Vec<Choice> = std::iter::once(between_cuts(joint)).chain(less).collect();
    let mut best = attempt(&simulated)?;
    for choice in others {
        let other = attempt(&choice)?;
        if other.report.peak < best.report.peak {
            best = other;
        }
    }
    Ok(best)
}

/// Returns the peak of activations in bytes. Values whose sizes depend on data are not included,
/// because their sizes are known only during a run.
fn peak_of(session: &Session, request: &Request<'_>) -> Result<usize> {
    Ok(request.outputs.peak(session, request.dims)?.bytes)
}

/// The sizes of a value under these bindings, if they are known.
fn sizes(graph: &Graph, bindings: &Bindings, id: ValueId) -> Option<Vec<usize>> {
    let shape = graph.value(id).ty.shape()?;
    shape.iter().map(|dim| usize::try_from(dim.evaluate(bindings).ok()?).ok()).collect()
}
