//! From what is asked to a session that keeps to it: choices are made by simulation, and taken only if the plan of the edited graph is as good.

use ort_core::dim::Bindings;
use ort_core::ir::{Graph, ValueId};
use ort_core::session::Session;
use ort_core::{Error, MemoryShortage, Result, error};

use super::choose::{Choice, between_cuts};
use super::clusters::{PlanRequest, PlanRow, requested, rows};
use super::{Joint, cheapest, least, recomputed};

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
}

/// How often the simulation is asked for less than is wanted, as plans have gaps that it does not know.
const TRIES: usize = 10;

/// A session of a graph, and what recomputation it has.
pub(crate) struct Planned {
    pub(crate) session: Session,
    pub(crate) report: RecomputeReport,
    pub(crate) rows: Vec<PlanRow>,
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

/// The session of a prepared graph, or of one with recomputation, as asked. The first output is the loss.
///
/// Errors: no choice keeps to the room; the smallest that one does keep to is named.
pub(crate) fn planned(
    graph: &Graph,
    build: &dyn Fn(Graph) -> Result<Session>,
    request: &Request<'_>,
) -> Result<Planned> {
    let session = build(graph.clone())?;
    let (before, available) = peak_of(&session, request.dims)?;
    // Copies of constants count against the limit, too.
    let request = &Request { room: request.room.map(|room| room.min(available)), ..*request };
    let as_it_is = RecomputeReport { peak_before: before, peak: before, ..RecomputeReport::default() };
    let fits = |peak: usize| request.room.is_none_or(|room| peak <= room);
    if *request.recompute == Recompute::AsLimited && fits(before) && !request.tabulate {
        return Ok(Planned { session, report: as_it_is, rows: Vec::new() });
    }
    let loss = graph.outputs.first().copied().ok_or_else(|| error!(Fail, "the graph has no loss"))?;
    let bindings = session.bindings(request.dims)?;
    let size_of = |id: ValueId| sizes(graph, &bindings, id);
    let joint = Joint::new(graph, session.live_steps(request.dims)?, loss, &size_of)?;
    let table = |dropped: &[bool]| if request.tabulate { rows(&joint, dropped) } else { Vec::new() };
    let attempt = |choice: &Choice| -> Result<Planned> {
        let session = build(recomputed(&joint, &choice.dropped))?;
        let (peak, _) = peak_of(&session, request.dims)?;
        let values = choice.dropped.iter().filter(|dropped| **dropped).count();
        let extra_time = choice.outcome.seconds / joint.all_seconds().max(f64::MIN_POSITIVE);
        let report = RecomputeReport { peak_before: before, peak, values, extra_time };
        Ok(Planned { session, report, rows: table(&choice.dropped) })
    };
    let found = match request.recompute {
        Recompute::AsLimited if !fits(before) => return within(&joint, request, &attempt),
        Recompute::AsLimited => None,
        Recompute::Layers => Some(attempt(&between_cuts(&joint))?),
        Recompute::Most => Some(lowest(&joint, &attempt)?),
        Recompute::Plans(requests) => Some(attempt(&Choice::of(&joint, requested(&joint, requests)?, 0))?),
    };
    let none = vec![false; joint.maker.len()];
    let as_it_is = || Planned { session, report: as_it_is, rows: table(&none) };
    // A plan that does not lower the peak is not applied.
    let found = match found.filter(|found| found.report.peak < before) {
        Some(found) => found,
        None => {
            if *request.recompute != Recompute::AsLimited {
                tracing::warn!(
                    peak = before,
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
        let Some(choice) = cheapest(joint, target as u64) else { break };
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

/// The choice whose plan has the lowest peak: the simulation does not know the gaps that plans have.
fn lowest(joint: &Joint<'_>, attempt: &dyn Fn(&Choice) -> Result<Planned>) -> Result<Planned> {
    let (one, other) = (attempt(&least(joint))?, attempt(&between_cuts(joint))?);
    Ok(if other.report.peak < one.report.peak { other } else { one })
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
