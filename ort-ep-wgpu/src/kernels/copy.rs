//! Strided copies between tensors of one element type.
//!
//! Transpositions go through workgroup memory in tiles; every other copy maps one invocation to an
//! element or a word.

use ort_core::dtype::DType;
use ort_core::ops::tensor::geometry::Strided;
use ort_core::{Result, ensure, error};

use super::fill::{fill_places, per_word, stored};
use crate::launch::{Dispatch, OpCx, Operand, Walk};
use crate::shader::Shader;

/// The side of the tiles of a transposition.
const TILE: usize = 32;
/// The shortest rows and columns that are worth a tile.
const LEAST_TILED: usize = 16;

/// The tensor as an unsigned type of the same width, so that copies keep the bits.
pub(super) fn as_bits(tensor: &Operand) -> Operand {
    let dtype = match (tensor.dtype, tensor.dtype.bits()) {
        (_, Some(8)) => DType::U8,
        (_, Some(16)) => DType::U16,
        (_, Some(32)) => DType::U32,
        (dtype, _) => dtype,
    };
    Operand { dtype, ..tensor.clone() }
}

/// Copies the elements of `x`, read in an order, to `y`.
pub(super) fn gather(cx: &OpCx<'_>, x: &Operand, order: &Strided, y: &Operand) -> Result<Vec<Dispatch>> {
    ensure!(order.count() == y.count(), Fail, "{} elements moved to {}", order.count(), y.count());
    copy(cx, (x, order), (y, &Strided::contiguous(&order.sizes)))
}

/// Copies elements of `x`, read in one order, to elements of `y`, written in another. Both orders
/// have the same sizes, and that of `y` visits no element twice.
pub(super) fn copy(
    cx: &OpCx<'_>,
    (x, from): (&Operand, &Strided),
    (y, to): (&Operand, &Strided),
) -> Result<Vec<Dispatch>> {
    ensure!(from.sizes == to.sizes, Fail, "{:?} is copied to {:?}", from.sizes, to.sizes);
    ensure!(from.fits(x.count()) && to.fits(y.count()), Fail, "a copy leaves its tensors");
    if from.sizes.contains(&0) {
        return Ok(Vec::new());
    }
    let steps = |order: &Strided| order.strides.iter().map(|step| *step as i64).collect::<Vec<i64>>();
    let (x_steps, y_steps) = (steps(from), steps(to));
    // Merged by the steps of `y` alone: a single axis of step 1 means that `y` is written densely.
    let own = Walk::new(&to.sizes, std::slice::from_ref(&y_steps));
    let dense = own.steps.iter().all(|steps| matches!(steps.as_slice(), [] | [1]));
    let moved = StridedCopy {
        x: as_bits(x),
        y: as_bits(y),
        starts: (from.offset, to.offset),
        walk: Walk::new(&from.sizes, &[x_steps, y_steps]),
        dense,
    };
    let dispatch = match moved.plane() {
        Some(plane) => moved.transposed(cx, plane)?,
        None => moved.by_elements(cx)?,
    };
    Ok(vec![dispatch])
}

/// A copy over a loop nest that both tensors share.
struct StridedCopy {
    x: Operand,
    y: Operand,
    starts: (usize, usize),
    walk: Walk,
    /// Whether the walk visits the elements of `y` in memory order.
    dense: bool,
}

/// The two axes of a transposition. Along `rows` elements are contiguous in `x`, along `columns` in
/// `y`.
#[derive(Clone, Copy)]
struct TransposedAxes {
    rows: usize,
    columns: usize,
}

impl StridedCopy {
    /// The size of an axis, and its steps in `x` and `y`.
    fn axis(&self, axis: usize) -> Option<(usize, i64, i64)> {
        let step = |steps: &Vec<i64>| steps.get(axis).copied();
        Some((*self.walk.sizes.get(axis)?, step(self.walk.steps.first()?)?, step(self.walk.steps.get(1)?)?))
    }

