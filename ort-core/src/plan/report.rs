//! The plan report, for people and scripts.
//!
//! It lists the steps that run, the values that take memory, and the peak by kind.

use std::collections::BTreeMap;

use super::BatchSplit;
use super::breakdown::{KindBytes, alive_at, kinds, peak_step, symbolic_bytes};
use super::resolve::resolve_in;
use super::{Action, RunPlan, Storage, ValueKind};
use crate::MemoryShortage;
use crate::dim::{Bindings, Dim};
use crate::program::{Origin, Program};
use crate::tensor::byte_count;

/// A value in the report.
#[derive(Debug, Clone)]
pub struct PlannedValue {
    /// The name in the model.
    pub name: String,
    /// The size in bytes; none if it is known only at run time.
    pub bytes: Option<usize>,
    /// The offset in its slab. Values in a reused output buffer have offsets past all slabs, as if
    /// the buffer followed the last slab. None for values in other memory.
    pub offset: Option<usize>,
    /// The slab's index in [`PlanReport::slabs`], if the value is in a slab.
    pub slab: Option<usize>,
    /// The step that computes it.
    pub first_step: usize,
    /// The last step that reads it.
    pub last_step: usize,
    /// How it gets its memory.
    pub kind: ValueKind,
}

/// A step in the report.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// The name of the node.
    pub node: String,
    /// The operator.
    pub op: String,
    /// Bytes of values and workspace that are live while it runs.
    pub live_bytes: usize,
    /// The range of its workspace in the slab of the memory in which it computes.
    pub workspace: std::ops::Range<usize>,
}

/// The memory of a run, planned before it runs.
#[derive(Debug, Clone)]
pub struct PlanReport {
    /// The most bytes of activations, workspaces and outputs that a run allocates. None if some of
    /// their sizes are known only at run time.
    pub peak_bytes: Option<usize>,
    /// The same without values of unknown size.
    pub planned_bytes: usize,
    /// `planned_bytes` if the nodes ran in the order of the file.
    pub file_order_bytes: usize,
    /// Bytes by kind: first the kinds that add up to `planned_bytes`, then weights.
    pub kinds: Vec<KindBytes>,
    /// The bytes that the memory limit leaves for a run; without a limit, the free memory of the
    /// machine.
    pub available_bytes: usize,
    /// How the batch is split to fit into `available_bytes`; none if it is not split. The other
    /// fields describe the whole batch.
    pub batch_split: Option<BatchSplit>,
    /// Why a batch of several items would not be split, in words. None if it would be split, if
    /// splitting is off, or if no size counts items.
    pub unsplit: Option<String>,
    /// What is missing if the run fits neither whole nor in parts.
    pub shortage: Option<MemoryShortage>,
    /// The bytes of each slab, the host's first.
    pub slabs: Vec<usize>,
    /// The bytes of the weights.
    pub weights_bytes: usize,
    /// The most bytes of values live at once: no layout needs less in this order of steps.
    pub lower_bound_bytes: usize,
    /// The sizes of the symbolic dimensions.
    pub dims: Vec<(String, i64)>,
    /// The steps that run, in order.
    pub steps: Vec<PlannedStep>,
    /// The values that take memory or share it.
    pub values: Vec<PlannedValue>,
    /// The step with the most bytes live, as an index into `steps`.
    pub peak_step: usize,
    /// The largest values at the peak, with the step's workspace among them, the largest first.
    pub largest: Vec<(String, usize)>,
    /// The bytes live at the peak step, as an expression of the symbolic dimensions.
    pub symbolic_peak: Option<String>,
}

/// Builds the report of a plan. The session adds the weights and the available bytes.
pub(crate) fn report(program: &Program, plan: &RunPlan, bindings: &Bindings, threads: usize) -> PlanReport {
    let running = plan.steps.iter().enumerate().filter(|(_, step)| step.action == Action::Run);
    let indices: Vec<usize> = running.map(|(index, _)| index).collect();
    // Skipped steps are not in the report, so `shown` renumbers those that run.
    let shown =
        |step: usize| indices.partition_point(|index| *index < step).min(indices.len().saturating_sub(1));
    PlanReport {
        peak_bytes: (!plan.has_dynamic).then(|| plan.peak()),
        planned_bytes: plan.peak(),
        file_order_bytes: file_order_bytes(program, plan, bindings, threads),
        kinds: kinds(program, plan, bindings),
        available_bytes: usize::MAX,
        batch_split: None,
        unsplit: None,
        shortage: None,
        slabs: plan.slabs.iter().map(|slab| slab.1).collect(),
        weights_bytes: program.graph.weight_bytes(),
        lower_bound_bytes: plan.lower_bound,
        dims: bindings.iter().map(|(symbol, size)| (symbol.to_string(), size)).collect(),
        steps: steps(program, plan),
        values: values(program, plan, shown),
        peak_step: shown(peak_step(plan)),
        largest: largest_at_peak(plan, program),
        symbolic_peak: symbolic_peak(program, plan, bindings),
    }
}

