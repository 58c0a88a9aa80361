//! A fake of NVIDIA's cuDNN: the functions of its legacy API that a provider calls for
//! convolutions.
//!
//! It reads descriptors as NVIDIA documents them (cuDNN, "API Reference"), and refuses what the
//! document forbids with the status of cuDNN 9 that it names.
//!
//! `ORT_CUDA_EMULATOR_CUDNN` sets the version that it reports (90100); with 0, creating a handle
//! fails. With `ORT_CUDA_EMULATOR_CUDNN_FUSED=0` no convolution supports a fused bias and
//! activation.

mod compute;
mod descriptors;

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};

use parking_lot::Mutex;

use super::routine::{Routine, ask_routine, scribble};
use super::{Handle, current, setting};
use compute::{Addition, Finish, activate, add, convolve};
use descriptors::{Convolution, Filter, Sizes, Tensor, check};

/// `CUDNN_CONVOLUTION_FWD_ALGO_WINOGRAD`.
const WINOGRAD: c_int = 6;

const NOT_INITIALIZED: c_int = 1001;
const BAD_PARAM: c_int = 2000;
const NOT_SUPPORTED: c_int = 3000;
const EXECUTION_FAILED: c_int = 5000;

type Status = Result<(), c_int>;

#[derive(Clone, Debug)]
enum Object {
    Library { stream: u64 },
    Tensor(Option<Tensor>),
    Filter(Option<Filter>),
    Convolution(Option<Convolution>),
    Activation { mode: c_int, propagates: bool },
}

/// The live objects by address.
static OBJECTS: Mutex<BTreeMap<u64, Object>> = Mutex::new(BTreeMap::new());

/// `cudnnConvolutionFwdAlgoPerf_t` and its like for the other passes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Performance {
    algorithm: c_int,
    status: c_int,
    time: f32,
    memory: usize,
    determinism: c_int,
    math: c_int,
    reserved: [c_int; 3],
}

/// Which of image, filter and result a pass computes from the other two.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Forward,
    Data,
    Filter,
}

impl Pass {
    /// The algorithms, the fastest first.
    fn algorithms(self) -> &'static [c_int] {
        match self {
            Pass::Forward => &[4, 6, 2, 1, 0],
            Pass::Data => &[0, 2, 4, 1],
            Pass::Filter => &[3, 0, 2, 1],
        }
    }

    /// The simulated time of an algorithm in microseconds.
    fn time(self, algorithm: c_int) -> u64 {
        let place = self.algorithms().iter().position(|one| *one == algorithm);
        1000 * (1 + place.unwrap_or(0) as u64)
    }

    /// The simulated time with a fused epilogue. Fused Winograd is made slow, so that an algorithm
    /// which is fast alone is not the fastest with its epilogue.
    fn time_of_fused(self, algorithm: c_int) -> u64 {
        if algorithm == WINOGRAD { 20 * self.time(algorithm) } else { self.time(algorithm) }
    }

    /// Whether an algorithm accumulates in the same order each time.
    fn is_deterministic(self, algorithm: c_int) -> bool {
        match self {
            Pass::Forward => true,
            Pass::Data => algorithm != 0,
            Pass::Filter => algorithm != 0 && algorithm != 3,
        }
    }

    /// Returns the workspace of an algorithm in bytes, or `None` if it does not support the
    /// convolution.
    fn workspace(self, algorithm: c_int, sizes: &Sizes) -> Option<usize> {
        let has_small_steps = sizes.axes.iter().all(|axis| axis.stride == 1 && axis.dilation == 1);
        let is = |size: usize| sizes.axes.iter().all(|axis| axis.kernel == size);
        let is_large = sizes.axes.iter().all(|axis| axis.kernel > 3);
        let is_of_winograd = has_small_steps && sizes.groups == 1 && is(3) && sizes.axes.len() == 2;
        match (self, algorithm) {
            // In NHWC there is only one algorithm, for the forward pass.
            (Pass::Forward, 1) if sizes.channels_last => Some(64 << 10),
            _ if sizes.channels_last => None,
            (_, 0) => Some(0),
            (_, 1) => Some(64 << 10),
            (Pass::Forward, 2) => (sizes.groups == 1).then_some(4 << 20),
            (Pass::Forward, 4) | (Pass::Data | Pass::Filter, 2) => {
                (has_small_steps && is_large).then_some(48 << 20)
            }
            (Pass::Forward, 6) | (Pass::Data, 4) => is_of_winograd.then_some(1 << 20),
            (Pass::Filter, 3) => Some(0),
            _ => None,
        }
    }

    /// Selects the computed one of image, filter and result.
    fn of<T: Copy>(self, [x, w, y]: [T; 3]) -> T {
        match self {
            Pass::Forward => y,
            Pass::Data => x,
            Pass::Filter => w,
        }
    }

    /// Orders the two given tensors, as the functions take them, and the computed one as image,
    /// filter and result.
    fn sorted<T>(self, first: T, second: T, result: T) -> [T; 3] {
        match self {
            Pass::Forward => [first, second, result],
            Pass::Data => [result, first, second],
            Pass::Filter => [first, result, second],
        }
    }

    /// Returns the sizes of a convolution with these descriptors, if they are consistent.
    fn sizes(self, first: Handle, second: Handle, conv: Handle, result: Handle) -> Result<Sizes, c_int> {
        let [x, w, y] = self.sorted(first, second, result);
        let Object::Filter(Some(filter)) = find(w)? else { return Err(BAD_PARAM) };
        check(tensor(x)?, filter, convolution(conv)?, tensor(y)?)
    }

    /// Checks that an algorithm supports a convolution with this workspace; returns the bytes that
    /// it uses.
    fn check_workspace(
        self,
        algorithm: c_int,
        sizes: &Sizes,
        (address, bytes): (u64, usize),
    ) -> Result<usize, c_int> {
        let needed = self.workspace(algorithm, sizes).ok_or(NOT_SUPPORTED)?;
        let fits = bytes >= needed && (needed == 0 || address != 0 && address.is_multiple_of(16));
        if fits { Ok(needed) } else { Err(BAD_PARAM) }
    }
}

