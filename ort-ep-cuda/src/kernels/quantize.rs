//! `QuantizeLinear` and `DequantizeLinear` per tensor, per axis or per block, and
//! `DynamicQuantizeLinear`.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::ops::quant::problem::{Granularity, GranularityKind, Quantization};
use ort_gpu::quantize::granularity;

use super::rows::{SHORT_FLOATS, suffix};
use super::type_tags::{BEYOND, FP8_FP4, quantized_tag, scale_tag};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx, Operand, THREADS};

/// The integer types of quantized values.
const QUANTIZED: TypeSet =
    TypeSet::SUB_BYTE_INTEGERS.union(TypeSet::of(&[DType::I8, DType::U8, DType::I16, DType::U16]));
const INT32: TypeSet = TypeSet::of(&[DType::I32]);

/// Elements a thread processes at a time.
const TOGETHER: usize = 4;
/// Elements of a block in kernels whose threads process four times as many.
pub(super) const OF_BLOCK: usize = 4 * TOGETHER * THREADS as usize;
/// The most partial ranges: a block of the next kernel has one thread for each.
const MOST_PARTS: usize = THREADS as usize;

cuda_kernels![
    CudaKernel::new(
        KernelDef {
            op: "QuantizeLinear",
            types: &[("T1", SHORT_FLOATS.union(INT32)), ("T2", SHORT_FLOATS), ("T3", QUANTIZED)],
            ..KernelDef::BASE
        },
        quantize
    ),
    CudaKernel::new(
        KernelDef {
            op: "DequantizeLinear",
            types: &[("T1", QUANTIZED.union(INT32)), ("T2", SHORT_FLOATS), ("T3", SHORT_FLOATS)],
            ..KernelDef::BASE
        },
        dequantize
    ),
    CudaKernel::new(
        KernelDef {
            op: "QuantizeLinear",
            types: &[("T1", SHORT_FLOATS), ("T2", SHORT_FLOATS), ("T3", FP8_FP4)],
            ..KernelDef::BASE
        },
        quantize
    ),
    CudaKernel::new(
        KernelDef {
            op: "DequantizeLinear",
            types: &[("T1", FP8_FP4), ("T2", SHORT_FLOATS), ("T3", SHORT_FLOATS)],
            ..KernelDef::BASE
        },
        dequantize
    ),
    CudaKernel {
        workspace: Some(|cx| {
            let mut taken = 0;
            ranges(cx, &mut taken)?;
            Ok(taken)
        }),
        ..CudaKernel::new(KernelDef { op: "DynamicQuantizeLinear", ..KernelDef::BASE }, |cx| {
            let results = [cx.find_output(0), cx.find_output(1), cx.find_output(2)];
            dynamic(cx.input(0)?, &ranges(cx, &mut 0)?, results)
        })
    },
];

/// Fills the structure `Scales` of `cu/quant.cu`, which maps an element to its scale.
fn scale_words(cx: &OpCx<'_>) -> Result<[usize; 8]> {
    let (x, scale, zero) = (cx.input(0)?, cx.input(1)?, cx.find_input(2));
    let Granularity { kind, axis, inner } = granularity(cx)?;
    let scale_kind = scale_tag(scale.dtype)?;
    let zero_kind = zero.map_or(Ok(0), |zero| quantized_tag(zero.dtype))?;
    Ok(match kind {
        // One scale for all elements: its index has stride 0 along every axis.
        GranularityKind::Tensor => [x.count().max(1), 1, 1, 0, 0, 0, scale_kind, zero_kind],
        GranularityKind::Axis => [inner, axis, 1, 0, 1, 0, scale_kind, zero_kind],
        GranularityKind::Blocks { size, count } => {
            [inner, axis, size.min(axis), 1, inner, count * inner, scale_kind, zero_kind]
        }
    })
}

/// Returns a launch with one thread per four elements, and the parameters that both directions
/// share, for integers or for FP8 and FP4.
fn of_elements(cx: &OpCx<'_>, entry: &str, quantized: DType, kind: usize) -> Result<Launch> {
    let y = cx.output(0)?;
    let launch = match FP8_FP4.contains(quantized) {
        true => Launch::new("narrow", format!("narrow_{entry}")),
        false => Launch::new("quant", entry),
    };
    let launch = launch.threads(y.count().div_ceil(TOGETHER))?;
    let launch = launch.tensor(cx.input(0)?).tensor(cx.input(1)?).find_tensor(cx.find_input(2)).tensor(y);
    launch.uints::<8>(&scale_words(cx)?)?.uint(kind)
}

fn dequantize(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let y = cx.output(0)?;
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let entry = format!("dequantize_{}", suffix(y.dtype)?);
    let quantized = cx.input(0)?.dtype;
    Ok(vec![of_elements(cx, &entry, quantized, quantized_tag(quantized)?)?.uint(y.count())?])
}

fn quantize(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let given = Quantization::division(cx.attrs)?;
    let precision = given.unwrap_or(cx.input(1)?.dtype);
    let beyond = if FP8_FP4.contains(y.dtype) && !cx.attrs.flag("saturate")? { BEYOND } else { 0 };
    let kind = quantized_tag(y.dtype)? + beyond;
    let launch = of_elements(cx, &format!("quantize_{}", suffix(x.dtype)?), y.dtype, kind)?;
    let launch = launch.uint(scale_tag(precision)?)?.uint(given.is_none().into())?;
    Ok(vec![launch.uint(y.count())?])
}

/// Reserves the minimum and maximum of each part of the first input in the workspace.
pub(super) fn ranges(cx: &OpCx<'_>, taken: &mut usize) -> Result<Operand> {
    let parts = cx.input(0)?.count().div_ceil(OF_BLOCK).clamp(1, MOST_PARTS);
    Ok(cx.workspace(taken, DType::F32, &[parts, 2]))
}

/// Quantizes `x` over its own range; values, scale and zero point may each be left out.
pub(super) fn dynamic(x: &Operand, ranges: &Operand, results: [Option<&Operand>; 3]) -> Result<Vec<Launch>> {
    let [y, scale, zero] = results;
    let (parts, count) = (ranges.size(0), x.count());
    // The first launch reduces each part to its range. The second combines the ranges and
    // quantizes.
    let range = Launch::new("quant", "dynamic_range").grid([parts, 1, 1])?;
    let blocks = y.map_or(1, |y| y.count().div_ceil(OF_BLOCK).max(1));
    let quantize = Launch::new("quant", "dynamic_codes").grid([blocks, 1, 1])?.tensor(x).tensor(ranges);
    let quantize = quantize.find_tensor(y).find_tensor(scale).find_tensor(zero);
    Ok(vec![range.tensor(x).tensor(ranges).uint(count)?, quantize.uint(parts)?.uint(count)?])
}
