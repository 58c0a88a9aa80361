//! Tests of attention against sums in double precision.

use std::ops::Range;

use half::{bf16, f16};
use ort_cpu_gemm::Cpu;
use ort_cpu_vector::simd::Isa;

use super::*;

/// Pseudo-random values between -1 and 1.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

/// The mask of the keys, or what is added to their scores.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    /// Causal: keys up to the query's own position, offset by this many earlier keys.
    Causal(usize),
    /// A sliding window of this many keys that ends at the query's own.
    Window(usize),
    /// Values per key, every third of them -inf.
    ByKey,
    /// Values per query and key, all -inf in some rows.
    ByQuery,
    /// Some queries see no key by their position.
    Nothing,
    /// Biases of the rows and columns of a grid of keys, or of that grid turned.
    Grid {
        is_turned: bool,
    },
}

#[derive(Clone, Copy)]
struct Case {
    sizes: SdpaSizes,
    kind: Kind,
    softcap: f32,
    has_sinks: bool,
    /// Whether the heads of a token are contiguous.
    interleaved: bool,
}

impl Case {
    fn strides(&self, heads: usize, rows: usize, size: usize) -> [usize; 3] {
        match self.interleaved {
            true => [rows * heads * size, size, heads * size],
            false => [heads * rows * size, rows * size, size],
        }
    }

    fn added(&self, [batch, head, query]: [usize; 3], key: usize) -> f32 {
        match self.kind {
            Kind::ByKey if key % 3 == 1 => f32::NEG_INFINITY,
            Kind::ByKey => ((key + head) % 7) as f32 / 4.0 - batch as f32,
            Kind::ByQuery if query % 5 == 3 || key % 4 == head % 4 => f32::NEG_INFINITY,
            Kind::ByQuery => ((query * 3 + key) % 11) as f32 / 8.0,
            Kind::Grid { .. } => {
                let columns = self.grid()[1];
                let place = [batch, head, query];
                self.bias(place, 0, key / columns) + self.bias(place, 1, key % columns)
            }
            _ => 0.0,
        }
    }

    /// Returns the rows and columns of the most square grid of keys.
    fn grid(&self) -> [usize; 2] {
        let keys = self.sizes.keys;
        let least = (1..=keys.isqrt()).rfind(|rows| keys.is_multiple_of(*rows)).unwrap_or(1);
        if self.kind == (Kind::Grid { is_turned: true }) {
            [keys / least, least]
        } else {
            [least, keys / least]
        }
    }

    /// Returns the bias of a row (side 0) or a column (side 1) of the grid. Some rows are hidden.
    fn bias(&self, [batch, head, query]: [usize; 3], side: usize, place: usize) -> f32 {
        match side == 0 && place % 5 == 4 {
            true => f32::NEG_INFINITY,
            false => ((query * 3 + place * (2 + side) + head * 5 + batch) % 11) as f32 / 8.0,
        }
    }

    /// Returns the biases of all rows of the grid, and those of all its columns.
    fn biases(&self) -> [Vec<f32>; 2] {
        let SdpaSizes { batch, heads, queries, .. } = self.sizes;
        [0, 1].map(|side| {
            let places = (0..batch * heads * queries * self.grid()[side]).map(|at| {
                let (row, place) = (at / self.grid()[side], at % self.grid()[side]);
                self.bias([row / queries / heads, row / queries % heads, row % queries], side, place)
            });
            places.collect()
        })
    }

    fn visible(&self, query: usize) -> Range<usize> {
        let keys = self.sizes.keys;
        match self.kind {
            Kind::Causal(before) => 0..(before + query + 1).min(keys),
            Kind::Window(width) => (query + 1).saturating_sub(width).min(keys)..(query + 1).min(keys),
            Kind::Nothing if query.is_multiple_of(2) => 0..0,
            _ => 0..keys,
        }
    }

