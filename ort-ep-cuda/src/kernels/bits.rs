//! Bitwise operators with broadcasting.

use ort_core::Result;
use ort_core::dtype::TypeSet;
use ort_core::ep::KernelDef;

use super::elements::{by_bytes, element_bytes, few_axes};
use super::{CudaKernel, MOST_AXES, cuda_kernels};
use crate::launch::{Launch, OpCx, Walk};

type Launches = fn(&OpCx<'_>) -> Result<Vec<Launch>>;

const fn of_bits(op: &'static str, in_place: &'static [(usize, usize)], launches: Launches) -> CudaKernel {
    let types = &[("T", TypeSet::INTEGERS)];
    CudaKernel::new(KernelDef { op, types, in_place, when: few_axes, ..KernelDef::BASE }, launches)
}

cuda_kernels![
    of_bits("BitwiseAnd", &[(0, 0), (1, 0)], |cx| launches(cx, 0)),
    of_bits("BitwiseOr", &[(0, 0), (1, 0)], |cx| launches(cx, 1)),
    of_bits("BitwiseXor", &[(0, 0), (1, 0)], |cx| launches(cx, 2)),
    of_bits("BitwiseNot", &[(0, 0)], |cx| launches(cx, 3)),
    of_bits("BitShift", &[(0, 0), (1, 0)], |cx| launches(cx, shift(cx)?)),
];

/// Returns the number of the shift in `cu/bits.cu`.
fn shift(cx: &OpCx<'_>) -> Result<usize> {
    Ok(match cx.attrs.string("direction")? {
        "LEFT" => 4,
        _ if TypeSet::UNSIGNED.contains(cx.output(0)?.dtype) => 5,
        _ => 6,
    })
}

/// `function` is its number in `cu/bits.cu`.
fn launches(cx: &OpCx<'_>, function: usize) -> Result<Vec<Launch>> {
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
    Ok(vec![launch.uint(function)?.uint(y.count())?])
}
