//! Runs over an IO binding: checks the bound values, plans, and executes.
//!
//! The plan is kept in the binding until something else is bound. Symbolic sizes, overlapping
//! memory and missing inputs are checked here, before any node runs.

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::DeviceId;

use super::binding::{Bound, IoBinding, Prepared};
use super::{RunOptions, Session};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::plan::{BoundValues, GivenMemory, OutputMemory, Planning, RunPlan, SlabLimits, SlotPlan, Storage};
use crate::run::grant::RunWork;
use crate::run::inputs::{Given, bind};
use crate::tensor::{TensorBuffer, Value, ValueView, byte_count, in_words};
use crate::{Result, Within, ensure, error};

/// The memory that a run over a binding needs, known before it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundPeak {
    /// The peak of activations, workspaces and output buffers, without values of unknown size.
    pub bytes: usize,
    /// Whether the sizes of all values are known, so that `bytes` is the whole peak.
    pub is_known: bool,
}

/// Where a planned run over a binding keeps an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptIn<'a> {
    /// Memory of this device, which the session allocates.
    Device(DeviceId),
    /// The buffer of the input with this name, which counts as the caller's.
    Input(&'a str),
}

impl From<DeviceId> for KeptIn<'_> {
    fn from(device: DeviceId) -> Self {
        KeptIn::Device(device)
    }
}

