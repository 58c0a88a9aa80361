//! Matrix products: `C = epilogue(alpha * A * B + beta * C)`.
//!
//! The `f32` product is organised after BLIS (Van Zee and van de Geijn, "BLIS: A Framework for
//! Rapidly Instantiating BLAS Functionality"): a tile of C is summed in registers from a strip of A
//! and a packed strip of B, and blocks are sized so that strips stay in the caches. Operands may be
//! strided in any way, packed ahead (weights), or be the windows of a convolution.
//!
//! Nothing here allocates: the caller gives the workspace, whose size [`workspace_len`] tells from
//! the shapes alone. A result has the same bits for any number of threads.
//!
//! In [`Precision::Bf16`] the factors are rounded to bfloat16, two consecutive steps of a sum to an
//! element of a strip, while sums and everything after them are `f32`; loops, blocks and tiles are
//! the same.
//!
//! ```
//! use ort_ep_cpu::gemm::{
//!     AOperand, Activation, BOperand, Cpu, Gemm, PackedB, Step, Strided, pack_b, workspace_len,
//! };
//!
//! // C (2 by 2) = Relu(A (2 by 3) * B (3 by 2) + bias), with B packed once.
//! let cpu = Cpu::with_threads(1);
//! let (a, b) = ([1.0, 2.0, 3.0, -1.0, -2.0, -3.0], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
//! let mut packed = vec![0.0; PackedB::len(cpu, 3, 2)];
//! pack_b(cpu, &b, [3, 2], [2, 1], &mut packed)?;
//! let gemm = Gemm {
//!     epilogue: &[Step::ColumnBias(&[0.5, 0.5]), Step::Activate(Activation::Relu)],
//!     ..Gemm::new(
//!         AOperand::Plain(Strided::row_major(&a, 2, 3)?),
//!         BOperand::Packed(PackedB::new(cpu, &packed, 3, 2)?),
//!     )
//! };
//! let mut workspace = vec![0.0; workspace_len(cpu, 1, gemm.shape()?, gemm.b.source())];
//! let mut c = [0.0; 4];
//! gemm.run(cpu, &mut c, 2, &mut workspace)?;
//! assert_eq!(c, [4.5, 5.5, 0.0, 0.0]);
//! # Ok::<(), ort_ep_cpu::gemm::GemmError>(())
//! ```

#![allow(
    clippy::indexing_slicing,
    reason = "operands are checked against the sizes of the product before anything is packed or multiplied"
)]

mod blocking;
pub mod blocks;
mod epilogue;
pub mod generic;
mod im2col;
pub(crate) mod integer;
mod kernels;
mod operand;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt;

pub use blocking::workspace_len;
pub(crate) use blocking::workspace_len_beside_ready;
pub(crate) use blocking::{STEPS, by_columns};
pub use blocks::{Blocks, Numbers, Zeros};
pub use epilogue::{Activation, Step};
pub(crate) use epilogue::{apply as apply_steps, check as check_steps};
pub use im2col::{Im2col, Window};
pub(crate) use operand::pack_a_by;
pub use operand::{AOperand, BOperand, BSource, PackedA, PackedB, Strided, Weight, pack_a, pack_b};

pub use ort_core::ep::Precision;

use crate::parallel::for_each_row_chunk_mut;
use crate::simd::isa::Isa;
use kernels::{Kernel, Output, execute};

/// What to compute with: an instruction set, how many threads, the calling one included, and the
/// type of the factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// The instruction set to use. One that this CPU lacks falls back to the widest below it.
    pub isa: Isa,
    /// The most threads to use.
    pub threads: usize,
    /// What products of `f32` matrices round their factors to. Without [`Isa::has_bf16_products`]
    /// it is float32.
    pub precision: Precision,
}

/// What packed matrices depend on beside the code and the numbers in them: the shapes of the tiles
/// that this CPU multiplies with. CPUs of one instruction set differ in it, as not all have
/// products of bytes or of bfloat16.
pub(crate) fn packed_layout(isa: Isa) -> String {
    let float = |precision| Kernel::of(Cpu { isa, threads: 1, precision }).layout();
    let [fp32, bf16] = [Precision::Fp32, Precision::Bf16].map(float);
    format!("fp32={fp32} bf16={bf16} bytes={}", kernels::ByteKernel::of(isa).layout())
}

impl Cpu {
    /// The widest instruction set allowed, on `threads` threads, in float32.
    pub fn with_threads(threads: usize) -> Self {
        Cpu { isa: Isa::current(), threads: threads.max(1), precision: Precision::Fp32 }
    }

    /// The same in another precision.
    #[must_use]
    pub fn in_precision(self, precision: Precision) -> Self {
        Cpu { precision, ..self }
    }
}

/// Why a product was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GemmError {
    /// A slice does not hold what its shape says.
    TooShort {
        /// The slice.
        what: &'static str,
        /// Values it should hold.
        needed: usize,
        /// Values it holds.
        len: usize,
    },
    /// Shapes or layouts that do not go together.
    Shape(&'static str),
}

