//! AXPY over several rows for every number type.
//!
//! One generic loop is compiled once per instruction set, and the compiler vectorises it with what
//! the enclosing function enables.

use ort_cpu_vector::simd::isa::Isa;

/// A type to accumulate in. Integers wrap.
pub trait Number: Copy + Send + Sync + PartialEq {
    /// The value zero.
    const ZERO: Self;
    /// Returns `self + left * right`.
    #[must_use]
    fn add_product(self, left: Self, right: Self) -> Self;
}

macro_rules! float {
    ($($type:ty)*) => { $(impl Number for $type {
        const ZERO: Self = 0.0;
        #[inline(always)]
        fn add_product(self, left: Self, right: Self) -> Self {
            self + left * right
        }
    })* };
}

macro_rules! integer {
    ($($type:ty)*) => { $(impl Number for $type {
        const ZERO: Self = 0;
        #[inline(always)]
        fn add_product(self, left: Self, right: Self) -> Self {
            self.wrapping_add(left.wrapping_mul(right))
        }
    })* };
}

float!(f32 f64);
integer!(i32 i64 u32 u64);

/// A storage type that is widened to the accumulator type.
pub trait Widen<T>: Copy + Send + Sync {
    /// Returns the same value in the wider type.
    fn widen(self) -> T;
}

impl<T: Number> Widen<T> for T {
    #[inline(always)]
    fn widen(self) -> T {
        self
    }
}

impl Widen<i32> for i8 {
    #[inline(always)]
    fn widen(self) -> i32 {
        i32::from(self)
    }
}

impl Widen<i32> for u8 {
    #[inline(always)]
    fn widen(self) -> i32 {
        i32::from(self)
    }
}

/// `sums[j] += factors[0] * rows[0][j] + ... + factors[3] * rows[3][j]`, added in this order. All
/// slices have the length of `sums`.
pub(crate) fn add_four_rows<T: Number, S: Widen<T>>(
    isa: Isa,
    sums: &mut [T],
    factors: [T; 4],
    rows: [&[S]; 4],
) {
    #[cfg(target_arch = "x86_64")]
    {
        if isa >= Isa::Avx512
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the features were detected just above.
            return unsafe { add_avx512(sums, factors, rows) };
        }
        if isa >= Isa::Avx2 && is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was detected just above.
            return unsafe { add_avx2(sums, factors, rows) };
        }
    }
    let _ = isa;
    add(sums, factors, rows);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn add_avx512<T: Number, S: Widen<T>>(sums: &mut [T], factors: [T; 4], rows: [&[S]; 4]) {
    add(sums, factors, rows);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn add_avx2<T: Number, S: Widen<T>>(sums: &mut [T], factors: [T; 4], rows: [&[S]; 4]) {
    add(sums, factors, rows);
}

#[inline(always)]
fn add<T: Number, S: Widen<T>>(sums: &mut [T], factors: [T; 4], rows: [&[S]; 4]) {
    // Cutting all slices to one length lets the compiler drop the bounds checks in the loop.
    let len = rows.iter().fold(sums.len(), |len, row| len.min(row.len()));
    let (sums, [first, second, third, fourth]) = (&mut sums[..len], rows.map(|row| &row[..len]));
    for index in 0..len {
        sums[index] = sums[index]
            .add_product(factors[0], first[index].widen())
            .add_product(factors[1], second[index].widen())
            .add_product(factors[2], third[index].widen())
            .add_product(factors[3], fourth[index].widen());
    }
}
