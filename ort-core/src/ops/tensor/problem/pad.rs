//! Pads, and the axes that `Pad`, `CenterCropPad` and `Tile` extend.

use smallvec::SmallVec;

use crate::ir::Attributes;
use crate::ops::tensor::geometry::{contiguous_strides, normalize_axes};
use crate::{Result, ensure, error};

/// What surrounds a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PadMode {
    /// One value.
    Constant,
    /// The tensor, mirrored at its first and last element.
    Reflect,
    /// The first and the last element.
    Edge,
    /// The tensor again.
    Wrap,
}

impl PadMode {
    /// Parses the attribute `mode` of `Pad`.
    pub fn of(attrs: &Attributes) -> Result<PadMode> {
        match attrs.string("mode")? {
            "constant" => Ok(PadMode::Constant),
            "reflect" => Ok(PadMode::Reflect),
            "edge" => Ok(PadMode::Edge),
            "wrap" => Ok(PadMode::Wrap),
            other => Err(error!(InvalidGraph, "the mode '{other}' is not known")),
        }
    }

    /// Whether the mode pads blocks of inner elements as it pads single ones, so that an axis can
    /// be merged with the axes inside of it.
    pub fn pads_blocks(self) -> bool {
        matches!(self, PadMode::Constant | PadMode::Wrap)
    }
}

/// The elements added before and after each axis of a tensor. Negative numbers crop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pads {
    /// What the added elements are.
    pub mode: PadMode,
    /// The elements before and after each axis.
    pub amounts: Vec<[i64; 2]>,
}

impl Pads {
    /// Reads the inputs `pads` and `axes` of a `Pad` node on a tensor of `rank` axes.
    ///
    /// # Errors
    ///
    /// If an axis is out of range, or the pads are not two for each axis.
    pub fn new(mode: PadMode, given: &[i64], axes: Option<&[i64]>, rank: usize) -> Result<Pads> {
        let axes = chosen_axes(axes, rank)?;
        ensure!(
            given.len() == 2 * axes.len(),
            InvalidArgument,
            "{} pads are given for axes {axes:?}",
            given.len()
        );
        let (begins, ends) = given.split_at(axes.len());
        let mut amounts = vec![[0, 0]; rank];
        for (axis, (begin, end)) in axes.iter().zip(begins.iter().zip(ends)) {
            amounts.get_mut(*axis).into_iter().for_each(|pads| *pads = [*begin, *end]);
        }
        Ok(Pads { mode, amounts })
    }

    /// Reads the input `shape` and the attribute `axes` of a `CenterCropPad` node.
    ///
    /// # Errors
    ///
    /// If an axis is out of range, or there is not one target size for each axis.
    pub fn of_center_crop(axes: Option<&[i64]>, shape: &[usize], target: &[i64]) -> Result<Pads> {
        let axes = chosen_axes(axes, shape.len())?;
        ensure!(
            target.len() == axes.len(),
            InvalidArgument,
            "{} sizes are given for axes {axes:?}",
            target.len()
        );
        let mut amounts = vec![[0, 0]; shape.len()];
        for (axis, size) in axes.iter().zip(target) {
            let (Some(pads), Some(own)) = (amounts.get_mut(*axis), shape.get(*axis)) else { continue };
            // Division rounds towards zero, so the odd element is cropped or added at the end.
            let difference = size.saturating_sub(*own as i64);
            *pads = [difference / 2, difference - difference / 2];
        }
        Ok(Pads { mode: PadMode::Constant, amounts })
    }

    /// Applies the pads to a tensor of this shape.
    ///
    /// # Errors
    ///
    /// As [`PaddedAxis::new`].
    pub fn on(&self, shape: &[usize]) -> Result<Padded> {
        let axes = shape.iter().zip(&self.amounts);
        let axes = axes.map(|(size, pads)| PaddedAxis::new(*size, *pads, self.mode));
        Ok(Padded { mode: self.mode, axes: axes.collect::<Result<_>>()? })
    }
}

fn chosen_axes(axes: Option<&[i64]>, rank: usize) -> Result<SmallVec<[usize; 6]>> {
    match axes {
        Some(axes) => normalize_axes(axes, rank),
        None => Ok((0..rank).collect()),
    }
}

/// An axis of a padded tensor. All numbers count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedAxis {
    /// The size of the result.
    pub total: usize,
    /// The padding before the elements of the source.
    pub before: usize,
    /// The elements of the source that remain after cropping by negative pads.
    pub length: usize,
    /// The index of the first remaining element.
    pub first: usize,
    /// The size of the source.
    pub size: usize,
}