fn version() -> usize {
    setting("ORT_CUDA_EMULATOR_CUDNN", 90_100)
}

fn new(to: *mut Handle, object: Object) -> Status {
    let mut objects = OBJECTS.lock();
    let key = objects.last_key_value().map_or(0x2_0000, |(key, _)| key + 16);
    objects.insert(key, object);
    write(to, key as Handle)
}

fn write<T>(to: *mut T, value: T) -> Status {
    if to.is_null() {
        return Err(BAD_PARAM);
    }
    // SAFETY: `to` is not null, and the API requires a valid pointer for a result.
    unsafe { to.write(value) };
    Ok(())
}

fn find(handle: Handle) -> Result<Object, c_int> {
    OBJECTS.lock().get(&(handle as u64)).cloned().ok_or(BAD_PARAM)
}

fn set(handle: Handle, object: Object) -> Status {
    let mut objects = OBJECTS.lock();
    let place = objects.get_mut(&(handle as u64)).ok_or(BAD_PARAM)?;
    if std::mem::discriminant(place) != std::mem::discriminant(&object) {
        return Err(BAD_PARAM);
    }
    *place = object;
    Ok(())
}

fn destroy(handle: Handle) -> Status {
    OBJECTS.lock().remove(&(handle as u64)).map(drop).ok_or(BAD_PARAM)
}

fn stream(handle: Handle) -> Result<Handle, c_int> {
    match find(handle) {
        Ok(Object::Library { stream }) => Ok(stream as Handle),
        _ => Err(NOT_INITIALIZED),
    }
}

fn tensor(handle: Handle) -> Result<Tensor, c_int> {
    if let Object::Tensor(Some(tensor)) = find(handle)? { Ok(tensor) } else { Err(BAD_PARAM) }
}

fn convolution(handle: Handle) -> Result<Convolution, c_int> {
    if let Object::Convolution(Some(convolution)) = find(handle)? { Ok(convolution) } else { Err(BAD_PARAM) }
}

