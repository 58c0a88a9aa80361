//! 8-bit GEMM kernels for each instruction set, and the loop that calls them over a block of the
//! result.

/// Defines the functions and the `KERNEL` of an instruction set, with tiles of 4 rows by 2 vectors.
/// `$lanes` makes the proof that the CPU has it, `$features` compiles for it.
macro_rules! kernel {
    ($type:ty, $lanes:expr $(, $features:meta)?) => {
        /// Computes a tile of accumulators; see [`compute`].
        ///
        /// # Safety
        ///
        /// As [`compute`], and the CPU has the features that this function enables.
        $(#[$features])?
        unsafe fn tile<const ROWS: usize, const VECTORS: usize, const SIGNED_ROWS: bool>(call: &Tile) {
            // SAFETY: `tile` has the contract of `compute`, and `ByteKernel::of` detected the
            // features before it chose this kernel.
            unsafe { compute::<$type, ROWS, VECTORS, SIGNED_ROWS>($lanes, call) }
        }

        /// Runs the epilogue of a tile; see [`super::finish::finish`].
        ///
        /// # Safety
        ///
        /// As [`super::finish::finish`], and the CPU has the features that this function enables.
        $(#[$features])?
        unsafe fn finish(call: &Finish<'_>) {
            // SAFETY: this function has the contract of the one it calls, and `ByteKernel::of`
            // detected the features before it chose this kernel.
            unsafe { super::finish::finish($lanes, call) }
        }

        pub(super) static KERNEL: ByteKernel = ByteKernel {
            vectors: 2,
            lanes: <$type as Simd>::LANES,
            unsigned_rows: tiles!(false),
            signed_rows: tiles!(true),
            requantize_unsigned: &[],
            requantize_signed: &[],
            finish,
        };
    };
}

/// Lists the tile functions of a `kernel` by vectors and rows.
macro_rules! tiles {
    ($signed:literal) => {
        &[tiles!($signed, 1: 1 2 3 4), tiles!($signed, 2: 1 2 3 4)]
    };
    ($signed:literal, $vectors:literal: $($rows:literal)*) => {
        &[$(tile::<$rows, $vectors, $signed> as TileFunction),*]
    };
}

mod execute;
mod finish;
mod tile;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(crate) use execute::{column_sums, execute};

use finish::FinishFunction;
use tile::{RequantizeFunction, TileFunction};

use ort_cpu_vector::simd::Isa;

/// The maximum rows and columns of a tile, and lanes of a vector, over all instruction sets.
const MAX_ROWS: usize = 10;
const MAX_WIDTH: usize = 64;
const MAX_LANES: usize = ort_cpu_vector::simd::MAX_LANES;

/// The functions of one instruction set and its tile shapes.
///
/// Tile functions are indexed by the vectors in a row of the tile, from one on, and then by its
/// rows, from one on.
pub(crate) struct ByteKernel {
    /// Vectors in a panel of windows.
    vectors: usize,
    /// Accumulators in a vector.
    lanes: usize,
    /// Tile functions for unsigned rows, and for signed rows.
    unsigned_rows: &'static [&'static [TileFunction]],
    signed_rows: &'static [&'static [TileFunction]],
    /// The same for tiles that requantize their accumulators at once. Empty if the instruction set
    /// has none.
    requantize_unsigned: &'static [&'static [RequantizeFunction]],
    requantize_signed: &'static [&'static [RequantizeFunction]],
    finish: FinishFunction,
}

impl ByteKernel {
    /// Returns the kernel of `isa`, or of the widest instruction set below it that this CPU has.
    pub(crate) fn of(isa: Isa) -> &'static ByteKernel {
        #[cfg(target_arch = "x86_64")]
        {
            let isa = isa.min(Isa::widest());
            if isa == Isa::Avx512 && ort_cpu_vector::simd::bytes::has_vnni() {
                return &avx512::KERNEL;
            }
            if isa >= Isa::Avx2 {
                return &avx2::KERNEL;
            }
        }
        #[cfg(target_arch = "aarch64")]
        if isa >= Isa::Neon {
            return &neon::KERNEL;
        }
        // Unused on targets that have portable code only.
        let _ = isa;
        &portable::KERNEL
    }

    /// Returns a key of the packed layout: what decides where a value of a packed operand goes.
    pub(crate) fn layout(&self) -> String {
        let ByteKernel { vectors, lanes, unsigned_rows, signed_rows, .. } = self;
        format!("{vectors}x{lanes}/{}/{}", unsigned_rows.len(), signed_rows.len())
    }

    /// Returns the columns of a panel of windows.
    pub(crate) fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    /// Returns the columns of a panel of a packed matrix with `columns` columns. Panels get nearly
    /// equal widths.
    pub(crate) fn packed_width(&self, columns: usize) -> usize {
        let (vectors, most) = (columns.div_ceil(self.lanes).max(1), self.unsigned_rows.len().max(1));
        vectors.div_ceil(vectors.div_ceil(most)) * self.lanes
    }

    /// Returns the rows of a tile of `vectors` vectors, for a matmul with `rows` rows. Tiles get
    /// nearly equal heights.
    fn height(&self, rows: usize, vectors: usize) -> usize {
        let most = self.unsigned_rows.get(vectors - 1).map_or(1, |functions| functions.len());
        rows.div_ceil(rows.div_ceil(most.max(1)).max(1)).max(1)
    }
}
