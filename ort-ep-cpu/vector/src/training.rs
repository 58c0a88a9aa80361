//! Optimizer steps over slices, in the parameter's own type.
//!
//! These are plain loops that the compiler vectorizes for each instruction set. Nothing is fused or
//! reordered, so the results are bit-identical on all of them.

use num_traits::Float;

use crate::simd::{Isa, Simd, SimdOp, dispatch};

/// A step of stochastic gradient descent.
#[derive(Debug, Clone, Copy)]
pub struct Sgd<T> {
    /// The learning rate.
    pub rate: T,
    /// The factor of the gradient, applied first.
    pub scale: T,
    /// The share of the velocity that is kept.
    pub momentum: T,
    /// Whether to use Nesterov's momentum.
    pub nesterov: bool,
    /// Weight decay: the share of the parameter that is added to the gradient.
    pub decay: T,
}

impl<T: Float> Sgd<T> {
    #[inline(always)]
    fn gradient(&self, x: T, gradient: T) -> T {
        let gradient = gradient * self.scale;
        // Without decay, an infinite or NaN parameter must not reach the gradient through `0 * x`.
        if self.decay == T::zero() { gradient } else { gradient + self.decay * x }
    }
}

/// Computes `x -= rate * gradient`.
///
/// # Panics
/// If the lengths differ.
pub fn sgd<T: Float>(isa: Isa, step: &Sgd<T>, x: &mut [T], gradient: &[T]) {
    assert_eq!(x.len(), gradient.len(), "a gradient has its tensor's length");
    dispatch(isa, Descent { step: *step, x, gradient });
}

struct Descent<'a, T> {
    step: Sgd<T>,
    x: &'a mut [T],
    gradient: &'a [T],
}

impl<T: Float> SimdOp for Descent<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, &gradient) in self.x.iter_mut().zip(self.gradient) {
            *x = *x - self.step.rate * self.step.gradient(*x, gradient);
        }
    }
}

/// Computes `v = momentum * v + gradient` and `x -= rate * v`. Nesterov's momentum replaces `v` in
/// the latter by `gradient + momentum * v`.
///
/// # Panics
/// If the lengths differ.
pub fn sgd_momentum<T: Float>(isa: Isa, step: &Sgd<T>, [x, v]: [&mut [T]; 2], gradient: &[T]) {
    assert!([x.len(), v.len()] == [gradient.len(); 2], "a gradient and a state have their tensor's length");
    dispatch(isa, Momentum { step: *step, tensors: [x, v], gradient });
}

struct Momentum<'a, T> {
    step: Sgd<T>,
    tensors: [&'a mut [T]; 2],
    gradient: &'a [T],
}

impl<T: Float> SimdOp for Momentum<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (step, [x, v]) = (self.step, self.tensors);
        for ((x, v), &gradient) in x.iter_mut().zip(v).zip(self.gradient) {
            let gradient = step.gradient(*x, gradient);
            *v = *v * step.momentum + gradient;
            let change = if step.nesterov { gradient + step.momentum * *v } else { *v };
            *x = *x - step.rate * change;
        }
    }
}

/// A step of Adam in any of its variants. A factor that a variant leaves out is 1, a term is 0.
#[derive(Debug, Clone, Copy)]
pub struct Adam<T> {
    /// The factor of the gradient, applied first.
    pub scale: T,
    /// The share of the parameter that is added to the gradient.
    pub gradient_decay: T,
    /// The factor of the parameter before the step.
    pub kept_before: T,
    /// The factor of the parameter after the step.
    pub kept_after: T,
    /// The share of each moment that is kept.
    pub beta: [T; 2],
    /// The share of the new term in each moment: `1 - beta`, rounded once.
    pub beta_rest: [T; 2],
    /// The divisor of the root of the second moment, for bias correction.
    pub bias_root: T,
    /// The term that is then added to the denominator.
    pub epsilon: T,
    /// The factor of the quotient of the moments.
    pub size: T,
}

