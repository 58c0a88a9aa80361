//! Compilation of a placed graph: kernels, constants in the memories that read them, and copy steps
//! between memories.
//!
//! Steps come out in the order of the graph's nodes; the pipeline's order stage changes it
//! afterwards.

use std::sync::Arc;

use ort_alloc::{Budget, Category, DeviceId, allocate_in};
use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};
use smallvec::SmallVec;

use super::context::{BuildCx, ConstantStreaming};
use super::{
    Body, Captured, ControlFlowPlacement, DeferredKernel, Nested, Origin, Partition, Program, Slot, SlotId,
    Step, StreamedKernel, Work,
};
use crate::cache::{Role, Store, tag};
use crate::ep::{Claim, Device, Executable, NodeView, OutputsFrom, Packing, guard, own_kernels};
use crate::ir::{Graph, Node, Subgraph, ValueId};
use crate::limits::check_deadline;
use crate::tensor::{Tensor, TensorMut};
use crate::{ErrorKind, Result, Within, error};

impl Program {
    /// Compiles the graph of a model, whose inputs and outputs are in host memory.
    pub(crate) fn build(graph: Arc<Graph>, partition: Partition, cx: &mut BuildCx<'_>) -> Result<Program> {
        let given = graph.inputs.iter().map(|&value| (value, DeviceId::HOST)).collect();
        let outputs = vec![DeviceId::HOST; graph.outputs.len()];
        Program::placed(graph, partition, (given, outputs), cx)
    }

    /// Compiles a graph whose nodes are placed. `given` are the values that each run is given, with
    /// their memories; `outputs` are the memories of the outputs.
    fn placed(
        mut graph: Arc<Graph>,
        Partition { nodes: claims, reasons, flows }: Partition,
        (given, outputs): (Vec<(ValueId, DeviceId)>, Vec<DeviceId>),
        cx: &mut BuildCx<'_>,
    ) -> Result<Program> {
        let updates = std::mem::take(&mut cx.updates);
        let count = graph.value_count();
        let mut builder = Builder {
            slots: Vec::with_capacity(count),
            steps: Vec::with_capacity(graph.nodes.len()),
            by_value: FxHashMap::with_capacity_and_hasher(count, FxBuildHasher),
            unread: count_reads(&graph),
            stays: if cx.windows == ConstantStreaming::Never {
                FxHashSet::default()
            } else {
                unstreamable_constants(&graph)
            },
        };
        let given = given.into_iter().enumerate();
        let given =
            given.map(|(index, (value, memory))| builder.add(value, memory, Origin::Given(index))).collect();
        // All constants begin on the host. Nodes that read them elsewhere add the uploads.
        for (&value, tensor) in &graph.constants {
            builder.add(value, DeviceId::HOST, Origin::Constant(tensor.clone()));
        }
        let claimed = claims.into_iter().zip(flows);
        // Nodes are in topological order, so the slots that a node reads exist already.
        for (index, (node, (claim, flow))) in graph.nodes.iter().zip(claimed).enumerate() {
            check_deadline(cx.until, "compiling")?;
            builder
                .node(NodeView { graph: &graph, node }, index, (claim, flow), cx)
                // ONNX Runtime's kernels throw what they refuse, and that is a `Fail`.
                .map_err(|problem| problem.reclassified(&REFUSALS, ErrorKind::Fail))
                .map_err(|problem| problem.help("check its attributes and the types of its inputs"))
                .within(|| node.place())?;
        }
        let outputs = graph.outputs.clone().into_iter().zip(outputs);
        let outputs = outputs.map(|(value, memory)| builder.slot(&graph, value, memory, cx));
        let outputs = outputs.collect::<Result<Vec<SlotId>>>()?;
        // Only now are all readers of each constant known, and the memories in which they read it.
        if !cx.runs_once {
            builder.align_constants(&graph, cx)?;
        }
        builder.forget_uploaded(&outputs, cx.is_mapped);
        builder.forget_consumed(&mut graph, cx.is_mapped);
        let Builder { slots, steps, .. } = builder;
        let number = cx.next_number();
        let file_order = None;
        let aligns = cx.runs_once;
        Ok(Program { number, graph, slots, steps, given, outputs, file_order, updates, reasons, aligns })
    }
}

