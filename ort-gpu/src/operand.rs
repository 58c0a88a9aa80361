//! Operands, and the operator context: a node with the shapes of a run.

use ort_core::dtype::DType;
use ort_core::ir::Attributes;
use ort_core::ops::tensor::geometry::kernel_axis;
use ort_core::spec::OpSpec;
use ort_core::tensor::{Shape, TensorView};
use ort_core::{Result, error};
use smallvec::SmallVec;

/// The size of a tensor that no memory can hold. An offset of this size, rounded up, and a length
/// of this size add up without overflow.
const HUGE: usize = usize::MAX / 2;

/// Names the tensor that an operand is bound to at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// The node's input at this position.
    Input(usize),
    /// The node's output at this position.
    Output(usize),
    /// A byte range of the node's workspace.
    Workspace {
        /// The first byte.
        offset: usize,
        /// The length in bytes.
        bytes: usize,
    },
}

/// A tensor operand: its binding, element type and shape.
#[derive(Clone, Debug)]
pub struct Operand {
    /// What it is bound to.
    pub arg: Arg,
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub shape: Shape,
}

impl Operand {
    /// The number of elements; `usize::MAX` on overflow.
    pub fn count(&self) -> usize {
        self.shape.iter().copied().fold(1, usize::saturating_mul)
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The bytes of all elements; a huge number on overflow.
    pub fn bytes(&self) -> usize {
        self.dtype.byte_len(self.count()).unwrap_or(HUGE).min(HUGE)
    }

    /// The size of a dimension; 1 for axes past the last.
    pub fn size(&self, axis: usize) -> usize {
        self.shape.get(axis).copied().unwrap_or(1)
    }

    /// The same tensor reshaped to as many elements.
    pub fn with_shape(&self, shape: &[usize]) -> Operand {
        Operand { shape: shape.into(), ..self.clone() }
    }
}

/// A node with the shapes of a run, and the device limits (`limits`) that its launches must
/// respect.
pub struct OpCx<'a, L> {
    /// The operator.
    pub op: &'static str,
    /// The operator's record.
    pub spec: &'static OpSpec,
    /// The attributes.
    pub attrs: &'a Attributes,
    /// The device limits.
    pub limits: L,
    /// The inputs in device memory.
    pub inputs: SmallVec<[Option<Operand>; 8]>,
    /// The outputs; `None` for one without a reader.
    pub outputs: SmallVec<[Option<Operand>; 4]>,
    /// The inputs in host memory.
    pub host: SmallVec<[Option<TensorView<'a>>; 8]>,
}

impl<L> OpCx<'_, L> {
    /// Returns a required input in device memory.
    pub fn input(&self, index: usize) -> Result<&Operand> {
        self.find_input(index).ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// Returns an optional input in device memory.
    pub fn find_input(&self, index: usize) -> Option<&Operand> {
        self.inputs.get(index)?.as_ref()
    }

    /// Returns the shape of an optional input in device memory.
    pub fn find_shape(&self, index: usize) -> Option<&[usize]> {
        self.find_input(index).map(|operand| &*operand.shape)
    }

    /// Returns a required output.
    pub fn output(&self, index: usize) -> Result<&Operand> {
        self.find_output(index).ok_or_else(|| error!(Fail, "output {index} has no memory ready"))
    }

    /// Returns an output, if it has a reader.
    pub fn find_output(&self, index: usize) -> Option<&Operand> {
        self.outputs.get(index)?.as_ref()
    }

    /// Returns an input in host memory, if present.
    pub fn find_host(&self, index: usize) -> Option<TensorView<'_>> {
        self.host.get(index).copied().flatten()
    }

    /// Returns the integers of an optional input in host memory.
    pub fn find_ints(&self, index: usize) -> Result<Option<Vec<i64>>> {
        self.find_host(index).map(|view| view.to_ints()).transpose()
    }

    /// Returns the integers of a required input in host memory.
    pub fn ints(&self, index: usize) -> Result<Vec<i64>> {
        self.find_ints(index)?.ok_or_else(|| error!(InvalidArgument, "input {index} is missing"))
    }

    /// Normalizes an axis of a tensor of `rank` dimensions; a negative one counts from the end.
    pub fn axis(&self, axis: i64, rank: usize) -> Result<usize> {
        kernel_axis(axis, rank)
    }

    /// Appends a tensor to the workspace after the `taken` bytes, and advances `taken`.
    pub fn workspace(&self, taken: &mut usize, dtype: DType, shape: &[usize]) -> Operand {
        let mut operand =
            Operand { arg: Arg::Workspace { offset: *taken, bytes: 0 }, dtype, shape: shape.into() };
        let (offset, bytes) = (*taken, operand.bytes());
        operand.arg = Arg::Workspace { offset, bytes };
        // The alignment of device allocations, for each tensor in the workspace.
        *taken = offset.saturating_add(bytes).min(HUGE).next_multiple_of(256);
        operand
    }
}

#[cfg(test)]
mod tests {
    use ort_core::spec::OP;

    use super::*;

    static NODE: OpSpec = OP;

    #[test]
    fn workspaces_that_overflow_stay_huge() {
        let attrs = Attributes::default();
        let (inputs, outputs, host) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        let cx = OpCx { op: NODE.name, spec: &NODE, attrs: &attrs, limits: (), inputs, outputs, host };
        let mut taken = 0;
        let mut append = |dtype, shape: &[usize]| match cx.workspace(&mut taken, dtype, shape).arg {
            Arg::Workspace { offset, bytes } => (offset, bytes),
            other => panic!("{other:?}"),
        };
        assert_eq!(append(DType::F32, &[3]), (0, 12));
        assert_eq!(append(DType::F32, &[0, usize::MAX, 2]), (256, 0));
        assert_eq!(append(DType::U8, &[usize::MAX, 2]), (256, HUGE));
        for dtype in [DType::U8, DType::F32, DType::F64] {
            let (offset, bytes) = append(dtype, &[usize::MAX, 2]);
            assert!(offset > HUGE && bytes == HUGE && offset.checked_add(bytes).is_some(), "{dtype}");
        }
    }
}