impl<T: Float> Adam<T> {
    /// Returns the new moments.
    #[inline(always)]
    pub fn moments(&self, m: T, v: T, gradient: T) -> [T; 2] {
        let ([beta1, beta2], [rest1, rest2]) = (self.beta, self.beta_rest);
        // Interpolates from the nearer end, like `torch.lerp`.
        let way = gradient - m;
        let m = if beta1 > rest1 { m + rest1 * way } else { gradient - way * beta1 };
        [m, v * beta2 + rest2 * gradient * gradient]
    }

    #[inline(always)]
    fn apply(&self, [x, m, v]: [T; 3], gradient: T) -> [T; 3] {
        let gradient = gradient * self.scale;
        let decay = self.gradient_decay;
        let gradient = if decay == T::zero() { gradient } else { gradient + decay * x };
        let [m, v] = self.moments(m, v, gradient);
        let denominator = v.sqrt() / self.bias_root + self.epsilon;
        // A variant decays the weight before or after the step; the other factor is 1 and changes
        // no bit.
        let x = x * self.kept_before - self.size * m / denominator;
        [x * self.kept_after, m, v]
    }
}

/// Updates a parameter and its two moments.
///
/// # Panics
/// If the lengths differ.
pub fn adam<T: Float>(isa: Isa, step: &Adam<T>, [x, m, v]: [&mut [T]; 3], gradient: &[T]) {
    let lengths = [x.len(), m.len(), v.len()];
    assert!(lengths == [gradient.len(); 3], "a gradient and states have their tensor's length");
    dispatch(isa, Moments { step: *step, tensors: [x, m, v], gradient });
}

struct Moments<'a, T> {
    step: Adam<T>,
    tensors: [&'a mut [T]; 3],
    gradient: &'a [T],
}

impl<T: Float> SimdOp for Moments<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (step, [x, m, v]) = (self.step, self.tensors);
        for (((x, m), v), &gradient) in x.iter_mut().zip(m).zip(v).zip(self.gradient) {
            [*x, *m, *v] = step.apply([*x, *m, *v], gradient);
        }
    }
}

/// A step of LAMB.
#[derive(Debug, Clone, Copy)]
pub struct Lamb<T> {
    /// What it shares with Adam: the moments, the scale of the gradient, epsilon.
    pub adam: Adam<T>,
    /// The divisors of the moments, for bias correction.
    pub bias: [T; 2],
    /// Weight decay: the share of the parameter that is added to its update.
    pub decay: T,
}

impl<T: Float> Lamb<T> {
    #[inline(always)]
    fn update(&self, x: T, m: T, v: T) -> T {
        let update = (m / self.bias[0]) / ((v / self.bias[1]).sqrt() + self.adam.epsilon);
        // As above: `0 * x` would carry NaN from the parameter.
        if self.decay == T::zero() { update } else { update + self.decay * x }
    }
}

/// Partial sums of each reduction: more than a vector has, so that additions do not wait for each
/// other.
const SUMS: usize = 16;

/// Updates the moments, and returns the sums of the squares of the parameter and of its update.
///
/// # Panics
/// If the lengths differ.
pub fn lamb_moments<T: Float + Into<f64>>(
    isa: Isa,
    step: &Lamb<T>,
    [x, m, v]: [&mut [T]; 3],
    gradient: &[T],
) -> [f64; 2] {
    let lengths = [x.len(), m.len(), v.len()];
    assert!(lengths == [gradient.len(); 3], "a gradient and states have their tensor's length");
    dispatch(isa, LambMoments { step: *step, tensors: [x, m, v], gradient })
}

struct LambMoments<'a, T> {
    step: Lamb<T>,
    tensors: [&'a mut [T]; 3],
    gradient: &'a [T],
}

