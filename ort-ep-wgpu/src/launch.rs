//! What a kernel sees of its node, and the dispatches that it answers with.

use ort_core::dtype::DType;
use ort_core::ir::Attributes;
use ort_core::tensor::{Shape, TensorView};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use crate::gpu::Limits;
use crate::pipelines::Program;

/// Where a tensor of a dispatch is found at a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arg {
    /// The node's input at this position.
    Input(usize),
    /// The node's output at this position.
    Output(usize),
    /// So many bytes of the node's workspace from a byte on.
    Workspace { offset: usize, bytes: usize },
}

/// A tensor as kernels see it.
#[derive(Clone, Debug)]
pub(crate) struct Operand {
    pub(crate) arg: Arg,
    pub(crate) dtype: DType,
    pub(crate) shape: Shape,
}

impl Operand {
    /// The number of elements.
    pub(crate) fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of dimensions.
    pub(crate) fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The bytes of all elements.
    pub(crate) fn bytes(&self) -> usize {
        self.dtype.byte_len(self.count()).unwrap_or(usize::MAX / 2)
    }

    /// The size of a dimension; 1 beyond the last.
    pub(crate) fn size(&self, axis: usize) -> usize {
        self.shape.get(axis).copied().unwrap_or(1)
    }

    /// The same tensor under another shape of as many elements.
    pub(crate) fn with_shape(&self, shape: &[usize]) -> Operand {
        Operand { shape: shape.into(), ..self.clone() }
    }
}

/// A tensor of a dispatch, as it is bound.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorArg {
    pub(crate) arg: Arg,
    /// Bindings that it takes.
    pub(crate) windows: usize,
    /// Bits of an element.
    pub(crate) bits: u32,
    /// The place among the numbers where the element stands at which it begins in its first binding.
    pub(crate) base: usize,
}

/// One dispatch: the program, its tensors, numbers and workgroups.
#[derive(Clone, Debug)]
pub(crate) struct Dispatch {
    pub(crate) program: Program,
    pub(crate) tensors: SmallVec<[TensorArg; 8]>,
    pub(crate) numbers: Vec<u32>,
    pub(crate) workgroups: [u32; 3],
}

/// A node with the shapes of a run. Kernels answer with dispatches, which are kept for runs of the same shapes.
pub(crate) struct OpCx<'a> {
    /// The operator.
    pub(crate) op: &'static str,
    /// The attributes.
    pub(crate) attrs: &'a Attributes,
    /// What bounds dispatches.
    pub(crate) limits: Limits,
    pub(crate) inputs: SmallVec<[Option<Operand>; 8]>,
    pub(crate) outputs: SmallVec<[Option<Operand>; 4]>,
    /// The inputs in the host's memory.
    pub(crate) host: SmallVec<[Option<TensorView<'a>>; 8]>,
}

impl OpCx<'_> {
    /// An input on the device that must be given.
    pub(crate) fn input(&self, index: usize) -> Result<&Operand> {
        self.find_input(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// An input on the device that may be left out.
    pub(crate) fn find_input(&self, index: usize) -> Option<&Operand> {
        self.inputs.get(index)?.as_ref()
    }

    /// An output that must be there.
    pub(crate) fn output(&self, index: usize) -> Result<&Operand> {
        self.find_output(index).ok_or_else(|| error!(Fail, "output {index} has no memory ready"))
    }

    /// An output, where somebody reads it.
    pub(crate) fn find_output(&self, index: usize) -> Option<&Operand> {
        self.outputs.get(index)?.as_ref()
    }

    /// An input in the host's memory, where it is given.
    pub(crate) fn find_host(&self, index: usize) -> Option<TensorView<'_>> {
        self.host.get(index).copied().flatten()
    }

    /// The integers of an input in the host's memory, where it is given.
    pub(crate) fn find_ints(&self, index: usize) -> Result<Option<Vec<i64>>> {
        self.find_host(index).map(|view| view.to_ints()).transpose()
    }

    /// The integers of an input in the host's memory.
    pub(crate) fn ints(&self, index: usize) -> Result<Vec<i64>> {
        self.find_ints(index)?.ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// An axis of an input, counted from the end where it is negative.
    pub(crate) fn axis(&self, axis: i64, rank: usize) -> Result<usize> {
        let counted = if axis < 0 { axis.saturating_add_unsigned(rank as u64) } else { axis };
        let counted = usize::try_from(counted).ok().filter(|axis| *axis < rank.max(1));
        counted.ok_or_else(|| error!(InvalidArgument, "axis {axis} is not one of a tensor of rank {rank}"))
    }

    /// A tensor in the workspace, behind what was `taken` before.
    pub(crate) fn workspace(&self, taken: &mut usize, dtype: DType, shape: &[usize]) -> Operand {
        let mut operand =
            Operand { arg: Arg::Workspace { offset: *taken, bytes: 0 }, dtype, shape: shape.into() };
        let (offset, bytes) = (*taken, operand.bytes());
        operand.arg = Arg::Workspace { offset, bytes };
        *taken = offset.saturating_add(bytes).next_multiple_of(256);
        operand
    }
}

/// Row-major strides of a shape, in elements.
pub(crate) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1usize;
    for (place, size) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        stride = stride.saturating_mul(*size);
    }
    strides
}

