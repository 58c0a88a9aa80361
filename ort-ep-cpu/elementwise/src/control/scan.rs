//! `Scan`: runs a subgraph for each slice of its inputs.

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::tensor::{DeviceRange, Shape, Tensor, TensorView, Value, ValueView};
use ort_core::{Result, ensure, error};

use super::stack::{Stack, repacked, unpacked};
use super::{Item, item_of_run, item_type, subgraph};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spending;

cpu_kernels![KernelDef { op: "Scan", outputs: OutputsFrom::Kernel, make, ..KernelDef::BASE }];

/// The axis along which a value is scanned, and whether from the back.
#[derive(Clone, Copy)]
struct Direction {
    axis: i64,
    reversed: bool,
}

struct Scan {
    body: usize,
    states: usize,
    inputs: Vec<Direction>,
    outputs: Vec<Direction>,
    /// The type of each scan output in one iteration.
    items: Vec<Item>,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let (body, graph) = subgraph(cx, "body")?;
    let scanned = usize::try_from(cx.attrs().int("num_scan_inputs")?).ok().filter(|&count| count > 0);
    // Inputs are states first, then scanned inputs.
    let states = scanned.and_then(|count| cx.node.node.inputs.len().checked_sub(count));
    let states =
        states.ok_or_else(|| error!(InvalidGraph, "num_scan_inputs does not match the number of inputs"))?;
    let directions = |count: usize, axes: &str, directions: &str| -> Result<Vec<Direction>> {
        let axes = cx.attrs().find_ints(axes).unwrap_or(&[]);
        let directions = cx.attrs().find_ints(directions).unwrap_or(&[]);
        for given in [axes, directions] {
            ensure!(
                given.is_empty() || given.len() == count,
                InvalidGraph,
                "{} axes or directions given for {count} values",
                given.len()
            );
        }
        let one = |index| Direction {
            axis: axes.get(index).copied().unwrap_or(0),
            reversed: directions.get(index).is_some_and(|&direction| direction != 0),
        };
        Ok((0..count).map(one).collect())
    };
    let scan_outputs = graph.outputs.get(states..).unwrap_or(&[]);
    Ok(Box::new(Scan {
        body,
        states,
        inputs: directions(cx.node.node.inputs.len() - states, "scan_input_axes", "scan_input_directions")?,
        outputs: directions(scan_outputs.len(), "scan_output_axes", "scan_output_directions")?,
        items: scan_outputs.iter().map(|&output| item_type(graph, output)).collect::<Result<_>>()?,
    }))
}

fn resolve(axis: i64, rank: usize) -> Result<usize> {
    let counted = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    let found = counted.and_then(|axis| usize::try_from(axis).ok()).filter(|&axis| axis < rank);
    found.ok_or_else(|| error!(InvalidArgument, "axis {axis} is out of range for rank {rank}"))
}

/// One scanned input, with its scanned axis in front.
struct Scanned<'a> {
    whole: TensorView<'a>,
    /// The input with the scanned axis moved to the front, if it was elsewhere.
    moved: Option<Tensor>,
    /// Copies of the slices, if elements are packed and a slice does not start at a whole byte.
    parts: Vec<Tensor>,
    reversed: bool,
    length: usize,
    slice_shape: Shape,
}

impl<'a> Scanned<'a> {
    fn new(cx: &RunCx<'_>, whole: TensorView<'a>, direction: Direction) -> Result<Scanned<'a>> {
        let axis = resolve(direction.axis, whole.rank())?;
        let mut slice_shape: Shape = whole.shape().into();
        let length = slice_shape.remove(axis);
        let moved = if axis == 0 { None } else { Some(move_axis(cx, &whole, axis, 0)?) };
        let in_front = moved.as_ref().map_or(whole, Tensor::view);
        let count: usize = slice_shape.iter().product();
        // A slice that starts within a byte cannot be a view.
        let whole_bytes = whole.dtype().bits().is_none_or(|bits| (count * bits as usize).is_multiple_of(8));
        let parts = if whole_bytes { Vec::new() } else { parts(&in_front, &slice_shape)? };
        Ok(Scanned { whole, moved, parts, reversed: direction.reversed, length, slice_shape })
    }

    fn slice(&self, step: usize) -> Result<TensorView<'_>> {
        // `run` calls this for steps below `length`.
        let place = if self.reversed { self.length - 1 - step } else { step };
        let whole = self.moved.as_ref().map_or(self.whole, Tensor::view);
        let count: usize = self.slice_shape.iter().product();
        let outside = || error!(Fail, "a slice is out of range");
        if let Ok(strings) = whole.strings() {
            let part = strings.get(place * count..(place + 1) * count).ok_or_else(outside)?;
            return Ok(TensorView::of_strings(&self.slice_shape, part));
        }
        let bits = whole.dtype().bits().ok_or_else(outside)? as usize;
        if let Some(part) = self.parts.get(place) {
            return Ok(part.view());
        }
        let bytes = count * bits / 8;
        // A slice in device memory is a view as well.
        if let Some(range) = whole.device_range() {
            let range = DeviceRange { offset: range.offset + place * bytes, len: bytes, ..range };
            return Ok(TensorView::device(whole.dtype(), &self.slice_shape, range));
        }
        let part = whole.bytes()?.get(place * bytes..(place + 1) * bytes).ok_or_else(outside)?;
        Ok(TensorView::host(whole.dtype(), &self.slice_shape, part))
    }
}

