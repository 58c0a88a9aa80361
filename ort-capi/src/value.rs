//! `OrtValue`: a counted handle on a tensor, strings, or a value of the engine.
//!
//! Handles that share memory show the same elements, as in ONNX Runtime. The memory of numeric
//! tensors is foreign to Rust: callers read and write it through [`GetTensorMutableData`] between
//! runs.

use std::ffi::c_void;

use ort_runtime::tensor::{Shape, byte_count};
use ort_runtime::{Buffer, DType, SharedBuffer, Tensor, TensorBuffer, Value as EngineValue};
use smallvec::SmallVec;

use crate::allocator::{Allocated, Allocator, default_handle, host_info};
use crate::element_type::{number_of, of_number};
use crate::entry::{Array, In, Object, Out, Released, entries, kinds};
use crate::memory_info::{HOST, MemoryInfo};
use crate::sparse::Sparse;
use crate::status::{Failure, Outcome, invalid};
use crate::strings::Strings;
use crate::type_info::{ShapeSource, TensorInfo, TypeInfo, onnx_type};

/// The sizes of a tensor, as C reads them.
pub(crate) type Dims = SmallVec<[i64; 6]>;

/// A value of C.
#[derive(Clone)]
pub(crate) enum Value {
    /// Numbers in host memory.
    Numbers(Numbers),
    Strings(Strings),
    Sparse(Box<Sparse>),
    /// A sequence, a map, or an optional without content.
    Engine(EngineValue),
}

kinds! {
    Value => "OrtValue", b"OrtValue";
}

/// A numeric tensor in host memory.
#[derive(Clone)]
pub(crate) struct Numbers {
    /// What runs read. It keeps the memory alive, unless that is the caller's.
    tensor: Tensor,
    data: *mut u8,
    dims: Dims,
    /// Where the caller says that the memory lies; `None` for [`HOST`].
    info: Option<Box<Object<MemoryInfo>>>,
    /// Whether the memory is the caller's.
    is_lent: bool,
    /// Whether an allocator of the caller made the memory.
    has_own_allocator: bool,
}

// SAFETY: the tensor keeps the memory valid from any thread; who reads and writes it at the same
// time is the caller's affair, as the header says.
unsafe impl Send for Numbers {}
// SAFETY: as above.
unsafe impl Sync for Numbers {}

/// Reads the sizes of a tensor.
pub(crate) fn sizes_of(dims: &[i64]) -> Outcome<Shape> {
    let size = |size: &i64| usize::try_from(*size).ok();
    let sizes: Option<Shape> = dims.iter().map(size).collect();
    sizes.ok_or_else(|| {
        Failure::invalid(format!("tried creating tensor with negative value in shape: {dims:?}"))
    })
}

/// Returns sizes as C reads them.
pub(crate) fn dims_of(sizes: &[usize]) -> Dims {
    sizes.iter().map(|size| i64::try_from(*size).unwrap_or(i64::MAX)).collect()
}

impl Numbers {
    /// A tensor in memory that `owner` keeps alive.
    ///
    /// # Safety
    ///
    /// The memory has the bytes of the tensor until `owner` is dropped, or for the life of the
    /// value if the owner is the caller. Nothing writes it during a run that reads it.
    unsafe fn in_memory(
        dtype: DType,
        sizes: &[usize],
        data: *mut u8,
        owner: impl Send + Sync + 'static,
    ) -> Outcome<Numbers> {
        let len = byte_count(dtype, sizes)?;
        // SAFETY: the caller of this function guarantees that the bytes are there.
        let memory = unsafe { SharedBuffer::foreign(data, len, owner) }.map_err(ort_runtime::Error::from)?;
        let tensor = Tensor::from_bytes(dtype, sizes, memory.bytes().unwrap_or_default())?;
        Ok(Numbers {
            tensor,
            data,
            dims: dims_of(sizes),
            info: None,
            is_lent: false,
            has_own_allocator: false,
        })
    }

    /// A tensor in memory that its owner lends, to be written.
    ///
    /// # Safety
    ///
    /// The owner keeps the bytes, and leaves them alone, for the life of the value.
    pub(crate) unsafe fn of_bytes(dtype: DType, sizes: &[usize], bytes: &mut [u8]) -> Outcome<Numbers> {
        // SAFETY: the slice has the bytes; the rest is up to the caller.
        unsafe { Numbers::in_memory(dtype, sizes, bytes.as_mut_ptr(), ()) }
    }

