//! Operands, broadcast iteration and launch-cache keys for kernels of devices with their own
//! memory.
//!
//! Such a kernel turns the shapes of a run into the work to launch. A provider caches that answer
//! under a [`Key`].

use smallvec::SmallVec;

use super::{NewTensor, RunCx};
use crate::dtype::DType;
use crate::ir::Attributes;
use crate::spec::OpSpec;
use crate::tensor::{DeviceRange, Shape, TensorView};
use crate::{Result, ensure, error};

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
    /// The number of elements.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// The bytes of all elements; a huge number on overflow.
    pub fn bytes(&self) -> usize {
        self.dtype.byte_len(self.count()).unwrap_or(usize::MAX / 2)
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
        let counted = if axis < 0 { axis.saturating_add_unsigned(rank as u64) } else { axis };
        // Axis 0 is valid for a scalar, too.
        let counted = usize::try_from(counted).ok().filter(|axis| *axis < rank.max(1));
        counted.ok_or_else(|| error!(InvalidArgument, "axis {axis} is out of range for rank {rank}"))
    }

    /// Appends a tensor to the workspace after the `taken` bytes, and advances `taken`.
    pub fn workspace(&self, taken: &mut usize, dtype: DType, shape: &[usize]) -> Operand {
        let mut operand =
            Operand { arg: Arg::Workspace { offset: *taken, bytes: 0 }, dtype, shape: shape.into() };
        let (offset, bytes) = (*taken, operand.bytes());
        operand.arg = Arg::Workspace { offset, bytes };
        // The alignment of device allocations, for each tensor in the workspace.
        *taken = offset.saturating_add(bytes).next_multiple_of(256);
        operand
    }
}

/// Row-major strides of a shape, in elements.
pub fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    let mut stride = 1usize;
    for (place, size) in strides.iter_mut().zip(shape).rev() {
        *place = stride;
        stride = stride.saturating_mul(*size);
    }
    strides
}

/// A strided loop nest over a shape, with one stride per tensor and axis. Adjacent axes that every
/// tensor strides contiguously are merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Walk {
    /// The loop extents.
    pub sizes: Vec<usize>,
    /// The stride along each axis, in elements, per tensor.
    pub steps: Vec<Vec<i64>>,
}

