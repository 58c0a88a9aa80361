//! Slot resolution: finds the memory of slots, as views that kernels read and write.

#![allow(
    clippy::indexing_slicing,
    reason = "ids of slots are made with the program, and plans and frames have an entry for each"
)]

use std::ops::Range;

use ort_alloc::{Buffer, Part, SharedBuffer, Slices, split_disjoint};

use super::inputs::Given;
use super::target::{Target, no_shape};
use crate::dtype::DType;
use crate::ep::OutputSlot;
use crate::plan::{RunPlan, Storage};
use crate::program::{Origin, Program, SlotId};
use crate::tensor::{DeviceRange, Shape, TensorBuffer, TensorMut, TensorView, Value, ValueView, byte_count};
use crate::{Result, error};

/// A slab in device memory: a whole buffer or, for a subgraph, a range of its node's slab.
#[derive(Clone)]
pub(crate) struct DeviceSlab {
    pub(crate) buffer: SharedBuffer,
    pub(crate) offset: usize,
}

impl DeviceSlab {
    /// The device range of these bytes of the slab.
    pub(crate) fn range(&self, bytes: &Range<usize>) -> DeviceRange<'_> {
        DeviceRange { buffer: &self.buffer, offset: self.offset + bytes.start, len: bytes.len() }
    }
}

/// Where a run finds values that are not in slabs.
pub(crate) struct Sources<'v> {
    pub(crate) program: &'v Program,
    pub(crate) plan: &'v RunPlan,
    pub(crate) owned: &'v [Option<Value>],
    pub(crate) given: Given<'v>,
    pub(crate) bound: &'v [Option<TensorBuffer>],
}

/// Returns a view of a slot's value; `None` for consumed weights and for values in device slabs.
/// `bytes` resolves ranges of host regions.
pub(crate) fn view_of<'v>(
    sources: &Sources<'v>,
    slot: SlotId,
    bytes: &mut dyn FnMut(usize, Range<usize>) -> Option<&'v [u8]>,
) -> Option<Result<ValueView<'v>>> {
    let Sources { program, plan, owned, given, bound } = *sources;
    let planned = &plan.slots[slot.index()];
    let tensor = |view: TensorView<'v>| Some(Ok(ValueView::Tensor(view)));
    match &planned.storage {
        Storage::Slab { slab, range } => {
            let bytes = bytes(plan.host_region(*slab)?, range.clone())?;
            tensor(TensorView::host(planned.dtype?, planned.shape.as_deref()?, bytes))
        }
        Storage::Folded(value) => tensor(value.view()),
        Storage::Given(index) => given.get(*index).map(Ok),
        Storage::Bound(place) => tensor(bound.get(*place)?.as_ref()?.view()),
        Storage::View { of, element_offset } => {
            let root = match view_of(sources, *of, bytes)? {
                Ok(root) => root,
                Err(problem) => return Some(Err(problem)),
            };
            Some(part(root, planned.shape.as_deref()?, *element_offset).map(ValueView::Tensor))
        }
        Storage::Outside => match &program.slots[slot.index()].origin {
            Origin::Given(index) => given.get(*index).map(Ok),
            Origin::Constant(value) => tensor(value.view()),
            // The constant was uploaded for the whole run, or for the step that reads it.
            Origin::Streamed(_) => owned[slot.index()].as_ref().map(|value| Ok(value.view())),
            Origin::Consumed | Origin::Step => None,
        },
        _ => owned[slot.index()].as_ref().map(|value| Ok(value.view())),
    }
}

/// Returns a view of the elements of `root` from element `offset` on.
fn part<'v>(root: ValueView<'v>, shape: &'v [usize], offset: usize) -> Result<TensorView<'v>> {
    let root = root.tensor()?;
    if let Ok(strings) = root.strings() {
        let count: usize = shape.iter().product();
        let part = strings.get(offset..offset + count);
        return Ok(TensorView::of_strings(
            shape,
            part.ok_or_else(|| error!(Fail, "a view is out of range"))?,
        ));
    }
    if let Some(range) = root.device_range() {
        let bytes = crate::tensor::element_byte_range(root.dtype(), offset, shape.iter().product())?;
        let range = DeviceRange { offset: range.offset + bytes.start, len: bytes.len(), ..range };
        return Ok(TensorView::device(root.dtype(), shape, range));
    }
    let range = root.byte_range(offset, shape.iter().product())?;
    let bytes = root.bytes()?.get(range).ok_or_else(|| error!(Fail, "a view is out of range"))?;
    Ok(TensorView::host(root.dtype(), shape, bytes))
}

