//! GEMM: `C = epilogue(alpha * A * B + beta * C)`. A is the `lhs`, B the `rhs`.
//!
//! The `f32` GEMM follows BLIS (Van Zee and van de Geijn, "BLIS: A Framework for Rapidly
//! Instantiating BLAS Functionality"). A micro-kernel accumulates a register tile of C from a panel
//! of A and a packed panel of B. Block sizes keep the panels in cache. Operands may be strided,
//! packed ahead of time (weights), or the virtual im2col matrix of a convolution.
//!
//! Nothing here allocates: the caller provides the workspace, and [`workspace_len`] computes its
//! size from the shapes alone. A result has the same bits for any number of threads.
//!
//! In [`Precision::Bf16`], A and B are rounded to bfloat16 and two consecutive k steps share one
//! 32-bit element of a panel. Accumulators and everything after them stay `f32`. Loops, blocking
//! and tiles are the same.
//!
//! ```
//! use ort_cpu_gemm::{
//!     LhsOperand, Activation, RhsOperand, Cpu, Gemm, PackedRhs, Step, Strided, pack_rhs, workspace_len,
//! };
//!
//! // C (2 by 2) = Relu(A (2 by 3) * B (3 by 2) + bias), with B packed once.
//! let cpu = Cpu::with_threads(1);
//! let (a, b) = ([1.0, 2.0, 3.0, -1.0, -2.0, -3.0], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
//! let mut packed = vec![0.0; PackedRhs::len(cpu, 3, 2)];
//! pack_rhs(cpu, &b, [3, 2], [2, 1], &mut packed)?;
//! let gemm = Gemm {
//!     epilogue: &[Step::ColumnBias(&[0.5, 0.5]), Step::Activate(Activation::Relu)],
//!     ..Gemm::new(
//!         LhsOperand::Plain(Strided::row_major(&a, 2, 3)?),
//!         RhsOperand::Packed(PackedRhs::new(cpu, &packed, 3, 2)?),
//!     )
//! };
//! let mut workspace = vec![0.0; workspace_len(cpu, 1, gemm.shape()?, gemm.rhs.source())];
//! let mut c = [0.0; 4];
//! gemm.run(cpu, &mut c, 2, &mut workspace)?;
//! assert_eq!(c, [4.5, 5.5, 0.0, 0.0]);
//! # Ok::<(), ort_cpu_gemm::GemmError>(())
//! ```

// A panic in a test merely fails the test; a panic in this code would be a defect.
#![warn(
    clippy::exit,
    clippy::indexing_slicing,
    clippy::mem_forget,
    clippy::string_slice,
    clippy::unchecked_time_subtraction,
    clippy::unreachable
)]
#![allow(
    clippy::indexing_slicing,
    reason = "operands are checked against the sizes of the product before anything is packed or multiplied"
)]

mod blocking;
pub mod blocks;
mod cpu;
mod epilogue;
mod error;
pub mod generic;
mod im2col;
pub mod integer;
mod kernels;
mod matrix;
mod operand;
mod problem;
mod quantized;
#[cfg(test)]
mod tests;

pub use blocking::{by_columns, workspace_len, workspace_len_beside_ready};
pub use blocks::{Blocks, Numbers, Zeros};
pub use cpu::Cpu;
pub use epilogue::{Activation, Origin, Step};
pub use epilogue::{apply as apply_steps, check as check_steps};
pub use error::GemmError;
pub use im2col::{Im2col, Window};
pub use kernels::STEPS;
pub use matrix::{Strided, Weight};
pub use operand::pack_lhs_by;
pub use operand::{
    LhsOperand, PackedLhs, PackedRhs, RhsOperand, RhsSource, pack_lhs, pack_rhs, pack_rhs_in_parts,
};
pub use problem::{Batch, Gemm};
pub use quantized::{QuantizedMatrix, Scales};

pub use ort_core::ep::Precision;

use kernels::{Kernel, Output, execute};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::simd::isa::Isa;

/// Returns a key of the packed layout: the tile shapes that this CPU computes with. CPUs of one
/// instruction set differ in it, because not all of them have VNNI or AVX512-BF16.
pub fn packed_layout(isa: Isa) -> String {
    let float = |precision| Kernel::of(Cpu { isa, threads: 1, precision }).layout();
    let [fp32, bf16] = [Precision::Fp32, Precision::Bf16].map(float);
    format!("fp32={fp32} bf16={bf16} bytes={}", kernels::ByteKernel::of(isa).layout())
}

impl Gemm<'_> {
    /// Computes the GEMM into `c`, whose rows start `row_stride` apart. `workspace` must have at
    /// least the length that [`workspace_len`] returns for a batch of one.
    ///
    /// # Errors
    ///
    /// If shapes do not match or a slice is too short. `c` is then unchanged.
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

