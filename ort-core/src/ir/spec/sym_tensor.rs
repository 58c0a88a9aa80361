//! Symbolic tensors: small integer tensors whose elements are expressions, such as shapes, axes and
//! counts.

use std::sync::Arc;

use crate::dim::{Dim, Symbol};
use crate::dtype::DType;
use crate::tensor::{Shape, Tensor, TensorView, element_count};
use crate::{Result, ensure};

/// Maximum element count of a tensor that inference tracks.
const LIMIT: usize = 1024;

/// A small tensor of `int64`, `int32` or `bool` whose elements are integer expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymTensor {
    /// The concrete shape.
    pub shape: Shape,
    /// The elements, in row-major order.
    pub elements: Vec<Dim>,
}

impl SymTensor {
    /// Returns a one-dimensional tensor.
    pub fn vector(elements: Vec<Dim>) -> SymTensor {
        SymTensor { shape: [elements.len()].as_slice().into(), elements }
    }

    /// Returns a zero-dimensional tensor.
    pub fn scalar(element: Dim) -> SymTensor {
        SymTensor { shape: Shape::new(), elements: vec![element] }
    }

    /// Returns a tensor of this shape; an error if the elements do not fill it.
    pub fn new(shape: &[usize], elements: Vec<Dim>) -> Result<SymTensor> {
        ensure!(element_count(shape)? == elements.len(), Fail, "symbolic elements do not fill {shape:?}");
        Ok(SymTensor { shape: shape.into(), elements })
    }

    /// Returns whether inference tracks tensors of this type and element count.
    pub fn follows(dtype: DType, count: usize) -> bool {
        count <= LIMIT && matches!(dtype, DType::I64 | DType::I32 | DType::Bool)
    }

    /// Returns the element count of a shape with zeros counted as 1. It bounds every loop over the
    /// shape, because the other sizes of an empty tensor may be arbitrarily large.
    pub fn extent(sizes: &[usize]) -> usize {
        sizes.iter().fold(1, |count, &size| count.saturating_mul(size.max(1)))
    }

    /// Returns the elements of a concrete tensor if it is small, in host memory, and of a type that
    /// inference tracks.
    pub fn from_view(view: &TensorView<'_>) -> Option<SymTensor> {
        // Check the extent instead of the element count, because rules loop over the shape.
        if !SymTensor::follows(view.dtype(), SymTensor::extent(view.shape())) || !view.is_host() {
            return None;
        }
        // `follows` admits integers and booleans only, so the conversion is exact.
        let elements = view.to_ints().ok()?.into_iter().map(Dim::constant).collect();
        Some(SymTensor { shape: view.shape().into(), elements })
    }

    /// Makes the elements unknown that `int32` cannot hold. The run computes them modulo 2^32, and
    /// inference without a bound on the type.
    pub(super) fn forget_wide(self: &mut Arc<SymTensor>) {
        let is_wide =
            |element: &Dim| element.as_constant().is_some_and(|value| i32::try_from(value).is_err());
        if self.elements.iter().any(is_wide) {
            let elements = Arc::make_mut(self).elements.iter_mut().filter(|element| is_wide(element));
            elements.for_each(|element| *element = Dim::symbol(Symbol::unknown_value()));
        }
    }

    /// Returns all elements as numbers, if all are constant.
    pub fn as_ints(&self) -> Option<Vec<i64>> {
        self.elements.iter().map(Dim::as_constant).collect()
    }

    /// Returns a tensor of this shape with the given elements. `None` if they do not fit the shape
    /// or the type, or if inference does not track the type.
    pub fn to_tensor(&self, dtype: DType, ints: &[i64]) -> Option<Tensor> {
        match dtype {
            DType::I64 => Tensor::from_slice(&self.shape, ints).ok(),
            // Expressions are 64 bits wide, and a sum of two `int32` may exceed that type.
            DType::I32 => {
                let narrow: Option<Vec<i32>> = ints.iter().map(|&v| i32::try_from(v).ok()).collect();
                Tensor::from_vec(&self.shape, narrow?).ok()
            }
            DType::Bool => {
                let bools: Vec<bool> = ints.iter().map(|&v| v != 0).collect();
                Tensor::from_bools(&self.shape, &bools).ok()
            }
            _ => None,
        }
    }
}
