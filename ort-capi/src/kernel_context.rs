//! `OrtKernelContext`: a call of a client's kernel.
//!
//! Inputs are lent where they lie. An output is the plan's memory if the plan knows its shape, else
//! memory that the run allocates when the kernel says the shape. The engine gets it at the end.

use std::ffi::{c_int, c_void};
use std::ops::Range;

use ort_cpu_threads::parallel::for_each_chunk;
use ort_runtime::DType;
use ort_runtime::ep::{NewTensor, RunControl, RunCx};
use ort_runtime::fork::Mutex;
use ort_runtime::tensor::{CompactString, Shape, TensorMut, ValueView};
use ort_sys::{OrtAllocator, OrtKernelContext};

use crate::allocator::{Allocator, default_allocator};
use crate::entry::{Array, In, Object, Out, entries, kinds};
use crate::kernel_info::KernelInfo;
use crate::logger::{Logger, logger};
use crate::memory_info::MemoryInfo;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::strings::Strings;
use crate::value::{Numbers, Value, sizes_of};

/// A call of a kernel, as C sees it.
pub(crate) struct KernelContext {
    inputs: Vec<Option<Object<Value>>>,
    outputs: Mutex<Vec<Output>>,
    /// The engine's side, for allocations. It outlives the call.
    run: *const RunCx<'static>,
    threads: usize,
}

// SAFETY: several threads of one call use it only through the lock, and `run` only to allocate,
// which the engine allows from any thread.
unsafe impl Send for KernelContext {}
// SAFETY: as above.
unsafe impl Sync for KernelContext {}

kinds! {
    KernelContext => "OrtKernelContext", b"OrtKrnCo";
}

/// An output of the node.
enum Output {
    /// The model leaves it out.
    Absent,
    /// Its shape is not known yet; its element type may not be, either.
    Open(Option<DType>),
    /// It has memory of the plan.
    Planned(Box<Object<Value>>),
    /// Numbers in memory that the run has allocated.
    New {
        value: Box<Object<Value>>,
        tensor: NewTensor,
    },
    Strings(Box<Object<Value>>),
}

/// The context of a call, at an address that C holds.
pub(crate) struct Call(Box<Object<KernelContext>>);

impl KernelContext {
    pub(crate) fn of_run(cx: &mut RunCx<'_>, info: &KernelInfo) -> Outcome<Call> {
        let mut outputs = Vec::with_capacity(cx.output_count());
        let mut shared: Vec<(usize, Numbers)> = Vec::new();
        for (index, dtype) in info.outputs().enumerate() {
            let in_place = cx.in_place(index);
            outputs.push(match (dtype, cx.output_shape(index)) {
                (None, _) => Output::Absent,
                (Some(dtype), None) => Output::Open(dtype),
                (Some(_), Some(_)) => {
                    let numbers = written(cx.output(index)?)?;
                    shared.extend(in_place.map(|input| (input, numbers.clone())));
                    Output::Planned(Box::new(Object::new(Value::Numbers(numbers))))
                }
            });
        }
        let mut inputs = Vec::with_capacity(cx.input_count());
        for index in 0..cx.input_count() {
            let taken = shared.iter().find(|(input, _)| *input == index);
            inputs.push(match (taken, cx.has_input(index)) {
                (Some((_, numbers)), _) => Some(Value::Numbers(numbers.clone())),
                (None, true) => Some(read(cx, index)?),
                (None, false) => None,
            });
        }
        let run = std::ptr::from_ref::<RunCx<'_>>(cx).cast::<RunCx<'static>>();
        let inputs = inputs.into_iter().map(|input| input.map(Object::new)).collect();
        let (threads, outputs) = (cx.threads(), Mutex::new(outputs));
        Ok(Call(Box::new(Object::new(KernelContext { inputs, outputs, run, threads }))))
    }

