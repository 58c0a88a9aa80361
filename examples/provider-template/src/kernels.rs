//! What the device computes: one function and one row for each operator.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{Executable, KernelDef, NodeView, RunCx};
use ort_core::tensor::{DeviceRange, Shape};
use ort_core::{Result, ensure, error};

use crate::memory::Memory;

/// A tensor as the device's functions see it.
struct Matrix {
    shape: Shape,
    elements: Vec<f32>,
}

/// A kernel: what sessions need to know of it, and its function from inputs to the output's
/// elements.
pub(crate) struct TemplateKernel {
    pub(crate) def: KernelDef,
    compute: fn(&[Matrix]) -> Result<Vec<f32>>,
}

const FLOAT32: &[(&str, TypeSet)] = &[("T", TypeSet::of(&[DType::F32]))];

/// The kernels of the device.
pub(crate) static KERNELS: [TemplateKernel; 3] = [
    TemplateKernel {
        def: KernelDef {
            op: "Add",
            types: FLOAT32,
            in_place: &[(0, 0)],
            when: same_shape,
            ..KernelDef::BASE
        },
        compute: add,
    },
    TemplateKernel {
        def: KernelDef { op: "MatMul", types: FLOAT32, when: matrices, ..KernelDef::BASE },
        compute: mat_mul,
    },
    TemplateKernel {
        def: KernelDef { op: "Relu", types: FLOAT32, in_place: &[(0, 0)], ..KernelDef::BASE },
        compute: relu,
    },
];

/// The device does not broadcast.
fn same_shape(node: &NodeView<'_>) -> bool {
    let shapes = (node.shape(0), node.shape(1));
    matches!(shapes, (Some(a), Some(b)) if a == b && !a.iter().any(|size| size.has_unknown()))
}

/// The device multiplies matrices, not stacks of them.
fn matrices(node: &NodeView<'_>) -> bool {
    node.rank(0) == Some(2) && node.rank(1) == Some(2)
}

fn add(inputs: &[Matrix]) -> Result<Vec<f32>> {
    let [a, b] = inputs else { return Err(error!(Fail, "Add takes two inputs")) };
    ensure!(a.shape == b.shape, RuntimeException, "shapes {:?} and {:?} differ", a.shape, b.shape);
    Ok(a.elements.iter().zip(&b.elements).map(|(a, b)| a + b).collect())
}

/// NaN stays NaN, as ONNX has it.
fn relu(inputs: &[Matrix]) -> Result<Vec<f32>> {
    let elements = inputs.iter().flat_map(|x| &x.elements);
    Ok(elements.map(|x| if *x < 0.0 { 0.0 } else { *x }).collect())
}

fn mat_mul(inputs: &[Matrix]) -> Result<Vec<f32>> {
    let [a, b] = inputs else { return Err(error!(Fail, "MatMul takes two inputs")) };
    let ([_, inner], [rows, columns]) = (&*a.shape, &*b.shape) else {
        return Err(error!(Fail, "MatMul of shapes {:?} and {:?}", a.shape, b.shape));
    };
    ensure!(inner == rows, RuntimeException, "a matrix of {inner} columns by one of {rows} rows");
    if *inner == 0 || *columns == 0 {
        return Ok(vec![0.0; a.shape.iter().take(1).product::<usize>() * columns]);
    }
    let product = |row: &[f32]| {
        let mut sums = vec![0.0; *columns];
        for (factor, line) in row.iter().zip(b.elements.chunks_exact(*columns)) {
            sums.iter_mut().zip(line).for_each(|(sum, element)| *sum += factor * element);
        }
        sums
    };
    Ok(a.elements.chunks_exact(*inner).flat_map(product).collect())
}

/// A compiled node. A real device compiles its program when it is made.
struct Compiled {
    compute: fn(&[Matrix]) -> Result<Vec<f32>>,
    memory: Memory,
}

impl TemplateKernel {
    /// The kernel on a device's memory.
    pub(crate) fn on(&self, memory: &Memory) -> impl Executable + use<> {
        Compiled { compute: self.compute, memory: memory.clone() }
    }
}

impl Executable for Compiled {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let in_place = cx.in_place(0);
        let output = cx.output(0)?;
        let range =
            output.device_range().ok_or_else(|| error!(Fail, "the output is not in the device's memory"))?;
        let mut inputs = Vec::with_capacity(cx.input_count());
        for index in 0..cx.input_count() {
            // What an output is in place of is the output itself.
            if in_place == Some(index) {
                inputs.push(self.matrix(output.shape(), range)?);
                continue;
            }
            let view = cx.input(index)?;
            let range = view.device_range();
            let range = range.ok_or_else(|| error!(Fail, "input {index} is not in the device's memory"))?;
            inputs.push(self.matrix(view.shape(), range)?);
        }
        let elements = (self.compute)(&inputs)?;
        let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        self.memory.write(range, &bytes)
    }
}

impl Compiled {
    fn matrix(&self, shape: &[usize], range: DeviceRange<'_>) -> Result<Matrix> {
        let bytes = self.memory.read(range)?;
        let elements = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(Matrix { shape: shape.into(), elements })
    }
}
