//! Runs of a session over a binding.

use std::ops::Range;
use std::sync::Arc;

use ort_alloc::{Category, allocate_in};

use super::binding::{Bound, IoBinding};
use super::frame::{Frame, Given, bind, in_words};
use super::run::RunWork;
use super::{RunOptions, Session};
use crate::dim::Bindings;
use crate::dtype::DType;
use crate::plan::{BoundValues, OutputMemory, Place, Planning, RunPlan, SlotPlan};
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
        // What the caller does not hold makes room for what comes.
        binding.results.fill(None);
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
        bind(&self.compiled.program, &given, &mut bindings)?;
        let bound = BoundValues { planning: self.planning, ..bound_values(binding) };
        let (plan, bindings) = self.plan_fitting(bindings, &given, &bound)?;
        for (index, slot) in self.compiled.program.outputs.iter().enumerate() {
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
        for (index, (bound, slot)) in binding.outputs.iter().zip(&self.compiled.program.outputs).enumerate() {
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
    pub(super) fn deliver(&mut self, output: usize, place: usize) -> Result<Option<Value>> {
        let (program, plan) = (self.program, self.plan);
        let slot = *program.outputs.get(output).ok_or_else(|| error!(Fail, "there is no output {output}"))?;
        let planned = plan.slots.get(slot.index()).map(|planned| &planned.place);
        if matches!(planned, Some(Place::Bound(bound)) if *bound == place) {
            return Ok(None);
        }
        let Some(mut buffer) = self.bound.get_mut(place).and_then(Option::take) else {
            return self.take_output(slot).and_then(|value| self.detach(value)).map(Some);
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
        planning: Planning::Shared,
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

/// Memory that a run reads, or writes.
struct Region<'a> {
    name: &'a str,
    bytes: Range<*const u8>,
    is_written: bool,
}

/// Refuses memory that is written under one name and used under another, which only memory of others can be: the rest is
/// shared for reading alone. An output in the place of an input is bound to it.
fn check_apart(binding: &IoBinding) -> Result<()> {
    let IoBinding { signature, inputs, outputs, buffers, .. } = binding;
    let bytes = |view: ValueView<'_>| Some(view.tensor().ok()?.bytes().ok()?.as_ptr_range());
    let of = |buffer: &Option<TensorBuffer>| bytes(ValueView::Tensor(buffer.as_ref()?.view()));
    let mut regions = Vec::new();
    for (index, ((spec, value), buffer)) in signature.inputs.iter().zip(inputs).zip(buffers).enumerate() {
        let is_written = outputs.contains(&Some(Bound::Input(index)));
        let found = of(buffer).or_else(|| bytes(value.as_ref()?.view()));
        regions.extend(found.map(|bytes| Region { name: &spec.name, bytes, is_written }));
    }
    let own = buffers.iter().skip(inputs.len());
    for ((spec, bound), buffer) in signature.outputs.iter().zip(outputs).zip(own) {
        // Memory of the session is used again only where nobody holds it.
        let found = of(buffer).filter(|_| *bound == Some(Bound::Buffer));
        regions.extend(found.map(|bytes| Region { name: &spec.name, bytes, is_written: true }));
    }
    refuse_overlaps(&regions)
}

fn refuse_overlaps(regions: &[Region<'_>]) -> Result<()> {
    for (index, one) in regions.iter().enumerate().filter(|(_, region)| !region.bytes.is_empty()) {
        for other in regions.iter().take(index).filter(|region| !region.bytes.is_empty()) {
            let apart = one.bytes.end <= other.bytes.start || other.bytes.end <= one.bytes.start;
            ensure!(
                apart || !(one.is_written || other.is_written),
                InvalidArgument,
                help = "bind the output to the input of that name, or to memory of its own",
                "the memory of '{}' is also that of '{}'",
                one.name,
                other.name
            );
        }
    }
    Ok(())
}

fn lost(name: &str) -> crate::Error {
    error!(Fail, "the buffer of output '{name}' went away with a run that did not end")
        .help("clear the binding and bind everything again")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_apart_from_the_rest() {
        let memory = [0u8; 100];
        let region = |name, range: Range<usize>, is_written| {
            let bytes = memory.get(range).map(<[u8]>::as_ptr_range);
            bytes.map(|bytes| Region { name, bytes, is_written })
        };
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
            let regions: Vec<Region<'_>> = regions.into_iter().flatten().collect();
            let refused = refuse_overlaps(&regions);
            assert_eq!(refused.is_ok(), allowed, "{refused:?}");
        }
    }
}
