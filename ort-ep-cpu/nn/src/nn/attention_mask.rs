//! The mask of `Attention`: boolean or additive, of rank 1 to 4, broadcast by strides.

use std::borrow::Cow;
use std::ops::Range;

use ort_core::dtype::{DType, Element};
use ort_core::ops::nn::attention::problem::{BroadcastMask, SdpaSizes};
use ort_core::tensor::TensorView;
use ort_core::{Result, error, for_each_type};

use ort_cpu_attention::ScoreMask;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::spending;

/// A mask, broadcast to `[batch, heads, queries, keys]`. Keys past its last column are masked.
pub(super) struct Mask<'a, T: Real> {
    values: MaskValues<'a, T>,
    shape: BroadcastMask,
    /// Whether -inf is added to the scores of masked keys. Otherwise it replaces them, because a
    /// NaN or +inf plus -inf is NaN.
    adds_hidden: bool,
}

/// The elements of a mask.
enum MaskValues<'a, T: Real> {
    /// Boolean: non-zero for visible keys.
    Allowed(&'a [u8]),
    /// A bias that is added to the score.
    Added(Cow<'a, [T]>),
}

impl<'a, T: Real> Mask<'a, T> {
    pub(super) fn new(view: TensorView<'a>, sizes: &SdpaSizes, adds_hidden: bool) -> Result<Mask<'a, T>> {
        let shape = BroadcastMask::new(view.shape(), sizes)?;
        let dtype = view.dtype();
        let values = if dtype == DType::Bool {
            MaskValues::Allowed(view.bytes()?)
        } else if dtype == T::DTYPE {
            MaskValues::Added(view.to_cow()?)
        } else {
            let wide: Vec<T> = for_each_type!(dtype in NUMERIC, E => {
                spending(2, view.to_vec::<E>()?).map(|x| T::from_f64(wide_of(x))).collect()
            }, else => return Err(error!(InvalidArgument, "a mask of type {dtype}")));
            MaskValues::Added(wide.into())
        };
        Ok(Mask { values, shape, adds_hidden })
    }

    /// Returns the offset of the first key for a (batch, head, query).
    fn first(&self, place: [usize; 3], keys: &Range<usize>) -> usize {
        let row: usize = place.iter().zip(self.shape.strides).map(|(at, stride)| at * stride).sum();
        row + keys.start
    }

    /// Splits scores into those of keys that the mask has and those of later keys.
    fn split<'s>(&self, keys: &Range<usize>, scores: &'s mut [T]) -> (&'s mut [T], &'s mut [T]) {
        let there = keys.end.min(self.shape.keys).saturating_sub(keys.start);
        scores.split_at_mut(there.min(scores.len()))
    }
}

impl<T: Real> ScoreMask<T> for Mask<'_, T> {
    fn is_by_query(&self) -> bool {
        self.shape.strides[2] != 0
    }

    fn apply(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [T]) {
        let hidden = T::from_f64(f64::NEG_INFINITY);
        let add = |score: &mut T, added: T| {
            *score = if added == hidden && !self.adds_hidden { hidden } else { *score + added };
        };
        let first = self.first(place, &keys);
        let (there, missing) = self.split(&keys, scores);
        missing.iter_mut().for_each(|score| add(score, hidden));
        match &self.values {
            MaskValues::Allowed(values) => {
                let allowed = values.get(first..).unwrap_or(&[]);
                let masked = there.iter_mut().zip(allowed).filter(|(_, allowed)| **allowed == 0);
                masked.for_each(|(score, _)| add(score, hidden));
            }
            MaskValues::Added(values) => {
                let added = values.get(first..).unwrap_or(&[]);
                there.iter_mut().zip(added).for_each(|(score, added)| add(score, *added));
            }
        }
    }

    fn write(&self, place: [usize; 3], keys: Range<usize>, added: &mut [T]) {
        let hidden = T::from_f64(f64::NEG_INFINITY);
        let first = self.first(place, &keys);
        let (there, missing) = self.split(&keys, added);
        missing.fill(hidden);
        match &self.values {
            MaskValues::Allowed(values) => {
                let allowed = values.get(first..).unwrap_or(&[]);
                there.iter_mut().zip(allowed).for_each(|(to, allowed)| {
                    *to = if *allowed != 0 { T::ZERO } else { hidden };
                });
            }
            MaskValues::Added(values) => {
                let added = values.get(first..).unwrap_or(&[]);
                there.iter_mut().zip(added).for_each(|(to, added)| *to = *added);
            }
        }
    }
}

/// Converts a numeric element to double precision.
fn wide_of<E: Element + num_traits::ToPrimitive>(value: E) -> f64 {
    value.to_f64().unwrap_or(f64::NAN)
}
