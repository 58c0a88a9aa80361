//! Kernel definitions and the per-provider dispatch table.

use rustc_hash::FxHashMap;

use super::{CompileCx, NodeView, RunCx};
use crate::Result;
use crate::dtype::{DType, TypeSet};
use crate::tensor::Shape;

/// A compiled node.
pub trait Executable: Send + Sync {
    /// The bytes of workspace that a run with these shapes needs, 64-byte aligned. It may exceed
    /// [`IoShapes::room`] only if the kernel cannot do with less. Outputs that the kernel allocates
    /// itself ([`OutputsFrom::Kernel`]) may have no shape yet.
    fn workspace(&self, _shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(0)
    }

    /// Upper bound on the heap bytes of a run besides workspace and outputs, such as tables and
    /// library allocations. The planner adds them to the step, and they stay reserved while it
    /// runs. Allocations of a fixed size up to about 64 KiB need not be counted.
    fn heap(&self, _shapes: &IoShapes<'_>) -> Result<usize> {
        Ok(0)
    }

    /// Computes the outputs. Several threads may call it at once.
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()>;

    /// Names what computed the outputs in a recent run, for profiles: kernels, or a library and its
    /// algorithm. `None` if there was nothing to choose.
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

/// The concrete shapes of a node's tensors; `None` for a value that is left out or is not a tensor.
#[derive(Debug, Clone, Copy)]
pub struct IoShapes<'a> {
    /// Shapes of the inputs.
    pub inputs: &'a [Option<Shape>],
    /// Shapes of the outputs.
    pub outputs: &'a [Option<Shape>],
    /// The threads available to the run.
    pub threads: usize,
    /// The workspace limit in bytes for kernels that have a choice, such as library algorithms:
    /// what the memory limits leave beside everything alive at this step. `usize::MAX` if
    /// unlimited.
    pub room: usize,
}

impl IoShapes<'_> {
    /// The shape of an input; empty if it is left out.
    pub fn input(&self, index: usize) -> &[usize] {
        self.inputs.get(index).and_then(Option::as_deref).unwrap_or(&[])
    }

    /// The shape of an output; empty if it is left out.
    pub fn output(&self, index: usize) -> &[usize] {
        self.outputs.get(index).and_then(Option::as_deref).unwrap_or(&[])
    }
}

/// Who allocates a kernel's outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputsFrom {
    /// The memory planner: the kernel writes into memory that is ready.
    Plan,
    /// The kernel: it hands over values. Loops, sequences, strings and data-dependent shapes need
    /// this. The kernel should [allocate](RunCx::allocate_in) in its device's memory, because the
    /// next node reads the value there.
    Kernel,
    /// A subgraph: the kernel forwards its outputs unchanged.
    Subgraph,
}

/// A kernel definition: everything that claiming and planning need to know.
#[derive(Debug)]
pub struct KernelDef {
    /// The operator's domain.
    pub domain: &'static str,
    /// The operator.
    pub op: &'static str,
    /// The element types that each type variable of the operator accepts; a variable not listed
    /// accepts any. [`KernelDef::INPUTS`] stands for the variable of each input.
    pub types: &'static [(&'static str, TypeSet)],
    /// The priority among matching kernels; the highest wins.
    pub rank: i32,
    /// Pairs (input, output) that may alias if they have the same length.
    pub in_place: &'static [(usize, usize)],
    /// Pairs of [`Self::in_place`] that may share a buffer even if the output's length is known
    /// only at run time, such as past and present of a KV cache. The kernel itself rejects a run
    /// whose output would be longer than the input.
    pub shared_buffers: &'static [(usize, usize)],
    /// Inputs that must be in host memory.
    pub host_inputs: &'static [usize],
    /// Inputs that it reads at any alignment, such as weights mapped straight from the file.
    pub unaligned: &'static [usize],
    /// Outputs that it can skip if they have no reader; a skipped one takes no memory. All other
    /// outputs of the node are computed.
    pub left_out: &'static [usize],
    /// Who allocates the outputs.
    pub outputs: OutputsFrom,
    /// Further conditions on attributes, types, ranks and constants.
    pub when: fn(&NodeView<'_>) -> bool,
    /// What `when` asks for, in words that continue "it takes", for the error of a node that no
    /// kernel accepts.
    pub takes: &'static str,
    /// Constructs the kernel.
    pub make: fn(&mut CompileCx<'_>) -> Result<Box<dyn Executable>>,
}

impl KernelDef {
    /// The defaults that definitions extend with `..KernelDef::BASE`.
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
        takes: "",
        make: |_| Err(crate::error!(Fail, "the kernel has no constructor")),
    };

    /// In [`KernelDef::types`], the type variable of each input.
    pub const INPUTS: &str = "";

    fn refuses(&self, node: &NodeView<'_>) -> Option<Unclaimed> {
        let spec = node.node.spec;
        let wrong = self.types.iter().find_map(|(var, allowed)| match *var {
            KernelDef::INPUTS => spec.inputs.iter().find_map(|param| refused(node, param.ty, *allowed)),
            var => refused(node, var, *allowed),
        });
        wrong.or_else(|| (!(self.when)(node)).then_some(Unclaimed::Condition(self.takes)))
    }
}

