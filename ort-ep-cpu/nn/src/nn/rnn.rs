//! `RNN`: the simple (Elman) recurrent cell.

use ort_core::Result;
use ort_core::dtype::{DType, TypeSet};
use ort_core::ep::{CompileCx, Executable, KernelDef};

use super::gates::{Gate, gates};
use super::recurrent::make;
use super::recurrent_layer::directions;
use super::recurrent_step::{Cell, Step};
use ort_cpu_kernel::cpu_kernels;
use ort_cpu_kernel::half_precision::via_f32;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real};

cpu_kernels![
    KernelDef {
        op: "RNN",
        types: &[("T", TypeSet::of(&[DType::F32, DType::F16, DType::BF16]))],
        make: |cx| via_f32(cx, make_rnn::<f32>),
        ..KernelDef::BASE
    },
    KernelDef {
        op: "RNN",
        types: &[("T", TypeSet::of(&[DType::F64]))],
        make: make_rnn::<f64>,
        ..KernelDef::BASE
    },
];

struct Rnn {
    /// The activation f of each direction.
    gates: Vec<Vec<Gate>>,
}

fn make_rnn<T: Real>(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let directions = directions(cx)?.len();
    let gates = gates(cx.attrs(), directions, "RNN")?;
    make::<T, _>(cx, Rnn { gates })
}

impl<T: Real> Cell<T> for Rnn {
    fn parts(&self) -> &'static [usize] {
        &[1]
    }

    fn step(&self, step: &mut Step<'_, T>) -> Result<()> {
        let hidden = step.hidden;
        // `Ht = f(Xt * W' + Ht-1 * R' + biases)`; the gates hold all but the recurrent product.
        let states = Matrix::rows(&*step.h, step.rows(), hidden);
        let target = GemmTarget::accumulate(&mut *step.gates, hidden);
        step.recurrence[0].multiply(step.cpu, states, target, &mut *step.workspace)?;
        let [f] = &self.gates[step.direction][..] else { return Ok(()) };
        // Ended sequences keep their state.
        for sequence in 0..step.rows() {
            if !step.is_active(sequence) {
                continue;
            }
            let row = &mut step.gates[sequence * hidden..][..hidden];
            f.apply(row);
            step.h[sequence * hidden..][..hidden].copy_from_slice(row);
        }
        Ok(())
    }
}
