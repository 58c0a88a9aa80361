//! Compiled programs: kernels in execution order over slots.
//!
//! A slot is a value in one memory. A value that is read in two memories has two slots, and a copy
//! step between them. `build` compiles a program from a placed graph; the memory plan of a run is
//! in `crate::plan`, the run itself in `crate::run`.

mod build;
mod context;
mod copies;
mod deferred;
mod placed;
mod reason;
mod updates;

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_alloc::DeviceId;
use ort_alloc::fork::Mutex;

use crate::ep::{Claim, Device, Executable, RunCx};
use crate::ir::{Graph, ValueId};
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Result};

pub(crate) use build::aligned;
pub(crate) use context::{BuildCx, ConstantStreaming};
pub(crate) use copies::ConstantCopies;
pub(crate) use deferred::DeferredKernel;
pub use placed::Partition;
pub(crate) use placed::{Body, Captured, ControlFlowPlacement};
pub use reason::{Cluster, Reason};
pub(crate) use updates::{Update, find_updates};

/// A slot of one program: an index into [`Program::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlotId(pub(crate) u32);

impl SlotId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// The source of a slot's value.
#[derive(Debug)]
pub(crate) enum Origin {
    /// The caller, or the enclosing graph: an index into [`Program::given`].
    Given(usize),
    /// A weight that runs read.
    Constant(Tensor),
    /// A host weight that is streamed to a device: each run decides whether it stays there or is
    /// uploaded for the steps that read it.
    Streamed(Tensor),
    /// A weight that runs do not read any more: kernels have packed it, or a device has a copy.
    Consumed,
    /// A step computes it.
    Step,
}

/// A value in one memory.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) value: ValueId,
    pub(crate) memory: DeviceId,
    pub(crate) origin: Origin,
}

/// The work of a step.
pub(crate) enum Work {
    /// Runs a kernel.
    Kernel(Box<dyn Executable>),
    /// Runs a kernel whose weights are packed before its first run.
    Deferred(DeferredKernel),
    /// Runs a kernel whose packed weights may have to be packed first.
    Streamed(StreamedKernel),
    /// Copies a value between host and device memory.
    Copy,
}

impl Work {
    /// The kernel, to ask for its workspace; `None` for a copy.
    pub(crate) fn kernel(&self) -> Option<&dyn Executable> {
        match self {
            Work::Kernel(kernel) => Some(&**kernel),
            Work::Deferred(kernel) => Some(kernel.any()),
            Work::Streamed(kernel) => Some(&*kernel.counted),
            Work::Copy => None,
        }
    }
}

/// A step of the schedule.
pub(crate) struct Step {
    pub(crate) name: Arc<str>,
    pub(crate) op: &'static str,
    /// The index of its node; `None` for a copy.
    pub(crate) node: Option<usize>,
    /// The index of the device that runs the kernel or the copy.
    pub(crate) device: usize,
    pub(crate) claim: Claim,
    pub(crate) work: Work,
    pub(crate) inputs: Vec<Option<SlotId>>,
    pub(crate) outputs: Vec<Option<SlotId>>,
    pub(crate) nested: Vec<Nested>,
}

/// A subgraph of a control-flow step, compiled.
pub(crate) struct Nested {
    pub(crate) program: Program,
    /// The slots of the enclosing program that the subgraph captures. They follow the inputs in the
    /// nested program's given values, in this order.
    pub(crate) captures: Vec<SlotId>,
}

impl Step {
    /// All slots that the step reads, including captures.
    pub(crate) fn reads(&self) -> impl Iterator<Item = SlotId> + '_ {
        let captured = self.nested.iter().flat_map(|nested| nested.captures.iter().copied());
        self.inputs.iter().flatten().copied().chain(captured)
    }

    /// Names the step in errors.
    pub(crate) fn place(&self) -> String {
        format!("node '{}' ({})", self.name, self.op)
    }

    /// Adds the step to the error of a run that failed there. ONNX Runtime reports no invalid graph
    /// at this stage.
    pub(crate) fn failed(&self, problem: Error) -> Error {
        problem.reclassified(&[ErrorKind::InvalidGraph], ErrorKind::Fail).at_node(&self.name, self.op)
    }
}