/// Why a kernel does not accept a node.
enum Unclaimed {
    /// A type variable, and the types that it may have.
    Type(&'static str, TypeSet),
    /// Its `when`, in words.
    Condition(&'static str),
}

impl Unclaimed {
    /// The reason that says more if two kernels of an operator refuse a node. A kernel whose
    /// condition failed accepts the types, and kernels may share out the types of a variable.
    fn join(self, other: Unclaimed) -> Unclaimed {
        match (self, other) {
            (Unclaimed::Type(var, ours), Unclaimed::Type(same, theirs)) if var == same => {
                Unclaimed::Type(var, ours.union(theirs))
            }
            (Unclaimed::Type(..), other @ Unclaimed::Condition(_)) => other,
            (Unclaimed::Condition(""), other @ Unclaimed::Condition(_)) => other,
            (first, _) => first,
        }
    }

    fn message(&self, node: &NodeView<'_>) -> String {
        match self {
            Unclaimed::Type(var, allowed) => {
                let dtype = node.bound_dtype(var).map_or("unknown", DType::name);
                format!("type {dtype} of {var} is not among {allowed}")
            }
            Unclaimed::Condition("") => "its attributes or shapes are not supported".to_string(),
            Unclaimed::Condition(takes) => format!("it takes {takes}"),
        }
    }
}

/// Returns the refusal of a type variable whose type at a node is not allowed. An unknown type is;
/// the kernel's `when` may still refuse the node.
fn refused(node: &NodeView<'_>, var: &'static str, allowed: TypeSet) -> Option<Unclaimed> {
    node.bound_dtype(var).filter(|dtype| !allowed.contains(*dtype))?;
    Some(Unclaimed::Type(var, allowed))
}

/// What placement and the memory planner need to know of a claimed node.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    /// Pairs (input, output) that may alias.
    pub in_place: &'static [(usize, usize)],
    /// Those of `in_place` that may share a caller's buffer even if the output's length is
    /// data-dependent.
    pub shared_buffers: &'static [(usize, usize)],
    /// Inputs that must be in host memory.
    pub host_inputs: &'static [usize],
    /// Inputs that it reads at any alignment.
    pub unaligned: &'static [usize],
    /// Outputs that it skips if they have no reader.
    pub left_out: &'static [usize],
    /// Who allocates the outputs.
    pub outputs: OutputsFrom,
}

/// The kernels of one provider by operator, highest rank first.
#[derive(Debug, Default)]
pub struct KernelTable {
    by_op: FxHashMap<(&'static str, &'static str), Vec<&'static KernelDef>>,
}

impl KernelTable {
    /// Builds the table. The order of `kernels` matters only among equal ranks, where the earlier
    /// one wins.
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

    /// Returns the highest-ranked kernel that accepts a node, or why none does.
    pub fn find(&self, node: &NodeView<'_>) -> Result<&'static KernelDef, String> {
        let spec = node.node.spec;
        let Some(kernels) = self.by_op.get(&(spec.domain, spec.name)) else {
            return Err("it has no kernel for this operator".to_string());
        };
        let mut reason: Option<Unclaimed> = None;
        for kernel in kernels {
            match (kernel.refuses(node), reason.take()) {
                (None, _) => return Ok(kernel),
                (Some(why), None) => reason = Some(why),
                (Some(why), Some(earlier)) => reason = Some(earlier.join(why)),
            }
        }
        Err(reason.map_or_else(String::new, |reason| reason.message(node)))
    }

    /// Returns the claim for a node, ready for [`super::Device::claim`].
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

    /// Lists every kernel, sorted by operator and rank.
    pub fn kernels(&self) -> Vec<&'static KernelDef> {
        let mut all: Vec<_> = self.by_op.values().flatten().copied().collect();
        all.sort_by_key(|kernel| (kernel.domain, kernel.op, std::cmp::Reverse(kernel.rank)));
        all
    }
}
