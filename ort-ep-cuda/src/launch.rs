//! Kernel launches, as a kernel describes them for a node and its shapes.

use std::ops::Deref;
use std::sync::Arc;

use ort_core::{Result, error};
use ort_gpu::Arg;
use smallvec::SmallVec;

pub(crate) use ort_gpu::{Operand, Walk, strides};

use crate::driver::{Boxes, Limits, Routine};
use crate::families;
use crate::libraries::Libraries;

/// A node with the shapes of a run. Kernels answer with launches, which are cached for later runs
/// of the same shapes.
pub(crate) type OpCx<'a> = ort_gpu::OpCx<'a, Bounds<'a>>;

/// The bounds on a kernel's launches: the device's limits, and the libraries it may call.
#[derive(Clone, Copy)]
pub(crate) struct Bounds<'a> {
    pub(crate) limits: Limits,
    /// `None` if libraries may not be called, for example because a tensor is not aligned for them.
    pub(crate) libraries: Option<&'a Libraries>,
    /// Bytes of workspace that a library may use, from offset 0.
    pub(crate) room: usize,
    /// Whether kernels may read tensors through TMA tensor maps: the device has them, and all
    /// tensors are 16-byte aligned.
    pub(crate) has_maps: bool,
    /// Which of a library's algorithms to request, while autotuning tries them in turn.
    pub(crate) turn: usize,
}

impl Deref for Bounds<'_> {
    type Target = Limits;

    fn deref(&self) -> &Limits {
        &self.limits
    }
}

/// The source of a launch's code.
#[derive(Clone, Debug)]
pub(crate) enum Code {
    /// A library routine, which takes tensors only.
    Library(Arc<dyn Routine>),
    /// A kernel of the named family, `cu/<family>.cu`.
    Family(&'static str),
    /// PTX rendered for the node.
    Text(Arc<str>),
}

/// A kernel parameter.
#[derive(Clone, Debug)]
pub(crate) enum Param {
    /// A tensor's address; null if it is left out.
    Tensor(Option<Arg>),
    /// A tensor's TMA map, by value. It is encoded at launch, because it contains the tensor's
    /// address.
    Map(Arg, Boxes),
    /// A number or structure, by its bytes.
    Bytes(SmallVec<[u8; 8]>),
}

/// One kernel launch: code, entry, grid, block, bytes of dynamic shared memory, and parameters.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) code: Code,
    pub(crate) entry: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) params: Vec<Param>,
}

/// Returns the workspace bytes of a kernel's launches: the maximum over the library's and our own
/// kernels. Only a run tells whether its tensors are aligned for libraries, so either may be used.
pub(crate) fn scratch(cx: &OpCx<'_>, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> Result<usize> {
    // A device without libraries has only our own kernels, whose alternatives are sized below.
    let has_library = cx.limits.libraries.is_some_and(Libraries::any);
    // Without both, none of the launches sized here takes a workspace.
    if !has_library && !cx.limits.has_warpgroups() {
        return Ok(0);
    }
    let mut ways = if has_library { ways(cx, launches)? } else { Vec::new() };
    // A misaligned tensor rules tensor maps out at run time, so we size both variants.
    for has_maps in [cx.limits.has_maps, false] {
        ways.push(launches(&bounded(cx, Bounds { libraries: None, has_maps, ..cx.limits }))?);
    }
    Ok(ways.iter().map(|launches| workspace_of(launches)).max().unwrap_or(0))
}

/// Returns the candidate implementations of a node: one, unless a library routine has rivals.
/// Rivals are the library's other algorithms, other libraries' routines, and last our own kernels.
/// Libraries therefore never make a node slower than it is without them.
pub(crate) fn ways(
    cx: &OpCx<'_>,
    launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>,
) -> Result<Vec<Vec<Launch>>> {
    let mut ways = vec![launches(cx)?];
    let last_is = |ways: &[Vec<Launch>], has: fn(&Arc<dyn Routine>) -> bool| {
        ways.last().is_some_and(|last| last.iter().filter_map(Launch::routine).any(has))
    };
    while last_is(&ways, |routine| routine.has_rivals()) {
        ways.push(launches(&bounded(cx, Bounds { turn: ways.len(), ..cx.limits }))?);
    }
    if ways.len() > 1 && last_is(&ways, |_| true) {
        ways.push(launches(&bounded(cx, Bounds { libraries: None, ..cx.limits }))?);
    }
    Ok(ways)
}