impl<T: Float + Into<f64>> SimdOp for LambMoments<'_, T> {
    type Output = [f64; 2];
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> [f64; 2] {
        let (step, [x, m, v]) = (self.step, self.tensors);
        for ((m, v), &gradient) in m.iter_mut().zip(v.iter_mut()).zip(self.gradient) {
            // The trust ratio needs the norm of the whole update, so the parameter is changed by a
            // second call.
            [*m, *v] = step.adam.moments(*m, *v, gradient * step.adam.scale);
        }
        let mut sums = [[0.0; SUMS]; 2];
        // A second loop over the same values, because the moments are computed in the tensor's type
        // and the norms in double precision.
        let chunks = x.chunks(SUMS).zip(m.chunks(SUMS)).zip(v.chunks(SUMS));
        for ((x, m), v) in chunks {
            let [squares, updates] = &mut sums;
            let elements = x.iter().zip(m).zip(v).zip(squares).zip(updates);
            for ((((&x, &m), &v), square), update) in elements {
                let (wide, change): (f64, f64) = (x.into(), step.update(x, m, v).into());
                *square += wide * wide;
                *update += change * change;
            }
        }
        sums.map(|sums| sums.iter().sum())
    }
}

/// Computes `x -= size * update` from the new moments.
///
/// # Panics
/// If the lengths differ.
pub fn lamb_apply<T: Float>(isa: Isa, step: &Lamb<T>, size: T, [x, m, v]: [&mut [T]; 3]) {
    assert!([m.len(), v.len()] == [x.len(); 2], "states have their tensor's length");
    dispatch(isa, LambApply { step: *step, size, tensors: [x, m, v] });
}

struct LambApply<'a, T> {
    step: Lamb<T>,
    size: T,
    tensors: [&'a mut [T]; 3],
}

impl<T: Float> SimdOp for LambApply<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let (step, [x, m, v]) = (self.step, self.tensors);
        for ((x, &mut m), &mut v) in x.iter_mut().zip(m).zip(v) {
            *x = *x - self.size * step.update(*x, m, v);
        }
    }
}

/// Returns the sum of all squares in double precision, with sixteen partial sums on any instruction
/// set.
pub fn sum_of_squares<T: Float + Into<f64>>(isa: Isa, values: &[T]) -> f64 {
    dispatch(isa, Squares { values })
}

struct Squares<'a, T> {
    values: &'a [T],
}

impl<T: Float + Into<f64>> SimdOp for Squares<'_, T> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0.0; SUMS];
        // Arrays of fixed length, so that the compiler keeps the sums in registers.
        let (whole, rest) = self.values.as_chunks::<SUMS>();
        for chunk in whole {
            for (sum, &x) in sums.iter_mut().zip(chunk) {
                let x: f64 = x.into();
                *sum += x * x;
            }
        }
        for (sum, &x) in sums.iter_mut().zip(rest) {
            let x: f64 = x.into();
            *sum += x * x;
        }
        sums.iter().sum()
    }
}

/// Computes `sums[i] += values[i]^2`.
///
/// # Panics
/// If the lengths differ.
pub fn add_squares<T: Float + Into<f64>>(isa: Isa, values: &[T], sums: &mut [f64]) {
    assert_eq!(values.len(), sums.len(), "each value has a sum");
    dispatch(isa, AddSquares { values, sums });
}

struct AddSquares<'a, T> {
    values: &'a [T],
    sums: &'a mut [f64],
}

impl<T: Float + Into<f64>> SimdOp for AddSquares<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (sum, &x) in self.sums.iter_mut().zip(self.values) {
            let x: f64 = x.into();
            *sum += x * x;
        }
    }
}

/// Computes `to[i] = row * columns[i] / mean`.
///
/// # Panics
/// If the lengths differ.
pub fn outer_row<T: Float>(isa: Isa, [row, mean]: [T; 2], columns: &[T], to: &mut [T]) {
    assert_eq!(columns.len(), to.len(), "each element has a column");
    dispatch(isa, OuterRow { row, mean, columns, to });
}

