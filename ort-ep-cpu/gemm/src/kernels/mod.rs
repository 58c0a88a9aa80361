//! GEMM micro-kernels for each instruction set, and the loops that call them over a block of C.
//!
//! All unsafe code of GEMM is in this folder. Callers pass checked slices; the code here works with
//! pointers into them.

/// Defines what an instruction set's [`Kernel`] calls: `tile`, `panels`, `rows`, `inner` and
/// `copies`.
/// `$simd` makes the proof that the CPU has it, `$features` compiles for it.
macro_rules! functions {
    ($simd:expr $(, $features:meta)?) => {
        /// Computes a run of register tiles; see [`compute`].
        ///
        /// # Safety
        ///
        /// As [`compute`], and the CPU has the features that this function enables.
        $(#[$features])?
        unsafe fn tile<const ROWS: usize, const VECTORS: usize, const PARTIAL: bool>(call: &mut Tile) {
            // SAFETY: `tile` has the contract of `compute`, and `Kernel::of` detected the features
            // before it chose this kernel.
            unsafe { compute::<_, ROWS, VECTORS, PARTIAL>(Singles($simd), call) }
        }

        /// Computes a row of tiles; see [`panels::compute`].
        ///
        /// # Safety
        ///
        /// As [`panels::compute`], and the CPU has the features that this function enables.
        $(#[$features])?
        unsafe fn panels<const ROWS: usize, const VECTORS: usize, const PANELS: usize>(calls: &[Tile]) {
            // SAFETY: `panels` has the contract of `compute`, and `Kernel::of` detected the
            // features before it chose this kernel.
            unsafe { panels::compute::<_, ROWS, VECTORS, PANELS>(Singles($simd), calls) }
        }

        /// Adds weighted rows; see [`add_rows`].
        ///
        /// # Safety
        ///
        /// As [`add_rows`], and the CPU has the features that this function enables.
        $(#[$features])?
        pub(super) unsafe fn rows(call: &AddRows) {
            // SAFETY: `rows` has the contract of `add_rows`, and `Kernel::of` detected the features
            // before it chose this kernel.
            unsafe { add_rows($simd, call) }
        }

        /// Returns a dot product; see [`dot`].
        ///
        /// # Safety
        ///
        /// As [`dot`], and the CPU has the features that this function enables.
        $(#[$features])?
        pub(super) unsafe fn inner(left: *const f32, right: *const f32, len: usize) -> f32 {
            // SAFETY: `inner` has the contract of `dot`, and `Kernel::of` detected the features
            // before it chose this kernel.
            unsafe { dot($simd, left, right, len) }
        }

        /// Copies rows; see [`copy_rows`].
        ///
        /// # Safety
        ///
        /// As [`copy_rows`], and the CPU has the features that this function enables.
        $(#[$features])?
        pub(super) unsafe fn copies(call: &CopyRows) {
            // SAFETY: `copies` has the contract of `copy_rows`, and `Kernel::of` detected the
            // features before it chose this kernel.
            unsafe { copy_rows($simd, call) }
        }
    };
}

/// Lists the tile functions by rows and vectors, for up to 2 or 3 vectors.
macro_rules! tiles {
    ($partial:literal, 2: $($rows:literal)*) => {
        [$(tile::<$rows, 1, $partial>, tile::<$rows, 2, $partial>),*]
    };
    ($partial:literal, 3: $($rows:literal)*) => {
        [$(tile::<$rows, 1, $partial>, tile::<$rows, 2, $partial>, tile::<$rows, 3, $partial>),*]
    };
}

mod bytes;
mod columns;
mod execute;
mod gemv;
mod pack;
mod pairs;
mod panels;
mod rows;
mod runs;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

pub(super) use bytes::{ByteKernel, column_sums, execute as execute_bytes};
pub(super) use execute::{Grid, Output, SlotLens, execute};
pub(super) use pack::{transpose, unfold};
pub(super) use rows::add_four_rows;
pub use rows::{Number, Widen};
pub(super) use tile::RegisterActivation;
pub use tile::STEPS;

use columns::FewColumns;
use pairs::MakePairs;
use panels::FewRows;
use tile::{AddRows, TileFunction, copy, copy_even};

use super::Cpu;
use ort_cpu_vector::simd::{Isa, Simd};

/// The functions of one instruction set and its tile shapes.
pub(super) struct Kernel {
    /// The maximum number of rows in a register tile (MR).
    pub(super) rows: usize,
    /// The maximum number of vectors in a row of a register tile.
    pub(super) vectors: usize,
    /// `f32` lanes of a vector.
    pub(super) lanes: usize,
    /// Tile functions, indexed by `(rows - 1) * vectors + (vectors - 1)`.
    whole: &'static [TileFunction],
    /// The same for panels of B that end inside the last vector.
    partial: &'static [TileFunction],
    add_rows: unsafe fn(&AddRows),
    dot: unsafe fn(*const f32, *const f32, usize) -> f32,
    copy_rows: unsafe fn(&CopyRows),
    transpose: unsafe fn(&Transpose),
    /// The functions for few rows.
    few_rows: FewRows,
    /// The functions for few columns, if an A is packed with as many rows as they take.
    few_columns: Option<FewColumns>,
    /// How bf16 pairs are made, if a panel's elements are pairs of consecutive k steps.
    pairs: Option<MakePairs>,
}

impl Kernel {
    /// Returns the kernel of a CPU's instruction set, or of the widest one below it that this CPU
    /// has.
    pub(super) fn of(cpu: Cpu) -> &'static Kernel {
        let Cpu { isa, precision, .. } = cpu;
        #[cfg(target_arch = "x86_64")]
        {
            if precision == super::Precision::Bf16 && isa.has_bf16_products() {
                return &avx512_bf16::KERNEL;
            }
            match isa.min(Isa::widest()) {
                Isa::Avx512 => return &avx512::KERNEL,
                Isa::Avx2 => return &avx2::KERNEL,
                Isa::Neon | Isa::Scalar => {}
            }
        }
        #[cfg(target_arch = "aarch64")]
        if isa >= Isa::Neon {
            return &neon::KERNEL;
        }
        // Unused on targets without these kernels.
        let _ = (isa, precision);
        &scalar::KERNEL
    }

    /// Returns a key of the packed layout: what decides where an element of a packed operand goes.
    pub(super) fn layout(&self) -> String {
        let Kernel { rows, vectors, lanes, pairs, .. } = self;
        let kind = if pairs.is_some() { "pairs" } else { "numbers" };
        format!("{rows}x{vectors}x{lanes}/{kind}")
    }

    /// Returns the columns of a panel of B (NR).
    pub(super) fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    /// Whether a panel of so few columns is computed with rows as lanes, if A is packed.
    pub(super) fn has_few_columns(&self, rows: usize, columns: usize) -> bool {
        let few = self.few_columns.as_ref();
        few.is_some_and(|few| few.rows == self.height(rows)) && (1..=columns::MOST_COLUMNS).contains(&columns)
    }

    /// Returns the rows of a panel of an A with `rows` rows. Tiles get nearly equal heights,
    /// because a tile of one or two rows cannot keep the FMA units busy.
    pub(super) fn height(&self, rows: usize) -> usize {
        rows.div_ceil(rows.div_ceil(self.rows).max(1)).max(1)
    }
}

/// Arguments of a copy of `count` runs of `len` values. [`MakePairs`] takes them too; the values of
/// a run are then contiguous.
#[derive(Clone, Copy, Debug)]
struct CopyRows {
    from: *const f32,
    /// Stride from one value of a run to the next.
    from_stride: usize,
    /// Stride from one run to the next.
    from_step: usize,
    to: *mut f32,
    to_step: usize,
    count: usize,
    len: usize,
}

/// `to[column * to_row + row] = from[row * from_row + column]`.
#[derive(Clone, Copy, Debug)]
struct Transpose {
    from: *const f32,
    from_row: usize,
    to: *mut f32,
    to_row: usize,
    rows: usize,
    columns: usize,
}

/// # Safety
///
/// All runs must be valid.
#[inline(always)]
unsafe fn copy_rows<S: Simd>(s: S, call: &CopyRows) {
    let (mut from, mut to) = (call.from, call.to);
    for _ in 0..call.count {
        // SAFETY: the caller guarantees that all runs are valid, and `count` and `len` bound the
        // offsets.
        unsafe {
            match call.from_stride {
                1 => copy(s, from, to, call.len),
                2 => copy_even(s, from, to, call.len),
                stride => (0..call.len).for_each(|index| *to.add(index) = *from.add(index * stride)),
            }
        }
        from = from.wrapping_add(call.from_step);
        to = to.wrapping_add(call.to_step);
    }
}

/// # Safety
///
/// Both matrices must be valid.
unsafe fn transpose_plain(call: &Transpose) {
    for row in 0..call.rows {
        for column in 0..call.columns {
            // SAFETY: the caller guarantees that both matrices are valid, and `row` and `column`
            // are inside them.
            unsafe {
                *call.to.add(column * call.to_row + row) = *call.from.add(row * call.from_row + column)
            };
        }
    }
}
