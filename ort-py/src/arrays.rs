//! Arrays: numpy's memory as tensors, and tensors as numpy arrays, without a copy where it can be.

use std::alloc::Layout;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use bytes::Bytes;
use numpy::npyffi::{
    _PyArray_GET_ITEM_DATA, NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, PyArrayObject, get_type_object,
    npy_intp,
};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use ort_runtime::tensor::CompactString;
use ort_runtime::{Buffer, DType, DeviceId, SharedBuffer, Tensor, exact_bytes};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyUnicodeDecodeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyList, PyString};
use smallvec::SmallVec;

use crate::dtypes;
use crate::error::OrRaise;

/// Returns an array whose memory a tensor can be: of ONNX's byte order, contiguous, aligned. It is
/// the array itself, or a copy.
pub(crate) fn readable<'py>(array: &Bound<'py, PyUntypedArray>) -> PyResult<Bound<'py, PyUntypedArray>> {
    let descr = array.dtype();
    let is_native = descr.is_native_byteorder().unwrap_or(true);
    if is_native && array.is_c_contiguous() && array.is_aligned() {
        return Ok(array.clone());
    }
    let py = array.py();
    let native =
        if is_native { descr.into_any() } else { descr.call_method1(intern!(py, "newbyteorder"), ("=",))? };
    let copy = numpy(py)?.call_method1(intern!(py, "ascontiguousarray"), (array, native))?;
    // It makes arrays of rank 0 ones of rank 1.
    let copy = copy.call_method1(intern!(py, "reshape"), (array.getattr(intern!(py, "shape"))?,))?;
    Ok(copy.cast_into::<PyUntypedArray>()?)
}

/// The module numpy.
pub(crate) fn numpy(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "numpy"))
}

/// Returns the address of an array's first element.
pub(crate) fn data_of(array: &Bound<'_, PyUntypedArray>) -> *mut u8 {
    // SAFETY: the pointer is that of a live array, which `array` borrows.
    unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).data.cast() }
}

/// Reads an array as a tensor. The memory is shared where the layout allows it, and then the tensor
/// keeps the array alive.
///
/// The caller may write to shared memory while nothing runs on it, as with onnxruntime.
pub(crate) fn tensor_of(array: &Bound<'_, PyUntypedArray>) -> PyResult<Tensor> {
    let py = array.py();
    let descr = array.dtype();
    let dtype = dtypes::of_descr(&descr)?.ok_or_else(|| dtypes::unknown(&descr))?;
    if dtype == DType::String {
        return strings_of(array);
    }
    let array = readable(array)?;
    let shape: SmallVec<[usize; 8]> = SmallVec::from_slice(array.shape());
    if dtype.bits().is_some_and(|bits| bits < 8) {
        return packed(py, dtype, &shape, &array);
    }
    let len = array.len() * array.dtype().itemsize();
    let (data, owner) = (data_of(&array), Owner::of(array.into_any().unbind()));
    // SAFETY: the array owns `len` initialised bytes there, does not move them, and lives as long
    // as `owner`. Runs hold references only while the caller's call lasts.
    let shared = unsafe { SharedBuffer::foreign(data, len, owner) };
    let shared = shared.map_err(|problem| PyRuntimeError::new_err(problem.to_string()))?;
    let bytes = shared.bytes().unwrap_or_default();
    Tensor::from_bytes(dtype, &shape, bytes).or_raise(py)
}

/// Reads an array as [`tensor_of`] does, and returns the memory that is shared, if it is.
pub(crate) fn tensor_and_memory(array: &Bound<'_, PyUntypedArray>) -> PyResult<(Tensor, Option<HostMemory>)> {
    let descr = array.dtype();
    let dtype = dtypes::of_descr(&descr)?.ok_or_else(|| dtypes::unknown(&descr))?;
    if dtype == DType::String || dtype.bits().is_some_and(|bits| bits < 8) {
        return Ok((tensor_of(array)?, None));
    }
    let array = readable(array)?;
    let shape: SmallVec<[usize; 8]> = SmallVec::from_slice(array.shape());
    let memory = HostMemory::of_array(&array);
    Ok((memory.tensor(array.py(), dtype, &shape)?, Some(memory)))
}