    /// Queries, keys, values and sinks.
    fn inputs(&self) -> [Vec<f32>; 4] {
        let SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size } = self.sizes;
        [
            noise(batch * heads * queries * size, 1).into_iter().map(|x| x * 3.0).collect(),
            noise(batch * key_heads * keys * size, 2).into_iter().map(|x| x * 3.0).collect(),
            noise(batch * key_heads * keys * value_size, 3),
            noise(heads, 4),
        ]
    }

    fn expected(&self, [q, k, v, sinks]: &[Vec<f32>; 4], scale: f64) -> Vec<f64> {
        let SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size } = self.sizes;
        let mut to = vec![0.0; batch * heads * queries * value_size];
        let at = |strides: [usize; 3], b: usize, h: usize, r: usize| {
            b * strides[0] + h * strides[1] + r * strides[2]
        };
        let (of_q, of_k) = (self.strides(heads, queries, size), self.strides(key_heads, keys, size));
        let (of_v, of_o) =
            (self.strides(key_heads, keys, value_size), self.strides(heads, queries, value_size));
        for b in 0..batch {
            for h in 0..heads {
                let g = h / (heads / key_heads);
                for r in 0..queries {
                    let mut scores = Vec::new();
                    for key in self.visible(r) {
                        let (q, k) = (&q[at(of_q, b, h, r)..], &k[at(of_k, b, g, key)..]);
                        let dot: f64 = (0..size).map(|i| f64::from(q[i]) * f64::from(k[i])).sum();
                        let cap = f64::from(self.softcap);
                        let capped = if cap > 0.0 { cap * (dot * scale / cap).tanh() } else { dot * scale };
                        scores.push((key, capped + f64::from(self.added([b, h, r], key))));
                    }
                    scores.retain(|(_, score)| *score != f64::NEG_INFINITY);
                    let sink = if self.has_sinks { f64::from(sinks[h]).exp() } else { 0.0 };
                    let sum: f64 = scores.iter().map(|(_, score)| score.exp()).sum::<f64>() + sink;
                    for (key, score) in scores {
                        for i in 0..value_size {
                            let value = f64::from(v[at(of_v, b, g, key) + i]);
                            to[at(of_o, b, h, r) + i] += score.exp() / sum * value;
                        }
                    }
                }
            }
        }
        to
    }

    fn run(
        &self,
        cpu: Cpu,
        inputs: &[Vec<f32>; 4],
        (keys, values): (Elements<'_>, Elements<'_>),
        scale: f32,
    ) -> Vec<f32> {
        let sizes = self.sizes;
        let visible = |[_, query]: [usize; 2]| self.visible(query);
        let mut attention = self.attention(inputs, (keys, values), f64::from(scale), &visible);
        let is_half = keys.is_narrow() || values.is_narrow();
        let mut len = scratch_len::<f32>(&sizes, cpu, false, is_half);
        let (biases, bias);
        if matches!(self.kind, Kind::Grid { .. }) {
            len = grid_scratch_len::<f32>(&sizes, cpu, is_half, self.grid());
            biases = self.biases();
            bias = GridBias::new(&sizes, self.grid(), [&biases[0], &biases[1]]).unwrap();
            attention.mask = Some(&bias);
        }
        // Stale scratch must not matter.
        let mut scratch = vec![f32::NAN; len];
        let strides = self.strides(sizes.heads, sizes.queries, sizes.value_size);
        let mut to = vec![f32::NAN; sizes.batch * sizes.heads * sizes.queries * sizes.value_size];
        attention.run(cpu, (&mut to, strides), Scores::Unread, &mut scratch).unwrap();
        if sizes.size == sizes.value_size {
            let mut in_place = inputs[0].clone();
            scratch.fill(f32::NAN);
            let attention = Attention { queries: None, ..attention };
            attention.run(cpu, (&mut in_place, strides), Scores::Unread, &mut scratch).unwrap();
            let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&in_place), bits(&to), "in the place of the queries");
        }
        to
    }

    fn attention<'a, T: Compute>(
        &'a self,
        inputs: &'a [Vec<T>; 4],
        (keys, values): (Elements<'a, T>, Elements<'a, T>),
        scale: f64,
        visible: &'a (dyn Fn([usize; 2]) -> Range<usize> + Sync),
    ) -> Attention<'a, T> {
        let sizes = self.sizes;
        let rows = |elements, heads: usize, rows: usize, size: usize| Rows {
            elements,
            strides: self.strides(heads, rows, size),
        };
        let has_mask = matches!(self.kind, Kind::ByQuery | Kind::ByKey | Kind::Grid { .. });
        Attention {
            sizes,
            queries: Some(rows(Elements::Full(&inputs[0]), sizes.heads, sizes.queries, sizes.size)),
            keys: rows(keys, sizes.key_heads, sizes.keys, sizes.size),
            values: rows(values, sizes.key_heads, sizes.keys, sizes.value_size),
            scale,
            softcap: self.softcap,
            visible,
            mask: has_mask.then_some(self as &dyn ScoreMask<T>),
            sinks: self.has_sinks.then_some(&inputs[3]),
            hidden: HiddenKeys::Excluded,
        }
    }

    /// Returns the result and the scores of a stage.
    fn run_kept<T: Compute>(
        &self,
        threads: usize,
        inputs: &[Vec<f32>; 4],
        stage: ScoreStage,
    ) -> [Vec<f64>; 2] {
        let sizes = self.sizes;
        let wide = |values: &Vec<f32>| values.iter().map(|x| T::from_f64(f64::from(*x))).collect();
        let inputs: [Vec<T>; 4] = inputs.each_ref().map(wide);
        let sides = (Elements::Full(&inputs[1][..]), Elements::Full(&inputs[2][..]));
        let scale = T::inverse_root(sizes.size);
        let visible = |[_, query]: [usize; 2]| self.visible(query);
        let attention = self.attention(&inputs, sides, scale, &visible);
        let (cpu, nan) = (Cpu::with_threads(threads), T::from_f64(f64::NAN));
        // A cache may have room for more keys than a run has.
        let planned = SdpaSizes { keys: sizes.keys + 70, ..sizes };
        let mut scratch = vec![nan; scratch_len::<T>(&planned, cpu, true, false)];
        let rows = sizes.batch * sizes.heads * sizes.queries;
        let (mut to, mut scores) = (vec![nan; rows * sizes.value_size], vec![nan; rows * sizes.keys]);
        let strides = self.strides(sizes.heads, sizes.queries, sizes.value_size);
        let kept = KeptScores { stage, values: &mut scores, excluded: T::from_f64(-7.0) };
        attention.run(cpu, (&mut to, strides), Scores::Kept(kept), &mut scratch).unwrap();
        [to, scores].map(|values| values.into_iter().map(T::to_f64).collect())
    }

    /// Returns the scores of a stage.
    fn expected_scores(&self, [q, k, _, sinks]: &[Vec<f32>; 4], scale: f64, stage: ScoreStage) -> Vec<f64> {
        let SdpaSizes { batch, heads, key_heads, queries, keys, size, .. } = self.sizes;
        let (of_q, of_k) = (self.strides(heads, queries, size), self.strides(key_heads, keys, size));
        let at = |strides: [usize; 3], place: [usize; 3]| -> usize {
            strides.iter().zip(place).map(|(stride, place)| stride * place).sum()
        };
        let mut to = Vec::new();
        for place in
            (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..queries).map(move |r| [b, h, r])))
        {
            let [b, h, r] = place;
            let (visible, cap) = (self.visible(r), f64::from(self.softcap));
            let mut row: Vec<f64> = Vec::new();
            for key in 0..keys {
                let (q, k) = (&q[at(of_q, place)..], &k[at(of_k, [b, h / (heads / key_heads), key])..]);
                let dot: f64 = (0..size).map(|i| f64::from(q[i]) * f64::from(k[i])).sum::<f64>() * scale;
                let is_capped = cap > 0.0 && stage != ScoreStage::Scaled;
                let capped = if is_capped { cap * (dot / cap).tanh() } else { dot };
                let masked = capped + f64::from(self.added(place, key));
                row.push(match stage {
                    ScoreStage::Scaled | ScoreStage::Capped => capped,
                    ScoreStage::Masked if !visible.contains(&key) => -7.0,
                    ScoreStage::Weights if !visible.contains(&key) => 0.0,
                    ScoreStage::Masked => masked,
                    ScoreStage::Weights => masked.exp(),
                });
            }
            if stage == ScoreStage::Weights {
                let sink = if self.has_sinks { f64::from(sinks[h]).exp() } else { 0.0 };
                let sum = row.iter().sum::<f64>() + sink;
                row.iter_mut().for_each(|weight| *weight /= if sum > 0.0 { sum } else { 1.0 });
            }
            to.extend(row);
        }
        to
    }
}

