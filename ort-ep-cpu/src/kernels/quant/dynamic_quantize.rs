//! `DynamicQuantizeLinear`.

use ort_core::Result;
use ort_core::ep::{Executable, KernelDef, RunCx};

use crate::cpu_kernels;
use crate::parallel::for_each_chunk_mut;
use crate::simd::Isa;
use crate::vector::convert::convert;
use crate::vector::reduce;

cpu_kernels![KernelDef {
    op: "DynamicQuantizeLinear",
    make: |_| Ok(Box::new(run) as Box<dyn Executable>),
    ..KernelDef::BASE
}];

/// Values of one task.
const CHUNK: usize = 1 << 14;

fn run(cx: &mut RunCx<'_>) -> Result<()> {
    let isa = Isa::current();
    let (threads, x) = (cx.threads(), cx.input(0)?.as_slice::<f32>()?);
    // The range always includes zero, so that zero has a code.
    let (least, greatest) = (reduce::min(isa, x).min(0.0), reduce::max(isa, x).max(0.0));
    let scale = (greatest - least) / 255.0;
    let quotient = if scale == 0.0 { 0.0 } else { -least / scale };
    let zero = quotient.clamp(0.0, 255.0).round_ties_even();
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    let y = cx.output(0)?.as_mut_slice::<u8>()?;
    for_each_chunk_mut(threads, y, CHUNK, |chunk, to| {
        let from = &x[chunk * CHUNK..][..to.len()];
        convert(
            isa,
            from,
            to,
            #[inline(always)]
            |x: f32| ((x / divisor).round_ties_even() + zero).clamp(0.0, 255.0) as u8,
        );
    });
    if cx.wants(1) {
        cx.output(1)?.as_mut_slice::<f32>()?.fill(scale);
    }
    if cx.wants(2) {
        cx.output(2)?.as_mut_slice::<u8>()?.fill(zero as u8);
    }
    Ok(())
}
