//! Weights that are quantized while the file is written, one at a time.

use half::f16;
use ort_core::dtype::{DType, Element};
use ort_core::onnx::proto::TensorProto;
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result};

use crate::grid::{BlockQuantizer, QuantizedBlocks};
use crate::linear::LinearQuantizer;
use crate::weight::Weight;

/// What a weight becomes. The sizes of the results are known before their elements.
#[derive(Clone, Debug)]
pub(super) enum Form {
    /// Scales, zero points and codes.
    Linear(LinearQuantizer),
    /// Codes, scales, and zero points unless they are symmetric.
    Blocks(BlockQuantizer),
}

/// A weight to quantize.
#[derive(Clone, Debug)]
pub(super) struct Job {
    /// The float initializer, whose data usually lies in a mapped file.
    pub(super) weight: TensorProto,
    /// Whether the matrix is transposed first.
    pub(super) is_transposed: bool,
    /// Its shape after that.
    pub(super) shape: Vec<usize>,
    /// Whether it is float16.
    pub(super) is_half: bool,
    /// Whether one zero point stands for those of all channels, which are equal.
    pub(super) has_one_point: bool,
    pub(super) form: Form,
}

impl Job {
    /// The bytes of each result.
    pub(super) fn lengths(&self) -> Result<Vec<usize>> {
        let element = if self.is_half { 2 } else { 4 };
        Ok(match &self.form {
            Form::Linear(quantizer) => {
                let ty = quantizer.grid.ty;
                let grids = quantizer.axis.map_or(1, |axis| self.shape.get(axis).copied().unwrap_or(1));
                let points = if self.has_one_point { 1 } else { grids };
                vec![grids * element, ty.byte_count(points), ty.byte_count(self.shape.iter().product())]
            }
            Form::Blocks(quantizer) => {
                let sizes = quantizer.sizes()?;
                let mut lengths = vec![sizes.codes, sizes.scales * element];
                lengths.extend((!quantizer.is_symmetric).then_some(sizes.zero_points));
                lengths
            }
        })
    }

    /// Quantizes the weight.
    pub(super) fn run(&self, weight: &Tensor) -> Result<Vec<Vec<u8>>> {
        match weight.dtype() {
            DType::F32 => self.run_as::<f32>(weight),
            DType::F16 => self.run_as::<f16>(weight),
            other => {
                let text = format!("a weight of {other} cannot be quantized");
                Err(Error::new(ErrorKind::NotImplemented, text))
            }
        }
    }

    fn run_as<T: Weight + Element>(&self, weight: &Tensor) -> Result<Vec<Vec<u8>>> {
        let view = weight.view();
        let elements = view.to_cow::<T>()?;
        match &self.form {
            Form::Linear(quantizer) => {
                let transposed;
                let elements = if self.is_transposed {
                    transposed = transpose(&elements, &self.shape);
                    &transposed[..]
                } else {
                    &elements[..]
                };
                let done = quantizer.quantize(elements, &self.shape)?;
                let scales = done.scale_bytes(self.is_half);
                let mut zero_points = done.zero_point_bytes(&quantizer.grid);
                if self.has_one_point {
                    zero_points.truncate(quantizer.grid.ty.byte_count(1));
                }
                Ok(vec![scales, zero_points, done.codes])
            }
            Form::Blocks(quantizer) if self.is_transposed => self.run_rows(quantizer, &elements),
            Form::Blocks(quantizer) => blocks(quantizer, &elements),
        }
    }

    /// Quantizes a matrix of which each row is a column of the product's, a few rows at a time, so
    /// that not all of it is transposed at once.
    fn run_rows<T: Weight>(&self, quantizer: &BlockQuantizer, elements: &[T]) -> Result<Vec<Vec<u8>>> {
        let rows = (ROWS_AT_ONCE / quantizer.k.max(1)).max(1);
        let mut results: Vec<Vec<u8>> = self.lengths()?.into_iter().map(Vec::with_capacity).collect();
        for part in elements.chunks(rows.saturating_mul(quantizer.k).max(1)) {
            let n = part.len() / quantizer.k.max(1);
            let part = transpose(part, &[quantizer.k, n]);
            let done = blocks(&BlockQuantizer { n, ..*quantizer }, &part)?;
            results.iter_mut().zip(done).for_each(|(result, part)| result.extend(part));
        }
        Ok(results)
    }
}

/// The elements of a matrix that are transposed at once.
const ROWS_AT_ONCE: usize = 1 << 20;

/// Quantizes a matrix in blocks of its columns.
fn blocks<T: Weight>(quantizer: &BlockQuantizer, elements: &[T]) -> Result<Vec<Vec<u8>>> {
    check_finite(elements)?;
    let sizes = quantizer.sizes()?;
    let (mut codes, mut zero_points) = (vec![0; sizes.codes], vec![0; sizes.zero_points]);
    let mut scales = vec![T::narrow(0.0); sizes.scales];
    let out = QuantizedBlocks { codes: &mut codes, scales: &mut scales, zero_points: &mut zero_points };
    quantizer.quantize(elements, out)?;
    let mut results = vec![codes, T::bytes(&scales)];
    results.extend((!quantizer.is_symmetric).then_some(zero_points));
    Ok(results)
}

/// Transposes a matrix to this shape, by tiles that stay in the cache.
fn transpose<T: Copy>(elements: &[T], shape: &[usize]) -> Vec<T> {
    const TILE: usize = 32;
    let [rows, columns] = *shape else { return elements.to_vec() };
    let Some(first) = elements.first() else { return Vec::new() };
    let mut transposed = vec![*first; elements.len()];
    for row_tile in (0..rows).step_by(TILE) {
        for column_tile in (0..columns).step_by(TILE) {
            for row in row_tile..(row_tile + TILE).min(rows) {
                for column in column_tile..(column_tile + TILE).min(columns) {
                    let from = elements.get(column * rows + row);
                    if let (Some(to), Some(from)) = (transposed.get_mut(row * columns + column), from) {
                        *to = *from;
                    }
                }
            }
        }
    }
    transposed
}

fn check_finite<T: Weight>(elements: &[T]) -> Result<()> {
    match elements.iter().find(|element| !element.wide().is_finite()) {
        Some(element) => {
            let text = format!("an element is {}", element.wide());
            Err(Error::new(ErrorKind::InvalidArgument, text).help("exclude the node that reads it"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_make_a_transposed_matrix() {
        let (rows, columns) = (70, 33);
        let given: Vec<usize> = (0..rows * columns).collect();
        let found = transpose(&given, &[rows, columns]);
        for row in 0..rows {
            for column in 0..columns {
                assert_eq!(found[row * columns + column], given[column * rows + row]);
            }
        }
        assert!(transpose::<u8>(&[], &[0, 3]).is_empty());
    }
}
