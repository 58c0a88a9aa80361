//! A few queries that share keys, each multiplied with the keys on its own, as in a decoding step.

use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::RowBlock;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::Isa;
use ort_cpu_vector::simd::attention::{dots, mix, weigh_row};

use super::attention::Attention;
use super::blocks::KEYS;
use super::query_block::QueryBlock;
use super::rows::Strip;

/// The maximum number of queries sharing keys for which each is multiplied with the keys on its
/// own.
pub(crate) const FEW: usize = 4;

/// A query's running maximum score and running sum of weights.
type Running = (f32, f32);

/// Computes a few queries, one after the other for each block of keys.
pub(crate) fn run(attention: &Attention<'_>, isa: Isa, mut block: RowBlock<'_, f32>, scratch: &mut [f32]) {
    let SdpaSizes { size, value_size, keys, .. } = attention.sizes;
    let (queries, rest) = scratch.split_at_mut(FEW * size);
    let (scores, rest) = rest.split_at_mut(KEYS);
    let (added, rest) = rest.split_at_mut(KEYS);
    let places = QueryBlock::new(&block);
    let mut running = [(f32::NEG_INFINITY, 0.0); FEW];
    let mut all = keys..0;
    for (row, running) in running.iter_mut().enumerate().take(places.len()) {
        let [batch, head, query] = places.at(row);
        let to = &mut queries[row * size..][..size];
        match attention.queries_from([batch, head, query]) {
            Some(from) => to.copy_from_slice(&from[..size]),
            None => to.copy_from_slice(block.row([head, query])),
        }
        unary_in_place(isa, Unary::Affine { scale: attention.factor(), shift: 0.0 }, to);
        if let Some(sinks) = attention.sinks {
            // A sink acts as a key with this score and a value of 0.
            *running = (sinks[head], 1.0);
        }
        // The query was copied out, so its row can now accumulate the result.
        block.row([head, query]).fill(0.0);
        let span = attention.span(batch, query);
        if !span.is_empty() {
            all = all.start.min(span.start)..all.end.max(span.end);
        }
    }
    let place = [places.batch, places.heads.start / attention.group()];
    let (wide_keys, wide_values) = rest.split_at_mut(match attention.keys.elements.is_narrow() {
        true => KEYS * size,
        false => 0,
    });
    let mut step = Step { attention, isa, places, queries, scores, added };
    // Blocks start at multiples of `KEYS`, so that the order of a query's sums does not depend on
    // its neighbours.
    for first in (all.start / KEYS * KEYS..all.end).step_by(KEYS) {
        let rows = first..(first + KEYS).min(all.end);
        spend(rows.len() * step.places.len() * (size + value_size) / 8);
        let keys = attention.keys.strip(isa, place, rows.clone(), size, wide_keys);
        let values = attention.values.strip(isa, place, rows.clone(), value_size, wide_values);
        step.run(&mut block, &mut running, rows, [keys, values]);
    }
    for (row, (_, sum)) in running.iter().take(step.places.len()).enumerate() {
        let [_, head, query] = step.places.at(row);
        let scale = attention.final_factor(*sum);
        unary_in_place(isa, Unary::Affine { scale, shift: 0.0 }, block.row([head, query]));
    }
}

/// The queries of a block and the scratch for a block of keys.
struct Step<'a, 's> {
    attention: &'a Attention<'a>,
    isa: Isa,
    places: QueryBlock,
    queries: &'s [f32],
    scores: &'s mut [f32],
    added: &'s mut [f32],
}

impl Step<'_, '_> {
    /// Adds a block of keys and values to each query's result.
    fn run(
        &mut self,
        block: &mut RowBlock<'_, f32>,
        running: &mut [Running],
        rows: std::ops::Range<usize>,
        [keys, values]: [Strip<'_>; 2],
    ) {
        let (attention, isa, size) = (self.attention, self.isa, self.attention.sizes.size);
        for (row, (greatest, sum)) in running.iter_mut().take(self.places.len()).enumerate() {
            let place = self.places.at(row);
            let span = attention.span(place[0], place[2]);
            let (start, end) = (span.start.clamp(rows.start, rows.end), span.end.clamp(rows.start, rows.end));
            if start >= end {
                continue;
            }
            let scores = &mut self.scores[..end - start];
            let query = &self.queries[row * size..][..size];
            let first = start - rows.start;
            dots(isa, &keys.values[first * keys.stride..], keys.stride, query, scores);
            if attention.softcap > 0.0 {
                unary_in_place(isa, Unary::Tanh, scores);
                unary_in_place(isa, Unary::Affine { scale: attention.softcap, shift: 0.0 }, scores);
            }
            if let Some(mask) = attention.mask {
                let added = &mut self.added[..end - start];
                mask.write(place, start..end, added);
                scores.iter_mut().zip(added).for_each(|(score, added)| *score += *added);
            }
            let factor = weigh_row(isa, scores, greatest, sum);
            let result = block.row([place[1], place[2]]);
            mix(isa, &values.values[first * values.stride..], values.stride, scores, factor, result);
        }
    }
}
