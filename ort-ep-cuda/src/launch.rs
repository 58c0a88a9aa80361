//! What a kernel answers with: launches.

use std::ops::Deref;
use std::sync::Arc;

use ort_core::ep::operand::{self, Arg};
use ort_core::{Result, error};
use smallvec::SmallVec;

pub(crate) use ort_core::ep::operand::{Operand, Walk, strides};

use crate::driver::{Boxes, Limits, Routine};
use crate::libraries::Libraries;
use crate::modules;

/// A node with the shapes of a run. Kernels answer with launches, which are kept for runs of the
/// same shapes.
pub(crate) type OpCx<'a> = operand::OpCx<'a, Bounds<'a>>;

/// What bounds a kernel's answers: the device's limits, and the libraries that it may take.
#[derive(Clone, Copy)]
pub(crate) struct Bounds<'a> {
    pub(crate) limits: Limits,
    /// None where the tensors do not lie as libraries want them.
    pub(crate) libraries: Option<&'a Libraries>,
    /// The bytes of workspace that a library may have, from the first on.
    pub(crate) room: usize,
    /// Whether kernels may read tensors by maps: the device has them, and all tensors begin at
    /// multiples of 16 bytes.
    pub(crate) has_maps: bool,
    /// Which of the algorithms that a library has is asked for, where they are tried.
    pub(crate) turn: usize,
}

impl Deref for Bounds<'_> {
    type Target = Limits;

    fn deref(&self) -> &Limits {
        &self.limits
    }
}

/// Where the code of a launch is.
#[derive(Clone, Debug)]
pub(crate) enum Code {
    /// In a library, which is called with tensors alone.
    Library(Arc<dyn Routine>),
    /// An entry of the family of kernels of that name, `cu/<family>.cu`.
    Family(&'static str),
    /// PTX that was rendered for the node.
    Text(Arc<str>),
}

/// A parameter of an entry.
#[derive(Clone, Debug)]
pub(crate) enum Param {
    /// The address of a tensor; that of nothing where it is left out.
    Tensor(Option<Arg>),
    /// The map of a tensor, by value: it follows from where the tensor lies in a run.
    Map(Arg, Boxes),
    /// A number or a structure, as it lies in memory.
    Bytes(SmallVec<[u8; 8]>),
}

/// One launch of an entry: its code, blocks, threads of a block, bytes of a block's memory beside
/// those that the entry declares, and parameters.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    pub(crate) code: Code,
    pub(crate) entry: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared: u32,
    pub(crate) params: Vec<Param>,
}

/// The bytes of workspace that a kernel's launches take: a library's, or those of kernels of our
/// own, whichever is more, as only a run tells whether its tensors lie as libraries want them.
pub(crate) fn scratch(cx: &OpCx<'_>, launches: fn(&OpCx<'_>) -> Result<Vec<Launch>>) -> Result<usize> {
    let has_library = cx.limits.libraries.is_some_and(Libraries::any);
    if !has_library && !cx.limits.has_warpgroups() {
        return Ok(0);
    }
    let mut ways = if has_library { ways(cx, launches)? } else { Vec::new() };
    for has_maps in [cx.limits.has_maps, false] {
        ways.push(launches(&bounded(cx, Bounds { libraries: None, has_maps, ..cx.limits }))?);
    }
    Ok(ways.iter().map(|launches| workspace_of(launches)).max().unwrap_or(0))
}

/// The launches of each way to compute a node: one, unless a library's call has rivals. These are
/// its other algorithms, what other libraries have, and at last kernels of our own, so that with
/// libraries no node is slower than without.
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
    OpCx { op: cx.op, attrs: cx.attrs, limits, inputs, outputs, host }
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

/// The threads of a block of kernels that give each element a thread.
pub(crate) const THREADS: u32 = 256;

impl Launch {
    /// A launch of an entry of a family, of one block of [`THREADS`] threads at first.
    pub(crate) fn new(family: &'static str, entry: impl Into<String>) -> Launch {
        Launch::of_code(Code::Family(family), entry)
    }

    /// The same of a family that there is for each type of elements.
    pub(crate) fn of_type(family: &str, suffix: &str, entry: impl Into<String>) -> Result<Launch> {
        Ok(Launch::new(modules::of_type(family, suffix)?, entry))
    }

    /// A launch of an entry of rendered PTX.
    pub(crate) fn rendered(text: impl Into<Arc<str>>, entry: impl Into<String>) -> Launch {
        Launch::of_code(Code::Text(text.into()), entry)
    }

