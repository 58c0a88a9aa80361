//! What the kernels compute.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{null, null_mut};

use ort_sys::{
    ONNXTensorElementDataType, OrtErrorCode, OrtKernelContext, OrtKernelInfo, OrtShapeInferContext,
    OrtStatus, OrtValue,
};

use crate::{Done, INT64, Kernel, api, checked, failed, get};

const fn kernel() -> Kernel {
    Kernel { name: "", compute: |_, _| Ok(()), factor: 1.0, mode: 0, op: null_mut() }
}

pub(crate) fn plain(_: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    Ok(kernel())
}

pub(crate) fn no_inference(_: *const OrtShapeInferContext) -> Done {
    Ok(())
}

/// A value of a call: its elements, and its shape.
struct Tensor {
    value: *const OrtValue,
    data: *mut c_void,
    shape: Vec<i64>,
}

impl Tensor {
    fn of(value: *const OrtValue, has_data: bool) -> Result<Tensor, *mut OrtStatus> {
        let info = get!(GetTensorTypeAndShape(value));
        let rank: usize = get!(GetDimensionsCount(info));
        let mut shape = vec![0i64; rank];
        // SAFETY: the buffer has as many elements.
        checked(unsafe { (api().GetDimensions)(info, shape.as_mut_ptr(), rank) })?;
        // SAFETY: it was made above.
        unsafe { (api().ReleaseTensorTypeAndShapeInfo)(info) };
        let data = if has_data { get!(GetTensorMutableData(value.cast_mut())) } else { null_mut() };
        Ok(Tensor { value, data, shape })
    }

