//! cuDNN convolutions: forward, transposed and gradients, with an optional fused bias, addend and
//! ReLU.
//!
//! The list of algorithms is queried once per convolution and device, and cached. In an exhaustive
//! search, each algorithm whose workspace fits is a candidate, and the first run times them like
//! other implementations of a node. The library's own search (`cudnnFind...`) times the bare
//! convolution without its epilogue, once each, and includes the launch overhead. The caller
//! supplies the workspace.

mod call;
mod descriptors;
mod functions;

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

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

/// cuDNN's names and versions.
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

/// A handle or descriptor of the library.
type Handle = *mut c_void;

/// Which of image, filters and result is computed from the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    /// The result.
    Forward,
    /// The image: the data gradient, which is also a transposed convolution.
    Data,
    /// The filter gradient.
    Filter,
}

impl Pass {
    /// Returns the names of the algorithms, by number.
    fn names(self) -> &'static [&'static str] {
        match self {
            Pass::Forward => &[
                "IMPLICIT_GEMM",
                "IMPLICIT_PRECOMP_GEMM",
                "GEMM",
                "DIRECT",
                "FFT",
                "FFT_TILING",
                "WINOGRAD",
                "WINOGRAD_NONFUSED",
            ],
            Pass::Data => &["ALGO_0", "ALGO_1", "FFT", "FFT_TILING", "WINOGRAD", "WINOGRAD_NONFUSED"],
            Pass::Filter => {
                &["ALGO_0", "ALGO_1", "FFT", "ALGO_3", "WINOGRAD", "WINOGRAD_NONFUSED", "FFT_TILING"]
            }
        }
    }

    /// Returns the deterministic algorithms. `ALGO_0` and `ALGO_3` of the gradients accumulate in
    /// no fixed order (cuDNN, "API Reference", `cudnnConvolutionBwdDataAlgo_t`,
    /// `cudnnConvolutionBwdFilterAlgo_t`).
    fn algorithms(self) -> &'static [c_int] {
        match self {
            Pass::Forward => &[0, 1, 2, 3, 4, 5, 6, 7],
            Pass::Data => &[1, 2, 3, 4, 5],
            Pass::Filter => &[1, 2, 5, 6],
        }
    }

    /// Returns the algorithms of [`Search::Default`], in the order in which they are tried.
    fn standard(self) -> &'static [c_int] {
        match self {
            Pass::Forward => &[IMPLICIT_PRECOMP_GEMM, IMPLICIT_GEMM],
            Pass::Data | Pass::Filter => &[ALGO_1],
        }
    }

    /// Returns the usable ones of the first `count` algorithms, in order. For float16 and bfloat16,
    /// [`IMPLICIT_PRECOMP_GEMM`] comes first. With a fused bias and activation, the others run
    /// without tensor cores and take twenty times as long (cuDNN 9.14 on an H100).
    fn working(self, element: DnnElement, all: &[Performance], count: c_int) -> Vec<Way> {
        let all = all.iter().take(usize::try_from(count).unwrap_or(0));
        let all = all.filter(|one| one.status == 0 && self.algorithms().contains(&one.algorithm));
        let mut all: Vec<&Performance> = all.collect();
        if self == Pass::Forward && element != DnnElement::F32 {
            all.sort_by_key(|one| one.algorithm != IMPLICIT_PRECOMP_GEMM);
        }
        all.into_iter().map(|one| (one.algorithm, one.memory)).collect()
    }
}

const IMPLICIT_GEMM: c_int = 0;
const IMPLICIT_PRECOMP_GEMM: c_int = 1;
const ALGO_1: c_int = 1;
/// The most algorithms of a pass.
const MOST_ALGORITHMS: usize = 8;
/// The workspace limit in bytes unless all free memory may be used, as in ONNX Runtime.
const SMALL_WORKSPACE: usize = 32 << 20;
/// The most convolutions whose algorithms are cached.
const MOST_KEPT: usize = 4096;

