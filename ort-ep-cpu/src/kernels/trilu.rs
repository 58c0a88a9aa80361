//! `Trilu`: the upper or lower triangle of each matrix.

use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, ensure};

use crate::cpu_kernels;

cpu_kernels![KernelDef { op: "Trilu", make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let upper = cx.attrs().flag("upper")?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| trilu(cx, upper)))
}

fn trilu(cx: &mut RunCx<'_>, upper: bool) -> Result<()> {
    let diagonal = cx.find_input(1).map(|k| k.to_scalar::<i64>()).transpose()?.unwrap_or(0);
    let input = cx.input(0)?;
    let &[.., rows, columns] = input.shape() else {
        ensure!(input.rank() >= 2, InvalidArgument, "Trilu needs rank 2 or more, got {:?}", input.shape());
        return Ok(());
    };
    let width = input.dtype().byte_size().unwrap_or(1);
    let from = input.bytes()?;
    let to = cx.output(0)?.bytes_mut()?;
    to.fill(0);
    let row_bytes = columns * width;
    if row_bytes == 0 {
        return Ok(());
    }
    for (index, (from, to)) in from.chunks_exact(row_bytes).zip(to.chunks_exact_mut(row_bytes)).enumerate() {
        let edge = (index % rows) as i128 + i128::from(diagonal);
        let kept = if upper {
            edge.clamp(0, columns as i128) as usize..columns
        } else {
            0..(edge + 1).clamp(0, columns as i128) as usize
        };
        let bytes = kept.start * width..kept.end * width;
        to[bytes.clone()].copy_from_slice(&from[bytes]);
    }
    Ok(())
}
