//! `Attention` kernels.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_gpu::attention::standard;

use super::heads::{place, place_pair};
use super::rows::SHORT_FLOATS;
use super::{CudaKernel, attend, cuda_kernels};
use crate::launch::{Launch, OpCx};

/// Mask types: added floats, or booleans.
const MASKS: TypeSet = SHORT_FLOATS.union(TypeSet::of(&[DType::Bool, DType::I32, DType::I64]));

cuda_kernels![CudaKernel {
    def: KernelDef {
        op: "Attention",
        types: &[("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS), ("U", MASKS)],
        when: standard::is_covered,
        ..KernelDef::BASE
    },
    launches,
    workspace: Some(|cx| attend::workspace(cx, standard::scratch(cx, true)?)),
    counted: None,
}];

fn launches(cx: &OpCx<'_>) -> ort_core::Result<Vec<Launch>> {
    let plan = standard::plan(cx, true)?;
    let mut launches = match plan.placings.as_slice().try_into() {
        Ok(pair) => place_pair(pair)?,
        Err(_) => place(&plan.placings)?,
    };
    launches.extend(place(&plan.conversions)?);
    launches.extend(attend::attend(cx, &plan.sdpa, plan.taken)?);
    Ok(launches)
}
