//! GPTQ on a tile of columns: rows are rounded one after the other, and the rows that are left make
//! up for the errors.
//!
//! The columns of a weight do not depend on each other, so that a tile of them stays in the cache.

#![allow(clippy::indexing_slicing, reason = "channels are below `k`, the number of all rows")]

use crate::feedback::Feedback;
use crate::grid::{BlockQuantizer, Scheme};
use crate::tile::{Lanes, TILE, TileGrids, subtract};
use crate::weight::Weight;

/// The rows whose errors are handed on to the rows after them together, in one pass over those.
const BATCH: usize = 128;

/// A tile whose rows are rounded.
pub(crate) struct RoundedTile<T> {
    /// By block.
    pub(crate) grids: Vec<TileGrids<T>>,
    /// By row.
    pub(crate) codes: Vec<[u8; TILE]>,
}

/// Rounds the rows of a tile, which change while they wait.
pub(crate) fn round_tile<T: Weight>(
    scheme: &Scheme,
    feedback: &Feedback,
    values: &mut [Lanes],
) -> RoundedTile<T> {
    let BlockQuantizer { k, block_size, bits, .. } = scheme.blocks;
    let (largest, order) = (f32::from(bits.largest()), feedback.order());
    let grids_of = |values: &[Lanes], block: usize| {
        let rows = block * block_size..k.min((block + 1) * block_size);
        TileGrids::<T>::of(scheme, &values[rows.clone()], &feedback.importance()[rows])
    };
    let weights = if feedback.sweeps() > 0 { values.to_vec() } else { Vec::new() };
    let mut tile = RoundedTile { grids: Vec::new(), codes: vec![[0; TILE]; k] };
    if feedback.is_ordered() {
        // Rows of all blocks come in turn.
        tile.grids.extend((0..k.div_ceil(block_size)).map(|block| grids_of(&*values, block)));
    }
    // A block is inside of a batch, so that its rows have all errors when its grid is chosen.
    let batch = BATCH.max(block_size);
    let mut errors: Vec<Lanes> = Vec::with_capacity(batch);
    for start in (0..k).step_by(batch) {
        let end = k.min(start + batch);
        errors.clear();
        for step in start..end {
            let channel = order[step];
            if channel / block_size == tile.grids.len() {
                tile.grids.push(grids_of(&*values, channel / block_size));
            }
            let grids = &tile.grids[channel / block_size];
            let error = grids.round(largest, &values[channel], &mut tile.codes[channel]);
            for later in step + 1..end {
                subtract(&mut values[order[later]], feedback.share(step, later), &error);
            }
            errors.push(error);
        }
        for later in end..k {
            let row = &mut values[order[later]];
            for (index, error) in errors.iter().enumerate() {
                subtract(row, feedback.share(start + index, later), error);
            }
        }
    }
    if feedback.sweeps() > 0 {
        descend(scheme, feedback, &weights, &mut tile);
    }
    tile
}

