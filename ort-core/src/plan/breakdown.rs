//! The breakdown of a plan's bytes by kind.

#![allow(
    clippy::indexing_slicing,
    reason = "plans have an entry for each slot of their program, whose outputs are among them"
)]

use std::collections::HashSet;

use super::resolve::evaluate;
use super::{RunPlan, SlotPlan, Storage, ValueKind};
use crate::dim::{Bindings, Dim};
use crate::program::{Program, Slot};
use crate::tensor::byte_count;

/// What memory is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Intermediate values at the step with the most bytes live. Values in the buffer of a later
    /// output count as outputs.
    Activations,
    /// Scratch memory of that step.
    Workspaces,
    /// Outputs of the graph.
    Outputs,
    /// Slab bytes that are unused at that step: fragmentation, and space that other steps need.
    Gaps,
    /// Weights that runs read from the mapped file without a copy.
    WeightsMapped,
    /// Weights in the packed layout of their kernels.
    WeightsPacked,
    /// Packed weights and folded constants in the mapped file of a compiled cache.
    WeightsCached,
    /// Weights that are packed just before their step and freed after it, because a memory limit
    /// cannot hold them.
    WeightsStreamed,
    /// Constants that stay in device memory.
    DeviceConstants,
    /// The windows in device memory through which the other constants are streamed.
    DeviceWindow,
    /// The bytes that each run uploads into these windows.
    DeviceStreamed,
}

impl MemoryKind {
    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Activations => "activations",
            MemoryKind::Workspaces => "workspaces",
            MemoryKind::Outputs => "outputs",
            MemoryKind::Gaps => "gaps",
            MemoryKind::WeightsMapped => "weights_mapped",
            MemoryKind::WeightsPacked => "weights_packed",
            MemoryKind::WeightsCached => "weights_cached",
            MemoryKind::WeightsStreamed => "weights_streamed",
            MemoryKind::DeviceConstants => "device_constants",
            MemoryKind::DeviceWindow => "device_window",
            MemoryKind::DeviceStreamed => "device_streamed",
        }
    }
}

/// The bytes of one kind.
#[derive(Debug, Clone)]
pub struct KindBytes {
    /// What the bytes are used for.
    pub kind: MemoryKind,
    /// The number of bytes.
    pub bytes: usize,
    /// The same as an expression of the symbolic dimensions, if all sizes have one.
    pub symbolic: Option<String>,
}

/// Returns the step with the most bytes live.
pub(super) fn peak_step(plan: &RunPlan) -> usize {
    // `max_by_key` returns the last maximum, so we search backwards for the first.
    let steps = plan.live.iter().enumerate().rev();
    steps.max_by_key(|(_, bytes)| **bytes).map_or(0, |(step, _)| step)
}

/// Breaks the planned peak down by kind. The kinds add up to it.
pub(super) fn kinds(program: &Program, plan: &RunPlan, bindings: &Bindings) -> Vec<KindBytes> {
    let peak = peak_step(plan);
    let mut outputs = Sum::new();
    let mut is_output = vec![false; plan.slots.len()];
    for slot in &program.outputs {
        // A buffer that several outputs share counts once. Other outputs are copied at the end,
        // each time.
        let first = !std::mem::replace(&mut is_output[slot.index()], true);
        let planned = &plan.slots[slot.index()];
        if !matches!(planned.storage, Storage::Own) || first {
            outputs.add(program, &program.slots[slot.index()], planned, bindings);
        }
    }
    let mut activations = Sum::new();
    for (index, (slot, planned)) in alive_at(program, plan, peak) {
        // A tenant (see `output_reuse`) is in an output's buffer, which counts already.
        let is_tenant = matches!(planned.storage, Storage::Slab { slab, .. } if slab >= plan.slabs.len());
        if !is_output[index] && !is_tenant {
            activations.add(program, slot, planned, bindings);
        }
    }
    let workspace = plan.steps.get(peak).map_or(0, |step| step.scratch_bytes());
    let known = activations.bytes.saturating_add(outputs.bytes).saturating_add(workspace);
    let number = |kind, bytes| KindBytes { kind, bytes, symbolic: None };
    vec![
        activations.of_kind(MemoryKind::Activations),
        number(MemoryKind::Workspaces, workspace),
        outputs.of_kind(MemoryKind::Outputs),
        number(MemoryKind::Gaps, plan.peak().saturating_sub(known)),
    ]
}

/// Returns the slots that take memory at a step, with their indices. Slots with the same byte range
/// count once.
pub(super) fn alive_at<'a>(
    program: &'a Program,
    plan: &'a RunPlan,
    step: usize,
) -> impl Iterator<Item = (usize, (&'a Slot, &'a SlotPlan))> {
    let mut counted = HashSet::new();
    let slots = program.slots.iter().zip(&plan.slots).enumerate();
    slots.filter(move |(_, (_, planned))| {
        let alive = planned.life.0 <= step && step <= planned.life.1;
        alive
            && match &planned.storage {
                Storage::Slab { slab, range } => counted.insert((*slab, range.clone())),
                // An output computed in place of an input is the same memory while both are live.
                Storage::Own => planned.kind != ValueKind::InPlace || planned.life.0 != step,
                _ => false,
            }
    })
}

/// A sum of bytes, as a number and as an expression. There is no expression if any size has none.
struct Sum {
    bytes: usize,
    symbolic: Option<Dim>,
}

impl Sum {
    fn new() -> Sum {
        Sum { bytes: 0, symbolic: Some(Dim::constant(0)) }
    }

    fn add(&mut self, program: &Program, slot: &Slot, planned: &SlotPlan, bindings: &Bindings) {
        if let (Some(dtype), Some(shape)) = (planned.dtype, &planned.shape) {
            self.bytes = self.bytes.saturating_add(byte_count(dtype, shape).unwrap_or(0));
        }
        self.symbolic =
            self.symbolic.take().zip(symbolic_bytes(program, slot, bindings)).map(|(sum, size)| sum + size);
    }

    fn of_kind(self, kind: MemoryKind) -> KindBytes {
        KindBytes { kind, bytes: self.bytes, symbolic: self.symbolic.map(|sum| sum.to_string()) }
    }
}

/// Returns the bytes of a slot as an expression of the symbolic dimensions. None if its shape is
/// not known under the bindings.
pub(super) fn symbolic_bytes(program: &Program, slot: &Slot, bindings: &Bindings) -> Option<Dim> {
    let ty = program.graph.value(slot.value).ty.as_tensor()?;
    let shape = ty.shape.as_ref()?;
    evaluate(shape, bindings)?;
    let bits = i64::from(ty.dtype.bits()?);
    let elements = shape.iter().fold(Dim::constant(1), |product, size| &product * size);
    Some((elements * bits).ceil_div(&Dim::constant(8)))
}