/// The kinds in which a kernel refuses a node that it is compiled for.
const REFUSALS: [ErrorKind; 2] = [ErrorKind::InvalidGraph, ErrorKind::InvalidArgument];

/// The program under construction.
struct Builder {
    slots: Vec<Slot>,
    steps: Vec<Step>,
    /// The slot of each value in each memory.
    by_value: FxHashMap<(ValueId, DeviceId), SlotId>,
    /// By value index, how many readers need the value as it is, not packed.
    unread: Vec<usize>,
    /// Constants that are never streamed, because more than kernels read them.
    stays: FxHashSet<ValueId>,
}

/// Constants of fewer bytes stay on devices: uploading one in each run costs more than keeping it.
const MIN_STREAMED_BYTES: usize = 4 << 10;

/// The constants that are graph outputs, or that are read by nodes that alias their inputs or have
/// subgraphs.
fn unstreamable_constants(graph: &Graph) -> FxHashSet<ValueId> {
    // An alias outlives the step that the constant was uploaded for, and the steps of subgraphs
    // have no window.
    let hands_on = |node: &&Node| node.spec.view.is_some() || !node.subgraphs.is_empty();
    let read = graph.nodes.iter().filter(hands_on).flat_map(Node::reads);
    read.chain(graph.outputs.iter().copied()).filter(|value| graph.constants.contains_key(value)).collect()
}

/// Counts the readers of each value: nodes, and the graph's outputs.
fn count_reads(graph: &Graph) -> Vec<usize> {
    let mut reads = vec![0; graph.value_count()];
    let from_nodes = graph.nodes.iter().flat_map(Node::reads);
    for value in from_nodes.chain(graph.outputs.iter().copied()) {
        if let Some(reads) = reads.get_mut(value.index()) {
            *reads += 1;
        }
    }
    reads
}

impl Builder {
    fn add(&mut self, value: ValueId, memory: DeviceId, origin: Origin) -> SlotId {
        let id = SlotId(self.slots.len() as u32);
        self.slots.push(Slot { value, memory, origin });
        self.by_value.insert((value, memory), id);
        id
    }

    fn slot_at(&self, id: SlotId) -> Result<&Slot> {
        self.slots.get(id.index()).ok_or_else(|| error!(Fail, "there is no slot {}", id.index()))
    }

    /// Returns the slot of a value in a memory. If the value is elsewhere, adds a copy step.
    fn slot(&mut self, graph: &Graph, value: ValueId, memory: DeviceId, cx: &BuildCx<'_>) -> Result<SlotId> {
        if let Some(&slot) = self.by_value.get(&(value, memory)) {
            return Ok(slot);
        }
        // The host comes first, because copies from it need no second hop.
        let memories = std::iter::once(DeviceId::HOST).chain(cx.devices.iter().map(|device| device.memory()));
        let mut elsewhere = memories.filter_map(|other| self.by_value.get(&(value, other)).copied());
        let name = &graph.value(value).name;
        let from = elsewhere.next().ok_or_else(|| {
            error!(InvalidGraph, "'{name}' is not produced by any node and is not an input or a constant")
        })?;
        let from_memory = self.slot_at(from)?.memory;
        if from_memory != DeviceId::HOST && memory != DeviceId::HOST {
            // Devices copy to and from the host only, so a copy between two devices takes two
            // steps.
            self.copy(name, value, (from, from_memory), DeviceId::HOST, cx)?;
            return self.slot(graph, value, memory, cx);
        }
        self.copy(name, value, (from, from_memory), memory, cx)
    }

