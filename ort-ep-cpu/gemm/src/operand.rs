//! GEMM operands: strided, packed ahead of time, or virtual (im2col, quantized).

use std::ops::Range;

use super::blocks::Blocks;
use super::im2col::Im2col;
use super::kernels::Kernel;
use super::matrix::check_extent;
pub(super) use super::matrix::{Strided, Weight};
use super::quantized::QuantizedMatrix;
use super::{Cpu, GemmError};
use ort_cpu_threads::parallel::for_each_chunk_mut;

/// A packed A: panels of a tile's height, for one instruction set and precision.
#[derive(Clone, Copy, Debug)]
pub struct PackedLhs<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) height: usize,
    /// k steps per element.
    pub(super) terms: usize,
    /// Rows of the whole packed matrix, which determine the panel height.
    pub(super) of: usize,
}

impl<'a> PackedLhs<'a> {
    /// Returns the length of a packed matrix of `rows` by `k`.
    pub fn len(cpu: Cpu, rows: usize, k: usize) -> usize {
        let kernel = Kernel::of(cpu);
        rows.next_multiple_of(kernel.height(rows)) * kernel.elements(k)
    }

    /// Wraps what [`pack_lhs`] wrote.
    ///
    /// # Errors
    ///
    /// If `values` is shorter than [`PackedLhs::len`].
    pub fn new(cpu: Cpu, values: &'a [f32], rows: usize, k: usize) -> Result<Self, GemmError> {
        let needed = PackedLhs::len(cpu, rows, k);
        if values.len() < needed {
            return Err(GemmError::TooShort { what: "a packed A", needed, len: values.len() });
        }
        let kernel = Kernel::of(cpu);
        // The layout is kept with the matrix, so that `run` can refuse one of another kernel.
        Ok(PackedLhs { values, rows, k, height: kernel.height(rows), terms: kernel.terms(), of: rows })
    }

    /// Returns the panel height of a matrix of `rows`.
    pub fn height_of(cpu: Cpu, rows: usize) -> usize {
        Kernel::of(cpu).height(rows)
    }

    /// Rows of a panel.
    pub fn height(&self) -> usize {
        self.height
    }

    /// Returns some of the panels as an A of fewer rows.
    pub fn panels(self, panels: Range<usize>) -> Self {
        let all = self.rows.div_ceil(self.height);
        let [first, end] = [panels.start, panels.end].map(|panel| panel.min(all));
        // A panel holds whole elements: with an odd k, the last pair is half empty.
        let len = self.k.div_ceil(self.terms) * self.height;
        let rows = (end * self.height).min(self.rows).saturating_sub(first * self.height);
        PackedLhs { values: &self.values[first * len..], rows, ..self }
    }
}

/// A packed B: panels of a tile's width, for one instruction set and precision.
#[derive(Clone, Copy, Debug)]
pub struct PackedRhs<'a> {
    pub(super) values: &'a [f32],
    pub(super) k: usize,
    pub(super) columns: usize,
    pub(super) width: usize,
    /// k steps per element.
    pub(super) terms: usize,
}

impl<'a> PackedRhs<'a> {
    /// Returns the length of a packed matrix of `k` by `columns`.
    pub fn len(cpu: Cpu, k: usize, columns: usize) -> usize {
        let kernel = Kernel::of(cpu);
        columns.next_multiple_of(kernel.width()) * kernel.elements(k)
    }

    /// Wraps what [`pack_rhs`] wrote.
    ///
    /// # Errors
    ///
    /// If `values` is shorter than [`PackedRhs::len`].
    pub fn new(cpu: Cpu, values: &'a [f32], k: usize, columns: usize) -> Result<Self, GemmError> {
        let needed = PackedRhs::len(cpu, k, columns);
        if values.len() < needed {
            return Err(GemmError::TooShort { what: "a packed B", needed, len: values.len() });
        }
        let kernel = Kernel::of(cpu);
        Ok(PackedRhs { values, k, columns, width: kernel.width(), terms: kernel.terms() })
    }
}

/// Packs an A of `shape` (rows, k) into `packed`, which has the length [`PackedLhs::len`].
///
/// # Errors
///
/// If either slice is too short.
pub fn pack_lhs<T: Weight>(
    cpu: Cpu,
    values: &[T],
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let [rows, k] = shape;
    check_extent("a matrix", values.len(), shape, strides)?;
    PackedLhs::new(cpu, packed, rows, k)?;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(rows);
    let packed = &mut packed[..PackedLhs::len(cpu, rows, k)];
    for_each_chunk_mut(cpu.threads, packed, (height * kernel.elements(k)).max(1), |panel, to| {
        // Panels are contiguous in the packed matrix, so threads write disjoint memory.
        kernel.pack_lhs_panel(values, [rows, k], strides, panel * height, to);
    });
    Ok(())
}

/// [`pack_lhs`] for a matrix whose element (i, j) is `values[i * row_stride + place(j)]`. Every
/// index must be inside `values`.
///
/// # Errors
///
/// If `packed` is too short.
pub fn pack_lhs_by<T: Weight>(
    cpu: Cpu,
    values: &[T],
    [rows, k]: [usize; 2],
    (row_stride, place): (usize, impl Fn(usize) -> usize + Sync),
    packed: &mut [f32],
) -> Result<(), GemmError> {
    PackedLhs::new(cpu, packed, rows, k)?;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(rows);
    let packed = &mut packed[..PackedLhs::len(cpu, rows, k)];
    for_each_chunk_mut(cpu.threads, packed, (height * kernel.elements(k)).max(1), |panel, to| {
        kernel.pack_lhs_panel_by(values, [rows, k], (row_stride, &place), panel * height, to);
    });
    Ok(())
}