/// Returns a view of a slot's value in a device slab.
pub(crate) fn device_view<'v>(
    plan: &'v RunPlan,
    slabs: &'v [Option<DeviceSlab>],
    slot: SlotId,
) -> Option<ValueView<'v>> {
    let planned = &plan.slots[slot.index()];
    let Storage::Slab { slab, range } = &planned.storage else { return None };
    let range = slabs.get(*slab)?.as_ref()?.range(range);
    Some(ValueView::Tensor(TensorView::device(planned.dtype?, planned.shape.as_deref()?, range)))
}

/// Turns a step's target into the output slot of its kernel. `writes` yields the slices of host
/// memory in the order of the targets.
pub(crate) fn output_slot<'v>(
    target: &'v mut Target,
    shape: &'v Option<(DType, Shape)>,
    writes: &mut dyn Iterator<Item = &'v mut [u8]>,
    devices: &'v [Option<DeviceSlab>],
) -> Result<OutputSlot<'v>> {
    let known = || shape.as_ref().map(|(dtype, shape)| (*dtype, shape.as_slice())).ok_or_else(no_shape);
    let missing = || error!(Fail, "an output has no memory");
    let (tensor, in_place) = match target {
        Target::Unwanted => return Ok(OutputSlot::Unwanted),
        Target::HandedOver => return Ok(OutputSlot::Handed(None)),
        Target::Slab { region: Some(_), in_place, .. } => {
            let (dtype, shape) = known()?;
            (TensorMut::host(dtype, shape, writes.next().ok_or_else(missing)?), *in_place)
        }
        Target::Slab { slab, range, in_place, .. } => {
            let (dtype, shape) = known()?;
            let slab = devices.get(*slab).and_then(Option::as_ref).ok_or_else(missing)?;
            (TensorMut::device(dtype, shape, slab.range(range)), *in_place)
        }
        Target::Buffer(buffer, in_place) => {
            let (dtype, shape) = known()?;
            let bytes = byte_count(dtype, shape)?;
            let memory = buffer.bytes_mut().and_then(|memory| memory.get_mut(..bytes)).ok_or_else(missing)?;
            (TensorMut::host(dtype, shape, memory), *in_place)
        }
        Target::Bound { buffer, in_place, .. } => {
            let in_place = *in_place;
            return Ok(OutputSlot::Ready { tensor: Some(buffer.view_mut()?), in_place });
        }
        Target::DeviceBuffer(buffer) => {
            let (dtype, shape) = known()?;
            let range = DeviceRange { buffer, offset: 0, len: byte_count(dtype, shape)? };
            (TensorMut::device(dtype, shape, range), None)
        }
    };
    tensor.check_length()?;
    Ok(OutputSlot::Ready { tensor: Some(tensor), in_place })
}

/// Borrows parts of the host slab (region 0) and of the reused output buffers (`homes`, the regions
/// after it) at once.
pub(crate) fn split_regions<'s>(
    slab: &'s mut [u8],
    homes: &'s mut [Option<Buffer>],
    (reads, writes): (&[Part], &[Part]),
    slices: Slices<'static>,
) -> Result<Slices<'s>> {
    // All values of the step have memory of their own, as in models of one node.
    if reads.is_empty() && writes.is_empty() {
        return Ok(slices);
    }
    // If a home is missing, its output was computed, so no other value is in it any more.
    let home = |home: &'s mut Option<Buffer>| home.as_mut().and_then(Buffer::bytes_mut).unwrap_or_default();
    let regions = std::iter::once(slab).chain(homes.iter_mut().map(home));
    split_disjoint(regions, reads, writes, slices)
        .map_err(|problem| error!(Fail, "the plan overlaps: {problem}"))
}
