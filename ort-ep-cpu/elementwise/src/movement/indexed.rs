//! Copies by per-dimension index maps, shared by `Pad`, `CenterCropPad` and nearest-neighbour
//! `Resize`.

use std::ops::Range;

use ort_core::ops::tensor::geometry::contiguous_strides;
use ort_core::{Result, ensure};

use ort_cpu_threads::interrupt::{self, PIECE, pieces, pieces_mut, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::Cell;

/// For each output index along a dimension, the source index or [`AxisMap::NONE`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct AxisMap {
    places: Vec<usize>,
    /// The longest run of consecutive source indices.
    run: Range<usize>,
}

impl AxisMap {
    /// No source element: the fill value applies.
    pub(super) const NONE: usize = usize::MAX;

    pub(super) fn new(places: Vec<usize>) -> AxisMap {
        let (mut run, mut start) = (0..0, 0);
        for index in spending(2, 0..places.len()) {
            let goes_on =
                index > 0 && places[index - 1] != Self::NONE && places[index] == places[index - 1] + 1;
            if !goes_on {
                start = index;
            }
            if places[index] != Self::NONE && index + 1 - start > run.len() {
                run = start..index + 1;
            }
        }
        AxisMap { places, run }
    }

    fn fits(&self, size: usize) -> bool {
        pieces(&self.places).flatten().all(|&place| place < size || place == Self::NONE)
    }
}

/// Returns the bytes of the maps of all dimensions of an output.
pub(super) fn map_bytes(shape: &[usize]) -> usize {
    if shape.contains(&0) {
        // An empty output builds no maps.
        return 0;
    }
    shape.iter().fold(0, |sum: usize, size| sum.saturating_add(size.saturating_mul(size_of::<usize>())))
}

/// Fills `to` with the elements of `from`, of shape `shape`, that the maps select.
pub(super) fn copy_indexed<T: Cell>(
    (shape, from): (&[usize], &[T]),
    maps: &[AxisMap],
    fill: T,
    to: &mut [T],
    threads: usize,
) -> Result<()> {
    let count: usize = maps.iter().map(|map| map.places.len()).product();
    // Once for all rows, so that every place below is inside of the source.
    let inside = shape.len() == maps.len() && maps.iter().zip(shape).all(|(map, &size)| map.fits(size));
    let whole = from.len() == shape.iter().product::<usize>();
    ensure!(inside && whole && to.len() == count, Fail, "indices outside of shape {shape:?}");
    let Some((last, outer)) = maps.split_last() else {
        to.copy_from_slice(from);
        return Ok(());
    };
    let strides = contiguous_strides(shape);
    let row = last.places.len();
    let least_rows = ((64 << 10) / (row * size_of::<T>()).max(1)).max(1);
    for_each_row_chunk_mut(threads, to, row, least_rows, |first, rows| {
        let mut before = None;
        for index in 0..rows.len() / row {
            let base = base_of(outer, &strides, first + index);
            // Rows above are finished, so the row before can be read while this one is written.
            let (done, rest) = rows.split_at_mut(index * row);
            let target = &mut rest[..row];
            match base {
                None => interrupt::fill(target, fill),
                // Upsampling repeats rows, so copy the previous one.
                Some(_) if before == Some(base) => interrupt::copy(&done[(index - 1) * row..], target),
                Some(base) => copy_row(&from[base..], last, fill, target),
            }
            before = Some(base);
        }
    });
    Ok(())
}

/// Returns the source element at which a row starts; `None` for a row of fill values.
fn base_of(outer: &[AxisMap], strides: &[isize], row: usize) -> Option<usize> {
    let (mut rest, mut base) = (row, 0);
    for (map, &stride) in outer.iter().zip(strides).rev() {
        let place = map.places[rest % map.places.len()];
        if place == AxisMap::NONE {
            return None;
        }
        base += place * stride as usize;
        rest /= map.places.len();
    }
    Some(base)
}

fn copy_row<T: Cell>(from: &[T], map: &AxisMap, fill: T, row: &mut [T]) {
    let pick = |cells: &mut [T], places: &[usize]| {
        for (cells, places) in pieces_mut(cells).zip(places.chunks(PIECE)) {
            for (cell, &place) in cells.iter_mut().zip(places) {
                *cell = if place == AxisMap::NONE { fill } else { from[place] };
            }
        }
    };
    // Short runs are not worth a separate copy.
    if map.run.len() < 8 {
        pick(row, &map.places);
        return;
    }
    let Range { start, end } = map.run;
    pick(&mut row[..start], &map.places[..start]);
    interrupt::copy(&from[map.places[start]..][..end - start], &mut row[start..end]);
    pick(&mut row[end..], &map.places[end..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_found() {
        let none = AxisMap::NONE;
        let cases = [
            (vec![none, none, 0, 1, 2, none], 2..5),
            (vec![2, 1, 0, 1, 2, 3, 2], 2..6),
            (vec![0, 0, 1, 1], 1..3),
            (vec![none], 0..0),
            (vec![], 0..0),
        ];
        for (places, run) in cases {
            assert_eq!(AxisMap::new(places.clone()).run, run, "{places:?}");
        }
    }
}
