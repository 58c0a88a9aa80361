//! Feedback of rounding errors by GPTQ: how the rows of a weight that are not rounded yet make up
//! for the error of one that is.
//!
//! After row `j` was rounded with error `e`, the others change by `-e U[j, r] / U[j, j]`, where `U`
//! is the upper Cholesky factor of the inverse of the Hessian. See "GPTQ: Accurate Post-Training
//! Quantization for Generative Pre-trained Transformers", arXiv:2210.17323.
//!
//! If the rows are taken in reverse order, the inverse of the lower Cholesky factor of the Hessian
//! is that matrix, so that no matrix has to be inverted and factorized again.

use crate::hessian::{Hessian, dot, triangle};

/// How GPTQ quantizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GptqOptions {
    /// What is added to the diagonal of the Hessian, as a share of its mean. If the Hessian cannot
    /// be factorized all the same, it is raised tenfold, at most four times.
    pub damping: f64,
    /// Whether rows are rounded in the order of their channels' energies, the greatest first. Then
    /// the grids of all blocks are chosen before.
    pub act_order: bool,
    /// The sweeps of coordinate descent after the rounding, of which each may lower the error. They
    /// help with 2 bits.
    pub sweeps: usize,
    /// Whether a bias corrects what errors change in the mean of the outputs. Then GPTQ minimizes
    /// the variance alone.
    pub corrects_bias: bool,
}

/// What samples say about the rows of a weight.
#[derive(Clone, Copy, Default)]
pub(crate) struct Curvature<'c> {
    /// How much an error in each row counts; the same for all rows if empty.
    pub(crate) importance: &'c [f32],
    pub(crate) feedback: Option<&'c Feedback>,
    /// The means of the channels, if a bias corrects the means of the outputs, and their mean
    /// squares.
    pub(crate) means: &'c [f32],
    pub(crate) energies: &'c [f32],
}

impl Default for GptqOptions {
    fn default() -> Self {
        GptqOptions { damping: 0.01, act_order: false, sweeps: 0, corrects_bias: false }
    }
}

/// How often the damping is raised.
const RAISES: usize = 4;

/// What the error of each row changes in the rows that come after it.
#[derive(Debug)]
pub(crate) struct Feedback {
    /// The channels in the order in which their rows are rounded.
    order: Vec<usize>,
    is_ordered: bool,
    /// The shares of the error: a lower triangle. Its last row is that of the first step, and the
    /// first column that of the last step.
    shares: Vec<f32>,
    /// The diagonal of the factor, by step: the square of an error over that of its element is what
    /// the error costs if later rows make up for it.
    pivots: Vec<f32>,
    /// The energy of each channel over the mean.
    importance: Vec<f32>,
    sweeps: usize,
    /// The lower triangle of the Hessian over its mean, if there are sweeps.
    hessian: Vec<f32>,
}

impl Feedback {
    /// Factorizes a Hessian. `None` if it says nothing, or cannot be factorized.
    pub(crate) fn of(hessian: &Hessian, options: GptqOptions) -> Option<Feedback> {
        if !hessian.is_usable() {
            return None;
        }
        let energies: Vec<f64> = hessian.diagonal().collect();
        let mean = hessian.mean_energy();
        let mut order: Vec<usize> = (0..energies.len()).collect();
        if options.act_order {
            let energy = |channel: &usize| energies.get(*channel).copied().unwrap_or_default();
            // Stable, so that equal channels stay in their order.
            order.sort_by(|one, other| energy(other).total_cmp(&energy(one)));
        }
        let mut damping = options.damping;
        for _ in 0..=RAISES {
            if let Some((shares, pivots)) = shares(damped(hessian, &order, (mean, damping))) {
                let importance = energies.iter().map(|energy| (energy / mean) as f32).collect();
                let GptqOptions { act_order: is_ordered, sweeps, .. } = options;
                let hessian = if sweeps > 0 { hessian.over_mean() } else { Vec::new() };
                return Some(Feedback { order, is_ordered, shares, pivots, importance, sweeps, hessian });
            }
            damping = (10.0 * damping).max(1e-6);
        }
        None
    }

    /// The feedback of channels that are alike and independent.
    pub(crate) fn none(channels: usize) -> Feedback {
        Feedback {
            order: (0..channels).collect(),
            is_ordered: false,
            shares: vec![0.0; triangle(channels)],
            pivots: vec![1.0; channels],
            importance: vec![1.0; channels],
            sweeps: 0,
            hessian: Vec::new(),
        }
    }

    /// The channels in the order in which their rows are rounded.
    pub(crate) fn order(&self) -> &[usize] {
        &self.order
    }

    /// Whether that is another order than that of the weight.
    pub(crate) fn is_ordered(&self) -> bool {
        self.is_ordered
    }

