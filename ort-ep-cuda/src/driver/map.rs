//! TMA tensor maps: the driver's encoding of an address, sizes and strides, with which kernels of
//! compute capability 9.0 copy boxes of a tensor in one instruction.

use std::ffi::c_void;
use std::ptr;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType_enum as Element, CUtensorMapFloatOOBfill_enum as Fill,
    CUtensorMapInterleave_enum as Interleave, CUtensorMapL2promotion_enum as Promotion,
    CUtensorMapSwizzle_enum as Swizzle,
};
use ort_core::dtype::DType;
use ort_core::{Result, error};

use super::Context;

/// A batch of float16 or bfloat16 matrices, and the box that one TMA copy reads with 128-byte
/// swizzle. The contiguous axis comes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Boxes {
    pub(crate) dtype: DType,
    pub(crate) sizes: [u64; 3],
    /// Byte strides of the second and third axis: multiples of 16.
    pub(crate) steps: [u64; 2],
    /// The box size in elements: 64 along the first axis, which are the 128 bytes of the swizzle.
    pub(crate) counts: [u32; 3],
}

impl Boxes {
    /// Encodes the map for a tensor at a 16-byte aligned address.
    pub(crate) fn encode(&self, context: &Context, address: u64) -> Result<[u64; 16]> {
        let element = match self.dtype {
            DType::F16 => Element::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            DType::BF16 => Element::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            other => return Err(error!(Fail, "a map of {other}")),
        };
        context.enter()?;
        let mut map = CUtensorMap { opaque: [0; 16] };
        // SAFETY: `sizes` and `counts` have one element per axis and `steps` one fewer, as the rank
        // says. The driver encodes the address without reading it.
        let code = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                element,
                self.sizes.len() as u32,
                ptr::without_provenance_mut::<c_void>(address as usize),
                self.sizes.as_ptr(),
                self.steps.as_ptr(),
                self.counts.as_ptr(),
                [1; 3].as_ptr(),
                Interleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                Promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                Fill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        context.check(code, "cuTensorMapEncodeTiled")?;
        Ok(map.opaque)
    }
}