impl Session {
    /// Returns the memory that a run over a binding needs with these sizes of symbolic dimensions,
    /// if it keeps the named outputs in these memories. Output buffers count from the start of the
    /// run. [`Session::plan`] describes a run without a binding, where each output counts only from
    /// the step that computes it. A dimension that is not named counts as 1.
    ///
    /// # Errors
    ///
    /// The model has no such dimension, output or input.
    pub fn bound_peak(&self, dims: &[(&str, i64)], kept: &[(&str, KeptIn<'_>)]) -> Result<BoundPeak> {
        let bindings = self.bindings(dims)?;
        let program = &self.executor.compiled.program;
        let mut bound = program.bound_values(self.executor.planning);
        bound.inputs.resize(program.given.len(), GivenMemory::HOST);
        bound.outputs.resize(program.outputs.len(), OutputMemory::Own);
        let specs = self.outputs();
        for (name, memory) in kept {
            let index = specs.iter().position(|spec| spec.name == *name);
            let output = index.and_then(|index| bound.outputs.get_mut(index));
            let output = output.ok_or_else(|| error!(InvalidArgument, "the model has no output '{name}'"))?;
            *output = match memory {
                KeptIn::Device(memory) => OutputMemory::Kept(*memory),
                KeptIn::Input(input) => {
                    let index = self.model.inputs().iter().position(|spec| spec.name == *input);
                    let given = index.and_then(|index| Some((index, bound.inputs.get_mut(index)?)));
                    let (index, given) =
                        given.ok_or_else(|| error!(InvalidArgument, "the model has no input '{input}'"))?;
                    *given = GivenMemory::buffer(DeviceId::HOST);
                    OutputMemory::Input(index)
                }
            };
        }
        let plan = self.executor.plan_bound(&bindings, &bound)?;
        let mut bytes = plan.peak();
        for (slot, output) in plan.outputs.iter().zip(&bound.outputs) {
            let OutputMemory::Kept(memory) = output else { continue };
            let is_elsewhere = program.slots.get(slot.index()).is_none_or(|slot| slot.memory != *memory);
            let planned = plan.slots.get(slot.index()).and_then(|planned| buffer_type(planned, is_elsewhere));
            if let Some((dtype, shape)) = planned {
                bytes = bytes.saturating_add(byte_count(dtype, shape)?);
            }
        }
        Ok(BoundPeak { bytes, is_known: !plan.has_dynamic })
    }

    /// Runs the model on the bound inputs and writes the bound outputs.
    ///
    /// # Errors
    ///
    /// An input without a default is not bound, or no output is bound. The bound values do not fit
    /// the model. An output cannot be in the memory of an input, or the caller still holds an
    /// output of an earlier run. All these are reported before any node runs. Other errors are
    /// those of [`Session::run`].
    pub fn run_with_binding(&self, binding: &mut IoBinding, options: &RunOptions<'_>) -> Result<()> {
        // A binding stores indices and devices of the session that made it.
        let ours = self.signature.get().is_some_and(|ours| Arc::ptr_eq(ours, &binding.signature));
        ensure!(
            ours,
            InvalidArgument,
            help = "make the binding with `io_binding` of the session that runs it",
            "the binding is of another session"
        );
        // A run that fails may leave the outputs half written.
        binding.has_run = false;
        // Frees the last run's outputs before this run allocates, unless the caller holds them.
        binding.results.fill(None);
        let prepared = match binding.prepared.take() {
            Some(prepared) => prepared,
            None => self.prepare(binding)?,
        };
        let session = prepared.independent.as_deref().unwrap_or(self);
        let done = session.run_prepared(&prepared, binding, options);
        // Also after an error: the plan stays valid.
        binding.prepared = Some(prepared);
        binding.tables.clear();
        binding.has_run = done.is_ok();
        done
    }

    fn run_prepared(
        &self,
        prepared: &Prepared,
        binding: &mut IoBinding,
        options: &RunOptions<'_>,
    ) -> Result<()> {
        let Prepared { plan, bindings, .. } = prepared;
        self.provide(plan, binding)?;
        let IoBinding { inputs, outputs, buffers, results, tables, .. } = binding;
        let work = RunWork { plan, bindings, given: Given::Values(inputs) };
        let given = inputs.len();
        self.executor.execute(work, (buffers, tables), options, |frame, tables| {
            frame.run_steps(tables)?;
            for (index, (bound, result)) in outputs.iter().zip(&mut *results).enumerate() {
                match bound {
                    // The plan computes such an output in the input's buffer, so there is nothing
                    // to copy.
                    None | Some(Bound::Input(_)) => {}
                    Some(Bound::Buffer) => *result = frame.deliver(index, given + index, DeviceId::HOST)?,
                    Some(Bound::Memory(memory)) => *result = frame.deliver(index, given + index, *memory)?,
                }
            }
            Ok(())
        })
    }

    /// Makes the plan for the bound values, and checks the bound outputs against it.
    fn prepare(&self, binding: &IoBinding) -> Result<Prepared> {
        ensure!(
            binding.outputs.iter().any(Option::is_some),
            InvalidArgument,
            help = "bind at least one output: `bind_output`",
            "no output is bound"
        );
        let mut given = Vec::with_capacity(binding.inputs.len());
        for ((spec, value), buffer) in
            binding.signature.inputs.iter().zip(&binding.inputs).zip(&binding.buffers)
        {
            let value = value.as_ref().map(Value::view);
            let value = value.or(buffer.as_ref().map(|buffer| ValueView::Tensor(buffer.view())));
            given.push(value.ok_or_else(|| {
                error!(InvalidArgument, "input '{}' ({}) is not bound", spec.name, spec.ty)
                    .help("bind each input that has no default: `bind_input`")
            })?);
        }
        // Before planning: overlapping memory is an error for any sizes.
        check_no_overlap(binding)?;
        let mut bindings = Bindings::new();
        if let Some(conflict) = bind(&self.executor.compiled.program, &given, &mut bindings)? {
            let session = self.independent(conflict)?;
            let prepared = session.prepare(binding)?;
            return Ok(Prepared { independent: Some(session), ..prepared });
        }
        let bound = BoundValues { planning: self.executor.planning, ..bound_values(binding) };
        let (plan, bindings) = self.executor.plan_fitting(bindings, &given, &bound)?;
        for (index, slot) in plan.outputs.iter().enumerate() {
            let (Some(Some(Bound::Buffer)), Some(planned)) =
                (binding.outputs.get(index), plan.slots.get(slot.index()))
            else {
                continue;
            };
            let name = binding.signature.outputs.get(index).map_or("", |spec| &spec.name);
            let buffer = binding.buffers.get(binding.inputs.len() + index).and_then(Option::as_ref);
            let buffer = buffer.ok_or_else(|| lost(name))?;
            check_planned(planned, buffer).within(|| format!("output '{name}'"))?;
        }
        Ok(Prepared { plan, bindings, independent: None })
    }

    /// Provides memory for the outputs whose size the plan knows. Reuses the memory of the last run
    /// if no tensor holds it. Refuses a caller's buffer that a tensor still holds.
    fn provide(&self, plan: &RunPlan, binding: &mut IoBinding) -> Result<()> {
        let given = binding.inputs.len();
        for (index, (bound, slot)) in binding.outputs.iter().zip(&plan.outputs).enumerate() {
            let Some(bound) = *bound else { continue };
            let place = match bound {
                Bound::Input(input) => input,
                Bound::Buffer | Bound::Memory(_) => given + index,
            };
            let name = binding.signature.outputs.get(index).map_or("", |spec| &spec.name);
            let Some(buffer) = binding.buffers.get_mut(place) else { continue };
            let Bound::Memory(memory) = bound else {
                // `view_mut` fails if a tensor shares the buffer.
                buffer
                    .as_mut()
                    .ok_or_else(|| lost(name))?
                    .view_mut()
                    .within(|| format!("output '{name}'"))?;
                continue;
            };
            let is_elsewhere = self
                .executor
                .compiled
                .program
                .slots
                .get(slot.index())
                .is_none_or(|slot| slot.memory != memory);
            let planned = plan.slots.get(slot.index()).and_then(|planned| buffer_type(planned, is_elsewhere));
            let Some((dtype, shape)) = planned else {
                // The run allocates this output itself, so the memory of an earlier run is freed.
                *buffer = None;
                continue;
            };
            let bytes = byte_count(dtype, shape)?;
            // `with_shape` needs the same number of bytes; with the same shapes warm runs allocate
            // nothing.
            let again = buffer.take().filter(|kept| kept.dtype() == dtype && kept.byte_count() == bytes);
            *buffer = match again.and_then(TensorBuffer::alone) {
                Some(kept) => Some(kept.with_shape(shape)?),
                None => {
                    let memory = self.executor.output_memory(memory, bytes)?;
                    Some(TensorBuffer::from_buffer(dtype, shape, memory)?)
                }
            };
        }
        Ok(())
    }
}

/// Returns the type and shape of an output that gets a buffer in the binding before the run. The
/// output is computed in the buffer, or copied to it.
fn buffer_type(planned: &SlotPlan, is_elsewhere: bool) -> Option<(DType, &[usize])> {
    let is_copied = matches!(planned.storage, Storage::Outside | Storage::Given(_) | Storage::Folded(_));
    let has_buffer = is_elsewhere || is_copied || matches!(planned.storage, Storage::Bound(_));
    let dtype = planned.dtype.filter(|dtype| has_buffer && *dtype != DType::String)?;
    Some((dtype, planned.shape.as_deref()?))
}

/// Tells the planner which values the binding holds, and in which memories.
fn bound_values(binding: &IoBinding) -> BoundValues {
    let memory = |(bound, buffer): (&Option<Bound>, Option<&TensorBuffer>)| match bound {
        None => OutputMemory::Unwanted,
        Some(Bound::Memory(memory)) => OutputMemory::Kept(*memory),
        Some(Bound::Buffer) => OutputMemory::Given(buffer.map_or(DeviceId::HOST, TensorBuffer::memory)),
        Some(Bound::Input(input)) => OutputMemory::Input(*input),
    };
    let given = |(value, buffer): (&Option<Value>, &Option<TensorBuffer>)| match buffer {
        Some(buffer) => GivenMemory::buffer(buffer.memory()),
        None => GivenMemory::of(value.as_ref().map(Value::view)),
    };
    let own = binding.buffers.iter().skip(binding.inputs.len()).map(Option::as_ref);
    BoundValues {
        planning: Planning::Shared,
        inputs: binding.inputs.iter().zip(&binding.buffers).map(given).collect(),
        outputs: binding.outputs.iter().zip(own).map(memory).collect(),
        room: SlabLimits::ANY,
    }
}

/// Refuses a bound buffer whose type or shape differs from the output's in the plan.
fn check_planned(planned: &SlotPlan, buffer: &TensorBuffer) -> Result<()> {
    let is_dtype = planned.dtype.is_none_or(|dtype| dtype == buffer.dtype());
    let is_shape = planned.shape.as_ref().is_none_or(|shape| shape.as_slice() == buffer.shape());
    ensure!(
        is_dtype && is_shape,
        InvalidArgument,
        help = "bind a tensor of that type and shape, or bind the output to a device",
        "it is {}, but it is bound to {}{:?}",
        in_words(&planned.dtype.zip(planned.shape.clone())),
        buffer.dtype(),
        buffer.shape()
    );
    Ok(())
}

/// Memory that a run reads or writes.
struct Region<'a> {
    name: &'a str,
    /// The memory and, on a device, the buffer's handle.
    space: (DeviceId, u64),
    bytes: Range<usize>,
    is_written: bool,
}

impl<'a> Region<'a> {
    fn of(name: &'a str, view: ValueView<'_>, is_written: bool) -> Option<Region<'a>> {
        let tensor = view.tensor().ok()?;
        if let Some(range) = tensor.device_range() {
            let start = range.buffer.offset() + range.offset;
            let space = (range.buffer.device(), range.buffer.handle()?);
            return Some(Region { name, space, bytes: start..start + range.len, is_written });
        }
        // Host addresses are unique in the process, so one space holds them all.
        let Range { start, end } = tensor.bytes().ok()?.as_ptr_range();
        Some(Region { name, space: (DeviceId::HOST, 0), bytes: start as usize..end as usize, is_written })
    }
}

