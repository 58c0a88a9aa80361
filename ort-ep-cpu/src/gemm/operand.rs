//! The two sides of a matrix product: strided, packed ahead, or a virtual matrix over an image.

use std::ops::Range;

use super::blocks::Blocks;
use super::im2col::Im2col;
use super::kernels::Kernel;
use super::{Cpu, GemmError};
use crate::parallel::for_each_chunk_mut;

/// A matrix inside a slice, with any distance between rows and between columns. A transpose is an
/// exchange of the two.
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
    /// Columns in a value.
    pub(super) terms: usize,
}

impl<'a> Strided<'a> {
    /// A matrix of `[rows, columns]` whose element (i, j) is `values[i * strides[0] + j *
    /// strides[1]]`.
    ///
    /// # Errors
    ///
    /// When the last element lies outside `values`.
    pub fn new(values: &'a [f32], shape: [usize; 2], strides: [usize; 2]) -> Result<Self, GemmError> {
        let [rows, columns] = shape;
        let [row_stride, column_stride] = strides;
        check_extent("a matrix", values.len(), shape, strides)?;
        Ok(Strided { values, rows, columns, row_stride, column_stride, terms: 1 })
    }

    /// A left side of `[rows, columns]` whose values are pairs of neighbours, as [`super::Pairing`]
    /// makes them: those of a row lie side by side, and rows start `row_stride` apart.
    ///
    /// # Errors
    ///
    /// When the last pair lies outside `values`, or a column has no other to pair with.
    pub(crate) fn of_pairs(
        values: &'a [f32],
        [rows, columns]: [usize; 2],
        row_stride: usize,
    ) -> Result<Self, GemmError> {
        if !columns.is_multiple_of(2) {
            return Err(GemmError::Shape("a column has no other to pair with"));
        }
        let pairs = Strided::new(values, [rows, columns / 2], [row_stride, 1])?;
        Ok(Strided { columns, terms: 2, ..pairs })
    }

    /// A matrix that lies row by row without gaps.
    ///
    /// # Errors
    ///
    /// When `values` is shorter than `rows * columns`.
    pub fn row_major(values: &'a [f32], rows: usize, columns: usize) -> Result<Self, GemmError> {
        Strided::new(values, [rows, columns], [columns, 1])
    }

    /// The transpose, without moving anything.
    #[must_use]
    pub fn transposed(self) -> Self {
        Strided {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// Checks that a matrix lies inside a slice of `len` values.
pub(super) fn check_extent(
    what: &'static str,
    len: usize,
    shape: [usize; 2],
    strides: [usize; 2],
) -> Result<(), GemmError> {
    if shape.contains(&0) {
        return Ok(());
    }
    let along = |axis: usize| (shape[axis] - 1).checked_mul(strides[axis]);
    let needed = along(0).zip(along(1)).and_then(|(x, y)| x.checked_add(y)?.checked_add(1));
    match needed {
        Some(needed) if needed <= len => Ok(()),
        _ => Err(GemmError::TooShort { what, needed: needed.unwrap_or(usize::MAX), len }),
    }
}

/// A type that weights are stored in. They are widened while they are packed.
pub trait Weight: Copy + Send + Sync {
    /// The value as `f32`, exactly.
    fn widen(self) -> f32;
}

impl Weight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// A float as its bytes, little-endian as ONNX has them: weights in a mapped file start anywhere.
impl Weight for [u8; 4] {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_le_bytes(self)
    }
}

impl Weight for half::f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Weight for half::bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

/// The left side, cut into panels of a tile's height for one instruction set and precision.
#[derive(Clone, Copy, Debug)]
pub struct PackedA<'a> {
    pub(super) values: &'a [f32],
    pub(super) rows: usize,
    pub(super) k: usize,
    pub(super) height: usize,
    /// Steps in an element.
    pub(super) terms: usize,
    /// Rows of the matrix that was packed, from which the height follows.
    pub(super) of: usize,
}

impl<'a> PackedA<'a> {
    /// How many values packing a matrix of `rows` by `k` fills.
    pub fn len(cpu: Cpu, rows: usize, k: usize) -> usize {
        let kernel = Kernel::of(cpu);
        rows.next_multiple_of(kernel.height(rows)) * kernel.elements(k)
    }

