//! cuDNN: convolutions, with a bias, an addend and a ReLU in the same call where that is what is needed.
//!
//! Which algorithms can compute a convolution is asked once for each convolution of a device and kept; with an exhaustive search the first run
//! of a convolution tries those whose workspace fits, on the tensors and in the workspace of that run. The workspace is the caller's.

mod call;
mod descriptors;
mod functions;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use ort_core::Result;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::load::{Kind, Loaded};
use super::with_alignment;
use crate::driver::Context;
pub(crate) use call::DnnConvolution;
use descriptors::Descriptors;
pub(crate) use functions::DnnFunctions;
use functions::Performance;

/// The library.
pub(super) const KIND: Kind = Kind {
    name: "cuDNN",
    option: "use_cudnn",
    #[cfg(windows)]
    names: &["cudnn64_9.dll", "cudnn64_8.dll"],
    #[cfg(not(windows))]
    names: &["libcudnn.so.9", "libcudnn.so.8"],
    wheels: &["cudnn"],
    oldest: 8900,
};

/// A handle or descriptor of the library's.
type Handle = *mut c_void;

/// What the algorithms are called, by number.
const NAMES: [&str; 8] = [
    "IMPLICIT_GEMM",
    "IMPLICIT_PRECOMP_GEMM",
    "GEMM",
    "DIRECT",
    "FFT",
    "FFT_TILING",
    "WINOGRAD",
    "WINOGRAD_NONFUSED",
];
const IMPLICIT_GEMM: c_int = 0;
const IMPLICIT_PRECOMP_GEMM: c_int = 1;
/// The most bytes of workspace where not as many as there are may be taken, as in ONNX Runtime.
const SMALL_WORKSPACE: usize = 32 << 20;
/// Convolutions whose algorithms are kept.
const MOST_KEPT: usize = 4096;

/// How the algorithm of a convolution is found, in ONNX Runtime's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// By trying all of them.
    Exhaustive,
    /// By the library's own estimate.
    Heuristic,
    /// `IMPLICIT_PRECOMP_GEMM`.
    Default,
}

/// What options say of convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConvOptions {
    pub(crate) search: Search,
    /// Whether a workspace may be as large as there is memory.
    pub(crate) max_workspace: bool,
    /// Whether a signal is an image of one line, not of one column.
    pub(crate) pads_to_nc1d: bool,
}

impl Default for ConvOptions {
    fn default() -> ConvOptions {
        ConvOptions { search: Search::Exhaustive, max_workspace: true, pads_to_nc1d: false }
    }
}

/// The type of all tensors of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum DnnElement {
    F32,
    F16,
    Bf16,
}

/// A convolution over at least two axes, with the same padding on both sides: what follows from types and shapes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Convolution {
    pub(crate) element: DnnElement,
    /// Whether float32 may be shortened to TensorFloat-32.
    pub(crate) tf32: bool,
    pub(crate) groups: usize,
    pub(crate) x: Vec<usize>,
    pub(crate) w: Vec<usize>,
    pub(crate) y: Vec<usize>,
    pub(crate) pads: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dilations: Vec<usize>,
}

/// What a call makes of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// The result.
    Plain,
    /// What is added to what is in the result's memory.
    Onto,
    /// With a bias and, where there is one, an addend, what of it is above zero.
    Relu,
}

/// An algorithm and the bytes of its workspace.
type Way = (c_int, usize);

/// The library, started on a device.
pub(crate) struct Dnn {
    loaded: Arc<Loaded<DnnFunctions>>,
    /// One thread at a time uses it.
    handle: Mutex<Owned>,
    context: Arc<Context>,
    pub(crate) options: ConvOptions,
    /// By convolution: the ways to compute it, in the order of preference.
    known: Mutex<FxHashMap<Convolution, Arc<[Way]>>>,
    /// By convolution and bytes of workspace: what a search found.
    found: Mutex<FxHashMap<(Convolution, usize), Way>>,
}

struct Owned(Handle);

// SAFETY: the handle is of no thread; it is used under a lock.
unsafe impl Send for Owned {}

