//! cuDNN descriptors of a convolution. They are host memory.

use std::ffi::c_int;
use std::ptr;
use std::sync::Arc;

use ort_core::{Result, error};
use smallvec::SmallVec;

use super::super::load::Loaded;
use super::convolution::{Convolution, DnnElement, Handle, Pass};
use super::functions::DnnFunctions;
use crate::launch::strides;

const NCHW: c_int = 0;
const NHWC: c_int = 1;
const CROSS_CORRELATION: c_int = 1;
const TENSOR_OP_MATH: c_int = 1;
const DEFAULT_MATH: c_int = 0;
const FMA_MATH: c_int = 3;
const ACTIVATION_RELU: c_int = 1;
const PROPAGATE_NAN: c_int = 1;

type Create = unsafe extern "C" fn(*mut Handle) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;

/// An opaque structure of the library.
struct DnnDescriptor {
    handle: Handle,
    destroy: Destroy,
}

// SAFETY: a descriptor is not tied to a thread, and users share it under the handle's lock.
unsafe impl Send for DnnDescriptor {}
// SAFETY: after construction, descriptors are only read, by calls under the handle's lock.
unsafe impl Sync for DnnDescriptor {}

impl DnnDescriptor {
    fn new(functions: &DnnFunctions, create: Create, destroy: Destroy) -> Result<DnnDescriptor> {
        let mut handle = ptr::null_mut();
        // SAFETY: the library writes one handle, which `Drop` destroys.
        functions.check(unsafe { create(&mut handle) }, "creating a descriptor")?;
        Ok(DnnDescriptor { handle, destroy })
    }
}