fn steps(program: &Program, plan: &RunPlan) -> Vec<PlannedStep> {
    let steps = program.steps.iter().zip(&plan.steps).zip(&plan.live);
    let running = steps.filter(|((_, planned), _)| planned.action == Action::Run);
    let described = running.map(|((step, planned), &live_bytes)| PlannedStep {
        node: step.name.to_string(),
        op: step.op.to_string(),
        live_bytes,
        workspace: planned.workspace.clone(),
    });
    described.collect()
}

/// Lists the values that take memory or share it. `shown` renumbers the steps that run.
fn values(program: &Program, plan: &RunPlan, shown: impl Fn(usize) -> usize) -> Vec<PlannedValue> {
    let mut values = Vec::new();
    let homes = home_offsets(plan);
    for (index, (slot, planned)) in program.slots.iter().zip(&plan.slots).enumerate() {
        let from_step = matches!(slot.origin, Origin::Step);
        if !from_step
            || matches!(
                planned.storage,
                Storage::Unused
                    | Storage::Folded(_)
                    | Storage::Outside
                    | Storage::Given(_)
                    | Storage::Bound(_)
            )
        {
            continue;
        }
        let bytes = planned.dtype.zip(planned.shape.as_ref());
        let (slab, offset) = match &planned.storage {
            Storage::Slab { slab, range } if *slab < plan.slabs.len() => (Some(*slab), Some(range.start)),
            Storage::Slab { slab, range } => {
                (None, homes.get(slab - plan.slabs.len()).map(|home| home + range.start))
            }
            _ => (
                None,
                plan.homes
                    .iter()
                    .position(|home| home.index() == index)
                    .and_then(|home| homes.get(home).copied()),
            ),
        };
        values.push(PlannedValue {
            name: program.graph.value(slot.value).name.to_string(),
            bytes: bytes.and_then(|(dtype, shape)| byte_count(dtype, shape).ok()),
            offset,
            slab,
            first_step: shown(planned.life.0),
            last_step: shown(planned.life.1),
            kind: planned.kind,
        });
    }
    values
}

/// Returns the offsets of reused output buffers (`homes`) as if they followed the slabs.
fn home_offsets(plan: &RunPlan) -> Vec<usize> {
    let slabs = plan.slabs.iter().fold(0usize, |sum, slab| sum.saturating_add(slab.1));
    let homes = plan.homes.iter().filter_map(|home| plan.slots.get(home.index()));
    let bytes = homes.map(|home| match (home.dtype, &home.shape) {
        (Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
        _ => 0,
    });
    let offsets = bytes.scan(slabs, |next, bytes| {
        let start = *next;
        *next = next.saturating_add(bytes);
        Some(start)
    });
    offsets.collect()
}

/// Returns the planned peak with the steps in the order of the file.
fn file_order_bytes(program: &Program, plan: &RunPlan, bindings: &Bindings, threads: usize) -> usize {
    // Without another order the steps are in the order of the file.
    let Some(order) = &program.file_order else { return plan.peak() };
    let schedule = order.iter().filter_map(|place| program.steps.get(*place)).collect();
    resolve_in(program, schedule, bindings, threads).map_or(plan.peak(), |plan| plan.peak())
}

/// Returns the bytes live at the peak step as an expression: the scratch memory, plus the symbolic
/// sizes of all values live there.
fn symbolic_peak(program: &Program, plan: &RunPlan, bindings: &Bindings) -> Option<String> {
    let peak = peak_step(plan);
    let mut sum = Dim::constant(plan.steps.get(peak)?.scratch_bytes() as i64);
    for (_, (slot, _)) in alive_at(program, plan, peak) {
        sum = sum + symbolic_bytes(program, slot, bindings)?;
    }
    Some(sum.to_string())
}

/// Lists what takes memory at the peak step by name, with its bytes, the largest first: the live
/// values, and the workspace of the step.
pub(crate) fn largest_at_peak(plan: &RunPlan, program: &Program) -> Vec<(String, usize)> {
    let peak = peak_step(plan);
    let mut by_name: BTreeMap<String, usize> = BTreeMap::new();
    // A value that is live in several memories has a slot in each. The list shows their sum.
    for (_, (slot, planned)) in alive_at(program, plan, peak) {
        if let (Some(dtype), Some(shape)) = (planned.dtype, &planned.shape) {
            let bytes = byte_count(dtype, shape).unwrap_or(0);
            *by_name.entry(program.graph.value(slot.value).name.to_string()).or_default() += bytes;
        }
    }
    let mut largest: Vec<(String, usize)> = by_name.into_iter().collect();
    if let (Some(step), Some(planned)) = (program.steps.get(peak), plan.steps.get(peak))
        && planned.scratch_bytes() > 0
    {
        largest.push((format!("workspace of {}", step.place()), planned.scratch_bytes()));
    }
    largest.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    largest
}
