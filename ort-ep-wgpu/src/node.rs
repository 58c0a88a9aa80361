//! A compiled node: its kernel's dispatches for the shapes that it met, and a run of them.

use std::collections::VecDeque;
use std::sync::Arc;

use ort_core::dim::{Bindings, Dim};
use ort_core::dtype::DType;
use ort_core::ep::operand::{Arg, BoundTensors, Key};
use ort_core::ep::{Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::{Attributes, ValueType};
use ort_core::tensor::{Shape, Tensor};
use ort_core::{Result, Within, ensure, error};
use parking_lot::Mutex;
use smallvec::SmallVec;
use xxhash_rust::xxh3::Xxh3;

use crate::bindings::Window;
use crate::device::Parts;
use crate::kept::Kept;
use crate::kernels::WgpuKernel;
use crate::launch::{Dispatch, OpCx, Operand, TensorArg};
use crate::memory::Region;
use crate::pipelines::{Program, When};

/// How many sets of shapes a node keeps its dispatches for.
const MOST_KEPT: usize = 8;

/// A node on the device.
pub(crate) struct Node {
    pub(crate) kernel: &'static WgpuKernel,
    pub(crate) op: &'static str,
    pub(crate) attrs: Attributes,
    /// The types of inputs and outputs, as far as they are given.
    pub(crate) input_types: SmallVec<[Option<DType>; 8]>,
    pub(crate) output_types: SmallVec<[Option<DType>; 4]>,
    pub(crate) parts: Arc<Parts>,
    /// What keeps its programs for later processes, and the hash by which.
    pub(crate) remembered: Option<(Arc<Kept>, u64)>,
    /// The last used first.
    pub(crate) kept: Mutex<VecDeque<KeptSteps>>,
}

/// The dispatches for some shapes.
pub(crate) struct KeptSteps {
    key: Key,
    steps: Arc<[Step]>,
}

/// A dispatch with its pipeline.
struct Step {
    pipeline: wgpu::ComputePipeline,
    dispatch: Dispatch,
}

impl Executable for Node {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let Some(workspace) = self.kernel.workspace else { return Ok(0) };
        let operand = |arg, dtype: &Option<DType>, shape: &Option<Shape>| {
            Some(Operand { arg, dtype: (*dtype)?, shape: shape.clone()? })
        };
        let inputs = self.input_types.iter().zip(shapes.inputs).enumerate();
        let outputs = self.output_types.iter().zip(shapes.outputs).enumerate();
        workspace(&OpCx {
            op: self.op,
            attrs: &self.attrs,
            limits: self.parts.gpu.limits,
            inputs: inputs.map(|(index, (ty, shape))| operand(Arg::Input(index), ty, shape)).collect(),
            outputs: outputs.map(|(index, (ty, shape))| operand(Arg::Output(index), ty, shape)).collect(),
            host: SmallVec::new(),
        })
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let _exclusive = self.parts.gpu.exclusive();
        let given = BoundTensors::new(cx, self.kernel.def.host_inputs, &self.input_types)?;
        let steps = self.steps(&given)?;
        for step in &*steps {
            self.record(step, &given)?;
        }
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The last user of a pipeline gives it back to the device.
        let _exclusive = self.parts.gpu.exclusive();
        self.kept.get_mut().clear();
    }
}

/// What sizes that are not known before the run are taken for, to foresee programs: one item of a
/// batch, of some length.
const FORESEEN: (i64, i64) = (1, 64);

impl Node {
    /// Compiles ahead on up to so many threads what such a node took in an earlier process; without
    /// one what a run probably takes.
    pub(crate) fn compile_ahead(&self, view: &NodeView<'_>, threads: usize) {
        let (pipelines, kept) = (&self.parts.pipelines, self.remembered.as_ref());
        let listed = kept.map(|(kept, likeness)| kept.programs(*likeness)).unwrap_or_default();
        let (programs, when) = match listed.is_empty() {
            true => (self.foreseen(view), When::Foreseen),
            false => (listed, When::Listed),
        };
        pipelines.prefetch(programs, when, kept.map(|(kept, _)| kept), threads);
    }

    /// The programs that a run probably takes. None where the host's inputs are not known.
    fn foreseen(&self, view: &NodeView<'_>) -> Vec<Program> {
        let (mut inputs, mut host) = (SmallVec::new(), SmallVec::new());
        for (index, dtype) in self.input_types.iter().enumerate() {
            let on_host = self.kernel.def.host_inputs.contains(&index);
            let constant = view.constant(index).map(Tensor::view);
            if on_host && view.input(index).is_some() && constant.is_none() {
                return Vec::new();
            }
            let operand = foreseen(Arg::Input(index), *dtype, &view.input_type(index));
            inputs.push(operand.filter(|_| !on_host));
            host.push(constant.filter(|_| on_host));
        }
        let outputs = self.output_types.iter().enumerate();
        let outputs =
            outputs.map(|(index, dtype)| foreseen(Arg::Output(index), *dtype, &view.output_type(index)));
        let (op, attrs, limits) = (self.op, &self.attrs, self.parts.gpu.limits);
        let cx = OpCx { op, attrs, limits, inputs, outputs: outputs.collect(), host };
        // What is wrong is said when it runs.
        let dispatches = (self.kernel.dispatches)(&cx).unwrap_or_default();
        dispatches.into_iter().map(|dispatch| dispatch.program).collect()
    }

