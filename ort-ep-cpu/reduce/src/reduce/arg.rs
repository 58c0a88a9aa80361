//! `ArgMax` and `ArgMin` along an axis.

use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure, error, for_each_type};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::layout::around_axis;
use ort_cpu_kernel::number::Number;
use ort_cpu_threads::interrupt::spending;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

/// The fewest elements that are worth a thread.
const GRAIN: usize = 1 << 14;
/// Columns whose best values are tracked at a time.
const TILE: usize = 128;

cpu_kernels![
    KernelDef { op: "ArgMax", make: |cx| make(cx, true), ..KernelDef::BASE },
    KernelDef { op: "ArgMin", make: |cx| make(cx, false), ..KernelDef::BASE },
];

fn make(cx: &mut CompileCx<'_>, greatest: bool) -> Result<Box<dyn Executable>> {
    let (axis, last) = (cx.attrs().int("axis")?, cx.attrs().flag("select_last_index")?);
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let input = cx.input(0)?;
        let (sizes, threads) = (around_axis(input.shape(), axis)?, cx.threads());
        let to = cx.output(0)?.as_mut_slice::<i64>()?;
        ensure!(to.is_empty() || sizes[1] > 0, InvalidArgument, "axis {axis} has no element to choose");
        ensure!(to.len() == sizes[0] * sizes[2], Fail, "{} outputs for shape {:?}", to.len(), input.shape());
        let dtype = input.dtype();
        for_each_type!(dtype in NUMERIC, T => {
            let from = input.as_slice::<T>()?;
            match (greatest, last) {
                (true, false) => search(threads, sizes, from, to, |x: T, best| x > best),
                (true, true) => search(threads, sizes, from, to, |x: T, best| x >= best),
                (false, false) => search(threads, sizes, from, to, |x: T, best| x < best),
                (false, true) => search(threads, sizes, from, to, |x: T, best| x <= best),
            }
            Ok(())
        }, else => Err(error!(NotImplemented, "comparing {}", dtype.name())))
    }))
}

/// Finds the position of the best element of each lane. As in NumPy, NaN is better than every
/// number.
fn search<T: Number>(
    threads: usize,
    [_, len, inner]: [usize; 3],
    from: &[T],
    to: &mut [i64],
    better: impl Fn(T, T) -> bool + Sync,
) {
    // Ties go to the last position if `better` holds for equal values.
    let last = better(T::default(), T::default());
    let better = |x: T, best: T| better(x, best) && !best.is_nan() || x.is_nan() && (last || !best.is_nan());
    for_each_row_chunk_mut(threads, to, 1, (GRAIN / len.max(1)).max(1), |first, piece| {
        let (mut index, mut rest) = (first, piece);
        while !rest.is_empty() {
            // Adjacent lanes are searched together, because their elements share cache lines.
            let width = (inner - index % inner).min(TILE).min(rest.len());
            let (tile, after) = rest.split_at_mut(width);
            let start = index / inner * len * inner + index % inner;
            tile.fill(0);
            let mut best = [T::default(); TILE];
            best[..width].copy_from_slice(&from[start..start + width]);
            for place in spending(width, 1..len) {
                let row = &from[start + place * inner..][..width];
                for ((&x, best), found) in row.iter().zip(&mut best).zip(&mut *tile) {
                    if better(x, *best) {
                        (*best, *found) = (x, place as i64);
                    }
                }
            }
            (index, rest) = (index + width, after);
        }
    });
}