    /// Adds the slot of a value in another memory, and the step that copies it. One side is always
    /// the host.
    fn copy(
        &mut self,
        name: &Arc<str>,
        value: ValueId,
        (from, from_memory): (SlotId, DeviceId),
        to: DeviceId,
        cx: &BuildCx<'_>,
    ) -> Result<SlotId> {
        // The device at the other side does the copy.
        let foreign = if to == DeviceId::HOST { from_memory } else { to };
        let device = cx.devices.iter().position(|device| device.memory() == foreign);
        let device = device.ok_or_else(|| error!(Fail, "no device owns the memory of '{name}'"))?;
        // Constants are uploaded once, at build time, or streamed; neither needs a step.
        if let Origin::Constant(tensor) = &self.slot_at(from)?.origin {
            let device = device_at(cx.devices, device)?;
            let origin = match self.streams(value, tensor, &**device, cx)? {
                true => Origin::Streamed(tensor.clone()),
                false => {
                    let upload = || upload(tensor, &**device, cx.budget).map(Some);
                    let copy = cx.copies.one_of(tensor, device.memory(), upload)?;
                    Origin::Constant(copy.ok_or_else(|| error!(Fail, "a constant was not uploaded"))?)
                }
            };
            return Ok(self.add(value, to, origin));
        }
        let slot = self.add(value, to, Origin::Step);
        self.steps.push(Step {
            name: name.clone(),
            op: "Copy",
            node: None,
            device,
            claim: Claim {
                in_place: &[],
                shared_buffers: &[],
                host_inputs: &[],
                unaligned: &[],
                left_out: &[],
                outputs: OutputsFrom::Plan,
            },
            work: Work::Copy,
            inputs: vec![Some(from)],
            outputs: vec![Some(slot)],
            nested: Vec::new(),
        });
        Ok(slot)
    }

    /// Adds the step of a node, after the copy steps that its inputs and captures need.
    fn node(
        &mut self,
        view: NodeView<'_>,
        index: usize,
        ((device_index, claim), flow): ((usize, Claim), Option<Arc<ControlFlowPlacement>>),
        cx: &mut BuildCx<'_>,
    ) -> Result<()> {
        let NodeView { graph, node } = view;
        let flow = flow.map(Arc::unwrap_or_clone);
        let own = device_at(cx.devices, device_index)?.memory();
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for (position, value) in node.inputs.iter().enumerate() {
            let memory = match flow.as_ref().and_then(|flow| flow.inputs.get(position)) {
                Some(memory) => *memory,
                None if claim.host_inputs.contains(&position) => DeviceId::HOST,
                None => own,
            };
            inputs.push(value.map(|value| self.slot(graph, value, memory, cx)).transpose()?);
        }
        // Control flow may count for a device while the host's kernel drives its bodies.
        let (driver, memories, bodies) = match flow {
            Some(flow) => (flow.driver, flow.outputs, flow.bodies),
            None => (device_index, Vec::new(), Vec::new()),
        };
        let mut nested = Vec::with_capacity(node.subgraphs.len());
        for (subgraph, body) in node.subgraphs.iter().zip(bodies) {
            nested.push(self.nested(graph, subgraph, body, cx).within(|| subgraph.attr)?);
        }
        let work = self.compile(view, device_at(cx.devices, driver)?, cx)?;
        let outputs = node.outputs.iter().enumerate().map(|(position, value)| {
            let is_read = |value: &ValueId| self.unread.get(value.index()).is_some_and(|reads| *reads > 0);
            // The kernel skips an output without a reader if its claim says so.
            let value = value.filter(|value| is_read(value) || !claim.left_out.contains(&position))?;
            let memory = memories.get(position).copied().unwrap_or(own);
            Some(self.add(value, memory, Origin::Step))
        });
        let outputs = outputs.collect();
        self.steps.push(Step {
            name: node.name.clone(),
            op: node.spec.name,
            node: Some(index),
            device: device_index,
            claim,
            work,
            inputs,
            outputs,
            nested,
        });
        Ok(())
    }

    /// Compiles a node's kernel. Weights that it packed are released if nothing else reads them.
    fn compile(
        &mut self,
        view: NodeView<'_>,
        device: &Arc<dyn Device>,
        cx: &mut BuildCx<'_>,
    ) -> Result<Work> {
        let (work, consumed) = match counted(view, device, cx) {
            Some(Counted { kernel, packed_bytes, consumed }) if cx.streams => {
                (Work::Streamed(StreamedKernel::new(kernel, packed_bytes)), consumed)
            }
            Some(Counted { kernel, packed_bytes, consumed }) => {
                let set_aside = cx.budget.advance_for(Category::PackedWeights, packed_bytes)?;
                cx.deferred_bytes = cx.deferred_bytes.saturating_add(packed_bytes);
                let alone = folded_inputs(view, cx).then(|| view.graph.of_node(view.node));
                (Work::Deferred(DeferredKernel::new(kernel, packed_bytes, set_aside, alone)), consumed)
            }
            None => {
                let mut compile = cx.kernel(view, &**device, cx.packing)?;
                let kernel = guard::compile(&**device, &mut compile)?;
                let (packed_bytes, cached_bytes) = (compile.packed_bytes, compile.cached_bytes);
                let consumed = compile.consumed;
                cx.cached_bytes = cx.cached_bytes.saturating_add(cached_bytes);
                cx.packed_bytes = cx.packed_bytes.saturating_add(packed_bytes);
                (Work::Kernel(kernel), consumed)
            }
        };
        for (value, _) in view.node.inputs.iter().zip(consumed).filter(|(_, consumed)| *consumed) {
            let Some(value) = *value else { continue };
            if self.remove_reader(value) > 0 {
                continue;
            }
            let slot = self.by_value.get(&(value, DeviceId::HOST));
            let Some(slot) = slot.and_then(|slot| self.slots.get_mut(slot.index())) else { continue };
            let weight = std::mem::replace(&mut slot.origin, Origin::Consumed);
            // What is not packed yet was not read either.
            if let (Origin::Constant(tensor), Work::Kernel(_)) = (weight, &work) {
                (cx.release)(&tensor);
            }
        }
        Ok(work)
    }

