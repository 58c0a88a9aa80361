//! The device's few kernels, all of `float`, written for clarity.

use std::sync::Arc;

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{Executable, KernelDef, NodeView, RunCx};
use ort_core::ir::Attributes;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};

use super::memory::Memory;

/// An input, copied out of the device's memory for the kernel.
pub(super) struct Operand {
    shape: Shape,
    values: Vec<f32>,
}

/// Computes the elements of every output from the attributes, the inputs and the shapes of the
/// outputs. An input in host memory is `None`.
type Compute = fn(&Attributes, &[Option<Operand>], &[Shape]) -> Result<Vec<Vec<f32>>>;

/// A kernel: its definition for the session, and its function.
pub(super) struct OpaqueKernel {
    pub(super) def: KernelDef,
    compute: Compute,
}

const FLOAT: &[(&str, TypeSet)] = &[("T", TypeSet::of(&[DType::F32]))];
const BASE: KernelDef = KernelDef { types: FLOAT, when: all_outputs, ..KernelDef::BASE };
const UNARY: KernelDef = KernelDef { in_place: &[(0, 0)], ..BASE };
const BINARY: KernelDef = KernelDef { in_place: &[(0, 0), (1, 0)], ..BASE };
// Input 1 is a shape or the sizes of parts. The session reads it on the host, so the kernel does
// not.
const SHAPED: KernelDef = KernelDef { host_inputs: &[1], ..BASE };

pub(super) static KERNELS: [OpaqueKernel; 12] = [
    OpaqueKernel { def: KernelDef { op: "Add", ..BINARY }, compute: |_, i, o| binary(i, o, |a, b| a + b) },
    OpaqueKernel { def: KernelDef { op: "Concat", ..BASE }, compute: concat },
    OpaqueKernel { def: KernelDef { op: "Div", ..BINARY }, compute: |_, i, o| binary(i, o, |a, b| a / b) },
    OpaqueKernel { def: KernelDef { op: "MatMul", ..BASE }, compute: matmul },
    OpaqueKernel { def: KernelDef { op: "Mul", ..BINARY }, compute: |_, i, o| binary(i, o, |a, b| a * b) },
    OpaqueKernel { def: KernelDef { op: "Neg", ..UNARY }, compute: |_, i, _| unary(i, |x| -x) },
    OpaqueKernel { def: KernelDef { op: "Relu", ..UNARY }, compute: |_, i, _| unary(i, |x| x.max(0.0)) },
    OpaqueKernel { def: KernelDef { op: "Reshape", ..SHAPED }, compute: |_, i, _| unary(i, |x| x) },
    OpaqueKernel { def: KernelDef { op: "Softmax", ..BASE }, compute: softmax },
    OpaqueKernel { def: KernelDef { op: "Split", ..SHAPED }, compute: split },
    OpaqueKernel { def: KernelDef { op: "Sub", ..BINARY }, compute: |_, i, o| binary(i, o, |a, b| a - b) },
    OpaqueKernel { def: KernelDef { op: "Transpose", ..BASE }, compute: transpose },
];

fn all_outputs(node: &NodeView<'_>) -> bool {
    node.node.outputs.iter().all(Option::is_some)
}

/// A compiled node.
pub(super) struct Kernel {
    attrs: Attributes,
    kernel: &'static OpaqueKernel,
    memory: Arc<Memory>,
}

impl Kernel {
    pub(super) fn new(attrs: Attributes, kernel: &'static OpaqueKernel, memory: Arc<Memory>) -> Kernel {
        Kernel { attrs, kernel, memory }
    }

    fn floats(&self, bytes: &[u8]) -> Vec<f32> {
        // All values are float32, so no bytes remain.
        bytes.as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
    }
}

impl Executable for Kernel {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let in_place = cx.in_place(0);
        let mut outputs = Vec::new();
        for index in 0..cx.output_count() {
            outputs.push(cx.output(index)?);
        }
        let mut inputs = Vec::with_capacity(cx.input_count());
        for index in 0..cx.input_count() {
            let (shape, range) = match cx.find_input(index) {
                // An in-place input shares the output's buffer, so the session passes it as the
                // output.
                _ if in_place == Some(index) => (outputs[0].shape(), outputs[0].device_range()),
                Some(view) => (view.shape(), view.device_range()),
                None => (&[][..], None),
            };
            let on_host = self.kernel.def.host_inputs.contains(&index);
            ensure!(on_host || range.is_some(), Fail, "input {index} is not in the device's memory");
            inputs.push(match range {
                Some(range) if !on_host => {
                    Some(Operand { shape: shape.into(), values: self.floats(&self.memory.read(range)?) })
                }
                _ => None,
            });
        }
        let shapes: Vec<Shape> = outputs.iter().map(|output| output.shape().into()).collect();
        // All inputs are copies, so an output may take the memory of one.
        let results = (self.kernel.compute)(&self.attrs, &inputs, &shapes)?;
        ensure!(results.len() == outputs.len(), Fail, "{} outputs were computed", results.len());
        for (output, values) in outputs.iter().zip(results) {
            let range = output
                .device_range()
                .ok_or_else(|| error!(Fail, "an output is not in the device's memory"))?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.memory.write(range, &bytes)?;
        }
        Ok(())
    }
}

fn operand(inputs: &[Option<Operand>], index: usize) -> Result<&Operand> {
    inputs
        .get(index)
        .and_then(Option::as_ref)
        .ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
}

fn unary(inputs: &[Option<Operand>], apply: fn(f32) -> f32) -> Result<Vec<Vec<f32>>> {
    Ok(vec![operand(inputs, 0)?.values.iter().map(|&x| apply(x)).collect()])
}

