//! Cells of recurrent layers with the default activations: all gates of a row in one pass.

use crate::places::{load, store};
use crate::simd::{Isa, Simd, SimdOp, dispatch, math};

/// The part of a bound that clips nothing.
const NO_BOUND: f32 = f32::INFINITY;

/// The cell of an `LSTM`, for one sequence. Activations are sigmoid, tanh and tanh.
#[derive(Debug)]
pub struct LstmCell<'a> {
    /// The sums of the gates of each unit, in ONNX order: input, output, forget, cell.
    pub gates: &'a [f32],
    /// The peepholes of all units, in the order input, output, forget; empty if there are none.
    pub peepholes: &'a [f32],
    /// The bound to which the inputs of the first two activations are clipped.
    pub clip: Option<f32>,
    /// Whether the forget gate is 1 minus the input gate.
    pub input_forget: bool,
    /// The cell state, which becomes that of the next step.
    pub c: &'a mut [f32],
    /// Takes the hidden state of the next step.
    pub h: &'a mut [f32],
}

impl LstmCell<'_> {
    /// Computes the step.
    ///
    /// # Panics
    /// If a slice has not the length of its units.
    pub fn step(self, isa: Isa) {
        let hidden = self.c.len();
        let has_peepholes = self.peepholes.len() == 3 * hidden;
        assert!(self.gates.len() == 4 * hidden && self.h.len() == hidden, "the gates of all units");
        assert!(has_peepholes || self.peepholes.is_empty(), "the peepholes of all units");
        dispatch(isa, self);
    }
}

impl SimdOp for LstmCell<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // Two loops of short iterations: a CPU overlaps several of them, but not the chain of
        // activations from the input gate to the new hidden state.
        let clip = Clip::new(s, self.clip);
        for at in (0..self.c.len()).step_by(S::LANES) {
            self.update_state(s, &clip, at);
        }
        for at in (0..self.c.len()).step_by(S::LANES) {
            self.write_output(s, &clip, at);
        }
    }
}

impl LstmCell<'_> {
    /// Computes the new cell state of a vector of units.
    #[inline(always)]
    fn update_state<S: Simd>(&mut self, s: S, clip: &Clip<S>, at: usize) {
        let count = (self.c.len() - at).min(S::LANES);
        let old = load(s, self.c, at, count, 0.0);
        let input = math::gate(s, clip.apply(s, self.sum(s, 0, at, old)));
        let forget = match self.input_forget {
            true => s.sub(s.splat(1.0), input),
            false => math::gate(s, clip.apply(s, self.sum(s, 2, at, old))),
        };
        let cell = load(s, self.gates, 3 * self.c.len() + at, count, 0.0);
        let cell = math::tanh(s, clip.apply(s, cell));
        store(s, self.c, at, count, s.mul_add(forget, old, s.mul(input, cell)));
    }

    /// Computes the new hidden state of a vector of units.
    #[inline(always)]
    fn write_output<S: Simd>(&mut self, s: S, clip: &Clip<S>, at: usize) {
        let count = (self.c.len() - at).min(S::LANES);
        // The output gate's peephole reads the new cell state.
        let new = load(s, self.c, at, count, 0.0);
        let output = math::gate(s, clip.apply(s, self.sum(s, 1, at, new)));
        store(s, self.h, at, count, s.mul(output, math::tanh(s, new)));
    }

    /// Returns the sum of a gate of a vector of units, with what its peephole sees of the state.
    #[inline(always)]
    fn sum<S: Simd>(&self, s: S, gate: usize, at: usize, state: S::F32) -> S::F32 {
        let hidden = self.c.len();
        let count = (hidden - at).min(S::LANES);
        let sum = load(s, self.gates, gate * hidden + at, count, 0.0);
        match self.peepholes.is_empty() {
            true => sum,
            false => s.mul_add(load(s, self.peepholes, gate * hidden + at, count, 0.0), state, sum),
        }
    }
}

/// The bounds of the inputs of activations.
struct Clip<S: Simd> {
    low: S::F32,
    high: S::F32,
}

impl<S: Simd> Clip<S> {
    #[inline(always)]
    fn new(s: S, bound: Option<f32>) -> Clip<S> {
        let bound = bound.unwrap_or(NO_BOUND);
        Clip { low: s.splat(-bound), high: s.splat(bound) }
    }

    /// NaN passes through, as the second operand.
    #[inline(always)]
    fn apply(&self, s: S, x: S::F32) -> S::F32 {
        s.min_or_second(self.high, s.max_or_second(self.low, x))
    }
}

/// Computes `to[i] = sigmoid(reset[i]) * h[i]`: what the candidate of a `GRU` sees of the state.
///
/// # Panics
/// If the lengths differ.
pub fn gru_reset(isa: Isa, reset: &[f32], clip: Option<f32>, h: &[f32], to: &mut [f32]) {
    assert!([reset.len(), h.len()] == [to.len(); 2], "the units of a layer");
    dispatch(isa, GruReset { reset, clip, h, to });
}

struct GruReset<'a> {
    reset: &'a [f32],
    clip: Option<f32>,
    h: &'a [f32],
    to: &'a mut [f32],
}

impl SimdOp for GruReset<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (len, clip) = (self.to.len(), Clip::new(s, self.clip));
        let mut at = 0;
        while at < len {
            let count = (len - at).min(S::LANES);
            let reset = math::gate(s, clip.apply(s, load(s, self.reset, at, count, 0.0)));
            store(s, self.to, at, count, s.mul(reset, load(s, self.h, at, count, 0.0)));
            at += count;
        }
    }
}

