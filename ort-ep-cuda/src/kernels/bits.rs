//! Bitwise operators with broadcasting.

use ort_core::Result;
use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;

use super::movement::{by_bytes, element_bytes, few_axes};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Walk};

const fn of_bits(op: &'static str, in_place: &'static [(usize, usize)]) -> CudaKernel {
    let types = &[("T", TypeSet::INTEGERS)];
    CudaKernel::new(KernelDef { op, types, in_place, when: few_axes, ..KernelDef::BASE }, launches)
}

cuda_kernels![
    of_bits("BitwiseAnd", &[(0, 0), (1, 0)]),
    of_bits("BitwiseOr", &[(0, 0), (1, 0)]),
    of_bits("BitwiseXor", &[(0, 0), (1, 0)]),
    of_bits("BitwiseNot", &[(0, 0)]),
    of_bits("BitShift", &[(0, 0), (1, 0)]),
];

/// Returns the function's number in `cu/bits.cu`.
fn function(cx: &OpCx<'_>) -> Result<usize> {
    Ok(match cx.op {
        "BitwiseAnd" => 0,
        "BitwiseOr" => 1,
        "BitwiseXor" => 2,
        "BitwiseNot" => 3,
        _ if cx.attrs.string("direction")? == "LEFT" => 4,
        _ if TypeSet::UNSIGNED.contains(cx.output(0)?.dtype) => 5,
        _ => 6,
    })
}

fn launches(cx: &OpCx<'_>) -> Result<Vec<Launch>> {
    let (x, other, y) = (cx.input(0)?, cx.find_input(1), cx.output(0)?);
    if y.count() == 0 {
        return Ok(Vec::new());
    }
    let walk = Walk::broadcast(&y.shape, &[&*x.shape, &*other.unwrap_or(x).shape])?;
    let sizes: Vec<i64> = walk.sizes.iter().map(|size| *size as i64).collect();
    let mut words = vec![walk.sizes.len() as i64];
    for numbers in std::iter::once(&sizes).chain(&walk.steps) {
        words.extend(numbers.iter().copied().chain(std::iter::repeat(0)).take(MOST_AXES));
    }
    let launch = by_bytes("bits", "bits", element_bytes(y.dtype)?).threads(y.count())?;
    let launch = launch.tensor(x).find_tensor(other).tensor(y).ints::<{ 1 + 3 * MOST_AXES }>(&words)?;
    Ok(vec![launch.uint(function(cx)?)?.uint(y.count())?])
}
