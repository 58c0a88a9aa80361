//! Matmul kernels, and what all kernels built on GEMM share: scratch memory, errors, widening.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

pub(super) mod coded;
mod gemm;
mod integer;
mod integer_scaled;
mod matmul;
pub(super) mod product;
pub(super) mod real;
pub(super) mod widened;

use std::marker::PhantomData;
use std::ops::Range;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, PackedWeights, Precision};
use ort_core::tensor::TensorView;
use ort_core::{Error, Result, error};

use crate::gemm::{AOperand, Cpu, GemmError, PackedA, STEPS, Weight};

/// Converts an error of the GEMM library to one of the node.
pub(in crate::kernels) fn refused(error: GemmError) -> Error {
    error!(InvalidArgument, "{error}")
}

/// Views scratch memory as values. Planned memory is aligned to 64 bytes.
pub(in crate::kernels) fn scratch<T: bytemuck::Pod>(bytes: &mut [u8]) -> Result<&mut [T]> {
    let len = bytes.len() - bytes.len() % size_of::<T>();
    bytemuck::try_cast_slice_mut(&mut bytes[..len]).map_err(|_| error!(Fail, "the workspace is not aligned"))
}

/// Splits the first `len` values off a piece of scratch memory.
pub(in crate::kernels) fn take<'a, T>(rest: &mut &'a mut [T], len: usize) -> Result<&'a mut [T]> {
    let all = std::mem::take(rest);
    let (first, others) =
        all.split_at_mut_checked(len).ok_or_else(|| error!(Fail, "the workspace is too small"))?;
    *rest = others;
    Ok(first)
}

/// Returns the bytes of `count` values of type `T`, or an error if that overflows.
pub(in crate::kernels) fn bytes_of<T>(count: usize) -> Result<usize> {
    count.checked_mul(size_of::<T>()).ok_or_else(|| error!(OutOfMemory, "a workspace of {count} values"))
}

/// Packed weights in memory that the session accounts for.
pub(crate) struct Packed<T>(PackedWeights, PhantomData<T>);

/// Packed weights in `float`.
pub(super) type PackedFloats = Packed<f32>;

impl<T: bytemuck::Pod> Packed<T> {
    /// Packs `len` values, which `fill` writes.
    pub(super) fn new(
        cx: &mut CompileCx<'_>,
        len: usize,
        fill: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<Packed<T>> {
        let bytes = bytes_of::<T>(len)?.max(4);
        let packed = cx.pack(bytes, |bytes| fill(&mut scratch::<T>(bytes)?[..len]))?;
        Ok(Packed(packed, PhantomData))
    }

    /// Packs a copy of `values`.
    pub(super) fn copy(cx: &mut CompileCx<'_>, values: &[T]) -> Result<Packed<T>> {
        Packed::new(cx, values.len(), |packed| {
            packed.copy_from_slice(values);
            Ok(())
        })
    }

    pub(super) fn values(&self) -> &[T] {
        let bytes = self.0.bytes();
        let whole = bytes.len() - bytes.len() % size_of::<T>().max(1);
        bytemuck::try_cast_slice(bytes.get(..whole).unwrap_or(&[])).unwrap_or(&[])
    }
}

/// Calls `$body` with the elements of a weight of any type that packing widens. Unaligned floats
/// are read in place, because a copy would take as much memory as the packed weight.
macro_rules! with_weight {
    ($view:expr, $weights:ident => $body:expr) => {
        match $view.dtype() {
            ort_core::dtype::DType::F16 => {
                let elements = $view.to_cow::<half::f16>()?;
                let $weights = &*elements;
                $body
            }
            ort_core::dtype::DType::BF16 => {
                let elements = $view.to_cow::<half::bf16>()?;
                let $weights = &*elements;
                $body
            }
            ort_core::dtype::DType::F32 if $view.as_slice::<f32>().is_err() => {
                let $weights: &[[u8; 4]] = bytemuck::try_cast_slice($view.bytes()?).unwrap_or(&[]);
                $body
            }
            _ => {
                let $weights = $view.as_slice::<f32>()?;
                $body
            }
        }
    };
}
pub(super) use with_weight;

/// Returns whether weights of this type can be packed.
pub(super) fn is_weight(dtype: Option<DType>) -> bool {
    matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16))
}

/// Returns the CPU configuration of a GEMM with `rows` rows, for a session that asks for
/// `precision`. A right side that is not packed ahead is converted in each run, which pays only
/// with enough rows.
pub(super) fn product_cpu(threads: usize, precision: Precision, is_packed: bool, rows: usize) -> Cpu {
    const FEWEST_ROWS: usize = 32;
    let pays = is_packed || rows >= FEWEST_ROWS;
    Cpu::with_threads(threads).in_precision(if pays { precision } else { Precision::Fp32 })
}

/// A constant right side of a GEMM, packed.
pub(super) struct PackedRight {
    values: PackedFloats,
    pub(super) k: usize,
    pub(super) columns: usize,
}

