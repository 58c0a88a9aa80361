//! DLPack: the C structs by which libraries exchange tensors zero-copy.
//!
//! The layouts are those of `dlpack.h`: [`DLManagedTensorVersioned`] since version 1, and
//! [`DLManagedTensor`] before it. The consumer of such a struct calls its `deleter` once when done;
//! [`Managed`] does so on drop. This module does not interpret the element types.

use std::ffi::c_void;
use std::ptr::NonNull;

use crate::{AllocError, Buffer, DeviceId, SharedBuffer};

/// `kDLCPU`: host memory.
pub const CPU: i32 = 1;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`: the elements must not be written.
pub const READ_ONLY: u64 = 1;

/// The version written here. Structs of another major version are refused.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// The version of a struct.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLPackVersion {
    pub major: u32,
    pub minor: u32,
}

/// The device of the elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

/// The element type: a type code, the bits of one lane, and the number of lanes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// A borrowed tensor. Strides count elements. Without strides the elements are compact and
/// row-major.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLTensor {
    pub data: *mut c_void,
    pub device: DLDevice,
    pub ndim: i32,
    pub dtype: DLDataType,
    pub shape: *mut i64,
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// The managed struct before version 1.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLManagedTensor {
    pub dl_tensor: DLTensor,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// The managed struct of version 1.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLManagedTensorVersioned {
    pub version: DLPackVersion,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensorVersioned)>,
    pub flags: u64,
    pub dl_tensor: DLTensor,
}

/// A pointer to one of the two managed structs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raw {
    /// Version 1.
    Versioned(NonNull<DLManagedTensorVersioned>),
    /// Before version 1.
    Unversioned(NonNull<DLManagedTensor>),
}

/// Which of the two managed structs to create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// [`DLManagedTensorVersioned`], in Python a capsule named `dltensor_versioned`.
    Versioned,
    /// [`DLManagedTensor`], in Python a capsule named `dltensor`. It has no read-only flag.
    Unversioned,
}

/// An owned managed struct. Its deleter is called once, when this or the buffer made from it is
/// dropped.
#[derive(Debug)]
pub struct Managed {
    raw: Raw,
}

// SAFETY: callers of `from_raw` guarantee that deleter and elements may be used from any thread.
// Structs made by `Managed::new` own buffers, which are `Send`.
unsafe impl Send for Managed {}
// SAFETY: a shared reference only reads fields, which no one changes while the struct lives.
unsafe impl Sync for Managed {}

impl Managed {
    /// Takes ownership of a managed struct.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null shape pointer or another major version. The struct is
    /// then deleted.
    ///
    /// # Safety
    ///
    /// The pointer must be to a valid struct as defined in `dlpack.h`, which no one else uses or
    /// deletes from now on. Its shape and strides must have `ndim` entries, and its deleter must be
    /// callable from any thread. Until the deleter is called, the elements (as many bytes as shape,
    /// strides and type imply) must be initialised and must not move. They must not be written
    /// while a reference to bytes of a buffer made from it exists.
    pub unsafe fn from_raw(raw: Raw) -> Result<Managed, AllocError> {
        let managed = Managed { raw };
        if let Raw::Versioned(pointer) = raw {
            // SAFETY: the caller guarantees a valid struct; every version starts with the version
            // field.
            let version = unsafe { pointer.as_ref() }.version;
            if version.major != VERSION.major {
                let (major, minor) = (version.major, version.minor);
                return Err(unsupported(format!(
                    "DLPack version {major}.{minor} is not supported, expected 1.x"
                )));
            }
        }
        let tensor = managed.tensor();
        let dimensions = usize::try_from(tensor.ndim);
        if dimensions.is_err() || (tensor.ndim > 0 && tensor.shape.is_null()) {
            return Err(unsupported("a DLPack tensor has no shape".to_owned()));
        }
        Ok(managed)
    }

    /// Creates a managed struct over host memory, which it keeps alive. `lent.shape` must be the
    /// shape of a compact row-major tensor of `lent.dtype` that fits in the owner's memory from
    /// `lent.pointer` on.
    fn new(lent: Lent, layout: Layout) -> Managed {
        let mut lent = Box::new(lent);
        let tensor = DLTensor {
            data: lent.pointer.cast(),
            device: DLDevice { device_type: CPU, device_id: 0 },
            ndim: lent.shape.len() as i32,
            dtype: lent.dtype,
            shape: lent.shape.as_mut_ptr(),
            strides: lent.strides.as_mut_ptr(),
            byte_offset: 0,
        };
        let flags = if lent.is_writable { 0 } else { READ_ONLY };
        let manager_ctx = Box::into_raw(lent).cast::<c_void>();
        let raw = match layout {
            Layout::Versioned => {
                let deleter = Some(delete_versioned as unsafe extern "C" fn(_));
                let managed = DLManagedTensorVersioned {
                    version: VERSION,
                    manager_ctx,
                    deleter,
                    flags,
                    dl_tensor: tensor,
                };
                Raw::Versioned(NonNull::from(Box::leak(Box::new(managed))))
            }
            Layout::Unversioned => {
                let deleter = Some(delete_unversioned as unsafe extern "C" fn(_));
                let managed = DLManagedTensor { dl_tensor: tensor, manager_ctx, deleter };
                Raw::Unversioned(NonNull::from(Box::leak(Box::new(managed))))
            }
        };
        Managed { raw }
    }

    /// Creates a read-only managed struct that keeps `bytes` alive. `shape` must be that of a
    /// compact tensor of exactly these bytes.
    pub fn lend(bytes: bytes::Bytes, dtype: DLDataType, shape: &[usize]) -> Managed {
        let pointer = bytes.as_ptr().cast_mut();
        Managed::new(Lent::new(pointer, Box::new(bytes), dtype, shape, false), Layout::Versioned)
    }

    /// Creates a writable managed struct that takes over a host buffer. `shape` must be that of a
    /// compact tensor that fits in the buffer.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for memory that cannot be written.
    pub fn give(
        mut buffer: Buffer,
        dtype: DLDataType,
        shape: &[usize],
        layout: Layout,
    ) -> Result<Managed, AllocError> {
        let Some(pointer) = buffer.bytes_mut().map(|bytes| bytes.as_mut_ptr()) else {
            return Err(unsupported("read-only memory and device memory cannot be exported".to_owned()));
        };
        Ok(Managed::new(Lent::new(pointer, Box::new(buffer), dtype, shape, true), layout))
    }

    /// Returns the struct. The caller must call its deleter.
    pub fn into_raw(self) -> Raw {
        let raw = self.raw;
        let _ = std::mem::ManuallyDrop::new(self);
        raw
    }

    fn tensor(&self) -> &DLTensor {
        // SAFETY: the struct is valid until its deleter is called, which only `drop` does.
        unsafe {
            match &self.raw {
                Raw::Versioned(pointer) => &pointer.as_ref().dl_tensor,
                Raw::Unversioned(pointer) => &pointer.as_ref().dl_tensor,
            }
        }
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DLDataType {
        self.tensor().dtype
    }

    /// Returns the device of the elements.
    pub fn device(&self) -> DLDevice {
        self.tensor().device
    }

    /// Returns the sizes of the dimensions as stored in the struct.
    pub fn shape(&self) -> &[i64] {
        let tensor = self.tensor();
        self.numbers(tensor.shape)
    }

    /// Returns the strides in elements, or `None` if the tensor is compact and row-major.
    pub fn strides(&self) -> Option<&[i64]> {
        let strides = self.tensor().strides;
        (!strides.is_null()).then(|| self.numbers(strides))
    }

    /// Returns whether the elements are in row-major order without gaps.
    pub fn is_compact(&self) -> bool {
        let (shape, Some(strides)) = (self.shape(), self.strides()) else { return true };
        let mut step = 1i64;
        let mut sizes = shape.iter().zip(strides).rev();
        let in_order = sizes.all(|(&size, &stride)| {
            // An axis of size 1 never advances, so exporters write any stride for it.
            let fits = size == 1 || stride == step;
            step = step.saturating_mul(size);
            fits
        });
        // Strides of an empty tensor address nothing.
        in_order || shape.contains(&0)
    }

    fn numbers(&self, pointer: *const i64) -> &[i64] {
        match usize::try_from(self.tensor().ndim) {
            // SAFETY: the caller of `from_raw` guaranteed `ndim` entries, and it refused a null
            // shape; `strides` checks for null.
            Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(pointer, count) },
            _ => &[],
        }
    }

    /// Returns whether the lender forbids writing. The struct before version 1 has no such flag and
    /// counts as writable.
    pub fn is_read_only(&self) -> bool {
        match &self.raw {
            // SAFETY: as in `tensor`.
            Raw::Versioned(pointer) => unsafe { pointer.as_ref() }.flags & READ_ONLY != 0,
            Raw::Unversioned(_) => false,
        }
    }

    /// Returns the first `len` bytes of the elements for reading. The struct is deleted when the
    /// last clone or view is dropped.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] if they are not in host memory, or their address overflows.
    pub fn into_shared(self, len: usize) -> Result<SharedBuffer, AllocError> {
        let pointer = self.first_byte()?;
        // SAFETY: the caller of `from_raw` guaranteed the elements until the deleter runs, which
        // happens when the buffer drops `self`.
        unsafe { SharedBuffer::foreign(pointer, len, self) }
    }

    /// Returns the first `len` bytes of the elements for reading and writing.
    ///
    /// # Errors
    ///
    /// As [`into_shared`](Self::into_shared); also if the lender forbids writing.
    pub fn into_buffer(self, len: usize) -> Result<Buffer, AllocError> {
        if self.is_read_only() {
            return Err(unsupported("the DLPack tensor is read-only".to_owned()));
        }
        let pointer = self.first_byte()?;
        // SAFETY: as in `into_shared`, and `is_read_only` was checked above.
        unsafe { Buffer::foreign(pointer, len, self) }
    }

    fn first_byte(&self) -> Result<*mut u8, AllocError> {
        let tensor = self.tensor();
        if tensor.device.device_type != CPU {
            let device = tensor.device;
            return Err(unsupported(format!(
                "the DLPack tensor is on device {} of type {}, expected type {CPU} (CPU)",
                device.device_id, device.device_type
            )));
        }
        let offset = usize::try_from(tensor.byte_offset).ok();
        let start = tensor.data.cast::<u8>();
        let offset = offset.filter(|offset| (start as usize).checked_add(*offset).is_some());
        let offset =
            offset.ok_or_else(|| unsupported("the DLPack tensor has a null data pointer".to_owned()))?;
        Ok(start.wrapping_add(offset))
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: we own the struct, and `into_raw` skips this `drop`, so the deleter is called
        // once.
        unsafe {
            match self.raw {
                Raw::Versioned(pointer) => {
                    if let Some(deleter) = pointer.as_ref().deleter {
                        deleter(pointer.as_ptr());
                    }
                }
                Raw::Unversioned(pointer) => {
                    if let Some(deleter) = pointer.as_ref().deleter {
                        deleter(pointer.as_ptr());
                    }
                }
            }
        }
    }
}

/// What a managed struct created here owns: the elements, and the arrays it points to.
struct Lent {
    pointer: *mut u8,
    _owner: Box<dyn Send + Sync>,
    dtype: DLDataType,
    shape: Vec<i64>,
    strides: Vec<i64>,
    is_writable: bool,
}

impl Lent {
    fn new(
        pointer: *mut u8,
        owner: Box<dyn Send + Sync>,
        dtype: DLDataType,
        shape: &[usize],
        is_writable: bool,
    ) -> Lent {
        let mut strides: Vec<i64> = shape.iter().map(|_| 1).collect();
        let mut step = 1i64;
        for (stride, &size) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            step = step.saturating_mul(size as i64);
        }
        let shape = shape.iter().map(|&size| size as i64).collect();
        Lent { pointer, _owner: owner, dtype, shape, strides, is_writable }
    }
}

/// The deleter of what [`Managed::new`] makes.
///
/// # Safety
///
/// `managed` is from [`Managed::new`], with a boxed `Lent` as its context. Its owner calls the
/// deleter once.
unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: only `Managed::new` uses this deleter, with a boxed struct whose context is a boxed
    // `Lent`. The owner of the struct calls it once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx.cast::<Lent>()));
    }
}

/// The deleter of what [`Managed::new`] makes for the older version of DLPack.
///
/// # Safety
///
/// As [`delete_versioned`].
unsafe extern "C" fn delete_unversioned(managed: *mut DLManagedTensor) {
    // SAFETY: as in `delete_versioned`.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx.cast::<Lent>()));
    }
}

fn unsupported(reason: String) -> AllocError {
    AllocError::Unsupported { device: DeviceId::HOST, reason }
}
