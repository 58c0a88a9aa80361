//! `MultiHeadAttention` kernels.

use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::multi_head;

use super::rows::SHORT_FLOATS;
use super::{CudaKernel, attend, cuda_kernels};

cuda_kernels![CudaKernel {
    def: KernelDef {
        domain: MICROSOFT,
        op: "MultiHeadAttention",
        types: &[("T", SHORT_FLOATS)],
        in_place: multi_head::CACHES,
        host_inputs: &[8],
        when: multi_head::is_covered,
        ..KernelDef::BASE
    },
    launches: |cx| attend::launches(cx, multi_head::plan(cx)?),
    workspace: Some(|cx| attend::workspace(cx, multi_head::scratch(cx)?)),
    counted: None,
}];