/// Iterates over the coordinates of every element of a shape, in row-major order.
fn coordinates(shape: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    let shape = shape.to_vec();
    // The product of no sizes is 1, so a scalar has one element, with no coordinates.
    (0..shape.iter().product()).map(move |flat| {
        let mut rest: usize = flat;
        let mut at = vec![0; shape.len()];
        for (place, size) in at.iter_mut().zip(&shape).rev() {
            *place = rest % size;
            rest /= size;
        }
        at
    })
}

impl Operand {
    /// Returns the element at coordinates of a shape that this operand broadcasts to.
    fn at(&self, coordinates: &[usize]) -> f32 {
        // Broadcasting aligns the last axes.
        let skipped = coordinates.len() - self.shape.len();
        let flat = self
            .shape
            .iter()
            .zip(&coordinates[skipped..])
            .fold(0, |flat, (&size, &at)| flat * size + if size == 1 { 0 } else { at });
        self.values[flat]
    }
}

fn binary(
    inputs: &[Option<Operand>],
    outputs: &[Shape],
    apply: fn(f32, f32) -> f32,
) -> Result<Vec<Vec<f32>>> {
    let (a, b) = (operand(inputs, 0)?, operand(inputs, 1)?);
    Ok(vec![coordinates(&outputs[0]).map(|at| apply(a.at(&at), b.at(&at))).collect()])
}

/// Returns the axis that the attribute `axis` names.
fn axis_of(attrs: &Attributes, rank: usize) -> Result<usize> {
    let axis = attrs.int("axis")?;
    let axis = if axis < 0 { axis + rank as i64 } else { axis };
    usize::try_from(axis)
        .ok()
        .filter(|axis| *axis < rank)
        .ok_or_else(|| error!(InvalidArgument, "axis {axis} is out of range for rank {rank}"))
}

fn concat(attrs: &Attributes, inputs: &[Option<Operand>], outputs: &[Shape]) -> Result<Vec<Vec<f32>>> {
    let axis = axis_of(attrs, outputs[0].len())?;
    let mut values = Vec::new();
    for mut at in coordinates(&outputs[0]) {
        let mut index = 0;
        // An input of size 0 along the axis is skipped by the same comparison.
        while at[axis] >= operand(inputs, index)?.shape[axis] {
            at[axis] -= operand(inputs, index)?.shape[axis];
            index += 1;
        }
        values.push(operand(inputs, index)?.at(&at));
    }
    Ok(vec![values])
}

fn split(attrs: &Attributes, inputs: &[Option<Operand>], outputs: &[Shape]) -> Result<Vec<Vec<f32>>> {
    let input = operand(inputs, 0)?;
    let axis = axis_of(attrs, input.shape.len())?;
    let mut start = 0;
    let mut parts = Vec::with_capacity(outputs.len());
    for shape in outputs {
        let part = coordinates(shape).map(|mut at| {
            at[axis] += start;
            input.at(&at)
        });
        parts.push(part.collect());
        start += shape[axis];
    }
    Ok(parts)
}

fn transpose(attrs: &Attributes, inputs: &[Option<Operand>], outputs: &[Shape]) -> Result<Vec<Vec<f32>>> {
    let input = operand(inputs, 0)?;
    let rank = input.shape.len();
    let order: Vec<usize> = match attrs.find_ints("perm") {
        Some(order) => order.iter().map(|&axis| axis as usize).collect(),
        // Without `perm` the axes are reversed (ONNX, `Transpose`).
        None => (0..rank).rev().collect(),
    };
    let moved = coordinates(&outputs[0]).map(|at| {
        let mut from = vec![0; rank];
        for (place, &axis) in at.iter().zip(&order) {
            from[axis] = *place;
        }
        input.at(&from)
    });
    Ok(vec![moved.collect()])
}

/// `Softmax` over one axis: `exp(x - max) / sum(exp(x - max))`.
fn softmax(attrs: &Attributes, inputs: &[Option<Operand>], _: &[Shape]) -> Result<Vec<Vec<f32>>> {
    let input = operand(inputs, 0)?;
    let axis = axis_of(attrs, input.shape.len())?;
    let length = input.shape[axis];
    let stride: usize = input.shape[axis + 1..].iter().product();
    let mut values = input.values.clone();
    for start in 0..values.len() {
        // Visit each row along the axis once, at its first element.
        // There is a `start` only if no size is 0, so neither divisor is 0.
        if !(start / stride).is_multiple_of(length) {
            continue;
        }
        let line = || (0..length).map(|step| start + step * stride);
        // Without the maximum `exp` would overflow.
        let greatest = line().map(|at| values[at]).fold(f32::NEG_INFINITY, f32::max);
        for at in line() {
            values[at] = (values[at] - greatest).exp();
        }
        let sum: f32 = line().map(|at| values[at]).sum();
        for at in line() {
            values[at] /= sum;
        }
    }
    Ok(vec![values])
}

/// `MatMul` of matrices and batches of them; the leading axes broadcast.
fn matmul(_: &Attributes, inputs: &[Option<Operand>], outputs: &[Shape]) -> Result<Vec<Vec<f32>>> {
    let (a, b) = (operand(inputs, 0)?, operand(inputs, 1)?);
    ensure!(a.shape.len() >= 2 && b.shape.len() >= 2, InvalidArgument, "both inputs must be matrices");
    let inner = a.shape[a.shape.len() - 1];
    let rank = outputs[0].len();
    // `at` are coordinates of the output. The last ones are replaced along the inner axis.
    let products = coordinates(&outputs[0]).map(|at| {
        let (mut left, mut right) = (at.clone(), at);
        (0..inner).fold(0.0, |sum, step| {
            left[rank - 1] = step;
            right[rank - 2] = step;
            sum + a.at(&left) * b.at(&right)
        })
    });
    Ok(vec![products.collect()])
}