/// Coordinate descent: moves each row to the grid's best value while the others stay. See
/// "QuantEase: Optimization-based Quantization for Language Models", arXiv:2309.01885.
fn descend<T: Weight>(scheme: &Scheme, feedback: &Feedback, weights: &[Lanes], tile: &mut RoundedTile<T>) {
    let BlockQuantizer { k, block_size, bits, .. } = scheme.blocks;
    // What is to be subtracted from the weights to get those of the codes, and its product with the
    // Hessian.
    let mut errors = weights.to_vec();
    for (channel, error) in errors.iter_mut().enumerate() {
        subtract(error, 1.0, &tile.grids[channel / block_size].decode(&tile.codes[channel]));
    }
    let mut products = vec![[0.0; TILE]; k];
    for (row, product) in products.iter_mut().enumerate() {
        for (channel, error) in errors.iter().enumerate() {
            subtract(product, -feedback.element(row, channel), error);
        }
    }
    for _ in 0..feedback.sweeps() {
        for channel in 0..k {
            let energy = feedback.element(channel, channel);
            if energy <= 0.0 {
                continue;
            }
            let grids = &tile.grids[channel / block_size];
            let before = grids.decode(&tile.codes[channel]);
            let mut best = before;
            subtract(&mut best, -1.0 / energy, &products[channel]);
            let mut codes = [0; TILE];
            grids.encode(f32::from(bits.largest()), &best, &mut codes);
            if codes == tile.codes[channel] {
                continue;
            }
            let mut change = grids.decode(&codes);
            subtract(&mut change, 1.0, &before);
            tile.codes[channel] = codes;
            for (row, product) in products.iter_mut().enumerate() {
                subtract(product, feedback.element(row, channel), &change);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ort_core::Result;
    use serde_json::Value;

    use super::*;
    use crate::decoded::{METHODS, REFERENCE, bits_of, decoded, inputs, results, scheme, symmetric, weights};
    use crate::feedback::{Curvature, GptqOptions};
    use crate::grid::{Bits, BlockMethod};
    use crate::hessian::Hessian;

    fn hessian(channels: usize, rows: &[f32]) -> Hessian {
        let mut hessian = Hessian::new(channels);
        hessian.observe(rows, channels);
        hessian
    }

    /// The sum of the squares of what changes in the outputs.
    fn loss(rows: &[f32], weights: &[f32], decoded: &[f32], (k, n): (usize, usize)) -> f64 {
        let mut loss = 0.0;
        for row in rows.chunks(k) {
            for column in 0..n {
                let terms = row.iter().enumerate().map(|(channel, x)| {
                    let place = channel * n + column;
                    f64::from(*x) * (f64::from(decoded[place]) - f64::from(weights[place]))
                });
                loss += terms.sum::<f64>().powi(2);
            }
        }
        loss
    }

    fn with(feedback: &Feedback) -> Curvature<'_> {
        let importance = feedback.importance();
        Curvature { importance, feedback: Some(feedback), ..Curvature::default() }
    }

    /// Nothing can make up for the error of an independent channel.
    #[test]
    fn independent_channels_are_rounded_as_they_are() -> Result<()> {
        let (k, n) = (150, 70);
        let weights = weights(k * n);
        let mut rows = vec![0.0; k * k];
        rows.iter_mut().step_by(k + 1).enumerate().for_each(|(channel, x)| *x = (channel % 5) as f32 - 2.0);
        for act_order in [false, true] {
            let options = GptqOptions { act_order, ..GptqOptions::default() };
            // A fifth of the channels is never used.
            let feedback = Feedback::of(&hessian(k, &rows), options).unwrap();
            for (name, method) in METHODS {
                for bits in [Bits::Two, Bits::Four, Bits::Eight] {
                    let scheme = scheme((k, n, 32), bits, method);
                    for scheme in [scheme, symmetric(scheme)] {
                        let found = results(&scheme, with(&feedback), &weights)?;
                        let plain = Curvature { feedback: None, ..with(&feedback) };
                        let plain = results(&scheme, plain, &weights)?;
                        let label = format!("{name} {bits:?} {act_order}");
                        assert_eq!(
                            (found.codes, found.zero_points),
                            (plain.codes, plain.zero_points),
                            "{label}"
                        );
                        assert_eq!(found.scales, plain.scales, "{label}");
                    }
                }
            }
            // Channels that count the same are those of a quantization without samples.
            let mut equal = vec![0.0; k * k];
            equal.iter_mut().step_by(k + 1).for_each(|x| *x = 3.0);
            let feedback = Feedback::of(&hessian(k, &equal), options).unwrap();
            let scheme = scheme((k, n, 16), Bits::Four, BlockMethod::SquaredError);
            let found = results(&scheme, with(&feedback), &weights)?;
            let plain = results(&scheme, Curvature::default(), &weights)?;
            assert_eq!((found.codes, found.scales), (plain.codes, plain.scales), "{act_order}");
        }
        Ok(())
    }

    /// The losses of a prototype in NumPy, which inverts and factorizes the Hessian as published
    /// and updates all rows at once, and those of plain rounding with the same search.
    #[test]
    fn losses_are_those_of_the_published_algorithm() -> Result<()> {
        let cases: Value = serde_json::from_str(REFERENCE).unwrap();
        let cases = cases["gptq"].as_array().unwrap();
        assert_eq!(cases.len(), 12);
        for case in cases {
            let size = |name: &str| case[name].as_u64().unwrap() as usize;
            let (k, n) = (size("k"), size("n"));
            let plain =
                scheme((k, n, size("block")), bits_of(size("bits") as u64), BlockMethod::SquaredError);
            let scheme = if case["symmetric"] == true { symmetric(plain) } else { plain };
            let (weights, rows) = (weights(k * n), inputs(size("rows"), k));
            let options = GptqOptions { act_order: case["act_order"] == true, ..GptqOptions::default() };
            let feedback = Feedback::of(&hessian(k, &rows), options).unwrap();
            let found = loss(&rows, &weights, &decoded(&scheme, with(&feedback), &weights)?, (k, n));
            let plain = Curvature { feedback: None, ..with(&feedback) };
            let plain = loss(&rows, &weights, &decoded(&scheme, plain, &weights)?, (k, n));
            let expected = |name: &str| case[name].as_f64().unwrap();
            assert!((found / expected("loss") - 1.0).abs() < 0.03, "{case}: {found}");
            assert!((plain / expected("plain") - 1.0).abs() < 0.01, "{case}: {plain}");
            assert!(found < 0.35 * plain, "{case}: {found} of {plain}");
        }
        Ok(())
    }

    #[test]
    fn sweeps_lower_the_loss() -> Result<()> {
        let (k, n) = (160, 20);
        let (weights, rows) = (weights(k * n), inputs(200, k));
        let scheme = scheme((k, n, 32), Bits::Two, BlockMethod::SquaredError);
        let mut losses = Vec::new();
        for sweeps in 0..4 {
            let options = GptqOptions { sweeps, ..GptqOptions::default() };
            let feedback = Feedback::of(&hessian(k, &rows), options).unwrap();
            losses.push(loss(&rows, &weights, &decoded(&scheme, with(&feedback), &weights)?, (k, n)));
        }
        assert!(losses.windows(2).all(|pair| pair[1] <= pair[0] * 1.000_01), "{losses:?}");
        assert!(losses[3] < 0.95 * losses[0], "{losses:?}");
        Ok(())
    }

    /// One sample, fewer rows than channels, channels that are copies or never used.
    #[test]
    fn degenerate_samples_leave_finite_weights_and_a_lower_loss() -> Result<()> {
        let (k, n) = (100, 40);
        let weights = weights(k * n);
        let copies: Vec<f32> = inputs(60, k).chunks(k).flat_map(|row| row.iter().map(|_| row[7])).collect();
        let mut unused = inputs(200, k);
        unused.iter_mut().enumerate().filter(|(place, _)| place % k % 3 == 0).for_each(|(_, x)| *x = 0.0);
        for (name, rows) in
            [("one sample", inputs(1, k)), ("few", inputs(20, k)), ("copies", copies), ("unused", unused)]
        {
            for act_order in [false, true] {
                let options = GptqOptions { act_order, ..GptqOptions::default() };
                let feedback = Feedback::of(&hessian(k, &rows), options).unwrap();
                let scheme = scheme((k, n, 32), Bits::Four, BlockMethod::SquaredError);
                let found = decoded(&scheme, with(&feedback), &weights)?;
                let plain = decoded(&scheme, Curvature { feedback: None, ..with(&feedback) }, &weights)?;
                assert!(found.iter().all(|value| value.is_finite() && value.abs() < 5.0), "{name}");
                let (found, plain) =
                    (loss(&rows, &weights, &found, (k, n)), loss(&rows, &weights, &plain, (k, n)));
                assert!(found < 0.5 * plain, "{name} {act_order}: {found} of {plain}");
            }
        }
        Ok(())
    }
}
