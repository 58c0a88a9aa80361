//! Activation-aware scaling of weights (AWQ): the rows of channels with large inputs are multiplied
//! by a factor, so that their relative error shrinks, and the inputs are divided by it.
//!
//! The factors are powers of the mean magnitudes of the channels. Each power is judged by the
//! change of the outputs, `tr(Dᵀ H D)`, and not in runs of the model. See "AWQ: Activation-aware
//! Weight Quantization for LLM Compression and Acceleration", arXiv:2306.00978.

use crate::grid::Scheme;
use crate::hessian::{Hessian, triangle};
use crate::parallel;
use crate::tile::{Lanes, TILE, TileGrids};

/// The powers from 0 on, in steps of 1/20.
const POWERS: u8 = 20;
/// The least magnitude of a channel, as a share of the largest.
const LEAST: f64 = 1e-4;

/// The factors that one input may have, and the change of the outputs with each.
pub(crate) struct AwqSearch {
    /// The Hessian over the mean of its diagonal: the lower triangle.
    hessian: Vec<f32>,
    candidates: Vec<Candidate>,
}

struct Candidate {
    scales: Vec<f32>,
    /// How much an error in each scaled row counts.
    importance: Vec<f32>,
    loss: f64,
}

impl AwqSearch {
    /// Begins a search with a usable Hessian. The first factors are all 1.
    pub(crate) fn new(hessian: &Hessian) -> AwqSearch {
        let mean = hessian.mean_energy();
        let magnitudes: Vec<f64> = hessian.mean_magnitudes().collect();
        let energies: Vec<f64> = hessian.diagonal().map(|energy| energy / mean).collect();
        let candidate = |step: u8| {
            let scales = scales(&magnitudes, f64::from(step) / f64::from(POWERS));
            let importance = energies.iter().zip(&scales);
            let importance =
                importance.map(|(energy, scale)| (energy / f64::from(*scale).powi(2)) as f32).collect();
            Candidate { scales, importance, loss: 0.0 }
        };
        AwqSearch { hessian: hessian.over_mean(), candidates: (0..POWERS).map(candidate).collect() }
    }

    /// Adds the changes of the outputs of some columns of a weight.
    pub(crate) fn add(&mut self, scheme: &Scheme, columns: &[Lanes]) {
        let hessian = &self.hessian;
        let threads = parallel::threads_for(columns.len() * columns.len());
        let size = self.candidates.len().div_ceil(threads);
        parallel::for_each(self.candidates.chunks_mut(size).collect(), |candidates| {
            for candidate in candidates {
                candidate.loss += candidate.loss_of(hessian, scheme, columns);
            }
        });
    }

    /// The best factors, and how much errors in the rows count with them. The factors are `None` if
    /// the weights are better left as they are.
    pub(crate) fn best(self) -> (Option<Vec<f32>>, Vec<f32>) {
        let mut best = 0;
        let losses: Vec<f64> = self.candidates.iter().map(|candidate| candidate.loss).collect();
        for (index, loss) in losses.iter().enumerate() {
            if losses.get(best).is_some_and(|least| loss < least) {
                best = index;
            }
        }
        match self.candidates.into_iter().nth(best) {
            Some(Candidate { scales, importance, .. }) => ((best > 0).then_some(scales), importance),
            None => (None, Vec::new()),
        }
    }
}

/// The factors for a power. The geometric mean of the largest and the smallest is 1.
fn scales(magnitudes: &[f64], power: f64) -> Vec<f32> {
    let most = magnitudes.iter().copied().fold(0.0, f64::max);
    let scales: Vec<f64> =
        magnitudes.iter().map(|magnitude| magnitude.max(LEAST * most).powf(power)).collect();
    let (low, high) = scales
        .iter()
        .fold((f64::INFINITY, 0.0_f64), |(low, high), scale| (low.min(*scale), high.max(*scale)));
    let middle = (low * high).sqrt();
    scales.iter().map(|scale| (scale / middle) as f32).collect()
}

impl Candidate {
    /// The sum of the squares of what changes in the outputs of some columns.
    fn loss_of(&self, hessian: &[f32], scheme: &Scheme, columns: &[Lanes]) -> f64 {
        let largest = f32::from(scheme.blocks.bits.largest());
        let mut scaled = columns.to_vec();
        for (row, scale) in scaled.iter_mut().zip(&self.scales) {
            row.iter_mut().for_each(|value| *value *= scale);
        }
        let mut codes = [0; TILE];
        let mut errors = Vec::with_capacity(columns.len());
        let size = scheme.blocks.block_size;
        for (rows, importance) in scaled.chunks(size).zip(self.importance.chunks(size)) {
            let grids = TileGrids::<f32>::of(scheme, rows, importance);
            errors.extend(rows.iter().map(|row| grids.round(largest, row, &mut codes)));
        }
        for (row, scale) in errors.iter_mut().zip(&self.scales) {
            row.iter_mut().for_each(|error| *error /= scale);
        }
        loss(hessian, &errors)
    }
}

/// `tr(Dᵀ H D)` for the lower triangle of `H` and the rows of `D`.
fn loss(hessian: &[f32], changes: &[Lanes]) -> f64 {
    let mut total = 0.0;
    for (index, own) in changes.iter().enumerate() {
        let row = hessian.get(triangle(index)..triangle(index + 1)).unwrap_or_default();
        let mut sums = [0.0_f32; TILE];
        for (element, other) in row.iter().zip(changes) {
            sums.iter_mut().zip(other).for_each(|(sum, change)| *sum += element * change);
        }
        let energy = row.last().copied().unwrap_or_default();
        // The elements before the diagonal stand for those behind it, too.
        let terms = own.iter().zip(sums).map(|(own, sum)| f64::from(own * (2.0 * sum - energy * own)));
        total += terms.sum::<f64>();
    }
    total
}
