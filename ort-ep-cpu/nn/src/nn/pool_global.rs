//! Global pooling: `GlobalAveragePool`, `GlobalMaxPool` and `GlobalLpPool`.

use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::{Result, error};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::Real;
use ort_cpu_threads::interrupt::{PIECE, pieces, spending};
use ort_cpu_threads::parallel::for_each_row_chunk_mut;
use ort_cpu_vector::reduce;
use ort_cpu_vector::simd::Isa;

const HALVES: TypeSet = TypeSet::of(&[DType::F32, DType::F16, DType::BF16]);
const DOUBLE: TypeSet = TypeSet::of(&[DType::F64]);

/// Registers a global pool by its function of planes, in `float` and in `double`.
macro_rules! global_pools {
    ($($op:literal, $single:expr, $double:expr;)*) => {
        cpu_kernels![$(
            KernelDef {
                op: $op,
                types: &[("T", HALVES)],
                make: |cx| via_f32(cx, |cx| make::<f32>(cx, $single)),
                ..KernelDef::BASE
            },
            KernelDef { op: $op, types: &[("T", DOUBLE)], make: |cx| make::<f64>(cx, $double), ..KernelDef::BASE },
        )*];
    };
}

global_pools! {
    "GlobalAveragePool",
        |planes, to| reduce::means(Isa::current(), planes.values, planes.len, to),
        |planes, to| planes.each(to, |plane| pieces(plane).flatten().sum::<f64>() / plane.len() as f64);
    "GlobalMaxPool",
        |planes, to| planes.each(to, |plane| reduce::max(Isa::current(), plane)),
        // NaN stays, because no value is greater than it.
        |planes, to| planes.each(to, |plane| {
            pieces(plane).flatten().copied().fold(f64::NEG_INFINITY, |max, x| if x > max || x.is_nan() { x } else { max })
        });
    "GlobalLpPool", norms::<f32>, norms::<f64>;
}

/// Planes of `len` values each.
struct Planes<'a, T> {
    values: &'a [T],
    len: usize,
    /// The attribute `p`.
    power: i32,
}

impl<T> Planes<'_, T> {
    /// Writes a function of each plane.
    fn each(&self, to: &mut [T], function: impl Fn(&[T]) -> T) {
        for (at, to) in spending(4 * self.len.min(PIECE), to).enumerate() {
            *to = function(&self.values[at * self.len..][..self.len]);
        }
    }
}

/// Writes a value for each plane.
type OfPlanes<T> = fn(&Planes<'_, T>, &mut [T]);

fn norms<T: Real>(planes: &Planes<'_, T>, to: &mut [T]) {
    planes.each(to, |plane| norm(planes.power, plane));
}

fn norm<T: Real>(power: i32, plane: &[T]) -> T {
    // In doubles, because powers of `f32` overflow early.
    let sum: f64 = pieces(plane).flatten().map(|x| x.to_f64().abs().powi(power)).sum();
    T::from_f64(sum.powf(1.0 / f64::from(power)))
}

/// The fewest values that are worth a task.
const WORTH_A_TASK: usize = 1 << 15;

fn make<T: Real>(cx: &mut CompileCx<'_>, function: OfPlanes<T>) -> Result<Box<dyn Executable>> {
    let power = cx.attrs().find_int("p").unwrap_or(1);
    // A norm with p of 0 would divide by it. Other pools have no `p`.
    let power = i32::try_from(power).ok().filter(|power| *power != 0);
    let power = power.ok_or_else(|| error!(InvalidGraph, "a norm with this p"))?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let (threads, image) = (cx.threads(), cx.input(0)?);
        let plane: usize = image.shape().iter().skip(2).product();
        let image = image.as_slice::<T>()?;
        let result = cx.output(0)?.as_mut_slice::<T>()?;
        let at_once = (WORTH_A_TASK / plane.max(1)).max(1);
        for_each_row_chunk_mut(threads, result, 1, at_once, |first, results| {
            let values = &image[first * plane..][..results.len() * plane];
            function(&Planes { values, len: plane, power }, results);
        });
        Ok(())
    }))
}
