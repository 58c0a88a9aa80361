//! The plan as people and scripts read it.

use std::collections::HashSet;

use super::resolve::{evaluate, largest_at_peak};
use super::{Action, Place, RunPlan};
use crate::dim::{Bindings, Dim};
use crate::session::{Origin, Program};
use crate::tensor::byte_count;

/// How a value gets its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Memory of its own in a slab, or a buffer of known size.
    Planned,
    /// A part of another value.
    View,
    /// The memory of an input that dies with the step.
    InPlace,
    /// Memory whose size only the run tells.
    Dynamic,
}

impl ValueKind {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            ValueKind::Planned => "planned",
            ValueKind::View => "view",
            ValueKind::InPlace => "in_place",
            ValueKind::Dynamic => "dynamic",
        }
    }
}

/// One value of the report.
#[derive(Debug, Clone)]
pub struct PlannedValue {
    /// Its name in the model.
    pub name: String,
    /// Its bytes; none where only the run tells.
    pub bytes: Option<usize>,
    /// Its offset in its slab, where it is in one.
    pub offset: Option<usize>,
    /// The step that computes it.
    pub first_step: usize,
    /// The last step that reads it.
    pub last_step: usize,
    /// How it gets its memory.
    pub kind: ValueKind,
}

/// One step of the report.
#[derive(Debug, Clone)]
pub struct PlannedStep {
    /// The node's name.
    pub node: String,
    /// Its operator.
    pub op: String,
    /// Bytes of activations and workspace alive while it runs.
    pub live_bytes: usize,
}

/// The memory of a run, before it runs.
#[derive(Debug, Clone)]
pub struct PlanReport {
    /// Bytes of activations, workspaces and outputs that a run allocates at most; none where some are dynamic.
    pub peak_bytes: Option<usize>,
    /// The same without the dynamic ones.
    pub planned_bytes: usize,
    /// Bytes of weights.
    pub weights_bytes: usize,
    /// The largest sum of values alive at once.
    pub lower_bound_bytes: usize,
    /// The sizes of the symbolic dimensions.
    pub dims: Vec<(String, i64)>,
    /// The steps that run, in order.
    pub steps: Vec<PlannedStep>,
    /// The values that take memory or share it.
    pub values: Vec<PlannedValue>,
    /// The largest values at the peak, largest first.
    pub largest: Vec<(String, usize)>,
    /// The lower bound as an expression of the symbolic dimensions, at the step with the peak.
    pub symbolic_peak: Option<String>,
}

/// Writes the report of a plan.
pub(crate) fn report(program: &Program, plan: &RunPlan, bindings: &Bindings) -> PlanReport {
    let running = plan.steps.iter().enumerate().filter(|(_, step)| step.action == Action::Run);
    let indices: Vec<usize> = running.map(|(index, _)| index).collect();
    let shown =
        |step: usize| indices.partition_point(|index| *index < step).min(indices.len().saturating_sub(1));
    let steps = program.steps.iter().zip(&plan.steps).zip(&plan.live);
    let steps = steps
        .filter(|((_, planned), _)| planned.action == Action::Run)
        .map(|((step, _), &live_bytes)| PlannedStep {
            node: step.name.to_string(),
            op: step.op.to_string(),
            live_bytes,
        })
        .collect();
    let mut values = Vec::new();
    for (slot, planned) in program.slots.iter().zip(&plan.slots) {
        let from_step = matches!(slot.origin, Origin::Step);
        if !from_step
            || matches!(planned.place, Place::Unused | Place::Folded(_) | Place::Outside | Place::Bound(_))
        {
            continue;
        }
        let bytes = planned.dtype.zip(planned.shape.as_ref());
        values.push(PlannedValue {
            name: program.graph.value(slot.value).name.to_string(),
            bytes: bytes.and_then(|(dtype, shape)| byte_count(dtype, shape).ok()),
            offset: match &planned.place {
                Place::Slab { range, .. } => Some(range.start),
                _ => None,
            },
            first_step: shown(planned.life.0),
            last_step: shown(planned.life.1),
            kind: planned.kind,
        });
    }
    PlanReport {
        peak_bytes: (!plan.has_dynamic).then(|| plan.peak()),
        planned_bytes: plan.peak(),
        weights_bytes: program.graph.weight_bytes(),
        lower_bound_bytes: plan.lower_bound,
        dims: bindings.iter().map(|(symbol, size)| (symbol.to_string(), size)).collect(),
        steps,
        values,
        largest: largest_at_peak(plan, program),
        symbolic_peak: symbolic_peak(program, plan, bindings),
    }
}

/// The bytes alive at the peak as an expression: the sum of the symbolic sizes of what is alive there.
fn symbolic_peak(program: &Program, plan: &RunPlan, bindings: &Bindings) -> Option<String> {
    let peak = plan.live.iter().enumerate().max_by_key(|(_, bytes)| **bytes).map(|(step, _)| step)?;
    let mut sum = Dim::constant(0);
    let mut counted: HashSet<std::ops::Range<usize>> = HashSet::new();
    for (slot, planned) in program.slots.iter().zip(&plan.slots) {
        if planned.life.0 > peak || planned.life.1 < peak {
            continue;
        }
        match &planned.place {
            Place::Slab { range, .. } if counted.insert(range.clone()) => {}
            Place::Own => {}
            _ => continue,
        }
        let ty = program.graph.value(slot.value).ty.as_tensor()?;
        let shape = ty.shape.as_ref()?;
        evaluate(shape, bindings)?;
        let bits = i64::from(ty.dtype.bits()?);
        let elements = shape.iter().fold(Dim::constant(1), |product, size| &product * size);
        sum = sum + (elements * bits).ceil_div(&Dim::constant(8));
    }
    let workspace = &plan.steps.get(peak)?.workspace;
    sum = sum + Dim::constant(workspace.len() as i64);
    Some(sum.to_string())
}