    /// The dispatches for what is given, as they were for the same shapes before.
    fn steps(&self, given: &BoundTensors<'_>) -> Result<Arc<[Step]>> {
        let key = given.key()?;
        if let Some(steps) = self.find(&key) {
            return Ok(steps);
        }
        let cx = OpCx {
            op: self.op,
            attrs: &self.attrs,
            limits: self.parts.gpu.limits,
            inputs: given.inputs.clone(),
            outputs: given.outputs.clone(),
            host: given.host.iter().copied().collect(),
        };
        let mut steps = Vec::new();
        for dispatch in (self.kernel.dispatches)(&cx)? {
            if dispatch.workgroups.contains(&0) {
                continue;
            }
            let kept = self.remembered.as_ref().map(|(kept, _)| &**kept);
            self.parts.gpu.check()?;
            let pipeline = self.parts.pipelines.get(&dispatch.program, kept)?;
            steps.push(Step { pipeline, dispatch });
        }
        if let Some((kept, likeness)) = &self.remembered {
            kept.took(*likeness, steps.iter().map(|step| &step.dispatch.program));
        }
        let steps: Arc<[Step]> = steps.into();
        let mut kept = self.kept.lock();
        kept.push_front(KeptSteps { key, steps: steps.clone() });
        kept.truncate(MOST_KEPT);
        Ok(steps)
    }

    fn find(&self, key: &Key) -> Option<Arc<[Step]>> {
        let mut kept = self.kept.lock();
        let place = kept.iter().position(|kept| kept.key == *key)?;
        let found = kept.remove(place)?;
        let steps = found.steps.clone();
        kept.push_front(found);
        Some(steps)
    }

    fn record(&self, step: &Step, given: &BoundTensors<'_>) -> Result<()> {
        let mut windows: SmallVec<[Window; 8]> = SmallVec::new();
        let mut numbers: SmallVec<[u32; 128]> = SmallVec::from_slice(&step.dispatch.numbers);
        for tensor in &step.dispatch.tensors {
            let range =
                given.range(tensor.arg).ok_or_else(|| error!(Fail, "{:?} has no memory", tensor.arg))?;
            let region = self.parts.memory.resolve(range).within(|| format!("{:?}", tensor.arg))?;
            let base = self.parts.windows(region, tensor, &mut windows)?;
            numbers.iter_mut().skip(tensor.base).take(1).for_each(|number| *number = base);
        }
        let group = self.parts.groups.get(&windows)?;
        self.parts.recorder.dispatch(step.pipeline.clone(), group, &numbers, step.dispatch.workgroups)
    }
}

/// A hash of all that the programs of a node follow from before the shapes are known: its operator,
/// attributes, types, fixed sizes, and the constants that the host holds. Sizes that are not known
/// count alike, whatever symbols they are made of.
pub(crate) fn likeness(view: &NodeView<'_>, def: &KernelDef) -> u64 {
    let node = view.node;
    let mut text = format!("{} {} {:?}", node.spec.domain, node.spec.name, node.attrs);
    let mut add = |ty: &ValueType| {
        let dims = ty.shape().map(|shape| shape.iter().map(Dim::as_constant).collect::<Vec<_>>());
        text.push_str(&format!("\n{:?} {dims:?}", ty.dtype()));
    };
    (0..node.inputs.len()).for_each(|index| add(&view.input_type(index)));
    (0..node.outputs.len()).for_each(|index| add(&view.output_type(index)));
    let mut hash = Xxh3::new();
    hash.update(text.as_bytes());
    for index in def.host_inputs {
        let bytes: &[u8] = view.constant(*index).and_then(Tensor::bytes).map_or(&[], |bytes| bytes);
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.digest()
}

/// A tensor with sizes that a run may have.
fn foreseen(arg: Arg, dtype: Option<DType>, ty: &ValueType) -> Option<Operand> {
    let shape = ty.shape()?;
    let mut bindings = Bindings::new();
    for (axis, symbol) in shape
        .iter()
        .enumerate()
        .flat_map(|(axis, dim)| dim.symbols().into_iter().map(move |symbol| (axis, symbol)))
    {
        let (batch, other) = FORESEEN;
        bindings.insert(symbol, if axis == 0 { batch } else { other });
    }
    let size = |dim: &Dim| usize::try_from(dim.evaluate(&bindings).ok()?).ok();
    Some(Operand { arg, dtype: dtype?, shape: shape.iter().map(size).collect::<Option<Shape>>()? })
}

impl Parts {
    /// Adds the bindings of a tensor and returns the place of its first element in the first of
    /// them.
    fn windows(
        &self,
        region: Option<Region>,
        tensor: &TensorArg,
        windows: &mut SmallVec<[Window; 8]>,
    ) -> Result<u32> {
        let nothing = || Window { handle: u64::MAX, buffer: self.nothing.clone(), offset: 0, len: 256 };
        let Some(region) = region else {
            windows.extend((0..tensor.windows).map(|_| nothing()));
            return Ok(0);
        };
        let limits = self.gpu.limits;
        let start = region.offset - region.offset % limits.storage_alignment;
        let end = (region.offset + region.len).next_multiple_of(4);
        for window in 0..tensor.windows {
            let offset = start + window * limits.binding;
            windows.push(match end.checked_sub(offset) {
                None | Some(0) => nothing(),
                Some(rest) => Window {
                    handle: region.handle,
                    buffer: region.buffer.clone(),
                    offset,
                    len: rest.min(limits.binding),
                },
            });
        }
        let bits = (region.offset - start) * 8;
        ensure!(bits.is_multiple_of(tensor.bits as usize), Fail, "a tensor begins inside of an element");
        Ok((bits / tensor.bits as usize) as u32)
    }
}
