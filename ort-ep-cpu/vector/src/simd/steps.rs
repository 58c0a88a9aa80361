//! Dot product steps with elements of one `f32` or of a bf16 pair.
//!
//! Code that is generic over [`Steps`] is the same for both. An element is 32 bits; only packing
//! and multiplying differ. Accumulators are always `f32`.

use super::{Isa, Simd, SimdOp, dispatch};

#[cfg(target_arch = "x86_64")]
use super::Avx512;

/// A vector of elements, or of accumulators.
pub type Elements<T> = <<T as Steps>::Base as Simd>::F32;

/// The k steps that the elements of a vector hold.
pub trait Steps: Copy {
    /// The vectors of elements and of accumulators.
    type Base: Simd;
    /// k steps per element, 1 or 2.
    const TERMS: usize;

    /// Returns the vector operations on accumulators.
    fn base(self) -> Self::Base;
    /// Returns the accumulators after the k steps of these elements.
    fn accumulate(self, left: Elements<Self>, right: Elements<Self>, sums: Elements<Self>) -> Elements<Self>;
    /// Packs the first `TERMS` of these vectors, one for each of consecutive k steps, into
    /// elements.
    fn join(self, factors: [Elements<Self>; 2]) -> Elements<Self>;
    /// Stores a vector of consecutive k steps as `LANES / TERMS` elements.
    ///
    /// # Safety
    /// `to` is valid for writing that many elements.
    unsafe fn store_ptr(self, to: *mut f32, factors: Elements<Self>);

    /// Stores `LANES / TERMS` elements at `to[at..]`.
    ///
    /// # Panics
    /// If the slice is too short.
    #[inline(always)]
    fn store(self, to: &mut [f32], at: usize, factors: Elements<Self>) {
        assert!(at <= to.len() && to.len() - at >= Self::Base::LANES / Self::TERMS);
        // SAFETY: the assertion checked that the slice holds these elements from `at` on.
        unsafe { self.store_ptr(to.as_mut_ptr().add(at), factors) }
    }
}

/// An operation over [`Steps`] that is compiled for each instruction set.
pub trait StepsOp {
    /// Runs the operation. Mark it `#[inline(always)]`.
    fn run<T: Steps>(self, steps: T);
}

/// Runs `op` compiled for `isa`, over single `f32` steps, or over bf16 pairs if `paired`.
///
/// # Panics
/// If `paired` and the instruction set lacks [`Isa::has_bf16_products`].
#[inline]
pub fn dispatch_steps<O: StepsOp>(isa: Isa, paired: bool, op: O) {
    if !paired {
        return dispatch(isa, OneByOne(op));
    }
    assert!(isa.has_bf16_products(), "there are products of pairs");
    #[cfg(target_arch = "x86_64")]
    {
        /// # Safety
        ///
        /// The CPU has AVX-512 F, BW, DQ, VL and BF16, AVX2, FMA and F16C.
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
        unsafe fn enter<O: StepsOp>(op: O) {
            // SAFETY: `dispatch_steps` calls this only if `has_bf16_products` detected these
            // features.
            op.run(unsafe { Pairs::new_unchecked() })
        }
        // SAFETY: the assertion above checked `has_bf16_products`, which detected these features.
        unsafe { enter(op) };
    }
}

/// Adapts an operation over single steps to [`SimdOp`].
struct OneByOne<O>(O);

impl<O: StepsOp> SimdOp for OneByOne<O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(Singles(s));
    }
}

/// An element is one k step.
#[derive(Debug, Clone, Copy)]
pub struct Singles<S>(pub S);

impl<S: Simd> Steps for Singles<S> {
    type Base = S;
    const TERMS: usize = 1;

    #[inline(always)]
    fn base(self) -> S {
        self.0
    }
    #[inline(always)]
    fn accumulate(self, left: S::F32, right: S::F32, sums: S::F32) -> S::F32 {
        self.0.mul_add(left, right, sums)
    }
    #[inline(always)]
    fn join(self, [factor, _]: [S::F32; 2]) -> S::F32 {
        factor
    }
    #[inline(always)]
    unsafe fn store_ptr(self, to: *mut f32, factors: S::F32) {
        // SAFETY: the caller guarantees `LANES` elements, because `TERMS` is 1.
        unsafe { self.0.store_ptr(to, factors) }
    }
}

/// An element is a bf16 pair, with the first k step in the low half. A value proves that the CPU
/// has AVX-512 F, BW, DQ, VL and BF16.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub struct Pairs(Avx512);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Avx512, Pairs, Steps};

    impl Pairs {
        /// Creates the proof without a check.
        ///
        /// # Safety
        /// The CPU has AVX-512 F, BW, DQ, VL and BF16.
        #[inline(always)]
        pub unsafe fn new_unchecked() -> Pairs {
            // SAFETY: the caller guarantees a superset of the features of `Avx512`.
            Pairs(unsafe { Avx512::new_unchecked() })
        }
    }

    impl Steps for Pairs {
        type Base = Avx512;
        const TERMS: usize = 2;

        #[inline(always)]
        fn base(self) -> Avx512 {
            self.0
        }
        #[inline(always)]
        fn accumulate(self, left: __m512, right: __m512, sums: __m512) -> __m512 {
            // SAFETY: `Pairs` exists only on CPUs with BF16. The transmuted types have the same
            // size, and every bit pattern is valid in both.
            unsafe {
                let left = std::mem::transmute::<__m512, __m512bh>(left);
                let right = std::mem::transmute::<__m512, __m512bh>(right);
                _mm512_dpbf16_ps(sums, left, right)
            }
        }
        #[inline(always)]
        fn join(self, [first, second]: [__m512; 2]) -> __m512 {
            // The low half of each element holds the first k step.
            let order: [u16; 32] = std::array::from_fn(|at| (at / 2 + at % 2 * 16) as u16);
            // SAFETY: `Pairs` exists only on CPUs with BF16 and BW. The transmuted types have the
            // same size, and every bit pattern is valid in each.
            unsafe {
                let order = std::mem::transmute::<[u16; 32], __m512i>(order);
                let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves))
            }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, to: *mut f32, factors: __m512) {
            // SAFETY: `Pairs` exists only on CPUs with BF16. The transmuted types have the same
            // size, and the caller guarantees 8 elements.
            unsafe {
                let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(factors));
                _mm256_storeu_si256(to.cast(), halves);
            }
        }
    }
}
