//! From what is asked to a session that keeps to it: choices are made by simulation, and taken only if the plan of the edited graph is as good.

use ort_core::dim::Bindings;
use ort_core::ir::{Graph, ValueId};
use ort_core::session::Session;
use ort_core::{Error, MemoryShortage, Result, error};

use super::choose::{Choice, between_cuts};
use super::clusters::{PlanRequest, PlanRow, requested, rows};
use super::patterns::{ActivationPattern, patterns};
use super::{Joint, cheapest, least, recomputed, sliced};

/// What is computed again in the backward pass instead of being kept for it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// What a memory limit asks for, at the least time; nothing without a limit.
    #[default]
    AsLimited,
    /// Everything between boundaries of layers, as far as that lowers the peak (level 1).
    Layers,
    /// Whatever makes the peak the lowest that is found (level 2).
    Most,
    /// The subgraphs that are named.
    Plans(Vec<PlanRequest>),
}

impl Recompute {
    /// What a number of `ORTMODULE_MEMORY_OPT_LEVEL` means.
    pub fn of_level(level: u8) -> Result<Recompute> {
        match level {
            0 => Ok(Recompute::AsLimited),
            1 => Ok(Recompute::Layers),
            2 => Ok(Recompute::Most),
            other => Err(error!(InvalidArgument, "there is no level {other} of memory optimization")
                .help("levels are 0, 1 and 2")),
        }
    }

    /// The name that the level has in reports.
    pub fn level_name(&self) -> &'static str {
        match self {
            Recompute::AsLimited | Recompute::Plans(_) => "USER_SPECIFIED",
            Recompute::Layers => "TRANSFORMER_LAYERWISE_RECOMPUTE",
            Recompute::Most => "TRANSFORMER_LAYERWISE_RECOMPUTE_WITH_COMPROMISE",
        }
    }
}

/// What recomputation comes to, at the sizes that it was chosen for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RecomputeReport {
    /// The bytes of activations at the peak without it.
    pub peak_before: usize,
    /// The same with it.
    pub peak: usize,
    /// The values that are computed again.
    pub values: usize,
    /// About how much longer a step takes, as a share of the time without it.
    pub extra_time: f64,
    /// The weights whose gradients are made and used in slices.
    pub sliced: usize,
}

/// How often the simulation is asked for less than is wanted, as plans have gaps that it does not know.
const TRIES: usize = 10;

/// What is asked of the simulation beyond the lowest peak that it knows, in percent of that.
const BELOW: [u64; 2] = [96, 90];

/// A session of a graph, and what recomputation it has.
pub(crate) struct Planned {
    pub(crate) session: Session,
    pub(crate) report: RecomputeReport,
    pub(crate) rows: Vec<PlanRow>,
    pub(crate) patterns: Vec<ActivationPattern>,
}

/// What a choice is made for.
pub(crate) struct Request<'a> {
    pub(crate) recompute: &'a Recompute,
    /// Whether the table of plans is wanted.
    pub(crate) tabulate: bool,
    /// The bytes that activations may take.
    pub(crate) room: Option<usize>,
    /// The whole limit, which what stays from step to step counts against, too.
    pub(crate) limit: usize,
    pub(crate) dims: &'a [(&'a str, i64)],
}

/// What builds the session of a graph.
type Build<'a> = &'a dyn Fn(Graph) -> Result<Session>;

/// Gradients that are larger than the peak of activations over this are made and used in slices, where a step has to be small.
const SLICES: usize = 32;

/// The session of a prepared graph, or of one with recomputation, as asked. The first output is the loss.
///
/// Errors: no choice keeps to the room; the smallest that one does keep to is named.
pub(crate) fn planned(graph: &Graph, build: Build<'_>, request: &Request<'_>) -> Result<Planned> {
    let session = build(graph.clone())?;
    let (before, available) = peak_of(&session, request.dims)?;
    // Copies of constants count against the limit, too.
    let request = &Request { room: request.room.map(|room| room.min(available)), ..*request };
    let whole = chosen(graph, session, build, before, request);
    let is_most = *request.recompute == Recompute::Most;
    let is_named = matches!(request.recompute, Recompute::Plans(_) | Recompute::Layers);
    let is_short = match &whole {
        Ok(found) => is_most || found.report.values > 0 && !is_named,
        Err(problem) => problem.shortage().is_some(),
    };
    let slices = if is_short { sliced(graph, before / SLICES)? } else { None };
    let Some((graph, weights)) = slices else { return whole };
    let parts = build(graph.clone()).and_then(|session| chosen(&graph, session, build, before, request));
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
        (Err(one), Err(other)) => {
            let needed = |problem: &Error| problem.shortage().map_or(usize::MAX, |shortage| shortage.needed);
            Err(if needed(&other) < needed(&one) { other } else { one })
        }
        (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
    }
}