    /// Takes values that [`pack_a`] wrote.
    ///
    /// # Errors
    ///
    /// When `values` is shorter than [`PackedA::len`] says.
    pub fn new(cpu: Cpu, values: &'a [f32], rows: usize, k: usize) -> Result<Self, GemmError> {
        let needed = PackedA::len(cpu, rows, k);
        if values.len() < needed {
            return Err(GemmError::TooShort { what: "a packed A", needed, len: values.len() });
        }
        let kernel = Kernel::of(cpu);
        Ok(PackedA { values, rows, k, height: kernel.height(rows), terms: kernel.terms(), of: rows })
    }

    /// Rows of a panel of a matrix of `rows`.
    pub(crate) fn height_of(cpu: Cpu, rows: usize) -> usize {
        Kernel::of(cpu).height(rows)
    }

    /// Rows of a panel.
    pub(crate) fn height(&self) -> usize {
        self.height
    }

    /// Some of the panels, as a left side of fewer rows.
    pub(crate) fn panels(self, panels: Range<usize>) -> Self {
        let all = self.rows.div_ceil(self.height);
        let [first, end] = [panels.start, panels.end].map(|panel| panel.min(all));
        let len = self.k.div_ceil(self.terms) * self.height;
        let rows = (end * self.height).min(self.rows).saturating_sub(first * self.height);
        PackedA { values: &self.values[first * len..], rows, ..self }
    }
}

/// The right side, cut into panels of a tile's width for one instruction set and precision.
#[derive(Clone, Copy, Debug)]
pub struct PackedB<'a> {
    pub(super) values: &'a [f32],
    pub(super) k: usize,
    pub(super) columns: usize,
    pub(super) width: usize,
    /// Steps in an element.
    pub(super) terms: usize,
}

impl<'a> PackedB<'a> {
    /// How many values packing a matrix of `k` by `columns` fills.
    pub fn len(cpu: Cpu, k: usize, columns: usize) -> usize {
        let kernel = Kernel::of(cpu);
        columns.next_multiple_of(kernel.width()) * kernel.elements(k)
    }

    /// Takes values that [`pack_b`] wrote.
    ///
    /// # Errors
    ///
    /// When `values` is shorter than [`PackedB::len`] says.
    pub fn new(cpu: Cpu, values: &'a [f32], k: usize, columns: usize) -> Result<Self, GemmError> {
        let needed = PackedB::len(cpu, k, columns);
        if values.len() < needed {
            return Err(GemmError::TooShort { what: "a packed B", needed, len: values.len() });
        }
        let kernel = Kernel::of(cpu);
        Ok(PackedB { values, k, columns, width: kernel.width(), terms: kernel.terms() })
    }
}

/// Packs a left side of `shape` (rows, k) into `packed`, whose length [`PackedA::len`] tells.
///
/// # Errors
///
/// When either slice is too short.
pub fn pack_a<T: Weight>(
    cpu: Cpu,
    values: &[T],
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let [rows, k] = shape;
    check_extent("a matrix", values.len(), shape, strides)?;
    PackedA::new(cpu, packed, rows, k)?;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(rows);
    let packed = &mut packed[..PackedA::len(cpu, rows, k)];
    for_each_chunk_mut(cpu.threads, packed, (height * kernel.elements(k)).max(1), |panel, to| {
        kernel.pack_a_panel(values, [rows, k], strides, panel * height, to);
    });
    Ok(())
}