fn ints(from: *const c_int, count: c_int) -> Result<Vec<c_int>, c_int> {
    if from.is_null() || !(1..=8).contains(&count) {
        return Err(BAD_PARAM);
    }
    // SAFETY: `from` is not null, and the API requires `count` numbers there.
    Ok(unsafe { std::slice::from_raw_parts(from, count as usize) }.to_vec())
}

fn scale(from: *const c_void) -> Result<f64, c_int> {
    if from.is_null() {
        return Err(BAD_PARAM);
    }
    // SAFETY: `from` is not null, and scaling factors are float32 for all supported types.
    Ok(f64::from(unsafe { from.cast::<f32>().read() }))
}

fn ask(
    stream: Handle,
    memory: Vec<(u64, usize)>,
    time: u64,
    work: impl Fn() + Send + Sync + 'static,
) -> Status {
    ask_routine(stream, Routine { memory, work: Box::new(work), time }).map_err(|_| EXECUTION_FAILED)
}

/// The simulated time of an elementwise pass in microseconds.
const PASS_TIME: u64 = 100;

/// The library's `cudnnGetVersion`.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetVersion() -> usize {
    version()
}

/// The library's `cudnnGetErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn cudnnGetErrorString(status: c_int) -> *const c_char {
    let text = match status {
        0 => c"CUDNN_STATUS_SUCCESS",
        NOT_INITIALIZED => c"CUDNN_STATUS_NOT_INITIALIZED",
        BAD_PARAM => c"CUDNN_STATUS_BAD_PARAM",
        NOT_SUPPORTED => c"CUDNN_STATUS_NOT_SUPPORTED",
        EXECUTION_FAILED => c"CUDNN_STATUS_EXECUTION_FAILED",
        _ => c"CUDNN_UNKNOWN_STATUS",
    };
    text.as_ptr()
}

