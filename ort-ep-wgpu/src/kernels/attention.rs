//! `Attention` of the ONNX domain.

use ort_core::ep::KernelDef;
use ort_gpu::attention::standard;

use super::elementwise::FLOATS;
use super::{WgpuKernel, attend, wgpu_kernels};
use crate::shader::TYPES;

// Shaders read each tensor through an accessor of its own type, so keys and values may have two.
wgpu_kernels![WgpuKernel {
    def: KernelDef {
        op: "Attention",
        types: &[("T1", FLOATS), ("T2", FLOATS), ("U", TYPES)],
        when: standard::is_covered,
        ..KernelDef::BASE
    },
    dispatches: |cx| attend::dispatches(cx, &standard::plan(cx, false)?),
    workspace: Some(|cx| attend::workspace(cx, standard::scratch(cx, false)?)),
}];