    /// A tensor in memory that its owner lends, to be read.
    ///
    /// # Safety
    ///
    /// The owner keeps the bytes for the life of the value, and no one writes them.
    pub(crate) unsafe fn of_lent(dtype: DType, sizes: &[usize], bytes: &[u8]) -> Outcome<Numbers> {
        // SAFETY: as above.
        unsafe { Numbers::in_memory(dtype, sizes, bytes.as_ptr().cast_mut(), ()) }
    }

    /// A tensor of zeros in memory of an allocator.
    pub(crate) fn allocated(dtype: DType, sizes: &[usize], allocator: Allocator) -> Outcome<Numbers> {
        let len = byte_count(dtype, sizes)?;
        let bytes = allocator.allocate(len)?;
        // SAFETY: the allocator returned `len` bytes, which `Allocated` gives back at the end.
        let made = unsafe { Numbers::in_memory(dtype, sizes, bytes, Allocated { bytes, allocator }) };
        Ok(Numbers { has_own_allocator: allocator != default_handle(), ..made? })
    }

    /// A copy of a tensor in memory of an allocator.
    pub(crate) fn copy(tensor: &Tensor, allocator: Allocator) -> Outcome<Numbers> {
        let copy = Numbers::allocated(tensor.dtype(), tensor.shape(), allocator)?;
        copy.fill(tensor)?;
        Ok(copy)
    }

    /// The result of a run. Memory that something else reads, such as an input or a weight, is
    /// copied: callers may write to results.
    fn of_result(tensor: Tensor) -> Outcome<Numbers> {
        let is_ours = tensor.bytes().is_some_and(|bytes| bytes.is_empty() || bytes.is_unique());
        let tensor = if is_ours { tensor } else { tensor.to_owned_copy()? };
        let Some(bytes) = tensor.bytes() else { return invalid("the tensor is not in host memory") };
        let (data, dims) = (bytes.as_ptr().cast_mut(), dims_of(tensor.shape()));
        Ok(Numbers { tensor, data, dims, info: None, is_lent: false, has_own_allocator: false })
    }

    /// Copies the elements of a tensor of the same size here. Both may be the same memory.
    pub(crate) fn fill(&self, from: &Tensor) -> Outcome {
        let bytes = from.bytes().map_or(&[][..], |bytes| bytes);
        if bytes.len() != self.len() {
            return invalid(format!("the memory has {} bytes, expected {}", self.len(), bytes.len()));
        }
        if !bytes.is_empty() {
            // SAFETY: both are valid for these bytes, and `copy` allows them to overlap.
            unsafe { std::ptr::copy(bytes.as_ptr(), self.data, bytes.len()) };
        }
        Ok(())
    }

    /// The memory as a buffer that a run writes; `None` if it is not aligned for its elements.
    pub(crate) fn buffer(&self) -> Outcome<Option<TensorBuffer>> {
        if !self.tensor.is_aligned() {
            return Ok(None);
        }
        // SAFETY: the tensor keeps the memory alive as in `in_memory`, and the caller leaves it
        // alone during the run.
        let buffer = unsafe { Buffer::foreign(self.data, self.len(), self.tensor.clone()) };
        let buffer = buffer.map_err(ort_runtime::Error::from)?;
        Ok(Some(TensorBuffer::from_buffer(self.tensor.dtype(), self.tensor.shape(), buffer)?))
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub(crate) fn dims(&self) -> &[i64] {
        &self.dims
    }

    pub(crate) fn address(&self) -> usize {
        self.data.addr()
    }

    pub(crate) fn pointer(&self) -> *const u8 {
        self.data
    }

    /// Whether the memory is the caller's.
    pub(crate) fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// The bytes of the elements.
    pub(crate) fn len(&self) -> usize {
        self.tensor.byte_count()
    }

    /// Whether the memory overlaps with that of another tensor.
    pub(crate) fn overlaps(&self, other: &Numbers) -> bool {
        let range = |numbers: &Numbers| (numbers.data.addr(), numbers.data.addr() + numbers.len());
        let ((start, end), (other_start, other_end)) = (range(self), range(other));
        start < other_end && other_start < end
    }
}

impl Value {
    /// A value with the content of a result. The content of an optional stands for itself.
    pub(crate) fn of_result(value: EngineValue) -> Outcome<Value> {
        match value {
            EngineValue::Tensor(tensor) if tensor.dtype() == DType::String => {
                Ok(Value::Strings(Strings::of_tensor(tensor)))
            }
            EngineValue::Tensor(tensor) => Ok(Value::Numbers(Numbers::of_result(tensor)?)),
            EngineValue::Optional(mut optional) => match optional.element.take() {
                Some(element) => Value::of_result(*element),
                None => Ok(Value::Engine(EngineValue::Optional(optional))),
            },
            EngineValue::Sparse(sparse) => Ok(Value::Sparse(Box::new(Sparse::of_engine(&sparse)?))),
            other => Ok(Value::Engine(other)),
        }
    }

