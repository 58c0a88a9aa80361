//! `GroupQueryAttention` of `com.microsoft`.

use ort_core::dtype::DType;
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::group_query;

use super::elementwise::FLOATS;
use super::{WgpuKernel, attend, wgpu_kernels};

/// The type of rotated queries. Shaders compute in it, so nothing is rounded in between.
const ROTATED: DType = DType::F32;

wgpu_kernels![WgpuKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "GroupQueryAttention",
        types: &[("T", FLOATS), ("T_CACHE", FLOATS)],
        in_place: group_query::CACHES,
        shared_buffers: group_query::CACHES,
        host_inputs: &[6],
        when: group_query::is_covered,
        ..KernelDef::BASE
    },
    dispatches: |cx| attend::dispatches(cx, &group_query::plan(cx, ROTATED)?),
    workspace: Some(|cx| attend::workspace(cx, group_query::scratch(cx, ROTATED)?)),
}];
