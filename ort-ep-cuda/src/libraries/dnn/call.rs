//! Execution of cuDNN convolutions.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ort_core::{Result, error};

use super::super::workspace::{with_alignment, workspace_of};
use super::convolution::{Algorithm, Convolution, Form, Pass, Search};
use super::descriptors::Descriptors;
use super::functions::is_unsupported;
use super::{Dnn, OwnedHandle};
use crate::driver::{RawStream, Routine};

/// A convolution by one algorithm. Its tensors are the two inputs in the order of its pass, then
/// bias, addend, result and workspace. Only the forward pass has forms with a bias.
pub(crate) struct DnnConvolution {
    dnn: Arc<Dnn>,
    convolution: Convolution,
    descriptors: Descriptors,
    form: Form,
    algorithm: Algorithm,
    /// Whether the library turned out to have no fused kernel for bias and ReLU.
    refused: AtomicBool,
}

/// The addresses of a call.
struct Places {
    first: *mut c_void,
    second: *mut c_void,
    bias: *mut c_void,
    z: *mut c_void,
    result: *mut c_void,
    scratch: *mut c_void,
    bytes: usize,
}

impl Places {
    fn new(tensors: &[(u64, u64)]) -> Result<Places> {
        let [(first, _), (second, _), (bias, _), (z, _), (result, _), scratch] = *tensors else {
            return Err(error!(Fail, "a convolution of {} tensors", tensors.len()));
        };
        let [first, second, bias, z, result] = [first, second, bias, z, result]
            .map(|address| ptr::with_exposed_provenance_mut(address as usize));
        let (scratch, bytes) = workspace_of(scratch);
        let scratch = ptr::with_exposed_provenance_mut(scratch as usize);
        Ok(Places { first, second, bias, z, result, scratch, bytes })
    }
}

/// The workspace limit in bytes unless all free memory may be used, as in ONNX Runtime.
const SMALL_WORKSPACE: usize = 32 << 20;

const ONE: f32 = 1.0;
const ZERO: f32 = 0.0;

impl Dnn {
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
        let all = self.algorithms(convolution, &descriptors);
        // The limit of the option applies on top of what the caller has.
        let room = if self.options.max_workspace { room } else { room.min(SMALL_WORKSPACE) };
        let mut fitting = all.iter().copied().filter(|(_, bytes)| with_alignment(*bytes) <= room);
        let Some(algorithm) = fitting.nth(turn) else { return Ok(None) };
        let made = DnnConvolution::new(self.clone(), (convolution.clone(), descriptors), form, algorithm);
        Ok(Some((made, with_alignment(algorithm.1))))
    }
}

impl DnnConvolution {
    fn new(
        dnn: Arc<Dnn>,
        (convolution, descriptors): (Convolution, Descriptors),
        form: Form,
        algorithm: Algorithm,
    ) -> DnnConvolution {
        DnnConvolution { dnn, convolution, descriptors, form, algorithm, refused: AtomicBool::new(false) }
    }

    /// Runs the bare convolution; with a `beta` of 1 it accumulates onto the result.
    fn sums(&self, handle: &OwnedHandle, at: &Places, beta: &f32) -> Result<()> {
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        let calls = functions.calls(self.convolution.pass);
        // SAFETY: handle and descriptors are live. The tensors are live memory of the context with
        // the shapes of their descriptors, and the workspace has `bytes` bytes. The context is
        // current: `Stream::ask` entered it.
        let status = unsafe {
            (calls.compute)(
                handle.0,
                &ONE,
                of.first,
                at.first,
                of.second,
                at.second,
                of.convolution,
                self.algorithm.0,
                at.scratch,
                at.bytes.min(self.algorithm.1),
                beta,
                of.result,
                at.result,
            )
        };
        functions.check(status, calls.name)
    }

    /// Runs the convolution with its epilogue in one call. Returns false if the library has no
    /// fused kernel.
    fn fused(&self, handle: &OwnedHandle, at: &Places) -> Result<bool> {
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        // The API demands an addend even if its factor is zero.
        let (z, factor) = if at.z.is_null() { (at.result, &ZERO) } else { (at.z, &ONE) };
        // SAFETY: as in `sums`.
        let status = unsafe {
            (functions.cudnnConvolutionBiasActivationForward)(
                handle.0,
                &ONE,
                of.first,
                at.first,
                of.second,
                at.second,
                of.convolution,
                self.algorithm.0,
                at.scratch,
                at.bytes.min(self.algorithm.1),
                factor,
                of.result,
                z,
                of.bias,
                at.bias,
                of.activation,
                of.result,
                at.result,
            )
        };
        // Unsupported means that nothing was enqueued, so the caller may run the steps instead.
        if is_unsupported(status) {
            return Ok(false);
        }
        functions.check(status, "cudnnConvolutionBiasActivationForward").map(|()| true)
    }

    /// Runs the same in separate calls.
    fn in_steps(&self, handle: &OwnedHandle, at: &Places) -> Result<()> {
        self.sums(handle, at, &ZERO)?;
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        for (tensor, address) in [(of.bias, at.bias), (of.result, at.z)] {
            if !address.is_null() {
                // SAFETY: as in `sums`.
                let status = unsafe {
                    (functions.cudnnAddTensor)(handle.0, &ONE, tensor, address, &ONE, of.result, at.result)
                };
                functions.check(status, "cudnnAddTensor")?;
            }
        }
        // SAFETY: as in `sums`; cuDNN allows an activation in place.
        let status = unsafe {
            (functions.cudnnActivationForward)(
                handle.0,
                of.activation,
                &ONE,
                of.result,
                at.result,
                &ZERO,
                of.result,
                at.result,
            )
        };
        functions.check(status, "cudnnActivationForward")
    }

    /// Directs the handle's calls to a stream.
    fn set_stream(&self, handle: &OwnedHandle, stream: RawStream) -> Result<()> {
        let functions = &self.dnn.loaded.functions;
        // SAFETY: handle and stream are live.
        functions.check(unsafe { (functions.cudnnSetStream)(handle.0, stream) }, "cudnnSetStream")
    }
}

impl Routine for DnnConvolution {
    fn name(&self) -> String {
        let (algorithm, bytes) = self.algorithm;
        let known = usize::try_from(algorithm)
            .ok()
            .and_then(|number| self.convolution.pass.names().get(number).copied());
        let form = match self.form {
            Form::Relu if !self.refused.load(Ordering::Relaxed) => " with bias and Relu",
            _ => "",
        };
        let pass = match self.convolution.pass {
            Pass::Forward => "",
            Pass::Data => "BackwardData ",
            Pass::Filter => "BackwardFilter ",
        };
        format!("cuDNN {pass}{}{form}, {bytes} bytes", known.unwrap_or("?"))
    }

    fn has_rivals(&self) -> bool {
        self.dnn.options.search == Search::Exhaustive
    }

    fn ask(&self, stream: RawStream, tensors: &[(u64, u64)]) -> Result<()> {
        let at = Places::new(tensors)?;
        let handle = self.dnn.handle.lock();
        self.set_stream(&handle, stream)?;
        match self.form {
            Form::Plain => self.sums(&handle, &at, &ZERO),
            Form::Onto => self.sums(&handle, &at, &ONE),
            Form::Relu => {
                // Once refused, the fused call is not tried again: it would fail on each run.
                if !self.refused.load(Ordering::Relaxed) {
                    if self.fused(&handle, &at)? {
                        return Ok(());
                    }
                    self.refused.store(true, Ordering::Relaxed);
                }
                // The same result, with a pass over it for each addend and for the activation.
                self.in_steps(&handle, &at)
            }
        }
    }
}
