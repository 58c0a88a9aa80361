//! `RotaryEmbedding` of ONNX and of ONNX Runtime: rotates pairs of each head's elements by the
//! angles of the position. A position out of range reads the nearest row of the caches.

use ort_core::Result;
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_gpu::attention::rotary::{self, RotaryPlan};
use ort_gpu::attention::{HeadTensor, Placing};

use super::heads::place;
use super::rows::SHORT_FLOATS;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

const ROTARY: KernelDef =
    KernelDef { op: "RotaryEmbedding", types: &[("T", SHORT_FLOATS)], ..KernelDef::BASE };

cuda_kernels![
    CudaKernel::new(ROTARY, |cx| rotate(cx, rotary::standard(cx)?)),
    CudaKernel::new(KernelDef { domain: MICROSOFT, ..ROTARY }, |cx| rotate(cx, rotary::microsoft(cx)?)),
];

fn rotate(cx: &OpCx<'_>, plan: Option<RotaryPlan<'_>>) -> Result<Vec<Launch>> {
    let Some(RotaryPlan { heads, rotation }) = plan else { return Ok(Vec::new()) };
    let (x, y, rows) = (cx.input(0)?, cx.output(0)?, heads.rows_of(heads.size));
    place(&[Placing {
        to: HeadTensor::new(y, rows),
        rotation: Some(rotation),
        ..Placing::new(heads.sizes(), HeadTensor::new(x, rows), y, heads.rows)
    }])
}
