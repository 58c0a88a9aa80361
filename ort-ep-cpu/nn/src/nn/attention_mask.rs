//! The mask of `Attention`: boolean or additive, of rank 1 to 4, broadcast by strides.

use std::borrow::Cow;
use std::ops::Range;

use ort_core::dtype::{DType, Element};
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::real::Real;
use ort_cpu_threads::interrupt::spending;

/// A mask, broadcast to `[batch, heads, queries, keys]`. Keys past its last column are masked.
pub(super) struct Mask<'a, T: Real> {
    values: MaskValues<'a, T>,
    strides: [usize; 3],
    keys: usize,
}

/// The elements of a mask.
enum MaskValues<'a, T: Real> {
    /// Boolean: non-zero for visible keys.
    Allowed(&'a [u8]),
    /// A bias that is added to the score.
    Added(Cow<'a, [T]>),
}

impl<'a, T: Real> Mask<'a, T> {
    pub(super) fn new(view: TensorView<'a>, sizes: [usize; 4]) -> Result<Mask<'a, T>> {
        let shape = view.shape();
        ensure!(
            (1..=4).contains(&shape.len()),
            InvalidArgument,
            "the mask has shape {shape:?}, expected rank 1 to 4"
        );
        let mut full = [1; 4];
        // Missing leading axes have size 1, as in NumPy.
        full[4 - shape.len()..].copy_from_slice(shape);
        // The last axis may be shorter than the keys, because the missing ones are masked.
        let fits = full.iter().zip(&sizes).take(3).all(|(size, to)| *size == 1 || size == to);
        ensure!(
            fits && full[3] <= sizes[3],
            InvalidArgument,
            "the mask of shape {shape:?} does not broadcast to the scores of shape {sizes:?}"
        );
        let steps = [full[1] * full[2] * full[3], full[2] * full[3], full[3]];
        let strides = [0, 1, 2].map(|axis| if full[axis] == 1 { 0 } else { steps[axis] });
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
        Ok(Mask { values, strides, keys: full[3] })
    }

    /// Returns the bias of a key's score, which is -inf if the key is masked. `row` is from
    /// [`Mask::row`].
    pub(super) fn at(&self, row: usize, key: usize) -> T {
        let hidden = T::from_f64(f64::NEG_INFINITY);
        if key >= self.keys {
            return hidden;
        }
        match &self.values {
            MaskValues::Allowed(values) => {
                if values[row + key] != 0 {
                    T::ZERO
                } else {
                    hidden
                }
            }
            MaskValues::Added(values) => values[row + key],
        }
    }

    /// Returns whether the mask has a row for each query.
    pub(super) fn is_by_query(&self) -> bool {
        self.strides[2] != 0
    }

    /// Writes the biases of a range of keys for one `[batch, head, query]`.
    pub(super) fn write(&self, place: [usize; 3], keys: Range<usize>, to: &mut [T]) {
        let hidden = T::from_f64(f64::NEG_INFINITY);
        let there = keys.end.min(self.keys).saturating_sub(keys.start);
        let (there, missing) = to.split_at_mut(there.min(to.len()));
        missing.fill(hidden);
        let first = self.row(place) + keys.start;
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

    /// Returns the offset of the row of `[batch, head, query]`.
    pub(super) fn row(&self, [batch, head, query]: [usize; 3]) -> usize {
        batch * self.strides[0] + head * self.strides[1] + query * self.strides[2]
    }
}

/// Converts a numeric element to double precision.
fn wide_of<E: Element + num_traits::ToPrimitive>(value: E) -> f64 {
    value.to_f64().unwrap_or(f64::NAN)
}
