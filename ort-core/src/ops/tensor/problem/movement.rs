//! Parts along an axis (`Concat`, `Split`), block rearrangements (`DepthToSpace`, `SpaceToDepth`),
//! and `ReverseSequence`.

use smallvec::SmallVec;

use crate::ir::Attributes;
use crate::ops::tensor::geometry::{Strided, normalize_axis};
use crate::tensor::Shape;
use crate::{Result, ensure, error};

/// The parts of a tensor along one axis: what `Concat` joins and `Split` returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisParts {
    /// The axis.
    pub axis: usize,
    /// The size of each part along the axis.
    pub sizes: SmallVec<[usize; 8]>,
    /// The shape of the whole tensor.
    whole: Shape,
}

impl AxisParts {
    /// Reads a `Concat` node that joins tensors of these shapes to `whole`.
    ///
    /// # Errors
    ///
    /// If the axis is out of range, or the shapes do not add up to the whole.
    pub fn of_concat(attrs: &Attributes, inputs: &[&[usize]], whole: &[usize]) -> Result<AxisParts> {
        let axis = normalize_axis(attrs.int("axis")?, whole.len())?;
        let mut sizes = SmallVec::with_capacity(inputs.len());
        for (index, shape) in inputs.iter().enumerate() {
            let mut pairs = shape.iter().zip(whole).enumerate();
            let fits = shape.len() == whole.len() && pairs.all(|(at, (own, all))| at == axis || own == all);
            ensure!(fits, Fail, "input {index} of shape {shape:?} joined to {whole:?}");
            sizes.push(shape.get(axis).copied().unwrap_or(0));
        }
        let total = sizes.iter().copied().fold(0, usize::saturating_add);
        ensure!(whole.get(axis) == Some(&total), Fail, "{total} elements joined to shape {whole:?}");
        Ok(AxisParts { axis, sizes, whole: whole.into() })
    }

    /// Reads a `Split` node on a tensor of shape `whole`: its input `split`, or `count` equal
    /// parts.
    ///
    /// # Errors
    ///
    /// If the axis is out of range, or the parts exceed it.
    pub fn of_split(
        attrs: &Attributes,
        whole: &[usize],
        given: Option<&[i64]>,
        count: usize,
    ) -> Result<AxisParts> {
        let axis = normalize_axis(attrs.int("axis")?, whole.len())?;
        let size = whole.get(axis).copied().unwrap_or(1);
        let sizes = split_sizes(size, given, count)?;
        let total = sizes.iter().copied().fold(0, usize::saturating_add);
        ensure!(total <= size, InvalidArgument, "the parts exceed {whole:?}");
        Ok(AxisParts { axis, sizes, whole: whole.into() })
    }

    /// Returns the elements of each part, as strided reads of the whole tensor.
    pub fn orders(&self) -> impl Iterator<Item = Strided> + '_ {
        let whole = Strided::contiguous(&self.whole);
        let stride = whole.strides.get(self.axis).copied().unwrap_or(1).unsigned_abs();
        let mut start = 0usize;
        self.sizes.iter().map(move |size| {
            let mut part = Strided { offset: start.saturating_mul(stride), ..whole.clone() };
            part.sizes.get_mut(self.axis).into_iter().for_each(|own| *own = *size);
            start = start.saturating_add(*size);
            part
        })
    }
}

/// Returns the sizes of the parts of `Split`: the given ones, or `count` equal ones, of which the
/// last may be smaller.
///
/// # Errors
///
/// If the given sizes are not `count`, or one is negative.
pub fn split_sizes(size: usize, given: Option<&[i64]>, count: usize) -> Result<SmallVec<[usize; 8]>> {
    let Some(given) = given else {
        let part = size.div_ceil(count.max(1));
        // With few elements the last parts may be empty.
        let part_at = |index: usize| part.min(size.saturating_sub(index.saturating_mul(part)));
        return Ok((0..count).map(part_at).collect());
    };
    ensure!(
        given.len() == count,
        InvalidArgument,
        "split has {} sizes, but there are {count} outputs",
        given.len()
    );
    let invalid = || error!(InvalidArgument, "split {given:?} does not add up to size {size}");
    given.iter().map(|part| usize::try_from(*part).map_err(|_| invalid())).collect()
}

/// The rearrangement of `DepthToSpace` and `SpaceToDepth`: a transpose of a view of rank 6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRearrangement {
    to_space: bool,
    /// Whether the channel dimension comes before those of the block (mode `CRD`).
    channels_first: bool,
    /// The side of a block; not 0.
    size: usize,
}

