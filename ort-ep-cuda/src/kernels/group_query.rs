//! `GroupQueryAttention` kernels.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::group_query;

use super::rows::SHORT_FLOATS;
use super::{CudaKernel, attend, cuda_kernels};
use crate::launch::OpCx;

cuda_kernels![CudaKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", SHORT_FLOATS), ("T_CACHE", SHORT_FLOATS)],
        in_place: group_query::CACHES,
        shared_buffers: group_query::CACHES,
        host_inputs: &[6],
        when: group_query::is_covered,
        ..KernelDef::BASE
    },
    launches: |cx| attend::launches(cx, group_query::plan(cx, rotated_type(cx)?)?),
    workspace: Some(|cx| attend::workspace(cx, group_query::scratch(cx, rotated_type(cx)?)?)),
    counted: None,
}];

/// Rotated queries keep their type, because the tensor core kernels take one type for queries and
/// keys.
fn rotated_type(cx: &OpCx<'_>) -> Result<DType> {
    Ok(cx.input(0)?.dtype)
}