/// Refuses memory that is written under one name and used under another. Only memory that other
/// libraries own, such as numpy arrays, can overlap this way. All other memory has one writer, or
/// readers only. An output in the memory of an input is allowed if it is bound to that input.
fn check_no_overlap(binding: &IoBinding) -> Result<()> {
    let IoBinding { signature, inputs, outputs, buffers, .. } = binding;
    let mut regions = Vec::new();
    for (index, ((spec, value), buffer)) in signature.inputs.iter().zip(inputs).zip(buffers).enumerate() {
        let is_written = outputs.contains(&Some(Bound::Input(index)));
        let buffer = buffer.as_ref().map(|buffer| ValueView::Tensor(buffer.view()));
        let view = buffer.or(value.as_ref().map(Value::view));
        regions.extend(view.and_then(|view| Region::of(&spec.name, view, is_written)));
    }
    let own = buffers.iter().skip(inputs.len());
    for ((spec, bound), buffer) in signature.outputs.iter().zip(outputs).zip(own) {
        // The session reuses its own buffers only if no tensor holds them, so those cannot overlap.
        let buffer = buffer.as_ref().filter(|_| *bound == Some(Bound::Buffer));
        regions
            .extend(buffer.and_then(|buffer| Region::of(&spec.name, ValueView::Tensor(buffer.view()), true)));
    }
    refuse_overlaps(&regions)
}

