//! The calls of a convolution.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ort_core::{Result, error};

use super::super::workspace_of;
use super::descriptors::Descriptors;
use super::functions::is_unsupported;
use super::{Convolution, Dnn, Form, Owned, Pass, Search, Way};
use crate::driver::{RawStream, Routine};

/// A convolution by one algorithm. Its tensors are the two that are given, in the order of its
/// pass, bias, addend, result and workspace. Forms with a bias are of the forward pass.
pub(crate) struct DnnConvolution {
    dnn: Arc<Dnn>,
    convolution: Convolution,
    descriptors: Descriptors,
    form: Form,
    way: Way,
    /// Whether the library has no code for bias and ReLU in the same call.
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

const ONE: f32 = 1.0;
const ZERO: f32 = 0.0;

impl DnnConvolution {
    pub(super) fn new(
        dnn: Arc<Dnn>,
        (convolution, descriptors): (Convolution, Descriptors),
        form: Form,
        way: Way,
    ) -> DnnConvolution {
        DnnConvolution { dnn, convolution, descriptors, form, way, refused: AtomicBool::new(false) }
    }

    /// The sums alone, added to what is in the result's memory where `beta` is 1.
    fn sums(&self, handle: &Owned, at: &Places, beta: &f32) -> Result<()> {
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        let calls = functions.calls(self.convolution.pass);
        // SAFETY: handle and descriptors are live; the tensors lie in live memory of the context as
        // they say, and the workspace has as many bytes. The context is current.
        let status = unsafe {
            (calls.compute)(
                handle.0,
                &ONE,
                of.first,
                at.first,
                of.second,
                at.second,
                of.convolution,
                self.way.0,
                at.scratch,
                at.bytes.min(self.way.1),
                beta,
                of.result,
                at.result,
            )
        };
        functions.check(status, calls.name)
    }

    /// All of it in one call; whether the library has code for that.
    fn fused(&self, handle: &Owned, at: &Places) -> Result<bool> {
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        // An addend must be given also where it is multiplied by nothing.
        let (z, factor) = if at.z.is_null() { (at.result, &ZERO) } else { (at.z, &ONE) };
        // SAFETY: as above.
        let status = unsafe {
            (functions.cudnnConvolutionBiasActivationForward)(
                handle.0,
                &ONE,
                of.first,
                at.first,
                of.second,
                at.second,
                of.convolution,
                self.way.0,
                at.scratch,
                at.bytes.min(self.way.1),
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
        if is_unsupported(status) {
            return Ok(false);
        }
        functions.check(status, "cudnnConvolutionBiasActivationForward").map(|()| true)
    }

    /// The same in several calls.
    fn in_steps(&self, handle: &Owned, at: &Places) -> Result<()> {
        self.sums(handle, at, &ZERO)?;
        let (of, functions) = (self.descriptors.handles(self.convolution.pass), &self.dnn.loaded.functions);
        for (tensor, address) in [(of.bias, at.bias), (of.result, at.z)] {
            if !address.is_null() {
                // SAFETY: as above.
                let status = unsafe {
                    (functions.cudnnAddTensor)(handle.0, &ONE, tensor, address, &ONE, of.result, at.result)
                };
                functions.check(status, "cudnnAddTensor")?;
            }
        }
        // SAFETY: as above; the result may be in the place of what it is of.
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

    /// The library's handle, whose calls go to a stream.
    fn set_stream(&self, handle: &Owned, stream: RawStream) -> Result<()> {
        let functions = &self.dnn.loaded.functions;
        // SAFETY: both are live.
        functions.check(unsafe { (functions.cudnnSetStream)(handle.0, stream) }, "cudnnSetStream")
    }
}

impl Routine for DnnConvolution {
    fn name(&self) -> String {
        let (algorithm, bytes) = self.way;
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
                if !self.refused.load(Ordering::Relaxed) {
                    if self.fused(&handle, &at)? {
                        return Ok(());
                    }
                    self.refused.store(true, Ordering::Relaxed);
                }
                self.in_steps(&handle, &at)
            }
        }
    }
}