/// The session of a graph with recomputation, or of the graph as it is. `before` is the peak of the step that nothing was done to.
fn chosen(
    graph: &Graph,
    session: Session,
    build: Build<'_>,
    before: usize,
    request: &Request<'_>,
) -> Result<Planned> {
    let (own, _) = peak_of(&session, request.dims)?;
    let as_it_is = RecomputeReport { peak_before: before, peak: own, ..RecomputeReport::default() };
    let fits = |peak: usize| request.room.is_none_or(|room| peak <= room);
    if *request.recompute == Recompute::AsLimited && fits(own) && !request.tabulate {
        return Ok(Planned { session, report: as_it_is, rows: Vec::new(), patterns: Vec::new() });
    }
    let loss = graph.outputs.first().copied().ok_or_else(|| error!(Fail, "the graph has no loss"))?;
    let bindings = session.bindings(request.dims)?;
    let size_of = |id: ValueId| sizes(graph, &bindings, id);
    let joint = Joint::new(graph, session.live_steps(request.dims)?, loss, &size_of);
    let table = |dropped: &[bool]| match request.tabulate {
        true => (rows(&joint, dropped), patterns(&joint, dropped)),
        false => (Vec::new(), Vec::new()),
    };
    let attempt = |choice: &Choice| -> Result<Planned> {
        let session = build(recomputed(&joint, &choice.dropped))?;
        let (peak, _) = peak_of(&session, request.dims)?;
        let values = choice.dropped.iter().filter(|dropped| **dropped).count();
        let extra_time = choice.outcome.seconds / joint.all_seconds().max(f64::MIN_POSITIVE);
        let report = RecomputeReport { peak_before: before, peak, values, extra_time, sliced: 0 };
        let (rows, patterns) = table(&choice.dropped);
        Ok(Planned { session, report, rows, patterns })
    };
    let found = match request.recompute {
        Recompute::AsLimited if !fits(own) => return within(&joint, request, &attempt),
        Recompute::AsLimited => None,
        Recompute::Layers => Some(attempt(&between_cuts(&joint))?),
        Recompute::Most => Some(lowest(&joint, &attempt)?),
        Recompute::Plans(requests) => Some(attempt(&Choice::of(&joint, requested(&joint, requests)?, 0))?),
    };
    let none = vec![false; joint.maker.len()];
    let as_it_is = || {
        let (rows, patterns) = table(&none);
        Planned { session, report: as_it_is, rows, patterns }
    };
    // A plan that does not lower the peak is not applied.
    let found = match found.filter(|found| found.report.peak < own) {
        Some(found) => found,
        None => {
            // A table of what could be done asks for the same plan once more.
            if *request.recompute != Recompute::AsLimited && !request.tabulate {
                tracing::warn!(
                    peak = own,
                    "recomputation as asked does not lower the peak, so that none is done"
                );
            }
            as_it_is()
        }
    };
    match fits(found.report.peak) {
        true => Ok(found),
        false => within(&joint, request, &attempt),
    }
}

/// The choice of the least time whose plan keeps to the room.
fn within(
    joint: &Joint<'_>,
    request: &Request<'_>,
    attempt: &dyn Fn(&Choice) -> Result<Planned>,
) -> Result<Planned> {
    let room = request.room.unwrap_or(usize::MAX);
    let mut target = room;
    for _ in 0..TRIES {
        // A plan takes what the simulation says, and gaps.
        let choice = cheapest(joint, target as u64).filter(|choice| choice.outcome.peak <= room as u64);
        let Some(choice) = choice else { break };
        let found = attempt(&choice)?;
        if found.report.peak <= room {
            return Ok(found);
        }
        let less = (found.report.peak - room).max(target / 256);
        target = target.saturating_sub(less);
    }
    let found = lowest(joint, attempt)?;
    match found.report.peak <= room {
        true => Ok(found),
        false => {
            let needed = request.limit.saturating_sub(room).saturating_add(found.report.peak);
            Err(refusal(request.limit, needed))
        }
    }
}

/// The choice whose plan has the lowest peak: the simulation does not know the gaps that plans have, so that less is asked of it, too.
fn lowest(joint: &Joint<'_>, attempt: &dyn Fn(&Choice) -> Result<Planned>) -> Result<Planned> {
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

/// The refusal of a limit, with the smallest that was found to do.
pub(crate) fn refusal(limit: usize, needed: usize) -> Error {
    let shortage = MemoryShortage { needed, available: limit, limit, largest: Vec::new() };
    Error::out_of_memory("planning a training step", shortage).help(format!(
        "raise the memory limit to {needed} bytes, which recomputation of all that can be keeps to, or make the batch smaller"
    ))
}

/// The bytes of activations at the peak, and those that a run may take.
fn peak_of(session: &Session, dims: &[(&str, i64)]) -> Result<(usize, usize)> {
    let plan = session.plan(dims)?;
    let peak = plan.peak_bytes.ok_or_else(|| {
        error!(NotImplemented, "sizes of values depend on data, so that no plan tells the peak")
    })?;
    Ok((peak, plan.available_bytes))
}

fn sizes(graph: &Graph, bindings: &Bindings, id: ValueId) -> Option<Vec<usize>> {
    let shape = graph.value(id).ty.shape()?;
    shape.iter().map(|dim| usize::try_from(dim.evaluate(bindings).ok()?).ok()).collect()
}
