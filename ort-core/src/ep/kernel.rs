//! Kernels as providers register them, and the table that finds one for a node.

use rustc_hash::FxHashMap;

use super::{CompileCx, NodeView, RunCx};
use crate::Result;
use crate::dtype::TypeSet;
use crate::tensor::Shape;

/// A compiled node.
pub trait Executable: Send + Sync {
    /// The bytes of scratch memory that a run with these shapes needs, at a 64-byte boundary: more
    /// than [`IoShapes::room`] only where it cannot do with less. Outputs that it hands over itself
    /// ([`OutputsFrom::Kernel`]) may have no shape yet.
    fn workspace(&self, _shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(0)
    }

    /// The bytes of the heap that a run with these shapes takes at most beside its workspace and
    /// outputs: tables, and what libraries allocate. The plan counts them for the step, and they
    /// are reserved while it runs. What no data makes larger, up to some 64 KiB, may be left out.
    fn heap(&self, _shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(0)
    }

    /// Computes the outputs. May be called from several threads at once.
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()>;

    /// What computed the outputs in a recent run, for profiles: kernels, or a library and its
    /// algorithm. None where there is no choice to tell.
    fn kernels(&self) -> Option<String> {
        None
    }
}

impl<F> Executable for F
where
    F: Fn(&mut RunCx<'_>) -> Result<()> + Send + Sync,
{
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        self(cx)
    }
}

/// The concrete shapes of a node's tensors; none for one left out or not a tensor.
#[derive(Debug, Clone, Copy)]
pub struct IoShapes<'a> {
    /// Shapes of the inputs.
    pub inputs: &'a [Option<Shape>],
    /// Shapes of the outputs.
    pub outputs: &'a [Option<Shape>],
    /// The threads that the run may use.
    pub threads: usize,
    /// The bytes that a workspace is to have at most where the kernel has ways to do with less, as
    /// algorithms of libraries are: what the limits leave beside all that is alive then.
    /// `usize::MAX` where nothing bounds it.
    pub room: usize,
}

impl IoShapes<'_> {
    /// The shape of an input; empty where it is left out.
    pub fn input(&self, index: usize) -> &[usize] {
        self.inputs.get(index).and_then(Option::as_deref).unwrap_or(&[])
    }

    /// The shape of an output; empty where it is left out.
    pub fn output(&self, index: usize) -> &[usize] {
        self.outputs.get(index).and_then(Option::as_deref).unwrap_or(&[])
    }
}

/// Who provides the memory of a kernel's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputsFrom {
    /// The plan: the kernel writes where it is told.
    Plan,
    /// The kernel: it hands over values, as loops, sequences, strings and sizes that only the run
    /// tells need it. What it [allocates](RunCx::allocate_in) is best in the memory of its device,
    /// where the next node looks for it.
    Kernel,
    /// A subgraph, whose outputs the kernel hands over as they are.
    Subgraph,
}

/// A kernel as a provider registers it: everything that claiming and planning need to know.
#[derive(Debug)]
pub struct KernelDef {
    /// The operator's domain.
    pub domain: &'static str,
    /// The operator.
    pub op: &'static str,
    /// The types that each type variable of the operator may have; a variable not listed may have
    /// any.
    pub types: &'static [(&'static str, TypeSet)],
    /// Which of several matching kernels is taken: the highest.
    pub rank: i32,
    /// Pairs (input, output) that may share memory where they are equally long.
    pub in_place: &'static [(usize, usize)],
    /// Pairs (input, output) of [`Self::in_place`], such as a cache's past and present, for which
    /// the kernel itself refuses a run whose output would be longer than the input: they may share
    /// a buffer although only the run tells how long the output is.
    pub shared_buffers: &'static [(usize, usize)],
    /// Inputs that must be in host memory.
    pub host_inputs: &'static [usize],
    /// Inputs that it reads at any alignment, such as weights straight from the file.
    pub unaligned: &'static [usize],
    /// Outputs that it leaves out where nobody reads them: they then take no memory. Any other that
    /// the node has is computed.
    pub left_out: &'static [usize],
    /// Who provides the outputs' memory.
    pub outputs: OutputsFrom,
    /// Further conditions on attributes, types, ranks and constants.
    pub when: fn(&NodeView<'_>) -> bool,
    /// Makes the kernel.
    pub make: fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>,
}

