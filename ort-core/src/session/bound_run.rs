//! Runs of a session over a binding.

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::{Category, allocate_in};

use super::binding::{Bound, IoBinding};
use super::frame::{Frame, Given, bind, in_words};
use super::{RunOptions, RunWork, Session};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::plan::{BoundValues, OutputMemory, Place, RunPlan, SlotPlan};
use crate::tensor::{TensorBuffer, Value, ValueView, byte_count};
use crate::{Result, Within, ensure, error};

/// What follows from a binding as long as nothing else is bound.
pub(super) struct Prepared {
    plan: Arc<RunPlan>,
    bindings: Bindings,
}

impl Session {
    /// Runs the model on what is bound, and leaves the outputs where they are bound to.
    ///
    /// # Errors
    ///
    /// An input without a default or every output is not bound, what is bound does not fit the model, an output cannot be
    /// in the memory of an input, or somebody still holds an output of an earlier run: all this before any node runs. Then
    /// those of [`Session::run`].
    pub fn run_with_binding(&self, binding: &mut IoBinding, options: &RunOptions<'_>) -> Result<()> {
        let ours = self.signature.get().is_some_and(|ours| Arc::ptr_eq(ours, &binding.signature));
        ensure!(
            ours,
            InvalidArgument,
            help = "make the binding with `io_binding` of the session that runs it",
            "the binding is of another session"
        );
        binding.has_run = false;
        let prepared = match binding.prepared.take() {
            Some(prepared) => prepared,
            None => self.prepare(binding)?,
        };
        let done = self.run_prepared(&prepared, binding, options);
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
        let Prepared { plan, bindings } = prepared;
        self.provide(plan, binding)?;
        let IoBinding { inputs, outputs, buffers, results, tables, .. } = binding;
        let work = RunWork { plan, bindings, given: Given::Values(inputs) };
        let given = inputs.len();
        self.execute(work, (buffers, tables), options, |mut frame| {
            frame.run_steps()?;
            for (index, (bound, result)) in outputs.iter().zip(&mut *results).enumerate() {
                match bound {
                    None | Some(Bound::Input(_)) => {}
                    Some(Bound::Buffer | Bound::Host) => *result = frame.deliver(index, given + index)?,
                }
            }
            Ok(())
        })
    }

    /// Makes the plan for what is bound, and holds the bound outputs against it.
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
        check_apart(binding)?;
        let mut bindings = Bindings::new();
        bind(&self.program, &given, &mut bindings)?;
        let bound = bound_values(binding);
        let (plan, bindings) = self.plan_fitting(bindings, &given, &bound)?;
        for (index, slot) in self.program.outputs.iter().enumerate() {
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
        Ok(Prepared { plan, bindings })
    }

    /// Memory for the outputs whose size the plan knows, that of the last run where nobody holds it; refuses buffers of the
    /// caller that somebody holds.
    fn provide(&self, plan: &RunPlan, binding: &mut IoBinding) -> Result<()> {
        let given = binding.inputs.len();
        for (index, (bound, slot)) in binding.outputs.iter().zip(&self.program.outputs).enumerate() {
            let Some(bound) = *bound else { continue };
            let place = match bound {
                Bound::Input(input) => input,
                Bound::Buffer | Bound::Host => given + index,
            };
            let name = binding.signature.outputs.get(index).map_or("", |spec| &spec.name);
            let Some(buffer) = binding.buffers.get_mut(place) else { continue };
            if bound != Bound::Host {
                buffer
                    .as_mut()
                    .ok_or_else(|| lost(name))?
                    .view_mut()
                    .within(|| format!("output '{name}'"))?;
                continue;
            }
            let planned = plan.slots.get(slot.index()).and_then(kept_size);
            let Some((dtype, shape)) = planned else {
                *buffer = None;
                continue;
            };
            let bytes = byte_count(dtype, shape)?;
            let again = buffer.take().filter(|kept| kept.dtype() == dtype && kept.byte_count() == bytes);
            *buffer = match again.and_then(TensorBuffer::alone) {
                Some(kept) => Some(kept.with_shape(shape)?),
                None => {
                    let allocator = self.output_allocator();
                    let memory = allocate_in(&self.budget, Category::Output, allocator, bytes, 64)?;
                    Some(TensorBuffer::from_buffer(dtype, shape, memory)?)
                }
            };
        }
        Ok(())
    }
}

impl Frame<'_> {
    /// Puts an output into its buffer unless it was computed there; without a buffer the value itself is returned.
    fn deliver(&mut self, output: usize, place: usize) -> Result<Option<Value>> {
        let (program, plan) = (self.program, self.plan);
        let slot = *program.outputs.get(output).ok_or_else(|| error!(Fail, "there is no output {output}"))?;
        let planned = plan.slots.get(slot.index()).map(|planned| &planned.place);
        if matches!(planned, Some(Place::Bound(bound)) if *bound == place) {
            return Ok(None);
        }
        let Some(mut buffer) = self.bound.get_mut(place).and_then(Option::take) else {
            return self.take_output(slot).map(Some);
        };
        let copied = self.output_view(slot).and_then(|value| copy(value, &mut buffer));
        if let Some(home) = self.bound.get_mut(place) {
            *home = Some(buffer);
        }
        copied?;
        Ok(None)
    }
}

