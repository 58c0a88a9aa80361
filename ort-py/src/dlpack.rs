//! DLPack: tensors lent to other libraries and borrowed from them, without a copy.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use ort_runtime::dlpack::{DLManagedTensor, DLManagedTensorVersioned, Layout, Managed, Raw};
use ort_runtime::{Tensor, TensorBuffer};
use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::error::OrRaise;

// Names of capsules. A consumer renames the capsule that it takes.
const UNVERSIONED: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const USED: &CStr = c"used_dltensor";
const USED_VERSIONED: &CStr = c"used_dltensor_versioned";

/// What a program lends: its memory is read where it lies.
pub(crate) struct Borrowed {
    pub(crate) tensor: Tensor,
    /// Whether the lender forbids writing.
    pub(crate) is_read_only: bool,
}

/// Takes what a capsule holds, or what an object with `__dlpack__` lends.
pub(crate) fn borrow(source: &Bound<'_, PyAny>) -> PyResult<Borrowed> {
    let py = source.py();
    let managed = match source.cast::<PyCapsule>() {
        Ok(capsule) => take(capsule)?,
        Err(_) => {
            let method = source.getattr_opt(intern!(py, "__dlpack__"))?.ok_or_else(|| {
                let class = source.get_type();
                PyTypeError::new_err(format!(
                    "expected an object with __dlpack__ or a DLPack capsule, not {class}"
                ))
            })?;
            take(method.call0()?.cast::<PyCapsule>()?)?
        }
    };
    let is_read_only = managed.is_read_only();
    Ok(Borrowed { tensor: Tensor::from_dlpack(managed).or_raise(py)?, is_read_only })
}

/// Takes the struct out of a capsule, which is then used up.
fn take(capsule: &Bound<'_, PyCapsule>) -> PyResult<Managed> {
    let pointer_of = |name: &CStr| {
        // SAFETY: the object is a capsule, and the name lives forever.
        unsafe {
            match ffi::PyCapsule_IsValid(capsule.as_ptr(), name.as_ptr()) {
                1 => NonNull::new(ffi::PyCapsule_GetPointer(capsule.as_ptr(), name.as_ptr())),
                _ => None,
            }
        }
    };
    let (raw, used) = if let Some(pointer) = pointer_of(UNVERSIONED) {
        (Raw::Unversioned(pointer.cast::<DLManagedTensor>()), USED)
    } else if let Some(pointer) = pointer_of(VERSIONED) {
        (Raw::Versioned(pointer.cast::<DLManagedTensorVersioned>()), USED_VERSIONED)
    } else {
        return Err(PyTypeError::new_err(
            "the capsule holds no DLPack tensor, or it was taken already: a capsule is used once",
        ));
    };
    // SAFETY: the object is a capsule, and the name lives forever.
    if unsafe { ffi::PyCapsule_SetName(capsule.as_ptr(), used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(capsule.py()));
    }
    // SAFETY: a capsule of this name holds a valid struct, and the new name hands it over. Who
    // lends memory of Python's makes its deleter safe on any thread, as DLPack asks.
    unsafe { Managed::from_raw(raw) }.map_err(|problem| PyRuntimeError::new_err(problem.to_string()))
}

/// Lends a buffer as a capsule, which every version of DLPack's consumers reads.
pub(crate) fn lend<'py>(py: Python<'py>, buffer: TensorBuffer) -> PyResult<Bound<'py, PyAny>> {
    let managed = buffer.into_dlpack(Layout::Unversioned).or_raise(py)?;
    let Raw::Unversioned(pointer) = managed.into_raw() else {
        return Err(PyRuntimeError::new_err("the struct of DLPack has another layout"));
    };
    // SAFETY: the pointer is to a struct that the capsule owns until a consumer renames it. If the
    // capsule cannot be made, the struct is deleted here.
    unsafe {
        let capsule = ffi::PyCapsule_New(pointer.as_ptr().cast(), UNVERSIONED.as_ptr(), Some(delete_unused));
        if capsule.is_null() {
            delete(pointer.as_ptr().cast());
        }
        Bound::from_owned_ptr_or_err(py, capsule)
    }
}

/// The destructor of a capsule: frees the struct if no consumer took it.
///
/// # Safety
///
/// `capsule` is a capsule that `lend` made.
unsafe extern "C" fn delete_unused(capsule: *mut ffi::PyObject) {
    // SAFETY: the caller passes a capsule; a name that is still ours means that no one took it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, UNVERSIONED.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, UNVERSIONED.as_ptr()));
        }
    }
}

/// Deletes a struct that `lend` made.
///
/// # Safety
///
/// `pointer` is to such a struct, which no one else owns.
unsafe fn delete(pointer: *mut c_void) {
    let pointer = pointer.cast::<DLManagedTensor>();
    // SAFETY: the caller owns the struct, and its deleter is set.
    unsafe {
        if let Some(deleter) = (*pointer).deleter {
            deleter(pointer);
        }
    }
}
