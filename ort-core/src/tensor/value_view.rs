//! Borrowed values, as kernels and subgraphs take them.

use super::value::Value;
use super::view::TensorView;
use crate::{Result, error};

/// A borrowed value: a tensor view, or a reference to a container.
#[derive(Clone, Copy, Debug)]
pub enum ValueView<'a> {
    /// A tensor.
    Tensor(TensorView<'a>),
    /// A sequence, optional, map or sparse tensor.
    Value(&'a Value),
}

impl<'a> ValueView<'a> {
    /// Returns the tensor, or an error that names the actual kind.
    pub fn tensor(&self) -> Result<TensorView<'a>> {
        match self {
            ValueView::Tensor(view) => Ok(*view),
            ValueView::Value(Value::Tensor(tensor)) => Ok(tensor.view()),
            ValueView::Value(other) => {
                Err(error!(InvalidArgument, "expected a tensor, got {}", other.kind_name()))
            }
        }
    }

    /// Returns an owned value. A tensor view is copied; a container is cloned and shares its
    /// tensors' memory.
    pub fn to_value(&self) -> Result<Value> {
        match self {
            // A view borrows from a slab or another tensor, and an owned value must outlive both.
            ValueView::Tensor(view) => Ok(Value::Tensor(view.to_tensor()?)),
            ValueView::Value(value) => Ok((*value).clone()),
        }
    }
}

impl Value {
    /// Returns the borrowed form that kernels and subgraphs take.
    pub fn view(&self) -> ValueView<'_> {
        match self {
            Value::Tensor(tensor) => ValueView::Tensor(tensor.view()),
            other => ValueView::Value(other),
        }
    }
}