/// The same node within other bounds.
fn bounded<'a>(cx: &OpCx<'a>, limits: Bounds<'a>) -> OpCx<'a> {
    let (inputs, outputs, host) = (cx.inputs.clone(), cx.outputs.clone(), cx.host.clone());
    OpCx { op: cx.op, spec: cx.spec, attrs: cx.attrs, limits, inputs, outputs, host }
}

fn workspace_of(launches: &[Launch]) -> usize {
    let params = launches.iter().flat_map(|launch| &launch.params);
    let ends = params.map(|param| match param {
        Param::Tensor(Some(Arg::Workspace { offset, bytes }))
        | Param::Map(Arg::Workspace { offset, bytes }, _) => offset + bytes,
        _ => 0,
    });
    ends.max().unwrap_or(0)
}

/// Threads per block of kernels that give each element a thread.
pub(crate) const THREADS: u32 = 256;

impl Launch {
    /// A launch of a family's entry: one block of [`THREADS`] threads until changed.
    pub(crate) fn new(family: &'static str, entry: impl Into<String>) -> Launch {
        Launch::of_code(Code::Family(family), entry)
    }

    /// The same for a family with one module per element type.
    pub(crate) fn of_type(family: &str, suffix: &str, entry: impl Into<String>) -> Result<Launch> {
        Ok(Launch::new(families::of_type(family, suffix)?, entry))
    }

    /// A launch of an entry of rendered PTX.
    pub(crate) fn rendered(text: impl Into<Arc<str>>, entry: impl Into<String>) -> Launch {
        Launch::of_code(Code::Text(text.into()), entry)
    }

    /// A call of a library routine.
    pub(crate) fn library(routine: Arc<dyn Routine>) -> Launch {
        let name = routine.name();
        Launch::of_code(Code::Library(routine), name)
    }

    fn of_code(code: Code, entry: impl Into<String>) -> Launch {
        let (grid, block) = ([1; 3], [THREADS, 1, 1]);
        Launch { code, entry: entry.into(), grid, block, shared: 0, params: Vec::new() }
    }

    /// Returns the library routine, if this is a library call.
    fn routine(&self) -> Option<&Arc<dyn Routine>> {
        if let Code::Library(routine) = &self.code { Some(routine) } else { None }
    }

    /// Sets the grid to cover `count` threads, one per element, with [`THREADS`] threads per block.
    pub(crate) fn threads(self, count: usize) -> Result<Launch> {
        // A grid of no blocks is an error in CUDA; the one block finds that no element is its own.
        let blocks = count.div_ceil(THREADS as usize).max(1);
        Ok(self.grid([blocks, 1, 1])?.block([THREADS, 1, 1]))
    }

    /// Sets the grid.
    pub(crate) fn grid(self, blocks: [usize; 3]) -> Result<Launch> {
        // CUDA C++ Programming Guide, "Compute Capabilities": 2^31 - 1 blocks along x, 65535 along
        // y and z.
        const MOST: [usize; 3] = [i32::MAX as usize, 65535, 65535];
        let mut grid = [1; 3];
        for ((to, blocks), most) in grid.iter_mut().zip(blocks).zip(MOST) {
            let fits = u32::try_from(blocks).ok().filter(|_| (1..=most).contains(&blocks));
            *to = fits.ok_or_else(|| {
                error!(NotImplemented, "a launch of {blocks} blocks where the device takes 1 to {most}")
                    .help("split the batch, or run the model on another provider")
            })?;
        }
        Ok(Launch { grid, ..self })
    }

