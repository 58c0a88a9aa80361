//! DLPack: the structures by which libraries lend tensors to each other without a copy.
//!
//! The layouts are those of `dlpack.h`: [`DLManagedTensorVersioned`] of version 1, and
//! [`DLManagedTensor`] from before it. Whoever takes such a structure over calls its `deleter` once
//! when it is done; [`Managed`] does so when it is dropped. What the element types mean is not
//! known here.

use std::ffi::c_void;
use std::ptr::NonNull;

use crate::{AllocError, Buffer, DeviceId, SharedBuffer};

/// `kDLCPU`: memory of the host.
pub const CPU: i32 = 1;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`: nobody may write the elements.
pub const READ_ONLY: u64 = 1;

/// The version that is written here; structures of another major version are refused.
pub const VERSION: DLPackVersion = DLPackVersion { major: 1, minor: 1 };

/// The version of a structure.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLPackVersion {
    pub major: u32,
    pub minor: u32,
}

/// Where the elements are.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLDevice {
    pub device_type: i32,
    pub device_id: i32,
}

/// The type of the elements: a code for the kind, the bits of one lane, the lanes of an element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// A tensor that is lent. Strides count elements; without them the elements lie in row-major order.
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

/// The structure from before version 1.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are those of the header")]
pub struct DLManagedTensor {
    pub dl_tensor: DLTensor,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut DLManagedTensor)>,
}

/// The structure of version 1.
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

/// A pointer to one of the two structures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Raw {
    /// Of version 1.
    Versioned(NonNull<DLManagedTensorVersioned>),
    /// From before it.
    Unversioned(NonNull<DLManagedTensor>),
}

/// Which of the two structures is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// [`DLManagedTensorVersioned`], which Python's capsules call `dltensor_versioned`.
    Versioned,
    /// [`DLManagedTensor`], which they call `dltensor`. It cannot say that elements are only to be
    /// read.
    Unversioned,
}

/// A structure that is ours to give back: its deleter is called once, when this is dropped or what
/// it became is.
#[derive(Debug)]
pub struct Managed {
    raw: Raw,
}

// SAFETY: who calls `from_raw` promises that deleter and elements may be used from any thread; what
// is made here owns buffers, which may.
unsafe impl Send for Managed {}
// SAFETY: a shared reference reads fields that nobody changes while the structure lives.
unsafe impl Sync for Managed {}

impl Managed {
    /// Takes over a structure that somebody lends.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] for a null pointer inside or another major version; the
    /// structure is given back then.
    ///
    /// # Safety
    ///
    /// The pointer must be to a structure as `dlpack.h` describes it, which nobody else uses or
    /// deletes from now on, whose shape and strides have `ndim` numbers, and whose deleter may be
    /// called from any thread. Until it is called, the elements (as many bytes as shape, strides
    /// and type say) must be initialised and must not move, and are written by nobody while a
    /// reference to bytes of a buffer made of it exists.
    pub unsafe fn from_raw(raw: Raw) -> Result<Managed, AllocError> {
        let managed = Managed { raw };
        if let Raw::Versioned(pointer) = raw {
            // SAFETY: the caller's promise; version and deleter are where every version has them.
            let version = unsafe { pointer.as_ref() }.version;
            if version.major != VERSION.major {
                let (major, minor) = (version.major, version.minor);
                return Err(unsupported(format!("DLPack {major}.{minor} was given, 1 is understood")));
            }
        }
        let tensor = managed.tensor();
        let dimensions = usize::try_from(tensor.ndim);
        if dimensions.is_err() || (tensor.ndim > 0 && tensor.shape.is_null()) {
            return Err(unsupported("a DLPack tensor has no shape".to_owned()));
        }
        Ok(managed)
    }

    /// A structure of a tensor over memory of the host, which it keeps alive. `shape` has the sizes
    /// of a compact row-major tensor of `dtype`, which `memory` holds; the elements begin at
    /// `pointer`, inside of it.
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

    /// A structure over bytes that are only read; it keeps them alive. `shape` are the sizes of a
    /// compact tensor that takes exactly these bytes.
    pub fn lend(bytes: bytes::Bytes, dtype: DLDataType, shape: &[usize]) -> Managed {
        let pointer = bytes.as_ptr().cast_mut();
        Managed::new(Lent::new(pointer, Box::new(bytes), dtype, shape, false), Layout::Versioned)
    }

    /// A structure that takes a buffer of the host over, for reading and writing. `shape` are the
    /// sizes of a compact tensor that the buffer holds.
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
            return Err(unsupported(
                "memory that is only read, or of a device, is not given away".to_owned(),
            ));
        };
        Ok(Managed::new(Lent::new(pointer, Box::new(buffer), dtype, shape, true), layout))
    }

    /// The structure, whose deleter is the caller's to call from now on.
    pub fn into_raw(self) -> Raw {
        let raw = self.raw;
        let _ = std::mem::ManuallyDrop::new(self);
        raw
    }

    fn tensor(&self) -> &DLTensor {
        // SAFETY: the structure lives until its deleter is called, which happens when `self` is
        // dropped.
        unsafe {
            match &self.raw {
                Raw::Versioned(pointer) => &pointer.as_ref().dl_tensor,
                Raw::Unversioned(pointer) => &pointer.as_ref().dl_tensor,
            }
        }
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DLDataType {
        self.tensor().dtype
    }

    /// Where the elements are.
    pub fn device(&self) -> DLDevice {
        self.tensor().device
    }

    /// The sizes of the dimensions, as they were given.
    pub fn shape(&self) -> &[i64] {
        let tensor = self.tensor();
        self.numbers(tensor.shape)
    }

    /// The distances between elements along each dimension; none where they lie in row-major order.
    pub fn strides(&self) -> Option<&[i64]> {
        let strides = self.tensor().strides;
        (!strides.is_null()).then(|| self.numbers(strides))
    }

    /// Whether the elements lie in row-major order without gaps.
    pub fn is_compact(&self) -> bool {
        let (shape, Some(strides)) = (self.shape(), self.strides()) else { return true };
        let mut step = 1i64;
        let mut sizes = shape.iter().zip(strides).rev();
        let in_order = sizes.all(|(&size, &stride)| {
            let fits = size == 1 || stride == step;
            step = step.saturating_mul(size);
            fits
        });
        in_order || shape.contains(&0)
    }

    fn numbers(&self, pointer: *const i64) -> &[i64] {
        match usize::try_from(self.tensor().ndim) {
            // SAFETY: `from_raw` has the caller's promise that there are `ndim` numbers, and
            // refuses a null shape.
            Ok(count) if count > 0 => unsafe { std::slice::from_raw_parts(pointer, count) },
            _ => &[],
        }
    }

    /// Whether the lender allows no writing. The structure from before version 1 does not tell; it
    /// allows it.
    pub fn is_read_only(&self) -> bool {
        match &self.raw {
            // SAFETY: as in `tensor`.
            Raw::Versioned(pointer) => unsafe { pointer.as_ref() }.flags & READ_ONLY != 0,
            Raw::Unversioned(_) => false,
        }
    }

    /// The first `len` bytes of the elements for reading; the structure is given back when the last
    /// holder goes.
    ///
    /// # Errors
    ///
    /// [`AllocError::Unsupported`] where they are not in memory of the host, or at no address.
    pub fn into_shared(self, len: usize) -> Result<SharedBuffer, AllocError> {
        let pointer = self.first_byte()?;
        // SAFETY: `from_raw` has the caller's promise for the elements; `self` keeps them until it
        // is dropped.
        unsafe { SharedBuffer::foreign(pointer, len, self) }
    }

    /// The first `len` bytes of the elements for reading and writing.
    ///
    /// # Errors
    ///
    /// As [`into_shared`](Self::into_shared), and where the lender allows no writing.
    pub fn into_buffer(self, len: usize) -> Result<Buffer, AllocError> {
        if self.is_read_only() {
            return Err(unsupported("the DLPack tensor is only to be read".to_owned()));
        }
        let pointer = self.first_byte()?;
        // SAFETY: as in `into_shared`, and the lender allows writing.
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
            offset.ok_or_else(|| unsupported("the DLPack tensor begins at no address".to_owned()))?;
        Ok(start.wrapping_add(offset))
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // SAFETY: the structure is ours, and `into_raw` does not come here, so that its deleter is
        // called once.
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

/// What a structure that is made here keeps: the elements and the numbers it points to.
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

unsafe extern "C" fn delete_versioned(managed: *mut DLManagedTensorVersioned) {
    // SAFETY: only `Managed::new` hands out this deleter, with a boxed structure whose context is a
    // boxed `Lent`; who holds the structure calls it once.
    unsafe {
        let managed = Box::from_raw(managed);
        drop(Box::from_raw(managed.manager_ctx.cast::<Lent>()));
    }
}

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