/// [`pack_a`] of a matrix whose element (i, j) is `values[i * row_stride + place(j)]`. Every place
/// must be inside of `values`.
///
/// # Errors
///
/// When `packed` is too short.
pub(crate) fn pack_a_by<T: Weight>(
    cpu: Cpu,
    values: &[T],
    [rows, k]: [usize; 2],
    (row_stride, place): (usize, impl Fn(usize) -> usize + Sync),
    packed: &mut [f32],
) -> Result<(), GemmError> {
    PackedA::new(cpu, packed, rows, k)?;
    let kernel = Kernel::of(cpu);
    let height = kernel.height(rows);
    let packed = &mut packed[..PackedA::len(cpu, rows, k)];
    for_each_chunk_mut(cpu.threads, packed, (height * kernel.elements(k)).max(1), |panel, to| {
        kernel.pack_a_panel_by(values, [rows, k], (row_stride, &place), panel * height, to);
    });
    Ok(())
}

/// Packs a right side of `shape` (k, columns) into `packed`, whose length [`PackedB::len`] tells.
///
/// # Errors
///
/// When either slice is too short.
pub fn pack_b<T: Weight>(
    cpu: Cpu,
    values: &[T],
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
) -> Result<(), GemmError> {
    let [k, columns] = shape;
    check_extent("a matrix", values.len(), shape, strides)?;
    PackedB::new(cpu, packed, k, columns)?;
    let kernel = Kernel::of(cpu);
    let width = kernel.width();
    let packed = &mut packed[..PackedB::len(cpu, k, columns)];
    for_each_chunk_mut(cpu.threads, packed, (width * kernel.elements(k)).max(1), |panel, to| {
        kernel.pack_b_panel(values, [k, columns], strides, panel * width, to);
    });
    Ok(())
}

/// The left side of a product.
#[derive(Clone, Copy, Debug)]
pub enum AOperand<'a> {
    /// Read where it lies.
    Plain(Strided<'a>),
    /// Packed ahead.
    Packed(PackedA<'a>),
}

impl AOperand<'_> {
    /// Rows and k.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            AOperand::Plain(matrix) => [matrix.rows, matrix.columns],
            AOperand::Packed(packed) => [packed.rows, packed.k],
        }
    }

    /// Rows of a tile.
    pub(super) fn height(&self, kernel: &Kernel) -> usize {
        match self {
            AOperand::Plain(matrix) => kernel.height(matrix.rows),
            AOperand::Packed(packed) => packed.height,
        }
    }

    /// Whether a product reads it as it is.
    pub(super) fn is_ready(&self, kernel: &Kernel) -> bool {
        match self {
            AOperand::Plain(matrix) => matrix.terms == kernel.terms(),
            AOperand::Packed(_) => true,
        }
    }
}

/// The right side of a product.
#[derive(Clone, Copy, Debug)]
pub enum BOperand<'a> {
    /// Read where it lies, or packed block by block into the workspace.
    Plain(Strided<'a>),
    /// Packed ahead.
    Packed(PackedB<'a>),
    /// The windows of a convolution, packed block by block from the image.
    Im2col(Im2col<'a>),
    /// Block-quantized weights, widened block by block.
    Blocks(Blocks<'a>),
}

impl BOperand<'_> {
    /// k and columns.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            BOperand::Plain(matrix) => [matrix.rows, matrix.columns],
            BOperand::Packed(packed) => [packed.k, packed.columns],
            BOperand::Im2col(windows) => [windows.rows(), windows.columns()],
            BOperand::Blocks(blocks) => blocks.shape(),
        }
    }

    /// How it is stored, which is what the workspace depends on.
    pub fn source(&self) -> BSource {
        match self {
            BOperand::Plain(matrix) if matrix.column_stride == 1 || matrix.columns <= 1 => BSource::Rows,
            BOperand::Plain(_) => BSource::Strided,
            BOperand::Packed(_) => BSource::Packed,
            BOperand::Im2col(_) => BSource::Im2col,
            BOperand::Blocks(_) => BSource::Blocks,
        }
    }
}

/// How a right side is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BSource {
    /// Plain, each row contiguous.
    Rows,
    /// Plain, with gaps between the columns.
    Strided,
    /// Packed ahead.
    Packed,
    /// Windows of an image.
    Im2col,
    /// Block-quantized weights.
    Blocks,
}
