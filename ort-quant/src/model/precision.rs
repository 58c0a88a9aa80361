//! The precisions that a weight in blocks may have.

use crate::grid::{Bits, BlockQuantizer, Scheme};
use crate::noise::Noise;

/// The bits of a code, and how many weights share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// The bits.
    pub bits: Bits,
    /// The weights of a block.
    pub size: usize,
}

/// A precision of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Precision {
    /// The blocks; `None` for a weight that stays in floating point.
    pub blocks: Option<Blocks>,
    /// The bytes that the weight takes in the file.
    pub bytes: u64,
    /// What it changes in the weight.
    pub noise: Noise,
    /// The squared relative error of the outputs if no other weight changes. Errors of weights add
    /// up to first order, because they are independent of each other.
    pub error: f64,
}

/// How the errors of precisions are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorSearch {
    /// Each weight is replaced once with 2 and once with 4 bits, in blocks of the usual size. The
    /// errors of other sizes and of 8 bits follow, in proportion to the noise of the weight.
    #[default]
    FewBits,
    /// Each weight is replaced once for each precision.
    EachPrecision,
}

/// The sizes of blocks that kernels have, and that of large blocks of 8 bits.
const LEAST_BLOCK: usize = 16;
const MOST_BLOCK: usize = 256;
const LARGE_BLOCK: usize = 128;

impl Blocks {
    /// The scheme with these blocks.
    pub(super) fn of(self, scheme: Scheme) -> Scheme {
        let blocks = BlockQuantizer { bits: self.bits, block_size: self.size, ..scheme.blocks };
        Scheme { blocks, ..scheme }
    }

    /// The blocks of at least these bits. Of each number of bits, those of the usual size come
    /// first. With 8 bits the noise is so small that large blocks save more than they harm.
    pub(super) fn choices(least_bits: usize, usual: usize) -> Vec<Blocks> {
        let mut choices: Vec<Blocks> = Vec::new();
        for bits in [Bits::Two, Bits::Four, Bits::Eight].into_iter().filter(|bits| bits.count() >= least_bits)
        {
            let others = match bits {
                Bits::Eight => [usual.max(LARGE_BLOCK); 2],
                Bits::Two | Bits::Three | Bits::Four => {
                    [(usual / 2).max(LEAST_BLOCK), (usual * 2).min(MOST_BLOCK)]
                }
            };
            for size in std::iter::once(usual).chain(others) {
                let blocks = Blocks { bits, size };
                if !choices.contains(&blocks) {
                    choices.push(blocks);
                }
            }
        }
        choices
    }
}

impl Precision {
    /// One whose noise and error are not known yet.
    pub(super) fn new(blocks: Option<Blocks>, bytes: u64) -> Precision {
        Precision { blocks, bytes, noise: Noise::default(), error: 0.0 }
    }

    fn bits(&self) -> Option<Bits> {
        self.blocks.map(|blocks| blocks.bits)
    }
}

/// The indices of the precisions that are measured: all of them, or the first with 2 and with 4
/// bits. Of a weight that has 8 bits at least, the first.
pub(super) fn measured(
    precisions: &[Precision],
    search: ErrorSearch,
) -> impl Iterator<Item = usize> + use<'_> {
    let is_wanted = move |(index, precision): &(usize, &Precision)| {
        let own = precision.bits();
        let mut before = precisions.iter().take(*index);
        let is_covered = before.any(|other| other.bits() == own || own == Some(Bits::Eight));
        own.is_some() && (search == ErrorSearch::EachPrecision || !is_covered)
    };
    precisions.iter().enumerate().filter(is_wanted).map(|(index, _)| index)
}

/// Finds the errors that were not measured from one that was: of the same bits, or of the most.
pub(super) fn follow(precisions: &mut [Precision], references: &[Precision]) {
    for precision in precisions.iter_mut().filter(|precision| precision.blocks.is_some()) {
        if references.iter().any(|reference| reference.blocks == precision.blocks) {
            continue;
        }
        let same = references.iter().find(|reference| reference.bits() == precision.bits());
        if let Some(reference) = same.or(references.last()) {
            let ratio = precision.noise.error / reference.noise.error;
            precision.error = if ratio.is_finite() { reference.error * ratio } else { 0.0 };
        }
    }
}

/// The noise over the signal. Rounded to float32, so that the order in which samples were added
/// decides nothing.
pub(super) fn share(noise: Noise) -> f64 {
    let share = noise.error / noise.signal;
    if share.is_finite() { f64::from(share as f32) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_around_the_usual_size() {
        let of = |least: usize, usual: usize| -> Vec<(usize, usize)> {
            let choices = Blocks::choices(least, usual).into_iter();
            choices.map(|blocks| (blocks.bits.count(), blocks.size)).collect()
        };
        assert_eq!(of(2, 32), [(2, 32), (2, 16), (2, 64), (4, 32), (4, 16), (4, 64), (8, 32), (8, 128)]);
        assert_eq!(of(4, 16), [(4, 16), (4, 32), (8, 16), (8, 128)]);
        assert_eq!(of(8, 256), [(8, 256)]);
    }

    #[test]
    fn errors_follow_the_noise_of_the_same_bits() {
        let blocks = Blocks::choices(2, 32).into_iter().map(Some).chain([None]);
        let mut precisions: Vec<Precision> = blocks.map(|blocks| Precision::new(blocks, 1)).collect();
        let noise = |error: f64| Noise { signal: 1.0, error };
        let noises = [8.0, 6.0, 12.0, 1.0, 0.5, 2.0, 0.01, 0.02];
        precisions.iter_mut().zip(noises).for_each(|(precision, error)| precision.noise = noise(error));
        let wanted: Vec<usize> = measured(&precisions, ErrorSearch::FewBits).collect();
        assert_eq!(wanted, [0, 3]);
        assert_eq!(measured(&precisions, ErrorSearch::EachPrecision).count(), 8);
        assert_eq!(measured(&precisions[6..], ErrorSearch::FewBits).collect::<Vec<_>>(), [0]);
        (precisions[0].error, precisions[3].error) = (4.0, 3.0);
        let references: Vec<Precision> = wanted.iter().map(|index| precisions[*index]).collect();
        follow(&mut precisions, &references);
        let errors: Vec<f64> = precisions.iter().map(|precision| precision.error).collect();
        assert_eq!(errors, [4.0, 3.0, 6.0, 3.0, 1.5, 6.0, 0.03, 0.06, 0.0]);
        // A weight that blocks represent exactly.
        let exact = [Precision { noise: noise(0.0), ..references[0] }];
        follow(&mut precisions, &exact);
        assert!(precisions.iter().all(|precision| precision.error.is_finite()));
    }
}
