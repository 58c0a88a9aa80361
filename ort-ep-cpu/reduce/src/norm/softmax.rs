//! `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`: functions of each lane along an axis.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};

use crate::reduce::rows::{self, Magnitude, Plus, Scale, Square};
use ort_cpu_kernel::axis_lanes::apply;
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::lane_fn::LaneFn;
use ort_cpu_threads::interrupt::{self, pieces, pieces_mut};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::slices::map_in_place;
use ort_cpu_vector::softmax::{Softmax, softmax_columns_in_place, softmax_row_in_place};

cpu_kernels![
    KernelDef {
        op: "Softmax",
        in_place: &[(0, 0)],
        make: |cx| make(cx, Normalizer::Softmax),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "LogSoftmax",
        in_place: &[(0, 0)],
        make: |cx| make(cx, Normalizer::LogSoftmax),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "Hardmax",
        in_place: &[(0, 0)],
        make: |cx| make(cx, Normalizer::Hardmax),
        ..KernelDef::BASE
    },
    KernelDef { op: "LpNormalization", in_place: &[(0, 0)], make: make_lp, ..KernelDef::BASE },
];

#[derive(Clone, Copy)]
enum Normalizer {
    Softmax,
    LogSoftmax,
    Hardmax,
    L1,
    L2,
}

fn make(cx: &mut CompileCx<'_>, normalizer: Normalizer) -> Result<Box<dyn Executable>> {
    let axis = cx.attrs().int("axis")?;
    let function = Function { normalizer, isa: Isa::current() };
    Ok(Box::new(move |cx: &mut RunCx<'_>| apply(cx, axis, &function)))
}

fn make_lp(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let normalizer = if cx.attrs().int("p")? == 1 { Normalizer::L1 } else { Normalizer::L2 };
    make(cx, normalizer)
}

struct Function {
    normalizer: Normalizer,
    isa: Isa,
}

impl LaneFn for Function {
    fn f32(&self, lane: &mut [f32]) {
        let isa = self.isa;
        match self.normalizer {
            Normalizer::Softmax => softmax_row_in_place(isa, Softmax::Linear, lane),
            Normalizer::LogSoftmax => softmax_row_in_place(isa, Softmax::Log, lane),
            Normalizer::Hardmax => hardmax(lane, f32::is_nan, 1.0),
            Normalizer::L1 => {
                divide_f32(isa, lane, sum(lane, rows::combine(isa, Magnitude(), Plus, lane), f64::abs))
            }
            Normalizer::L2 => {
                // The norm of a single-precision lane may be in range although its squares are not,
                // so `sum` checks them.
                let squares = sum(lane, rows::combine(isa, Square(), Plus, lane), |x| x * x);
                divide_f32(isa, lane, squares.sqrt());
            }
        }
    }

    fn f32_columns(&self, block: &mut [f32], inner: usize) -> bool {
        let kind = match self.normalizer {
            Normalizer::Softmax => Softmax::Linear,
            Normalizer::LogSoftmax => Softmax::Log,
            // The others are rare on inner axes, so their lanes are gathered.
            _ => return false,
        };
        softmax_columns_in_place(self.isa, kind, inner, block);
        true
    }

    fn f64(&self, lane: &mut [f64]) {
        let greatest =
            elements(lane).fold(f64::NEG_INFINITY, |a, &b| if a > b || a.is_nan() { a } else { b });
        match self.normalizer {
            Normalizer::Softmax => {
                // Double precision needs no polynomials of our own: these types are rare, and the
                // platform's `exp` is exact enough.
                pieces_mut(lane).flatten().for_each(|x| *x = (*x - greatest).exp());
                let sum: f64 = elements(lane).sum();
                pieces_mut(lane).flatten().for_each(|x| *x /= sum);
            }
            Normalizer::LogSoftmax => {
                let sum: f64 = elements(lane).map(|x| (x - greatest).exp()).sum();
                let log = sum.ln();
                pieces_mut(lane).flatten().for_each(|x| *x = *x - greatest - log);
            }
            Normalizer::Hardmax => hardmax(lane, f64::is_nan, 1.0),
            Normalizer::L1 => divide_f64(lane, elements(lane).map(|x| x.abs()).sum()),
            Normalizer::L2 => divide_f64(lane, elements(lane).map(|x| x * x).sum::<f64>().sqrt()),
        }
    }
}

fn elements(lane: &[f64]) -> impl Iterator<Item = &f64> {
    pieces(lane).flatten()
}

/// Returns a sum whose terms were computed in float32. If some of them may have overflowed or
/// underflowed, it is computed again in float64.
fn sum(lane: &[f32], found: f64, term: fn(f64) -> f64) -> f64 {
    match (1e-30..1e38).contains(&found) {
        true => found,
        false => pieces(lane).flatten().map(|x| term(f64::from(*x))).sum(),
    }
}

/// Divides a lane by its norm. A lane of norm zero stays zero, as in the standard's reference.
fn divide_f32(isa: Isa, lane: &mut [f32], norm: f64) {
    let scale = (1.0 / norm) as f32;
    if scale.is_normal() {
        map_in_place(isa, Scale(scale), lane);
    } else if norm != 0.0 {
        // A norm near the ends of the range has no normal reciprocal in float32.
        pieces_mut(lane).flatten().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

fn divide_f64(lane: &mut [f64], norm: f64) {
    if norm != 0.0 {
        pieces_mut(lane).flatten().for_each(|x| *x /= norm);
    }
}

/// Writes 1 at the first greatest element, 0 elsewhere. NaN is greater than any number.
fn hardmax<T: Copy + PartialOrd + Default>(lane: &mut [T], is_nan: fn(T) -> bool, one: T) {
    let mut best = 0;
    pieces(lane).flatten().enumerate().for_each(|(place, &x)| {
        if x > lane[best] || is_nan(x) && !is_nan(lane[best]) {
            best = place;
        }
    });
    // In place, so the position is found before anything is written.
    interrupt::fill(lane, T::default());
    if let Some(chosen) = lane.get_mut(best) {
        *chosen = one;
    }
}