    /// Sets the block.
    pub(crate) fn block(self, block: [u32; 3]) -> Launch {
        Launch { block, ..self }
    }

    /// Sets the bytes of dynamic shared memory.
    pub(crate) fn shared(self, shared: u32) -> Launch {
        Launch { shared, ..self }
    }

    /// Appends a tensor parameter.
    pub(crate) fn tensor(self, operand: &Operand) -> Launch {
        self.find_tensor(Some(operand))
    }

    /// Appends a tensor parameter that may be left out.
    pub(crate) fn find_tensor(mut self, operand: Option<&Operand>) -> Launch {
        // An empty tensor has no memory, so the kernel gets a null pointer.
        let present = operand.filter(|operand| operand.count() > 0);
        self.params.push(Param::Tensor(present.map(|operand| operand.arg)));
        self
    }

    /// Appends a tensor-map parameter.
    pub(crate) fn map(mut self, operand: &Operand, boxes: Boxes) -> Launch {
        self.params.push(Param::Map(operand.arg, boxes));
        self
    }

    /// Appends the first `bytes` bytes of the workspace as a parameter.
    pub(crate) fn workspace(mut self, bytes: usize) -> Launch {
        let arg = (bytes > 0).then_some(Arg::Workspace { offset: 0, bytes });
        self.params.push(Param::Tensor(arg));
        self
    }

    /// Appends a 32-bit unsigned parameter, at most `i32::MAX` because kernels count in `int`.
    pub(crate) fn uint(self, number: usize) -> Result<Launch> {
        let number = u32::try_from(number).ok().filter(|number| *number <= i32::MAX as u32);
        let number = number.ok_or_else(|| {
            error!(NotImplemented, "a tensor of more than 2^31 - 1 elements along what a kernel counts")
                .help("split the batch, or run the model on another provider")
        })?;
        Ok(self.bytes(&number.to_ne_bytes()))
    }

    /// Appends a signed 32-bit parameter.
    pub(crate) fn int(self, number: i64) -> Result<Launch> {
        let number = i32::try_from(number);
        let number = number.map_err(|_| error!(NotImplemented, "a number beyond 32 bits in a kernel"))?;
        Ok(self.bytes(&number.to_ne_bytes()))
    }

    /// Appends a `float` parameter.
    pub(crate) fn float(self, number: f32) -> Launch {
        self.bytes(&number.to_ne_bytes())
    }

    /// Appends raw bytes as a parameter: a structure of the kernel.
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Launch {
        self.params.push(Param::Bytes(SmallVec::from_slice(bytes)));
        self
    }

    /// Appends a structure that holds one array of `LEN` 32-bit numbers; missing ones are zero.
    pub(crate) fn uints<const LEN: usize>(self, numbers: &[usize]) -> Result<Launch> {
        let mut words = [0i32; LEN];
        if numbers.len() > LEN {
            return Err(error!(NotImplemented, "{} axes where a kernel has {LEN}", numbers.len()));
        }
        for (word, number) in words.iter_mut().zip(numbers) {
            *word = i32::try_from(*number)
                .map_err(|_| error!(NotImplemented, "a size or stride exceeds 2^31 - 1 elements"))?;
        }
        Ok(self.words(&words))
    }

    /// The same with signed numbers.
    pub(crate) fn ints<const LEN: usize>(self, numbers: &[i64]) -> Result<Launch> {
        let mut words = [0i32; LEN];
        if numbers.len() > LEN {
            return Err(error!(NotImplemented, "{} axes where a kernel has {LEN}", numbers.len()));
        }
        for (word, number) in words.iter_mut().zip(numbers) {
            *word = i32::try_from(*number)
                .map_err(|_| error!(NotImplemented, "a size or stride exceeds 2^31 - 1 elements"))?;
        }
        Ok(self.words(&words))
    }

    fn words(self, words: &[i32]) -> Launch {
        let bytes: SmallVec<[u8; 64]> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }
}
