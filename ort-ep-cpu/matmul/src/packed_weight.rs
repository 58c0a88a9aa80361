//! Right sides of GEMM that are packed when a session is created.

use std::ops::Range;

use ort_core::ep::{CompileCx, Precision};
use ort_core::tensor::TensorView;
use ort_core::{Result, error};

use crate::refused;
use ort_cpu_gemm::{Cpu, PackedRhs, RhsOperand, pack_rhs_in_parts};
use ort_cpu_kernel::packed::PackedFloats;
use ort_cpu_kernel::with_weight;

/// Returns the CPU configuration of a GEMM with `rows` rows, for a session that asks for
/// `precision`. A right side that is not packed ahead is converted in each run, which pays only
/// with enough rows.
pub fn gemm_cpu(threads: usize, precision: Precision, is_packed: bool, rows: usize) -> Cpu {
    const FEWEST_ROWS: usize = 32;
    // The conversion to bf16 pairs is linear in the right side, and the GEMM saves time in
    // proportion to the rows.
    let pays = is_packed || rows >= FEWEST_ROWS;
    Cpu::with_threads(threads).in_precision(if pays { precision } else { Precision::Fp32 })
}

/// A constant right side of a GEMM, packed.
pub struct PackedWeight {
    values: PackedFloats,
    /// The rows of the right side.
    pub k: usize,
    /// The columns of the right side.
    pub columns: usize,
}

impl PackedWeight {
    /// Packs the constant input at `index`, a matrix of `shape` (k, columns) under `strides`, and
    /// consumes it.
    pub fn of_input(
        cx: &mut CompileCx<'_>,
        index: usize,
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedWeight> {
        let view = cx.constant(index).ok_or_else(|| error!(Fail, "input {index} is no constant"))?;
        // The precision is fixed here, because it decides the packed layout.
        let cpu = Cpu::with_threads(cx.threads).in_precision(cx.precision);
        let packed = PackedWeight::pack(cx, cpu, (view, 0), [k, columns], strides)?;
        // Runs read the packed copy, so the constant's mapped pages can be released.
        cx.consume(index);
        Ok(packed)
    }

    /// Packs a matrix of `shape` (k, columns) that starts at element `first` of a constant, for a
    /// float32 GEMM.
    pub fn new(
        cx: &mut CompileCx<'_>,
        view: TensorView<'_>,
        first: usize,
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedWeight> {
        PackedWeight::pack(cx, Cpu::with_threads(cx.threads), (view, first), [k, columns], strides)
    }

    fn pack(
        cx: &mut CompileCx<'_>,
        cpu: Cpu,
        (view, first): (TensorView<'_>, usize),
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedWeight> {
        let len = PackedRhs::len(cpu, k, columns);
        let (release, bytes) = (cx.release(), view.bytes().unwrap_or(&[]));
        let size = view.dtype().byte_size().unwrap_or(1);
        let done = |part: Range<usize>| {
            let part = bytes.get((first + part.start) * size..(first + part.end) * size);
            part.into_iter().for_each(release);
        };
        let values = PackedFloats::new(cx, len, |packed| {
            with_weight!(view, weights => {
                let weights = weights.get(first..).unwrap_or(&[]);
                pack_rhs_in_parts(cpu, weights, [k, columns], strides, packed, &done).map_err(refused)
            })
        })?;
        Ok(PackedWeight { values, k, columns })
    }

    /// Returns the packed matrix as an operand of GEMM.
    pub fn operand(&self, cpu: Cpu) -> Result<RhsOperand<'_>> {
        let packed = PackedRhs::new(cpu, self.values.values(), self.k, self.columns);
        Ok(RhsOperand::Packed(packed.map_err(refused)?))
    }
}