/// How to choose the algorithm of a convolution, in ONNX Runtime's terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// Time all of them.
    Exhaustive,
    /// Trust the library's heuristic.
    Heuristic,
    /// Take `IMPLICIT_PRECOMP_GEMM`, or `ALGO_1` for gradients.
    Default,
}

/// The options for convolutions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConvOptions {
    pub(crate) search: Search,
    /// Whether a workspace may use all free memory.
    pub(crate) max_workspace: bool,
    /// Whether a 1-D convolution runs as NC1D rather than NCD1.
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

/// A convolution over at least two axes with symmetric padding, as types and shapes determine it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Convolution {
    pub(crate) pass: Pass,
    pub(crate) element: DnnElement,
    /// Whether float32 may be rounded to TF32.
    pub(crate) tf32: bool,
    /// Whether image and filters are NHWC. Shapes list the channels second either way.
    pub(crate) channels_last: bool,
    pub(crate) groups: usize,
    pub(crate) x: Vec<usize>,
    pub(crate) w: Vec<usize>,
    pub(crate) y: Vec<usize>,
    pub(crate) pads: Vec<usize>,
    pub(crate) strides: Vec<usize>,
    pub(crate) dilations: Vec<usize>,
}

/// The epilogue of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// None: write the result.
    Plain,
    /// Accumulate onto the result's memory.
    Onto,
    /// Add a bias and an optional addend, then apply ReLU.
    Relu,
}

/// An algorithm and the bytes of its workspace.
type Way = (c_int, usize);

/// The library, opened on a device.
pub(crate) struct Dnn {
    loaded: Arc<Loaded<DnnFunctions>>,
    /// One thread at a time may use it.
    handle: Mutex<Owned>,
    context: Arc<Context>,
    pub(crate) options: ConvOptions,
    /// The usable algorithms of each convolution, in order of preference.
    known: Mutex<FxHashMap<Convolution, Arc<[Way]>>>,
}

struct Owned(Handle);

// SAFETY: the handle is not tied to a thread, and the mutex of `Dnn` serialises its use.
unsafe impl Send for Owned {}

impl Dnn {
    pub(super) fn open(
        loaded: Arc<Loaded<DnnFunctions>>,
        context: &Arc<Context>,
        options: ConvOptions,
    ) -> std::result::Result<Dnn, String> {
        context.enter().map_err(|problem| problem.to_string())?;
        let mut handle = ptr::null_mut();
        // SAFETY: the device's context is current. The library writes one handle, which `Drop`
        // destroys.
        let status = unsafe { (loaded.functions.cudnnCreate)(&mut handle) };
        if status != 0 {
            return Err(format!("cudnnCreate: {}", loaded.functions.describe(status)));
        }
        let (handle, context) = (Mutex::new(Owned(handle)), context.clone());
        Ok(Dnn { loaded, handle, context, options, known: Mutex::default() })
    }

    /// Returns the call of a convolution with at most `room` bytes of workspace, and the bytes it
    /// needs. Turn `n` takes the `n`th algorithm that fits. Returns `None` if there are no more.
    pub(crate) fn convolution(
        self: &Arc<Dnn>,
        convolution: &Convolution,
        form: Form,
        room: usize,
        turn: usize,
    ) -> Result<Option<(DnnConvolution, usize)>> {
        self.context.enter()?;
        let descriptors = match Descriptors::new(&self.loaded, convolution) {
            Ok(descriptors) => descriptors,
            Err(problem) => {
                // Our own kernels compute this convolution.
                tracing::debug!("not by cuDNN: {problem}");
                return Ok(None);
            }
        };
        let all = self.ways(convolution, &descriptors);
        // The limit of the option applies on top of what the caller has.
        let room = if self.options.max_workspace { room } else { room.min(SMALL_WORKSPACE) };
        let mut fitting = all.iter().copied().filter(|(_, bytes)| with_alignment(*bytes) <= room);
        let Some(way) = fitting.nth(turn) else { return Ok(None) };
        let made = DnnConvolution::new(self.clone(), (convolution.clone(), descriptors), form, way);
        Ok(Some((made, with_alignment(way.1))))
    }