    /// Whether a constant is streamed to a device.
    fn streams(
        &self,
        value: ValueId,
        tensor: &Tensor,
        device: &dyn Device,
        cx: &BuildCx<'_>,
    ) -> Result<bool> {
        let may = match cx.windows {
            ConstantStreaming::Never => false,
            ConstantStreaming::OfBounded => guard::memory_stats(device)?.limit.is_some(),
            ConstantStreaming::Always => true,
        };
        Ok(may
            && tensor.bytes().is_some_and(|bytes| bytes.len() >= MIN_STREAMED_BYTES)
            && !self.stays.contains(&value))
    }

    /// Removes one reader of a value; returns how many are left.
    fn remove_reader(&mut self, value: ValueId) -> usize {
        let Some(reads) = self.unread.get_mut(value.index()) else { return 0 };
        *reads = reads.saturating_sub(1);
        *reads
    }

    /// Compiles a subgraph. Constants that it captures are constants of its own graph.
    fn nested(
        &mut self,
        graph: &Graph,
        subgraph: &Subgraph,
        body: Body,
        cx: &mut BuildCx<'_>,
    ) -> Result<Nested> {
        let Body { graph: inner, captures: captured, partition, inputs, outputs } = body;
        if inner.broken.is_some() {
            // Inference found an error in this branch, so it has no steps. Taking it reports that
            // error.
            return Ok(Nested { program: Program::empty(inner, cx.next_number()), captures: Vec::new() });
        }
        // These constants are in the body's graph as well, so here they have one reader less.
        for capture in &subgraph.captures {
            if graph.constants.contains_key(&capture.outer) {
                self.remove_reader(capture.outer);
            }
        }
        let mut given: Vec<(ValueId, DeviceId)> = inner.inputs.iter().copied().zip(inputs).collect();
        let mut captures = Vec::new();
        for Captured { outer, inner, mut memories } in captured {
            if memories.is_empty() {
                memories.push(self.memory_of(outer, cx));
            }
            for memory in memories {
                captures.push(self.slot(graph, outer, memory, cx)?);
                given.push((inner, memory));
            }
        }
        // Runs stream constants only for steps of the outermost program, so those of bodies stay.
        let streams = std::mem::replace(&mut cx.streams, false);
        let windows = std::mem::replace(&mut cx.windows, ConstantStreaming::Never);
        let program = Program::placed(inner, partition, (given, outputs), cx);
        (cx.streams, cx.windows) = (streams, windows);
        Ok(Nested { program: program?, captures })
    }

    /// A memory that has the value, the host's if possible.
    fn memory_of(&self, value: ValueId, cx: &BuildCx<'_>) -> DeviceId {
        let devices = cx.devices.iter().map(|device| device.memory());
        let mut memories = std::iter::once(DeviceId::HOST).chain(devices);
        memories.find(|memory| self.by_value.contains_key(&(value, *memory))).unwrap_or(DeviceId::HOST)
    }

