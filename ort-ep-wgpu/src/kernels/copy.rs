//! Copies between tensors of one type, both of which may be walked in any order.

use ort_core::dtype::DType;
use ort_core::ops::tensor::geometry::{Strided, contiguous_strides};
use ort_core::{Result, ensure, error};

use super::fill::{fill_places, per_word, stored};
use crate::launch::{Dispatch, OpCx, Operand, Walk};
use crate::shader::Shader;

/// Rows and columns of the squares in which planes are transposed.
const TILE: usize = 32;
/// Shorter rows and columns are not worth a square.
const LEAST_TILED: usize = 16;

/// All elements of a tensor of this shape in order.
pub(super) fn in_order(shape: &[usize]) -> Strided {
    Strided { sizes: shape.into(), strides: contiguous_strides(shape), offset: 0 }
}

/// The tensor as the bits of its elements, which are moved as they are.
pub(super) fn as_bits(tensor: &Operand) -> Operand {
    let dtype = match (tensor.dtype, tensor.dtype.bits()) {
        (_, Some(8)) => DType::U8,
        (_, Some(16)) => DType::U16,
        (_, Some(32)) => DType::U32,
        (dtype, _) => dtype,
    };
    Operand { dtype, ..tensor.clone() }
}

/// Sets all elements of `y` to those of `x` in an order.
pub(super) fn gather(cx: &OpCx<'_>, x: &Operand, order: &Strided, y: &Operand) -> Result<Vec<Dispatch>> {
    ensure!(order.count() == y.count(), Fail, "{} elements moved to {}", order.count(), y.count());
    copy(cx, (x, order), (y, &in_order(&order.sizes)))
}

/// Sets the elements of `y` in one order to those of `x` in another of the same sizes. The order of
/// `y` visits no element twice.
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
    let own = Walk::new(&to.sizes, std::slice::from_ref(&y_steps));
    let dense = own.steps.iter().all(|steps| matches!(steps.as_slice(), [] | [1]));
    let moved = Moved {
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

/// A copy over a common walk.
struct Moved {
    x: Operand,
    y: Operand,
    starts: (usize, usize),
    walk: Walk,
    /// Whether the walk visits the elements of `y` one after another.
    dense: bool,
}

/// Two axes of a walk: along the rows neighbours are neighbours in `x`, along the columns in `y`.
#[derive(Clone, Copy)]
struct Plane {
    rows: usize,
    columns: usize,
}

impl Moved {
    /// The size and the steps of an axis.
    fn axis(&self, axis: usize) -> Option<(usize, i64, i64)> {
        let step = |steps: &Vec<i64>| steps.get(axis).copied();
        Some((*self.walk.sizes.get(axis)?, step(self.walk.steps.first()?)?, step(self.walk.steps.get(1)?)?))
    }

    /// The axes that are transposed, where squares of them are worth it.
    fn plane(&self) -> Option<Plane> {
        let find = |wanted: fn((usize, i64, i64)) -> bool| {
            (0..self.walk.sizes.len()).find(|axis| self.axis(*axis).is_some_and(wanted))
        };
        let rows = find(|(size, x, y)| size >= LEAST_TILED && x == 1 && y != 1)?;
        let columns = find(|(size, x, y)| size >= LEAST_TILED && y == 1 && x != 1 && x != 0)?;
        Some(Plane { rows, columns })
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

    /// Whether the elements of a word of `y` follow each other in the walk.
    fn in_words(&self) -> Result<bool> {
        let per_word = per_word(self.y.dtype)?;
        let run = self.walk.sizes.last().copied().unwrap_or(1);
        let step = self.walk.steps.get(1).and_then(|steps| steps.last().copied());
        Ok(per_word == 1 || (step == Some(1) && run % per_word == 0))
    }

    /// Squares go through the memory of a workgroup, so that neighbours read and write neighbours.
    fn transposed(&self, cx: &OpCx<'_>, plane: Plane) -> Result<Dispatch> {
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