    pub(crate) fn importance(&self) -> &[f32] {
        &self.importance
    }

    pub(crate) fn sweeps(&self) -> usize {
        self.sweeps
    }

    /// An element of the Hessian over its mean, if there are sweeps.
    #[inline]
    pub(crate) fn element(&self, one: usize, other: usize) -> f32 {
        self.hessian.get(triangle(one.max(other)) + one.min(other)).copied().unwrap_or_default()
    }

    /// The diagonal of the factor at a step.
    pub(crate) fn pivot(&self, step: usize) -> f32 {
        self.pivots.get(step).copied().unwrap_or(1.0)
    }

    /// How much of the error at a step is subtracted from the row of a later step.
    #[inline]
    pub(crate) fn share(&self, step: usize, later: usize) -> f32 {
        let last = self.order.len() - 1;
        self.shares.get(triangle(last - step) + last - later).copied().unwrap_or_default()
    }
}

/// The Hessian over its mean, with damping, in the reverse of an order. A channel that no sample
/// uses has 1 on the diagonal, and takes no part in the feedback.
fn damped(hessian: &Hessian, order: &[usize], (mean, damping): (f64, f64)) -> Vec<f64> {
    let mut matrix = Vec::with_capacity(triangle(order.len()));
    let reversed: Vec<usize> = order.iter().rev().copied().collect();
    for (place, one) in reversed.iter().enumerate() {
        matrix.extend(reversed.iter().take(place).map(|other| hessian.get(*one, *other) / mean));
        let energy = hessian.get(*one, *one) / mean;
        matrix.push(damping + if energy == 0.0 { 1.0 } else { energy });
    }
    matrix
}

/// The rows of a factor that are computed together. The rows before them are read once for all of
/// them: a large factor is in no cache.
const GROUP: usize = 8;

/// Neighbouring rows of a lower triangle, of which the first has this number.
struct RowGroup<'f> {
    first: usize,
    rows: Vec<&'f mut [f64]>,
}

impl<'f> RowGroup<'f> {
    /// Splits the rows before a group off.
    fn split(factor: &'f mut [f64], first: usize, end: usize) -> Option<(&'f [f64], RowGroup<'f>)> {
        let (before, mut rest) = factor.split_at_mut_checked(triangle(first))?;
        let mut rows = Vec::with_capacity(end - first);
        for row in first..end {
            let (own, after) = rest.split_at_mut_checked(row + 1)?;
            rows.push(own);
            rest = after;
        }
        Some((before, RowGroup { first, rows }))
    }

    /// Replaces rows of a matrix by those of its Cholesky factor, of which all rows before are
    /// known.
    fn factorize(&mut self, before: &[f64]) -> Option<()> {
        for place in 0..self.first {
            let other = before.get(triangle(place)..triangle(place + 1))?;
            self.rows.iter_mut().try_for_each(|row| eliminate(row, place, other))?;
        }
        for index in 0..self.rows.len() {
            let (done, rest) = self.rows.split_at_mut_checked(index)?;
            let row = rest.first_mut()?;
            for (place, other) in (self.first..).zip(&*done) {
                eliminate(row, place, other)?;
            }
            let (element, known) = row.split_last_mut()?;
            let square = *element - dot(known, known);
            let is_positive = square > 0.0 && square.is_finite();
            *element = is_positive.then(|| square.sqrt())?;
        }
        Some(())
    }

    /// Replaces rows of a lower triangle by those of its inverse, of which all rows before are
    /// known.
    fn invert(&mut self, before: &[f64]) -> Option<()> {
        let mut sums: Vec<Vec<f64>> = self.rows.iter().map(|row| vec![0.0; row.len() - 1]).collect();
        for place in 0..self.first {
            let other = before.get(triangle(place)..triangle(place + 1))?;
            for (row, sums) in self.rows.iter().zip(&mut sums) {
                add_multiple(sums, *row.get(place)?, other);
            }
        }
        for (index, mut sums) in sums.into_iter().enumerate() {
            let (done, rest) = self.rows.split_at_mut_checked(index)?;
            let row = rest.first_mut()?;
            for (place, other) in (self.first..).zip(&*done) {
                add_multiple(&mut sums, *row.get(place)?, other);
            }
            let (diagonal, elements) = row.split_last_mut()?;
            let reciprocal = 1.0 / *diagonal;
            elements.iter_mut().zip(sums).for_each(|(element, sum)| *element = -sum * reciprocal);
            *diagonal = reciprocal;
        }
        Some(())
    }
}

/// Computes an element of a row of a Cholesky factor from those before it and the row of its place.
fn eliminate(row: &mut [f64], place: usize, other: &[f64]) -> Option<()> {
    let ((diagonal, other), (known, rest)) = (other.split_last()?, row.split_at_mut_checked(place)?);
    let element = rest.first_mut()?;
    *element = (*element - dot(known, other)) / diagonal;
    Some(())
}