    /// Drops large unmapped constants that a device has and that the host does not read, such as
    /// weights that were folded for the device.
    fn forget_uploaded(&mut self, outputs: &[SlotId], is_mapped: &dyn Fn(&Tensor) -> bool) {
        let captures = self.steps.iter().flat_map(|step| &step.nested).flat_map(|nested| &nested.captures);
        let read = self.steps.iter().flat_map(|step| step.inputs.iter().flatten());
        let read: FxHashSet<SlotId> = read.chain(captures).chain(outputs).copied().collect();
        let is_there =
            |slot: &&Slot| slot.memory != DeviceId::HOST && matches!(slot.origin, Origin::Constant(_));
        let uploaded: FxHashSet<ValueId> =
            self.slots.iter().filter(is_there).map(|slot| slot.value).collect();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let is_read = slot.memory != DeviceId::HOST || read.contains(&SlotId(index as u32));
            let Origin::Constant(tensor) = &slot.origin else { continue };
            let is_large = tensor.byte_count() >= MIN_STREAMED_BYTES;
            if !is_read && is_large && uploaded.contains(&slot.value) && !is_mapped(tensor) {
                slot.origin = Origin::Consumed;
            }
        }
    }

    /// Drops unmapped weights that kernels packed, which would otherwise stay resident both raw and
    /// packed.
    fn forget_consumed(&self, graph: &mut Arc<Graph>, is_mapped: &dyn Fn(&Tensor) -> bool) {
        let consumed = self.slots.iter().filter(|slot| matches!(slot.origin, Origin::Consumed));
        let consumed: FxHashSet<ValueId> = consumed.map(|slot| slot.value).collect();
        // `get_mut` fails if the graph is shared with the model, which must stay complete.
        if let (false, Some(graph)) = (consumed.is_empty(), Arc::get_mut(graph)) {
            graph.constants.retain(|value, tensor| !consumed.contains(value) || is_mapped(tensor));
        }
    }

    /// Copies constants that are not aligned for their type, if a kernel reads them as typed
    /// slices. Small ones beside weights that are packed are copied, too: a read of one would keep
    /// many pages of packed weights around it resident.
    fn align_constants(&mut self, graph: &Graph, cx: &mut BuildCx<'_>) -> Result<()> {
        // Without packed weights, all pages of the file are read anyway.
        let copies_small = cx.defers && cx.deferred_bytes > 0;
        let mut typed_reads = vec![false; self.slots.len()];
        for step in &self.steps {
            for (position, slot) in step.inputs.iter().enumerate() {
                let Some(slot) = slot else { continue };
                if let Some(typed) = typed_reads.get_mut(slot.index()) {
                    *typed |= !step.claim.unaligned.contains(&position);
                }
            }
        }
        for (slot, _) in self.slots.iter_mut().zip(typed_reads).filter(|(_, typed)| *typed) {
            let Origin::Constant(tensor) = &slot.origin else { continue };
            let is_small = (1..=MOST_COPIED_BYTES).contains(&tensor.byte_count());
            let is_copied = !tensor.is_aligned() || (is_small && copies_small && (cx.is_mapped)(tensor));
            let copies = std::mem::take(&mut cx.copies);
            let copy = copies.one_of(tensor, DeviceId::HOST, || match cx.packing {
                // By the offset, not the address: the model may be mapped elsewhere when the entry
                // is read, and then the same blobs must be asked for.
                Packing::Cached(store) if !(cx.is_aligned_in_file)(tensor) => {
                    cached_copy(&graph.value(slot.value).name, tensor, store)
                }
                _ if is_copied => aligned(tensor, cx),
                _ => Ok(None),
            });
            cx.copies = copies;
            let copy = copy?;
            if let Some(copy) = copy {
                // The end of the build releases the pages of all others.
                if !is_small {
                    (cx.release)(tensor);
                }
                slot.origin = Origin::Constant(copy);
            }
        }
        Ok(())
    }
}

/// The most bytes of a constant that is copied although it could be read in the file: a bias, a
/// scale, the filters of a depthwise convolution.
const MOST_COPIED_BYTES: usize = 128 << 10;

/// A kernel whose weights were counted, not packed.
struct Counted {
    kernel: Box<dyn Executable>,
    packed_bytes: usize,
    /// By input, whether it is packed.
    consumed: SmallVec<[bool; 8]>,
}

