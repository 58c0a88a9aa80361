//! cuBLASLt descriptors of a GEMM. They are host memory.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use ort_core::{Result, error};

use super::functions::Handle;
use super::handle::Lt;
use super::matmul::{Compute, Epilogue, LtElement, LtLayout, Matmul};

// Numbers of attributes and values, from cuBLASLt's header.
const LAYOUT_BATCH_COUNT: c_int = 5;
const LAYOUT_STRIDED_BATCH_OFFSET: c_int = 6;
const DESC_TRANSA: c_int = 3;
const DESC_TRANSB: c_int = 4;
const DESC_EPILOGUE: c_int = 7;
pub(super) const DESC_BIAS_POINTER: c_int = 8;
pub(super) const PREF_MAX_WORKSPACE_BYTES: c_int = 1;
pub(super) const PREF_MIN_ALIGNMENT_A_BYTES: c_int = 5;
const EPILOGUE_DEFAULT: c_int = 1;
const EPILOGUE_RELU: c_int = 2;
const EPILOGUE_BIAS: c_int = 4;
const EPILOGUE_GELU: c_int = 32;

/// An opaque structure of the library, in host memory.
pub(super) struct LtDescriptor {
    lt: Arc<Lt>,
    pub(super) handle: Handle,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    set: unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int,
}

// SAFETY: a descriptor is not tied to a thread, and users share it under a lock.
unsafe impl Send for LtDescriptor {}

impl LtDescriptor {
    fn layout(lt: Arc<Lt>, element: LtElement, layout: &LtLayout, batch: usize) -> Result<LtDescriptor> {
        let mut handle = ptr::null_mut();
        let (rows, columns, leading) = (layout.rows as u64, layout.columns as u64, layout.leading as i64);
        let functions = &lt.loaded.functions;
        // SAFETY: the library writes one handle, which `Drop` destroys.
        let status = unsafe {
            (functions.cublasLtMatrixLayoutCreate)(&mut handle, type_of(element), rows, columns, leading)
        };
        lt.check(status, "cublasLtMatrixLayoutCreate")?;
        let destroy = functions.cublasLtMatrixLayoutDestroy;
        let set = functions.cublasLtMatrixLayoutSetAttribute;
        let made = LtDescriptor { lt, handle, destroy, set };
        if batch > 1 {
            let count = i32::try_from(batch)
                .map_err(|_| error!(NotImplemented, "a batch of {batch} matrices in one product"))?;
            made.set(LAYOUT_BATCH_COUNT, &count)?;
            made.set(LAYOUT_STRIDED_BATCH_OFFSET, &(layout.step as i64))?;
        }
        Ok(made)
    }

    fn operation(lt: Arc<Lt>, matmul: &Matmul) -> Result<LtDescriptor> {
        let (compute, scale) = match matmul.compute {
            Compute::F32 => (68, type_of(LtElement::F32)),
            Compute::Tf32 => (77, type_of(LtElement::F32)),
            Compute::F64 => (70, type_of(LtElement::F64)),
        };
        let mut handle = ptr::null_mut();
        let functions = &lt.loaded.functions;
        // SAFETY: the library writes one handle, which `Drop` destroys.
        let status = unsafe { (functions.cublasLtMatmulDescCreate)(&mut handle, compute, scale) };
        lt.check(status, "cublasLtMatmulDescCreate")?;
        let destroy = functions.cublasLtMatmulDescDestroy;
        let set = functions.cublasLtMatmulDescSetAttribute;
        let made = LtDescriptor { lt, handle, destroy, set };
        let [a, b] = matmul.transposed;
        made.set(DESC_TRANSA, &i32::from(a))?;
        made.set(DESC_TRANSB, &i32::from(b))?;
        let activation = match matmul.epilogue {
            Epilogue::None => 0,
            Epilogue::Relu => EPILOGUE_RELU,
            Epilogue::Gelu => EPILOGUE_GELU,
        };
        let epilogue = activation | if matmul.has_bias { EPILOGUE_BIAS } else { 0 };
        made.set(DESC_EPILOGUE, &if epilogue == 0 { EPILOGUE_DEFAULT } else { epilogue })?;
        Ok(made)
    }

    pub(super) fn preference(lt: Arc<Lt>) -> Result<LtDescriptor> {
        let mut handle = ptr::null_mut();
        let functions = &lt.loaded.functions;
        // SAFETY: the library writes one handle, which `Drop` destroys.
        let status = unsafe { (functions.cublasLtMatmulPreferenceCreate)(&mut handle) };
        lt.check(status, "cublasLtMatmulPreferenceCreate")?;
        let destroy = functions.cublasLtMatmulPreferenceDestroy;
        let set = functions.cublasLtMatmulPreferenceSetAttribute;
        Ok(LtDescriptor { lt, handle, destroy, set })
    }

    pub(super) fn set<T: Copy>(&self, attribute: c_int, value: &T) -> Result<()> {
        // SAFETY: the structure is live; the library copies `size_of::<T>()` bytes of the value.
        let status =
            unsafe { (self.set)(self.handle, attribute, ptr::from_ref(value).cast(), size_of::<T>()) };
        self.lt.check(status, "setting an attribute of a product")
    }
}

impl Drop for LtDescriptor {
    fn drop(&mut self) {
        // SAFETY: the structure is live, and the library does not read it after a call returns.
        let _ = unsafe { (self.destroy)(self.handle) };
    }
}

/// Returns the `cudaDataType_t`.
fn type_of(element: LtElement) -> c_int {
    match element {
        LtElement::F32 => 0,
        LtElement::F64 => 1,
        LtElement::F16 => 2,
        LtElement::Bf16 => 14,
    }
}

/// The descriptors of a GEMM.
pub(super) struct LtDescriptors {
    pub(super) lt: Arc<Lt>,
    pub(super) operation: LtDescriptor,
    pub(super) layouts: [LtDescriptor; 4],
}

impl LtDescriptors {
    pub(super) fn new(lt: Arc<Lt>, matmul: &Matmul) -> Result<LtDescriptors> {
        let operation = LtDescriptor::operation(lt.clone(), matmul)?;
        let [a, b, c, d] = matmul.layouts;
        let layout =
            |layout: LtLayout| LtDescriptor::layout(lt.clone(), matmul.element, &layout, matmul.batch);
        let layouts = [layout(a)?, layout(b)?, layout(c)?, layout(d)?];
        Ok(LtDescriptors { lt, operation, layouts })
    }
}
