//! Zero-copy tensor exchange with other libraries through DLPack.

use ort_alloc::dlpack::{DLDataType, Layout, Managed};

use super::{Shape, Tensor, TensorBuffer, byte_count};
use crate::dtype::DType;
use crate::{Result, ensure, error};

/// Our types with DLPack's type code and the bits of one lane. Sub-byte types are missing, because
/// DLPack does not define the order of elements in a byte.
const TYPES: &[(DType, u8, u8)] = &[
    // Codes of `DLDataTypeCode`: 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool. 3 is a
    // handle.
    (DType::I8, 0, 8),
    (DType::I16, 0, 16),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::U8, 1, 8),
    (DType::U16, 1, 16),
    (DType::U32, 1, 32),
    (DType::U64, 1, 64),
    (DType::F16, 2, 16),
    (DType::F32, 2, 32),
    (DType::F64, 2, 64),
    (DType::BF16, 4, 16),
    (DType::C64, 5, 64),
    (DType::C128, 5, 128),
    (DType::Bool, 6, 8),
    // 7 to 9 are 8-bit floats that ONNX lacks: e3m4, e4m3 with infinities, e4m3b11fnuz.
    (DType::F8E4M3FN, 10, 8),
    (DType::F8E4M3FNUZ, 11, 8),
    (DType::F8E5M2, 12, 8),
    (DType::F8E5M2FNUZ, 13, 8),
    (DType::F8E8M0, 14, 8),
];

fn to_dlpack(dtype: DType) -> Result<DLDataType> {
    let row = TYPES.iter().find(|(known, ..)| *known == dtype);
    let (_, code, bits) = row.ok_or_else(|| {
        error!(InvalidArgument, "DLPack has no type for {} tensors", dtype.name())
            .help("cast the tensor to a type of whole bytes first")
    })?;
    Ok(DLDataType { code: *code, bits: *bits, lanes: 1 })
}

fn from_dlpack(dtype: DLDataType) -> Result<DType> {
    let DLDataType { code, bits, lanes } = dtype;
    // More than one lane is a vector type, whose elements would be an inner dimension.
    let row = TYPES.iter().find(|row| (row.1, row.2) == (code, bits) && lanes == 1);
    row.map(|row| row.0).ok_or_else(|| {
        error!(
            InvalidArgument,
            "there is no element type for DLPack's code {code}, {bits} bits, {lanes} lanes"
        )
        .help("lend integers, floats, bfloat16, complex numbers or booleans of one lane")
    })
}

/// Returns the type and shape of a borrowed tensor, which must be row-major and compact.
fn describe(managed: &Managed) -> Result<(DType, Shape)> {
    let dtype = from_dlpack(managed.dtype())?;
    let sizes = managed.shape();
    // The struct is foreign and stores sizes as `i64`, so they may be negative.
    let shape: Option<Shape> = sizes.iter().map(|&size| usize::try_from(size).ok()).collect();
    let shape =
        shape.ok_or_else(|| error!(InvalidArgument, "a DLPack tensor has the invalid shape {sizes:?}"))?;
    // Refuses sizes that overflow before anything takes a length from them.
    byte_count(dtype, &shape)?;
    ensure!(
        managed.is_compact(),
        InvalidArgument,
        help = "lend a contiguous copy of it",
        "a DLPack tensor of shape {sizes:?} has strides {:?}, expected a contiguous tensor",
        managed.strides().unwrap_or_default()
    );
    Ok((dtype, shape))
}

impl Tensor {
    /// Creates a tensor that borrows the memory of another library read-only. The memory is
    /// returned when the last tensor that shares it is dropped.
    ///
    /// # Errors
    ///
    /// The tensor is not compact, not in host memory, or of a type that ONNX lacks. The memory is
    /// then returned at once.
    pub fn from_dlpack(managed: Managed) -> Result<Tensor> {
        let (dtype, shape) = describe(&managed)?;
        let memory = managed.into_shared(byte_count(dtype, &shape)?)?;
        let bytes = memory.bytes().ok_or_else(|| error!(Fail, "host memory is not the host's"))?;
        Tensor::from_bytes(dtype, &shape, bytes)
    }

    /// Lends the tensor to another library, zero-copy. The library must not write to it, and
    /// returns it when done.
    ///
    /// ```
    /// use ort_core::tensor::Tensor;
    ///
    /// let tensor = Tensor::from_slice(&[2], &[1.0f32, 2.0])?;
    /// let lent = tensor.to_dlpack()?; // `lent.into_raw()` is the pointer that goes into a capsule
    /// assert!(lent.is_read_only());
    /// assert_eq!(Tensor::from_dlpack(lent)?.to_vec::<f32>()?, [1.0, 2.0]);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Strings, sub-byte types, device memory and unaligned memory cannot be lent.
    pub fn to_dlpack(&self) -> Result<Managed> {
        let dtype = to_dlpack(self.dtype)?;
        // Consumers cast the pointer to the element type, but weights of a mapped file may start at
        // any byte.
        let bytes = self.bytes().filter(|_| self.is_aligned()).ok_or_else(|| {
            error!(InvalidArgument, "a tensor that is not aligned in memory of the host cannot be lent")
                .help("lend a copy: `to_owned_copy`")
        })?;
        Ok(Managed::lend(bytes.clone(), dtype, &self.shape))
    }
}

impl TensorBuffer {
    /// Creates a writable tensor in memory that another library lends. A run bound to it writes its
    /// results there directly.
    ///
    /// # Errors
    ///
    /// As [`Tensor::from_dlpack`]; also if the lender forbids writing or the memory is not aligned
    /// for the type.
    pub fn from_dlpack(managed: Managed) -> Result<TensorBuffer> {
        let (dtype, shape) = describe(&managed)?;
        let buffer = managed.into_buffer(byte_count(dtype, &shape)?)?;
        TensorBuffer::from_buffer(dtype, &shape, buffer)
    }

    /// Passes the tensor to another library, which may write to it, in either DLPack struct layout.
    ///
    /// # Errors
    ///
    /// The type is a sub-byte type, or a tensor still shares the memory.
    pub fn into_dlpack(self, layout: Layout) -> Result<Managed> {
        let (dtype, shape) = (to_dlpack(self.dtype())?, Shape::from(self.shape()));
        Ok(Managed::give(self.into_buffer()?, dtype, &shape, layout)?)
    }
}
