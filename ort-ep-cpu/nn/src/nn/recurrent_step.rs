//! One step of a recurrent layer: the states of a group of sequences, and the recurrent GEMM.

use ort_core::{Result, error};

use ort_cpu_gemm::Cpu;
use ort_cpu_matmul::real::{GemmTarget, Matrix, Real, Rhs};
use ort_cpu_threads::parallel::for_each_chunk_mut;
use ort_cpu_vector::elementwise::{Binary, Operand, binary};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::skinny_gemm::SkinnyRhs;

/// The equations of one layer.
pub(super) trait Cell<T: Real>: Send + Sync {
    /// Returns how many gates each recurrent GEMM computes, in order.
    fn parts(&self) -> &'static [usize];

    /// Returns whether the recurrent bias of the last gate is kept apart from the sum of biases.
    fn keeps_last_bias(&self) -> bool {
        false
    }

    /// Advances the states by one step.
    fn step(&self, step: &mut Step<'_, T>) -> Result<()>;
}

/// The recurrent weights of one GEMM.
pub(super) enum Recurrence<'a, T> {
    /// Packed for few rows; `T` is `float`.
    Skinny(SkinnyRhs<'a>),
    /// Any others.
    Rhs(Rhs<'a, T>),
}

/// One step of one direction, over a group of sequences.
pub(super) struct Step<'a, T> {
    pub(super) cpu: Cpu,
    pub(super) direction: usize,
    pub(super) hidden: usize,
    /// The gates of each sequence: at first the contribution of the input, with biases.
    pub(super) gates: &'a mut [T],
    /// The recurrent weights, one matrix for each of [`Cell::parts`].
    pub(super) recurrence: &'a [Recurrence<'a, T>],
    /// The hidden states.
    pub(super) h: &'a mut [T],
    /// The cell states.
    pub(super) c: &'a mut [T],
    /// Scratch, as long as `h`.
    pub(super) extra: &'a mut [T],
    /// The recurrent bias of the last gate, if it is kept apart.
    pub(super) last_bias: &'a [T],
    /// The peepholes; empty if there are none.
    pub(super) peepholes: &'a [T],
    /// The length of each sequence.
    pub(super) lengths: &'a [usize],
    /// The steps before this one.
    pub(super) index: usize,
    pub(super) workspace: &'a mut [T],
}

impl<T: Real> Recurrence<'_, T> {
    /// Computes `target = states * self`, or adds it.
    pub(super) fn multiply(
        &self,
        cpu: Cpu,
        states: Matrix<'_, T>,
        target: GemmTarget<'_, T>,
        workspace: &mut [T],
    ) -> Result<()> {
        let rhs = match self {
            Recurrence::Rhs(rhs) => return T::multiply(cpu, states, *rhs, target, workspace),
            Recurrence::Skinny(rhs) => rhs,
        };
        let (Some(lhs), Some(to)) = (floats(states.values), floats_mut(target.values)) else {
            return Err(error!(Fail, "packed weights are of float"));
        };
        let ([rows, k], columns) = (states.shape, rhs.columns());
        if !target.add {
            to.chunks_mut(target.row_stride.max(1)).for_each(|row| row[..columns].fill(0.0));
        }
        // Waking a thread must pay in every step. A sequence of its own is a better task, so only a
        // single one is split.
        if rows == 1 && cpu.threads > 1 && k * columns >= WORTH_A_REGION {
            let part = rhs.part_columns(cpu.threads);
            for_each_chunk_mut(cpu.threads, &mut to[..columns], part, |index, to| {
                rhs.part(index * part, part).multiply_add(lhs, 1, to, part);
            });
        } else {
            rhs.multiply_add(lhs, rows, to, target.row_stride);
        }
        Ok(())
    }
}

/// Multiply-adds of a step that are worth a parallel region of their own.
const WORTH_A_REGION: usize = 1 << 18;

impl<T: Real> Step<'_, T> {
    /// Returns the number of sequences.
    pub(super) fn rows(&self) -> usize {
        self.lengths.len()
    }

    /// Returns whether a sequence has not ended.
    pub(super) fn is_active(&self, sequence: usize) -> bool {
        self.index < self.lengths[sequence]
    }

    /// Copies the states to `extra` with zeros for ended sequences, if the states are quantized and
    /// a sequence has ended. Returns whether it copied.
    ///
    /// An ended sequence must not widen the quantization range of the others. ONNX Runtime drops a
    /// state one step after its last, so we do the same to get the same quantized values.
    pub(super) fn hides_ended(&mut self) -> bool {
        let is_quantized = matches!(self.recurrence, [Recurrence::Rhs(Rhs::Quantized(_)), ..]);
        let index = self.index;
        let has_ended = |length: &usize| index > *length;
        if !is_quantized || self.hidden == 0 || !self.lengths.iter().any(has_ended) {
            return false;
        }
        let rows = self.extra.chunks_mut(self.hidden).zip(self.h.chunks(self.hidden));
        for ((to, from), length) in rows.zip(self.lengths) {
            match has_ended(length) {
                true => to.fill(T::ZERO),
                false => to.copy_from_slice(from),
            }
        }
        true
    }
}

/// Computes `to[i] = a[i] + b[i]`.
pub(super) fn add<T: Real>(a: &[T], b: &[T], to: &mut [T]) {
    if let (Some(a), Some(b), Some(to)) = (floats(a), floats(b), floats_mut(&mut *to)) {
        return binary(Isa::current(), Binary::Add, Operand::Slice(a), Operand::Slice(b), to);
    }
    to.iter_mut().zip(a).zip(b).for_each(|((to, a), b)| *to = *a + *b);
}

/// Views values as floats; `None` if they are not.
pub(super) fn floats<T: Real>(values: &[T]) -> Option<&[f32]> {
    if size_of::<T>() == size_of::<f32>() { bytemuck::try_cast_slice(values).ok() } else { None }
}

/// Views values as floats; `None` if they are not.
pub(super) fn floats_mut<T: Real>(values: &mut [T]) -> Option<&mut [f32]> {
    if size_of::<T>() == size_of::<f32>() { bytemuck::try_cast_slice_mut(values).ok() } else { None }
}