/// Computes a batch of GEMMs of one shape, with operands of one kind; `problem` returns each of
/// them. `workspace` must have at least the length that [`workspace_len`] returns.
///
/// # Errors
///
/// If shapes do not match, a slice is too short, or results would overlap.
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
    let sources = |gemm: &Gemm<'_>| (gemm.lhs.is_ready(kernel), gemm.rhs.source());
    let grid = blocking::grid(cpu, c.count, shape, sources(&first));
    // `Step::Held` reads the old C at the end of the accumulation. A second k block, or GEMV, would
    // have overwritten it by then.
    let one_block = grid.steps >= shape[2] && matches!(first.lhs, LhsOperand::Packed(_));
    if epilogue::has_held(first.epilogue) && !one_block {
        return Err(GemmError::Shape("what a result holds is lost before it would be added"));
    }
    let needed = grid.threads * grid.slot.len();
    if workspace.len() < needed {
        return Err(GemmError::TooShort { what: "the workspace of a GEMM", needed, len: workspace.len() });
    }
    // Only the first GEMM was checked above. The others are checked when their tasks start.
    let checked = |index: usize| {
        let gemm = problem(index)?;
        check_packing(kernel, &gemm)?;
        match sources(&gemm) == sources(&first) {
            true => Ok(gemm),
            false => Err(GemmError::Shape("the GEMMs of a batch differ in layout")),
        }
    };
    let output = Output { values: c.values, row_stride: c.row_stride, batch_stride: c.batch_stride };
    execute(kernel, &grid, &first, &checked, output, workspace)
}

/// Checks that packed operands were packed for this kernel's tile shape and precision.
fn check_packing(kernel: &Kernel, gemm: &Gemm) -> Result<(), GemmError> {
    let lhs = match &gemm.lhs {
        LhsOperand::Packed(packed) => {
            packed.height == kernel.height(packed.of) && packed.terms == kernel.terms()
        }
        LhsOperand::Plain(matrix) => matrix.terms == 1 || matrix.terms == kernel.terms(),
    };
    let rhs = match &gemm.rhs {
        RhsOperand::Packed(packed) => packed.width == kernel.width() && packed.terms == kernel.terms(),
        RhsOperand::Im2col(windows) => windows.terms == 1 || windows.terms == kernel.terms(),
        RhsOperand::Plain(matrix) => matrix.terms == 1,
        RhsOperand::Blocks(_) | RhsOperand::Quantized(_) => true,
    };
    match lhs && rhs {
        true => Ok(()),
        false => Err(GemmError::Shape("an operand was packed for another instruction set or precision")),
    }
}

/// Returns the number of elements that [`unfold`] writes.
pub fn unfolded_len(windows: &Window, channels: usize) -> usize {
    channels * windows.kernel_len() * windows.output_len()
}

/// im2col: writes the matrix of windows (channels times kernel positions, by output positions) row
/// by row.
///
/// # Errors
///
/// If `to` is too short.
pub fn unfold(cpu: Cpu, windows: &Im2col, to: &mut [f32]) -> Result<(), GemmError> {
    let (needed, len) = (windows.rows() * windows.columns(), to.len());
    let to = to.get_mut(..needed).ok_or(GemmError::TooShort { what: "unfolded windows", needed, len })?;
    kernels::unfold(cpu, windows, to);
    Ok(())
}

/// Writes the transpose of a matrix of `shape` (rows, columns), whose rows start `stride` apart,
/// contiguously.
///
/// # Errors
///
/// If either slice is too short.
pub fn transpose(
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

/// Packs pairs of k steps into 32-bit elements of two bfloat16 values.
#[derive(Clone, Copy)]
pub struct Pairing(&'static Kernel);

impl Pairing {
    /// Returns `None` unless `cpu` computes with bf16 pairs.
    pub fn of(cpu: Cpu) -> Option<Pairing> {
        let kernel = Kernel::of(cpu);
        (kernel.terms() > 1).then_some(Pairing(kernel))
    }

    /// Pairs rows: contiguous row `i` of `to` holds rows `2 * i` and `2 * i + 1` of `from`. Rows of
    /// `from` have `columns` elements and start `stride` apart. A missing second row counts as 0.
    ///
    /// # Panics
    ///
    /// If a slice does not hold its rows.
    pub fn of_rows(self, (from, stride): (&[f32], usize), [rows, columns]: [usize; 2], to: &mut [f32]) {
        self.0.pair_rows((from, stride), [rows, columns], to);
    }

    /// Pairs neighbours within rows: contiguous rows of `to` have half the length, rounded up. A
    /// missing second neighbour counts as 0.
    ///
    /// # Panics
    ///
    /// If a slice does not hold its rows.
    pub fn of_neighbours(self, (from, stride): (&[f32], usize), [rows, columns]: [usize; 2], to: &mut [f32]) {
        self.0.pair_neighbours((from, stride), [rows, columns], to);
    }
}

/// [`Pairing::of_rows`] for contiguous rows, on all threads.
///
/// # Errors
///
/// If `from` is too short, or `cpu` does not compute with pairs.
pub fn pair_rows(cpu: Cpu, from: &[f32], columns: usize, to: &mut [f32]) -> Result<(), GemmError> {
    /// Rows that are worth a task of their own.
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

/// Returns the vectors of C that a GEMM computes, with partly filled ones. The last few columns
/// beside a packed A have a kernel of their own and count as half a vector.
pub fn vectors(cpu: Cpu, [rows, columns]: [usize; 2], packs_lhs: bool) -> usize {
    let kernel = Kernel::of(cpu);
    let (whole, rest) = (columns / kernel.width() * kernel.width(), columns % kernel.width());
    match packs_lhs && whole > 0 && kernel.has_few_columns(rows, rest) {
        true => rows * (whole / kernel.lanes) + rows / 2,
        false => rows * columns.div_ceil(kernel.lanes),
    }
}
