//! A block of queries in panels, over all keys that they see.

use std::ops::Range;

use super::attention::Attention;
use super::blocks::{KEYS, PANELS, pairs_len};
use super::grid::GridBias;
use super::query_block::QueryBlock;
use super::rows::Strip;
use super::scores::ScoreMask;
use ort_core::ops::nn::attention::problem::SdpaSizes;
use ort_cpu_gemm::{Cpu, Pairing};
use ort_cpu_threads::interrupt::spend;
use ort_cpu_threads::parallel::RowBlock;
use ort_cpu_vector::elementwise::{Unary, unary_in_place};
use ort_cpu_vector::simd::attention::{Change, GridPanel, Product, Seen, WIDTH, change, multiply, weigh};
use ort_cpu_vector::simd::{Isa, transpose_tiles};

/// A block of queries in panels.
pub(crate) struct Panels<'a, 'b> {
    attention: &'a Attention<'a>,
    isa: Isa,
    /// Makes bf16 pairs, if the matmuls use them.
    pairs: Option<Pairing>,
    block: RowBlock<'b, f32>,
    places: QueryBlock,
    /// Queries of a panel.
    width: usize,
    /// The mask, if it is a bias over a grid of keys.
    grid: Option<GridBias<'a>>,
}

/// Queries that are processed together, one per lane.
struct Panel {
    rows: Range<usize>,
    /// The keys that any of them sees.
    any: Range<usize>,
    /// The keys that all of them see.
    all: Range<usize>,
    seen: Seen,
    is_empty: bool,
}

/// Consecutive keys of a head and their values.
struct KeyBlock<'a> {
    span: Range<usize>,
    keys: Strip<'a>,
    values: Strip<'a>,
}

/// What a panel keeps for all blocks of keys, a query per lane.
#[derive(Clone, Copy)]
struct Sides<'a> {
    /// The queries.
    packed: &'a [f32],
    /// The biases of the rows of a grid, then those of its columns.
    biases: &'a [f32],
}

impl<'a, 'b> Panels<'a, 'b> {
    pub(crate) fn new(attention: &'a Attention<'a>, cpu: Cpu, block: RowBlock<'b, f32>) -> Panels<'a, 'b> {
        let places = QueryBlock::new(&block);
        let panels = places.len().div_ceil(WIDTH).max(1);
        let width = places.len().div_ceil(panels).next_multiple_of(16).min(WIDTH);
        let grid = attention.mask.and_then(|mask| mask.grid());
        Panels { attention, isa: cpu.isa, pairs: Pairing::of(cpu), block, places, width, grid }
    }

    /// Returns the elements that hold `steps` k steps.
    fn elements(&self, steps: usize) -> usize {
        if self.pairs.is_some() { steps.div_ceil(2) } else { steps }
    }

    pub(crate) fn run(mut self, scratch: &mut [f32]) {
        let SdpaSizes { size, value_size, .. } = self.attention.sizes;
        let (count, row) = (self.places.len().div_ceil(self.width), self.elements(size));
        let (packed, rest) = scratch.split_at_mut(count * WIDTH * row);
        let (results, rest) = rest.split_at_mut(count * WIDTH * value_size);
        let (scores, rest) = rest.split_at_mut(WIDTH * KEYS.max(value_size).max(size));
        let (added, rest) = rest.split_at_mut(2 * WIDTH * KEYS);
        let biases_len = WIDTH * self.grid.map_or(0, |bias| bias.grid().iter().sum());
        let (biases, rest) = rest.split_at_mut(count * biases_len);
        let [of_keys, of_values] = self.pairs.map_or([0; 2], |_| pairs_len(&self.attention.sizes));
        let (pairs_of_keys, rest) = rest.split_at_mut(of_keys);
        let (pairs_of_values, rest) = rest.split_at_mut(of_values);
        let (wide_keys, wide_values) = rest.split_at_mut(match self.attention.keys.elements.is_narrow() {
            true => KEYS * size,
            false => 0,
        });
        let mut panels: [Option<Panel>; PANELS] = [const { None }; PANELS];
        let mut all = self.attention.sizes.keys..0;
        for (index, panel) in panels.iter_mut().enumerate().take(count) {
            let packed = &mut packed[index * WIDTH * row..][..WIDTH * row];
            let copies = &mut results[index * WIDTH * value_size..][..WIDTH * value_size];
            let new = self.panel(index, packed, scores, copies);
            self.turn_biases(new.rows.clone(), &mut biases[index * biases_len..][..biases_len]);
            all = all.start.min(new.any.start)..all.end.max(new.any.end);
            *panel = Some(new);
        }
        let place = [self.places.batch, self.places.heads.start / self.attention.group()];
        for first in (all.start / KEYS * KEYS..all.end).step_by(KEYS) {
            let span = first..(first + KEYS).min(all.end);
            spend(span.len() * self.places.len() * (size + value_size) / 16);
            let keys = self.attention.keys.strip(self.isa, place, span.clone(), size, wide_keys);
            let values = self.attention.values.strip(self.isa, place, span.clone(), value_size, wide_values);
            let (keys, values) = match self.pairs {
                Some(pairs) => {
                    let count = span.len();
                    pairs.of_neighbours((keys.values, keys.stride), [count, size], pairs_of_keys);
                    pairs.of_rows((values.values, values.stride), [count, value_size], pairs_of_values);
                    let keys = Strip { values: &*pairs_of_keys, stride: row };
                    (keys, Strip { values: &*pairs_of_values, stride: value_size })
                }
                None => (keys, values),
            };
            for (index, panel) in panels.iter_mut().flatten().enumerate() {
                // No query of this panel sees the block, as above the diagonal of causal attention.
                if panel.any.end <= span.start || panel.any.start >= span.end {
                    continue;
                }
                let span = span.start..span.end.min(panel.any.end);
                let packed = &packed[index * WIDTH * row..][..WIDTH * row];
                let results = &mut results[index * WIDTH * value_size..][..WIDTH * value_size];
                let sides = Sides { packed, biases: &biases[index * biases_len..][..biases_len] };
                self.step(panel, KeyBlock { span, keys, values }, sides, results, (scores, added));
            }
        }
        for (index, panel) in panels.iter().flatten().enumerate() {
            self.finish(panel, &mut results[index * WIDTH * value_size..][..WIDTH * value_size], scores);
        }
    }

