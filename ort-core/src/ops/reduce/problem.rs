//! Problem descriptors of reductions, scans, top-k and `Einsum`: a node's attributes and shapes,
//! read once.
//!
//! A descriptor is plain data. Providers share the reading; each renders and launches its own
//! kernel.

use super::{Equation, Label};
use crate::ir::Attributes;
use crate::ops::tensor::geometry::{around_axis, contiguous_strides, kernel_axis, product};
use crate::spec::RUNTIME;
use crate::{Result, ensure, error};

/// What a `Reduce` operator or `SumTo` computes of the elements that it reduces to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum.
    Sum,
    /// The arithmetic mean.
    Mean,
    /// The maximum.
    Max,
    /// The minimum.
    Min,
    /// The product.
    Prod,
    /// The sum of magnitudes.
    L1,
    /// The Euclidean norm.
    L2,
    /// The logarithm of the sum.
    LogSum,
    /// The logarithm of the sum of exponentials.
    LogSumExp,
    /// The sum of squares.
    SumSquare,
}

impl Reduction {
    /// The operators, by domain and name.
    pub const OPERATORS: [(&'static str, &'static str, Reduction); 11] = [
        ("", "ReduceSum", Reduction::Sum),
        ("", "ReduceMean", Reduction::Mean),
        ("", "ReduceMax", Reduction::Max),
        ("", "ReduceMin", Reduction::Min),
        ("", "ReduceProd", Reduction::Prod),
        ("", "ReduceL1", Reduction::L1),
        ("", "ReduceL2", Reduction::L2),
        ("", "ReduceLogSum", Reduction::LogSum),
        ("", "ReduceLogSumExp", Reduction::LogSumExp),
        ("", "ReduceSumSquare", Reduction::SumSquare),
        (RUNTIME, "SumTo", Reduction::Sum),
    ];

    /// Returns the reduction of an operator.
    ///
    /// # Errors
    ///
    /// The operator reduces nothing.
    pub fn of(op: &str) -> Result<Reduction> {
        let found = Reduction::OPERATORS.iter().find(|(_, name, _)| *name == op);
        found.map(|(.., reduction)| *reduction).ok_or_else(|| error!(Fail, "{op} is not a reduction"))
    }
}

/// Returns which axes of a tensor of `rank` are listed. An axis may be listed twice.
///
/// # Errors
///
/// If an axis is out of range.
pub fn axes_mask(axes: &[i64], rank: usize) -> Result<Vec<bool>> {
    let mut mask = vec![false; rank];
    for axis in axes {
        let axis = kernel_axis(*axis, rank)?;
        mask.get_mut(axis).into_iter().for_each(|along| *along = true);
    }
    Ok(mask)
}

/// Returns which axes a `Reduce` operator or `SumTo` reduces. `given` is its second input: axes, or
/// the shape to sum to.
///
/// # Errors
///
/// If an axis is out of range, or the shape to sum to has more axes than the tensor.
pub fn reduced_axes(op: &str, attrs: &Attributes, shape: &[usize], given: &[i64]) -> Result<Vec<bool>> {
    if op == "SumTo" {
        // `SumTo` reduces the axes that the target lacks, and those whose size differs.
        let lead = shape.len().checked_sub(given.len());
        let lead = lead.ok_or_else(|| error!(InvalidArgument, "{shape:?} is summed to {given:?}"))?;
        let differs = |(from, to): (&usize, &i64)| i64::try_from(*from) != Ok(*to);
        let rest = shape.iter().skip(lead).zip(given);
        return Ok((0..lead).map(|_| true).chain(rest.map(differs)).collect());
    }
    if given.is_empty() && !attrs.flag("noop_with_empty_axes")? {
        return Ok(vec![true; shape.len()]);
    }
    axes_mask(given, shape.len())
}

/// Returns the axis of `CumSum` and `CumProd`, which is their second input.
///
/// # Errors
///
/// If it is not one number in range.
pub fn scanned_axis(given: &[i64], rank: usize) -> Result<usize> {
    match given {
        // A scalar has one axis: 0, or -1 from the end.
        [0 | -1] if rank == 0 => Ok(0),
        [axis] => kernel_axis(*axis, rank),
        other => Err(error!(InvalidArgument, "the axis must be one number, got {}", other.len())),
    }
}

