//! `CounterDropout`: dropout with a counter-based generator.

use half::{bf16, f16};
use ort_core::dtype::Element;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::{Result, ensure, error, for_each_type};

use super::step::{BLOCK, PART, Stream};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::convert::{bf16_from_f32, f16_from_f32, f32_from_bf16, f32_from_f16};
use ort_cpu_vector::random::{Dropout, dropout};
use ort_cpu_vector::simd::Isa;

cpu_kernels![KernelDef {
    domain: RUNTIME,
    op: "CounterDropout",
    in_place: &[(0, 0)],
    make,
    ..KernelDef::BASE
}];

/// An element type that supports dropout. Half precision is divided in `f32` and rounded once.
trait Dropped: Element {
    /// Drops elements of a block, which begins at element `first`.
    fn drop(isa: Isa, rule: &Dropout, first: u64, ratio: f32, block: &mut [Self]);
}

impl Dropped for f32 {
    fn drop(isa: Isa, rule: &Dropout, first: u64, ratio: f32, block: &mut [f32]) {
        dropout(isa, rule, first, 1.0 - ratio, block);
    }
}

impl Dropped for f64 {
    fn drop(isa: Isa, rule: &Dropout, first: u64, ratio: f32, block: &mut [f64]) {
        dropout(isa, rule, first, 1.0 - f64::from(ratio), block);
    }
}

impl Dropped for f16 {
    fn drop(isa: Isa, rule: &Dropout, first: u64, ratio: f32, block: &mut [f16]) {
        let mut wide = [0.0; BLOCK];
        let wide = &mut wide[..block.len()];
        f32_from_f16(isa, block, wide);
        dropout(isa, rule, first, 1.0 - ratio, wide);
        f16_from_f32(isa, wide, block);
    }
}

impl Dropped for bf16 {
    fn drop(isa: Isa, rule: &Dropout, first: u64, ratio: f32, block: &mut [bf16]) {
        let mut wide = [0.0; BLOCK];
        let wide = &mut wide[..block.len()];
        f32_from_bf16(isa, block, wide);
        dropout(isa, rule, first, 1.0 - ratio, wide);
        bf16_from_f32(isa, wide, block);
    }
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let stream = cx.attrs().int("stream")?;
    let dtype = cx.node.dtype(0).ok_or_else(|| error!(Fail, "the type of the data is not known"))?;
    for_each_type!(dtype in FLOATS, T => {
        Ok(Box::new(move |cx: &mut RunCx<'_>| run::<T>(cx, stream)))
    }, else => Err(error!(NotImplemented, "CounterDropout of {} is not supported", dtype.name())))
}

fn run<T: Dropped>(cx: &mut RunCx<'_>, stream: i64) -> Result<()> {
    let ratio = cx.input(1)?.to_scalar::<f32>()?;
    ensure!(
        (0.0..1.0).contains(&ratio),
        InvalidArgument,
        help = "the ratio is the share that is dropped",
        "the ratio of CounterDropout is {ratio}, expected 0 or more and less than 1"
    );
    // An element's random number follows from seed, stream, step and its index alone.
    let (seed, step) = (cx.input(2)?.to_scalar::<i64>()?, cx.input(3)?.to_scalar::<i64>()?);
    let (isa, threads) = (Isa::current(), cx.threads());
    let mut data = Stream::<T>::of(cx, 0, 0)?;
    // A ratio of 0 would divide by 1, so a copy is all that is left to do.
    if ratio == 0.0 {
        data.keep();
        return Ok(());
    }
    let (rule, len) = (Dropout::new(ratio, seed, stream, step), data.len());
    let starts = (0..len).step_by(PART);
    let mut parts: Vec<(usize, Stream<'_, T>)> =
        starts.map(|start| (start, data.take(PART.min(len - start)))).collect();
    for_each_chunk_mut(threads, &mut parts, 1, |_, parts| {
        for (start, part) in parts {
            let len = PART.min(len - *start);
            for at in (0..len).step_by(BLOCK) {
                // The operator's only output is wanted, so the block needs no scratch.
                let block = part.block(at..(at + BLOCK).min(len), &mut []);
                T::drop(isa, &rule, (*start + at) as u64, ratio, block);
            }
        }
    });
    Ok(())
}
