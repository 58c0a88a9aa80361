//! A compiled graph: kernels in schedule order over slots.
//!
//! A slot is a value in one memory. A value that two devices read has two slots, with a copy step
//! between them.

mod build;
mod placed;
mod reason;
mod updates;

use std::collections::BTreeMap;
use std::sync::Arc;

use ort_alloc::DeviceId;
use parking_lot::Mutex;

use crate::Result;
use crate::ep::{Claim, Device, Executable, RunCx};
use crate::ir::{Graph, ValueId};
use crate::tensor::Tensor;

pub(crate) use build::{BuildCx, Windowing, aligned};
pub use placed::Partition;
pub(crate) use placed::{Body, Captured, ControlFlowPlacement};
pub use reason::{Cluster, Reason};
pub(crate) use updates::{Update, find_updates};

/// A slot of one program: its place in [`Program::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SlotId(pub(crate) u32);

impl SlotId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a slot's value comes from.
#[derive(Debug)]
pub(crate) enum Origin {
    /// The caller, or the enclosing graph: the position among [`Program::given`].
    Given(usize),
    /// A weight that runs read.
    Constant(Tensor),
    /// A weight of the host that is brought to a device for runs: it stays there, or comes for the
    /// steps that read it.
    Streamed(Tensor),
    /// A weight that kernels packed: runs do not read it.
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

/// What a step does.
pub(crate) enum Work {
    /// Runs a kernel.
    Kernel(Box<dyn Executable>),
    /// Runs a kernel whose packed weights may have to be packed first.
    Streamed(StreamedKernel),
    /// Copies a value between the host's memory and the device's.
    Copy,
}

impl Work {
    /// The kernel, to ask for its workspace; none for a copy.
    pub(crate) fn kernel(&self) -> Option<&dyn Executable> {
        match self {
            Work::Kernel(kernel) => Some(&**kernel),
            Work::Streamed(kernel) => Some(&*kernel.counted),
            Work::Copy => None,
        }
    }
}

/// One step of the schedule.
pub(crate) struct Step {
    pub(crate) name: Arc<str>,
    pub(crate) op: &'static str,
    /// The node it runs; none for a copy.
    pub(crate) node: Option<usize>,
    pub(crate) device: usize,
    pub(crate) claim: Claim,
    pub(crate) work: Work,
    pub(crate) inputs: Vec<Option<SlotId>>,
    pub(crate) outputs: Vec<Option<SlotId>>,
    pub(crate) nested: Vec<Nested>,
}

/// A subgraph of a control-flow step.
pub(crate) struct Nested {
    pub(crate) program: Program,
    /// The enclosing program's slots that it captures, in the order of the program's given values
    /// after its inputs.
    pub(crate) captures: Vec<SlotId>,
}

impl Step {
    /// All slots that the step reads, captures included.
    pub(crate) fn reads(&self) -> impl Iterator<Item = SlotId> + '_ {
        let captured = self.nested.iter().flat_map(|nested| nested.captures.iter().copied());
        self.inputs.iter().flatten().copied().chain(captured)
    }

    /// How errors name it.
    pub(crate) fn place(&self) -> String {
        format!("node '{}' ({})", self.name, self.op)
    }
}

/// A compiled graph.
pub(crate) struct Program {
    /// Its number among the programs that were compiled together, from 0.
    pub(crate) number: usize,
    /// Shared with the model, where nothing was decomposed.
    pub(crate) graph: Arc<Graph>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) steps: Vec<Step>,
    /// Slots that are given at each run: the graph's inputs, then captures.
    pub(crate) given: Vec<SlotId>,
    /// The slots of the graph's outputs: of a model in host memory.
    pub(crate) outputs: Vec<SlotId>,
    /// The steps in the order of the file; none where they stand in it.
    pub(crate) file_order: Option<Vec<usize>>,
    /// Outputs in the memory of inputs.
    pub(crate) updates: Vec<Update>,
    /// By node of the graph: why it runs where it does.
    pub(crate) reasons: Vec<Reason>,
}

impl Program {
    /// Puts the steps in another order: the place of each in the order so far.
    pub(crate) fn reorder(&mut self, order: &[usize]) {
        let mut steps: Vec<Option<Step>> = std::mem::take(&mut self.steps).into_iter().map(Some).collect();
        self.steps = order.iter().filter_map(|index| steps.get_mut(*index)?.take()).collect();
        let mut file_order: Vec<usize> = (0..order.len()).collect();
        file_order.sort_by_key(|place| order.get(*place));
        self.file_order = Some(file_order);
    }

    /// A program without steps, for a branch that cannot run.
    pub(super) fn empty(graph: Arc<Graph>, number: usize) -> Program {
        let (slots, steps, given, outputs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (file_order, updates, reasons) = (None, Vec::new(), Vec::new());
        Program { number, graph, slots, steps, given, outputs, file_order, updates, reasons }
    }

    /// How many nodes each provider of `devices` runs, those of subgraphs included, and how many
    /// copies there are between memories.
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

    /// The constants that runs still read.
    pub(crate) fn constants(&self) -> Vec<&Tensor> {
        let own = self.slots.iter().filter_map(|slot| match &slot.origin {
            Origin::Constant(tensor) => Some(tensor),
            _ => None,
        });
        let inner = self.steps.iter().flat_map(|step| &step.nested);
        own.chain(inner.flat_map(|nested| nested.program.constants())).collect()
    }
}

/// A kernel that can be made without its packed weights, and with them again.
pub(crate) struct StreamedKernel {
    /// Tells workspaces; its weights are counted, not packed.
    pub(crate) counted: Box<dyn Executable>,
    pub(crate) packed_bytes: usize,
    /// The packed kernel, as long as it stays.
    pub(crate) resident: Mutex<Option<Arc<dyn Executable>>>,
}

impl StreamedKernel {
    pub(super) fn new(counted: Box<dyn Executable>, packed_bytes: usize) -> StreamedKernel {
        StreamedKernel { counted, packed_bytes, resident: Mutex::new(None) }
    }

    /// Runs the kernel, packed by `make` where it is not resident; it then `stays`, or is dropped
    /// after the run.
    pub(crate) fn run(
        &self,
        stays: bool,
        make: impl FnOnce() -> Result<Box<dyn Executable>>,
        cx: &mut RunCx<'_>,
    ) -> Result<()> {
        let mut resident = self.resident.lock();
        if let Some(kernel) = resident.clone() {
            drop(resident);
            return kernel.run(cx);
        }
        if stays {
            let kernel: Arc<dyn Executable> = Arc::from(make()?);
            *resident = Some(kernel.clone());
            drop(resident);
            return kernel.run(cx);
        }
        drop(resident);
        make()?.run(cx)
    }
}
