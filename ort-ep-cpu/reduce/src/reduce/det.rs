//! `Det` by Gaussian elimination with partial pivoting, in double precision.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, matrix_bytes};
use ort_cpu_kernel::number::Number;
use ort_cpu_threads::interrupt::{pieces_mut, spend, spending};

cpu_kernels![KernelDef { op: "Det", make, ..KernelDef::BASE }];

fn make(_: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let bound = |shapes: &IoShapes<'_>| matrix_bytes(shapes.input(0));
    let run = |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let &[.., rows, columns] = input.shape() else {
            return Err(error!(
                InvalidArgument,
                "the input has shape {:?}, expected rank 2 or more",
                input.shape()
            ));
        };
        ensure!(rows == columns, InvalidArgument, "a matrix of {rows} by {columns} has no determinant");
        let dtype = input.dtype();
        for_each_type!(dtype in FLOATS, T => {
            let (from, to) = (input.as_slice::<T>()?, cx.output(0)?.as_mut_slice::<T>()?);
            let mut matrix = vec![0f64; rows * rows];
            // One buffer serves all matrices, because elimination overwrites its input.
            for (index, to) in spending(8, to).enumerate() {
                let from = &from[index * rows * rows..][..rows * rows];
                pieces_mut(&mut matrix).flatten().zip(from).for_each(|(to, x)| *to = x.to_f64());
                *to = T::from_f64(determinant(&mut matrix, rows));
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "determinants of {} are not supported", dtype.name())))
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// Returns the determinant of a square matrix, which is overwritten; 1 for a matrix without rows.
fn determinant(matrix: &mut [f64], size: usize) -> f64 {
    let mut result = 1.0;
    for step in 0..size {
        let at = |row: usize| row * size + step;
        let magnitude = |row: usize| matrix[at(row)].abs();
        // Partial pivoting: dividing by the largest element of the column bounds the growth of
        // rounding errors.
        let pivot =
            (step..size).fold(step, |best, row| if magnitude(row) > magnitude(best) { row } else { best });
        let value = matrix[at(pivot)];
        // A column without a pivot makes the matrix singular.
        if value == 0.0 {
            return 0.0;
        }
        if pivot != step {
            (step..size).for_each(|column| matrix.swap(pivot * size + column, step * size + column));
            result = -result;
        }
        result *= value;
        let (above, below) = matrix.split_at_mut((step + 1) * size);
        let first = &above[step * size..];
        for row in below.chunks_exact_mut(size) {
            spend(size);
            let factor = row[step] / value;
            row.iter_mut().zip(first).skip(step).for_each(|(x, above)| *x -= factor * above);
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::determinant;

    #[test]
    fn determinants() {
        let cases: [(&[f64], f64); 5] = [
            (&[], 1.0),
            (&[3.0], 3.0),
            (&[0.0, 2.0, 3.0, 4.0], -6.0),
            (&[1.0, 2.0, 2.0, 4.0], 0.0),
            (&[2.0, 0.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0, 4.0], 18.0),
        ];
        for (matrix, expected) in cases {
            let size = (matrix.len() as f64).sqrt() as usize;
            let found = determinant(&mut matrix.to_vec(), size);
            assert!((found - expected).abs() < 1e-12, "{matrix:?}: {found}");
        }
    }
}