    /// A call of a library.
    pub(crate) fn library(routine: Arc<dyn Routine>) -> Launch {
        let name = routine.name();
        Launch::of_code(Code::Library(routine), name)
    }

    fn of_code(code: Code, entry: impl Into<String>) -> Launch {
        let (grid, block) = ([1; 3], [THREADS, 1, 1]);
        Launch { code, entry: entry.into(), grid, block, shared: 0, params: Vec::new() }
    }

    /// What is called, where it is a library's.
    fn routine(&self) -> Option<&Arc<dyn Routine>> {
        if let Code::Library(routine) = &self.code { Some(routine) } else { None }
    }

    /// With so many threads at least, [`THREADS`] to a block: one for each element.
    pub(crate) fn threads(self, count: usize) -> Result<Launch> {
        let blocks = count.div_ceil(THREADS as usize).max(1);
        Ok(self.grid([blocks, 1, 1])?.block([THREADS, 1, 1]))
    }

    /// With these numbers of blocks.
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

    /// With blocks of these numbers of threads.
    pub(crate) fn block(self, block: [u32; 3]) -> Launch {
        Launch { block, ..self }
    }

    /// With `shared` bytes of dynamic shared memory.
    pub(crate) fn shared(self, shared: u32) -> Launch {
        Launch { shared, ..self }
    }

    /// With a tensor as the next parameter.
    pub(crate) fn tensor(self, operand: &Operand) -> Launch {
        self.find_tensor(Some(operand))
    }

    /// With a tensor that may be left out as the next parameter.
    pub(crate) fn find_tensor(mut self, operand: Option<&Operand>) -> Launch {
        let present = operand.filter(|operand| operand.count() > 0);
        self.params.push(Param::Tensor(present.map(|operand| operand.arg)));
        self
    }

    /// With the map of a tensor as the next parameter.
    pub(crate) fn map(mut self, operand: &Operand, boxes: Boxes) -> Launch {
        self.params.push(Param::Map(operand.arg, boxes));
        self
    }

    /// With so many bytes of the workspace, from its first on, as the next parameter.
    pub(crate) fn workspace(mut self, bytes: usize) -> Launch {
        let arg = (bytes > 0).then_some(Arg::Workspace { offset: 0, bytes });
        self.params.push(Param::Tensor(arg));
        self
    }

    /// With a number as the next parameter: one of 32 bits.
    pub(crate) fn uint(self, number: usize) -> Result<Launch> {
        let number = u32::try_from(number).ok().filter(|number| *number <= i32::MAX as u32);
        let number = number.ok_or_else(|| {
            error!(NotImplemented, "a tensor of more than 2^31 - 1 elements along what a kernel counts")
                .help("split the batch, or run the model on another provider")
        })?;
        Ok(self.bytes(&number.to_ne_bytes()))
    }

    /// With a signed number of 32 bits as the next parameter.
    pub(crate) fn int(self, number: i64) -> Result<Launch> {
        let number = i32::try_from(number);
        let number = number.map_err(|_| error!(NotImplemented, "a number beyond 32 bits in a kernel"))?;
        Ok(self.bytes(&number.to_ne_bytes()))
    }

    /// With a `float` as the next parameter.
    pub(crate) fn float(self, number: f32) -> Launch {
        self.bytes(&number.to_ne_bytes())
    }

    /// With some bytes as the next parameter: a structure of the kernel's.
    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Launch {
        self.params.push(Param::Bytes(SmallVec::from_slice(bytes)));
        self
    }

    /// With an array of numbers of 32 bits, `LEN` of them, as the next parameter: a structure with
    /// one array. What is missing is zero.
    pub(crate) fn uints<const LEN: usize>(self, numbers: &[usize]) -> Result<Launch> {
        let mut words = [0i32; LEN];
        if numbers.len() > LEN {
            return Err(error!(NotImplemented, "{} axes where a kernel has {LEN}", numbers.len()));
        }
        for (word, number) in words.iter_mut().zip(numbers) {
            *word = i32::try_from(*number)
                .map_err(|_| error!(NotImplemented, "a size or stride of more than 2^31 - 1 elements"))?;
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
                .map_err(|_| error!(NotImplemented, "a size or stride of more than 2^31 - 1 elements"))?;
        }
        Ok(self.words(&words))
    }

    fn words(self, words: &[i32]) -> Launch {
        let bytes: SmallVec<[u8; 64]> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.bytes(&bytes)
    }
}
