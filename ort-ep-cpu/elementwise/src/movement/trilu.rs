//! Upper and lower triangles (`Trilu`).

use ort_core::ep::CompileCx;
use ort_core::{Result, ensure};

use ort_cpu_threads::interrupt;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::{Cell, Io, Movement, movement, only, operand};

movement!["Trilu", |cx: &mut CompileCx<'_>| Ok(Trilu { upper: cx.attrs().flag("upper")? }), unaligned: &[0]];

struct Trilu {
    upper: bool,
}

impl Movement for Trilu {
    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let diagonal = io.find(1).map(|k| k.to_scalar::<i64>()).transpose()?.unwrap_or(0);
        let shape = io.shape(0)?;
        let &[.., height, width] = shape else {
            ensure!(shape.len() >= 2, InvalidArgument, "Trilu needs rank 2 or more, got {shape:?}");
            return Ok(());
        };
        let (from, to) = (operand(from, 0, shape)?, only(to)?);
        ensure!(from.len() == to.len(), Fail, "the output does not have the shape {shape:?}");
        let least_rows = (64 << 10) / (width * size_of::<T>()).max(1) + 1;
        for_each_row_chunk_mut(io.threads, to, width, least_rows, |first, rows| {
            for (index, row) in rows.chunks_exact_mut(width).enumerate() {
                let row_index = first + index;
                // `i128`, because the diagonal may be any `i64`.
                let edge = (row_index % height) as i128 + i128::from(diagonal);
                let kept = if self.upper {
                    edge.clamp(0, width as i128) as usize..width
                } else {
                    0..(edge + 1).clamp(0, width as i128) as usize
                };
                interrupt::fill(row, T::ZERO);
                let start = row_index * width;
                interrupt::copy(&from[start + kept.start..start + kept.end], &mut row[kept]);
            }
        });
        Ok(())
    }
}