/// Compiles a kernel without packing its weights, if they are packed by runs: it packs some, and
/// all of them from a mapped file.
fn counted(view: NodeView<'_>, device: &Arc<dyn Device>, cx: &BuildCx<'_>) -> Option<Counted> {
    // Weights are packed by runs on the host only. In device memory, constants are streamed
    // (`Origin::Streamed`).
    // The kernel of a custom operator packs nothing here, and making it may have effects.
    let is_custom = own_kernels(&view.node.attrs).is_some();
    if is_custom || !view.node.subgraphs.is_empty() || device.memory() != DeviceId::HOST {
        return None;
    }
    let weights = (0..view.node.inputs.len()).filter_map(|index| view.constant(index));
    let is_large = weights.map(Tensor::byte_count).any(|bytes| bytes >= LEAST_DEFERRED_BYTES);
    if !(cx.streams || (cx.defers && is_large)) {
        return None;
    }
    let mut compile = cx.kernel(view, &**device, Packing::Counted).ok()?;
    // An error here is dropped: compiling the kernel for good reports it.
    let kernel = guard::compile(&**device, &mut compile).ok()?;
    let (consumed, packed_bytes) = (compile.consumed, compile.packed_bytes);
    let weights = consumed.iter().enumerate().filter(|(_, consumed)| **consumed);
    let weights: SmallVec<[&Tensor; 4]> = weights.filter_map(|(index, _)| view.constant(index)).collect();
    // Weights packed from attributes, such as tree ensembles, are slow to pack again, so they
    // stay.
    let may_wait = |weight: &Tensor| (cx.is_mapped)(weight) || (!cx.streams && (cx.is_folded)(weight));
    let may = packed_bytes > 0 && !weights.is_empty() && weights.into_iter().all(may_wait);
    may.then_some(Counted { kernel, packed_bytes, consumed })
}

/// Whether a node reads constants that this build has folded.
fn folded_inputs(view: NodeView<'_>, cx: &BuildCx<'_>) -> bool {
    (0..view.node.inputs.len()).filter_map(|index| view.constant(index)).any(cx.is_folded)
}

/// Kernels whose weights are all smaller are packed by the build: compiling them a second time
/// would cost as much.
const LEAST_DEFERRED_BYTES: usize = 64 << 10;

/// Returns an aligned copy of a constant; `None` if nothing will run and the copy is only counted.
pub(crate) fn aligned(tensor: &Tensor, cx: &mut BuildCx<'_>) -> Result<Option<Tensor>> {
    let Some(bytes) = tensor.bytes() else { return Ok(None) };
    if matches!(cx.packing, Packing::Reserved) {
        cx.reserved.push(cx.budget.reserve(Category::Weights, bytes.len())?);
        return Ok(None);
    }
    let memory = &**ort_alloc::HostAllocator::global();
    let mut buffer = allocate_in(cx.budget, Category::Weights, memory, bytes.len(), 64)?;
    let to = buffer.bytes_mut().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
    let to = to.get_mut(..bytes.len()).ok_or_else(|| error!(Fail, "the copy is too small"))?;
    to.copy_from_slice(bytes);
    Tensor::from_buffer(tensor.dtype(), tensor.shape(), buffer).map(Some)
}

/// Returns the aligned copy of a constant from the compiled cache. While the entry is being
/// written, it writes the copy and returns `None`, because that program never runs.
fn cached_copy(name: &str, tensor: &Tensor, store: &Store) -> Result<Option<Tensor>> {
    let Some(bytes) = tensor.bytes() else { return Ok(None) };
    let tag = tag(Role::Aligned, &[name, tensor.dtype().name(), &format!("{:?}", tensor.shape())]);
    let Some(found) = store.take(tag, bytes.len())? else {
        store.put(tag, bytes)?;
        return Ok(None);
    };
    Tensor::from_bytes(tensor.dtype(), tensor.shape(), found).map(Some)
}

fn device_at(devices: &[Arc<dyn Device>], index: usize) -> Result<&Arc<dyn Device>> {
    devices.get(index).ok_or_else(|| error!(Fail, "there is no device {index}"))
}

/// Copies a host tensor to a device's memory.
fn upload(tensor: &Tensor, device: &dyn Device, budget: &Arc<Budget>) -> Result<Tensor> {
    let bytes = tensor.byte_count();
    let buffer = allocate_in(budget, Category::Weights, &*guard::allocator(device)?, bytes.max(1), 64)?;
    let copy = Tensor::from_buffer(tensor.dtype(), tensor.shape(), buffer)?;
    if let Some(range) = copy.view().device_range() {
        guard::copy(device, tensor.view(), TensorMut::device(tensor.dtype(), tensor.shape(), range))?;
    }
    Ok(copy)
}