/// Packs a B of `shape` (k, columns) into `packed`, which has the length [`PackedRhs::len`].
///
/// # Errors
///
/// If either slice is too short.
pub fn pack_rhs<T: Weight>(
    cpu: Cpu,
    values: &[T],
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    pack_rhs_in_parts(cpu, values, shape, strides, packed, &|_| ())
}

/// [`pack_rhs`] from one end of `values` to the other: `done` is called with the range of each
/// part, a few MiB, that has been read for good.
///
/// # Errors
///
/// If either slice is too short.
pub fn pack_rhs_in_parts<T: Weight>(
    cpu: Cpu,
    values: &[T],
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
    done: &dyn Fn(Range<usize>),
) -> Result<(), GemmError> {
    let ([k, columns], [row_stride, column_stride]) = (shape, strides);
    check_extent("a matrix", values.len(), shape, strides)?;
    PackedRhs::new(cpu, packed, k, columns)?;
    let (kernel, packed) = (Kernel::of(cpu), &mut packed[..PackedRhs::len(cpu, k, columns)]);
    let width = kernel.width();
    let panel_len = (width * kernel.elements(k)).max(1);
    if row_stride >= column_stride {
        // The rows follow each other in `values`, so each part is some k steps of all panels.
        let steps = part_len(row_stride).next_multiple_of(kernel.terms());
        for start in (0..k).step_by(steps) {
            let end = (start + steps).min(k);
            let part = kernel.elements(start) * width..kernel.elements(end) * width;
            let from = values.get(start * row_stride..).unwrap_or(&[]);
            for_each_chunk_mut(cpu.threads, packed, panel_len, |panel, to| {
                let to = &mut to[part.clone()];
                kernel.pack_rhs_panel(from, [end - start, columns], strides, panel * width, to);
            });
            done(start * row_stride..(end * row_stride).min(values.len()));
        }
        return Ok(());
    }
    let panels = part_len(column_stride * width);
    for (part, to) in packed.chunks_mut(panels * panel_len).enumerate() {
        let first = part * panels * width;
        let end = (first + panels * width).min(columns);
        for_each_chunk_mut(cpu.threads, to, panel_len, |panel, to| {
            kernel.pack_rhs_panel(values, shape, strides, first + panel * width, to);
        });
        done(first * column_stride..(end * column_stride).min(values.len()));
    }
    Ok(())
}

/// Returns how many rows, columns or panels of `stride` elements are a part of a matrix.
fn part_len(stride: usize) -> usize {
    /// Elements in a part: 4 MiB of floats.
    const PART: usize = 1 << 20;
    (PART / stride.max(1)).max(1)
}

/// The left operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub enum LhsOperand<'a> {
    /// Read in place.
    Plain(Strided<'a>),
    /// Packed ahead of time.
    Packed(PackedLhs<'a>),
}

impl LhsOperand<'_> {
    /// Returns rows and k.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            LhsOperand::Plain(matrix) => [matrix.rows, matrix.columns],
            LhsOperand::Packed(packed) => [packed.rows, packed.k],
        }
    }

    /// Rows of a tile.
    pub(super) fn height(&self, kernel: &Kernel) -> usize {
        match self {
            LhsOperand::Plain(matrix) => kernel.height(matrix.rows),
            LhsOperand::Packed(packed) => packed.height,
        }
    }

    /// Whether GEMM reads it without converting it first.
    pub(super) fn is_ready(&self, kernel: &Kernel) -> bool {
        match self {
            // A bf16 kernel reads pairs, so an `f32` matrix is converted block by block.
            LhsOperand::Plain(matrix) => matrix.terms == kernel.terms(),
            LhsOperand::Packed(_) => true,
        }
    }
}

/// The right operand of a GEMM.
#[derive(Clone, Copy, Debug)]
pub enum RhsOperand<'a> {
    /// Read in place, or packed block by block into the workspace.
    Plain(Strided<'a>),
    /// Packed ahead of time.
    Packed(PackedRhs<'a>),
    /// The im2col matrix of a convolution, packed block by block from the image.
    Im2col(Im2col<'a>),
    /// Block-quantized weights, dequantized block by block.
    Blocks(Blocks<'a>),
    /// A quantized matrix, dequantized panel by panel.
    Quantized(QuantizedMatrix<'a>),
}

impl RhsOperand<'_> {
    /// Returns k and columns.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            RhsOperand::Plain(matrix) => [matrix.rows, matrix.columns],
            RhsOperand::Packed(packed) => [packed.k, packed.columns],
            RhsOperand::Im2col(windows) => [windows.rows(), windows.columns()],
            RhsOperand::Blocks(blocks) => blocks.shape(),
            RhsOperand::Quantized(matrix) => matrix.shape(),
        }
    }

    /// Returns the kind of storage, on which the workspace size depends.
    pub fn source(&self) -> RhsSource {
        match self {
            // The stride of a single column is never used.
            RhsOperand::Plain(matrix) if matrix.column_stride == 1 || matrix.columns <= 1 => RhsSource::Rows,
            RhsOperand::Plain(_) => RhsSource::Strided,
            RhsOperand::Packed(_) => RhsSource::Packed,
            RhsOperand::Im2col(_) => RhsSource::Im2col,
            RhsOperand::Blocks(_) => RhsSource::Blocks,
            RhsOperand::Quantized(_) => RhsSource::Quantized,
        }
    }
}

/// The kind of storage of a B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RhsSource {
    /// Plain, with contiguous rows.
    Rows,
    /// Plain, with a column stride other than 1.
    Strided,
    /// Packed ahead of time.
    Packed,
    /// The im2col matrix of an image.
    Im2col,
    /// Block-quantized weights.
    Blocks,
    /// A quantized matrix.
    Quantized,
}