impl PaddedAxis {
    /// Applies pads to an axis. Negative pads crop first, and the mode then applies to the rest.
    ///
    /// # Errors
    ///
    /// If the pads remove more than there is, or leave nothing that the mode could repeat, or if a
    /// reflection is longer than what it reflects.
    pub fn new(size: usize, [begin, end]: [i64; 2], mode: PadMode) -> Result<PaddedAxis> {
        let invalid = || error!(InvalidArgument, "pads {begin} and {end} are out of range for size {size}");
        let cut = |pad: i64| usize::try_from(pad.min(0).unsigned_abs()).unwrap_or(usize::MAX);
        // In 128 bits, because pads are any numbers of 64 bits.
        let total = size as i128 + i128::from(begin) + i128::from(end);
        let total = usize::try_from(total).map_err(|_| invalid())?;
        let before = usize::try_from(begin.max(0)).map_err(|_| invalid())?;
        // The bound keeps the next subtraction from underflowing.
        let first = cut(begin).min(size);
        let length = (size - first).saturating_sub(cut(end));
        let repeats = length > 0 || mode == PadMode::Constant || total == 0;
        ensure!(repeats, InvalidArgument, "size {size} has no elements to repeat");
        // The element at the border is not part of its reflection.
        let most = length.saturating_sub(1) as i64;
        ensure!(
            mode != PadMode::Reflect || total == 0 || begin.max(end) <= most,
            InvalidArgument,
            help = "pad by less than the size, or in several steps",
            "pads {begin} and {end} reflect an axis of {length} elements, expected {most} at most"
        );
        Ok(PaddedAxis { total, before, length, first, size })
    }

    /// Whether the axis is neither padded nor cropped.
    pub fn is_plain(&self) -> bool {
        self.total == self.size && self.before == 0 && self.first == 0 && self.length == self.size
    }

    /// Applies a function to all numbers of the axis.
    pub fn map(&self, change: impl Fn(usize) -> usize) -> PaddedAxis {
        PaddedAxis {
            total: change(self.total),
            before: change(self.before),
            length: change(self.length),
            first: change(self.first),
            size: change(self.size),
        }
    }
}

/// A padded tensor, by axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Padded {
    /// What surrounds the source.
    pub mode: PadMode,
    /// The axes, outermost first.
    pub axes: Vec<PaddedAxis>,
}

impl Padded {
    /// Reads the input `repeats` of a `Tile` node: a tensor that wraps around itself.
    ///
    /// # Errors
    ///
    /// If there is not one number for each axis.
    pub fn of_tile(shape: &[usize], repeats: &[i64]) -> Result<Padded> {
        ensure!(
            repeats.len() == shape.len(),
            InvalidArgument,
            "repeats {repeats:?} do not have one value for each axis of shape {shape:?}"
        );
        let axes = shape.iter().zip(repeats).map(|(size, repeat)| {
            let total = size.saturating_mul(usize::try_from(*repeat).unwrap_or(0));
            PaddedAxis { total, before: 0, length: *size, first: 0, size: *size }
        });
        Ok(Padded { mode: PadMode::Wrap, axes: axes.collect() })
    }

    /// Refuses a result of another shape.
    pub fn check_result(&self, result: &[usize]) -> Result<()> {
        let fits = self.list(|axis| axis.total) == result;
        let from = self.list(|axis| axis.size);
        ensure!(
            fits,
            InvalidArgument,
            "a tensor of shape {from:?} cannot be cropped or padded to shape {result:?}"
        );
        Ok(())
    }

    /// Merges axes as far as the mode allows.
    #[must_use]
    pub fn merged(&self) -> Padded {
        let mut axes: Vec<PaddedAxis> = Vec::with_capacity(self.axes.len());
        for axis in &self.axes {
            match axes.last_mut() {
                // Elements of a plain inner axis move together, so all numbers of the outer axis
                // scale by its size.
                Some(last) if axis.is_plain() && (self.mode.pads_blocks() || last.is_plain()) => {
                    *last = last.map(|number| number.saturating_mul(axis.size));
                }
                _ => axes.push(*axis),
            }
        }
        Padded { mode: self.mode, axes }
    }

    /// Returns one number of each axis.
    pub fn list(&self, of: fn(&PaddedAxis) -> usize) -> Vec<usize> {
        self.axes.iter().map(of).collect()
    }

    /// The strides of the source, in elements.
    pub fn steps(&self) -> Vec<usize> {
        let strides = contiguous_strides(&self.list(|axis| axis.size));
        strides.iter().map(|stride| stride.unsigned_abs()).collect()
    }

    /// The index of the first element of the source that remains after cropping.
    pub fn start(&self) -> usize {
        let places = self.axes.iter().zip(self.steps());
        places.map(|(axis, step)| axis.first.saturating_mul(step)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_axes_merge_into_those_around_them() -> Result<()> {
        let merged = |pads: [[i64; 2]; 3], mode| {
            Ok::<_, crate::Error>(Pads { mode, amounts: pads.to_vec() }.on(&[2, 3, 4])?.merged().axes)
        };
        let one = merged([[1, 1], [0, 0], [0, 0]], PadMode::Constant)?;
        assert_eq!(one, [PaddedAxis { total: 48, before: 12, length: 24, first: 0, size: 24 }]);
        assert_eq!(merged([[1, 1], [0, 0], [0, 0]], PadMode::Edge)?.len(), 2);
        assert_eq!(merged([[0, 0], [0, 0], [1, 0]], PadMode::Reflect)?.len(), 2);
        assert!(merged([[0, 0], [0, 0], [-5, 0]], PadMode::Edge).is_err());
        Ok(())
    }
}