/// Keeps a Python object alive from any thread.
pub(crate) struct Owner(Option<Py<PyAny>>);

impl Owner {
    pub(crate) fn of(object: Py<PyAny>) -> Owner {
        Owner(Some(object))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Other libraries call deleters of ours, where PyO3 does not know that the thread is
        // attached. Without this it would let go of the object at its next call only.
        if let Some(object) = self.0.take() {
            Python::try_attach(|py| object.drop_ref(py));
        }
    }
}

/// Packs elements of fewer than 8 bits, which numpy keeps in a byte each.
fn packed(
    py: Python<'_>,
    dtype: DType,
    shape: &[usize],
    array: &Bound<'_, PyUntypedArray>,
) -> PyResult<Tensor> {
    let bits = dtype.bits().unwrap_or(8) as usize;
    let per_byte = 8 / bits;
    // SAFETY: the array is contiguous, of one byte per element, and borrowed.
    let unpacked = unsafe { std::slice::from_raw_parts(data_of(array), array.len()) };
    let mask = (1_u8 << bits) - 1;
    let pack = |group: &[u8]| {
        // The first element is in the lowest bits.
        group.iter().rev().fold(0_u8, |byte, element| byte << bits | element & mask)
    };
    let bytes: Vec<u8> = unpacked.chunks(per_byte).map(pack).collect();
    Tensor::from_bytes(dtype, shape, bytes.into()).or_raise(py)
}

/// Reads an array of strings. Each object becomes what `str()` returns, as in onnxruntime, also
/// one of `bytes`. numpy's arrays of fixed-size bytes hold UTF-8.
fn strings_of(array: &Bound<'_, PyUntypedArray>) -> PyResult<Tensor> {
    let py = array.py();
    let shape: SmallVec<[usize; 8]> = SmallVec::from_slice(array.shape());
    if let Some(texts) = texts_in_place(array)? {
        return Tensor::from_strings(&shape, texts).or_raise(py);
    }
    // Subclasses have methods of their own: a masked array would hide elements.
    let base = numpy(py)?.call_method1(intern!(py, "asarray"), (array,))?;
    let flat = base.call_method0(intern!(py, "ravel"))?.call_method0(intern!(py, "tolist"))?;
    let has_objects = array.dtype().kind() == b'O';
    let text = |element: Bound<'_, PyAny>| match element.cast::<PyBytes>() {
        Ok(bytes) if !has_objects => Ok(CompactString::new(text_of_bytes(bytes)?)),
        _ => Ok(CompactString::new(element.str()?.to_str()?)),
    };
    let texts: PyResult<Vec<CompactString>> = flat.cast::<PyList>()?.iter().map(text).collect();
    Tensor::from_strings(&shape, texts?).or_raise(py)
}

/// Reads the texts of an array where they lie, if it is a plain one of `str` objects or of numpy's
/// fixed-size texts. Anything else, and what is not valid Unicode, is left to the slower way.
fn texts_in_place(array: &Bound<'_, PyUntypedArray>) -> PyResult<Option<Vec<CompactString>>> {
    let descr = array.dtype();
    if !array.is_exact_instance_of::<PyUntypedArray>()
        || !array.is_c_contiguous()
        || !array.is_aligned()
        || !descr.is_native_byteorder().unwrap_or(true)
    {
        return Ok(None);
    }
    match descr.kind() {
        b'O' => texts_of_objects(array),
        b'U' => Ok(texts_of_characters(array, descr.itemsize() / size_of::<u32>())),
        _ => Ok(None),
    }
}

/// Reads a plain array of objects, if all are `str`.
fn texts_of_objects(array: &Bound<'_, PyUntypedArray>) -> PyResult<Option<Vec<CompactString>>> {
    let (py, count) = (array.py(), array.len());
    let objects = data_of(array).cast::<*mut ffi::PyObject>();
    let mut texts = Vec::with_capacity(count);
    for place in 0..count {
        // SAFETY: the array is contiguous and aligned, and has `count` objects or nulls. Reading a
        // `str` runs no code of Python's and keeps the interpreter's lock, so they stay there.
        let object = unsafe { Bound::from_borrowed_ptr_or_opt(py, objects.add(place).read()) };
        let Some(Ok(text)) = object.map(Bound::cast_into::<PyString>) else { return Ok(None) };
        texts.push(CompactString::new(text.to_str()?));
    }
    Ok(Some(texts))
}