/// Copies each slice of a packed tensor along its first axis to bytes of its own.
fn parts(tensor: &TensorView<'_>, slice_shape: &[usize]) -> Result<Vec<Tensor>> {
    let elements = unpacked(tensor)?;
    let count = slice_shape.iter().product::<usize>().max(1);
    elements.chunks_exact(count).map(|elements| repacked(tensor.dtype(), slice_shape, elements)).collect()
}

/// Moves one axis of a tensor to another position.
fn move_axis(cx: &RunCx<'_>, tensor: &TensorView<'_>, from: usize, to: usize) -> Result<Tensor> {
    let shape = tensor.shape();
    let mut order: Vec<usize> = (0..shape.len()).collect();
    let axis = order.remove(from);
    // The other axes keep their order.
    order.insert(to, axis);
    let moved_shape: Shape = order.iter().map(|&axis| shape[axis]).collect();
    let mut strides = vec![1usize; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    let strides: Vec<usize> = order.iter().map(|&axis| strides[axis]).collect();
    let sources = Sources { shape: &moved_shape, strides: &strides };
    let count = tensor.element_count();
    if let Ok(strings) = tensor.strings() {
        return cx.strings(&moved_shape, (0..count).map(|index| strings[sources.at(index)].clone()));
    }
    let Some(width) = tensor.dtype().byte_size() else {
        let elements = unpacked(tensor)?;
        let moved: Vec<u8> = spending(4, 0..count).map(|index| elements[sources.at(index)]).collect();
        return repacked(tensor.dtype(), &moved_shape, &moved);
    };
    let bytes = tensor.bytes()?;
    let mut moved = cx.allocate(tensor.dtype(), &moved_shape)?;
    for (index, to) in spending(4, moved.bytes_mut()?.chunks_exact_mut(width)).enumerate() {
        let source = sources.at(index) * width;
        to.copy_from_slice(&bytes[source..source + width]);
    }
    moved.finish()
}

/// Maps the elements of a transposed tensor to those of the original.
struct Sources<'a> {
    shape: &'a [usize],
    strides: &'a [usize],
}

impl Sources<'_> {
    fn at(&self, mut index: usize) -> usize {
        let mut source = 0;
        for (size, stride) in self.shape.iter().zip(self.strides).rev() {
            source += index % size * stride;
            index /= size;
        }
        source
    }
}

impl Scan {
    /// Returns the shapes of the body's inputs in the first iteration.
    fn input_shapes(&self, cx: &RunCx<'_>, scanned: &[Scanned<'_>]) -> Vec<Option<Shape>> {
        let states = (0..self.states).map(|index| cx.find_input(index).map(|view| view.shape().into()));
        states.chain(scanned.iter().map(|one| Some(one.slice_shape.clone()))).collect()
    }
}

impl Executable for Scan {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let mut scanned = Vec::with_capacity(self.inputs.len());
        for (index, direction) in self.inputs.iter().enumerate() {
            scanned.push(Scanned::new(cx, cx.input(self.states + index)?, *direction)?);
        }
        // At least one input is scanned, which `make` checked.
        let length = scanned.first().map_or(0, |first| first.length);
        ensure!(
            scanned.iter().all(|one| one.length == length),
            InvalidArgument,
            "the scanned inputs differ in length: {:?}",
            scanned.iter().map(|one| one.length).collect::<Vec<_>>()
        );
        let mut stacks: Vec<Stack> =
            self.outputs.iter().map(|direction| Stack::exactly(length, direction.reversed)).collect();
        let mut states: Option<Vec<Value>> = None;
        for step in 0..length {
            cx.check()?;
            let mut inputs: Vec<ValueView<'_>> = Vec::with_capacity(cx.input_count());
            match &states {
                Some(values) => inputs.extend(values.iter().map(Value::view)),
                None => {
                    for index in 0..self.states {
                        inputs.push(cx.input_value(index)?);
                    }
                }
            }
            for one in &scanned {
                inputs.push(ValueView::Tensor(one.slice(step)?));
            }
            let mut outputs = cx.run_subgraph(self.body, &inputs)?.into_iter();
            states = Some(outputs.by_ref().take(self.states).collect());
            for (stack, value) in stacks.iter_mut().zip(outputs) {
                stack.push(cx, &value.tensor()?.view())?;
            }
        }
        let last = match states {
            Some(values) => values,
            None => (0..self.states).map(|index| cx.own_input(index)).collect::<Result<_>>()?,
        };
        for (index, value) in last.into_iter().enumerate() {
            cx.set(index, value)?;
        }
        // Only a scan without iterations needs the shapes, for its empty outputs.
        let shapes = if length == 0 { self.input_shapes(cx, &scanned) } else { Vec::new() };
        for (index, stack) in stacks.into_iter().enumerate() {
            let (output, item) = (self.states + index, &self.items[index]);
            let empty = || item_of_run(cx, self.body, &shapes, output, item);
            let joined = stack.finish(cx, empty)?;
            let axis = resolve(self.outputs[index].axis, joined.shape().len())?;
            // The stack joins along a new first axis; the attribute may want another place for it.
            let joined = if axis == 0 { joined } else { move_axis(cx, &joined.view(), 0, axis)? };
            cx.set(self.states + index, joined)?;
        }
        Ok(())
    }
}
