//! The last phase of planning: turns drafts into slab offsets, the releases after each step, and
//! the live bytes.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots, steps and groups are made by the program and the planner, whose tables have an entry for each"
)]

use ort_alloc::{DeviceId, Interval};

use super::resolve::{DraftStorage, Group, Planner};
use super::{Planning, RunPlan, SlotPlan, Storage};
use crate::dtype::DType;
use crate::ep::{LEAST_TENSOR, OutputsFrom};
use crate::program::{Origin, Slot, SlotId};
use crate::tensor::byte_count;
use crate::{Result, error};

impl Planner<'_> {
    /// Assigns offsets and assembles the plan.
    pub(super) fn finish(mut self) -> Result<RunPlan> {
        // This comes first, because all sums below read `nested_own`.
        self.correct_scan_memory();
        let mut layout = self.lay_out()?;
        if let Some(other) = self.reuse_donated(&layout)? {
            layout = other;
        }
        let (mut own_peak, mut live) = self.measure(&[]);
        // Without sharing, every value has memory of its own, so no output buffer is reused.
        let shares = self.bound.planning == Planning::Shared;
        let mut homes = if shares { self.find_reusable_outputs() } else { Vec::new() };
        if !homes.is_empty() {
            let (other, other_peak) = (self.lay_out()?, self.measure(&homes).0);
            // `find_reusable_outputs` only estimates the fit. We keep its result if the final
            // layout stays within each buffer and lowers the total.
            let inside = (self.slabs.len() + self.donated.len()..).zip(&homes).all(|(lane, home)| {
                other.lane(lane as u32).is_some_and(|lane| lane.bytes <= self.own_bytes(*home))
            });
            if inside && self.slab_bytes(&other) + other_peak < self.slab_bytes(&layout) + own_peak {
                (layout, own_peak) = (other, other_peak);
                self.record_in_place(&homes, &mut live);
            } else {
                self.undo_output_reuse();
                homes.clear();
            }
        }
        let slab_bytes = |slab: usize| layout.lane(slab as u32).map_or(0, |lane| lane.bytes);
        let slabs = self.slabs.iter().enumerate().map(|(slab, id)| (*id, slab_bytes(slab))).collect();
        for (step, group) in self.steps.iter_mut().zip(&self.workspaces) {
            if let Some(group) = *group {
                step.workspace_slab = self.groups[group].slab;
                step.workspace = layout.offsets[group]..layout.offsets[group] + self.groups[group].bytes;
            }
        }
        for &(step, group) in &self.nested_slabs {
            let Group { bytes, slab, .. } = self.groups[group];
            let start = layout.offsets[group];
            self.steps[step].nested_slabs.push((slab, start..start + bytes));
        }
        self.find_releases();
        let (copied, unknown) = self.copied_outputs();
        // The shape gives the number of strings, but their bytes are known only at run time.
        let is_open = |(draft, dtype): (&DraftStorage, &Option<DType>)| match draft {
            DraftStorage::Dynamic => true,
            DraftStorage::Own => *dtype == Some(DType::String),
            _ => false,
        };
        let has_dynamic =
            unknown || self.scratch_is_open || self.drafts.iter().zip(&self.dtypes).any(is_open);
        // At the end of the run all outputs are live at once, copied ones included.
        let outputs = self.own_outputs() + copied;
        let own_peak = own_peak.max(outputs);
        let mut slots: Vec<SlotPlan> =
            (0..self.drafts.len()).map(|index| self.slot_plan(index, &layout.offsets)).collect();
        self.ends.outputs.iter().for_each(|output| slots[output.index()].is_output = true);
        let has_all_shapes = slots.iter().all(|slot| slot.shape.is_some());
        let lower_bound = live.iter().copied().max().unwrap_or(0).max(outputs);
        let (begins, left) = (self.begins(), self.own_outputs());
        Ok(RunPlan {
            slots,
            steps: self.steps,
            slabs,
            homes: self.donated.into_iter().chain(homes).collect(),
            own_peak,
            lower_bound,
            live,
            begins,
            left,
            outputs: self.ends.outputs,
            has_dynamic,
            has_all_shapes,
            can_shrink: self.can_shrink,
            contradiction: None,
        })
    }

    /// Assigns each group an offset in its slab.
    pub(super) fn lay_out(&self) -> Result<ort_alloc::Plan> {
        let apart = self.bound.planning == Planning::Apart;
        let interval = |group: &Group| Interval {
            bytes: group.bytes,
            // Under `Apart` every group lives for the whole run, so no two share memory.
            first: if apart { 0 } else { group.first },
            last: if apart { self.steps.len() } else { group.last },
            lane: group.slab as u32,
            alignment: 64,
            alias: None,
        };
        let intervals: Vec<Interval> = self.groups.iter().map(interval).collect();
        ort_alloc::plan(&intervals)
            .map_err(|problem| error!(OutOfMemory, "the memory plan is invalid: {problem}"))
    }

    /// Returns the bytes of the slabs of all memories, without reused output buffers.
    pub(super) fn slab_bytes(&self, layout: &ort_alloc::Plan) -> usize {
        let lanes = (0..self.slabs.len()).filter_map(|slab| layout.lane(slab as u32));
        lanes.fold(0, |sum, lane| sum.saturating_add(lane.bytes))
    }

    /// Returns the bytes of a slot in a buffer of its own, else 0.
    pub(super) fn own_bytes(&self, slot: SlotId) -> usize {
        match (&self.drafts[slot.index()], self.dtypes[slot.index()], &self.shapes[slot.index()]) {
            (DraftStorage::Own, Some(dtype), Some(shape)) => {
                byte_count(dtype, shape).map_or(0, |bytes| bytes.max(self.least_own_bytes(slot)))
            }
            _ => 0,
        }
    }

    /// Returns the least number of bytes to count for a slot: [`LEAST_TENSOR`] for a host output
    /// that its kernel allocates, else 0.
    fn least_own_bytes(&self, slot: SlotId) -> usize {
        let made = self.first[slot.index()];
        let step = self.schedule.get(made);
        let is_handed_over = step.is_some_and(|step| step.claim.outputs == OutputsFrom::Kernel);
        let Slot { memory, origin, .. } = &self.program.slots[slot.index()];
        match (is_handed_over, *memory, origin) {
            (true, DeviceId::HOST, Origin::Step) if !self.is_last_state(made, slot) => LEAST_TENSOR,
            _ => 0,
        }
    }

    /// Returns the bytes of the outputs in buffers of their own.
    pub(super) fn own_outputs(&self) -> usize {
        let outputs = (0..self.is_output.len()).filter(|index| self.is_output[*index]);
        outputs.fold(0, |sum: usize, index| sum.saturating_add(self.own_bytes(SlotId(index as u32))))
    }

    /// Returns the bytes of the outputs that are inputs, constants or folded, and whether the size
    /// of one is unknown. The run copies them at its end, because an output owns its memory.
    pub(super) fn copied_outputs(&self) -> (usize, bool) {
        let mut copied = 0;
        let mut unknown = false;
        for (output, slot) in self.program.outputs.iter().enumerate() {
            let index = slot.index();
            // A bound output is copied into its buffer.
            let bound = self.bound.outputs.get(output).is_some();
            let draft = &self.drafts[index];
            // A donated input that is an output stays in its buffer.
            if bound
                || !matches!(draft, DraftStorage::Outside | DraftStorage::Folded(_) | DraftStorage::Bound(_))
            {
                continue;
            }
            match (self.dtypes[index], &self.shapes[index]) {
                (Some(dtype), Some(shape)) => copied += byte_count(dtype, shape).unwrap_or(0),
                _ => unknown = true,
            }
        }
        (copied, unknown)
    }

    /// Turns the draft of a slot into its plan.
    pub(super) fn slot_plan(&self, index: usize, offsets: &[usize]) -> SlotPlan {
        let shape = self.shapes[index].clone();
        let bytes = match (self.dtypes[index], &shape) {
            (Some(dtype), Some(shape)) => byte_count(dtype, shape).unwrap_or(0),
            _ => 0,
        };
        let storage = match self.drafts[index].clone() {
            DraftStorage::Outside => Storage::Outside,
            DraftStorage::Given(given) => Storage::Given(given),
            DraftStorage::Bound(buffer) => Storage::Bound(buffer),
            DraftStorage::Group { group, offset } => {
                let start = offsets[group] + offset;
                Storage::Slab { slab: self.groups[group].slab, range: start..start + bytes }
            }
            DraftStorage::Own => Storage::Own,
            DraftStorage::View { of, element_offset } => Storage::View { of, element_offset },
            DraftStorage::Folded(tensor) => Storage::Folded(tensor),
            DraftStorage::Dynamic => Storage::Dynamic,
            DraftStorage::Unused => Storage::Unused,
        };
        let life = (self.first[index], self.last[index]);
        SlotPlan {
            dtype: self.dtypes[index],
            shape,
            storage,
            kind: self.kinds[index],
            life,
            is_output: false,
        }
    }

    /// Finds the slots to release after each step: those that own their memory and have no later
    /// use. Outputs are kept.
    pub(super) fn find_releases(&mut self) {
        for (index, draft) in self.drafts.iter().enumerate() {
            let owned = matches!(draft, DraftStorage::Own | DraftStorage::Dynamic);
            let is_kept = matches!(self.program.slots[index].origin, Origin::Constant(_) | Origin::Consumed);
            if owned && !is_kept && !self.is_output[index] {
                let last = self.last[index].min(self.steps.len() - 1);
                self.steps[last].release.push(SlotId(index as u32));
            }
        }
        self.find_closes();
    }

    /// Returns the bytes whose lifetime begins with each step.
    fn begins(&self) -> Vec<usize> {
        let mut begins = self.nested_own.clone();
        for (index, draft) in self.drafts.iter().enumerate() {
            if let (DraftStorage::Own, Some(bytes)) = (draft, begins.get_mut(self.first[index])) {
                *bytes = bytes.saturating_add(self.own_bytes(SlotId(index as u32)));
            }
        }
        for group in self.groups.iter().filter(|group| !self.is_in_donated(group)) {
            if let Some(bytes) = begins.get_mut(group.first) {
                *bytes = bytes.saturating_add(group.bytes);
            }
        }
        begins
    }

    /// Returns the peak of own buffers, and the bytes live while each step runs. In the peak,
    /// reused output buffers (`homes`) count from the first step on.
    pub(super) fn measure(&self, homes: &[SlotId]) -> (usize, Vec<usize>) {
        let count = self.steps.len();
        // Difference arrays: a lifetime adds its bytes at its first step and subtracts them after
        // its last. `own` counts own buffers alone, `all` also the slabs.
        let mut own = vec![0i128; count + 1];
        let mut all = vec![0i128; count + 1];
        for (index, draft) in self.drafts.iter().enumerate() {
            if matches!(draft, DraftStorage::Own) {
                let bytes = self.own_bytes(SlotId(index as u32)) as i128;
                let last = (self.last[index] + 1).min(count);
                let at_home = homes.contains(&SlotId(index as u32));
                own[if at_home { 0 } else { self.first[index] }] += bytes;
                all[self.first[index]] += bytes;
                for changes in [&mut own, &mut all] {
                    changes[last] -= bytes;
                }
            }
        }
        // Memory that subgraphs and kernels allocate outside slabs is live only while their step
        // runs.
        for (index, bytes) in self.nested_own.iter().enumerate() {
            for changes in [&mut own, &mut all] {
                changes[index] += *bytes as i128;
                changes[index + 1] -= *bytes as i128;
            }
        }
        for group in self.groups.iter().filter(|group| !self.is_in_donated(group)) {
            all[group.first] += group.bytes as i128;
            all[(group.last + 1).min(count)] -= group.bytes as i128;
        }
        let sums = |changes: &[i128]| -> Vec<usize> {
            let running = changes.iter().take(count).scan(0i128, |sum, change| {
                *sum += change;
                Some(*sum as usize)
            });
            running.collect()
        };
        (sums(&own).into_iter().max().unwrap_or(0), sums(&all))
    }
}