    /// Returns the algorithms for a convolution, from the cache if it was queried before.
    fn ways(&self, convolution: &Convolution, descriptors: &Descriptors) -> Arc<[Way]> {
        if let Some(ways) = self.known.lock().get(convolution) {
            return ways.clone();
        }
        let pass = convolution.pass;
        let sized = |algorithms: &[c_int]| -> Vec<Way> {
            algorithms.iter().filter_map(|algorithm| self.workspace(pass, descriptors, *algorithm)).collect()
        };
        let ways: Arc<[Way]> = match self.options.search {
            Search::Exhaustive => {
                // Timing starts with the algorithm that the library expects to be fastest, so
                // hopeless ones are cut off early.
                let estimated = self.estimated((pass, convolution.element), descriptors);
                let place = |of: c_int| estimated.iter().position(|(algorithm, _)| *algorithm == of);
                let mut all = sized(pass.algorithms());
                all.sort_by_key(|(algorithm, _)| place(*algorithm).unwrap_or(usize::MAX));
                all.into()
            }
            Search::Heuristic => self.estimated((pass, convolution.element), descriptors).into(),
            Search::Default => sized(pass.standard()).into(),
        };
        let mut known = self.known.lock();
        if known.len() >= MOST_KEPT {
            known.clear();
        }
        known.insert(convolution.clone(), ways.clone());
        ways
    }

    /// Returns an algorithm with its workspace size, if it supports the convolution.
    fn workspace(&self, pass: Pass, descriptors: &Descriptors, algorithm: c_int) -> Option<Way> {
        let (of, mut bytes) = (descriptors.handles(pass), 0);
        let handle = self.handle.lock();
        let workspace = self.loaded.functions.calls(pass).workspace;
        // SAFETY: handle and descriptors are live; the library writes one number.
        let status = unsafe {
            workspace(handle.0, of.first, of.second, of.convolution, of.result, algorithm, &mut bytes)
        };
        (status == 0).then_some((algorithm, bytes))
    }

    /// Returns the algorithms in the library's estimated order of speed.
    fn estimated(&self, (pass, element): (Pass, DnnElement), descriptors: &Descriptors) -> Vec<Way> {
        let (of, mut count) = (descriptors.handles(pass), 0);
        let mut all = [Performance::default(); MOST_ALGORITHMS];
        let handle = self.handle.lock();
        let estimate = self.loaded.functions.calls(pass).estimate;
        // SAFETY: handle and descriptors are live; `all` has room for the number of results
        // requested.
        let status = unsafe {
            estimate(
                handle.0,
                of.first,
                of.second,
                of.convolution,
                of.result,
                all.len() as c_int,
                &mut count,
                all.as_mut_ptr(),
            )
        };
        if status == 0 { pass.working(element, &all, count) } else { Vec::new() }
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the handle is live. Each `DnnConvolution` holds an `Arc` of this, so no call
            // uses it.
            let _ = unsafe { (self.loaded.functions.cudnnDestroy)(self.handle.get_mut().0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(algorithm: c_int, status: c_int) -> Performance {
        let mut found = Performance::default();
        (found.algorithm, found.status) = (algorithm, status);
        found
    }

    #[test]
    fn halves_take_the_algorithm_of_tensor_cores_first() {
        let order = |pass: Pass, element, all: &[Performance]| -> Vec<c_int> {
            pass.working(element, all, all.len() as c_int)
                .into_iter()
                .map(|(algorithm, _)| algorithm)
                .collect()
        };
        let all = [found(0, 0), found(6, 0), found(1, 0)];
        assert_eq!(order(Pass::Forward, DnnElement::F16, &all), [1, 0, 6]);
        assert_eq!(order(Pass::Forward, DnnElement::F32, &all), [0, 6, 1]);
        assert_eq!(order(Pass::Data, DnnElement::F16, &[found(4, 0), found(1, 0)]), [4, 1]);
        assert_eq!(order(Pass::Forward, DnnElement::Bf16, &[found(0, 0), found(1, 1)]), [0]);
    }
}
