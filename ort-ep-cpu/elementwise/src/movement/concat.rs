//! Concatenation (`Concat`).
//!
//! Each input contributes one contiguous run per index of the dimensions before the axis.

use ort_core::ep::CompileCx;
use ort_core::ops::tensor::geometry::normalize_axis;
use ort_core::{Result, ensure};
use smallvec::SmallVec;

use ort_cpu_threads::interrupt;
use ort_cpu_threads::parallel::for_each_row_chunk_mut;

use super::strided::copy_all;
use super::{Cell, Io, Movement, Operands, movement, only};

movement!["Concat", |cx: &mut CompileCx<'_>| Ok(Concat { axis: cx.attrs().int("axis")? })];

struct Concat {
    axis: i64,
}

impl Movement for Concat {
    fn operands(&self, inputs: usize) -> Operands {
        (0..inputs).collect()
    }

    fn apply<T: Cell>(&self, io: &Io<'_>, from: &[&[T]], to: &mut [Option<&mut [T]>]) -> Result<()> {
        let shape = io.output_shape(0);
        let axis = normalize_axis(self.axis, shape.len())?;
        let outer: usize = shape[..axis].iter().product();
        let to = only(to)?;
        let total: usize = from.iter().map(|cells| cells.len()).sum();
        ensure!(total == to.len(), Fail, "{total} elements joined to shape {shape:?}");
        if to.is_empty() {
            return Ok(());
        }
        // Along the outermost axis, each input is one contiguous copy.
        if outer == 1 {
            let mut rest = to;
            for cells in from {
                let (part, after) = rest.split_at_mut(cells.len());
                copy_all(cells, part, io.threads)?;
                rest = after;
            }
            return Ok(());
        }
        let runs: SmallVec<[(usize, &[T]); 8]> =
            from.iter().map(|&cells| (cells.len() / outer, cells)).collect();
        // Equal totals are not enough: each input must divide into whole runs.
        let whole = runs.iter().all(|(run, cells)| run * outer == cells.len());
        ensure!(whole, InvalidArgument, "an input does not fit the output shape {shape:?}");
        let row = to.len() / outer;
        let least_rows = ((64 << 10) / (row * size_of::<T>()).max(1)).max(1);
        for_each_row_chunk_mut(io.threads, to, row, least_rows, |first, rows| {
            for (index, row) in rows.chunks_exact_mut(row).enumerate() {
                let mut rest = row;
                for (run, cells) in &runs {
                    let (part, after) = rest.split_at_mut(*run);
                    let start = (first + index) * run;
                    interrupt::copy(&cells[start..start + run], part);
                    rest = after;
                }
            }
        });
        Ok(())
    }
}