/// A walk over a shape with, for each tensor, the step along each axis; adjacent axes that all tensors walk as one are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Walk {
    /// The sizes of the axes.
    pub(crate) sizes: Vec<usize>,
    /// By tensor: the step along each axis, in elements.
    pub(crate) steps: Vec<Vec<i64>>,
}

impl Walk {
    /// The walk over `sizes` with these steps, of as few axes as it takes.
    pub(crate) fn new(sizes: &[usize], steps: &[Vec<i64>]) -> Walk {
        let mut walk = Walk { sizes: Vec::new(), steps: vec![Vec::new(); steps.len()] };
        for (axis, size) in sizes.iter().copied().enumerate() {
            let step = |all: &Vec<i64>| all.get(axis).copied().unwrap_or(0);
            let own: Vec<i64> = steps.iter().map(step).collect();
            let joins =
                |(last, own): (&Vec<i64>, &i64)| last.last() == Some(&own.saturating_mul(size as i64));
            match walk.sizes.last_mut() {
                _ if size == 1 => continue,
                Some(last) if walk.steps.iter().zip(&own).all(joins) => {
                    *last *= size;
                    for (steps, own) in walk.steps.iter_mut().zip(own) {
                        steps.last_mut().into_iter().for_each(|step| *step = own);
                    }
                }
                _ => {
                    walk.sizes.push(size);
                    walk.steps.iter_mut().zip(own).for_each(|(steps, own)| steps.push(own));
                }
            }
        }
        walk
    }

    /// The walk over an output whose inputs of these shapes broadcast.
    pub(crate) fn broadcast(output: &[usize], inputs: &[&[usize]]) -> Result<Walk> {
        let mut all = Vec::with_capacity(inputs.len());
        for shape in inputs {
            let skipped = output.len().checked_sub(shape.len());
            let skipped =
                skipped.ok_or_else(|| error!(Fail, "{shape:?} does not broadcast to {output:?}"))?;
            let mut steps = vec![0; skipped];
            for ((size, stride), whole) in shape.iter().zip(strides(shape)).zip(output.iter().skip(skipped)) {
                ensure!(size == whole || *size == 1, Fail, "{shape:?} does not broadcast to {output:?}");
                steps.push(if *size == 1 { 0 } else { stride as i64 });
            }
            all.push(steps);
        }
        Ok(Walk::new(output, &all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_that_all_walk_as_one_are_one() {
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 3, 4], &[3, 4]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![2, 12], steps: vec![vec![12, 1], vec![0, 1]] });
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 3, 4], &[]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![24], steps: vec![vec![1], vec![0]] });
        let walk = Walk::broadcast(&[2, 3, 4], &[&[2, 1, 4]]).unwrap();
        assert_eq!(walk, Walk { sizes: vec![2, 3, 4], steps: vec![vec![4, 0, 1]] });
        assert!(Walk::broadcast(&[2, 3], &[&[2]]).is_err());
    }
}