    /// Packs the queries of a panel and determines the keys that they see. bf16 pairs are staged in
    /// `stage`, and in-place queries in `copies`.
    fn panel(&mut self, index: usize, packed: &mut [f32], stage: &mut [f32], copies: &mut [f32]) -> Panel {
        let SdpaSizes { size, keys, .. } = self.attention.sizes;
        let rows = index * self.width..((index + 1) * self.width).min(self.places.len());
        let mut panel =
            Panel { rows: rows.clone(), any: keys..0, all: 0..keys, seen: Seen::NOTHING, is_empty: true };
        for row in rows.clone() {
            let [batch, head, query] = self.places.at(row);
            let span = self.attention.span(batch, query);
            if !span.is_empty() {
                panel.any = panel.any.start.min(span.start)..panel.any.end.max(span.end);
            }
            panel.all = panel.all.start.max(span.start)..panel.all.end.min(span.end);
            if let Some(sinks) = self.attention.sinks {
                // A sink acts as a key with this score and a value of 0.
                panel.seen.greatest[row - rows.start] = sinks[head];
                panel.seen.sum[row - rows.start] = 1.0;
            }
        }
        match self.pairs {
            Some(pairs) => {
                self.turn_queries(rows, &mut stage[..WIDTH * size], copies);
                pairs.of_rows((stage, WIDTH), [size, WIDTH], packed);
            }
            None => self.turn_queries(rows, packed, copies),
        }
        panel
    }

    /// Writes queries transposed and scaled. Queries that are in the output buffer are copied to
    /// `copies` first.
    fn turn_queries(&mut self, rows: Range<usize>, to: &mut [f32], copies: &mut [f32]) {
        let (attention, size) = (self.attention, self.attention.sizes.size);
        to.fill(0.0);
        // Queries of one head are at equal strides.
        let mut row = rows.start;
        while row < rows.end {
            let [batch, head, query] = self.places.at(row);
            let count = (self.places.queries.end - query).min(rows.end - row);
            let to = (&mut to[row - rows.start..], WIDTH);
            match (attention.queries, attention.queries_from([batch, head, query])) {
                (Some(queries), Some(from)) => {
                    turn(self.isa, [count, size], (from, queries.strides[2]), to);
                }
                _ => {
                    for (next, copy) in copies.chunks_exact_mut(size).take(count).enumerate() {
                        copy.copy_from_slice(self.block.row([head, query + next]));
                    }
                    turn(self.isa, [count, size], (&*copies, size), to);
                }
            }
            row += count;
        }
        unary_in_place(self.isa, Unary::Affine { scale: self.attention.factor(), shift: 0.0 }, to);
    }

    /// Writes the biases of a grid of keys transposed.
    fn turn_biases(&self, rows: Range<usize>, to: &mut [f32]) {
        let Some(bias) = self.grid else { return };
        let mut row = rows.start;
        while row < rows.end {
            let place = self.places.at(row);
            let count = (self.places.queries.end - place[2]).min(rows.end - row);
            let mut rest = &mut *to;
            for (from, size) in bias.from(place) {
                let part = rest.split_off_mut(..WIDTH * size).unwrap_or_default();
                turn(self.isa, [count, size], (from, size), (&mut part[row - rows.start..], WIDTH));
            }
            row += count;
        }
    }