struct OuterRow<'a, T> {
    row: T,
    mean: T,
    columns: &'a [T],
    to: &'a mut [T],
}

impl<T: Float> SimdOp for OuterRow<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (to, &column) in self.to.iter_mut().zip(self.columns) {
            *to = self.row * column / self.mean;
        }
    }
}

/// Returns whether all values are finite.
pub fn all_finite<T: Float>(isa: Isa, values: &[T]) -> bool {
    dispatch(isa, Finite { values })
}

struct Finite<'a, T> {
    values: &'a [T],
}

impl<T: Float> SimdOp for Finite<'_, T> {
    type Output = bool;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        // The compiler vectorizes blocks without an early exit.
        let finite = |block: &[T]| block.iter().fold(true, |finite, x| finite & (x.abs() < T::infinity()));
        self.values.chunks(1024).all(finite)
    }
}

/// The update of Adafactor from a gradient and the estimate of its second moment.
#[derive(Debug, Clone, Copy)]
pub struct Adafactor<T> {
    /// The factor of the gradient, applied first.
    pub scale: T,
    /// The lower bound of the estimate.
    pub least: T,
}

impl<T: Float> Adafactor<T> {
    #[inline(always)]
    fn update(&self, gradient: T, estimate: T) -> T {
        // The comparison is false for NaN, so NaN stays.
        let estimate = if estimate < self.least { self.least } else { estimate };
        (T::one() / estimate.sqrt()) * (gradient * self.scale)
    }
}

/// Returns the sum of the squares of the updates.
///
/// # Panics
/// If the lengths differ.
pub fn adafactor_norm<T: Float + Into<f64>>(
    isa: Isa,
    step: &Adafactor<T>,
    gradient: &[T],
    estimates: &[T],
) -> f64 {
    assert_eq!(gradient.len(), estimates.len(), "each gradient has an estimate");
    dispatch(isa, AdafactorNorm { step: *step, gradient, estimates })
}

struct AdafactorNorm<'a, T> {
    step: Adafactor<T>,
    gradient: &'a [T],
    estimates: &'a [T],
}

impl<T: Float + Into<f64>> SimdOp for AdafactorNorm<'_, T> {
    type Output = f64;
    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> f64 {
        let mut sums = [0.0; SUMS];
        for (gradients, estimates) in self.gradient.chunks(SUMS).zip(self.estimates.chunks(SUMS)) {
            for ((sum, &gradient), &estimate) in sums.iter_mut().zip(gradients).zip(estimates) {
                let update: f64 = self.step.update(gradient, estimate).into();
                *sum += update * update;
            }
        }
        sums.iter().sum()
    }
}

/// Computes `x = kept * x - size * update`.
///
/// # Panics
/// If the lengths differ.
pub fn adafactor_apply<T: Float>(
    isa: Isa,
    step: &Adafactor<T>,
    [kept, size]: [T; 2],
    x: &mut [T],
    [gradient, estimates]: [&[T]; 2],
) {
    assert!([gradient.len(), estimates.len()] == [x.len(); 2], "each element has a gradient and an estimate");
    dispatch(isa, AdafactorApply { step: *step, kept, size, x, gradient, estimates });
}

struct AdafactorApply<'a, T> {
    step: Adafactor<T>,
    kept: T,
    size: T,
    x: &'a mut [T],
    gradient: &'a [T],
    estimates: &'a [T],
}

impl<T: Float> SimdOp for AdafactorApply<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for ((x, &gradient), &estimate) in self.x.iter_mut().zip(self.gradient).zip(self.estimates) {
            *x = *x * self.kept - self.size * self.step.update(gradient, estimate);
        }
    }
}