    /// Makes an output of this shape, or returns the one that was made before.
    fn output(&self, index: usize, dims: &[i64]) -> Outcome<*mut Object<Value>> {
        let mut outputs = self.outputs.lock();
        let Some(output) = outputs.get_mut(index) else { return Ok(std::ptr::null_mut()) };
        let sizes = sizes_of(dims)?;
        if let Output::Open(dtype) = *output {
            let dtype = dtype.ok_or_else(|| {
                Failure::new(code::FAIL, format!("the element type of output {index} is not known"))
            })?;
            *output = self.new_output(dtype, &sizes)?;
        }
        let value = match output {
            Output::Absent | Output::Open(_) => return Ok(std::ptr::null_mut()),
            Output::Planned(value) | Output::New { value, .. } | Output::Strings(value) => value,
        };
        let (_, known) = value.inner.described()?;
        if known != dims {
            return fail(
                code::RUNTIME_EXCEPTION,
                format!(
                    "OrtValue shape verification failed. Current shape:{known:?} Requested shape:{dims:?} of output \
                     {index}; the shape is that of the operator's shape inference, or of an earlier call"
                ),
            );
        }
        Ok(&raw mut **value)
    }

    fn new_output(&self, dtype: DType, sizes: &[usize]) -> Outcome<Output> {
        if dtype == DType::String {
            return Ok(Output::Strings(Box::new(Object::new(Value::Strings(Strings::empty(sizes)?)))));
        }
        // SAFETY: `of_run` made the pointer, and its source lives until the end of the call.
        let mut tensor = unsafe { &*self.run }.allocate(dtype, sizes)?;
        // SAFETY: the bytes stay where they are until `finish`, which drops the value first.
        let numbers = unsafe { Numbers::of_bytes(dtype, sizes, tensor.bytes_mut()?)? };
        let value = Box::new(Object::new(Value::Numbers(numbers)));
        Ok(Output::New { value, tensor })
    }

    /// The limits of the run that calls the kernel.
    pub(crate) fn control(&self) -> &RunControl {
        // SAFETY: as in `new_output`.
        unsafe { &*self.run }.control()
    }
}

impl Call {
    pub(crate) fn pointer(&mut self) -> *mut OrtKernelContext {
        (&raw mut *self.0).cast()
    }

    /// Hands the outputs over to the engine.
    pub(crate) fn finish(self, cx: &mut RunCx<'_>) -> Outcome {
        let outputs = std::mem::take(&mut *self.0.inner.outputs.lock());
        drop(self);
        for (index, output) in outputs.into_iter().enumerate() {
            match output {
                Output::Absent | Output::Planned(_) | Output::Open(_) => {}
                Output::New { value, tensor } => {
                    drop(value);
                    cx.set(index, tensor.finish()?)?;
                }
                Output::Strings(value) => {
                    let tensor = value.inner.strings()?.tensor()?;
                    let texts: Vec<CompactString> = tensor.strings()?.to_vec();
                    let tensor = cx.strings(tensor.shape(), texts)?;
                    cx.set(index, tensor)?;
                }
            }
        }
        Ok(())
    }
}

/// An output in memory of the plan.
fn written(tensor: TensorMut<'_>) -> Outcome<Numbers> {
    let (dtype, sizes) = (tensor.dtype(), Shape::from_slice(tensor.shape()));
    // SAFETY: the engine lends the bytes until the end of the call, and the context is gone then.
    unsafe { Numbers::of_bytes(dtype, &sizes, tensor.bytes_mut()?) }
}

/// An input where it lies.
fn read(cx: &RunCx<'_>, index: usize) -> Outcome<Value> {
    let tensor = match cx.input_value(index)? {
        ValueView::Tensor(tensor) => tensor,
        ValueView::Value(value) => return Ok(Value::Engine(value.clone())),
    };
    if tensor.dtype() == DType::String {
        let shared = cx.own_input(index)?;
        return Ok(Value::Strings(Strings::of_tensor(shared.tensor()?.clone())));
    }
    // SAFETY: the engine lends the bytes until the end of the call. The header makes inputs
    // constant, so that the client does not write them.
    let numbers = unsafe { Numbers::of_lent(tensor.dtype(), tensor.shape(), tensor.bytes()?)? };
    Ok(Value::Numbers(numbers))
}

/// A function of a client for each index, with data of the client.
#[derive(Clone, Copy)]
struct Task {
    function: unsafe extern "C" fn(*mut c_void, usize),
    data: *mut c_void,
}