    fn count(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    fn floats(&self) -> &mut [f32] {
        // SAFETY: the tensor has as many floats.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast(), self.count()) }
    }
}

fn input(context: *const OrtKernelContext, index: usize) -> Result<Option<Tensor>, *mut OrtStatus> {
    let value: *const OrtValue = get!(KernelContext_GetInput(context, index));
    if value.is_null() { Ok(None) } else { Tensor::of(value, true).map(Some) }
}

fn required(context: *const OrtKernelContext, index: usize) -> Result<Tensor, *mut OrtStatus> {
    input(context, index)?.ok_or_else(|| failed(OrtErrorCode::ORT_INVALID_ARGUMENT, c"an input is missing"))
}

fn output(
    context: *mut OrtKernelContext,
    index: usize,
    shape: &[i64],
) -> Result<Option<Tensor>, *mut OrtStatus> {
    let value: *mut OrtValue = get!(KernelContext_GetOutput(context, index, shape.as_ptr(), shape.len()));
    if value.is_null() { Ok(None) } else { Tensor::of(value, true).map(Some) }
}

/// y = x * factor.
pub(crate) fn scale(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    if let Some(y) = output(context, 0, &x.shape)? {
        y.floats().iter_mut().zip(x.floats()).for_each(|(y, x)| *y = *x * kernel.factor);
    }
    Ok(())
}

pub(crate) fn with_factor(info: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    Ok(Kernel { factor: get!(KernelInfoGetAttribute_float(info, c"factor".as_ptr())), ..kernel() })
}

/// y = x + b where b is given; the number of inputs that are given as the optional second output.
pub(crate) fn optional(_: &Kernel, context: *mut OrtKernelContext) -> Done {
    let (x, b) = (required(context, 0)?, input(context, 1)?);
    if let Some(y) = output(context, 0, &x.shape)? {
        y.floats().copy_from_slice(x.floats());
        if let Some(b) = &b {
            y.floats().iter_mut().zip(b.floats()).for_each(|(y, b)| *y += *b);
        }
    }
    if let Some(count) = output(context, 1, &[1])? {
        count.floats().fill(if b.is_some() { 2.0 } else { 1.0 });
    }
    Ok(())
}

/// The sum of each input as an output of its own, or of all as one.
pub(crate) fn variadic(_: &Kernel, context: *mut OrtKernelContext) -> Done {
    let (inputs, outputs): (usize, usize) =
        (get!(KernelContext_GetInputCount(context)), get!(KernelContext_GetOutputCount(context)));
    let mut sums = Vec::new();
    for index in 0..inputs {
        sums.push(required(context, index)?.floats().iter().sum::<f32>());
    }
    for index in 0..outputs {
        if let Some(y) = output(context, index, &[1])? {
            y.floats().fill(if outputs == 1 { sums.iter().sum() } else { sums[index] });
        }
    }
    Ok(())
}

/// Reads attributes of all kinds. Their numbers are summed to `factor`; `mode` chooses a failure.
pub(crate) fn all_attributes(info: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    let mode: i64 = get!(KernelInfoGetAttribute_int64(info, c"mode".as_ptr()));
    if mode == 1 {
        return Err(failed(OrtErrorCode::ORT_NOT_IMPLEMENTED, c"no kernel in mode 1"));
    }
    let mut factor: f32 = get!(KernelInfoGetAttribute_float(info, c"float".as_ptr()));
    let mut count = 0usize;
    let mut floats = [0f32; 8];
    let mut ints = [0i64; 8];
    let mut text = [0 as c_char; 16];
    // SAFETY: first the size is asked for, then the buffer has it.
    unsafe {
        checked((api().KernelInfoGetAttributeArray_float)(
            info,
            c"floats".as_ptr(),
            null_mut(),
            &raw mut count,
        ))?;
        checked((api().KernelInfoGetAttributeArray_float)(
            info,
            c"floats".as_ptr(),
            floats.as_mut_ptr(),
            &raw mut count,
        ))?;
        factor += floats[..count].iter().sum::<f32>();
        checked((api().KernelInfoGetAttributeArray_int64)(
            info,
            c"ints".as_ptr(),
            null_mut(),
            &raw mut count,
        ))?;
        checked((api().KernelInfoGetAttributeArray_int64)(
            info,
            c"ints".as_ptr(),
            ints.as_mut_ptr(),
            &raw mut count,
        ))?;
        factor += ints[..count].iter().sum::<i64>() as f32;
        checked((api().KernelInfoGetAttribute_string)(info, c"text".as_ptr(), null_mut(), &raw mut count))?;
        checked((api().KernelInfoGetAttribute_string)(
            info,
            c"text".as_ptr(),
            text.as_mut_ptr(),
            &raw mut count,
        ))?;
        factor += CStr::from_ptr(text.as_ptr()).count_bytes() as f32;
    }
    let allocator = get!(GetAllocatorWithDefaultOptions());
    let tensor: *mut OrtValue = get!(KernelInfoGetAttribute_tensor(info, c"tensor".as_ptr(), allocator));
    factor += Tensor::of(tensor, true)?.floats().iter().sum::<f32>();
    // SAFETY: it was made above.
    unsafe { (api().ReleaseValue)(tensor) };
    Ok(Kernel { factor, mode, ..kernel() })
}

/// As [`scale`], with a failure in mode 2.
pub(crate) fn failing(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    if kernel.mode == 2 {
        return Err(failed(OrtErrorCode::ORT_INVALID_ARGUMENT, c"no result in mode 2"));
    }
    scale(kernel, context)
}

/// Twice the elements: [n] to [2 n], where the attribute `times` says how often.
pub(crate) fn repeated(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    let shape = [x.shape[0] * kernel.mode];
    if let Some(y) = output(context, 0, &shape)? {
        let times = y.floats().chunks_exact_mut(x.count().max(1));
        times.for_each(|part| part.copy_from_slice(x.floats()));
    }
    Ok(())
}

pub(crate) fn with_times(info: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    Ok(Kernel { mode: get!(KernelInfoGetAttribute_int64(info, c"times".as_ptr())), ..kernel() })
}

pub(crate) fn infer_repeated(context: *const OrtShapeInferContext) -> Done {
    let attribute = get!(ShapeInferContext_GetAttribute(context, c"times".as_ptr()));
    let mut times = 0i64;
    let mut size = 0usize;
    let kind = ort_sys::OrtOpAttrType::ORT_OP_ATTR_INT;
    // SAFETY: the buffer holds an integer.
    checked(unsafe { (api().ReadOpAttr)(attribute, kind, (&raw mut times).cast(), 8, &raw mut size) })?;
    let info = get!(ShapeInferContext_GetInputTypeShape(context, 0));
    let rank: usize = get!(GetDimensionsCount(info));
    let mut dims = vec![0i64; rank];
    // SAFETY: the buffer has as many elements.
    checked(unsafe { (api().GetDimensions)(info, dims.as_mut_ptr(), rank) })?;
    if rank != 1 {
        return Err(failed(OrtErrorCode::ORT_INVALID_GRAPH, c"the input has to have one dimension"));
    }
    let made = get!(CreateTensorTypeAndShapeInfo());
    let size = [if dims[0] < 0 { -1 } else { dims[0] * times }];
    // SAFETY: the info was made above, and the array has one element.
    unsafe {
        checked((api().SetTensorElementType)(
            made,
            ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        ))?;
        checked((api().SetDimensions)(made, size.as_ptr(), 1))?;
        checked((api().ShapeInferContext_SetOutputTypeShape)(context, 0, made))?;
        (api().ReleaseTensorTypeAndShapeInfo)(made);
    }
    Ok(())
}

/// y = x + 1, where both may be the same memory.
pub(crate) fn increment(_: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    if let Some(y) = output(context, 0, &x.shape)? {
        for index in 0..x.count() {
            y.floats()[index] = x.floats()[index] + 1.0;
        }
    }
    Ok(())
}

pub(crate) fn infer_same(context: *const OrtShapeInferContext) -> Done {
    let info = get!(ShapeInferContext_GetInputTypeShape(context, 0));
    // SAFETY: the info is the context's.
    checked(unsafe { (api().ShapeInferContext_SetOutputTypeShape)(context, 0, info) })
}

/// A copy of 8-byte elements of any type, such as integers.
pub(crate) fn any_type(_: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    let info = get!(GetTensorTypeAndShape(x.value));
    let dtype: ONNXTensorElementDataType = get!(GetTensorElementType(info));
    // SAFETY: it was made above.
    unsafe { (api().ReleaseTensorTypeAndShapeInfo)(info) };
    let width = if dtype as i32 == INT64 { 8 } else { 4 };
    if let Some(y) = output(context, 0, &x.shape)? {
        // SAFETY: both have as many bytes.
        unsafe { x.data.copy_to_nonoverlapping(y.data, x.count() * width) };
    }
    Ok(())
}

/// Each string with an exclamation mark.
pub(crate) fn shout(_: &Kernel, context: *mut OrtKernelContext) -> Done {
    let value: *const OrtValue = get!(KernelContext_GetInput(context, 0));
    let x = Tensor::of(value, false)?;
    let made: *mut OrtValue = get!(KernelContext_GetOutput(context, 0, x.shape.as_ptr(), x.shape.len()));
    for index in 0..x.count() {
        let len: usize = get!(GetStringTensorElementLength(value, index));
        let mut text = vec![0u8; len];
        // SAFETY: the buffer has as many bytes, and the text ends with a zero.
        unsafe {
            checked((api().GetStringTensorElement)(value, len, index, text.as_mut_ptr().cast()))?;
            text.extend(*b"!\0");
            checked((api().FillStringTensorElement)(made, text.as_ptr().cast(), index))?;
        }
    }
    Ok(())
}

/// y = x * factor, an element for each call of a parallel loop.
struct Loop {
    x: *const f32,
    y: *mut f32,
    factor: f32,
}

extern "C" fn step(data: *mut c_void, index: usize) {
    // SAFETY: the loop calls each index once, and the data outlives it.
    unsafe {
        let data = &*data.cast::<Loop>();
        *data.y.add(index) = *data.x.add(index) * data.factor;
    }
}

pub(crate) fn parallel(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    let Some(y) = output(context, 0, &x.shape)? else { return Ok(()) };
    let mut data = Loop { x: x.data.cast(), y: y.data.cast(), factor: kernel.factor };
    // SAFETY: the data outlives the loop.
    checked(unsafe { (api().KernelContext_ParallelFor)(context, step, x.count(), 0, (&raw mut data).cast()) })
}

/// x + x, by the runtime's own Add.
pub(crate) fn with_add(info: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    let mut names = [c"T".as_ptr()];
    let types = [ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT];
    let (add, none) = (c"Add".as_ptr(), c"".as_ptr());
    let op = get!(CreateOp(info, add, none, 14, names.as_mut_ptr(), types.as_ptr(), 1, null(), 0, 2, 1));
    Ok(Kernel { op, ..kernel() })
}

pub(crate) fn doubled(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    let x = required(context, 0)?;
    let Some(y) = output(context, 0, &x.shape)? else { return Ok(()) };
    let (inputs, outputs) = ([x.value, x.value], [y.value.cast_mut()]);
    // SAFETY: the arrays have as many values.
    checked(unsafe { (api().InvokeOp)(context, kernel.op, inputs.as_ptr(), 2, outputs.as_ptr(), 1) })
}

/// The largest element and its place, by the runtime's own TopK with attributes.
pub(crate) fn with_top_k(info: *const OrtKernelInfo) -> Result<Kernel, *mut OrtStatus> {
    let number = |name: &CStr, value: i64| {
        let kind = ort_sys::OrtOpAttrType::ORT_OP_ATTR_INT;
        Ok::<_, *mut OrtStatus>(get!(CreateOpAttr(name.as_ptr(), (&raw const value).cast(), 1, kind)))
    };
    let attributes = [number(c"axis", -1)?, number(c"largest", 1)?, number(c"sorted", 1)?];
    let list: Vec<*const ort_sys::OrtOpAttr> = attributes.iter().map(|one| one.cast_const()).collect();
    let mut names = [c"T".as_ptr(), c"I".as_ptr()];
    let types = [
        ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
    ];
    let (top, none) = (c"TopK".as_ptr(), c"".as_ptr());
    let op =
        get!(CreateOp(info, top, none, 11, names.as_mut_ptr(), types.as_ptr(), 2, list.as_ptr(), 3, 2, 2));
    // SAFETY: they were made above.
    attributes.iter().for_each(|one| unsafe { (api().ReleaseOpAttr)(*one) });
    Ok(Kernel { op, ..kernel() })
}

pub(crate) fn largest(kernel: &Kernel, context: *mut OrtKernelContext) -> Done {
    let (x, k) = (required(context, 0)?, required(context, 1)?);
    // SAFETY: the tensor has one integer.
    let count = unsafe { *k.data.cast::<i64>() };
    let (Some(values), Some(places)) = (output(context, 0, &[count])?, output(context, 1, &[count])?) else {
        return Ok(());
    };
    let (inputs, outputs) = ([x.value, k.value], [values.value.cast_mut(), places.value.cast_mut()]);
    // SAFETY: the arrays have as many values.
    checked(unsafe { (api().InvokeOp)(context, kernel.op, inputs.as_ptr(), 2, outputs.as_ptr(), 2) })
}
