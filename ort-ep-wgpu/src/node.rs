//! A compiled node: caches its kernel's dispatches by shape, and records them in a run.

use std::sync::Arc;

use ort_core::dim::{Bindings, Dim};
use ort_core::dtype::DType;
use ort_core::ep::{Executable, IoShapes, KernelDef, NodeView, RunCx};
use ort_core::ir::ValueType;
use ort_core::tensor::{Shape, Tensor};
use ort_core::{Result, Within, ensure, error};
use ort_gpu::{Arg, BoundTensors, Key, LaunchCache, NodeInfo};
use smallvec::SmallVec;
use xxhash_rust::xxh3::Xxh3;

use crate::bindings::Window;
use crate::device_state::DeviceState;
use crate::kernels::WgpuKernel;
use crate::launch::{Dispatch, OpCx, Operand, TensorArg};
use crate::memory::Region;
use crate::pipeline_cache::PipelineCache;
use crate::pipelines::CompileTime;
use crate::program::Program;

/// A node on the device.
pub(crate) struct Node {
    pub(crate) kernel: &'static WgpuKernel,
    pub(crate) info: NodeInfo,
    pub(crate) state: Arc<DeviceState>,
    /// The on-disk cache of its programs, and its key there.
    pub(crate) remembered: Option<(Arc<PipelineCache>, u64)>,
    pub(crate) cache: LaunchCache<Key, Step>,
}

/// A dispatch and its pipeline.
pub(crate) struct Step {
    pipeline: wgpu::ComputePipeline,
    dispatch: Dispatch,
}

impl Executable for Node {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        let Some(workspace) = self.kernel.workspace else { return Ok(0) };
        workspace(&self.info.planned(shapes, self.state.gpu.limits))
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let _exclusive = self.state.gpu.exclusive();
        let given = BoundTensors::new(cx, self.kernel.def.host_inputs, &self.info.input_types)?;
        let steps = self.steps(&given)?;
        for step in &*steps {
            self.record(step, &given)?;
        }
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Dropping the last reference to a pipeline calls the device.
        let _exclusive = self.state.gpu.exclusive();
        self.cache.clear();
    }
}

/// The values assumed for symbolic dimensions to foresee programs: a batch of one item, and 64 for
/// every other axis.
const FORESEEN: (i64, i64) = (1, 64);

impl Node {
    /// Compiles the node's programs ahead, on up to `threads` threads: those that an earlier
    /// process used, or else those that a run probably uses.
    pub(crate) fn compile_ahead(&self, view: &NodeView<'_>, threads: usize) {
        let (pipelines, cache) = (&self.state.pipelines, self.remembered.as_ref());
        let listed = cache.map(|(cache, likeness)| cache.programs(*likeness)).unwrap_or_default();
        let (programs, when) = match listed.is_empty() {
            true => (self.foreseen(view), CompileTime::Foreseen),
            false => (listed, CompileTime::Listed),
        };
        pipelines.prefetch(programs, when, cache.map(|(cache, _)| cache), threads);
    }

    /// The programs that a run probably uses; empty if a host input is not constant.
    fn foreseen(&self, view: &NodeView<'_>) -> Vec<Program> {
        let (mut inputs, mut host) = (SmallVec::new(), SmallVec::new());
        for (index, dtype) in self.info.input_types.iter().enumerate() {
            let on_host = self.kernel.def.host_inputs.contains(&index);
            let constant = view.constant(index).map(Tensor::view);
            // The dispatches depend on the elements of such an input, which only the run knows.
            if on_host && view.input(index).is_some() && constant.is_none() {
                return Vec::new();
            }
            let operand = foreseen(Arg::Input(index), *dtype, &view.input_type(index));
            inputs.push(operand.filter(|_| !on_host));
            host.push(constant.filter(|_| on_host));
        }
        let outputs = self.info.output_types.iter().enumerate();
        let outputs =
            outputs.map(|(index, dtype)| foreseen(Arg::Output(index), *dtype, &view.output_type(index)));
        let (op, spec, attrs, limits) =
            (self.info.op, self.info.spec, &self.info.attrs, self.state.gpu.limits);
        let cx = OpCx { op, spec, attrs, limits, inputs, outputs: outputs.collect(), host };
        // An error here surfaces again in the run, if it is real.
        let dispatches = (self.kernel.dispatches)(&cx).unwrap_or_default();
        dispatches.into_iter().map(|dispatch| dispatch.program).collect()
    }

