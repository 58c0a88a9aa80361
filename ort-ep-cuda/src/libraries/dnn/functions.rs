//! Foreign functions of cuDNN: its legacy API, which versions 8 and 9 both have.

use std::ffi::{CStr, c_char, c_int, c_void};

use ort_core::{Result, error};

use super::super::load::functions;
use super::convolution::{Handle, Pass};
use crate::driver::RawStream;

type Numbers = *const c_int;
type Address = *mut c_void;
type Factor = *const f32;

functions! {
    /// The functions of cuDNN that we call.
    DnnFunctions, cudnnGetVersion,
    fn cudnnGetVersion() -> usize;
    fn cudnnGetErrorString(status: c_int) -> *const c_char;
    fn cudnnCreate(handle: *mut Handle) -> c_int;
    fn cudnnDestroy(handle: Handle) -> c_int;
    fn cudnnSetStream(handle: Handle, stream: RawStream) -> c_int;
    fn cudnnCreateTensorDescriptor(tensor: *mut Handle) -> c_int;
    fn cudnnDestroyTensorDescriptor(tensor: Handle) -> c_int;
    fn cudnnSetTensorNdDescriptor(tensor: Handle, ty: c_int, rank: c_int, sizes: Numbers, steps: Numbers) -> c_int;
    fn cudnnCreateFilterDescriptor(filter: *mut Handle) -> c_int;
    fn cudnnDestroyFilterDescriptor(filter: Handle) -> c_int;
    fn cudnnSetFilterNdDescriptor(filter: Handle, ty: c_int, format: c_int, rank: c_int, sizes: Numbers) -> c_int;
    fn cudnnCreateConvolutionDescriptor(convolution: *mut Handle) -> c_int;
    fn cudnnDestroyConvolutionDescriptor(convolution: Handle) -> c_int;
    fn cudnnSetConvolutionNdDescriptor(
        convolution: Handle, axes: c_int, pads: Numbers, strides: Numbers, dilations: Numbers, mode: c_int, compute: c_int,
    ) -> c_int;
    fn cudnnSetConvolutionGroupCount(convolution: Handle, groups: c_int) -> c_int;
    fn cudnnSetConvolutionMathType(convolution: Handle, math: c_int) -> c_int;
    fn cudnnCreateActivationDescriptor(activation: *mut Handle) -> c_int;
    fn cudnnDestroyActivationDescriptor(activation: Handle) -> c_int;
    fn cudnnSetActivationDescriptor(activation: Handle, mode: c_int, nan: c_int, coefficient: f64) -> c_int;
    fn cudnnGetConvolutionForwardWorkspaceSize(
        handle: Handle, x: Handle, w: Handle, convolution: Handle, y: Handle, algorithm: c_int, bytes: *mut usize,
    ) -> c_int;
    fn cudnnGetConvolutionForwardAlgorithm_v7(
        handle: Handle, x: Handle, w: Handle, convolution: Handle, y: Handle, requested: c_int, count: *mut c_int,
        found: *mut Performance,
    ) -> c_int;
    fn cudnnConvolutionForward(
        handle: Handle, alpha: Factor, x_of: Handle, x: Address, w_of: Handle, w: Address, convolution: Handle,
        algorithm: c_int, workspace: Address, bytes: usize, beta: Factor, y_of: Handle, y: Address,
    ) -> c_int;
    fn cudnnGetConvolutionBackwardDataWorkspaceSize(
        handle: Handle, w: Handle, dy: Handle, convolution: Handle, dx: Handle, algorithm: c_int, bytes: *mut usize,
    ) -> c_int;
    fn cudnnGetConvolutionBackwardDataAlgorithm_v7(
        handle: Handle, w: Handle, dy: Handle, convolution: Handle, dx: Handle, requested: c_int, count: *mut c_int,
        found: *mut Performance,
    ) -> c_int;
    fn cudnnConvolutionBackwardData(
        handle: Handle, alpha: Factor, w_of: Handle, w: Address, dy_of: Handle, dy: Address, convolution: Handle,
        algorithm: c_int, workspace: Address, bytes: usize, beta: Factor, dx_of: Handle, dx: Address,
    ) -> c_int;
    fn cudnnGetConvolutionBackwardFilterWorkspaceSize(
        handle: Handle, x: Handle, dy: Handle, convolution: Handle, dw: Handle, algorithm: c_int, bytes: *mut usize,
    ) -> c_int;
    fn cudnnGetConvolutionBackwardFilterAlgorithm_v7(
        handle: Handle, x: Handle, dy: Handle, convolution: Handle, dw: Handle, requested: c_int, count: *mut c_int,
        found: *mut Performance,
    ) -> c_int;
    fn cudnnConvolutionBackwardFilter(
        handle: Handle, alpha: Factor, x_of: Handle, x: Address, dy_of: Handle, dy: Address, convolution: Handle,
        algorithm: c_int, workspace: Address, bytes: usize, beta: Factor, dw_of: Handle, dw: Address,
    ) -> c_int;
    fn cudnnConvolutionBiasActivationForward(
        handle: Handle, alpha: Factor, x_of: Handle, x: Address, w_of: Handle, w: Address, convolution: Handle,
        algorithm: c_int, workspace: Address, bytes: usize, factor: Factor, z_of: Handle, z: Address, bias_of: Handle,
        bias: Address, activation: Handle, y_of: Handle, y: Address,
    ) -> c_int;
    fn cudnnAddTensor(
        handle: Handle, alpha: Factor, a_of: Handle, a: Address, beta: Factor, y_of: Handle, y: Address,
    ) -> c_int;
    fn cudnnActivationForward(
        handle: Handle, activation: Handle, alpha: Factor, x_of: Handle, x: Address, beta: Factor, y_of: Handle, y: Address,
    ) -> c_int;
}

