//! `Cast` and `CastLike` to and from FP8, FP4 and sub-byte integers.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::KernelDef;
use ort_core::{Result, error};

use super::rows::SHORT_FLOATS;
use super::type_tags::{BEYOND, FP8_FP4, quantized_tag};
use super::{CudaKernel, cuda_kernels};
use crate::launch::{Launch, OpCx};

/// Types that are cast to and from floats.
const QUANTIZED: TypeSet = FP8_FP4.union(TypeSet::of(&[DType::F8E8M0])).union(TypeSet::SUB_BYTE_INTEGERS);
/// Integer types that sub-byte integers are cast to and from.
const INTEGERS: TypeSet = TypeSet::of(&[DType::I8, DType::U8, DType::I32, DType::I64]);
/// Elements that a thread quantizes at a time.
const TOGETHER: usize = 4;

const fn cast(op: &'static str, types: &'static [(&'static str, TypeSet)]) -> CudaKernel {
    CudaKernel::new(KernelDef { op, types, ..KernelDef::BASE }, launches)
}

const TO_QUANTIZED: &[(&str, TypeSet)] = &[("T1", SHORT_FLOATS), ("T2", QUANTIZED)];
const OF_QUANTIZED: &[(&str, TypeSet)] = &[("T1", QUANTIZED), ("T2", SHORT_FLOATS)];
const TO_FEW_BITS: &[(&str, TypeSet)] = &[("T1", INTEGERS), ("T2", TypeSet::SUB_BYTE_INTEGERS)];
const OF_FEW_BITS: &[(&str, TypeSet)] = &[("T1", TypeSet::SUB_BYTE_INTEGERS), ("T2", INTEGERS)];

cuda_kernels![
    cast("Cast", TO_QUANTIZED),
    cast("Cast", OF_QUANTIZED),
    cast("Cast", TO_FEW_BITS),
    cast("Cast", OF_FEW_BITS),
    cast("CastLike", TO_QUANTIZED),
    cast("CastLike", OF_QUANTIZED),
    cast("CastLike", TO_FEW_BITS),
    cast("CastLike", OF_FEW_BITS),
];

/// Returns a type's suffix in entry names.
fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::I8 => "i8",
        DType::U8 => "u8",
        DType::I32 => "i32",
        DType::I64 => "i64",
        other => return Err(error!(NotImplemented, "a cast between quantized values and {}", other.name())),
    })
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, y) = (cx.input(0)?, cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    if QUANTIZED.contains(x.dtype) {
        let launch = Launch::new("narrow", format!("narrow_to_{}", suffix(y.dtype)?)).threads(y.count())?;
        return Ok(vec![launch.tensor(x).tensor(y).uint(quantized_tag(x.dtype)?)?.uint(y.count())?]);
    }
    let round = cx.attrs.string("round_mode")?;
    // The numbers of `Round` in `cu/narrow.cu`.
    let number = ["up", "down", "nearest"].into_iter().position(|name| name == round);
    let number = number.ok_or_else(|| error!(InvalidGraph, "the round_mode is '{round}'"))?;
    let beyond = if cx.attrs.flag("saturate")? { 0 } else { BEYOND };
    let launch = Launch::new("narrow", format!("narrow_of_{}", suffix(x.dtype)?));
    let launch = launch.threads(y.count().div_ceil(TOGETHER))?.tensor(x).tensor(y);
    Ok(vec![launch.uint(quantized_tag(y.dtype)? + beyond)?.uint(number)?.uint(y.count())?])
}
