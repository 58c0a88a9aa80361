//! Padding and cropping: `Pad` and `CenterCropPad`.

use ort_core::ep::{CompileCx, IoShapes};
use ort_core::ops::tensor::geometry::normalize_axes;
use ort_core::{Result, ensure, error};
use smallvec::smallvec;

use ort_cpu_threads::interrupt::spending;

use super::indexed::{AxisMap, copy_indexed, map_bytes};
use super::{Cell, Io, Movement, Operands, movement, only, operand};

movement!["CenterCropPad", make_center, unaligned: &[0]];
movement!["Pad", make_pad, unaligned: &[0]];

/// What fills the padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

struct Pad {
    mode: Mode,
}

struct CenterCropPad {
    axes: Option<Vec<i64>>,
}

fn make_pad(cx: &mut CompileCx<'_>) -> Result<Pad> {
    let mode = match cx.attrs().string("mode")? {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        other => return Err(error!(InvalidGraph, "the mode '{other}' is not known")),
    };
    Ok(Pad { mode })
}

fn make_center(cx: &mut CompileCx<'_>) -> Result<CenterCropPad> {
    Ok(CenterCropPad { axes: cx.attrs().find_ints("axes").map(<[i64]>::to_vec) })
}

/// Returns the map of one dimension. Negative pads crop first, and the mode applies to what
/// remains.
fn axis_map(size: usize, (begin, end): (i64, i64), mode: Mode) -> Result<AxisMap> {
    let invalid = || error!(InvalidArgument, "pads {begin} and {end} are out of range for size {size}");
    let cut = |pad: i64| usize::try_from(pad.min(0).unsigned_abs()).unwrap_or(usize::MAX);
    let added = |pad: i64| usize::try_from(pad.max(0)).map_err(|_| invalid());
    let first = cut(begin);
    let total = size as i128 + i128::from(begin) + i128::from(end);
    let total = usize::try_from(total).map_err(|_| invalid())?;
    let left = size.saturating_sub(first).saturating_sub(cut(end));
    ensure!(
        left > 0 || mode == Mode::Constant || total == 0,
        InvalidArgument,
        "size {size} has no elements to repeat"
    );
    let before = added(begin)?;
    let (last, length) = (left as i64 - 1, left as i64);
    let place = |index: usize| {
        let place = index as i64 - before as i64;
        let inside = (0..length).contains(&place);
        let place = match mode {
            _ if inside => place,
            Mode::Constant => return AxisMap::NONE,
            Mode::Edge => place.clamp(0, last),
            Mode::Wrap => place.rem_euclid(length),
            // A single element reflects to itself; the period below would be 0.
            Mode::Reflect if last == 0 => 0,
            Mode::Reflect => {
                let place = place.rem_euclid(2 * last);
                if place > last { 2 * last - place } else { place }
            }
        };
        first + place as usize
    };
    Ok(AxisMap::new(spending(2, 0..total).map(place).collect()))
}

fn padded<T: Cell>(
    io: &Io<'_>,
    from: &[&[T]],
    pads: &[(i64, i64)],
    (mode, fill): (Mode, T),
    to: &mut [Option<&mut [T]>],
) -> Result<()> {
    let (shape, to) = (io.shape(0)?, only(to)?);
    // Next to a size of 0, another size may be arbitrarily large, so build no maps.
    if to.is_empty() {
        return Ok(());
    }
    let maps: Vec<AxisMap> =
        shape.iter().zip(pads).map(|(&size, &pads)| axis_map(size, pads, mode)).collect::<Result<_>>()?;
    copy_indexed((shape, operand(from, 0, shape)?), &maps, fill, to, io.threads)
}

impl Movement for Pad {
    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        map_bytes(shapes.output(0))
    }

    fn operands(&self, _inputs: usize) -> Operands {
        smallvec![0, 2]
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let rank = io.shape(0)?.len();
        let given = io.input(1)?.to_ints()?;
        let axes = match io.ints(3)? {
            Some(axes) => normalize_axes(&axes, rank)?,
            None => (0..rank).collect(),
        };
        ensure!(
            given.len() == 2 * axes.len(),
            InvalidArgument,
            "{} pads are given for axes {axes:?}",
            given.len()
        );
        let mut pads = vec![(0, 0); rank];
        for (entry, &axis) in axes.iter().enumerate() {
            pads[axis] = (given[entry], given[axes.len() + entry]);
        }
        let fill = from.get(1).and_then(|value| value.first()).copied().unwrap_or(T::ZERO);
        padded(io, from, &pads, (self.mode, fill), to)
    }
}

impl Movement for CenterCropPad {
    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        map_bytes(shapes.output(0))
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let (shape, target) = (io.shape(0)?, io.input(1)?.to_ints()?);
        let axes = match &self.axes {
            Some(axes) => normalize_axes(axes, shape.len())?,
            None => (0..shape.len()).collect(),
        };
        ensure!(
            target.len() == axes.len(),
            InvalidArgument,
            "{} sizes are given for axes {axes:?}",
            target.len()
        );
        let mut pads = vec![(0, 0); shape.len()];
        for (&axis, &size) in axes.iter().zip(&target) {
            // Division truncates toward zero, so an odd element is cropped or added at the end.
            let difference = size.saturating_sub(shape[axis] as i64);
            pads[axis] = (difference / 2, difference - difference / 2);
        }
        padded(io, from, &pads, (Mode::Constant, T::ZERO), to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with `numpy.pad` of `[0, 1, 2]`, and for negative pads with ONNX Runtime, which
    /// crops first.
    #[test]
    fn maps_of_all_modes() -> Result<()> {
        const NONE: usize = AxisMap::NONE;
        let cases: [(Mode, (i64, i64), &[usize]); 9] = [
            (Mode::Constant, (1, 2), &[NONE, 0, 1, 2, NONE, NONE]),
            (Mode::Constant, (-1, 1), &[1, 2, NONE]),
            (Mode::Constant, (-4, 2), &[NONE]),
            (Mode::Edge, (2, 1), &[0, 0, 0, 1, 2, 2]),
            (Mode::Reflect, (2, 2), &[2, 1, 0, 1, 2, 1, 0]),
            (Mode::Reflect, (5, 0), &[1, 0, 1, 2, 1, 0, 1, 2]),
            (Mode::Wrap, (4, 1), &[2, 0, 1, 2, 0, 1, 2, 0]),
            (Mode::Reflect, (-1, 1), &[1, 2, 1]),
            (Mode::Edge, (0, -1), &[0, 1]),
        ];
        for (mode, pads, expected) in cases {
            assert_eq!(axis_map(3, pads, mode)?, AxisMap::new(expected.to_vec()), "{mode:?} {pads:?}");
        }
        assert!(axis_map(0, (1, 0), Mode::Edge).is_err());
        assert!(axis_map(1, (-3, 1), Mode::Constant).is_err());
        Ok(())
    }
}