    /// A value that shares the memory of a constant, to be read. Numbers that are not aligned are
    /// copied.
    pub(crate) fn of_constant(tensor: &Tensor) -> Outcome<Value> {
        if tensor.dtype() == DType::String {
            return Ok(Value::Strings(Strings::of_tensor(tensor.clone())));
        }
        let tensor = if tensor.is_aligned() { tensor.clone() } else { tensor.to_owned_copy()? };
        let Some(bytes) = tensor.bytes() else { return invalid("the tensor is not in host memory") };
        let (data, dims) = (bytes.as_ptr().cast_mut(), dims_of(tensor.shape()));
        let (is_lent, has_own_allocator) = (false, false);
        Ok(Value::Numbers(Numbers { tensor, data, dims, info: None, is_lent, has_own_allocator }))
    }

    /// What a run reads.
    pub(crate) fn engine(&self) -> Outcome<EngineValue> {
        Ok(match self {
            Value::Numbers(numbers) => EngineValue::Tensor(numbers.tensor.clone()),
            Value::Strings(strings) => EngineValue::Tensor(strings.tensor()?),
            Value::Sparse(sparse) => sparse.engine()?,
            Value::Engine(value) => value.clone(),
        })
    }

    /// A copy that shares nothing, in memory of an allocator.
    pub(crate) fn copy(value: &EngineValue, allocator: Allocator) -> Outcome<Value> {
        match value {
            EngineValue::Tensor(tensor) if tensor.dtype() != DType::String => {
                Ok(Value::Numbers(Numbers::copy(tensor, allocator)?))
            }
            other => Value::of_result(other.clone()),
        }
    }

    /// Whether a caller may free the memory before the value is released, or needs its allocator
    /// for that.
    pub(crate) fn has_memory_of_caller(&self) -> bool {
        matches!(self, Value::Numbers(numbers) if numbers.is_lent || numbers.has_own_allocator)
    }

    /// The type of a tensor; `None` for other values.
    pub(crate) fn type_info(&self) -> Option<TypeInfo> {
        let (number, dims) = self.described().ok().filter(|_| self.is_tensor())?;
        Some(TypeInfo::Tensor(Object::new(TensorInfo::of_sizes(number, dims))))
    }

    pub(crate) fn numbers(&self) -> Outcome<&Numbers> {
        match self {
            Value::Numbers(numbers) => Ok(numbers),
            Value::Strings(_) => invalid(
                "strings have no memory of their own form; read them with GetStringTensorContent, and write them \
                 with FillStringTensor",
            ),
            Value::Sparse(_) => invalid("expected a tensor, got a sparse tensor"),
            Value::Engine(value) => invalid(format!("expected a tensor, got {}", value.kind_name())),
        }
    }

    pub(crate) fn strings(&self) -> Outcome<&Strings> {
        match self {
            Value::Strings(strings) => Ok(strings),
            Value::Sparse(sparse) => sparse.strings(),
            Value::Numbers(numbers) => {
                invalid(format!("expected a tensor of strings, got {}", numbers.tensor.dtype().name()))
            }
            Value::Engine(value) => {
                invalid(format!("expected a tensor of strings, got {}", value.kind_name()))
            }
        }
    }

    /// Whether it is a dense tensor.
    pub(crate) fn is_tensor(&self) -> bool {
        matches!(self, Value::Numbers(_) | Value::Strings(_))
    }

