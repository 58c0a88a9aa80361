//! Building blocks of gradient rules: sizes, reshapes, slices and sums along an axis, as nodes.

use super::GradCx;
use super::view::known_ints;
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, ValueId};
use crate::tensor::Tensor;
use crate::{Result, ensure, error};

impl GradCx<'_> {
    /// Returns the gradient of the output at `index`. `None` if nothing differentiated depends on
    /// that output.
    pub fn find_upstream(&self, index: usize) -> Option<ValueId> {
        self.upstream.get(index).copied().flatten()
    }

    /// Returns the gradient of the first output. Ignores those of the other outputs, which only
    /// describe how the first was computed (a mask, indices, statistics).
    pub fn first_upstream(&self) -> Result<ValueId> {
        self.find_upstream(0).ok_or_else(|| {
            error!(NotImplemented, "{} has a gradient for its first output only", self.node.spec.name)
        })
    }

    /// Emits a node of the standard domain with this number of outputs and optional inputs.
    pub fn emit_many(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
        outputs: usize,
    ) -> Result<Vec<ValueId>> {
        self.pen.emit_many(op, inputs, attrs, outputs)
    }

    /// Emits a node of the standard domain with one output and optional inputs.
    pub fn emit_some(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attrs: &[(&str, Attribute)],
    ) -> Result<ValueId> {
        self.pen.emit_some(op, inputs, attrs)
    }

    /// Returns a copy of the node's attributes, for a node like it.
    pub fn attr_list(&self) -> Vec<(&'static str, Attribute)> {
        self.attrs().declared().map(|(name, value)| (name, value.clone())).collect()
    }

    /// Adds a tensor filled with one number, of the shape and type of `like`.
    pub fn filled(&mut self, value: f64, like: ValueId) -> Result<ValueId> {
        self.pen.filled(value, like)
    }

    /// Returns the shape of a value, whose rank must be known.
    pub fn shape(&self, value: ValueId) -> Result<Vec<Dim>> {
        self.pen.shape(value)
    }

    /// Returns the sizes of a value, if all are constant.
    pub fn constant_sizes(&self, value: ValueId) -> Option<Vec<i64>> {
        self.pen.shape(value).ok()?.iter().map(Dim::as_constant).collect()
    }

    /// Returns the size of a value along an axis.
    pub fn size_at(&self, value: ValueId, axis: usize) -> Result<Dim> {
        let size = self.pen.shape(value)?.get(axis).cloned();
        size.ok_or_else(|| error!(InvalidGraph, "a tensor has no axis {axis}"))
    }

    /// Returns the elements of a small integer tensor. These are known for constants, and if
    /// inference tracked them from constants through nodes such as `Unsqueeze` and `Cast`.
    pub fn known_ints(&self, value: ValueId) -> Option<Vec<i64>> {
        let graph = &self.pen.graph;
        known_ints(graph.constants.get(&value).map(Tensor::view)).or_else(|| {
            let symbolic = graph.value(value).symbolic.as_ref()?;
            symbolic.elements.iter().map(Dim::as_constant).collect()
        })
    }

    /// Returns the elements of a float constant.
    pub fn known_floats(&self, value: ValueId) -> Option<Vec<f32>> {
        self.pen.graph.constants.get(&value)?.to_vec().ok()
    }

    /// Returns the axis attribute `name`, normalized for a tensor of this rank.
    pub fn axis(&self, name: &str, rank: usize) -> Result<usize> {
        axis_of(self.attrs().int(name)?, rank)
    }

    /// Returns the sizes of a value on axes `start..end`, as a one-dimensional tensor.
    pub fn sizes(&mut self, value: ValueId, start: usize, end: usize) -> Result<ValueId> {
        let shape = self.pen.shape(value)?;
        let known = shape.get(start..end).unwrap_or_default().iter().map(Dim::as_constant);
        // Constant sizes become a constant: no node has to read `value` for them.
        if let Some(known) = known.collect::<Option<Vec<i64>>>() {
            return self.ints(&known);
        }
        let attrs = [("start", Attribute::Int(start as i64)), ("end", Attribute::Int(end as i64))];
        self.emit("Shape", &[value], &attrs)
    }

    /// Returns all sizes of a value, as a one-dimensional tensor.
    pub fn shape_of(&mut self, value: ValueId) -> Result<ValueId> {
        let rank = self.rank(value)?;
        self.sizes(value, 0, rank)
    }

    /// Concatenates one-dimensional tensors.
    pub fn join(&mut self, lists: &[ValueId]) -> Result<ValueId> {
        match lists {
            [one] => Ok(*one),
            _ => self.emit("Concat", lists, &[("axis", Attribute::Int(0))]),
        }
    }

    /// Reshapes `value` to the shape in a one-dimensional tensor.
    pub fn reshape(&mut self, value: ValueId, shape: ValueId) -> Result<ValueId> {
        self.emit("Reshape", &[value, shape], &[])
    }

    /// Reshapes `value` to this shape, in which -1 stands for the remaining elements.
    pub fn reshape_to(&mut self, value: ValueId, shape: &[i64]) -> Result<ValueId> {
        let shape = self.ints(shape)?;
        self.reshape(value, shape)
    }

    /// Reshapes `value` to the shape of `like`.
    pub fn reshape_like(&mut self, value: ValueId, like: ValueId) -> Result<ValueId> {
        self.pen.reshape_like(value, like)
    }

    /// Permutes the dimensions of `value`.
    pub fn transpose(&mut self, value: ValueId, order: &[usize]) -> Result<ValueId> {
        if order.iter().enumerate().all(|(to, from)| to == *from) {
            return Ok(value);
        }
        let order = order.iter().map(|&axis| axis as i64).collect();
        self.emit("Transpose", &[value], &[("perm", Attribute::Ints(order))])
    }

    /// Sums along some axes, which are kept with size 1.
    pub fn sum_along(&mut self, value: ValueId, axes: &[i64]) -> Result<ValueId> {
        self.reduce("ReduceSum", value, axes)
    }

    /// Averages along some axes, which are kept with size 1.
    pub fn mean_along(&mut self, value: ValueId, axes: &[i64]) -> Result<ValueId> {
        self.reduce("ReduceMean", value, axes)
    }

    fn reduce(&mut self, op: &str, value: ValueId, axes: &[i64]) -> Result<ValueId> {
        let axes = self.ints(axes)?;
        // Without axes nothing is reduced; by default everything would be.
        self.emit(op, &[value, axes], &[("noop_with_empty_axes", Attribute::Int(1))])
    }

    /// Returns the numbers `0..size`. `size` is a tensor of one element.
    pub fn range(&mut self, size: ValueId) -> Result<ValueId> {
        // `Range` takes scalars.
        let scalar = self.ints(&[])?;
        let size = self.reshape(size, scalar)?;
        let (zero, one) = (self.integer(0)?, self.integer(1)?);
        self.emit("Range", &[zero, size, one], &[])
    }

    /// Adds a scalar constant of type `int64`.
    pub fn integer(&mut self, value: i64) -> Result<ValueId> {
        Ok(self.pen.constant(Tensor::scalar(value)?))
    }

    /// Returns zeros of a float type in the shape given by a one-dimensional tensor.
    pub fn zeros(&mut self, shape: ValueId, dtype: DType) -> Result<ValueId> {
        let zero = self.number(0.0, dtype)?;
        self.emit("Expand", &[zero, shape], &[])
    }

    /// Scatter-add, the transpose of `Gather` along `axis`: accumulates `updates` at the positions
    /// in `data` that they were gathered from.
    pub fn sum_at(
        &mut self,
        data: ValueId,
        axis: usize,
        indices: ValueId,
        updates: ValueId,
    ) -> Result<ValueId> {
        let (rank, depth) = (self.rank(data)?, self.rank(indices)?);
        ensure!(axis < rank, InvalidGraph, "axis {axis} is out of range for rank {rank}");
        let size = self.sizes(data, axis, axis + 1)?;
        let (before, behind) = (self.sizes(data, 0, axis)?, self.sizes(data, axis + 1, rank)?);
        // [size, before, behind]
        let shape = self.join(&[size, before, behind])?;
        // `ScatterND` indexes leading dimensions, so the scattered axis moves to the front.
        let moved = axis..axis + depth;
        // `updates` is [before, indices, behind] and becomes [indices, before, behind].
        let order: Vec<usize> = moved.chain(0..axis).chain(axis + depth..rank - 1 + depth).collect();
        let updates = self.transpose(updates, &order)?;
        let indices = self.cast(indices, DType::I64)?;
        let last = self.ints(&[depth as i64])?;
        // [indices, 1]: `ScatterND` takes coordinates from the last axis.
        let indices = self.emit("Unsqueeze", &[indices, last], &[])?;
        let zeros = self.zeros(shape, self.dtype(updates)?)?;
        // Gradients of an element that was gathered more than once add up.
        let add = [("reduction", Attribute::String("add".to_string()))];
        let sum = self.emit("ScatterND", &[zeros, indices, updates], &add)?;
        // [before, size, behind]
        let back: Vec<usize> = (1..=axis).chain([0]).chain(axis + 1..rank).collect();
        self.transpose(sum, &back)
    }
}

/// Returns the product of numbers that come from the model. Its overflow is an error.
pub(crate) fn product(numbers: &[i64]) -> Result<i64> {
    let product = numbers.iter().try_fold(1i64, |product, &number| product.checked_mul(number));
    product.ok_or_else(|| error!(InvalidGraph, "the product of {numbers:?} overflows"))
}

/// Normalizes an axis that may count from the back.
pub(crate) fn axis_of(axis: i64, rank: usize) -> Result<usize> {
    let rank = rank as i64;
    ensure!((-rank..rank).contains(&axis), InvalidGraph, "axis {axis} is out of range for rank {rank}");
    // A scalar has no valid axis and returned above; `max` only keeps the divisor from being 0.
    Ok(axis.rem_euclid(rank.max(1)) as usize)
}