/// The rows, along an axis, of which `TopK` keeps the best elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankedRows {
    /// The number of rows; 0 if none of their elements is kept.
    pub count: usize,
    /// The elements of a row.
    pub len: usize,
    /// The distance between the elements of a row.
    pub inner: usize,
    /// The elements kept of a row, K.
    pub kept: usize,
}

impl RankedRows {
    /// Reads the attribute `axis` of a `TopK` node. The size of the result along it is K, which a
    /// kernel's workspace depends on before the input has a value.
    ///
    /// # Errors
    ///
    /// As [`RankedRows::along_axis`], and if the axis is out of range.
    pub fn of_top_k(attrs: &Attributes, shape: &[usize], result: &[usize]) -> Result<RankedRows> {
        let axis = kernel_axis(attrs.int("axis")?, shape.len())?;
        let [_, kept, _] = around_axis(result, axis);
        RankedRows::along_axis(shape, axis, kept)
    }

    /// Splits a tensor of this shape into rows along an axis, of which `kept` elements each are
    /// kept.
    ///
    /// # Errors
    ///
    /// If a row has fewer elements, or all elements cannot be counted in 31 bits.
    pub fn along_axis(shape: &[usize], axis: usize, kept: usize) -> Result<RankedRows> {
        let [outer, len, inner] = around_axis(shape, axis);
        ensure!(kept <= len, InvalidArgument, "K must be one number from 0 to the axis' size {len}");
        // Without elements to keep there is nothing to rank, whatever the rows.
        let count = if kept == 0 { 0 } else { outer.saturating_mul(inner) };
        // GPU kernels hold positions in 32-bit integers.
        ensure!(product(shape) <= i32::MAX as usize, NotImplemented, "{shape:?} is beyond 31 bits");
        Ok(RankedRows { count, len, inner, kept })
    }

    /// Refuses a value of the input K other than what the result's shape says.
    pub fn check_k(&self, given: &[i64]) -> Result<()> {
        let fits = matches!(given, [k] if usize::try_from(*k) == Ok(self.kept));
        ensure!(fits, InvalidArgument, "K is {given:?}, expected {}", self.kept);
        Ok(())
    }
}

/// Some subscripts of an `Einsum`: their sizes, and the strides of each operand along them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubscriptAxes {
    /// The size of each subscript.
    pub sizes: Vec<usize>,
    /// For each operand, the stride along each subscript in elements; 0 where it broadcasts.
    pub steps: Vec<Vec<i64>>,
}

/// An `Einsum` for tensors of known shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EinsumAxes {
    /// The subscripts of the result, in its order.
    pub kept: SubscriptAxes,
    /// The subscripts that are summed.
    pub summed: SubscriptAxes,
}

impl EinsumAxes {
    /// Reads the attribute `equation` of a node on operands of these shapes.
    ///
    /// # Errors
    ///
    /// If the equation does not parse, or a subscript has two sizes.
    pub fn new(attrs: &Attributes, shapes: &[&[usize]]) -> Result<EinsumAxes> {
        let ranks: Vec<usize> = shapes.iter().map(|shape| shape.len()).collect();
        let equation = Equation::parse(attrs.string("equation")?, &ranks)?;
        let axes = |labels: &[Label]| SubscriptAxes::new(&equation, labels, shapes);
        Ok(EinsumAxes { kept: axes(&equation.output)?, summed: axes(&equation.summed())? })
    }
}

impl SubscriptAxes {
    fn new(equation: &Equation, labels: &[Label], shapes: &[&[usize]]) -> Result<SubscriptAxes> {
        let mut axes = SubscriptAxes { sizes: vec![1; labels.len()], steps: Vec::new() };
        for (own, shape) in equation.inputs.iter().zip(shapes) {
            let mut steps = vec![0; labels.len()];
            // A repeated subscript walks along a diagonal, so its strides add up.
            for ((label, size), stride) in own.iter().zip(*shape).zip(contiguous_strides(shape)) {
                let place = labels.iter().position(|known| known == label).unwrap_or(usize::MAX);
                let axis = axes.sizes.get_mut(place).zip(steps.get_mut(place));
                // Size 1 broadcasts, and keeps stride 0.
                let Some((known, step)) = axis.filter(|_| *size != 1) else { continue };
                let fits = *known == 1 || known == size;
                ensure!(fits, InvalidArgument, "a subscript has sizes {known} and {size}");
                (*known, *step) = (*size, *step + stride as i64);
            }
            axes.steps.push(steps);
        }
        Ok(axes)
    }
}
