//! Heads in a tensor, and the number of their keys.

use ort_core::ops::nn::attention::problem::HeadRows;

use crate::operand::Operand;

/// The rows of heads in a tensor.
#[derive(Clone, Debug)]
pub struct HeadTensor {
    /// The tensor.
    pub operand: Operand,
    /// The offset of the first element.
    pub first: usize,
    /// The strides of batch, head and row, in elements.
    pub strides: [usize; 3],
}

impl HeadTensor {
    /// Rows of this layout in a tensor.
    pub fn new(operand: &Operand, HeadRows { first, strides }: HeadRows) -> HeadTensor {
        HeadTensor { operand: operand.clone(), first, strides }
    }
}

/// The number of keys in each batch, and the keys before the first query.
#[derive(Clone, Copy, Debug)]
pub enum KeyLengths<'a> {
    /// All keys are valid.
    All {
        /// The keys before the first query.
        before: usize,
    },
    /// `lengths` plus `more` keys are valid.
    Each {
        /// A number per batch.
        lengths: &'a Operand,
        /// What is added to it.
        more: usize,
        /// The keys before the first query.
        before: usize,
    },
    /// `lengths` plus `more` keys are valid, and the queries are the last of them.
    AtEnd {
        /// A number per batch.
        lengths: &'a Operand,
        /// What is added to it.
        more: usize,
    },
}
