//! `GRU`: the gated recurrent unit.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef};

use super::gates::{Gate, gates};
use super::recurrent::make;
use super::recurrent_layer::directions;
use super::recurrent_step::{Cell, Step, floats, floats_mut};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real};
use ort_cpu_vector::elementwise::Unary;
use ort_cpu_vector::recurrent::{GruCell, gru_reset};
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef {
        op: "GRU",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make_gru::<f32>),
        // Constant weights are packed, so they may be unaligned.
        unaligned: &[1, 2],
        when: |node| node.constant(1).is_some() && node.constant(2).is_some(),
        rank: 1,
        ..KernelDef::BASE
    },
    KernelDef {
        op: "GRU",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make_gru::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "GRU",
        types: &[("T", TypeSet::of(&[DType::F64]))],
        make: make_gru::<f64>,
        ..KernelDef::BASE
    },
];

struct Gru {
    /// The activations f and g of each direction.
    gates: Vec<Vec<Gate>>,
    linear_before_reset: bool,
}

fn make_gru<T: Real>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let directions = directions(cx)?.len();
    let gates = gates(cx.attrs(), directions, "GRU")?;
    let linear_before_reset = cx.attrs().flag("linear_before_reset")?;
    make::<T, _>(cx, Gru { gates, linear_before_reset })
}

impl<T: Real> Cell<T> for Gru {
    fn parts(&self) -> &'static [usize] {
        &[2, 1]
    }

    fn keeps_last_bias(&self) -> bool {
        self.linear_before_reset
    }

    fn step(&self, step: &mut Step<'_, T>) -> Result<()> {
        let (batch, hidden) = (step.rows(), step.hidden);
        // Gates are in ONNX order: update, reset, candidate.
        let width = 3 * hidden;
        let [f, g] = &self.gates[step.direction][..] else { return Ok(()) };
        let states = Matrix::rows(&*step.h, batch, hidden);
        let target = GemmTarget::accumulate(&mut *step.gates, width);
        step.recurrence[0].multiply(step.cpu, states, target, &mut *step.workspace)?;
        // `chunks_mut` panics on a width of 0.
        if width == 0 {
            return Ok(());
        }
        if self.linear_before_reset {
            // The reset gate scales the result of the GEMM, with its bias.
            let result = GemmTarget::write(&mut *step.extra, hidden);
            step.recurrence[1].multiply(step.cpu, states, result, &mut *step.workspace)?;
        }
        if self.fused_step(step, [f, g])? {
            return Ok(());
        }
        step.gates.chunks_mut(width).for_each(|row| f.apply(&mut row[..2 * hidden]));
        if self.linear_before_reset {
            for (row, extra) in step.gates.chunks_mut(width).zip(step.extra.chunks(hidden)) {
                let (others, candidate) = row.split_at_mut(2 * hidden);
                for (at, candidate) in candidate.iter_mut().enumerate() {
                    *candidate = *candidate + others[hidden + at] * (extra[at] + step.last_bias[at]);
                }
            }
        } else {
            // The reset gate scales the state before the GEMM.
            for ((row, h), extra) in
                step.gates.chunks(width).zip(step.h.chunks(hidden)).zip(step.extra.chunks_mut(hidden))
            {
                for (at, extra) in extra.iter_mut().enumerate() {
                    *extra = row[hidden + at] * h[at];
                }
            }
            multiply_reset(step)?;
        }
        let (one, minus) = (T::from_f64(1.0), T::from_f64(-1.0));
        for sequence in 0..batch {
            // Ended sequences keep their state.
            if !step.is_active(sequence) {
                continue;
            }
            let row = &mut step.gates[sequence * width..][..width];
            let (others, candidate) = row.split_at_mut(2 * hidden);
            g.apply(candidate);
            let h = &mut step.h[sequence * hidden..][..hidden];
            for ((h, update), candidate) in h.iter_mut().zip(&*others).zip(&*candidate) {
                *h = (one + minus * *update) * *candidate + *update * *h;
            }
        }
        Ok(())
    }
}

/// Adds the recurrent part of the candidates: the states in `extra`, which the reset gates have
/// scaled, times their weights.
fn multiply_reset<T: Real>(step: &mut Step<'_, T>) -> Result<()> {
    let (width, hidden) = (3 * step.hidden, step.hidden);
    let reset = Matrix::rows(&*step.extra, step.rows(), hidden);
    let result = GemmTarget::accumulate(&mut step.gates[2 * hidden..], width);
    step.recurrence[1].multiply(step.cpu, reset, result, &mut *step.workspace)
}

impl Gru {
    /// Computes the step from the sums of the gates, if the layer is of `float` and has the default
    /// activations. Returns whether it is.
    fn fused_step<T: Real>(&self, step: &mut Step<'_, T>, [f, g]: [&Gate; 2]) -> Result<bool> {
        let (Some(clip), Some(_)) = (f.clip_of(Unary::Sigmoid), g.clip_of(Unary::Tanh)) else {
            return Ok(false);
        };
        let (hidden, isa) = (step.hidden, Isa::current());
        let gates_of = |sequence: usize| 3 * sequence * hidden..3 * (sequence + 1) * hidden;
        let units_of = |sequence: usize| sequence * hidden..(sequence + 1) * hidden;
        if !self.linear_before_reset {
            let (Some(gates), Some(h)) = (floats(&*step.gates), floats(&*step.h)) else {
                return Ok(false);
            };
            let Some(extra) = floats_mut(&mut *step.extra) else { return Ok(false) };
            for (sequence, to) in extra.chunks_mut(hidden).enumerate() {
                let reset = &gates[gates_of(sequence)][hidden..2 * hidden];
                gru_reset(isa, reset, clip, &h[units_of(sequence)], to);
            }
            multiply_reset(step)?;
        }
        for sequence in 0..step.rows() {
            // Ended sequences keep their state.
            if !step.is_active(sequence) {
                continue;
            }
            let (Some(gates), Some(extra)) = (floats(&*step.gates), floats(&*step.extra)) else {
                return Ok(false);
            };
            let (Some(bias), Some(h)) = (floats(step.last_bias), floats_mut(&mut *step.h)) else {
                return Ok(false);
            };
            let linear = self.linear_before_reset.then(|| [&extra[units_of(sequence)], bias]);
            let gates = &gates[gates_of(sequence)];
            GruCell { gates, linear, clip, h: &mut h[units_of(sequence)] }.step(isa);
        }
        Ok(true)
    }
}
