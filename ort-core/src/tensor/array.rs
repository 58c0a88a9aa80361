//! Conversion to and from `ndarray` arrays, for the public API.

use ndarray::{ArrayD, IxDyn};

use super::Tensor;
use crate::dtype::Element;
use crate::{Error, Result, error};

impl<T: Element> TryFrom<ArrayD<T>> for Tensor {
    type Error = Error;

    /// Takes over the array's memory if it is in standard layout, else copies it.
    fn try_from(array: ArrayD<T>) -> Result<Tensor> {
        let shape = array.shape().to_vec();
        // `into_raw_vec` returns memory order, so transposed or reversed views are made row-major
        // first.
        let array = if array.is_standard_layout() { array } else { array.as_standard_layout().into_owned() };
        let (elements, offset) = array.into_raw_vec_and_offset();
        let count: usize = shape.iter().product();
        // An array sliced off a larger one keeps the whole vector, so its elements are copied out.
        match offset.unwrap_or(0) {
            0 if elements.len() == count => Tensor::from_vec(&shape, elements),
            start => Tensor::from_slice(&shape, elements.get(start..start + count).unwrap_or(&[])),
        }
    }
}

impl Tensor {
    /// Returns the elements as a new array.
    ///
    /// ```
    /// use ort_core::tensor::Tensor;
    /// let array = ndarray::array![[1i64, 2], [3, 4]].into_dyn();
    /// let tensor = Tensor::try_from(array.clone())?;
    /// assert_eq!(tensor.to_array::<i64>()?, array);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn to_array<T: Element>(&self) -> Result<ArrayD<T>> {
        ArrayD::from_shape_vec(IxDyn(self.shape()), self.to_vec()?)
            .map_err(|problem| error!(Fail, "the elements do not fill the shape: {problem}"))
    }
}