library_api! {
    fn cudnnCreate(handle: *mut Handle) {
        drop(current().map_err(|_| NOT_INITIALIZED)?);
        if version() == 0 { Err(NOT_INITIALIZED) } else { new(handle, Object::Library { stream: 0 }) }
    }
    fn cudnnDestroy(handle: Handle) { stream(handle)?; destroy(handle) }
    fn cudnnSetStream(handle: Handle, to: Handle) { stream(handle)?; set(handle, Object::Library { stream: to as u64 }) }
    fn cudnnCreateTensorDescriptor(handle: *mut Handle) { new(handle, Object::Tensor(None)) }
    fn cudnnDestroyTensorDescriptor(handle: Handle) { destroy(handle) }
    fn cudnnSetTensorNdDescriptor(handle: Handle, ty: c_int, rank: c_int, sizes: *const c_int, steps: *const c_int) {
        let tensor = Tensor::new(ty, &ints(sizes, rank)?, &ints(steps, rank)?)?;
        set(handle, Object::Tensor(Some(tensor)))
    }
    fn cudnnCreateFilterDescriptor(handle: *mut Handle) { new(handle, Object::Filter(None)) }
    fn cudnnDestroyFilterDescriptor(handle: Handle) { destroy(handle) }
    fn cudnnSetFilterNdDescriptor(handle: Handle, ty: c_int, format: c_int, rank: c_int, sizes: *const c_int) {
        set(handle, Object::Filter(Some(Filter::new(ty, format, &ints(sizes, rank)?)?)))
    }
    fn cudnnCreateConvolutionDescriptor(handle: *mut Handle) { new(handle, Object::Convolution(None)) }
    fn cudnnDestroyConvolutionDescriptor(handle: Handle) { destroy(handle) }
    fn cudnnSetConvolutionNdDescriptor(
        handle: Handle,
        axes: c_int,
        pads: *const c_int,
        strides: *const c_int,
        dilations: *const c_int,
        mode: c_int,
        compute: c_int,
    ) {
        let lists = [ints(pads, axes)?, ints(strides, axes)?, ints(dilations, axes)?];
        set(handle, Object::Convolution(Some(Convolution::new(lists, mode, compute)?)))
    }
    fn cudnnSetConvolutionGroupCount(handle: Handle, groups: c_int) {
        let groups = usize::try_from(groups).ok().filter(|groups| *groups > 0).ok_or(BAD_PARAM)?;
        set(handle, Object::Convolution(Some(Convolution { groups, ..convolution(handle)? })))
    }
    fn cudnnSetConvolutionMathType(handle: Handle, math: c_int) {
        if !(0..=3).contains(&math) {
            return Err(BAD_PARAM);
        }
        set(handle, Object::Convolution(Some(Convolution { math, ..convolution(handle)? })))
    }
    fn cudnnCreateActivationDescriptor(handle: *mut Handle) {
        new(handle, Object::Activation { mode: -1, propagates: false })
    }
    fn cudnnDestroyActivationDescriptor(handle: Handle) { destroy(handle) }
    fn cudnnSetActivationDescriptor(handle: Handle, mode: c_int, nan: c_int, _coefficient: f64) {
        set(handle, Object::Activation { mode, propagates: nan == 1 })
    }
    fn cudnnConvolutionBiasActivationForward(
        handle: Handle,
        alpha: *const c_void,
        x_of: Handle,
        x: u64,
        w_of: Handle,
        w: u64,
        conv: Handle,
        algorithm: c_int,
        scratch: u64,
        scratch_bytes: usize,
        alpha2: *const c_void,
        z_of: Handle,
        z: u64,
        bias_of: Handle,
        bias: u64,
        activation: Handle,
        y_of: Handle,
        y: u64,
    ) {
        let stream = stream(handle)?;
        let sizes = Pass::Forward.sizes(x_of, w_of, conv, y_of)?;
        let (alpha, factor) = (scale(alpha)?, scale(alpha2)?);
        let Object::Activation { mode, propagates } = find(activation)? else { return Err(BAD_PARAM) };
        let (of_y, of_z, of_bias) = (tensor(y_of)?, tensor(z_of)?, tensor(bias_of)?);
        if of_z != of_y || !of_bias.is_vector(&of_y) || bias == 0 || z == 0 {
            return Err(BAD_PARAM);
        }
        let is_fused = setting("ORT_CUDA_EMULATOR_CUDNN_FUSED", 1) == 1;
        // As documented, a convolution without an activation is supported by one algorithm only.
        if !is_fused || !(mode == 1 || mode == 5 && algorithm == 1) {
            return Err(NOT_SUPPORTED);
        }
        let needed = Pass::Forward.check_workspace(algorithm, &sizes, (scratch, scratch_bytes))?;
        let mut memory = sizes.memory(x, w, y).to_vec();
        memory.extend([(scratch, needed), (bias, of_bias.bytes()), (z, of_z.bytes())]);
        ask(stream, memory, Pass::Forward.time_of_fused(algorithm), move || {
            scribble(scratch, needed);
            // A factor of zero must not read `z`, which may hold NaN.
            let addend = (factor != 0.0).then_some((z, factor));
            convolve(&sizes, Pass::Forward, [x, w, y], &Finish { alpha, addend, bias: Some(bias), has_relu: mode == 1, propagates });
        })
    }
    fn cudnnAddTensor(handle: Handle, alpha: *const c_void, a_of: Handle, a: u64, beta: *const c_void, y_of: Handle, y: u64) {
        let stream = stream(handle)?;
        let (a_of, y_of) = (tensor(a_of)?, tensor(y_of)?);
        if a_of != y_of && !a_of.is_vector(&y_of) {
            return Err(BAD_PARAM);
        }
        let memory = vec![(a, a_of.bytes()), (y, y_of.bytes())];
        let addition = Addition { a_of, y_of, alpha: scale(alpha)?, beta: scale(beta)? };
        ask(stream, memory, PASS_TIME, move || add(&addition, a, y))
    }
    fn cudnnActivationForward(
        handle: Handle,
        activation: Handle,
        alpha: *const c_void,
        x_of: Handle,
        x: u64,
        beta: *const c_void,
        y_of: Handle,
        y: u64,
    ) {
        let stream = stream(handle)?;
        let Object::Activation { mode: 1, propagates } = find(activation)? else { return Err(NOT_SUPPORTED) };
        let (x_of, y_of) = (tensor(x_of)?, tensor(y_of)?);
        if x_of != y_of || scale(alpha)? != 1.0 || scale(beta)? != 0.0 {
            return Err(NOT_SUPPORTED);
        }
        let memory = vec![(x, x_of.bytes()), (y, y_of.bytes())];
        ask(stream, memory, PASS_TIME, move || activate(&x_of, x, y, propagates))
    }
}