impl fmt::Display for GemmError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GemmError::TooShort { what, needed, len } => {
                write!(f, "{what} needs {needed} values and has {len}")
            }
            GemmError::Shape(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for GemmError {}

/// One matrix product.
#[derive(Clone, Copy, Debug)]
pub struct Gemm<'a> {
    /// The left side, M by K.
    pub a: AOperand<'a>,
    /// The right side, K by N.
    pub b: BOperand<'a>,
    /// Multiplies the product.
    pub alpha: f32,
    /// Multiplies what C holds before; at zero C is only written.
    pub beta: f32,
    /// What happens to each element of the sum at the end.
    pub epilogue: &'a [Step<'a>],
    /// Where this product's first row lies in the slices of the epilogue.
    pub origin: Origin,
}

/// The first row of a product within the slices that its epilogue names, so that the products of a
/// batch can share one list of steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// Index of the first row's bias.
    pub bias_row: usize,
    /// Rows of a residual before the first row.
    pub residual_row: usize,
}

impl<'a> Gemm<'a> {
    /// The plain product of `a` and `b`.
    pub fn new(a: AOperand<'a>, b: BOperand<'a>) -> Self {
        Gemm { a, b, alpha: 1.0, beta: 0.0, epilogue: &[], origin: Origin::default() }
    }

    /// M, N and K.
    ///
    /// # Errors
    ///
    /// When the operands differ in K.
    pub fn shape(&self) -> Result<[usize; 3], GemmError> {
        let ([m, k], [rows, n]) = (self.a.shape(), self.b.shape());
        if k != rows {
            return Err(GemmError::Shape("the columns of A are not as many as the rows of B"));
        }
        Ok([m, n, k])
    }

    /// Computes the product into `c`, whose rows start `row_stride` apart. `workspace` has at least
    /// the length that [`workspace_len`] tells for a batch of one.
    ///
    /// # Errors
    ///
    /// When shapes do not go together or a slice is too short; `c` is then unchanged.
    pub fn run(
        &self,
        cpu: Cpu,
        c: &mut [f32],
        row_stride: usize,
        workspace: &mut [f32],
    ) -> Result<(), GemmError> {
        let c = Batch { values: c, count: 1, row_stride, batch_stride: 0 };
        run_batch(cpu, &|_| Ok(*self), c, workspace)
    }
}

/// The results of a batch of products of one shape, at equal distances in one slice.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Holds all results.
    pub values: &'a mut [f32],
    /// How many there are.
    pub count: usize,
    /// From one row to the next.
    pub row_stride: usize,
    /// From one result to the next.
    pub batch_stride: usize,
}

/// Computes a batch of products, all of one shape and with operands of the same kind; `problem`
/// gives each of them. `workspace` has at least the length that [`workspace_len`] tells.
///
/// # Errors
///
/// When shapes do not go together, a slice is too short, or results would overlap.
pub fn run_batch<'a>(
    cpu: Cpu,
    problem: &(dyn Fn(usize) -> Result<Gemm<'a>, GemmError> + Sync),
    c: Batch,
    workspace: &mut [f32],
) -> Result<(), GemmError> {
    if c.count == 0 {
        return Ok(());
    }
    let kernel = Kernel::of(cpu);
    let first = problem(0)?;
    let shape = first.shape()?;
    let [m, n, _] = shape;
    check_packing(kernel, &first)?;
    if c.row_stride < n && m > 1 {
        return Err(GemmError::Shape("the rows of a result overlap"));
    }
    let extent = if m == 0 || n == 0 { 0 } else { (m - 1).saturating_mul(c.row_stride).saturating_add(n) };
    if c.count > 1 && c.batch_stride < extent {
        return Err(GemmError::Shape("the results of a batch overlap"));
    }
    let needed = (c.count - 1).saturating_mul(c.batch_stride).saturating_add(extent);
    if c.values.len() < needed {
        return Err(GemmError::TooShort { what: "a result", needed, len: c.values.len() });
    }
    let sources = |gemm: &Gemm<'_>| (gemm.a.is_ready(kernel), gemm.b.source());
    let grid = blocking::grid(cpu, c.count, shape, sources(&first));
    let one_block = grid.steps >= shape[2] && matches!(first.a, AOperand::Packed(_));
    if epilogue::has_held(first.epilogue) && !one_block {
        return Err(GemmError::Shape("what a result holds is lost before it would be added"));
    }
    let needed = grid.threads * grid.slot.len();
    if workspace.len() < needed {
        return Err(GemmError::TooShort { what: "the workspace of a product", needed, len: workspace.len() });
    }
    let checked = |index: usize| {
        let gemm = problem(index)?;
        check_packing(kernel, &gemm)?;
        match sources(&gemm) == sources(&first) {
            true => Ok(gemm),
            false => Err(GemmError::Shape("the products of a batch differ in layout")),
        }
    };
    let output = Output { values: c.values, row_stride: c.row_stride, batch_stride: c.batch_stride };
    execute(kernel, &grid, &checked, output, workspace)
}

