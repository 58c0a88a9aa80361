//! How the elements of vectors hold the steps of sums of products: one in single precision, or a
//! pair in bfloat16.
//!
//! Code over [`Steps`] is the same for both: an element is 32 bits, and only what is made of
//! factors, and how they are multiplied, differs. Sums are always in single precision.

use super::{Isa, Simd, SimdOp, dispatch};

#[cfg(target_arch = "x86_64")]
use super::Avx512;

/// A vector of elements, or of sums.
pub type Elements<T> = <<T as Steps>::Base as Simd>::F32;

/// Steps of sums in elements.
pub trait Steps: Copy {
    /// The vectors of elements and of sums.
    type Base: Simd;
    /// Steps in an element, at most 2.
    const TERMS: usize;

    /// The vector operations on sums.
    fn base(self) -> Self::Base;
    /// The sums after the steps with these factors.
    fn accumulate(self, left: Elements<Self>, right: Elements<Self>, sums: Elements<Self>) -> Elements<Self>;
    /// The elements of the first `TERMS` of these factors, each a vector of consecutive steps' own.
    fn join(self, factors: [Elements<Self>; 2]) -> Elements<Self>;
    /// Stores a vector of factors of consecutive steps as `LANES / TERMS` elements.
    ///
    /// # Safety
    /// `to` is valid for writing so many elements.
    unsafe fn store_ptr(self, to: *mut f32, factors: Elements<Self>);

    /// Stores so many elements at `to[at..]`.
    ///
    /// # Panics
    /// If the slice ends before that.
    #[inline(always)]
    fn store(self, to: &mut [f32], at: usize, factors: Elements<Self>) {
        assert!(at <= to.len() && to.len() - at >= Self::Base::LANES / Self::TERMS);
        // SAFETY: the slice holds so many elements from `at` on.
        unsafe { self.store_ptr(to.as_mut_ptr().add(at), factors) }
    }
}

/// Work on steps that is compiled for each instruction set.
pub trait StepsOp {
    /// Does the work. Mark it `#[inline(always)]`.
    fn run<T: Steps>(self, steps: T);
}

/// Runs `op` compiled for `isa` over single steps, or over pairs if `paired`.
///
/// # Panics
/// If pairs are wanted of an instruction set without [`Isa::has_bf16_products`].
#[inline]
pub fn dispatch_steps<O: StepsOp>(isa: Isa, paired: bool, op: O) {
    if !paired {
        return dispatch(isa, OneByOne(op));
    }
    assert!(isa.has_bf16_products(), "there are products of pairs");
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
        unsafe fn enter<O: StepsOp>(op: O) {
            // SAFETY: the caller has found the CPU to have these features.
            op.run(unsafe { Pairs::new_unchecked() })
        }
        // SAFETY: the CPU was just found to have these features.
        unsafe { enter(op) };
    }
}

/// Work over single steps.
struct OneByOne<O>(O);

impl<O: StepsOp> SimdOp for OneByOne<O> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        self.0.run(Singles(s));
    }
}

/// An element is a step.
#[derive(Debug, Clone, Copy)]
struct Singles<S>(S);

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
        // SAFETY: as the caller promises.
        unsafe { self.0.store_ptr(to, factors) }
    }
}

/// An element is a pair of steps, the first in its lower half: proof that the CPU has AVX-512 F,
/// BW, DQ, VL and BF16.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
struct Pairs(Avx512);

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{Avx512, Pairs, Steps};

    impl Pairs {
        /// # Safety
        /// The CPU has AVX-512 F, BW, DQ, VL and BF16.
        #[inline(always)]
        pub(super) unsafe fn new_unchecked() -> Pairs {
            // SAFETY: passed on.
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
            // SAFETY: a value of `Pairs` is made only where the CPU has BF16; the types are as
            // large, and all bits are numbers in both.
            unsafe {
                let left = std::mem::transmute::<__m512, __m512bh>(left);
                let right = std::mem::transmute::<__m512, __m512bh>(right);
                _mm512_dpbf16_ps(sums, left, right)
            }
        }
        #[inline(always)]
        fn join(self, [first, second]: [__m512; 2]) -> __m512 {
            // The lower halves of the elements are those of the first steps.
            let order: [u16; 32] = std::array::from_fn(|at| (at / 2 + at % 2 * 16) as u16);
            // SAFETY: a value of `Pairs` is made only where the CPU has BF16 and BW; the types are
            // as large, and all bits are numbers in each.
            unsafe {
                let order = std::mem::transmute::<[u16; 32], __m512i>(order);
                let halves = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second, first));
                _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves))
            }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, to: *mut f32, factors: __m512) {
            // SAFETY: a value of `Pairs` is made only where the CPU has BF16; the types are as
            // large, and the caller vouches for 8 elements.
            unsafe {
                let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(factors));
                _mm256_storeu_si256(to.cast(), halves);
            }
        }
    }
}
