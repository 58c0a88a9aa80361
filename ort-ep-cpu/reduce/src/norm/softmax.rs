//! `Softmax`, `LogSoftmax`, `Hardmax` and `LpNormalization`: functions of each line along an axis.

use ort_core::Result;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};

use crate::reduce::rows::{self, Magnitude, Plus, Scale, Square};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::lines::{LineFn, apply};
use ort_cpu_threads::interrupt::{self, pieces, pieces_mut};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::slices::map_in_place;
use ort_cpu_vector::softmax::{Softmax, softmax_columns_in_place, softmax_row_in_place};

cpu_kernels![
    KernelDef { op: "Softmax", in_place: &[(0, 0)], make: |cx| make(cx, Line::Softmax), ..KernelDef::BASE },
    KernelDef {
        op: "LogSoftmax",
        in_place: &[(0, 0)],
        make: |cx| make(cx, Line::LogSoftmax),
        ..KernelDef::BASE
    },
    KernelDef { op: "Hardmax", in_place: &[(0, 0)], make: |cx| make(cx, Line::Hardmax), ..KernelDef::BASE },
    KernelDef { op: "LpNormalization", in_place: &[(0, 0)], make: make_lp, ..KernelDef::BASE },
];

#[derive(Clone, Copy)]
enum Line {
    Softmax,
    LogSoftmax,
    Hardmax,
    L1,
    L2,
}

fn make(cx: &mut CompileCx<'_>, line: Line) -> Result<Box<dyn Executable>> {
    let axis = cx.attrs().int("axis")?;
    let function = Function { line, isa: Isa::current() };
    Ok(Box::new(move |cx: &mut RunCx<'_>| apply(cx, axis, &function)))
}

fn make_lp(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let line = if cx.attrs().int("p")? == 1 { Line::L1 } else { Line::L2 };
    make(cx, line)
}

struct Function {
    line: Line,
    isa: Isa,
}

impl LineFn for Function {
    fn f32(&self, line: &mut [f32]) {
        let isa = self.isa;
        match self.line {
            Line::Softmax => softmax_row_in_place(isa, Softmax::Linear, line),
            Line::LogSoftmax => softmax_row_in_place(isa, Softmax::Log, line),
            Line::Hardmax => hardmax(line, f32::is_nan, 1.0),
            Line::L1 => {
                divide_f32(isa, line, sum(line, rows::combine(isa, Magnitude(), Plus, line), f64::abs))
            }
            Line::L2 => {
                let squares = sum(line, rows::combine(isa, Square(), Plus, line), |x| x * x);
                divide_f32(isa, line, squares.sqrt());
            }
        }
    }

    fn f32_columns(&self, block: &mut [f32], inner: usize) -> bool {
        let kind = match self.line {
            Line::Softmax => Softmax::Linear,
            Line::LogSoftmax => Softmax::Log,
            _ => return false,
        };
        softmax_columns_in_place(self.isa, kind, inner, block);
        true
    }

    fn f64(&self, line: &mut [f64]) {
        let greatest =
            elements(line).fold(f64::NEG_INFINITY, |a, &b| if a > b || a.is_nan() { a } else { b });
        match self.line {
            Line::Softmax => {
                pieces_mut(line).flatten().for_each(|x| *x = (*x - greatest).exp());
                let sum: f64 = elements(line).sum();
                pieces_mut(line).flatten().for_each(|x| *x /= sum);
            }
            Line::LogSoftmax => {
                let sum: f64 = elements(line).map(|x| (x - greatest).exp()).sum();
                let log = sum.ln();
                pieces_mut(line).flatten().for_each(|x| *x = *x - greatest - log);
            }
            Line::Hardmax => hardmax(line, f64::is_nan, 1.0),
            Line::L1 => divide_f64(line, elements(line).map(|x| x.abs()).sum()),
            Line::L2 => divide_f64(line, elements(line).map(|x| x * x).sum::<f64>().sqrt()),
        }
    }
}

fn elements(line: &[f64]) -> impl Iterator<Item = &f64> {
    pieces(line).flatten()
}

/// Returns a sum whose terms were computed in float32. If some of them may have overflowed or
/// underflowed, it is computed again in float64.
fn sum(line: &[f32], found: f64, term: fn(f64) -> f64) -> f64 {
    match (1e-30..1e38).contains(&found) {
        true => found,
        false => pieces(line).flatten().map(|x| term(f64::from(*x))).sum(),
    }
}

/// Divides a line by its norm. A line of norm zero stays zero, as in the standard's reference.
fn divide_f32(isa: Isa, line: &mut [f32], norm: f64) {
    let scale = (1.0 / norm) as f32;
    if scale.is_normal() {
        map_in_place(isa, Scale(scale), line);
    } else if norm != 0.0 {
        // A norm near the ends of the range has no normal reciprocal in float32.
        pieces_mut(line).flatten().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

fn divide_f64(line: &mut [f64], norm: f64) {
    if norm != 0.0 {
        pieces_mut(line).flatten().for_each(|x| *x /= norm);
    }
}

/// Writes 1 at the first greatest element, 0 elsewhere. NaN is greater than any number.
fn hardmax<T: Copy + PartialOrd + Default>(line: &mut [T], is_nan: fn(T) -> bool, one: T) {
    let mut best = 0;
    pieces(line).flatten().enumerate().for_each(|(place, &x)| {
        if x > line[best] || is_nan(x) && !is_nan(line[best]) {
            best = place;
        }
    });
    interrupt::fill(line, T::default());
    if let Some(chosen) = line.get_mut(best) {
        *chosen = one;
    }
}