/// Computes the gradients of attention scores from those of their softmax, in rows of `columns`.
/// The formula is `gradient = dropped * gradient - weight * sum(dropped * gradient)`. `gradients`
/// are at first with respect to `dropped`, the weights after dropout.
///
/// # Panics
/// If the lengths differ.
pub fn score_gradient<T: Float>(isa: Isa, columns: usize, weights: &[T], dropped: &[T], gradients: &mut [T]) {
    assert!([weights.len(), dropped.len()] == [gradients.len(); 2], "each weight has a gradient");
    dispatch(isa, ScoreGradient { columns, weights, dropped, gradients });
}

struct ScoreGradient<'a, T> {
    columns: usize,
    weights: &'a [T],
    dropped: &'a [T],
    gradients: &'a mut [T],
}

impl<T: Float> SimdOp for ScoreGradient<'_, T> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let columns = self.columns.max(1);
        let rows = self.weights.chunks_exact(columns).zip(self.dropped.chunks_exact(columns));
        for ((weights, dropped), gradients) in rows.zip(self.gradients.chunks_exact_mut(columns)) {
            for (gradient, &dropped) in gradients.iter_mut().zip(dropped) {
                *gradient = *gradient * dropped;
            }
            let mut sums = [T::zero(); SUMS];
            let mut parts = gradients.chunks_exact(SUMS);
            for part in &mut parts {
                for (sum, &gradient) in sums.iter_mut().zip(part) {
                    *sum = *sum + gradient;
                }
            }
            for (sum, &gradient) in sums.iter_mut().zip(parts.remainder()) {
                *sum = *sum + gradient;
            }
            let sum = sums.into_iter().fold(T::zero(), |all, sum| all + sum);
            for (gradient, &weight) in gradients.iter_mut().zip(weights) {
                *gradient = *gradient - weight * sum;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(len: usize, seed: f64) -> Vec<f64> {
        (0..len).map(|index| ((index as f64 + seed) * 12.989).sin() * 3.0).collect()
    }

    /// Runs a step with each instruction set on lists of numbers of many lengths. The last list is
    /// positive.
    fn all_bits_are_the_same<T: Float + std::fmt::Debug>(step: impl Fn(Isa, &mut [Vec<T>; 3], &[T])) {
        for len in 0..100 {
            let list = |seed| -> Vec<T> { numbers(len, seed).into_iter().filter_map(T::from).collect() };
            let given = [list(0.25), list(1.5), list(7.0).iter().map(|x| *x * *x).collect()];
            let results: Vec<[Vec<T>; 3]> = Isa::available()
                .map(|isa| {
                    let mut tensors = given.clone();
                    step(isa, &mut tensors, &list(3.0));
                    tensors
                })
                .collect();
            assert!(results.iter().all(|result| *result == results[0]), "{len} elements");
            assert!(len == 0 || results[0][0] != given[0], "nothing changed");
        }
    }

    fn check<T: Float + std::fmt::Debug>(of: impl Fn(f64) -> T) {
        for (nesterov, decay) in [(false, 0.0), (true, 0.1)] {
            let step = Sgd { rate: of(0.1), scale: of(0.3), momentum: of(0.9), nesterov, decay: of(decay) };
            all_bits_are_the_same(|isa, [x, ..], g| sgd(isa, &step, x, g));
            all_bits_are_the_same(|isa, [x, v, _], g| sgd_momentum(isa, &step, [x, v], g));
        }
        for (beta1, decay) in [(0.9, 0.0), (0.3, 0.1)] {
            let step = Adam {
                scale: of(0.3),
                gradient_decay: of(decay),
                kept_before: of(0.99),
                kept_after: of(0.98),
                beta: [of(beta1), of(0.99)],
                beta_rest: [of(1.0 - beta1), of(0.01)],
                bias_root: of(0.7),
                epsilon: of(1e-8),
                size: of(0.01),
            };
            all_bits_are_the_same(|isa, [x, m, v], g| adam(isa, &step, [x, m, v], g));
        }
        all_bits_are_the_same::<T>(|isa, [x, m, _], g| score_gradient(isa, g.len(), g, m, x));
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        check(|x| x as f32);
        check(|x| x);
    }
}