impl<T: Compute> ScoreMask<T> for Case {
    fn is_by_query(&self) -> bool {
        self.kind != Kind::ByKey
    }

    fn apply(&self, place: [usize; 3], keys: Range<usize>, scores: &mut [T]) {
        for (key, score) in keys.zip(scores) {
            *score = *score + T::from_f64(f64::from(self.added(place, key)));
        }
    }
}

#[test]
fn kept_scores_are_those_of_their_stage() {
    let stages = [ScoreStage::Scaled, ScoreStage::Capped, ScoreStage::Masked, ScoreStage::Weights];
    for (case, stage) in cases().into_iter().flat_map(|case| stages.map(|stage| (case, stage))) {
        let inputs = case.inputs();
        for threads in [1, 3] {
            check_kept::<f32>(&case, threads, &inputs, stage, 3e-6);
            check_kept::<f64>(&case, threads, &inputs, stage, 1e-12);
        }
    }
}

fn check_kept<T: Compute>(
    case: &Case,
    threads: usize,
    inputs: &[Vec<f32>; 4],
    stage: ScoreStage,
    tolerance: f64,
) {
    let scale = T::inverse_root(case.sizes.size);
    let [result, scores] = case.run_kept::<T>(threads, inputs, stage);
    let expected = [case.expected(inputs, scale), case.expected_scores(inputs, scale, stage)];
    for (what, (got, expected)) in ["result", "scores"].iter().zip([result, scores].iter().zip(&expected)) {
        assert_eq!(got.len(), expected.len());
        for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
            let is_near = (got - expected).abs() <= tolerance * expected.abs().max(1.0);
            let Case { sizes, kind, softcap, has_sinks, .. } = case;
            assert!(
                is_near || got == expected,
                "{what} {stage:?} {sizes:?} {kind:?} {softcap} {has_sinks} {at}: {got} {expected}"
            );
        }
    }
}

