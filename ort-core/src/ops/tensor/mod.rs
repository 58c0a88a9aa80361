//! Tensor construction, shape and data movement.

pub mod geometry;
pub mod problem;

mod affine_grid;
mod col2im;
pub(super) mod concat;
mod constant;
mod crop_pad;
mod depth_space;
mod describe;
mod expand;
mod eye_like;
mod gather;
mod gradients;
pub(super) mod grid_sample;
pub(in crate::ops) mod index_gradients;
mod one_hot;
mod pad;
mod range;
mod reshape;
mod resize;
mod reverse_sequence;
pub(in crate::ops) mod sample_gradients;
mod scatter;
mod select;
mod slice;
mod split;
mod squeeze;
mod tensor_scatter;
mod transpose;
mod trilu;
mod unique;

use crate::dim::Dim;
use crate::dtype::DType;
use crate::spec::{InferCx, SymTensor};
use crate::tensor::Shape;
use crate::{Result, ensure};

/// Returns the sizes if all are constants and form a valid tensor shape.
fn constant_sizes(shape: &[Dim]) -> Option<Shape> {
    let sizes: Option<Shape> =
        shape.iter().map(|size| size.as_constant().and_then(|size| usize::try_from(size).ok())).collect();
    sizes.filter(|sizes| crate::tensor::element_count(sizes).is_ok())
}

/// Sets the output to a shape, which must not have negative sizes, and propagates symbolic
/// elements, whose order a reshape keeps.
fn set_reshaped(cx: &mut InferCx<'_>, shape: Vec<Dim>) -> Result<()> {
    for size in &shape {
        // Sizes come from the elements of an input, which a hostile model may choose.
        let negative = size.as_constant().is_some_and(|size| size < 0);
        ensure!(!negative, InvalidGraph, "the output would have size {size}, expected 0 or more");
    }
    if let (Some(symbolic), Some(sizes)) = (cx.symbolic(0), constant_sizes(&shape)) {
        cx.set_symbolic(0, SymTensor::new(&sizes, symbolic.elements.clone())?);
    }
    cx.set_shape(0, shape)
}

/// Sets the symbolic elements of the output if inference follows tensors of its type and size.
fn set_elements(cx: &mut InferCx<'_>, dtype: DType, shape: &[Dim], elements: Vec<Dim>) -> Result<()> {
    if let Some(sizes) = constant_sizes(shape)
        && SymTensor::follows(dtype, elements.len())
    {
        cx.set_symbolic(0, SymTensor::new(&sizes, elements)?);
    }
    Ok(())
}
