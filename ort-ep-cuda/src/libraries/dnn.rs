//! cuDNN convolutions: forward, transposed and gradients, with an optional fused bias, addend and
//! ReLU.
//!
//! The list of algorithms is queried once per convolution and device, and cached. In an exhaustive
//! search, each algorithm whose workspace fits is a candidate, and the first run times them like
//! other implementations of a node. The library's own search (`cudnnFind...`) times the bare
//! convolution without its epilogue, once each, and includes the launch overhead. The caller
//! supplies the workspace.

mod call;
mod convolution;
mod descriptors;
mod functions;

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::load::{Kind, Loaded};
use crate::driver::Context;
use convolution::{Algorithm, Handle};
pub(crate) use convolution::{ConvOptions, Convolution, DnnElement, Form, Pass, Search};
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
    fn working(self, element: DnnElement, all: &[Performance], count: c_int) -> Vec<Algorithm> {
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
/// The most convolutions whose algorithms are cached.
const MOST_KEPT: usize = 4096;

/// The library, opened on a device.
pub(crate) struct Dnn {
    loaded: Arc<Loaded<DnnFunctions>>,
    /// One thread at a time may use it.
    handle: Mutex<OwnedHandle>,
    context: Arc<Context>,
    pub(crate) options: ConvOptions,
    /// The usable algorithms of each convolution, in order of preference.
    known: Mutex<FxHashMap<Convolution, Arc<[Algorithm]>>>,
}

struct OwnedHandle(Handle);

// SAFETY: the handle is not tied to a thread, and the mutex of `Dnn` serialises its use.
unsafe impl Send for OwnedHandle {}

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
        let (handle, context) = (Mutex::new(OwnedHandle(handle)), context.clone());
        Ok(Dnn { loaded, handle, context, options, known: Mutex::default() })
    }

    /// Returns the algorithms for a convolution, from the cache if it was queried before.
    fn algorithms(&self, convolution: &Convolution, descriptors: &Descriptors) -> Arc<[Algorithm]> {
        if let Some(algorithms) = self.known.lock().get(convolution) {
            return algorithms.clone();
        }
        let pass = convolution.pass;
        let sized = |algorithms: &[c_int]| -> Vec<Algorithm> {
            algorithms.iter().filter_map(|algorithm| self.workspace(pass, descriptors, *algorithm)).collect()
        };
        let algorithms: Arc<[Algorithm]> = match self.options.search {
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
        known.insert(convolution.clone(), algorithms.clone());
        algorithms
    }

    /// Returns an algorithm with its workspace size, if it supports the convolution.
    fn workspace(&self, pass: Pass, descriptors: &Descriptors, algorithm: c_int) -> Option<Algorithm> {
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
    fn estimated(&self, (pass, element): (Pass, DnnElement), descriptors: &Descriptors) -> Vec<Algorithm> {
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