/// The end of the cell of a `GRU`, for one sequence. Activations are sigmoid and tanh.
#[derive(Debug)]
pub struct GruCell<'a> {
    /// The sums of the gates of each unit, in ONNX order: update, reset, candidate.
    pub gates: &'a [f32],
    /// The recurrent part of the candidate and its bias, if the reset gate scales them here. The
    /// candidate's sum is then that of the input alone.
    pub linear: Option<[&'a [f32]; 2]>,
    /// The bound to which the inputs of activations are clipped.
    pub clip: Option<f32>,
    /// The state, which becomes that of the next step.
    pub h: &'a mut [f32],
}

impl GruCell<'_> {
    /// Computes the step.
    ///
    /// # Panics
    /// If a slice has not the length of its units.
    pub fn step(self, isa: Isa) {
        let hidden = self.h.len();
        assert!(self.gates.len() == 3 * hidden, "the gates of all units");
        assert!(self.linear.iter().flatten().all(|part| part.len() == hidden), "the parts of all units");
        dispatch(isa, self);
    }
}

impl SimdOp for GruCell<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let GruCell { gates, linear, clip, h } = self;
        let hidden = h.len();
        let (update, gates) = gates.split_at(hidden);
        let (reset, candidate) = gates.split_at(hidden);
        let clip = Clip::new(s, clip);
        let mut at = 0;
        while at < hidden {
            let count = (hidden - at).min(S::LANES);
            let update = math::gate(s, clip.apply(s, load(s, update, at, count, 0.0)));
            let mut sum = load(s, candidate, at, count, 0.0);
            if let Some([part, bias]) = linear {
                let reset = math::gate(s, clip.apply(s, load(s, reset, at, count, 0.0)));
                let part = s.add(load(s, part, at, count, 0.0), load(s, bias, at, count, 0.0));
                sum = s.mul_add(reset, part, sum);
            }
            let candidate = math::tanh(s, clip.apply(s, sum));
            let kept = s.mul(update, load(s, h, at, count, 0.0));
            let new = s.mul_add(s.sub(s.splat(1.0), update), candidate, kept);
            store(s, h, at, count, new);
            at += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|at| ((at * 37 + seed * 11) % 29) as f32 / 8.0 - 1.75).collect()
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    fn is_near(value: f32, expected: f64) -> bool {
        (f64::from(value) - expected).abs() < 2e-6
    }

    #[test]
    fn lstm_cells_follow_their_equations() {
        for (isa, hidden) in Isa::available().flat_map(|isa| [1, 7, 16, 33, 130].map(|hidden| (isa, hidden)))
        {
            for option in 0..8 {
                let clip = (option & 1 != 0).then_some(0.75);
                let (input_forget, peeks) = (option & 2 != 0, option & 4 != 0);
                let gates = numbers(4 * hidden, 1);
                let peepholes = if peeks { numbers(3 * hidden, 2) } else { Vec::new() };
                let (old, mut h) = (numbers(hidden, 3), vec![f32::NAN; hidden]);
                let mut c = old.clone();
                LstmCell { gates: &gates, peepholes: &peepholes, clip, input_forget, c: &mut c, h: &mut h }
                    .step(isa);
                for unit in 0..hidden {
                    let bound = clip.map_or(f64::INFINITY, f64::from);
                    let peek = |gate: usize, state: f64| {
                        peepholes.get(gate * hidden + unit).map_or(0.0, |weight| f64::from(*weight) * state)
                    };
                    let sum = |gate: usize, more: f64| {
                        (f64::from(gates[gate * hidden + unit]) + more).clamp(-bound, bound)
                    };
                    let state = f64::from(old[unit]);
                    let input = sigmoid(sum(0, peek(0, state)));
                    let forget = if input_forget { 1.0 - input } else { sigmoid(sum(2, peek(2, state))) };
                    let new = forget * state + input * sum(3, 0.0).tanh();
                    let output = sigmoid(sum(1, peek(1, new)));
                    assert!(is_near(c[unit], new), "{isa:?} {hidden} {option} c[{unit}]");
                    assert!(is_near(h[unit], output * new.tanh()), "{isa:?} {hidden} {option} h[{unit}]");
                }
            }
        }
    }

    #[test]
    fn gru_cells_follow_their_equations() {
        for (isa, hidden) in Isa::available().flat_map(|isa| [1, 7, 16, 33, 130].map(|hidden| (isa, hidden)))
        {
            for option in 0..4 {
                let (clip, is_linear) = ((option & 1 != 0).then_some(0.75), option & 2 != 0);
                let (gates, old) = (numbers(3 * hidden, 1), numbers(hidden, 2));
                let (part, bias) = (numbers(hidden, 3), numbers(hidden, 4));
                let (mut h, mut seen) = (old.clone(), vec![f32::NAN; hidden]);
                gru_reset(isa, &gates[hidden..2 * hidden], clip, &old, &mut seen);
                let linear = is_linear.then_some([&part[..], &bias[..]]);
                GruCell { gates: &gates, linear, clip, h: &mut h }.step(isa);
                for unit in 0..hidden {
                    let bound = clip.map_or(f64::INFINITY, f64::from);
                    let sum = |gate: usize| f64::from(gates[gate * hidden + unit]);
                    let update = sigmoid(sum(0).clamp(-bound, bound));
                    let reset = sigmoid(sum(1).clamp(-bound, bound));
                    let more = reset * (f64::from(part[unit]) + f64::from(bias[unit]));
                    let candidate = sum(2) + if is_linear { more } else { 0.0 };
                    let state = f64::from(old[unit]);
                    let new = (1.0 - update) * candidate.clamp(-bound, bound).tanh() + update * state;
                    assert!(is_near(seen[unit], reset * state), "{isa:?} {hidden} {option} reset {unit}");
                    assert!(is_near(h[unit], new), "{isa:?} {hidden} {option} h[{unit}]");
                }
            }
        }
    }
}