fn copy(value: ValueView<'_>, to: &mut TensorBuffer) -> Result<()> {
    let from = value.tensor()?;
    ensure!(
        from.dtype() == to.dtype() && from.shape() == to.shape(),
        InvalidArgument,
        help = "bind the output to a device, where it may have any size",
        "the output is {}{:?}, it is bound to {}{:?}",
        from.dtype(),
        from.shape(),
        to.dtype(),
        to.shape()
    );
    to.bytes_mut()?.copy_from_slice(from.bytes()?);
    Ok(())
}

/// The type and shape of an output that has a buffer in the binding.
fn kept_size(planned: &SlotPlan) -> Option<(DType, &[usize])> {
    let has_buffer = matches!(planned.place, Place::Bound(_) | Place::Outside | Place::Folded(_));
    let dtype = planned.dtype.filter(|dtype| has_buffer && *dtype != DType::String)?;
    Some((dtype, planned.shape.as_deref()?))
}

fn bound_values(binding: &IoBinding) -> BoundValues {
    let memory = |bound: &Option<Bound>| match bound {
        None => OutputMemory::Unwanted,
        Some(Bound::Host) => OutputMemory::Kept,
        Some(Bound::Buffer) => OutputMemory::Given,
        Some(Bound::Input(input)) => OutputMemory::Input(*input),
    };
    BoundValues {
        inputs: binding.buffers.iter().take(binding.inputs.len()).map(Option::is_some).collect(),
        outputs: binding.outputs.iter().map(memory).collect(),
    }
}

/// A bound buffer must be what the plan says the output is, as far as it knows.
fn check_planned(planned: &SlotPlan, buffer: &TensorBuffer) -> Result<()> {
    let is_dtype = planned.dtype.is_none_or(|dtype| dtype == buffer.dtype());
    let is_shape = planned.shape.as_ref().is_none_or(|shape| shape.as_slice() == buffer.shape());
    ensure!(
        is_dtype && is_shape,
        InvalidArgument,
        help = "bind a tensor of that type and shape, or bind the output to a device",
        "it is {}, it is bound to {}{:?}",
        in_words(&planned.dtype.zip(planned.shape.clone())),
        buffer.dtype(),
        buffer.shape()
    );
    Ok(())
}

/// Refuses outputs in memory that is also an input's or another output's; only memory of others can be. An output in the
/// place of an input is bound to it.
fn check_apart(binding: &IoBinding) -> Result<()> {
    let region = |view: ValueView<'_>| Some(view.tensor().ok()?.bytes().ok()?.as_ptr_range());
    let specs = binding.signature.inputs.iter().chain(&binding.signature.outputs);
    let names = specs.map(|spec| spec.name.as_str());
    let held = binding.buffers.iter().map(|buffer| region(ValueView::Tensor(buffer.as_ref()?.view())));
    let values = binding.inputs.iter().map(|value| region(value.as_ref()?.view()));
    let values = values.chain(std::iter::repeat(None));
    let regions: Vec<_> = names.zip(held.zip(values).map(|(held, value)| held.or(value))).collect();
    refuse_overlaps(&regions, binding.inputs.len())
}

/// Named regions of memory, of which those from `outputs` on are written.
fn refuse_overlaps(regions: &[(&str, Option<Range<*const u8>>)], outputs: usize) -> Result<()> {
    let regions: Vec<_> = regions.iter().map(|(name, region)| (name, region.as_ref())).collect();
    let is_there = |region: &&Range<*const u8>| !region.is_empty();
    for (index, (output, written)) in regions.iter().enumerate().skip(outputs) {
        let Some(written) = written.filter(is_there) else { continue };
        let others = regions.iter().take(index);
        for (name, other) in others.filter_map(|(name, other)| Some((name, other.filter(is_there)?))) {
            ensure!(
                written.end <= other.start || other.end <= written.start,
                InvalidArgument,
                help = "bind the output to the input of that name, or to memory of its own",
                "the memory of output '{output}' is also that of '{name}'"
            );
        }
    }
    Ok(())
}

fn lost(name: &str) -> crate::Error {
    error!(Fail, "the buffer of output '{name}' went away with a run that did not end").help("bind it again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_apart_from_inputs_and_each_other() {
        let memory = [0u8; 100];
        let part = |range: Range<usize>| memory.get(range).map(<[u8]>::as_ptr_range);
        // (input, first output, second output, whether that is allowed)
        for (x, y, z, allowed) in [
            (0..10, 10..20, 20..30, true),
            (0..10, 9..20, 20..30, false),
            (0..10, 10..20, 0..1, false),
            (0..10, 10..20, 15..16, false),
            (0..10, 5..5, 10..10, true),
        ] {
            let regions = [("x", part(x)), ("other", None), ("y", part(y)), ("z", part(z))];
            assert_eq!(refuse_overlaps(&regions, 2).is_ok(), allowed, "{regions:?}");
        }
        // Inputs may share what they only read.
        assert!(refuse_overlaps(&[("x", part(0..10)), ("w", part(5..15))], 2).is_ok());
    }
}