/// A compiled graph.
pub(crate) struct Program {
    /// Its index among the programs that were compiled together.
    pub(crate) number: usize,
    /// Shared with the model if no rewrite or decomposition changed it.
    pub(crate) graph: Arc<Graph>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) steps: Vec<Step>,
    /// The slots that each run is given: the graph's inputs, then its captures.
    pub(crate) given: Vec<SlotId>,
    /// The slots of the graph's outputs; those of a model are in host memory.
    pub(crate) outputs: Vec<SlotId>,
    /// The indices of the steps in their order before they were reordered for memory; `None` if
    /// they were not.
    pub(crate) file_order: Option<Vec<usize>>,
    /// Outputs that are computed in the memory of inputs.
    pub(crate) updates: Vec<Update>,
    /// By node of the graph, why it runs where it does.
    pub(crate) reasons: Vec<Reason>,
    /// Whether each step copies the constants that it cannot read where they are. A program that
    /// runs more than once has aligned copies instead.
    pub(crate) aligns: bool,
}

impl Program {
    /// Reorders the steps; `order` lists their current indices.
    pub(crate) fn reorder(&mut self, order: &[usize]) {
        let mut steps: Vec<Option<Step>> = std::mem::take(&mut self.steps).into_iter().map(Some).collect();
        self.steps = order.iter().filter_map(|index| steps.get_mut(*index)?.take()).collect();
        // The inverse permutation: where each step of the old order is now.
        let mut file_order: Vec<usize> = (0..order.len()).collect();
        file_order.sort_by_key(|place| order.get(*place));
        self.file_order = Some(file_order);
    }

    /// A program without steps, for a branch that is an error if it is taken.
    pub(super) fn empty(graph: Arc<Graph>, number: usize) -> Program {
        let (slots, steps, given, outputs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (file_order, updates, reasons) = (None, Vec::new(), Vec::new());
        let aligns = false;
        Program { number, graph, slots, steps, given, outputs, file_order, updates, reasons, aligns }
    }

    /// Counts the nodes that each provider of `devices` runs, including those of subgraphs, and the
    /// copies between memories.
    pub(crate) fn counts(&self, devices: &[Arc<dyn Device>]) -> (String, usize) {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        let mut copies = 0;
        let mut programs = vec![self];
        while let Some(program) = programs.pop() {
            for step in &program.steps {
                programs.extend(step.nested.iter().map(|nested| &nested.program));
                match (step.node, devices.get(step.device)) {
                    (Some(_), Some(device)) => *counts.entry(device.info().provider).or_default() += 1,
                    _ => copies += 1,
                }
            }
        }
        let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        (counts.join(", "), copies)
    }

    /// The constants that runs still read, including those of subgraphs.
    pub(crate) fn constants(&self) -> Vec<&Tensor> {
        let own = self.slots.iter().filter_map(|slot| match &slot.origin {
            Origin::Constant(tensor) => Some(tensor),
            _ => None,
        });
        let inner = self.steps.iter().flat_map(|step| &step.nested);
        own.chain(inner.flat_map(|nested| nested.program.constants())).collect()
    }
}

/// A kernel whose packed weights can be evicted and packed again.
pub(crate) struct StreamedKernel {
    /// A kernel that only reports workspaces: its weights were counted, not packed.
    pub(crate) counted: Box<dyn Executable>,
    pub(crate) packed_bytes: usize,
    /// The kernel with its packed weights, while they are resident.
    pub(crate) resident: Mutex<Option<Arc<dyn Executable>>>,
}

impl StreamedKernel {
    pub(super) fn new(counted: Box<dyn Executable>, packed_bytes: usize) -> StreamedKernel {
        StreamedKernel { counted, packed_bytes, resident: Mutex::new(None) }
    }

    /// Runs the kernel. If it is not resident, `make` packs it; it then stays resident if `stays`,
    /// or is dropped after the run.
    pub(crate) fn run(
        &self,
        stays: bool,
        make: impl FnOnce() -> Result<Box<dyn Executable>>,
        cx: &mut RunCx<'_>,
    ) -> Result<()> {
        // The clone of the `Arc` keeps `Streams::evict` from dropping a kernel that is running.
        let resident = self.resident.lock().clone();
        if let Some(kernel) = resident {
            return kernel.run(cx);
        }
        let made = make()?;
        if !stays {
            return made.run(cx);
        }
        // Packed without the lock, which forks wait for. Only a run that is alone packs what stays,
        // and `Streams::evict` skips a kernel that is not resident.
        let kernel: Arc<dyn Executable> = Arc::from(made);
        *self.resident.lock() = Some(kernel.clone());
        kernel.run(cx)
    }
}
