//! Problem descriptors of quantization: what a node computes, read once from its attributes and
//! shapes.

use crate::dtype::DType;
use crate::ir::Attributes;
use crate::{Result, ensure, error};

/// The attributes of a `QuantizeLinear` or `DequantizeLinear` node.
#[derive(Clone, Copy, Debug)]
pub struct Quantization {
    /// The axis of scales; a negative one counts from the end.
    pub axis: i64,
    /// The elements of a block; 0 for scales per tensor or per index of the axis.
    pub block_size: i64,
}

/// How scales belong to the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Granularity {
    /// What shares a scale.
    pub kind: GranularityKind,
    /// The size of the axis; 1 for a scale of the whole tensor.
    pub axis: usize,
    /// The elements behind the axis; 1 for a scale of the whole tensor.
    pub inner: usize,
}

/// What shares a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GranularityKind {
    /// The whole tensor.
    Tensor,
    /// The elements at an index of the axis.
    Axis,
    /// Blocks along the axis.
    Blocks {
        /// The elements of a block.
        size: usize,
        /// The blocks along the axis.
        count: usize,
    },
}

impl Quantization {
    /// Reads the attributes.
    ///
    /// # Errors
    ///
    /// An attribute is missing.
    pub fn new(attrs: &Attributes) -> Result<Quantization> {
        Ok(Quantization { axis: attrs.int("axis")?, block_size: attrs.int("block_size")? })
    }

    /// Returns how scales of one shape belong to a tensor of another.
    ///
    /// # Errors
    ///
    /// The scales do not fit the tensor.
    pub fn granularity(&self, shape: &[usize], scales: &[usize]) -> Result<Granularity> {
        // A single scale serves the whole tensor, whatever the axis.
        if scales.iter().product::<usize>() == 1 && (scales.len() < 2 || self.block_size == 0) {
            return Ok(Granularity { kind: GranularityKind::Tensor, axis: 1, inner: 1 });
        }
        let rank = shape.len();
        let counted = if self.axis < 0 { self.axis.saturating_add_unsigned(rank as u64) } else { self.axis };
        let at = usize::try_from(counted).ok().filter(|axis| *axis < rank);
        let at = at.ok_or_else(|| error!(Fail, "axis {} is out of range for rank {rank}", self.axis))?;
        let axis = shape.get(at).copied().unwrap_or(1);
        let inner = shape.iter().skip(at + 1).product();
        if self.block_size == 0 {
            ensure!(*scales == [axis], Fail, "scales of shape {scales:?} do not fit axis {at} of {shape:?}");
            return Ok(Granularity { kind: GranularityKind::Axis, axis, inner });
        }
        let size = usize::try_from(self.block_size).unwrap_or(0);
        // A negative block size became 0 above.
        ensure!(size > 0, InvalidArgument, "a block size of {}", self.block_size);
        // The standard allows a last block that is shorter than the others.
        let count = axis.div_ceil(size);
        let expected = shape.iter().enumerate().map(|(index, own)| if index == at { count } else { *own });
        ensure!(
            expected.eq(scales.iter().copied()),
            Fail,
            "scales of shape {scales:?} do not fit blocks of {size} on axis {at} of {shape:?}"
        );
        Ok(Granularity { kind: GranularityKind::Blocks { size, count }, axis, inner })
    }

    /// Returns the type in which `QuantizeLinear` divides; `None` for the type of its scales.
    ///
    /// # Errors
    ///
    /// `precision` is not float, float16 or bfloat16.
    pub fn division(attrs: &Attributes) -> Result<Option<DType>> {
        let precision = attrs.int("precision")?;
        match i32::try_from(precision).ok().and_then(DType::from_onnx) {
            None if precision == 0 => Ok(None),
            Some(dtype @ (DType::F32 | DType::F16 | DType::BF16)) => Ok(Some(dtype)),
            _ => Err(error!(InvalidGraph, "precision {precision} is not a type to divide in")),
        }
    }
}
