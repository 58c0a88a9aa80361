//! Small integer tensors whose elements are symbolic: shapes, axes, counts.

use crate::dim::Dim;
use crate::dtype::DType;
use crate::tensor::{Shape, Tensor, TensorView, element_count};
use crate::{Result, ensure};

/// The largest element count that inference follows.
const LIMIT: usize = 1024;

/// A small tensor of `int64`, `int32` or `bool` whose elements are integer expressions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymTensor {
    /// The concrete shape.
    pub shape: Shape,
    /// The elements in row-major order.
    pub elements: Vec<Dim>,
}

impl SymTensor {
    /// A tensor of one dimension.
    pub fn vector(elements: Vec<Dim>) -> SymTensor {
        SymTensor { shape: [elements.len()].as_slice().into(), elements }
    }

    /// A tensor without dimensions.
    pub fn scalar(element: Dim) -> SymTensor {
        SymTensor { shape: Shape::new(), elements: vec![element] }
    }

    /// A tensor of any small shape.
    pub fn new(shape: &[usize], elements: Vec<Dim>) -> Result<SymTensor> {
        ensure!(element_count(shape)? == elements.len(), Fail, "symbolic elements do not fill {shape:?}");
        Ok(SymTensor { shape: shape.into(), elements })
    }

    /// Whether inference follows a tensor of this type and element count.
    pub fn follows(dtype: DType, count: usize) -> bool {
        count <= LIMIT && matches!(dtype, DType::I64 | DType::I32 | DType::Bool)
    }

    /// The element count of a shape whose zeros count as 1, which bounds every loop over it: the
    /// other sizes of an empty tensor may be as large as they like.
    pub fn extent(sizes: &[usize]) -> usize {
        sizes.iter().fold(1, |count, &size| count.saturating_mul(size.max(1)))
    }

    /// The elements of a concrete tensor, where it is small and of a type that inference follows.
    pub fn from_view(view: &TensorView<'_>) -> Option<SymTensor> {
        if !SymTensor::follows(view.dtype(), SymTensor::extent(view.shape())) || !view.is_host() {
            return None;
        }
        let elements = view.to_ints().ok()?.into_iter().map(Dim::constant).collect();
        Some(SymTensor { shape: view.shape().into(), elements })
    }

    /// All elements as numbers, where all are.
    pub fn as_ints(&self) -> Option<Vec<i64>> {
        self.elements.iter().map(Dim::as_constant).collect()
    }

    /// The tensor of type `dtype` with the elements as numbers; none where one is not, or does not
    /// fit.
    pub fn to_tensor(&self, dtype: DType, ints: &[i64]) -> Option<Tensor> {
        match dtype {
            DType::I64 => Tensor::from_slice(&self.shape, ints).ok(),
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
