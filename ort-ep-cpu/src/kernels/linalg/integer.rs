//! `MatMulInteger` and `QLinearMatMul`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{Executable, IoShapes, KernelDef, RunCx};
use ort_core::tensor::{TensorView, element_count};
use ort_core::{Result, ensure, error};

use super::product::Product;
use super::{bytes_of, refused, scratch};
use crate::cpu_kernels;
use crate::gemm::Cpu;
use crate::gemm::generic::View;
use crate::gemm::integer::{self, ZeroPoints};
use crate::kernels::quant::codes::{read_floats, write_codes};

cpu_kernels![
    KernelDef { op: "MatMulInteger", make: |_| Ok(Box::new(matmul_integer)), ..KernelDef::BASE },
    KernelDef {
        op: "QLinearMatMul",
        types: &[
            ("T1", TypeSet::of(&[DType::I8, DType::U8])),
            ("T2", TypeSet::of(&[DType::I8, DType::U8])),
            ("T3", TypeSet::of(&[DType::I8, DType::U8])),
        ],
        make: |_| Ok(Box::new(QLinear { float: false })),
        ..KernelDef::BASE
    },
    // With 8-bit floats on a side, the sums are floats too.
    KernelDef {
        op: "QLinearMatMul",
        rank: -1,
        make: |_| Ok(Box::new(QLinear { float: true })),
        ..KernelDef::BASE
    },
];

/// Zero points as the product takes them: one for all, one for each row of A, or one for each column of B.
fn zero_points(view: Option<TensorView<'_>>) -> Result<Vec<i32>> {
    let ints = view.map(|view| view.to_ints()).transpose()?.unwrap_or_default();
    let fits =
        |value: i64| i32::try_from(value).map_err(|_| error!(InvalidArgument, "a zero point of {value}"));
    ints.into_iter().map(fits).collect()
}

/// The zero points of the matrix at `index` of a side: they are for all matrices, or for each its own.
fn of_matrix(zero: &[i32], per_matrix: usize, index: usize) -> &[i32] {
    if zero.len() > per_matrix {
        zero.get(index * per_matrix..(index + 1) * per_matrix).unwrap_or(zero)
    } else {
        zero
    }
}

fn matmul_integer(cx: &mut RunCx<'_>) -> Result<()> {
    let (a, b) = (cx.input(0)?, cx.input(1)?);
    let zeros = [zero_points(cx.find_input(2))?, zero_points(cx.find_input(3))?];
    let cpu = Cpu::with_threads(cx.threads());
    let result = cx.output(0)?.as_mut_slice::<i32>()?;
    products(cpu, [a, b], [&zeros[0], &zeros[1]], result)
}