impl Walk {
    /// Builds the loop nest over `sizes` with these strides, merged into as few axes as possible.
    pub fn new(sizes: &[usize], steps: &[Vec<i64>]) -> Walk {
        let mut walk = Walk { sizes: Vec::new(), steps: vec![Vec::new(); steps.len()] };
        for (axis, size) in sizes.iter().copied().enumerate() {
            let step = |all: &Vec<i64>| all.get(axis).copied().unwrap_or(0);
            let own: Vec<i64> = steps.iter().map(step).collect();
            let joins =
                |(last, own): (&Vec<i64>, &i64)| last.last() == Some(&own.saturating_mul(size as i64));
            match walk.sizes.last_mut() {
                // An axis of size 1 never advances, so its stride is irrelevant.
                _ if size == 1 => continue,
                // Merge if the previous axis's stride is this stride times extent for every tensor.
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

    /// Builds the loop nest over an output for inputs that broadcast to it.
    pub fn broadcast(output: &[usize], inputs: &[&[usize]]) -> Result<Walk> {
        let mut all = Vec::with_capacity(inputs.len());
        for shape in inputs {
            let skipped = output.len().checked_sub(shape.len());
            let skipped =
                skipped.ok_or_else(|| error!(Fail, "shape {shape:?} does not broadcast to {output:?}"))?;
            let mut steps = vec![0; skipped];
            for ((size, stride), whole) in shape.iter().zip(strides(shape)).zip(output.iter().skip(skipped)) {
                ensure!(
                    size == whole || *size == 1,
                    Fail,
                    "shape {shape:?} does not broadcast to {output:?}"
                );
                // A broadcast axis has stride 0: every iteration reads the same element.
                steps.push(if *size == 1 { 0 } else { stride as i64 });
            }
            all.push(steps);
        }
        Ok(Walk::new(output, &all))
    }
}

/// The cache key of a kernel's launches: types, shapes, in-place aliases, and the contents of host
/// inputs.
#[derive(Debug, PartialEq, Eq)]
pub struct Key {
    words: SmallVec<[u64; 48]>,
    host: Vec<u8>,
}

type Operands<const N: usize> = SmallVec<[Option<Operand>; N]>;

/// The tensors bound to a node in one run.
pub struct BoundTensors<'a> {
    /// The inputs in device memory, by position.
    pub inputs: Operands<8>,
    /// The outputs, by position; `None` for one without a reader.
    pub outputs: Operands<4>,
    /// The inputs in host memory, by position.
    pub host: SmallVec<[Option<TensorView<'a>>; 8]>,
    /// The device memory of the inputs.
    pub input_ranges: SmallVec<[Option<DeviceRange<'a>>; 8]>,
    /// The device memory of the outputs.
    pub output_ranges: SmallVec<[Option<DeviceRange<'a>>; 4]>,
    /// The workspace.
    pub workspace: Option<DeviceRange<'a>>,
}

impl<'a> BoundTensors<'a> {
    /// Collects the tensors of a run. An input that an output overwrites in place is bound to that
    /// output. `host_inputs` lists the positions of inputs in host memory; `input_types` has the
    /// type of every input, because an in-place input has no view of its own.
    pub fn new(
        cx: &mut RunCx<'a>,
        host_inputs: &[usize],
        input_types: &[Option<DType>],
    ) -> Result<BoundTensors<'a>> {
        let (mut outputs, mut output_ranges, mut taken) =
            (SmallVec::new(), SmallVec::new(), SmallVec::<[_; 4]>::new());
        for index in 0..cx.output_count() {
            if !cx.wants(index) {
                outputs.push(None);
                output_ranges.push(None);
                continue;
            }
            let in_place = cx.in_place(index);
            let tensor = cx.output(index)?;
            let range = tensor.device_range();
            let range = range.ok_or_else(|| error!(Fail, "output {index} is not in the device's memory"))?;
            let operand =
                Operand { arg: Arg::Output(index), dtype: tensor.dtype(), shape: tensor.shape().into() };
            taken.extend(in_place.map(|input| (input, operand.clone())));
            outputs.push(Some(operand));
            output_ranges.push(Some(range));
        }
        let mut given = BoundTensors::of_inputs(cx, host_inputs)?;
        for (index, output) in taken {
            let own_type = input_types.get(index).copied().flatten();
            // An output may have another element type of the same width, so keep the input's own.
            let shared = Operand { dtype: own_type.unwrap_or(output.dtype), ..output };
            if let Some(input) = given.inputs.get_mut(index) {
                input.get_or_insert(shared);
            }
        }
        Ok(BoundTensors { outputs, output_ranges, ..given })
    }

    /// Collects the inputs and the workspace of a run, for a kernel that allocates its outputs. It
    /// adds these with [`Self::with_outputs`].
    pub fn of_inputs(cx: &RunCx<'a>, host_inputs: &[usize]) -> Result<BoundTensors<'a>> {
        let (mut inputs, mut input_ranges, mut host) = (SmallVec::new(), SmallVec::new(), SmallVec::new());
        for index in 0..cx.input_count() {
            let view = cx.find_input(index);
            let range = view.and_then(|view| view.device_range());
            let on_host = host_inputs.contains(&index);
            ensure!(
                view.is_none() || on_host || range.is_some(),
                Fail,
                "input {index} is not in the device's memory"
            );
            host.push(view.filter(|_| on_host));
            inputs.push(view.filter(|_| !on_host).map(|view| Operand {
                arg: Arg::Input(index),
                dtype: view.dtype(),
                shape: view.shape().into(),
            }));
            input_ranges.push(range);
        }
        let (outputs, output_ranges) = (SmallVec::new(), SmallVec::new());
        let workspace = cx.device_workspace();
        Ok(BoundTensors { inputs, outputs, host, input_ranges, output_ranges, workspace })
    }

    /// Adds the outputs that the kernel allocated; `None` for one without a reader.
    pub fn with_outputs<'b>(&self, made: &'b [Option<NewTensor>]) -> Result<BoundTensors<'b>>
    where
        'a: 'b,
    {
        let mut given = BoundTensors {
            inputs: self.inputs.clone(),
            outputs: SmallVec::new(),
            host: self.host.iter().copied().collect(),
            input_ranges: self.input_ranges.iter().copied().collect(),
            output_ranges: SmallVec::new(),
            workspace: self.workspace,
        };
        for (index, tensor) in made.iter().enumerate() {
            let view = tensor.as_ref().map(NewTensor::view).transpose()?;
            let range = view.and_then(|view| view.device_range());
            ensure!(range.is_some() || view.is_none(), Fail, "output {index} is not in the device's memory");
            given.outputs.push(view.map(|view| Operand {
                arg: Arg::Output(index),
                dtype: view.dtype(),
                shape: view.shape().into(),
            }));
            given.output_ranges.push(range);
        }
        Ok(given)
    }

    /// Returns the key under which the launches for these tensors are cached.
    pub fn key(&self) -> Result<Key> {
        let mut key = Key { words: SmallVec::new(), host: Vec::new() };
        for operand in self.inputs.iter().chain(&self.outputs) {
            let Some(operand) = operand else {
                // Marks an absent operand, so that what follows keeps its position.
                key.words.push(u64::MAX);
                continue;
            };
            // Bit 32 tells outputs from inputs: an input in place of an output has that output's
            // binding.
            let place = match operand.arg {
                Arg::Input(index) => index as u64,
                Arg::Output(index) => 1 << 32 | index as u64,
                Arg::Workspace { .. } => u64::MAX - 1,
            };
            key.words.extend([place, operand.dtype as u64, operand.rank() as u64]);
            key.words.extend(operand.shape.iter().map(|size| *size as u64));
        }
        // Launches depend on the values of host inputs, such as axes or a shape, so these are part
        // of the key.
        for view in self.host.iter().flatten() {
            key.words.extend([view.dtype() as u64, view.rank() as u64]);
            key.words.extend(view.shape().iter().map(|size| *size as u64));
            key.host.extend_from_slice(view.bytes()?);
        }
        Ok(key)
    }

    /// The device memory of a tensor: `None` if it is absent or in host memory, or if a workspace
    /// range exceeds the workspace.
    pub fn range(&self, arg: Arg) -> Option<DeviceRange<'a>> {
        match arg {
            Arg::Input(index) => self.input_ranges.get(index).copied().flatten(),
            Arg::Output(index) => self.output_ranges.get(index).copied().flatten(),
            Arg::Workspace { offset, bytes } => {
                let all = self.workspace.filter(|range| offset + bytes <= range.len);
                all.map(|range| DeviceRange { offset: range.offset + offset, len: bytes, ..range })
            }
        }
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
