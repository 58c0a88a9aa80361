//! `GlobalNorm` and `AllFinite`, over any number of gradients of mixed types.
//!
//! Each part has its own sum, in doubles, and the sums are added in the order of the parts.

use std::ops::Range;

use ort_core::Result;
use ort_core::ep::{Executable, KernelDef, RunCx};
use ort_core::spec::RUNTIME;

use super::step::{BLOCK, Floats, PART};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::training::{all_finite, sum_of_squares};

cpu_kernels![
    KernelDef { domain: RUNTIME, op: "GlobalNorm", make: |_| Ok(Box::new(Norm)), ..KernelDef::BASE },
    KernelDef { domain: RUNTIME, op: "AllFinite", make: |_| Ok(Box::new(Finite)), ..KernelDef::BASE },
];

struct Norm;
struct Finite;

impl Executable for Norm {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        // Squares are summed in doubles, where those of narrower types cannot overflow.
        let parts = over_parts(cx, 0.0, |isa, floats, range| match floats {
            Floats::F64(values) => sum_of_squares(isa, &values[range]),
            _ => {
                let mut sum = 0.0;
                singles(isa, floats, range, |block| sum += sum_of_squares(isa, block));
                sum
            }
        })?;
        // The order of the parts is fixed, so the bits do not depend on the threads.
        let norm = parts.into_iter().sum::<f64>().sqrt();
        cx.output(0)?.as_mut_slice::<f32>()?.fill(norm as f32);
        Ok(())
    }
}

impl Executable for Finite {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let parts = over_parts(cx, true, |isa, floats, range| match floats {
            Floats::F64(values) => all_finite(isa, &values[range]),
            _ => {
                let mut finite = true;
                singles(isa, floats, range, |block| finite &= all_finite(isa, block));
                finite
            }
        })?;
        let finite = parts.into_iter().all(|finite| finite);
        cx.output(0)?.bytes_mut()?.fill(u8::from(finite));
        Ok(())
    }
}

/// Returns the result of `of` for each part of each gradient, in order.
fn over_parts<R: Copy + Send>(
    cx: &RunCx<'_>,
    first: R,
    of: impl Fn(Isa, &Floats<'_>, Range<usize>) -> R + Sync,
) -> Result<Vec<R>> {
    let gradients: Vec<Floats<'_>> =
        (0..cx.input_count()).map(|index| Floats::of(cx.input(index)?)).collect::<Result<_>>()?;
    // A part never spans two gradients, because these may have different types.
    let parts = gradients.iter().flat_map(|floats| {
        let starts = (0..floats.len()).step_by(PART);
        starts.map(move |start| (floats, start..(start + PART).min(floats.len()), first))
    });
    let mut parts: Vec<(&Floats<'_>, Range<usize>, R)> = parts.collect();
    let isa = Isa::current();
    for_each_chunk_mut(cx.threads(), &mut parts, 1, |_, parts| {
        for (floats, range, result) in parts {
            *result = of(isa, floats, range.clone());
        }
    });
    Ok(parts.into_iter().map(|(.., result)| result).collect())
}

/// Calls `task` with the values at `range` in blocks of `f32`, which represents all narrower types.
fn singles(isa: Isa, floats: &Floats<'_>, range: Range<usize>, mut task: impl FnMut(&[f32])) {
    let mut converted = [0.0; BLOCK];
    for start in range.clone().step_by(BLOCK) {
        task(floats.block(isa, start..(start + BLOCK).min(range.end), &mut converted));
    }
}