impl BlockRearrangement {
    /// Reads the attributes of a `DepthToSpace` node (`to_space`) or of a `SpaceToDepth` node.
    pub fn new(attrs: &Attributes, to_space: bool) -> Result<BlockRearrangement> {
        let size = usize::try_from(attrs.int("blocksize")?).ok().filter(|size| *size > 0);
        let size = size.ok_or_else(|| error!(InvalidGraph, "the block size is not positive"))?;
        Ok(BlockRearrangement { to_space, channels_first: attrs.string("mode")? == "CRD", size })
    }

    /// Returns the order in which the result reads an image of this shape.
    ///
    /// # Errors
    ///
    /// If the image does not have rank 4.
    pub fn order(&self, shape: &[usize]) -> Result<Strided> {
        let &[batch, channels, height, width] = shape else {
            return Err(error!(InvalidArgument, "the input has shape {shape:?}, expected rank 4"));
        };
        let size = self.size;
        let left = channels / size.saturating_mul(size);
        Ok(match (self.to_space, self.channels_first) {
            // The standard's DCR: [N, b, b, C / b^2, H, W] to [N, C / b^2, H, b, W, b].
            (true, false) => {
                Strided::transpose(&[batch, size, size, left, height, width], &[0, 3, 4, 1, 5, 2])
            }
            // The standard's CRD: [N, C / b^2, b, b, H, W] to [N, C / b^2, H, b, W, b].
            (true, true) => {
                Strided::transpose(&[batch, left, size, size, height, width], &[0, 1, 4, 2, 5, 3])
            }
            (false, channels_first) => {
                let parts = [batch, channels, height / size, size, width / size, size];
                let permutation = if channels_first { [0, 1, 3, 5, 2, 4] } else { [0, 3, 5, 1, 2, 4] };
                Strided::transpose(&parts, &permutation)
            }
        })
    }
}

/// The sequences that `ReverseSequence` reverses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReverseSequence {
    /// Whether the layout is (time, batch, ...) instead of (batch, time, ...).
    pub time_first: bool,
    /// The number of sequences.
    pub batch: usize,
    /// The number of time steps.
    pub time: usize,
    /// The elements of a time step of one sequence.
    pub run: usize,
}

impl ReverseSequence {
    /// Reads a node on a tensor of this shape, with this number of `lengths`.
    ///
    /// # Errors
    ///
    /// If the tensor has fewer than two axes, or there is not one length for each sequence.
    pub fn new(time_first: bool, shape: &[usize], lengths: usize) -> Result<ReverseSequence> {
        let &[first, second, ref rest @ ..] = shape else {
            return Err(error!(InvalidArgument, "ReverseSequence needs rank 2 or more, got {shape:?}"));
        };
        let (batch, time) = if time_first { (second, first) } else { (first, second) };
        ensure!(
            lengths == batch,
            InvalidArgument,
            "got {lengths} lengths, expected one for each of the {batch} sequences"
        );
        Ok(ReverseSequence { time_first, batch, time, run: rest.iter().product() })
    }

    /// The size of the second axis.
    pub fn second(&self) -> usize {
        if self.time_first { self.batch } else { self.time }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attribute;
    use crate::spec::Registry;

    fn along(op: &str, axis: i64) -> Result<Attributes> {
        let spec = Registry::global()?.find("", op).ok_or_else(|| error!(Fail, "there is no {op}"))?;
        Attributes::new(spec, vec![("axis".to_owned(), Attribute::Int(axis))])
    }

    #[test]
    fn parts_follow_each_other() -> Result<()> {
        let source: Vec<usize> = (0..10).collect();
        let (split, concat) = (along("Split", -1)?, along("Concat", 1)?);
        let parts = AxisParts::of_split(&split, &[2, 5], Some(&[2, 3]), 2)?;
        let read = parts.orders().map(|order| order.collect(&source)).collect::<Result<Vec<_>>>()?;
        assert_eq!(read, [vec![0, 1, 5, 6], vec![2, 3, 4, 7, 8, 9]]);
        assert_eq!(AxisParts::of_concat(&concat, &[&[2, 2], &[2, 3]], &[2, 5])?, parts);
        assert!(AxisParts::of_concat(&concat, &[&[2, 2], &[1, 3]], &[2, 5]).is_err());
        assert!(AxisParts::of_split(&split, &[2, 5], Some(&[2, 4]), 2).is_err());
        assert_eq!(split_sizes(7, None, 3)?.as_slice(), [3, 3, 1]);
        Ok(())
    }
}
