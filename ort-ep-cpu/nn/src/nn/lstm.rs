//! `LSTM`, and `DynamicQuantizeLSTM` with 8-bit weights.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef};
use ort_core::spec::MICROSOFT;

use super::gates::{Gate, gates};
use super::recurrent::make;
use super::recurrent_layer::directions;
use super::recurrent_step::{Cell, Step, floats, floats_mut};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real};
use ort_cpu_vector::elementwise::Unary;
use ort_cpu_vector::recurrent::LstmCell;
use ort_cpu_vector::simd::Isa;

cpu_kernels![
    KernelDef {
        op: "LSTM",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make_lstm::<f32>),
        // Constant weights are packed, so they may be unaligned.
        unaligned: &[1, 2],
        when: |node| node.constant(1).is_some() && node.constant(2).is_some(),
        rank: 1,
        ..KernelDef::BASE
    },
    KernelDef {
        op: "LSTM",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make_lstm::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "LSTM",
        types: &[("T", TypeSet::of(&[DType::F64]))],
        make: make_lstm::<f64>,
        ..KernelDef::BASE
    },
    KernelDef { domain: MICROSOFT, op: "DynamicQuantizeLSTM", make: make_lstm::<f32>, ..KernelDef::BASE },
];

struct Lstm {
    /// The activations f, g and h of each direction.
    gates: Vec<Vec<Gate>>,
    input_forget: bool,
}

fn make_lstm<T: Real>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let directions = directions(cx)?.len();
    let gates = gates(cx.attrs(), directions, "LSTM")?;
    let input_forget = cx.attrs().flag("input_forget")?;
    make::<T, _>(cx, Lstm { gates, input_forget })
}

/// Computes `to[i] += factor[i] * value[i]`.
fn add_product<T: Real>(to: &mut [T], factor: &[T], value: &[T]) {
    to.iter_mut().zip(factor).zip(value).for_each(|((to, factor), value)| *to = *to + *factor * *value);
}

impl<T: Real> Cell<T> for Lstm {
    fn parts(&self) -> &'static [usize] {
        &[4]
    }

    fn step(&self, step: &mut Step<'_, T>) -> Result<()> {
        let (hidden, width) = (step.hidden, 4 * step.hidden);
        let states = if step.hides_ended() { &*step.extra } else { &*step.h };
        let states = Matrix::rows(states, step.rows(), hidden);
        let target = GemmTarget::accumulate(&mut *step.gates, width);
        step.recurrence[0].multiply(step.cpu, states, target, &mut *step.workspace)?;
        let [f, g, h] = &self.gates[step.direction][..] else { return Ok(()) };
        if self.fused_step(step, [f, g, h]) {
            return Ok(());
        }
        // Ended sequences keep their state.
        for sequence in 0..step.rows() {
            if !step.is_active(sequence) {
                continue;
            }
            let row = &mut step.gates[sequence * width..][..width];
            // Gates are in ONNX order: input, output, forget, cell.
            let (input, row) = row.split_at_mut(hidden);
            let (output, row) = row.split_at_mut(hidden);
            let (forget, cell) = row.split_at_mut(hidden);
            let c = &mut step.c[sequence * hidden..][..hidden];
            let state = &mut step.h[sequence * hidden..][..hidden];
            if !step.peepholes.is_empty() {
                add_product(input, &step.peepholes[..hidden], c);
                add_product(forget, &step.peepholes[2 * hidden..], c);
            }
            f.apply(input);
            // `input_forget` couples the forget gate to the input gate.
            if self.input_forget {
                let one = T::from_f64(1.0);
                let minus = T::from_f64(-1.0);
                forget.iter_mut().zip(&*input).for_each(|(forget, input)| *forget = one + minus * *input);
            } else {
                f.apply(forget);
            }
            g.apply(cell);
            for (((c, forget), input), cell) in c.iter_mut().zip(&*forget).zip(&*input).zip(&*cell) {
                *c = *forget * *c + *input * *cell;
            }
            // The output gate's peephole reads the new cell state.
            if !step.peepholes.is_empty() {
                add_product(output, &step.peepholes[hidden..2 * hidden], c);
            }
            f.apply(output);
            state.copy_from_slice(c);
            h.apply_unclipped(state);
            state.iter_mut().zip(&*output).for_each(|(state, output)| *state = *state * *output);
        }
        Ok(())
    }
}

impl Lstm {
    /// Computes the step from the sums of the gates in one pass, if the layer is of `float` and has
    /// the default activations. Returns whether it is.
    fn fused_step<T: Real>(&self, step: &mut Step<'_, T>, [f, g, h]: [&Gate; 3]) -> bool {
        let (Some(clip), Some(_), Some(_)) =
            (f.clip_of(Unary::Sigmoid), g.clip_of(Unary::Tanh), h.clip_of(Unary::Tanh))
        else {
            return false;
        };
        for sequence in 0..step.rows() {
            let (hidden, is_active) = (step.hidden, step.is_active(sequence));
            let units = sequence * hidden..(sequence + 1) * hidden;
            let (Some(gates), Some(peepholes)) = (floats(&*step.gates), floats(step.peepholes)) else {
                return false;
            };
            let (Some(c), Some(h)) = (floats_mut(&mut *step.c), floats_mut(&mut *step.h)) else {
                return false;
            };
            // Ended sequences keep their state.
            if is_active {
                let cell = LstmCell {
                    gates: &gates[4 * units.start..4 * units.end],
                    peepholes,
                    clip,
                    input_forget: self.input_forget,
                    c: &mut c[units.clone()],
                    h: &mut h[units],
                };
                cell.step(Isa::current());
            }
        }
        true
    }
}
