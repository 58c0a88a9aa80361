//! `MultiHeadAttention` of `com.microsoft`.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::multi_head;

use super::elementwise::FLOATS;
use super::{WgpuKernel, attend, wgpu_kernels};

wgpu_kernels![WgpuKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", FLOATS)],
        in_place: multi_head::CACHES,
        host_inputs: &[8],
        when: multi_head::is_covered,
        ..KernelDef::BASE
    },
    dispatches: |cx| attend::dispatches(cx, &multi_head::plan(cx)?),
    workspace: Some(|cx| attend::workspace(cx, multi_head::scratch(cx)?)),
}];