/// `cudnnConvolutionFwdAlgoPerf_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::libraries) struct Performance {
    pub(super) algorithm: c_int,
    pub(super) status: c_int,
    time: f32,
    pub(super) memory: usize,
    determinism: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// `CUDNN_STATUS_NOT_SUPPORTED` before version 9; later status codes have four digits.
const OLD_NOT_SUPPORTED: c_int = 9;

/// Whether a status says that the library has no implementation for the request and did nothing.
pub(super) fn is_unsupported(status: c_int) -> bool {
    status == OLD_NOT_SUPPORTED || (3000..4000).contains(&status)
}

/// The functions of one [`Pass`]. Each takes two inputs and a result, in this order.
pub(super) struct Calls {
    pub(super) workspace:
        unsafe extern "C" fn(Handle, Handle, Handle, Handle, Handle, c_int, *mut usize) -> c_int,
    pub(super) estimate: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut c_int,
        *mut Performance,
    ) -> c_int,
    pub(super) compute: unsafe extern "C" fn(
        Handle,
        Factor,
        Handle,
        Address,
        Handle,
        Address,
        Handle,
        c_int,
        Address,
        usize,
        Factor,
        Handle,
        Address,
    ) -> c_int,
    /// The name of `compute`.
    pub(super) name: &'static str,
}

impl DnnFunctions {
    pub(super) fn calls(&self, pass: Pass) -> Calls {
        match pass {
            Pass::Forward => Calls {
                workspace: self.cudnnGetConvolutionForwardWorkspaceSize,
                estimate: self.cudnnGetConvolutionForwardAlgorithm_v7,
                compute: self.cudnnConvolutionForward,
                name: "cudnnConvolutionForward",
            },
            Pass::Data => Calls {
                workspace: self.cudnnGetConvolutionBackwardDataWorkspaceSize,
                estimate: self.cudnnGetConvolutionBackwardDataAlgorithm_v7,
                compute: self.cudnnConvolutionBackwardData,
                name: "cudnnConvolutionBackwardData",
            },
            Pass::Filter => Calls {
                workspace: self.cudnnGetConvolutionBackwardFilterWorkspaceSize,
                estimate: self.cudnnGetConvolutionBackwardFilterAlgorithm_v7,
                compute: self.cudnnConvolutionBackwardFilter,
                name: "cudnnConvolutionBackwardFilter",
            },
        }
    }

    /// Returns the library's own text for a status.
    pub(super) fn describe(&self, status: c_int) -> String {
        // SAFETY: the library returns a string that lives as long as it does, or null.
        let text = unsafe { (self.cudnnGetErrorString)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: the pointer is not null (checked above), and the library's strings are
        // NUL-terminated.
        format!("status {status} ({})", unsafe { CStr::from_ptr(text) }.to_string_lossy())
    }

    pub(super) fn check(&self, status: c_int, what: &str) -> Result<()> {
        match status {
            0 => Ok(()),
            _ => Err(error!(EpFail, "{what}: {}", self.describe(status))
                .help("set use_cudnn to 0: the provider's own kernels need no library")),
        }
    }
}
