//! `GatherBlockQuantized`: gathers rows of a block-quantized table and dequantizes them.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::tensor::problem::GatherBlocks;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::rows::{SHORT_FLOATS, suffix};
use super::type_tags::quantized_tag;
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

cuda_kernels![CudaKernel::new(
    KernelDef {
        domain: MICROSOFT,
        op: "GatherBlockQuantized",
        types: &[("T1", TypeSet::of(&[DType::U8, DType::I4, DType::U4])), ("T2", SHORT_FLOATS)],
        ..KernelDef::BASE
    },
    launches
)];

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, scales, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let GatherBlocks { packed_bits, size, inner, quantized, behind, block, blocks } =
        GatherBlocks::new(cx.attrs, data.dtype, &data.shape, &scales.shape)?;
    let values = data.count().saturating_mul(packed_bits.map_or(1, |bits| 8 / bits));
    let of_index = values.checked_div(size).unwrap_or(0);
    ensure!(
        y.count() == indices.count().saturating_mul(of_index),
        Fail,
        "rows of {:?} do not fill {:?}",
        data.shape,
        y.shape
    );
    let kind = packed_bits.map_or_else(|| quantized_tag(data.dtype), Ok)?;
    let zero_row = packed_bits.map_or(0, |_| scales.size(scales.rank().saturating_sub(1)));
    let middle = packed_bits.map_or(0, |bits| 1 << (bits - 1));
    let wide = usize::from(indices.dtype == DType::I64);
    let table = [kind, wide, indices.count(), inner, size];
    let rest = [behind, quantized, block, blocks, zero_row];
    let launch = Launch::new("quant", format!("gather_blocks_{}", suffix(y.dtype)?)).threads(y.count())?;
    let launch = launch.tensor(data).tensor(indices).tensor(scales).find_tensor(cx.find_input(3)).tensor(y);
    let words = table.into_iter().chain(rest).map(|number| {
        i32::try_from(number).map_err(|_| error!(NotImplemented, "a table of more than 2^31 - 1 elements"))
    });
    let mut bytes = Vec::new();
    for word in words {
        bytes.extend(word?.to_ne_bytes());
    }
    bytes.extend((middle as f32).to_ne_bytes());
    Ok(vec![launch.bytes(&bytes).uint(y.count())?])
}