/// Panels fit only the kernel they were cut for.
fn check_packing(kernel: &Kernel, gemm: &Gemm) -> Result<(), GemmError> {
    let a = match &gemm.a {
        AOperand::Packed(packed) => {
            packed.height == kernel.height(packed.of) && packed.terms == kernel.terms()
        }
        AOperand::Plain(matrix) => matrix.terms == 1 || matrix.terms == kernel.terms(),
    };
    let b = match &gemm.b {
        BOperand::Packed(packed) => packed.width == kernel.width() && packed.terms == kernel.terms(),
        BOperand::Im2col(windows) => windows.terms == 1 || windows.terms == kernel.terms(),
        BOperand::Plain(matrix) => matrix.terms == 1,
        BOperand::Blocks(_) => true,
    };
    match a && b {
        true => Ok(()),
        false => Err(GemmError::Shape("an operand was packed for another instruction set or precision")),
    }
}

/// Values that [`unfold`] writes.
pub(crate) fn unfolded_len(windows: &Window, channels: usize) -> usize {
    channels * windows.kernel_len() * windows.output_len()
}

/// Writes the matrix of windows (channels times kernel positions, by output positions) row by row.
///
/// # Errors
///
/// When `to` is too short.
pub(crate) fn unfold(cpu: Cpu, windows: &Im2col, to: &mut [f32]) -> Result<(), GemmError> {
    let (needed, len) = (windows.rows() * windows.columns(), to.len());
    let to = to.get_mut(..needed).ok_or(GemmError::TooShort { what: "unfolded windows", needed, len })?;
    kernels::unfold(cpu, windows, to);
    Ok(())
}

/// Writes the transpose of a matrix of `shape` (rows, columns), whose rows start `stride` apart,
/// without gaps.
///
/// # Errors
///
/// When either slice is too short.
pub(crate) fn transpose(
    cpu: Cpu,
    from: &[f32],
    shape: [usize; 2],
    stride: usize,
    to: &mut [f32],
) -> Result<(), GemmError> {
    Strided::new(from, shape, [stride, 1])?;
    let (needed, len) = (shape[0] * shape[1], to.len());
    let to = to.get_mut(..needed).ok_or(GemmError::TooShort { what: "a transpose", needed, len })?;
    kernels::transpose(cpu, from, shape, stride, to);
    Ok(())
}

/// Makes the elements that hold pairs of steps of a sum, in bfloat16.
#[derive(Clone, Copy)]
pub(crate) struct Pairing(&'static Kernel);

impl Pairing {
    /// Where products of `cpu` are of pairs.
    pub(crate) fn of(cpu: Cpu) -> Option<Pairing> {
        let kernel = Kernel::of(cpu);
        (kernel.terms() > 1).then_some(Pairing(kernel))
    }

    /// Writes rows of pairs without gaps: row `i` holds those of rows `2 * i` and `2 * i + 1` of
    /// `from`, whose rows of `columns` values start `stride` apart; 0 where there is no second row.
    ///
    /// # Panics
    ///
    /// When a slice does not hold its rows.
    pub(crate) fn of_rows(
        self,
        (from, stride): (&[f32], usize),
        [rows, columns]: [usize; 2],
        to: &mut [f32],
    ) {
        self.0.pair_rows((from, stride), [rows, columns], to);
    }

    /// Writes rows of half the length without gaps, of pairs of neighbours in the rows of `from`; 0
    /// where there is no second one.
    ///
    /// # Panics
    ///
    /// When a slice does not hold its rows.
    pub(crate) fn of_neighbours(
        self,
        (from, stride): (&[f32], usize),
        [rows, columns]: [usize; 2],
        to: &mut [f32],
    ) {
        self.0.pair_neighbours((from, stride), [rows, columns], to);
    }
}

/// [`Pairing::of_rows`] of rows without gaps, on all threads.
///
/// # Errors
///
/// When `from` is too short, or `cpu` has no pairs.
pub(crate) fn pair_rows(cpu: Cpu, from: &[f32], columns: usize, to: &mut [f32]) -> Result<(), GemmError> {
    /// Rows worth a task of their own.
    const ROWS: usize = 8;
    let Some(pairs) = Pairing::of(cpu) else {
        return Err(GemmError::Shape("an instruction set without pairs of bfloat16"));
    };
    let (needed, len) = (2 * to.len(), from.len());
    if len < needed {
        return Err(GemmError::TooShort { what: "rows to pair", needed, len });
    }
    if columns == 0 {
        return Ok(());
    }
    for_each_row_chunk_mut(cpu.threads, to, columns, ROWS, |first, rows| {
        let count = 2 * (rows.len() / columns);
        pairs.of_rows((&from[2 * first * columns..], columns), [count, columns], rows);
    });
    Ok(())
}

/// Columns in a vector of `cpu`.
pub(crate) fn lanes(cpu: Cpu) -> usize {
    Kernel::of(cpu).lanes
}