    /// Returns the dispatches for these tensors, from the cache if the shapes are known.
    fn steps(&self, given: &BoundTensors<'_>) -> Result<Arc<[Step]>> {
        let key = given.key()?;
        if let Some(steps) = self.cache.find(&key) {
            return Ok(steps);
        }
        let cx = self.info.bound(given, self.state.gpu.limits);
        let mut steps = Vec::new();
        for dispatch in (self.kernel.dispatches)(&cx)? {
            // An empty dispatch computes nothing, so do not compile its shader.
            if dispatch.workgroups.contains(&0) {
                continue;
            }
            let cache = self.remembered.as_ref().map(|(cache, _)| &**cache);
            self.state.gpu.check()?;
            let pipeline = self.state.pipelines.get(&dispatch.program, cache)?;
            steps.push(Step { pipeline, dispatch });
        }
        if let Some((cache, likeness)) = &self.remembered {
            cache.took(*likeness, steps.iter().map(|step| &step.dispatch.program));
        }
        let steps: Arc<[Step]> = steps.into();
        self.cache.insert(key, steps.clone());
        Ok(steps)
    }

    /// Binds the tensors of a dispatch and records it.
    fn record(&self, step: &Step, given: &BoundTensors<'_>) -> Result<()> {
        let mut windows: SmallVec<[Window; 8]> = SmallVec::new();
        let mut numbers: SmallVec<[u32; 128]> = SmallVec::from_slice(&step.dispatch.numbers);
        for tensor in &step.dispatch.tensors {
            let range =
                given.range(tensor.arg).ok_or_else(|| error!(Fail, "{:?} has no memory", tensor.arg))?;
            let region = self.state.memory.resolve(range).within(|| format!("{:?}", tensor.arg))?;
            let base = self.state.windows(region, tensor, &mut windows)?;
            // Runs of equal shapes differ in the base offset alone.
            numbers.iter_mut().skip(tensor.base).take(1).for_each(|number| *number = base);
        }
        let group = self.state.groups.get(&windows)?;
        self.state.recorder.dispatch(step.pipeline.clone(), group, &numbers, step.dispatch.workgroups)
    }
}

/// Hashes everything that a node's programs depend on before shapes are known: operator,
/// attributes, types, fixed sizes, and constants in host memory. All symbolic sizes hash alike,
/// whatever their symbols.
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
        // The length first, so that bytes cannot move from one input to the next unnoticed.
        hash.update(&(bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    hash.digest()
}

/// An operand with the sizes of [`FORESEEN`] for its symbols; `None` if its type is not known.
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

impl DeviceState {
    /// Adds the bindings of a tensor. Returns the index of its first element in the first of them.
    fn windows(
        &self,
        region: Option<Region>,
        tensor: &TensorArg,
        windows: &mut SmallVec<[Window; 8]>,
    ) -> Result<u32> {
        // Every binding needs a buffer. `u64::MAX` is no allocation's handle.
        let nothing = || Window { handle: u64::MAX, buffer: self.nothing.clone(), offset: 0, len: 256 };
        let Some(region) = region else {
            windows.extend((0..tensor.windows).map(|_| nothing()));
            return Ok(0);
        };
        let limits = self.gpu.limits;
        // Bind from the aligned offset before the tensor; the returned index skips what is in front
        // of it.
        let start = region.offset - region.offset % limits.storage_alignment;
        // Bindings are whole words. Allocations are padded, so the last word belongs to the
        // tensor.
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