fn cases() -> Vec<Case> {
    // batch, heads, key heads, queries, keys, size, value size.
    let shapes = [
        [1, 1, 1, 1, 1, 1, 1],
        [2, 3, 3, 1, 129, 64, 64],
        [1, 8, 2, 1, 300, 20, 24],
        [2, 4, 1, 3, 70, 16, 8],
        [1, 6, 2, 20, 140, 33, 65],
        [2, 2, 2, 47, 127, 64, 64],
        [1, 2, 2, 48, 128, 64, 64],
        [1, 2, 1, 49, 129, 40, 17],
        [1, 1, 1, 200, 260, 64, 64],
        [1, 2, 2, 401, 130, 8, 8],
    ];
    let kinds = [
        Kind::Plain,
        Kind::Causal(0),
        Kind::Causal(100),
        Kind::Window(9),
        Kind::ByKey,
        Kind::ByQuery,
        Kind::Nothing,
        Kind::Grid { is_turned: false },
        Kind::Grid { is_turned: true },
    ];
    let mut cases = Vec::new();
    for [batch, heads, key_heads, queries, keys, size, value_size] in shapes {
        let sizes = SdpaSizes { batch, heads, key_heads, queries, keys, size, value_size };
        for (index, kind) in kinds.into_iter().enumerate() {
            for (softcap, has_sinks) in [(0.0, false), (2.5, false), (0.0, true)] {
                cases.push(Case { sizes, kind, softcap, has_sinks, interleaved: index % 2 == 0 });
            }
        }
    }
    cases
}

