//! Weights that are packed for GEMM when a session is created.

#![allow(
    clippy::indexing_slicing,
    reason = "places are counted over shapes that inference checked and that views are as long as"
)]

use std::marker::PhantomData;

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, PackedWeights, Precision};
use ort_core::tensor::TensorView;
use ort_core::{Result, error};

use crate::workspace::{bytes_of, refused, scratch};
use ort_cpu_gemm::{Cpu, Weight};

/// Packed weights in memory that the session accounts for.
pub struct Packed<T>(PackedWeights, PhantomData<T>);

/// Packed weights in `float`.
pub type PackedFloats = Packed<f32>;

impl<T: bytemuck::Pod> Packed<T> {
    /// Packs `len` values, which `fill` writes.
    pub fn new(
        cx: &mut CompileCx<'_>,
        len: usize,
        fill: impl FnOnce(&mut [T]) -> Result<()>,
    ) -> Result<Packed<T>> {
        // A weight without values still gets memory, so that its pointer can be aligned and cast.
        let bytes = bytes_of::<T>(len)?.max(4);
        let packed = cx.pack(bytes, |bytes| fill(&mut scratch::<T>(bytes)?[..len]))?;
        Ok(Packed(packed, PhantomData))
    }

    /// Packs a copy of `values`.
    pub fn copy(cx: &mut CompileCx<'_>, values: &[T]) -> Result<Packed<T>> {
        Packed::new(cx, values.len(), |packed| {
            packed.copy_from_slice(values);
            Ok(())
        })
    }

    /// Returns the packed values.
    pub fn values(&self) -> &[T] {
        let bytes = self.0.bytes();
        // The minimum above may leave a part of an element.
        let whole = bytes.len() - bytes.len() % size_of::<T>().max(1);
        bytemuck::try_cast_slice(bytes.get(..whole).unwrap_or(&[])).unwrap_or(&[])
    }
}

/// Calls `$body` with the elements of a weight of any type that packing widens. Unaligned floats
/// are read in place, because a copy would take as much memory as the packed weight.
#[macro_export]
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
/// Returns whether weights of this type can be packed.
pub fn is_weight(dtype: Option<DType>) -> bool {
    matches!(dtype, Some(DType::F32 | DType::F16 | DType::BF16))
}

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
        let len = ort_cpu_gemm::PackedRhs::len(cpu, k, columns);
        let values = PackedFloats::new(
            cx,
            len,
            |packed| with_weight!(view, weights => pack(cpu, weights, first, [k, columns], strides, packed)),
        )?;
        Ok(PackedWeight { values, k, columns })
    }

    /// Returns the packed matrix as an operand of GEMM.
    pub fn operand(&self, cpu: Cpu) -> Result<ort_cpu_gemm::RhsOperand<'_>> {
        let packed = ort_cpu_gemm::PackedRhs::new(cpu, self.values.values(), self.k, self.columns);
        Ok(ort_cpu_gemm::RhsOperand::Packed(packed.map_err(refused)?))
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
    ort_cpu_gemm::pack_rhs(cpu, weights, shape, strides, packed).map_err(refused)
}