    /// Processes a block of keys and values for a panel.
    fn step(
        &self,
        panel: &mut Panel,
        KeyBlock { span, keys, values }: KeyBlock<'_>,
        Sides { packed, biases }: Sides<'_>,
        results: &mut [f32],
        (scores, added): (&mut [f32], &mut [f32]),
    ) {
        let SdpaSizes { size, value_size, .. } = self.attention.sizes;
        let (count, columns) = (span.len(), panel.rows.len());
        let (by_row, by_key) = added.split_at_mut(WIDTH * KEYS);
        let mut changes = Change { softcap: self.attention.softcap, ..Change::default() };
        if let Some([height, width]) = self.grid.map(|bias| bias.grid()) {
            let (rows, columns) = biases.split_at(WIDTH * height);
            changes.by_grid = Some(GridPanel { rows, columns, width, first: span.start });
        } else if let Some(mask) = self.attention.mask {
            // Heads that share a panel may have masks of their own.
            let is_by_row = mask.is_by_query() || self.places.heads.len() > 1;
            let rows = if is_by_row { panel.rows.clone() } else { panel.rows.start..panel.rows.start + 1 };
            if self.write_mask(mask, rows, &span, by_row) {
                return;
            }
            if is_by_row {
                turn(self.isa, [columns, count], (&*by_row, KEYS), (&mut *by_key, WIDTH));
                changes.by_query = Some(by_key);
            } else {
                changes.by_key = Some(by_row);
            }
        }
        // Bounds are applied only if some query of the panel does not see the whole block.
        let mut bounds = [[0.0; WIDTH]; 2];
        if panel.all.start > span.start || panel.all.end < span.end {
            for (column, row) in panel.rows.clone().enumerate() {
                let [batch, _, query] = self.places.at(row);
                let seen = self.attention.span(batch, query);
                let place = |key: usize| (key.clamp(span.start, span.end) - span.start) as f32;
                bounds[0][column] = place(seen.start);
                bounds[1][column] = place(seen.end);
            }
            changes.visible = Some(&bounds);
        }
        let product = Product {
            left: keys.values,
            strides: [keys.stride, 1],
            shape: [count, self.elements(size)],
            panel: packed,
            columns,
            factors: None,
        };
        multiply(self.isa, self.pairs.is_some(), &product, scores);
        if !changes.is_none() {
            change(self.isa, changes, scores, count, columns);
        }
        weigh(self.isa, self.pairs.is_some(), scores, count, columns, &mut panel.seen);
        let product = Product {
            left: values.values,
            strides: [1, values.stride],
            shape: [value_size, self.elements(count)],
            panel: scores,
            columns,
            factors: (!panel.is_empty).then_some(&panel.seen.factor),
        };
        multiply(self.isa, self.pairs.is_some(), &product, results);
        panel.is_empty = false;
    }

    /// Writes the mask of a block of keys, a row for each query. Returns whether it hides
    /// everything.
    fn write_mask(
        &self,
        mask: &dyn ScoreMask<f32>,
        rows: Range<usize>,
        keys: &Range<usize>,
        to: &mut [f32],
    ) -> bool {
        let mut hides = true;
        for (row, added) in rows.zip(to.chunks_exact_mut(KEYS)) {
            let added = &mut added[..keys.len()];
            mask.write(self.places.at(row), keys.clone(), added);
            hides = hides && added.iter().all(|added| *added == f32::NEG_INFINITY);
        }
        hides
    }

    /// Divides by the sums, transposes the results back and writes them.
    fn finish(&mut self, panel: &Panel, results: &mut [f32], turned: &mut [f32]) {
        let value_size = self.attention.sizes.value_size;
        if panel.is_empty {
            results.fill(0.0);
        }
        let columns = panel.rows.len();
        turn(self.isa, [value_size, columns], (&*results, WIDTH), (&mut *turned, value_size));
        for ((column, row), result) in panel.rows.clone().enumerate().zip(turned.chunks_exact(value_size)) {
            let [_, head, query] = self.places.at(row);
            let factor = self.attention.final_factor(panel.seen.sum[column]);
            let to = self.block.row([head, query]);
            to.iter_mut().zip(result).for_each(|(to, value)| *to = value * factor);
        }
    }
}

/// `to[column][row] = from[row][column]` for a matrix of `shape` (rows, columns).
fn turn(
    isa: Isa,
    [rows, columns]: [usize; 2],
    (from, from_stride): (&[f32], usize),
    (to, to_stride): (&mut [f32], usize),
) {
    let (source, target) = (bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to));
    let done = transpose_tiles(isa, [rows, columns], source, from_stride, target, to_stride);
    for row in 0..rows {
        // What the 8-by-8 tiles did not cover.
        let first = if row < done.0 { done.1 } else { 0 };
        for column in first..columns {
            to[column * to_stride + row] = from[row * from_stride + column];
        }
    }
}