/// Reads a plain array of texts of `width` characters, which are padded with zeros.
fn texts_of_characters(array: &Bound<'_, PyUntypedArray>, width: usize) -> Option<Vec<CompactString>> {
    if width == 0 {
        return None;
    }
    // SAFETY: the array is contiguous and aligned, has `width` numbers for each element, and is
    // borrowed.
    let characters = unsafe { std::slice::from_raw_parts(data_of(array).cast::<u32>(), array.len() * width) };
    let mut buffer = String::with_capacity(width);
    let text = |padded: &[u32]| {
        let used = padded.iter().rposition(|character| *character != 0).map_or(0, |last| last + 1);
        buffer.clear();
        for character in padded.iter().take(used) {
            buffer.push(char::from_u32(*character)?);
        }
        Some(CompactString::new(&buffer))
    };
    characters.chunks_exact(width).map(text).collect()
}

/// Reads bytes as UTF-8. Anything else is a UnicodeDecodeError.
pub(crate) fn text_of_bytes<'a>(bytes: &'a Bound<'_, PyBytes>) -> PyResult<&'a str> {
    let content = bytes.as_bytes();
    let refused = |problem| PyUnicodeDecodeError::new_err_from_utf8(bytes.py(), content, problem);
    std::str::from_utf8(content).map_err(refused)
}

/// Returns a tensor as an array over the tensor's memory, which the array keeps alive. Strings
/// become an array of objects, and elements of fewer than 8 bits one byte each.
pub(crate) fn array_of<'py>(py: Python<'py>, tensor: &Tensor) -> PyResult<Bound<'py, PyAny>> {
    let dtype = tensor.dtype();
    if dtype == DType::String {
        return objects_of(py, tensor.shape(), tensor.strings().or_raise(py)?);
    }
    let bytes = tensor.bytes().ok_or_else(|| {
        PyRuntimeError::new_err(format!("the value is in the memory of {}; copy it first", tensor.memory()))
    })?;
    let descr = dtypes::descr_of(py, dtype)?;
    if let Some(bits) = dtype.bits().filter(|bits| *bits < 8) {
        let unpacked = unpacked(bytes, bits as usize, tensor.element_count());
        return over(py, descr, tensor.shape(), unpacked.as_ptr().cast_mut(), true, unpacked);
    }
    // Outputs have memory of their own, so the array may be written.
    over(py, descr, tensor.shape(), bytes.as_ptr().cast_mut(), true, bytes.clone())
}

/// Returns an array of `str` objects, which are made in its memory.
fn objects_of<'py>(
    py: Python<'py>,
    shape: &[usize],
    strings: &[CompactString],
) -> PyResult<Bound<'py, PyAny>> {
    let mut dims = dims_of(shape)?;
    // SAFETY: the descriptor is handed over, and the shape has `dims.len()` sizes. numpy allocates
    // the memory, and fills that of objects with nulls.
    let array = unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            PyArrayDescr::object(py).into_dtype_ptr(),
            dims.len() as i32,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            0,
            std::ptr::null_mut(),
        );
        Bound::from_owned_ptr_or_err(py, array)?
    };
    let array = array.cast_into::<PyUntypedArray>()?;
    let objects = data_of(&array).cast::<*mut ffi::PyObject>();
    // A tensor has as many strings as its shape says.
    for (place, text) in strings.iter().take(array.len()).enumerate() {
        let object = PyString::new(py, text).into_ptr();
        // SAFETY: the new array is contiguous, has more than `place` objects, and owns them. No one
        // else has it yet.
        unsafe { objects.add(place).write(object) };
    }
    Ok(array.into_any())
}

fn unpacked(bytes: &[u8], bits: usize, count: usize) -> Vec<u8> {
    let (per_byte, mask) = (8 / bits, (1_u8 << bits) - 1);
    let each = bytes.iter().flat_map(|byte| (0..per_byte).map(move |place| byte >> (place * bits) & mask));
    each.take(count).collect()
}

