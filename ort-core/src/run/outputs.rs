//! Output placement: where a step writes its outputs, and who owns them afterwards.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots and steps are made with the program, and each table of a frame and plan has an entry for each"
)]

use std::borrow::Cow;

use ort_alloc::{Buffer, Category, DeviceId, allocate_in};

use super::frame::Frame;
use super::tables::StepTables;
use super::target::{KnownShapes, Target, no_shape};
use super::views::view_of;
use crate::dtype::DType;
use crate::ep::dynamic::{Source, ValueMemory};
use crate::ep::{OutputsFrom, interrupt};
use crate::plan::Storage;
use crate::program::{Origin, SlotId, Step};
use crate::spec::{InputFacts, OutputShapes, ViewCx, infer_concrete, known_ints};
use crate::tensor::{Shape, Tensor, TensorView, Value, ValueView, byte_count, in_words};
use crate::{ErrorKind, Result, ensure, error};

impl Frame<'_> {
    /// Copies an output of the run out of arena memory, so that the output does not keep a region
    /// alive.
    pub(crate) fn detach(&self, value: Value) -> Result<Value> {
        match self.env.outlives_run {
            true => self.env.memory.detach(value, self.env.outputs),
            false => Ok(value),
        }
    }

    /// Allocates the reused output buffers (homes), which hold other values until their output is
    /// computed.
    pub(super) fn open_homes(&mut self) -> Result<()> {
        for &slot in &self.plan.homes {
            if let Origin::Given(index) = self.program.slots[slot.index()].origin {
                let buffer = self.bound.get_mut(index).and_then(Option::take);
                let buffer = buffer.ok_or_else(|| error!(Fail, "a donated input has no memory"))?;
                self.homes.push(Some(buffer.into_buffer()?));
                continue;
            }
            let planned = &self.plan.slots[slot.index()];
            let known = planned.dtype.zip(planned.shape.clone());
            self.homes.push(match self.allocate(slot, known, Category::Output)?.0 {
                Target::Buffer(buffer, _) => Some(buffer),
                _ => None,
            });
        }
        Ok(())
    }

    /// Returns an output as a value that keeps only its own memory alive.
    pub(crate) fn take_output(&self, slot: SlotId) -> Result<Value> {
        if let Some(value) = &self.owned[slot.index()] {
            return Ok(value.clone());
        }
        self.copy_output(self.output_view(slot)?)
    }

    /// Returns a view of an output where it is.
    pub(crate) fn output_view(&self, slot: SlotId) -> Result<ValueView<'_>> {
        let name = &self.program.graph.value(self.program.slots[slot.index()].value).name;
        let view = view_of(&self.sources(), slot, &mut |region, range| self.host_bytes(region, range));
        view.ok_or_else(|| error!(Fail, "output '{name}' was not computed"))?
    }

    /// Copies an output to memory of its own, if it is an input, a constant or a folded value.
    pub(super) fn copy_output(&self, value: ValueView<'_>) -> Result<Value> {
        let tensor = value.tensor().ok();
        if let Some(view) = tensor.filter(|view| !view.is_host()) {
            return self.copied_to(view, view.memory(), Category::Output).map(Value::Tensor);
        }
        let Some((view, bytes)) = tensor.and_then(|view| Some((view, view.bytes().ok()?))) else {
            return value.to_value();
        };
        let (budget, outputs) = (&self.env.control.budget, self.env.outputs);
        let allocate = || allocate_in(budget, Category::Output, outputs, bytes.len(), 64);
        let mut buffer = self.env.memory.reserve_for(allocate)?;
        let to = buffer.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        interrupt::copy(bytes, to);
        Ok(Value::Tensor(Tensor::from_buffer(view.dtype(), view.shape(), buffer)?))
    }

    /// Stores the outputs for which a step allocated memory, or whose values its kernel handed
    /// over.
    pub(super) fn keep(&mut self, step: &Step, tables: &mut StepTables) -> Result<()> {
        let StepTables { targets, shapes, handed, .. } = tables;
        let mut handed = handed.drain(..);
        for (position, target) in targets.iter_mut().enumerate() {
            let value = handed.next().flatten();
            let Some(slot) = step.outputs[position] else { continue };
            // Bound buffers stay in `targets`, from where dropping the `RunningStep` puts them
            // back.
            if matches!(target, Target::Bound { .. }) {
                continue;
            }
            let value = match (std::mem::replace(target, Target::Unwanted), value) {
                (Target::Buffer(buffer, _), _) => Some(buffer_value(&shapes[position], buffer)?),
                (Target::DeviceBuffer(buffer), _) => {
                    let (dtype, shape) = shapes[position].as_ref().ok_or_else(no_shape)?;
                    Some(Value::Tensor(Tensor::from_device(*dtype, shape, buffer)?))
                }
                (Target::HandedOver, Some(value)) => Some(self.check_handed(slot, value)?),
                (Target::HandedOver, None) => return Err(error!(Fail, "output {position} was not computed")),
                _ => None,
            };
            if value.is_some() {
                self.owned[slot.index()] = value;
            }
        }
        Ok(())
    }

    /// Checks a handed-over value against the plan, and copies it to the memory in which the
    /// program reads it.
    pub(super) fn check_handed(&self, slot: SlotId, value: Value) -> Result<Value> {
        let planned = &self.plan.slots[slot.index()];
        let memory = self.program.slots[slot.index()].memory;
        let value = match value {
            Value::Tensor(tensor) if tensor.memory() != memory => {
                Value::Tensor(self.copied_to(tensor.view(), memory, Category::Output)?)
            }
            other => other,
        };
        if let (Storage::Own, Some(shape), Value::Tensor(tensor)) = (&planned.storage, &planned.shape, &value)
        {
            // A loop with trip count 0 does not know the shapes of the values that it hands over,
            // but the plan does.
            if tensor.element_count() == 0 && shape.contains(&0) {
                return Ok(Value::Tensor(tensor.reshape(shape)?));
            }
            ensure!(
                tensor.shape() == shape.as_slice(),
                RuntimeException,
                "an output has shape {:?}, the plan expected {:?}",
                tensor.shape(),
                shape
            );
        }
        Ok(value)
    }

    /// Decides where each output of a step goes, and determines its type and shape. `inferred` is
    /// what inference found for the step's actual inputs, if it has run.
    pub(super) fn find_targets(
        &mut self,
        index: usize,
        targets: &mut Vec<Target>,
        shapes: &mut KnownShapes,
        mut inferred: Option<OutputShapes>,
    ) -> Result<()> {
        let (program, plan) = (self.program, self.plan);
        let step = &program.steps[index];
        for (position, slot) in step.outputs.iter().enumerate() {
            let Some(slot) = *slot else {
                targets.push(Target::Unwanted);
                shapes.push(None);
                continue;
            };
            let planned = &plan.slots[slot.index()];
            let known = planned.dtype.zip(planned.shape.as_deref().map(Shape::from_slice));
            let in_place = plan.steps[index].input_in_place_of(position);
            let home = plan.homes.iter().position(|home| *home == slot);
            let home = home.and_then(|home| self.homes.get_mut(home)?.take());
            let (target, shape) = match &planned.storage {
                Storage::Slab { slab, range } => {
                    let region = plan.host_region(*slab);
                    (Target::Slab { slab: *slab, region, range: range.clone(), in_place }, known)
                }
                Storage::Bound(place) => {
                    let buffer = self.bound.get_mut(*place).and_then(Option::take);
                    let buffer = buffer.ok_or_else(|| error!(Fail, "a bound output has no buffer"))?;
                    let shape = Some((buffer.dtype(), Shape::from_slice(buffer.shape())));
                    targets.push(Target::Bound { place: *place, buffer, in_place });
                    if known.is_none() {
                        check_bound(self.infer_once(step, &mut inferred)?, position, &shape)?;
                    }
                    shapes.push(shape);
                    continue;
                }
                // The kernel hands over all other outputs.
                _ if step.claim.outputs != OutputsFrom::Plan => (Target::HandedOver, None),
                // Other values were in this buffer until now.
                Storage::Own if let Some(buffer) = home => (Target::Buffer(buffer, in_place), known),
                Storage::Own => self.allocate(slot, known, Category::Output)?,
                _ => {
                    let all = self.infer_once(step, &mut inferred)?;
                    match all.get(position).cloned().flatten() {
                        Some((dtype, Some(shape))) if dtype != DType::String => {
                            self.allocate(slot, Some((dtype, shape)), Category::Dynamic)?
                        }
                        // Strings and values of unknown shape cannot be allocated before the kernel
                        // runs.
                        _ => (Target::HandedOver, None),
                    }
                }
            };
            targets.push(target);
            shapes.push(shape);
        }
        if plan.has_all_shapes {
            return Ok(());
        }
        // If the plan knows the outputs but not the inputs, nothing has checked the inputs yet.
        let is_open = |slot: &SlotId| plan.slots[slot.index()].shape.is_none();
        if step.claim.outputs == OutputsFrom::Plan && step.inputs.iter().flatten().any(is_open) {
            self.infer_once(step, &mut inferred)?;
        }
        Ok(())
    }

    /// Infers the outputs of a step, unless `known` already has the result.
    fn infer_once<'i>(&self, step: &Step, known: &'i mut Option<OutputShapes>) -> Result<&'i OutputShapes> {
        let inferred = match known.take() {
            Some(inferred) => inferred,
            None => self.infer(step)?,
        };
        Ok(known.insert(inferred))
    }

    /// Allocates an output of its own, in the memory of its slot.
    pub(super) fn allocate(
        &self,
        slot: SlotId,
        known: Option<(DType, Shape)>,
        category: Category,
    ) -> Result<(Target, Option<(DType, Shape)>)> {
        let (dtype, shape) = known.ok_or_else(no_shape)?;
        let bytes = byte_count(dtype, &shape)
            .map_err(|problem| problem.reclassified(&[ErrorKind::InvalidArgument], ErrorKind::Fail))?;
        let device = self.program.slots[slot.index()].memory;
        let memory = self.env.memory;
        let buffer = match category {
            // Host outputs come from the recycler, if the session has one.
            Category::Output if device == DeviceId::HOST => {
                let (budget, outputs) = (&self.env.control.budget, self.env.outputs);
                memory.reserve_for(|| allocate_in(budget, category, outputs, bytes, 64))?
            }
            Category::Output => memory.allocate_outside(device, category, bytes)?,
            _ => {
                // A value that may be returned to the caller must not be a region of an arena.
                let outlives_run = self.env.outlives_run && self.plan.slots[slot.index()].is_output;
                let source = if outlives_run { Source::Outside } else { Source::Arena };
                ValueMemory { memory, source }.allocate(device, category, bytes)?
            }
        };
        let target = match device {
            DeviceId::HOST => Target::Buffer(buffer, None),
            _ => Target::DeviceBuffer(buffer.freeze()),
        };
        Ok((target, Some((dtype, shape))))
    }

    /// Infers the types and shapes of a step's outputs from its actual inputs.
    pub(super) fn infer(&self, step: &Step) -> Result<OutputShapes> {
        let Some(node) = step.node.map(|node| &self.program.graph.nodes[node]) else {
            // A copy has its input's type and shape.
            let view = self.value(step.inputs[0].ok_or_else(no_shape)?)?.tensor()?;
            return Ok(vec![Some((view.dtype(), Some(view.shape().into())))]);
        };
        // The shapes of a subgraph's outputs are known only after it has run.
        if !node.subgraphs.is_empty() {
            return Ok(vec![None; step.outputs.len()]);
        }
        let mut facts = Vec::with_capacity(step.inputs.len());
        for (position, slot) in step.inputs.iter().enumerate() {
            facts.push(match slot {
                None => None,
                Some(slot) => Some(self.facts(node.inputs[position], *slot)?),
            });
        }
        infer_concrete(node, &facts)
    }

    /// Returns what shape inference may know about an input.
    pub(super) fn facts(&self, value: Option<crate::ir::ValueId>, slot: SlotId) -> Result<InputFacts<'_>> {
        if let (Origin::Consumed, Some(value)) = (&self.program.slots[slot.index()].origin, value) {
            // A packed weight is not read at run time, but its type and shape still count.
            let info = self.program.graph.value(value);
            let known = self.program.graph.constants.get(&value).map(|tensor| tensor.view());
            return Ok(InputFacts { name: &info.name, ty: Cow::Borrowed(&info.ty), known, symbolic: None });
        }
        Ok(match self.value(slot)? {
            ValueView::Tensor(view) => InputFacts::concrete(view),
            ValueView::Value(value) => {
                InputFacts { name: "", ty: Cow::Owned(value.value_type()), known: None, symbolic: None }
            }
        })
    }

    /// Makes outputs of unknown size views of an input that owns its memory, if the operator allows
    /// it. Returns whether it did. If shape inference had to run for this, its result is in
    /// `inferred` afterwards.
    pub(super) fn dynamic_view(&mut self, step: &Step, inferred: &mut Option<OutputShapes>) -> Result<bool> {
        if self.plan.has_all_shapes {
            return Ok(false);
        }
        let Some(node) = step.node.map(|node| &self.program.graph.nodes[node]) else { return Ok(false) };
        let (Some(view), true) = (node.spec.view, node.subgraphs.is_empty()) else { return Ok(false) };
        // A graph output owns its memory, so it is copied instead of being a view.
        let shares = |slot: &SlotId| {
            let dynamic = matches!(self.plan.slots[slot.index()].storage, Storage::Dynamic);
            dynamic && !self.plan.slots[slot.index()].is_output
        };
        if !step.outputs.iter().flatten().all(shares) {
            return Ok(false);
        }
        let all = self.infer_once(step, inferred)?.iter();
        let outputs: Vec<Option<Shape>> =
            all.map(|output| output.as_ref().and_then(|(_, shape)| shape.clone())).collect();
        if outputs.iter().any(Option::is_none) {
            return Ok(false);
        }
        let views: Vec<Option<TensorView<'_>>> = step
            .inputs
            .iter()
            .map(|slot| slot.and_then(|slot| self.value(slot).ok()).and_then(|value| value.tensor().ok()))
            .collect();
        let inputs: Vec<Option<Shape>> =
            views.iter().map(|view| view.map(|view| view.shape().into())).collect();
        let ints: Vec<Option<Vec<i64>>> = views.iter().map(|view| known_ints(*view)).collect();
        let cx = ViewCx { attrs: &node.attrs, inputs: &inputs, ints: &ints, outputs: &outputs };
        let Some(of) = view(&cx) else { return Ok(false) };
        let source = step.inputs.get(of.input).copied().flatten();
        let source = source.and_then(|slot| self.owned[slot.index()].as_ref());
        let Some(Value::Tensor(source)) = source else { return Ok(false) };
        if !source.view().is_host() && of.offsets.iter().any(|offset| *offset > 0) {
            return Ok(false);
        }
        let mut parts = Vec::new();
        for ((slot, shape), offset) in step.outputs.iter().zip(&outputs).zip(&of.offsets) {
            if let (Some(slot), Some(shape)) = (slot, shape) {
                parts.push((*slot, source.slice(*offset, shape)?));
            }
        }
        for (slot, part) in parts {
            self.owned[slot.index()] = Some(Value::Tensor(part));
        }
        Ok(true)
    }
}

/// Refuses a bound output whose shape is known only at run time and differs from the shape of its
/// buffer.
fn check_bound(inferred: &OutputShapes, position: usize, bound: &Option<(DType, Shape)>) -> Result<()> {
    let inferred = inferred.get(position).cloned().flatten();
    let inferred = inferred.and_then(|(dtype, shape)| Some((dtype, shape?)));
    ensure!(
        inferred.is_some() && inferred == *bound,
        InvalidArgument,
        help = "bind the output to a device, where it may have any size",
        "the output is {}, but it is bound to {}",
        in_words(&inferred),
        in_words(bound)
    );
    Ok(())
}

/// The value of an output in a buffer of its own.
fn buffer_value(shape: &Option<(DType, Shape)>, buffer: Buffer) -> Result<Value> {
    let (dtype, shape) = shape.as_ref().ok_or_else(no_shape)?;
    Ok(Value::Tensor(Tensor::from_buffer(*dtype, shape, buffer)?))
}