    /// The number of the element type, and the sizes of a tensor, those of the dense one if it is
    /// sparse.
    pub(crate) fn described(&self) -> Outcome<(i32, &[i64])> {
        match self {
            Value::Numbers(numbers) => Ok((number_of(numbers.tensor.dtype()), &numbers.dims)),
            Value::Strings(strings) => Ok((number_of(DType::String), strings.dims())),
            Value::Sparse(sparse) => Ok(sparse.described()),
            Value::Engine(value) => invalid(format!("Argument is not a tensor: it is {}", value.kind_name())),
        }
    }
}

entries! {
    /// 48
    fn CreateTensorAsOrtValue(allocator: Allocator, dims: Array<i64>, rank: usize, number: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let dtype = of_number(number)?;
        let sizes = sizes_of(dims.get(rank, "the shape")?)?;
        out.put(Object::give(match dtype {
            DType::String => Value::Strings(Strings::empty(&sizes)?),
            dtype => Value::Numbers(Numbers::allocated(dtype, &sizes, allocator)?),
        }));
        Ok(())
    }

    /// 49
    fn CreateTensorWithDataAsOrtValue(info: In<MemoryInfo>, data: *mut c_void, len: usize, dims: Array<i64>, rank: usize, number: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let info = info.get()?;
        info.require_host()?;
        let borrowed = Lent { data, len, dims: dims.get(rank, "the shape")?, number };
        let mut numbers = borrowed.numbers(())?;
        numbers.is_lent = true;
        if *info != HOST.inner {
            numbers.info = Some(Box::new(Object::new(info.clone())));
        }
        out.put(Object::give(Value::Numbers(numbers)));
        Ok(())
    }

    /// 292
    fn CreateTensorWithDataAndDeleterAsOrtValue(allocator: Allocator, data: *mut c_void, len: usize, dims: Array<i64>, rank: usize, number: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        allocator.info()?;
        let given = Lent { data, len, dims: dims.get(rank, "the shape")?, number };
        given.check()?;
        let mut numbers = given.numbers(Allocated { bytes: data.cast(), allocator })?;
        numbers.has_own_allocator = allocator != default_handle();
        out.put(Object::give(Value::Numbers(numbers)));
        Ok(())
    }

    /// 50
    fn IsTensor(value: In<Value>, out: Out<i32>) {
        let out = out.place()?;
        out.put(i32::from(value.get()?.is_tensor()));
        Ok(())
    }

    /// 51
    fn GetTensorMutableData(value: In<Value>, out: Out<*mut c_void>) {
        let out = out.place()?;
        out.put(value.get()?.numbers()?.data.cast());
        Ok(())
    }

    /// 378
    fn GetTensorData(value: In<Value>, out: Out<*const c_void>) {
        let out = out.place()?;
        out.put(value.get()?.numbers()?.data.cast_const().cast());
        Ok(())
    }

    /// 143
    fn TensorAt(value: In<Value>, location: Array<i64>, rank: usize, out: Out<*mut c_void>) {
        let out = out.place()?;
        let value = value.get()?;
        let location = location.get(rank, "the location")?;
        if let Value::Strings(_) = value {
            return invalid("this API does not support strings");
        }
        let numbers = value.numbers()?;
        let Some(width) = numbers.tensor.dtype().byte_size() else {
            return invalid(format!("elements of {} have no address", numbers.tensor.dtype().name()));
        };
        if rank != numbers.dims.len() {
            return invalid("location dimensions do not match shape size");
        }
        let mut offset = 0usize;
        for (at, (index, size)) in location.iter().zip(numbers.tensor.shape()).enumerate() {
            match usize::try_from(*index).ok().filter(|index| index < size) {
                // Within the elements of the tensor, whose bytes are counted.
                Some(index) => offset = offset * size + index,
                None => return invalid(format!("invalid location range: index {index} at axis {at} of size {size}")),
            }
        }
        // SAFETY: every index is below its size, so the element is in the tensor's memory.
        out.put(unsafe { numbers.data.add(offset * width) }.cast());
        Ok(())
    }

    /// 65
    fn GetTensorTypeAndShape(value: In<Value>, out: Out<*mut Object<TensorInfo>>) {
        let out = out.place()?;
        let (number, dims) = value.get()?.described()?;
        out.put(Object::give(TensorInfo::of_sizes(number, dims)));
        Ok(())
    }

    /// 414
    fn GetTensorElementTypeAndShapeDataReference(value: In<Value>, number: Out<i32>, dims: Out<*const i64>, rank: Out<usize>) {
        let (number, dims, rank) = (number.place()?, dims.place()?, rank.place()?);
        let (known, sizes) = value.get()?.described()?;
        number.put(known);
        dims.put(if sizes.is_empty() { std::ptr::null() } else { sizes.as_ptr() });
        rank.put(sizes.len());
        Ok(())
    }

    /// 318
    fn GetTensorSizeInBytes(value: In<Value>, out: Out<usize>) {
        let out = out.place()?;
        out.put(value.get()?.numbers()?.len());
        Ok(())
    }

    /// 194
    fn GetTensorMemoryInfo(value: In<Value>, out: Out<*const Object<MemoryInfo>>) {
        let out = out.place()?;
        let value = value.get()?;
        if !value.is_tensor() {
            value.numbers()?;
        }
        out.put(match value {
            Value::Numbers(Numbers { info: Some(info), .. }) => &raw const **info,
            _ => host_info(),
        });
        Ok(())
    }

    /// 66
    fn GetTypeInfo(value: In<Value>, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(Object::give(match value.get()? {
            Value::Engine(value) => TypeInfo::of(&value.value_type(), &ShapeSource::default()),
            Value::Sparse(sparse) => {
                let (number, dims) = sparse.described();
                TypeInfo::Sparse(Object::new(TensorInfo::of_sizes(number, dims)))
            }
            tensor => {
                let (number, dims) = tensor.described()?;
                TypeInfo::Tensor(Object::new(TensorInfo::of_sizes(number, dims)))
            }
        }));
        Ok(())
    }

    /// 67
    fn GetValueType(value: In<Value>, out: Out<i32>) {
        let out = out.place()?;
        out.put(match value.get()? {
            Value::Numbers(_) | Value::Strings(_) | Value::Engine(EngineValue::Tensor(_)) => onnx_type::TENSOR,
            Value::Engine(EngineValue::Sequence(_)) => onnx_type::SEQUENCE,
            Value::Engine(EngineValue::Map(_)) => onnx_type::MAP,
            Value::Sparse(_) | Value::Engine(EngineValue::Sparse(_)) => onnx_type::SPARSE,
            Value::Engine(EngineValue::Optional(_)) => onnx_type::OPTIONAL,
        });
        Ok(())
    }

    /// 178
    fn IsSparseTensor(value: In<Value>, out: Out<i32>) {
        let out = out.place()?;
        out.put(i32::from(matches!(value.get()?, Value::Sparse(_))));
        Ok(())
    }

    /// 192
    fn HasValue(value: In<Value>, out: Out<i32>) {
        let out = out.place()?;
        out.put(i32::from(!matches!(value.get()?, Value::Engine(EngineValue::Optional(_)))));
        Ok(())
    }

    /// 96
    fn ReleaseValue(value: Released<Value>) -> (), else (), {
        value.release();
    }
}

/// Memory that a caller lends, and the tensor that is to be in it.
pub(crate) struct Lent<'a> {
    pub(crate) data: *mut c_void,
    pub(crate) len: usize,
    pub(crate) dims: &'a [i64],
    pub(crate) number: i32,
}

impl Lent<'_> {
    /// Checks that the memory can be the tensor's.
    fn check(&self) -> Outcome<(DType, Shape)> {
        let dtype = of_number(self.number)?;
        if dtype == DType::String {
            return invalid(
                "strings are not read from memory of the caller; use CreateTensorAsOrtValue and FillStringTensor",
            );
        }
        let sizes = sizes_of(self.dims)?;
        let expected = byte_count(dtype, &sizes)?;
        if self.len < expected {
            return invalid(format!("not enough space: expected {expected}, got {}", self.len));
        }
        if self.data.is_null() && expected > 0 {
            return invalid(format!("the pointer to the data is null, expected {expected} bytes"));
        }
        Ok((dtype, sizes))
    }

    pub(crate) fn numbers(&self, owner: impl Send + Sync + 'static) -> Outcome<Numbers> {
        let (dtype, sizes) = self.check()?;
        // SAFETY: `check` compared the sizes; the header demands that the memory outlives the value
        // and is not written during a run.
        unsafe { Numbers::in_memory(dtype, &sizes, self.data.cast(), owner) }
    }
}
