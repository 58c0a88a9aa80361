//! `Pow` of integers and of mixed types.

use num_traits::AsPrimitive;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, error, for_each_type};

use super::blocks::{ZipBlock, run_zip, zip};
use super::integer_lanes::integer_power;
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef {
    op: "Pow",
    types: &[("T", TypeSet::FLOATS.union(TypeSet::of(&[DType::I32, DType::I64]))), ("T1", TypeSet::NUMERIC),],
    make,
    ..KernelDef::BASE
}];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let unknown = || error!(Fail, "Pow of unknown types");
    let (base, exponent) = (cx.node.dtype(0).ok_or_else(unknown)?, cx.node.dtype(1).ok_or_else(unknown)?);
    // Doubles represent integers up to 2^53 only, so pairs of integers have their own path.
    if exponent.is_integer() && base.is_integer() {
        return for_each_type!(exponent in INTEGERS, E => for_each_type!(base in [I32, I64], T => {
            let function: ZipBlock<T, E, T> = |a, b, out| zip(a, b, out, integer_power::<T, E>);
            Ok(Box::new(move |cx: &mut RunCx<'_>| run_zip(cx, function)))
        }, else => Err(unknown())), else => Err(unknown()));
    }
    for_each_type!(exponent in NUMERIC, E => for_each_type!(base in [F32, F16, BF16, F64, I32, I64], T => {
        let function: ZipBlock<T, E, T> = |a, b, out| zip(a, b, out, double_power::<T, E>);
        Ok(Box::new(move |cx: &mut RunCx<'_>| run_zip(cx, function)))
    }, else => Err(unknown())), else => Err(unknown()))
}

/// Computes in double precision, rounded or truncated once.
fn double_power<T: AsPrimitive<f64>, E: AsPrimitive<f64>>(base: T, exponent: E) -> T
where
    f64: AsPrimitive<T>,
{
    base.as_().powf(exponent.as_()).as_()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_integers() {
        let cases: [(i32, i64, i32); 6] =
            [(2, 10, 1024), (-3, 3, -27), (5, 0, 1), (2, -1, 0), (-1, -3, -1), (0, 0, 1)];
        for (base, exponent, expected) in cases {
            assert_eq!(integer_power(base, exponent), expected, "{base}^{exponent}");
        }
        assert_eq!(double_power(4i32, 0.5f32), 2);
    }

    /// As `pow(base, exponent, 2**64)` in Python, with the result in the type of the base.
    #[test]
    fn large_unsigned_exponents_are_not_negative() {
        let cases: [(i64, u64, i64); 8] = [
            (3, 1 << 63, 1),
            (3, u64::MAX, -6148914691236517205),
            (-3, u64::MAX, 6148914691236517205),
            (7, (1 << 63) + 5, 16807),
            (2, 1 << 63, 0),
            (-1, u64::MAX, -1),
            (1, u64::MAX, 1),
            (0, u64::MAX, 0),
        ];
        for (base, exponent, expected) in cases {
            assert_eq!(integer_power(base, exponent), expected, "{base}^{exponent}");
            assert_eq!(integer_power(base as i32, exponent), expected as i32, "{base}^{exponent}");
        }
        assert_eq!(integer_power(3u64, u64::MAX), 12297829382473034411);
        // The largest exponents of the other types.
        assert_eq!(integer_power(3i64, u32::MAX), 830436559519656619);
        assert_eq!(integer_power(3i64, u16::MAX), -8096654512965113173);
        assert_eq!(integer_power(-7i64, u8::MAX), 7822555791084169801);
    }
}