macro_rules! pass_api {
    ($pass:expr, $workspace:ident, $estimate:ident, $compute:ident) => {
        library_api! {
            fn $workspace(
                handle: Handle,
                first: Handle,
                second: Handle,
                conv: Handle,
                result: Handle,
                algorithm: c_int,
                bytes: *mut usize,
            ) {
                stream(handle)?;
                let sizes = $pass.sizes(first, second, conv, result)?;
                write(bytes, $pass.workspace(algorithm, &sizes).ok_or(NOT_SUPPORTED)?)
            }
            fn $estimate(
                handle: Handle,
                first: Handle,
                second: Handle,
                conv: Handle,
                result: Handle,
                requested: c_int,
                count: *mut c_int,
                found: *mut Performance,
            ) {
                stream(handle)?;
                performances($pass, &$pass.sizes(first, second, conv, result)?, requested, count, found)
            }
            fn $compute(
                handle: Handle,
                alpha: *const c_void,
                first_of: Handle,
                first: u64,
                second_of: Handle,
                second: u64,
                conv: Handle,
                algorithm: c_int,
                scratch: u64,
                scratch_bytes: usize,
                beta: *const c_void,
                result_of: Handle,
                result: u64,
            ) {
                let stream = stream(handle)?;
                let sizes = $pass.sizes(first_of, second_of, conv, result_of)?;
                let (alpha, beta) = (scale(alpha)?, scale(beta)?);
                let needed = $pass.check_workspace(algorithm, &sizes, (scratch, scratch_bytes))?;
                let [x, w, y] = $pass.sorted(first, second, result);
                let memory = sizes.memory(x, w, y).into_iter().chain([(scratch, needed)]).collect();
                ask(stream, memory, $pass.time(algorithm), move || {
                    scribble(scratch, needed);
                    let addend = (beta != 0.0).then_some((result, beta));
                    convolve(&sizes, $pass, [x, w, y], &Finish { alpha, addend, ..Finish::default() });
                })
            }
        }
    };
}

pass_api!(
    Pass::Forward,
    cudnnGetConvolutionForwardWorkspaceSize,
    cudnnGetConvolutionForwardAlgorithm_v7,
    cudnnConvolutionForward
);
pass_api!(
    Pass::Data,
    cudnnGetConvolutionBackwardDataWorkspaceSize,
    cudnnGetConvolutionBackwardDataAlgorithm_v7,
    cudnnConvolutionBackwardData
);
pass_api!(
    Pass::Filter,
    cudnnGetConvolutionBackwardFilterWorkspaceSize,
    cudnnGetConvolutionBackwardFilterAlgorithm_v7,
    cudnnConvolutionBackwardFilter
);

/// Reports the algorithms, the unsupported ones last.
fn performances(
    pass: Pass,
    sizes: &Sizes,
    requested: c_int,
    count: *mut c_int,
    found: *mut Performance,
) -> Status {
    if requested < 1 || found.is_null() {
        return Err(BAD_PARAM);
    }
    let one = |algorithm: &c_int| {
        let memory = pass.workspace(*algorithm, sizes);
        let status = if memory.is_some() { 0 } else { NOT_SUPPORTED };
        let memory = memory.unwrap_or(0);
        Performance {
            algorithm: *algorithm,
            status,
            // An estimate has no time.
            time: -1.0,
            memory,
            math: sizes.math,
            determinism: c_int::from(pass.is_deterministic(*algorithm)),
            ..Performance::default()
        }
    };
    let mut all: Vec<Performance> = pass.algorithms().iter().map(one).collect();
    all.sort_by_key(|one| one.status != 0);
    all.truncate(requested as usize);
    for (place, one) in all.iter().enumerate() {
        // SAFETY: `found` is not null, the API requires room for `requested` elements, and `all`
        // was truncated to that number.
        unsafe { found.add(place).write(*one) };
    }
    write(count, all.len() as c_int)
}