/// Returns an array over memory that `owner` keeps alive.
pub(crate) fn over<'py>(
    py: Python<'py>,
    descr: Bound<'py, PyArrayDescr>,
    shape: &[usize],
    data: *mut u8,
    is_writable: bool,
    owner: impl Send + 'static,
) -> PyResult<Bound<'py, PyAny>> {
    let flags = if is_writable { NPY_ARRAY_WRITEABLE } else { 0 };
    let mut dims = dims_of(shape)?;
    let base = PyCapsule::new_with_value(py, Kept(owner), c"ort_runtime memory")?;
    // SAFETY: `descr` is handed over, the shape has `dims.len()` sizes, and `data` holds as many
    // elements for as long as `base` lives, which becomes the array's base.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            descr.into_dtype_ptr(),
            dims.len() as i32,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            data.cast::<c_void>(),
            flags,
            std::ptr::null_mut(),
        );
        let array = Bound::from_owned_ptr_or_err(py, array)?;
        let base = base.into_ptr();
        if PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_ptr().cast::<PyArrayObject>(), base) < 0 {
            return Err(PyErr::fetch(py));
        }
        Ok(array)
    }
}

/// Returns a shape as numpy takes it.
fn dims_of(shape: &[usize]) -> PyResult<SmallVec<[npy_intp; 8]>> {
    let too_large = |_| PyMemoryError::new_err("a size is too large");
    shape.iter().map(|size| npy_intp::try_from(*size).map_err(too_large)).collect()
}

/// Whether numpy lets an array be written.
fn is_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: the pointer is that of a live array, which `array` borrows.
    unsafe { (*_PyArray_GET_ITEM_DATA(array.as_array_ptr())).flags & NPY_ARRAY_WRITEABLE != 0 }
}

/// What is wrong with memory that a run or a copy is to write.
pub(crate) const READ_ONLY: &str = "the memory of the value is read-only";