impl Drop for DnnDescriptor {
    fn drop(&mut self) {
        // SAFETY: the descriptor is live, and the library does not read it after a call returns.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

/// The descriptors of a convolution.
pub(super) struct Descriptors {
    x: DnnDescriptor,
    w: DnnDescriptor,
    y: DnnDescriptor,
    bias: DnnDescriptor,
    convolution: DnnDescriptor,
    activation: DnnDescriptor,
    /// Keeps the library's code, which destroys the descriptors.
    _loaded: Arc<Loaded<DnnFunctions>>,
}

/// The handles of [`Descriptors`].
#[derive(Clone, Copy)]
pub(super) struct Handles {
    /// Of the inputs.
    pub(super) first: Handle,
    pub(super) second: Handle,
    /// Of the result.
    pub(super) result: Handle,
    pub(super) bias: Handle,
    pub(super) convolution: Handle,
    pub(super) activation: Handle,
}

fn ints(sizes: &[usize]) -> Result<SmallVec<[c_int; 5]>> {
    let int = |size: &usize| {
        c_int::try_from(*size)
            .map_err(|_| error!(NotImplemented, "a size of {size} in a convolution of cuDNN"))
    };
    sizes.iter().map(int).collect()
}

impl Descriptors {
    pub(super) fn new(loaded: &Arc<Loaded<DnnFunctions>>, of: &Convolution) -> Result<Descriptors> {
        let f = &loaded.functions;
        let tensor = |sizes: &[usize]| tensor(f, of, sizes);
        let channels: Vec<usize> =
            of.y.iter().enumerate().map(|(axis, size)| if axis == 1 { *size } else { 1 }).collect();
        let (x, y, bias) = (tensor(&of.x)?, tensor(&of.y)?, tensor(&channels)?);
        let w = DnnDescriptor::new(f, f.cudnnCreateFilterDescriptor, f.cudnnDestroyFilterDescriptor)?;
        let sizes = ints(&of.w)?;
        let (ty, rank) = (type_of(of.element), sizes.len() as c_int);
        let format = if of.channels_last { NHWC } else { NCHW };
        // SAFETY: the descriptor is live; `sizes` has `rank` elements.
        let status = unsafe { (f.cudnnSetFilterNdDescriptor)(w.handle, ty, format, rank, sizes.as_ptr()) };
        f.check(status, "cudnnSetFilterNdDescriptor")?;
        let convolution = windows(f, of)?;
        let activation =
            DnnDescriptor::new(f, f.cudnnCreateActivationDescriptor, f.cudnnDestroyActivationDescriptor)?;
        // SAFETY: the descriptor is live.
        let status = unsafe {
            (f.cudnnSetActivationDescriptor)(activation.handle, ACTIVATION_RELU, PROPAGATE_NAN, 0.0)
        };
        f.check(status, "cudnnSetActivationDescriptor")?;
        Ok(Descriptors { x, w, y, bias, convolution, activation, _loaded: loaded.clone() })
    }

    pub(super) fn handles(&self, pass: Pass) -> Handles {
        let [x, w, y] = [&self.x, &self.w, &self.y].map(|descriptor| descriptor.handle);
        let (first, second, result) = match pass {
            Pass::Forward => (x, w, y),
            Pass::Data => (w, y, x),
            Pass::Filter => (x, y, w),
        };
        Handles {
            first,
            second,
            result,
            bias: self.bias.handle,
            convolution: self.convolution.handle,
            activation: self.activation.handle,
        }
    }
}

/// Returns the strides of a tensor whose sizes list the channels second.
fn steps_of(sizes: &[usize], channels_last: bool) -> Vec<usize> {
    match sizes {
        [_, channels, places @ ..] if channels_last => {
            let pixels = places.iter().fold(1, |pixels: usize, size| pixels.saturating_mul(*size));
            let of_places = strides(places).into_iter().map(|step| step.saturating_mul(*channels));
            [pixels.saturating_mul(*channels), 1].into_iter().chain(of_places).collect()
        }
        _ => strides(sizes),
    }
}

fn tensor(f: &DnnFunctions, of: &Convolution, sizes: &[usize]) -> Result<DnnDescriptor> {
    let made = DnnDescriptor::new(f, f.cudnnCreateTensorDescriptor, f.cudnnDestroyTensorDescriptor)?;
    let (steps, sizes) = (ints(&steps_of(sizes, of.channels_last))?, ints(sizes)?);
    let (ty, rank) = (type_of(of.element), sizes.len() as c_int);
    // SAFETY: the descriptor is live; `sizes` and `steps` have `rank` elements.
    let status =
        unsafe { (f.cudnnSetTensorNdDescriptor)(made.handle, ty, rank, sizes.as_ptr(), steps.as_ptr()) };
    f.check(status, "cudnnSetTensorNdDescriptor")?;
    Ok(made)
}

fn windows(f: &DnnFunctions, of: &Convolution) -> Result<DnnDescriptor> {
    let made =
        DnnDescriptor::new(f, f.cudnnCreateConvolutionDescriptor, f.cudnnDestroyConvolutionDescriptor)?;
    let (pads, strides, dilations) = (ints(&of.pads)?, ints(&of.strides)?, ints(&of.dilations)?);
    // SAFETY: the descriptor is live; each list has one number per axis.
    let status = unsafe {
        (f.cudnnSetConvolutionNdDescriptor)(
            made.handle,
            pads.len() as c_int,
            pads.as_ptr(),
            strides.as_ptr(),
            dilations.as_ptr(),
            CROSS_CORRELATION,
            type_of(DnnElement::F32),
        )
    };
    f.check(status, "cudnnSetConvolutionNdDescriptor")?;
    let groups = c_int::try_from(of.groups).map_err(|_| error!(NotImplemented, "{} groups", of.groups))?;
    // SAFETY: the descriptor is live.
    let status = unsafe { (f.cudnnSetConvolutionGroupCount)(made.handle, groups) };
    f.check(status, "cudnnSetConvolutionGroupCount")?;
    // The library's default for float32 is TF32, so full precision asks for FMA explicitly.
    let math = match of.element {
        DnnElement::F32 if of.tf32 => DEFAULT_MATH,
        DnnElement::F32 => FMA_MATH,
        DnnElement::F16 | DnnElement::Bf16 => TENSOR_OP_MATH,
    };
    // SAFETY: the descriptor is live.
    let status = unsafe { (f.cudnnSetConvolutionMathType)(made.handle, math) };
    f.check(status, "cudnnSetConvolutionMathType")?;
    Ok(made)
}

/// Returns the `cudnnDataType_t`.
fn type_of(element: DnnElement) -> c_int {
    match element {
        DnnElement::F32 => 0,
        DnnElement::F16 => 2,
        DnnElement::Bf16 => 9,
    }
}