/// All products of a batch.
pub(crate) fn products(
    cpu: Cpu,
    [a, b]: [TensorView<'_>; 2],
    zeros: [&[i32]; 2],
    result: &mut [i32],
) -> Result<()> {
    macro_rules! by_types {
        ($($left:ty, $right:ty;)*) => {
            match (a.dtype(), b.dtype()) {
                $((<$left as ort_core::dtype::Element>::DTYPE, <$right as ort_core::dtype::Element>::DTYPE) => {
                    let product = Product::new(a.shape(), b.shape())?;
                    let [rows, columns, k] = product.shape;
                    let (a, b) = (a.as_slice::<$left>()?, b.as_slice::<$right>()?);
                    for (index, result) in result.chunks_mut((rows * columns).max(1)).enumerate() {
                        let offsets = product.offsets(index);
                        let left = View::new(a.get(offsets[0]..).unwrap_or(&[]), [rows, k], [k, 1]).map_err(refused)?;
                        let right =
                            View::new(b.get(offsets[1]..).unwrap_or(&[]), [k, columns], [columns, 1]).map_err(refused)?;
                        // Where a side is repeated, so are its zero points.
                        let matrices = product.matrices(index);
                        let a_zero = of_matrix(zeros[0], rows, matrices[0]);
                        let b_zero = of_matrix(zeros[1], columns, matrices[1]);
                        let left = (left, ZeroPoints::new(a_zero));
                        integer::multiply(cpu, left, (right, ZeroPoints::new(b_zero)), result).map_err(refused)?;
                    }
                    Ok(())
                })*
                _ => Err(error!(InvalidArgument, "a product of {} and {}", a.dtype(), b.dtype())),
            }
        };
    }
    by_types! { u8, u8; u8, i8; i8, u8; i8, i8; }
}

struct QLinear {
    float: bool,
}

/// Scales or zero points of matrices: one for all, one for each place along rows or columns, or those for each matrix.
struct Granularity {
    values: Vec<f32>,
    count: usize,
}

impl Granularity {
    fn new(view: TensorView<'_>, count: usize) -> Result<Granularity> {
        let values = read_floats(view)?.into_owned();
        ensure!(!values.is_empty(), InvalidArgument, "a scale has no element");
        Ok(Granularity { values, count })
    }

    fn at(&self, matrix: usize, along: usize) -> f32 {
        match self.values.len() {
            1 => self.values[0],
            len if len == self.count => self.values[along],
            len => self.values[(matrix * self.count + along) % len],
        }
    }
}

impl Executable for QLinear {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        bytes_of::<f32>(element_count(shapes.output(0))?.max(1) * 2)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let cpu = Cpu::with_threads(cx.threads());
        let workspace = cx.workspace()?;
        let (a, b) = (cx.input(0)?, cx.input(3)?);
        let product = Product::new(a.shape(), b.shape())?;
        let [rows, columns, k] = product.shape;
        let (a_scale, b_scale) =
            (Granularity::new(cx.input(1)?, rows)?, Granularity::new(cx.input(4)?, columns)?);
        let (y_scale, y_zero) =
            (Granularity::new(cx.input(6)?, rows)?, Granularity::new(cx.input(7)?, rows)?);
        let (a_zero, b_zero) = (cx.input(2)?, cx.input(5)?);
        let output = cx.output(0)?;
        let count = output.element_count();
        let (sums, ints) = workspace.split_at_mut(bytes_of::<f32>(count)?);
        let sums = scratch::<f32>(sums)?;
        if self.float {
            let (a_zero, b_zero) = (Granularity::new(a_zero, rows)?, Granularity::new(b_zero, columns)?);
            let (a, b) = (read_floats(a)?, read_floats(b)?);
            for (index, sums) in sums.chunks_mut((rows * columns).max(1)).enumerate() {
                let ([left, right], matrices) = (product.offsets(index), product.matrices(index));
                for (at, sum) in sums.iter_mut().enumerate() {
                    let (row, column) = (at / columns, at % columns);
                    let terms = (0..k).map(|step| {
                        let a = a[left + row * k + step] - a_zero.at(matrices[0], row);
                        a * (b[right + step * columns + column] - b_zero.at(matrices[1], column))
                    });
                    *sum = terms.sum();
                }
            }
        } else {
            let zeros = [zero_points(Some(a_zero))?, zero_points(Some(b_zero))?];
            let ints = &mut scratch::<i32>(ints)?[..count];
            products(cpu, [a, b], [&zeros[0], &zeros[1]], ints)?;
            sums.iter_mut().zip(ints).for_each(|(sum, int)| *sum = *int as f32);
        }
        let is_float = !output.dtype().is_integer();
        for (index, sums) in sums.chunks_mut((rows * columns).max(1)).enumerate() {
            let [left, right] = product.matrices(index);
            for (at, value) in sums.iter_mut().enumerate() {
                let (row, column) = (at / columns, at % columns);
                let scale = a_scale.at(left, row) * b_scale.at(right, column) / y_scale.at(index, row);
                let scaled = *value * scale;
                *value = y_zero.at(index, row) + if is_float { scaled } else { scaled.round_ties_even() };
            }
        }
        write_codes(cpu.threads, sums, true, output)
    }
}