impl KernelDef {
    /// The definition that others start from.
    pub const BASE: KernelDef = KernelDef {
        domain: "",
        op: "",
        types: &[],
        rank: 0,
        in_place: &[],
        shared_buffers: &[],
        host_inputs: &[],
        unaligned: &[],
        left_out: &[],
        outputs: OutputsFrom::Plan,
        when: |_| true,
        make: |_| Err(crate::error!(Fail, "the kernel has no constructor")),
    };

    fn refuses(&self, node: &NodeView<'_>) -> Option<String> {
        for (var, allowed) in self.types {
            match node.bound_dtype(var) {
                Some(dtype) if !allowed.contains(dtype) => {
                    return Some(format!("type {} of {var} is not among {allowed}", dtype.name()));
                }
                _ => {}
            }
        }
        (!(self.when)(node)).then(|| "its attributes or shapes are not covered".to_string())
    }
}

/// What the session needs to know of a claimed node.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// Pairs (input, output) that may share memory.
    pub in_place: &'static [(usize, usize)],
    /// Of those, pairs that may share a buffer of the caller whatever the run finds.
    pub shared_buffers: &'static [(usize, usize)],
    /// Inputs that must be in host memory.
    pub host_inputs: &'static [usize],
    /// Inputs that may be unaligned.
    pub unaligned: &'static [usize],
    /// Outputs that are left out where nobody reads them.
    pub left_out: &'static [usize],
    /// Who provides the outputs' memory.
    pub outputs: OutputsFrom,
}

/// The kernels of one provider by operator, best first.
#[derive(Debug, Default)]
pub struct KernelTable {
    by_op: FxHashMap<(&'static str, &'static str), Vec<&'static KernelDef>>,
}

impl KernelTable {
    /// A table of these kernels; their order does not matter.
    pub fn new(kernels: impl IntoIterator<Item = &'static KernelDef>) -> KernelTable {
        let mut by_op: FxHashMap<_, Vec<&'static KernelDef>> = FxHashMap::default();
        for kernel in kernels {
            by_op.entry((kernel.domain, kernel.op)).or_default().push(kernel);
        }
        for kernels in by_op.values_mut() {
            kernels.sort_by_key(|kernel| std::cmp::Reverse(kernel.rank));
        }
        KernelTable { by_op }
    }

    /// The best kernel for a node; the error says why there is none.
    pub fn find(&self, node: &NodeView<'_>) -> Result<&'static KernelDef, String> {
        let spec = node.node.spec;
        let Some(kernels) = self.by_op.get(&(spec.domain, spec.name)) else {
            return Err("it has no kernel for this operator".to_string());
        };
        let mut reason = String::new();
        for kernel in kernels {
            match kernel.refuses(node) {
                None => return Ok(kernel),
                Some(why) => reason = why,
            }
        }
        Err(reason)
    }

    /// The claim for a node, as [`super::Device::claim`] answers it.
    pub fn claim(&self, node: &NodeView<'_>) -> Result<Claim, String> {
        let kernel = self.find(node)?;
        Ok(Claim {
            in_place: kernel.in_place,
            shared_buffers: kernel.shared_buffers,
            host_inputs: kernel.host_inputs,
            unaligned: kernel.unaligned,
            left_out: kernel.left_out,
            outputs: kernel.outputs,
        })
    }

    /// Every kernel, sorted by operator and rank.
    pub fn kernels(&self) -> Vec<&'static KernelDef> {
        let mut all: Vec<_> = self.by_op.values().flatten().copied().collect();
        all.sort_by_key(|kernel| (kernel.domain, kernel.op, std::cmp::Reverse(kernel.rank)));
        all
    }
}
