//! `GatherBlockQuantized`: gathers rows of a block-quantized table and dequantizes them.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error};

use super::codes::code_kind;
use super::lines::{SHORT_FLOATS, suffix};
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

/// Returns the type tag of the quantized values, and the table's shape with packed values counted
/// individually.
fn codes(cx: &OpCx<'_>) -> Result<(usize, Vec<usize>)> {
    let data = cx.input(0)?;
    let mut shape = data.shape.to_vec();
    if data.dtype != DType::U8 {
        return Ok((code_kind(data.dtype)?, shape));
    }
    let bits = cx.attrs.int("bits")?;
    let bits = usize::try_from(bits).ok().filter(|bits| matches!(bits, 2 | 4 | 8));
    let bits = bits.ok_or_else(|| error!(InvalidGraph, "codes of neither 2, 4 nor 8 bits"))?;
    shape.last_mut().into_iter().for_each(|last| *last = last.saturating_mul(8 / bits));
    Ok((bits, shape))
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (data, indices, scales, y) = (cx.input(0)?, cx.input(1)?, cx.input(2)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let (kind, shape) = codes(cx)?;
    let axis = cx.axis(cx.attrs.int("gather_axis")?, shape.len())?;
    let quantized = cx.axis(cx.attrs.int("quantize_axis")?, shape.len())?;
    let at = |axis: usize| shape.get(axis).copied().unwrap_or(1);
    let behind = |axis: usize| shape.iter().skip(axis + 1).product::<usize>();
    // A block size of 0 means the whole axis.
    let block = cx.attrs.int("block_size")?;
    let block = usize::try_from(block).map_err(|_| error!(InvalidGraph, "a block size of {block}"))?;
    let block = if block == 0 { at(quantized) } else { block.min(at(quantized)) };
    let blocks = at(quantized).div_ceil(block);
    let mut expected = shape.clone();
    expected.iter_mut().skip(quantized).take(1).for_each(|size| *size = blocks);
    ensure!(*scales.shape == *expected, InvalidArgument, "scales of shape {:?} fit no blocks", scales.shape);
    let filled = y.count() / indices.count().max(1);
    ensure!(
        filled.saturating_mul(at(axis)) == shape.iter().product::<usize>(),
        Fail,
        "rows of {shape:?} do not fill {:?}",
        y.shape
    );
    let in_bytes = data.dtype == DType::U8;
    let zero_row = if in_bytes { scales.size(scales.rank().saturating_sub(1)) } else { 0 };
    let middle = if in_bytes { 1 << (kind - 1) } else { 0 };
    let wide = usize::from(indices.dtype == DType::I64);
    let table = [kind, wide, indices.count(), behind(axis), at(axis)];
    let rest = [behind(quantized), at(quantized), block, blocks, zero_row];
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
