//! `Accumulate`: `sum + value`, or `value` alone.

use ort_core::Result;
use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::spec::RUNTIME;
use ort_core::{ensure, error};

use super::step::{Floats, PART, Parameter};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::simd::Isa;

cpu_kernels![KernelDef { domain: RUNTIME, op: "Accumulate", in_place: &[(0, 0)], make, ..KernelDef::BASE }];

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let dtype = cx.node.dtype(0).ok_or_else(|| error!(Fail, "the sum's type is not known"))?;
    Ok(match dtype {
        DType::F64 => Box::new(run::<f64>),
        _ => Box::new(run::<f32>),
    })
}

fn run<T: Parameter>(cx: &mut RunCx<'_>) -> Result<()> {
    let (isa, threads) = (Isa::current(), cx.threads());
    // Overwriting starts the sum over, whatever it held: a NaN times 0 would stay.
    let overwrites = cx.input(2)?.to_scalar::<bool>()?;
    let value = Floats::of(cx.input(1)?)?;
    let sum = if cx.in_place(0).is_some() { None } else { Some(cx.input(0)?.as_slice::<T>()?) };
    let output = cx.output(0)?.as_mut_slice::<T>()?;
    ensure!(
        value.len() == output.len(),
        InvalidArgument,
        "{} elements are added to a sum of {}",
        value.len(),
        output.len()
    );
    for_each_chunk_mut(threads, output, PART, |index, part| {
        let range = index * PART..index * PART + part.len();
        if overwrites {
            return T::convert(isa, &value, range, part);
        }
        // Without a sum here, the output is the sum's own memory.
        if let Some(sum) = sum {
            part.copy_from_slice(&sum[range.clone()]);
        }
        let mut scratch = [T::zero(); BLOCK];
        for (block, to) in part.chunks_mut(BLOCK).enumerate() {
            let start = range.start + block * BLOCK;
            let values = value.block(isa, start..start + to.len(), &mut scratch);
            to.iter_mut().zip(values).for_each(|(to, value)| *to = *to + *value);
        }
    });
    Ok(())
}

/// Elements that are converted and added at a time.
const BLOCK: usize = 1 << 10;
