//! The tensors bound to a node in one run, and the launch-cache key that they make.

use ort_core::dtype::DType;
use ort_core::ep::{NewTensor, RunCx};
use ort_core::tensor::{DeviceRange, TensorView};
use ort_core::{Result, ensure, error};
use smallvec::SmallVec;

use crate::operand::{Arg, Operand};

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