    /// The axes to transpose, if tiles are worth it.
    fn plane(&self) -> Option<TransposedAxes> {
        let find = |wanted: fn((usize, i64, i64)) -> bool| {
            (0..self.walk.sizes.len()).find(|axis| self.axis(*axis).is_some_and(wanted))
        };
        let rows = find(|(size, x, y)| size >= LEAST_TILED && x == 1 && y != 1)?;
        // A broadcast axis (step 0) reads the same elements again, so tiles would not help.
        let columns = find(|(size, x, y)| size >= LEAST_TILED && y == 1 && x != 1 && x != 0)?;
        Some(TransposedAxes { rows, columns })
    }

    fn shader(&self, cx: &OpCx<'_>) -> Shader {
        let shader = Shader::new(cx).read("x", &self.x).write("y", &self.y);
        shader.number("x_start", self.starts.0).number("y_start", self.starts.1)
    }

    fn by_elements(&self, cx: &OpCx<'_>) -> Result<Dispatch> {
        let count = self.walk.sizes.iter().product();
        let value = "fn value(i: u32) -> y_t { return x(p.x_start + at_x(i)); }";
        if self.dense {
            let code = format!("fn place(i: u32) -> u32 {{ return p.y_start + i; }}\n{value}");
            return fill_places(self.shader(cx).walk(&self.walk, &["x"]), &self.y, count, &code);
        }
        let shader = self.shader(cx).walk(&self.walk, &["x", "y"]);
        let place = "fn place(i: u32) -> u32 { return p.y_start + at_y(i); }";
        if self.in_words()? {
            return fill_places(shader, &self.y, count, &format!("{place}\n{value}"));
        }
        let code = format!("{place}\n{value}\nfn element(i: u32) {{ set_y(place(i), value(i)); }}");
        shader.each(count, &code)
    }

    /// Whether the elements of each word of `y` are consecutive in the walk.
    fn in_words(&self) -> Result<bool> {
        let per_word = per_word(self.y.dtype)?;
        let run = self.walk.sizes.last().copied().unwrap_or(1);
        let step = self.walk.steps.get(1).and_then(|steps| steps.last().copied());
        Ok(per_word == 1 || (step == Some(1) && run % per_word == 0))
    }

    /// Transposes tiles through workgroup memory, so that both reads and writes are coalesced.
    fn transposed(&self, cx: &OpCx<'_>, plane: TransposedAxes) -> Result<Dispatch> {
        let missing = || error!(Fail, "a plane has no axes");
        let (rows, _, y_row) = self.axis(plane.rows).ok_or_else(missing)?;
        let (columns, x_column, _) = self.axis(plane.columns).ok_or_else(missing)?;
        let kept = |axis: &usize| *axis != plane.rows && *axis != plane.columns;
        let batch: Vec<(usize, i64, i64)> =
            (0..self.walk.sizes.len()).filter(kept).filter_map(|axis| self.axis(axis)).collect();
        let sizes: Vec<usize> = batch.iter().map(|(size, ..)| *size).collect();
        let steps = [batch.iter().map(|(_, x, _)| *x).collect(), batch.iter().map(|(.., y)| *y).collect()];
        let count = sizes.iter().fold(rows.div_ceil(TILE), |count, size| count.saturating_mul(*size));
        let shader = self.shader(cx).walk(&Walk { sizes, steps: steps.into() }, &["x", "y"]);
        let shader = shader.number("rows", rows).number("columns", columns);
        let shader = shader.integer("x_column", x_column).integer("y_row", y_row);
        let shader = shader.constant("PER_WORD", per_word(self.y.dtype)?);
        let stored = stored(self.y.dtype, "tile[c + n][r]")?;
        let code = include_str!("transpose.wgsl").replace("// stored\n", &stored);
        shader.groups(count.saturating_mul(columns.div_ceil(TILE)), 256, &code)
    }
}