fn add_multiple(sums: &mut [f64], factor: f64, others: &[f64]) {
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += factor * other);
}

/// The rows of the inverse of the Cholesky factor of a matrix, each over its diagonal, and the
/// diagonals, of which the last row's is the first. `None` if the matrix is not positive definite.
fn shares(mut factor: Vec<f64>) -> Option<(Vec<f32>, Vec<f32>)> {
    let rows = (0..).take_while(|row| triangle(*row) < factor.len()).count();
    let groups = || (0..rows).step_by(GROUP).map(|first| (first, rows.min(first + GROUP)));
    for (first, end) in groups() {
        let (before, mut group) = RowGroup::split(&mut factor, first, end)?;
        group.factorize(before)?;
    }
    for (first, end) in groups() {
        let (before, mut group) = RowGroup::split(&mut factor, first, end)?;
        group.invert(before)?;
    }
    let (mut shares, mut pivots) = (Vec::with_capacity(factor.len()), Vec::with_capacity(rows));
    for row in 0..rows {
        let row = factor.get(triangle(row)..triangle(row + 1))?;
        let diagonal = row.last()?;
        shares.extend(row.iter().map(|element| (element / diagonal) as f32));
        pivots.push(*diagonal as f32);
    }
    pivots.reverse();
    shares.iter().chain(&pivots).all(|element| element.is_finite()).then_some((shares, pivots))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hessian(channels: usize, rows: &[f32]) -> Hessian {
        let mut hessian = Hessian::new(channels);
        hessian.observe(rows, channels);
        hessian
    }

    /// By NumPy, with `h` the Hessian after damping:
    /// `u = np.linalg.cholesky(np.linalg.inv(h)).T; u / np.diag(u)[:, None]`.
    #[test]
    fn shares_are_those_of_the_cholesky_factor_of_the_inverse() {
        let rows = [2.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0];
        // The Hessian is [[5, 2, 1], [2, 2, 1], [1, 1, 2]].
        let options = GptqOptions { damping: 0.0, ..GptqOptions::default() };
        let feedback = Feedback::of(&hessian(3, &rows), options).unwrap();
        for (step, later, expected) in [(0, 1, -1.0), (0, 2, 0.0), (1, 2, -0.5), (1, 1, 1.0)] {
            let found = feedback.share(step, later);
            assert!((found - expected).abs() < 1e-6, "{step} {later}: {found} {expected}");
        }
        // The Hessian is divided by its mean energy, 3: `np.diag(u) * 3 ** 0.5`.
        for (step, expected) in [1.0_f32, 2.0, 1.5].into_iter().enumerate() {
            let found = feedback.pivot(step);
            assert!((found - expected.sqrt()).abs() < 1e-6, "{step}: {found}");
        }
        for (found, expected) in feedback.importance().iter().zip([5.0 / 3.0, 2.0 / 3.0, 2.0 / 3.0]) {
            assert!((found - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn an_order_begins_with_the_greatest_energy() {
        let rows = [1.0, 3.0, 0.0, 3.0, 0.5, 0.0, 0.0, 3.5];
        let options = GptqOptions { act_order: true, ..GptqOptions::default() };
        let feedback = Feedback::of(&hessian(4, &rows), options).unwrap();
        assert_eq!(feedback.order(), [3, 1, 0, 2]);
        assert!(feedback.is_ordered());
        assert_eq!(feedback.importance()[2], 0.0);
        // No sample uses channel 2.
        assert_eq!([0, 1, 2].map(|step| feedback.share(step, 3)), [0.0; 3]);
    }

    #[test]
    fn independent_channels_have_no_shares() {
        let rows = [1.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 2.0];
        let feedback = Feedback::of(&hessian(3, &rows), GptqOptions::default()).unwrap();
        assert_eq!([(0, 1), (0, 2), (1, 2)].map(|(step, later)| feedback.share(step, later)), [0.0; 3]);
    }

    /// One sample, or channels that are copies of each other: the damping makes the factor exist.
    /// Without any it is raised.
    #[test]
    fn hessians_of_low_rank_are_damped() {
        let row: Vec<f32> = (0..40_u8).map(|step| f32::from(step % 7) - 3.0).collect();
        for damping in [0.01, 0.0] {
            let options = GptqOptions { damping, ..GptqOptions::default() };
            assert!(Feedback::of(&hessian(40, &row), options).is_some(), "{damping}");
        }
        assert!(Feedback::of(&hessian(40, &[0.0; 40]), GptqOptions::default()).is_none());
        assert!(Feedback::of(&hessian(2, &[f32::NAN, 1.0]), GptqOptions::default()).is_none());
    }
}
