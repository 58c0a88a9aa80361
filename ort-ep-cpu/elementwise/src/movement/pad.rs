//! Padding and cropping: `Pad` and `CenterCropPad`.

use ort_core::Result;
use ort_core::ep::{CompileCx, IoShapes};
use ort_core::ops::tensor::problem::{PadMode, PaddedAxis, Pads};
use smallvec::smallvec;

use ort_cpu_threads::interrupt::spending;

use super::indexed::{AxisMap, copy_indexed, map_bytes};
use super::{Cell, Io, Movement, Operands, movement, only, operand};

movement!["CenterCropPad", make_center, unaligned: &[0]];
movement!["Pad", make_pad, unaligned: &[0]];

struct Pad {
    mode: PadMode,
}

struct CenterCropPad {
    axes: Option<Vec<i64>>,
}

fn make_pad(cx: &mut CompileCx<'_>) -> Result<Pad> {
    Ok(Pad { mode: PadMode::of(cx.attrs())? })
}

fn make_center(cx: &mut CompileCx<'_>) -> Result<CenterCropPad> {
    Ok(CenterCropPad { axes: cx.attrs().find_ints("axes").map(<[i64]>::to_vec) })
}

/// Returns the map of one dimension.
fn axis_map(axis: PaddedAxis, mode: PadMode) -> AxisMap {
    let PaddedAxis { total, before, first, .. } = axis;
    let (last, length) = (axis.length as i64 - 1, axis.length as i64);
    let place = |index: usize| {
        let place = index as i64 - before as i64;
        let inside = (0..length).contains(&place);
        let place = match mode {
            _ if inside => place,
            PadMode::Constant => return AxisMap::NONE,
            PadMode::Edge => place.clamp(0, last),
            PadMode::Wrap => place.rem_euclid(length),
            // Without the borders. `PaddedAxis` has refused reflections of more than there is.
            PadMode::Reflect if place < 0 => -place,
            PadMode::Reflect => 2 * last - place,
        };
        first + place as usize
    };
    AxisMap::new(spending(2, 0..total).map(place).collect())
}

fn padded<T: Cell>(
    io: &Io<'_>,
    from: &[&[T]],
    pads: &Pads,
    fill: T,
    to: &mut [Option<&mut [T]>],
) -> Result<()> {
    let (shape, to) = (io.shape(0)?, only(to)?);
    // Next to a size of 0, another size may be arbitrarily large, so build no maps.
    if to.is_empty() {
        return Ok(());
    }
    let axes = shape.iter().zip(&pads.amounts);
    let axes = axes.map(|(&size, &own)| PaddedAxis::new(size, own, pads.mode));
    let maps: Vec<AxisMap> = axes.map(|axis| Ok(axis_map(axis?, pads.mode))).collect::<Result<_>>()?;
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
        let (given, axes) = (io.input(1)?.to_ints()?, io.ints(3)?);
        let pads = Pads::new(self.mode, &given, axes.as_deref(), io.shape(0)?.len())?;
        let fill = from.get(1).and_then(|value| value.first()).copied().unwrap_or(T::ZERO);
        padded(io, from, &pads, fill, to)
    }
}

impl Movement for CenterCropPad {
    fn heap(&self, shapes: &IoShapes<'_>) -> usize {
        map_bytes(shapes.output(0))
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let target = io.input(1)?.to_ints()?;
        let pads = Pads::of_center_crop(self.axes.as_deref(), io.shape(0)?, &target)?;
        padded(io, from, &pads, T::ZERO, to)
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
        let cases: [(PadMode, [i64; 2], &[usize]); 8] = [
            (PadMode::Constant, [1, 2], &[NONE, 0, 1, 2, NONE, NONE]),
            (PadMode::Constant, [-1, 1], &[1, 2, NONE]),
            (PadMode::Constant, [-4, 2], &[NONE]),
            (PadMode::Edge, [2, 1], &[0, 0, 0, 1, 2, 2]),
            (PadMode::Reflect, [2, 2], &[2, 1, 0, 1, 2, 1, 0]),
            (PadMode::Wrap, [4, 1], &[2, 0, 1, 2, 0, 1, 2, 0]),
            (PadMode::Reflect, [-1, 1], &[1, 2, 1]),
            (PadMode::Edge, [0, -1], &[0, 1]),
        ];
        for (mode, pads, expected) in cases {
            let map = axis_map(PaddedAxis::new(3, pads, mode)?, mode);
            assert_eq!(map, AxisMap::new(expected.to_vec()), "{mode:?} {pads:?}");
        }
        assert!(PaddedAxis::new(0, [1, 0], PadMode::Edge).is_err());
        assert!(PaddedAxis::new(3, [3, 0], PadMode::Reflect).is_err());
        assert!(PaddedAxis::new(3, [-1, 2], PadMode::Reflect).is_err());
        assert!(PaddedAxis::new(1, [0, 1], PadMode::Reflect).is_err());
        assert!(PaddedAxis::new(1, [-3, 1], PadMode::Constant).is_err());
        Ok(())
    }
}
