//! Matrix inversion (`Inverse`): Gauss-Jordan elimination with partial pivoting in double
//! precision.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::heap::{WithHeap, matrix_bytes};
use ort_cpu_kernel::number::Number;
use ort_cpu_threads::interrupt::{pieces_mut, spend, spending};

cpu_kernels![KernelDef { domain: MICROSOFT, op: "Inverse", make, ..KernelDef::BASE }];

fn make(_: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    // The matrix and its inverse as `f64`.
    let bound = |shapes: &IoShapes<'_>| matrix_bytes(shapes.input(0)).saturating_mul(2);
    let run = |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let &[.., rows, columns] = input.shape() else {
            return Err(error!(
                InvalidArgument,
                "the input has shape {:?}, expected rank 2 or more",
                input.shape()
            ));
        };
        ensure!(rows == columns, InvalidArgument, "a matrix of {rows} by {columns} has no inverse");
        let dtype = input.dtype();
        for_each_type!(dtype in FLOATS, T => {
            let (from, to) = (input.as_slice::<T>()?, cx.output(0)?.as_mut_slice::<T>()?);
            // `chunks_exact` panics on a length of 0.
            let size = (rows * rows).max(1);
            let (mut matrix, mut inverse) = (vec![0f64; size], vec![0f64; size]);
            for (from, to) in spending(8, from.chunks_exact(size).zip(to.chunks_exact_mut(size))) {
                pieces_mut(&mut matrix).flatten().zip(from).for_each(|(to, x)| *to = x.to_f64());
                invert(&mut matrix, &mut inverse, rows);
                pieces_mut(to).flatten().zip(&inverse).for_each(|(to, x)| *to = T::from_f64(*x));
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "inverses of {} are not supported", dtype.name())))
    };
    Ok(Box::new(WithHeap { bound, run }))
}

/// Writes the inverse of a square matrix and destroys the matrix. The inverse of a singular matrix
/// has non-finite elements.
fn invert(matrix: &mut [f64], inverse: &mut [f64], size: usize) {
    for (row, values) in inverse.chunks_exact_mut(size.max(1)).take(size).enumerate() {
        spend(size);
        values.fill(0.0);
        values[row] = 1.0;
    }
    for step in 0..size {
        // Partial pivoting: the greatest element of the column limits the growth of rounding
        // errors.
        let magnitude = |row: usize| matrix[row * size + step].abs();
        let pivot =
            (step..size).fold(step, |best, row| if magnitude(row) > magnitude(best) { row } else { best });
        // A pivot of zero makes this infinite, which marks the matrix as singular in the result.
        let factor = 1.0 / matrix[pivot * size + step];
        for side in [&mut *matrix, &mut *inverse] {
            for column in 0..size {
                side.swap(pivot * size + column, step * size + column);
                side[step * size + column] *= factor;
            }
        }
        // Gauss-Jordan also eliminates above the pivot, so no back substitution follows.
        for row in (0..size).filter(|&row| row != step) {
            spend(4 * size);
            let factor = matrix[row * size + step];
            for side in [&mut *matrix, &mut *inverse] {
                for column in 0..size {
                    side[row * size + column] -= factor * side[step * size + column];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::invert;

    #[test]
    fn inverses() {
        let cases: [(&[f64], &[f64]); 3] = [
            (&[4.0], &[0.25]),
            (&[0.0, 2.0, 1.0, 0.0], &[0.0, 1.0, 0.5, 0.0]),
            (&[4.0, 7.0, 2.0, 6.0], &[0.6, -0.7, -0.2, 0.4]),
        ];
        for (matrix, expected) in cases {
            let size = matrix.len().isqrt();
            let mut found = vec![0.0; matrix.len()];
            invert(&mut matrix.to_vec(), &mut found, size);
            let close = found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
            assert!(close, "{matrix:?}: {found:?}");
        }
        let mut found = [0.0; 4];
        invert(&mut [1.0, 1.0, 1.0, 1.0], &mut found, 2);
        assert!(found.iter().any(|x| !x.is_finite()), "a singular matrix: {found:?}");
    }
}