impl PackedRight {
    /// Packs the constant input at `index`, a matrix of `shape` (k, columns) under `strides`, and
    /// consumes it.
    pub(super) fn of_input(
        cx: &mut CompileCx<'_>,
        index: usize,
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedRight> {
        let view = cx.constant(index).ok_or_else(|| error!(Fail, "input {index} is no constant"))?;
        let cpu = Cpu::with_threads(cx.threads).in_precision(cx.precision);
        let packed = PackedRight::pack(cx, cpu, (view, 0), [k, columns], strides)?;
        cx.consume(index);
        Ok(packed)
    }

    /// Packs a matrix of `shape` (k, columns) that starts at element `first` of a constant, for a
    /// float32 GEMM.
    pub(super) fn new(
        cx: &mut CompileCx<'_>,
        view: TensorView<'_>,
        first: usize,
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedRight> {
        PackedRight::pack(cx, Cpu::with_threads(cx.threads), (view, first), [k, columns], strides)
    }

    fn pack(
        cx: &mut CompileCx<'_>,
        cpu: Cpu,
        (view, first): (TensorView<'_>, usize),
        [k, columns]: [usize; 2],
        strides: [usize; 2],
    ) -> Result<PackedRight> {
        let len = crate::gemm::PackedB::len(cpu, k, columns);
        let values = PackedFloats::new(
            cx,
            len,
            |packed| with_weight!(view, weights => pack(cpu, weights, first, [k, columns], strides, packed)),
        )?;
        Ok(PackedRight { values, k, columns })
    }

    pub(super) fn operand(&self, cpu: Cpu) -> Result<crate::gemm::BOperand<'_>> {
        let packed = crate::gemm::PackedB::new(cpu, self.values.values(), self.k, self.columns);
        Ok(crate::gemm::BOperand::Packed(packed.map_err(refused)?))
    }
}

/// Column-major left sides, packed in the workspace. Consecutive steps along k are too far apart to
/// be read in place.
#[derive(Clone, Copy)]
pub(super) struct PackedLeft<'a> {
    values: &'a [f32],
    rows: usize,
    k: usize,
}

impl<'a> PackedLeft<'a> {
    /// Values that are packed at once, unless a block of `STEPS` has more. They stay in the L2
    /// cache.
    const AT_ONCE: usize = 1 << 18;

    /// Returns whether packing pays for matmuls of `[rows, columns, k]`: each value must be used
    /// often enough.
    pub(super) fn pays([rows, columns, _]: [usize; 3]) -> bool {
        rows > 1 && columns >= 32
    }

    /// Returns the ranges of k that are packed at once for `count` matmuls, of nearly equal size.
    /// The accumulators carry over from range to range.
    pub(super) fn parts(
        count: usize,
        [rows, _, k]: [usize; 3],
    ) -> impl Iterator<Item = Range<usize>> + Clone {
        let most = (PackedLeft::AT_ONCE / count.saturating_mul(rows).max(1)).max(STEPS);
        let part = k.div_ceil(k.div_ceil(most).max(1)).max(1);
        (0..k.max(1)).step_by(part).map(move |start| start..(start + part).min(k))
    }

    /// Returns the workspace in values for `count` matrices, in whole cache lines.
    pub(super) fn len(cpu: Cpu, count: usize, [rows, _, k]: [usize; 3]) -> usize {
        count.saturating_mul(PackedA::len(cpu, rows, k).next_multiple_of(16))
    }

    /// Packs a range of k of the matrices `[k, rows]` in `from`.
    pub(super) fn new(
        cpu: Cpu,
        from: &[f32],
        [rows, columns, k]: [usize; 3],
        steps: Range<usize>,
        to: &'a mut [f32],
    ) -> Result<PackedLeft<'a>> {
        let shape = [rows, columns, steps.len()];
        let len = PackedLeft::len(cpu, 1, shape).max(1);
        for (from, to) in from.chunks_exact((rows * k).max(1)).zip(to.chunks_exact_mut(len)) {
            let from = from.get(steps.start * rows..).unwrap_or(&[]);
            crate::gemm::pack_a(cpu, from, [rows, steps.len()], [1, rows], to).map_err(refused)?;
        }
        Ok(PackedLeft { values: to, rows, k: steps.len() })
    }

    /// Returns the matrix at `index` as a left operand.
    pub(super) fn operand(&self, cpu: Cpu, index: usize) -> Result<AOperand<'a>, GemmError> {
        let len = PackedA::len(cpu, self.rows, self.k).next_multiple_of(16);
        let values = self.values.get(index * len..).unwrap_or(&[]);
        Ok(AOperand::Packed(PackedA::new(cpu, values, self.rows, self.k)?))
    }
}

fn pack<T: Weight>(
    cpu: Cpu,
    weights: &[T],
    first: usize,
    shape: [usize; 2],
    strides: [usize; 2],
    packed: &mut [f32],
) -> Result<()> {
    let weights =
        weights.get(first..).ok_or_else(|| error!(InvalidGraph, "a weight is shorter than its shape"))?;
    crate::gemm::pack_b(cpu, weights, shape, strides, packed).map_err(refused)
}