impl Dnn {
    pub(super) fn open(
        loaded: Arc<Loaded<DnnFunctions>>,
        context: &Arc<Context>,
        options: ConvOptions,
    ) -> std::result::Result<Dnn, String> {
        context.enter().map_err(|problem| problem.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device's context is current; writes one handle, which is destroyed when this is dropped.
        let status = unsafe { (loaded.functions.cudnnCreate)(&mut handle) };
        if status != 0 {
            return Err(format!("cudnnCreate: {}", loaded.functions.describe(status)));
        }
        let (handle, context) = (Mutex::new(Owned(handle)), context.clone());
        Ok(Dnn { loaded, handle, context, options, known: Mutex::default(), found: Mutex::default() })
    }

    /// The call of a convolution that is content with so many bytes of workspace, and the bytes that it takes; none where the library has no
    /// algorithm for it.
    pub(crate) fn convolution(
        self: &Arc<Dnn>,
        convolution: &Convolution,
        form: Form,
        room: usize,
    ) -> Result<Option<(DnnConvolution, usize)>> {
        self.context.enter()?;
        let descriptors = match Descriptors::new(&self.loaded, convolution) {
            Ok(descriptors) => descriptors,
            Err(problem) => {
                // Such a convolution is computed by kernels of our own.
                tracing::debug!("not by cuDNN: {problem}");
                return Ok(None);
            }
        };
        let all = self.ways(convolution, &descriptors)?;
        let room = if self.options.max_workspace { room } else { room.min(SMALL_WORKSPACE) };
        let fitting = all.iter().copied().filter(|(_, bytes)| with_alignment(*bytes) <= room);
        let fitting: Vec<Way> = fitting.collect();
        let Some(first) = fitting.first().copied() else { return Ok(None) };
        let (chosen, bytes) = match self.options.search {
            Search::Exhaustive => {
                (OnceLock::new(), fitting.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0))
            }
            Search::Heuristic | Search::Default => (OnceLock::from(first), first.1),
        };
        let (dnn, convolution) = (self.clone(), convolution.clone());
        let made = DnnConvolution::new(dnn, (convolution, descriptors), form, (chosen, first), bytes);
        Ok(Some((made, with_alignment(bytes))))
    }

    /// The ways to compute a convolution, as they were asked for before.
    fn ways(&self, convolution: &Convolution, descriptors: &Descriptors) -> Result<Arc<[Way]>> {
        if let Some(ways) = self.known.lock().get(convolution) {
            return Ok(ways.clone());
        }
        let sized = |algorithms: &[c_int]| -> Vec<Way> {
            algorithms.iter().filter_map(|algorithm| self.workspace(descriptors, *algorithm)).collect()
        };
        let ways: Arc<[Way]> = match self.options.search {
            Search::Exhaustive => sized(&[0, 1, 2, 3, 4, 5, 6, 7]).into(),
            Search::Heuristic => self.estimated(descriptors).into(),
            Search::Default => sized(&[IMPLICIT_PRECOMP_GEMM, IMPLICIT_GEMM]).into(),
        };
        let mut known = self.known.lock();
        if known.len() >= MOST_KEPT {
            known.clear();
        }
        known.insert(convolution.clone(), ways.clone());
        Ok(ways)
    }

    /// An algorithm with its workspace, where it can compute the convolution.
    fn workspace(&self, descriptors: &Descriptors, algorithm: c_int) -> Option<Way> {
        let (of, mut bytes) = (descriptors.handles(), 0);
        let handle = self.handle.lock();
        // SAFETY: handle and descriptors are live; writes one number.
        let status = unsafe {
            (self.loaded.functions.cudnnGetConvolutionForwardWorkspaceSize)(
                handle.0,
                of.x,
                of.w,
                of.convolution,
                of.y,
                algorithm,
                &mut bytes,
            )
        };
        (status == 0).then_some((algorithm, bytes))
    }

    /// The algorithms in the order in which the library thinks that they are fast.
    fn estimated(&self, descriptors: &Descriptors) -> Vec<Way> {
        let (of, mut count) = (descriptors.handles(), 0);
        let mut all = [Performance::default(); NAMES.len()];
        let handle = self.handle.lock();
        // SAFETY: handle and descriptors are live; there is room for as many as are asked for.
        let status = unsafe {
            (self.loaded.functions.cudnnGetConvolutionForwardAlgorithm_v7)(
                handle.0,
                of.x,
                of.w,
                of.convolution,
                of.y,
                all.len() as c_int,
                &mut count,
                all.as_mut_ptr(),
            )
        };
        if status == 0 { working(&all, count) } else { Vec::new() }
    }
}

/// Those of the first `count` algorithms that can be had.
fn working(all: &[Performance], count: c_int) -> Vec<Way> {
    let all = all.iter().take(usize::try_from(count).unwrap_or(0)).filter(|one| one.status == 0);
    all.map(|one| (one.algorithm, one.memory)).collect()
}

impl Drop for Dnn {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the handle is live, and no call uses it.
            let _ = unsafe { (self.loaded.functions.cudnnDestroy)(self.handle.get_mut().0) };
        }
    }
}
