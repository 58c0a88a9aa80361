//! `GRU`: the gated recurrent unit.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef};

use super::gates::{Gate, gates};
use super::recurrent::{Cell, Step, directions, make};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real};

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
        let (cpu, batch, hidden) = (step.cpu, step.active.len(), step.hidden);
        // Gates are in ONNX order: update, reset, candidate.
        let width = 3 * hidden;
        let [f, g] = &self.gates[step.direction][..] else { return Ok(()) };
        let states = Matrix::rows(&*step.h, batch, hidden);
        T::multiply(
            cpu,
            states,
            step.recurrence[0],
            GemmTarget::accumulate(&mut *step.gates, width),
            &mut *step.workspace,
        )?;
        // `chunks_mut` panics on a width of 0.
        if width == 0 {
            return Ok(());
        }
        step.gates.chunks_mut(width).for_each(|row| f.apply(&mut row[..2 * hidden]));
        if self.linear_before_reset {
            // The reset gate scales the result of the GEMM, with its bias.
            let result = GemmTarget::write(&mut *step.extra, hidden);
            T::multiply(cpu, states, step.recurrence[1], result, &mut *step.workspace)?;
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
            let reset = Matrix::rows(&*step.extra, batch, hidden);
            let result = GemmTarget::accumulate(&mut step.gates[2 * hidden..], width);
            T::multiply(cpu, reset, step.recurrence[1], result, &mut *step.workspace)?;
        }
        let (one, minus) = (T::from_f64(1.0), T::from_f64(-1.0));
        for (sequence, row) in step.gates.chunks_mut(width).enumerate() {
            // Ended sequences keep their state.
            if !step.active[sequence] {
                continue;
            }
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