#[test]
fn results_are_weighted_sums() {
    for case in cases() {
        let inputs = case.inputs();
        let scale = 1.0 / (case.sizes.size as f32).sqrt();
        let expected = case.expected(&inputs, f64::from(scale));
        for isa in Isa::available() {
            let sides = (Elements::Full(&inputs[1]), Elements::Full(&inputs[2]));
            let got = case.run(Cpu { isa, ..Cpu::with_threads(1) }, &inputs, sides, scale);
            for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let error = (f64::from(*got) - expected).abs();
                let Case { sizes, kind, softcap, has_sinks, .. } = &case;
                assert!(
                    error <= 3e-6,
                    "{isa:?} {sizes:?} {kind:?} {softcap} {has_sinks} {at}: {got} {expected}"
                );
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads_nor_on_neighbours() {
    for case in cases() {
        let inputs = case.inputs();
        let sides = (Elements::Full(&inputs[1]), Elements::Full(&inputs[2]));
        for precision in Cpu::precisions() {
            let run = |threads: usize| {
                case.run(Cpu::with_threads(threads).in_precision(precision), &inputs, sides, 0.3)
            };
            let one = run(1);
            for threads in [2, 3, 16] {
                let same = one.iter().zip(run(threads)).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{precision:?} {:?} {:?} on {threads} threads", case.sizes, case.kind);
            }
            // The first batch item alone.
            let sizes = SdpaSizes { batch: 1, ..case.sizes };
            let first = Case { sizes, ..case };
            let part = |values: &Vec<f32>| values[..values.len() / case.sizes.batch].to_vec();
            let [q, k, v] = [0, 1, 2].map(|index| part(&inputs[index]));
            let part = [q, k, v, inputs[3].clone()];
            let sides = (Elements::Full(&part[1]), Elements::Full(&part[2]));
            let alone = first.run(Cpu::with_threads(1).in_precision(precision), &part, sides, 0.3);
            let same = alone.iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{precision:?} {:?} {:?} without a neighbour", case.sizes, case.kind);
        }
    }
}

#[test]
fn pairs_round_factors_alone() {
    // A weight is off by half a unit in the last place of bfloat16, and values are below 1. So the
    // bound is that of a mean with such weights, of differences below 2.
    let tolerance = 2.0 / 256.0;
    for mut case in cases() {
        // Scales are powers of two, so that scaled queries are still exact in bfloat16.
        let scale = (case.sizes.size as f32).sqrt().log2().ceil().exp2().recip();
        case.softcap = if case.softcap > 0.0 { 2.0 } else { 0.0 };
        let inputs = case.inputs();
        let single = Cpu::with_threads(1);
        let exact =
            case.run(single, &inputs, (Elements::Full(&inputs[1]), Elements::Full(&inputs[2])), scale);
        let rounded = inputs.map(|values| values.iter().map(|x| bf16::from_f32(*x).to_f32()).collect());
        let expected = case.expected(&rounded, f64::from(scale));
        for precision in Cpu::precisions() {
            let sides = (Elements::Full(&rounded[1]), Elements::Full(&rounded[2]));
            let got = case.run(single.in_precision(precision), &rounded, sides, scale);
            for ((got, expected), exact) in got.iter().zip(&expected).zip(&exact) {
                let (got, exact) = (f64::from(*got), f64::from(*exact));
                let Case { sizes, kind, softcap, has_sinks, .. } = &case;
                let of = format!("{precision:?} {sizes:?} {kind:?} {softcap} {has_sinks}");
                assert!((got - expected).abs() <= tolerance, "{of}: {got} {expected}");
                assert!((got - exact).abs() <= 2e-2, "{of}: {got} {exact} in float32");
            }
        }
    }
}

#[test]
fn narrow_caches_are_widened_exactly() {
    for case in cases() {
        let mut inputs = case.inputs();
        let halves: [Vec<f16>; 2] =
            [1, 2].map(|side| inputs[side].iter().map(|x| f16::from_f32(*x)).collect());
        let uppers: [Vec<bf16>; 2] =
            [1, 2].map(|side| inputs[side].iter().map(|x| bf16::from_f32(*x)).collect());
        inputs[1] = halves[0].iter().map(|x| x.to_f32()).collect();
        inputs[2] = uppers[1].iter().map(|x| x.to_f32()).collect();
        for precision in Cpu::precisions() {
            let cpu = Cpu::with_threads(2).in_precision(precision);
            let sides = (Elements::F16(&halves[0]), Elements::BF16(&uppers[1]));
            let narrow = case.run(cpu, &inputs, sides, 0.3);
            let wide = case.run(cpu, &inputs, (Elements::Full(&inputs[1]), Elements::Full(&inputs[2])), 0.3);
            assert!(narrow.iter().zip(&wide).all(|(a, b)| a.to_bits() == b.to_bits()), "{:?}", case.sizes);
        }
    }
}

/// What is added to the scores of each key.
struct Added<'a>(&'a [f32]);

impl ScoreMask<f32> for Added<'_> {
    fn is_by_query(&self) -> bool {
        false
    }

    fn apply(&self, _: [usize; 3], keys: Range<usize>, scores: &mut [f32]) {
        scores.iter_mut().zip(&self.0[keys]).for_each(|(score, added)| *score += added);
    }
}

#[test]
fn extreme_scores_are_no_numbers_or_weights() {
    // The scores of one query, and its result if each value is its key's index.
    let (infinity, nan, least) = (f32::INFINITY, f32::NAN, f32::MIN);
    let cases: [(&[f32], f32); 6] = [
        (&[least, least, least], 1.0),
        (&[-infinity, -infinity, -infinity], 0.0),
        (&[0.0, -infinity, least], 0.0),
        (&[1e30, 0.0, -1e30], 0.0),
        (&[0.0, infinity, 0.0], nan),
        (&[0.0, nan, 0.0], nan),
    ];
    let of_queries = [1, 9].into_iter().flat_map(|queries| Cpu::precisions().map(move |of| (queries, of)));
    for ((queries, precision), hidden_is_nan) in
        of_queries.flat_map(|of| [false, true].map(move |hidden_is_nan| (of, hidden_is_nan)))
    {
        for (added, expected) in cases {
            let is_hidden = added.iter().all(|score| *score == -infinity);
            let expected = if is_hidden && hidden_is_nan { nan } else { expected };
            let values = [0.0, 1.0, 2.0];
            let sizes =
                SdpaSizes { batch: 1, heads: 1, key_heads: 1, queries, keys: 3, size: 1, value_size: 1 };
            let rows = |values| Rows { elements: Elements::Full(values), strides: [0, 0, 1] };
            let mask = Added(added);
            let attention = Attention {
                sizes,
                queries: Some(rows(&[0.0; 9])),
                keys: rows(&values),
                values: rows(&values),
                scale: 1.0,
                softcap: 0.0,
                visible: &|_| 0..3,
                mask: Some(&mask),
                sinks: None,
                hidden: if hidden_is_nan { HiddenKeys::ExcludedOrNan } else { HiddenKeys::Excluded },
            };
            let cpu = Cpu::with_threads(1).in_precision(precision);
            let (mut to, mut scratch) = ([5.0; 9], vec![0.0; scratch_len::<f32>(&sizes, cpu, false, false)]);
            attention.run(cpu, (&mut to, [0, 0, 1]), Scores::Unread, &mut scratch).unwrap();
            for got in &to[..queries] {
                assert!(
                    *got == expected || (got.is_nan() && expected.is_nan()),
                    "{added:?}: {got} {expected}"
                );
            }
        }
    }
}

/// Scores without a mask that overflow, in some blocks of keys or in all. The first blocks may be
/// all -inf although later ones are not. bf16 pairs round the values.
#[test]
fn hidden_queries_are_nan_where_all_blocks_are_hidden() {
    // With a query of 3e38, keys of -2 have scores of -inf, and other keys have 0 or +inf.
    let (keys, hidden, zero, most) = (300, -2.0, 0.0, 2.0);
    let at = |place: usize| (0..keys).map(|key| if key == place { zero } else { hidden }).collect();
    let cases: [(Vec<f32>, f32); 5] = [
        (vec![hidden; keys], f32::NAN),
        (at(0), 0.0),
        (at(150), 1.5),
        (at(299), 2.99),
        ((0..keys).map(|key| if key == 200 { most } else { hidden }).collect(), f32::NAN),
    ];
    let values: Vec<f32> = (0..keys).map(|key| key as f32 / 100.0).collect();
    for (queries, precision) in
        [1, 5, 60].into_iter().flat_map(|queries| Cpu::precisions().map(move |of| (queries, of)))
    {
        for (of_keys, expected) in &cases {
            let sizes = SdpaSizes { batch: 1, heads: 1, key_heads: 1, queries, keys, size: 1, value_size: 1 };
            let rows = |values| Rows { elements: Elements::Full(values), strides: [0, 0, 1] };
            let attention = Attention {
                sizes,
                queries: Some(rows(&[3e38; 60])),
                keys: rows(of_keys),
                values: rows(&values),
                scale: 1.0,
                softcap: 0.0,
                visible: &|_| 0..keys,
                mask: None,
                sinks: None,
                hidden: HiddenKeys::ExcludedOrNan,
            };
            let cpu = Cpu::with_threads(1).in_precision(precision);
            let (mut to, mut scratch) = ([5.0; 60], vec![0.0; scratch_len::<f32>(&sizes, cpu, false, false)]);
            attention.run(cpu, (&mut to, [0, 0, 1]), Scores::Unread, &mut scratch).unwrap();
            for got in &to[..queries] {
                let is_near = (got - expected).abs() <= 0.02;
                assert!(is_near || (got.is_nan() && expected.is_nan()), "{queries}: {got} {expected}");
            }
        }
    }
}

/// The product of an empty softmax and no values is 0.
#[test]
fn no_keys_at_all_give_zero() {
    for queries in [1, 9] {
        let sizes = SdpaSizes { batch: 1, heads: 1, key_heads: 1, queries, keys: 0, size: 1, value_size: 1 };
        let rows = |values| Rows { elements: Elements::Full(values), strides: [0, 0, 1] };
        let attention = Attention {
            sizes,
            queries: Some(rows(&[1.0; 9])),
            keys: rows(&[]),
            values: rows(&[]),
            scale: 1.0,
            softcap: 0.0,
            visible: &|_| 0..0,
            mask: None,
            sinks: None,
            hidden: HiddenKeys::ExcludedOrNan,
        };
        let cpu = Cpu::with_threads(1);
        let (mut to, mut scratch) = ([5.0; 9], vec![0.0; scratch_len::<f32>(&sizes, cpu, false, false)]);
        attention.run(cpu, (&mut to, [0, 0, 1]), Scores::Unread, &mut scratch).unwrap();
        assert!(to[..queries].iter().all(|got| *got == 0.0), "{to:?}");
    }
}

#[test]
fn a_bias_that_is_not_one_of_the_grid_is_refused() {
    let sizes = SdpaSizes { batch: 1, heads: 2, key_heads: 2, queries: 3, keys: 12, size: 5, value_size: 6 };
    let values = [0.0; 64];
    let is_bias = |grid, rows: usize, columns: usize| {
        GridBias::new(&sizes, grid, [&values[..rows], &values[..columns]]).is_ok()
    };
    assert!(is_bias([3, 4], 18, 24) && is_bias([2, 6], 12, 36));
    assert!(!is_bias([3, 4], 24, 18) && !is_bias([3, 4], 17, 24) && !is_bias([3, 4], 18, 25));
    assert!(!is_bias([4, 4], 24, 24) && !is_bias([usize::MAX, 2], 18, 24));
}

#[test]
fn what_does_not_fit_is_refused() {
    let sizes = SdpaSizes { batch: 1, heads: 2, key_heads: 2, queries: 3, keys: 4, size: 5, value_size: 6 };
    let values = [0.0; 64];
    let rows = |len: usize, strides| Rows { elements: Elements::Full(&values[..len]), strides };
    let good = Attention {
        sizes,
        queries: Some(rows(30, [30, 15, 5])),
        keys: rows(40, [40, 20, 5]),
        values: rows(48, [48, 24, 6]),
        scale: 1.0,
        softcap: 0.0,
        visible: &|_| 0..4,
        mask: None,
        sinks: None,
        hidden: HiddenKeys::Excluded,
    };
    let cpu = Cpu::with_threads(1);
    let run = |attention: &Attention<'_>, len: usize, strides: [usize; 3]| {
        let mut scratch = vec![0.0; scratch_len::<f32>(&sizes, cpu, false, false)];
        attention.run(cpu, (&mut vec![0.0; len], strides), Scores::Unread, &mut scratch).is_ok()
    };
    assert!(run(&good, 36, [36, 18, 6]) && run(&good, 36, [36, 6, 12]));
    assert!(!run(&good, 35, [36, 18, 6]) && !run(&good, 36, [36, 17, 6]) && !run(&good, 36, [36, 18, 5]));
    assert!(!run(&Attention { queries: Some(rows(29, [30, 15, 5])), ..good }, 36, [36, 18, 6]));
    assert!(!run(&Attention { queries: None, ..good }, 36, [36, 18, 6]));
    assert!(!run(&Attention { keys: rows(39, [40, 20, 5]), ..good }, 36, [36, 18, 6]));
    assert!(!run(&Attention { values: rows(47, [48, 24, 6]), ..good }, 36, [36, 18, 6]));
    assert!(!run(&Attention { sizes: SdpaSizes { key_heads: 0, ..sizes }, ..good }, 36, [36, 18, 6]));
    assert!(!run(&Attention { sinks: Some(&[0.0]), ..good }, 36, [36, 18, 6]));
    assert!(good.run(cpu, (&mut [0.0; 36], [36, 18, 6]), Scores::Unread, &mut []).is_err());
}