fn refuse_overlaps(regions: &[Region<'_>]) -> Result<()> {
    for (index, one) in regions.iter().enumerate().filter(|(_, region)| !region.bytes.is_empty()) {
        for other in regions.iter().take(index).filter(|region| !region.bytes.is_empty()) {
            let apart = one.space != other.space
                || one.bytes.end <= other.bytes.start
                || other.bytes.end <= one.bytes.start;
            ensure!(
                apart || !(one.is_written || other.is_written),
                InvalidArgument,
                help = "bind the output to the input of that name, or to memory of its own",
                "the memory of '{}' overlaps with that of '{}'",
                one.name,
                other.name
            );
        }
    }
    Ok(())
}

/// Returns the error for a buffer that the frame took and did not put back.
fn lost(name: &str) -> crate::Error {
    error!(Fail, "the buffer of output '{name}' was lost in a run that did not end")
        .help("clear the binding and bind everything again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_apart_from_the_rest() {
        let (host, device) = ((DeviceId::HOST, 0), (DeviceId(1), 0));
        let region = |name, bytes: Range<usize>, is_written| Region { name, space: host, bytes, is_written };
        // (read, read, written, written, whether that is allowed)
        for (w, x, y, z, allowed) in [
            (0..10, 5..15, 20..30, 30..40, true),
            (0..10, 0..10, 9..20, 20..30, false),
            (0..10, 0..10, 10..20, 0..1, false),
            (0..10, 0..10, 10..20, 15..16, false),
            (0..10, 0..10, 5..5, 10..10, true),
        ] {
            let regions =
                [region("w", w, false), region("x", x, false), region("y", y, true), region("z", z, true)];
            let refused = refuse_overlaps(&regions);
            assert_eq!(refused.is_ok(), allowed, "{refused:?}");
        }
        // (memory and handle of what is read, of what is written, whether that is allowed)
        for (read, written, allowed) in
            [(host, device, true), (device, (DeviceId(1), 1), true), (device, device, false)]
        {
            let regions = [
                Region { space: read, ..region("x", 0..10, false) },
                Region { space: written, ..region("y", 0..10, true) },
            ];
            assert_eq!(refuse_overlaps(&regions).is_ok(), allowed, "{read:?} {written:?}");
        }
    }
}