/// What a capsule keeps. Its drop frees memory, and touches no Python object without the
/// interpreter's lock.
struct Kept<T>(#[allow(dead_code, reason = "it is there to be dropped")] T);

/// Memory of the host that a value may be written to, shared by a tensor and by arrays over it.
#[derive(Clone)]
pub(crate) struct HostMemory {
    data: *mut u8,
    len: usize,
    is_writable: bool,
    owner: Arc<dyn KeepsAlive>,
}

/// What keeps memory alive.
trait KeepsAlive: Send + Sync {
    /// The Python object that does it, if it is one.
    fn object(&self) -> Option<&Py<PyAny>> {
        None
    }
}

impl KeepsAlive for Owner {
    fn object(&self) -> Option<&Py<PyAny>> {
        self.0.as_ref()
    }
}

impl KeepsAlive for Bytes {}
impl KeepsAlive for Zeroed {}
/// The caller does.
impl KeepsAlive for () {}

// SAFETY: the owner keeps the bytes valid and is itself `Send` and `Sync`; who reads and writes
// them at the same time is the caller's affair, as with any array of numpy.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// The memory of an array, which stays alive.
    pub(crate) fn of_array(array: &Bound<'_, PyUntypedArray>) -> HostMemory {
        let len = array.len() * array.dtype().itemsize();
        let owner = Arc::new(Owner::of(array.clone().into_any().unbind()));
        HostMemory { data: data_of(array), len, is_writable: is_writable(array), owner }
    }

    /// The memory of a tensor on the host, which stays alive.
    pub(crate) fn of_tensor(tensor: &Tensor, is_writable: bool) -> Option<HostMemory> {
        let bytes = tensor.bytes()?.clone();
        let (data, len) = (bytes.as_ptr().cast_mut(), bytes.len());
        Some(HostMemory { data, len, is_writable, owner: Arc::new(bytes) })
    }

    /// Whether the owner lets it be written.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }

    /// Zeroed memory of `len` bytes. Its pages are the system's until they are written.
    pub(crate) fn new(len: usize) -> PyResult<HostMemory> {
        let memory = Zeroed::new(len)
            .ok_or_else(|| PyMemoryError::new_err(format!("{} cannot be allocated", exact_bytes(len))))?;
        let data = memory.first_byte();
        Ok(HostMemory { data, len, is_writable: true, owner: Arc::new(memory) })
    }

    /// Memory at an address that the caller keeps valid.
    pub(crate) fn at(pointer: usize, len: usize) -> HostMemory {
        let data = std::ptr::with_exposed_provenance_mut(pointer);
        HostMemory { data, len, is_writable: true, owner: Arc::new(()) }
    }

    /// Memory at an address that an object keeps valid.
    pub(crate) fn owned_at(pointer: usize, len: usize, owner: Py<PyAny>) -> HostMemory {
        HostMemory { owner: Arc::new(Owner::of(owner)), ..HostMemory::at(pointer, len) }
    }

    /// The Python object that keeps the memory alive, for the garbage collector. It is `None` if
    /// tensors or arrays share the reference to it: the collector takes each visit for a reference,
    /// and would free the object under them.
    pub(crate) fn own_object(&self) -> Option<&Py<PyAny>> {
        self.object().filter(|_| Arc::strong_count(&self.owner) == 1)
    }

    /// The Python object that keeps the memory alive, whatever shares the reference to it.
    pub(crate) fn object(&self) -> Option<&Py<PyAny>> {
        self.owner.object()
    }

    /// The same memory, kept alive by a Python object that owns it.
    pub(crate) fn lent_by(&self, owner: Py<PyAny>) -> HostMemory {
        HostMemory { owner: Arc::new(Owner::of(owner)), ..self.clone() }
    }

    pub(crate) fn data(&self) -> *mut u8 {
        self.data
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The memory as a buffer that a run may write.
    pub(crate) fn buffer(&self) -> PyResult<Buffer> {
        if !self.is_writable {
            return Err(PyRuntimeError::new_err(READ_ONLY));
        }
        // SAFETY: the owner keeps the bytes valid; the caller does not touch them during a run.
        let buffer = unsafe { Buffer::foreign(self.data, self.len, self.clone()) };
        buffer.map_err(|problem| PyRuntimeError::new_err(problem.to_string()))
    }

    /// The memory as a tensor that a run reads.
    pub(crate) fn tensor(&self, py: Python<'_>, dtype: DType, shape: &[usize]) -> PyResult<Tensor> {
        // SAFETY: as in `buffer`.
        let shared = unsafe { SharedBuffer::foreign(self.data, self.len, self.clone()) };
        let shared = shared.map_err(|problem| PyRuntimeError::new_err(problem.to_string()))?;
        Tensor::from_bytes(dtype, shape, shared.bytes().unwrap_or_default()).or_raise(py)
    }

    /// Copies bytes of the same number into it.
    pub(crate) fn fill(&self, from: &[u8]) -> bool {
        if from.len() != self.len || !self.is_writable {
            return false;
        }
        // SAFETY: both are valid for `len` bytes; they may overlap if the caller copies a value
        // onto itself.
        unsafe { std::ptr::copy(from.as_ptr(), self.data, self.len) };
        true
    }
}

/// Memory of the C library that begins with zeros.
struct Zeroed {
    memory: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it only frees the memory, which any thread may do.
unsafe impl Send for Zeroed {}
// SAFETY: a shared reference gives nothing but the address.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Kernels read whole cache lines.
    const ALIGNMENT: usize = 64;

    fn new(len: usize) -> Option<Zeroed> {
        // A layout of a larger alignment would be cleared by hand, and so touched.
        let layout = Layout::from_size_align(len.checked_add(Zeroed::ALIGNMENT)?, 16).ok()?;
        // SAFETY: the layout is not empty.
        let memory = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Zeroed { memory, layout })
    }

    fn first_byte(&self) -> *mut u8 {
        self.memory.as_ptr().map_addr(|address| address.next_multiple_of(Zeroed::ALIGNMENT))
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and is freed once.
        unsafe { std::alloc::dealloc(self.memory.as_ptr(), self.layout) }
    }
}

/// Whether a tensor is in host memory.
pub(crate) fn is_on_host(tensor: &Tensor) -> bool {
    tensor.memory() == DeviceId::HOST
}