// SAFETY: the header demands that the function may be called from any thread.
unsafe impl Send for Task {}
// SAFETY: as above.
unsafe impl Sync for Task {}

impl Task {
    fn run(self, indices: Range<usize>) {
        for index in indices {
            // SAFETY: the client's function gets the client's data.
            unsafe { (self.function)(self.data, index) };
        }
    }
}

entries! {
    /// 88
    fn KernelContext_GetInputCount(context: In<KernelContext>, out: Out<usize>) {
        let out = out.place()?;
        out.put(context.get()?.inputs.len());
        Ok(())
    }

    /// 89
    fn KernelContext_GetOutputCount(context: In<KernelContext>, out: Out<usize>) {
        let out = out.place()?;
        out.put(context.get()?.outputs.lock().len());
        Ok(())
    }

    /// 90. Null for an input that is left out.
    fn KernelContext_GetInput(context: In<KernelContext>, index: usize, out: Out<*const Object<Value>>) {
        let out = out.place()?;
        let input = context.get()?.inputs.get(index).and_then(Option::as_ref);
        out.put(input.map_or(std::ptr::null(), |value| value));
        Ok(())
    }

    /// 91. Null for an output that is left out.
    fn KernelContext_GetOutput(context: In<KernelContext>, index: usize, dims: Array<i64>, rank: usize, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        out.put(context.get()?.output(index, dims.get(rank, "the shape")?)?);
        Ok(())
    }

    /// 425. Null for an output whose memory is not there yet.
    fn KernelContext_GetPreallocatedOutput(context: In<KernelContext>, index: usize, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let mut outputs = context.get()?.outputs.lock();
        let Some(output) = outputs.get_mut(index) else { return invalid("output_index is out of range") };
        out.put(match output {
            Output::Planned(value) => &raw mut **value,
            _ => std::ptr::null_mut(),
        });
        Ok(())
    }

    /// 193. The CPU has no stream.
    fn KernelContext_GetGPUComputeStream(context: In<KernelContext>, out: Out<*mut c_void>) {
        let out = out.place()?;
        context.get()?;
        out.put(std::ptr::null_mut());
        Ok(())
    }

    /// 423
    fn KernelContext_GetSyncStream(context: In<KernelContext>, out: Out<*mut c_void>) {
        let out = out.place()?;
        context.get()?;
        out.put(std::ptr::null_mut());
        Ok(())
    }

    /// 265
    fn KernelContext_GetResource(context: In<KernelContext>, _version: c_int, _id: c_int, out: Out<*mut c_void>) {
        out.place()?;
        context.get()?;
        invalid("Failed to fetch a stream hosting the requested resource")
    }

    /// 246
    fn KernelContext_GetLogger(context: In<KernelContext>, out: Out<*const Object<Logger>>) {
        let out = out.place()?;
        context.get()?;
        out.put(logger());
        Ok(())
    }

    /// 253. The caller releases it.
    fn KernelContext_GetAllocator(context: In<KernelContext>, info: In<MemoryInfo>, out: Out<*mut OrtAllocator>) {
        let out = out.place()?;
        context.get()?;
        if !info.get()?.is_host() {
            return invalid("No requested allocator available: the kernel runs on the CPU");
        }
        out.put(default_allocator());
        Ok(())
    }

    /// 277. The caller frees it by the allocator.
    fn KernelContext_GetScratchBuffer(context: In<KernelContext>, info: In<MemoryInfo>, len: usize, out: Out<*mut c_void>) {
        let out = out.place()?;
        context.get()?;
        if !info.get()?.is_host() {
            return invalid("No requested allocator available: the kernel runs on the CPU");
        }
        out.put(Allocator::of(default_allocator()).allocate(len)?.cast());
        Ok(())
    }

    /// 274
    fn KernelContext_ParallelFor(context: In<KernelContext>, function: Option<unsafe extern "C" fn(*mut c_void, usize)>, total: usize, batches: usize, data: *mut c_void) {
        let threads = context.get()?.threads;
        let Some(function) = function else { return invalid("the function is null") };
        let task = Task { function, data };
        let least = if batches > 0 { total.div_ceil(batches) } else { 1 };
        for_each_chunk(threads, total, least.max(1), |indices| task.run(indices));
        Ok(())
    }
}
