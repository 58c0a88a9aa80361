//! Branch-free evaluation of shallow trees with SIMD.
//!
//! Every test of a tree runs on a vector of rows, and selects reduce the leaves level by level.
//! That runs more tests than a traversal does, but it reads memory in order and has no dependent
//! loads.

use ort_core::Result;
use ort_core::ep::CompileCx;
use ort_core::seeded::HashMap;

use super::Aggregate;
use super::plan::{Number, Place, Plan, Tree};
use ort_cpu_kernel::packed::Packed;
use ort_cpu_vector::simd::{Isa, Simd, SimdOp, dispatch};

/// The rows that are evaluated together: the lanes of the widest vector.
pub(super) const ROWS: usize = ort_cpu_vector::simd::MAX_LANES;

/// The depth of the deepest tree that is evaluated this way.
const MAX_DEPTH: u32 = 6;

/// Shallow trees, each padded to a perfect tree: depth d has `2^d - 1` tests, level by level, and
/// `2^d` leaf values.
pub(super) struct Shallow {
    /// For each tree of the forest, the start of its tests and of its values, if it is shallow.
    starts: Vec<Option<(usize, usize)>>,
    splits: Packed<f32>,
    /// For each test, the index of its feature in [`columns`](Self::columns).
    places: Packed<u32>,
    values: Packed<f32>,
    /// The columns that these trees read.
    columns: Vec<Column>,
}

/// A column, and whether minus infinity replaces NaN in it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Column {
    column: u32,
    is_copy: bool,
}

/// Returns the depth up to which this CPU's vectors beat [`walk`](super::walk::walk).
fn most_levels() -> u32 {
    match Isa::current() {
        Isa::Avx512 => MAX_DEPTH,
        Isa::Avx2 => 5,
        Isa::Neon | Isa::Scalar => 3,
    }
}

/// The arrays under construction.
#[derive(Default)]
struct Grown {
    splits: Vec<f32>,
    places: Vec<u32>,
    values: Vec<f32>,
    columns: Vec<Column>,
    places_of: HashMap<Column, u32>,
}

impl Shallow {
    /// Creates an empty set of trees.
    pub(super) fn none(cx: &mut CompileCx<'_>) -> Result<Shallow> {
        Shallow::pack(cx, Vec::new(), Grown::default())
    }

    /// Collects the shallow trees, with `weights` by slot. There are none unless `wanted`.
    pub(super) fn new(cx: &mut CompileCx<'_>, plan: &Plan, weights: &[f32], wanted: bool) -> Result<Shallow> {
        let mut grown = Grown::default();
        let mut starts = Vec::new();
        for tree in plan.trees() {
            // A tree that is a single leaf has no test, so depth 0 is not wanted either.
            let wanted = wanted && (1..=most_levels()).contains(&tree.depth);
            starts.push(wanted.then_some((grown.splits.len(), grown.values.len())));
            if wanted {
                grown.add(plan, tree, weights);
            }
        }
        Shallow::pack(cx, starts, grown)
    }

    fn pack(cx: &mut CompileCx<'_>, starts: Vec<Option<(usize, usize)>>, grown: Grown) -> Result<Shallow> {
        Ok(Shallow {
            starts,
            splits: Packed::copy(cx, &grown.splits)?,
            places: Packed::copy(cx, &grown.places)?,
            values: Packed::copy(cx, &grown.values)?,
            columns: grown.columns,
        })
    }

    /// Returns the number of columns that [`arrange`](Self::arrange) writes.
    pub(super) fn column_count(&self) -> usize {
        self.columns.len()
    }

    /// Whether there are no shallow trees.
    pub(super) fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Returns the cost of a row in all `trees`, in traversal steps. A vector of rows runs a test
    /// in about the time of one step.
    pub(super) fn row_steps(&self, trees: &[Tree]) -> usize {
        let steps = |(index, tree): (usize, &Tree)| match self.starts.get(index) {
            Some(Some(_)) => 1 << tree.depth,
            _ => tree.depth as usize * ROWS,
        };
        // Summed for a vector of rows before the division, so that cheap trees do not round to 0.
        trees.iter().enumerate().map(steps).sum::<usize>() / ROWS
    }

    /// Transposes rows of features into blocks of [`ROWS`] rows, each column-major. Lanes of the
    /// last block that have no row keep their old content.
    pub(super) fn arrange<T: Copy>(
        &self,
        (rows, features): (&[T], usize),
        to: &mut [f32],
        single: impl Fn(T) -> f32,
    ) {
        let blocks = to.chunks_exact_mut((self.columns.len() * ROWS).max(1));
        // Layout of a block: [columns, ROWS].
        for (block, rows) in blocks.zip(rows.chunks((features * ROWS).max(1))) {
            for (lane, row) in rows.chunks_exact(features.max(1)).enumerate() {
                for (lanes, column) in block.chunks_exact_mut(ROWS).zip(&self.columns) {
                    if let Some(&x) = row.get(column.column as usize) {
                        let x = single(x);
                        lanes[lane] = if column.is_copy && x.is_nan() { f32::NEG_INFINITY } else { x };
                    }
                }
            }
        }
    }

    /// Adds the values of the tree at `index` to the scores of its target, for arranged rows.
    /// Returns false if the tree is not shallow.
    pub(super) fn add(
        &self,
        (index, tree): (usize, &Tree),
        arranged: &[f32],
        (scores, seen): (&mut [f64], &mut [u8]),
        aggregate: Aggregate,
    ) -> bool {
        let Some(&Some((nodes, leaves))) = self.starts.get(index) else { return false };
        let count = 1 << tree.depth;
        // A perfect tree has one test fewer than leaves.
        let splits = self.splits.values().get(nodes..nodes + count - 1);
        let places = self.places.values().get(nodes..nodes + count - 1);
        let values = self.values.values().get(leaves..leaves + count);
        let (Some(splits), Some(places), Some(values)) = (splits, places, values) else { return false };
        let perfect = Perfect { splits, places, values };
        let block = self.columns.len() * ROWS;
        // A constant depth gives the loops constant bounds.
        match tree.depth {
            1 => dispatch(Isa::current(), Add::<1> { perfect, arranged, block, scores, seen, aggregate }),
            2 => dispatch(Isa::current(), Add::<2> { perfect, arranged, block, scores, seen, aggregate }),
            3 => dispatch(Isa::current(), Add::<3> { perfect, arranged, block, scores, seen, aggregate }),
            4 => dispatch(Isa::current(), Add::<4> { perfect, arranged, block, scores, seen, aggregate }),
            5 => dispatch(Isa::current(), Add::<5> { perfect, arranged, block, scores, seen, aggregate }),
            _ => dispatch(Isa::current(), Add::<6> { perfect, arranged, block, scores, seen, aggregate }),
        }
        true
    }
}

impl Grown {
    /// Pads a tree to a perfect one: below a leaf that is too high, all tests lead to that leaf.
    fn add(&mut self, plan: &Plan, tree: &Tree, weights: &[f32]) {
        let mut level = vec![tree.root];
        for _ in 0..tree.depth {
            let mut below = Vec::with_capacity(level.len() * 2);
            for at in level {
                let at = plan.resolve(at);
                let (split, column, is_copy, children) = match plan.places.get(at as usize) {
                    Some(&Place::Split { child, column, split, missing_left }) => {
                        (split, column as u32, missing_left, [child, child + 1])
                    }
                    // Both children are the leaf itself, so the answer does not matter.
                    _ => (f64::INFINITY, 0, false, [at, at]),
                };
                let column = Column { column, is_copy };
                let next = self.columns.len() as u32;
                // Trees share a column of the block if they test the same feature.
                let place = *self.places_of.entry(column).or_insert(next);
                if place == next {
                    self.columns.push(column);
                }
                // Rounding down keeps `x <= split` exact for all `x` of `f32`.
                self.splits.push(<f32 as Number>::floor(split));
                self.places.push(place);
                below.extend(children);
            }
            level = below;
        }
        // `level` holds the leaves from left to right.
        let weight = |at: u32| weights.get(plan.resolve(at) as usize).copied().unwrap_or(0.0);
        self.values.extend(level.into_iter().map(weight));
    }
}

#[derive(Clone, Copy)]
struct Perfect<'a> {
    splits: &'a [f32],
    places: &'a [u32],
    values: &'a [f32],
}

/// Adds the values of a perfect tree to the scores of rows.
struct Add<'a, const DEPTH: usize> {
    perfect: Perfect<'a>,
    arranged: &'a [f32],
    block: usize,
    scores: &'a mut [f64],
    seen: &'a mut [u8],
    aggregate: Aggregate,
}

impl<const DEPTH: usize> SimdOp for Add<'_, DEPTH> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.scores.chunks_mut(ROWS).zip(self.seen.chunks_mut(ROWS));
        for ((scores, seen), block) in rows.zip(self.arranged.chunks_exact(self.block.max(1))) {
            let mut values = [0.0; ROWS];
            for lane in (0..ROWS).step_by(S::LANES) {
                s.store(&mut values, lane, self.perfect.value::<S, DEPTH>(s, block, lane));
            }
            if let Aggregate::Sum | Aggregate::Average = self.aggregate {
                // Without the match in the loop, it vectorizes.
                scores.iter_mut().zip(&values).for_each(|(score, value)| *score += f64::from(*value));
                seen.fill(1);
                continue;
            }
            for ((score, seen), value) in scores.iter_mut().zip(seen).zip(&values) {
                self.aggregate.add(score, seen, f64::from(*value));
            }
        }
    }
}

impl Perfect<'_> {
    /// Returns the tree's values for the rows of a block from `lane` on.
    #[inline(always)]
    fn value<S: Simd, const DEPTH: usize>(self, s: S, block: &[f32], lane: usize) -> S::F32 {
        // Slices of constant length free the loops from bounds checks.
        let leaves = 1 << DEPTH;
        let Perfect { splits, places, values } = self;
        let (splits, places, values) = (&splits[..leaves - 1], &places[..leaves - 1], &values[..leaves]);
        let choose = |node: usize, left: S::F32, right: S::F32| {
            let x = s.load(block, places[node] as usize * ROWS + lane);
            // The comparison is false for NaN, which goes right, like in `walk`.
            s.select(s.le(x, s.splat(splits[node])), left, right)
        };
        let mut chosen = [s.splat(values[0]); 1 << (MAX_DEPTH - 1)];
        // The lowest level chooses between leaf values, the levels above between those choices.
        let mut width = leaves / 2;
        for at in 0..width {
            // In level order, the level with `width` tests starts at test `width - 1`.
            chosen[at] = choose(width - 1 + at, s.splat(values[2 * at]), s.splat(values[2 * at + 1]));
        }
        while width > 1 {
            width /= 2;
            for at in 0..width {
                // In place: element `at` is written after elements `2 * at` and `2 * at + 1` were
                // read.
                chosen[at] = choose(width - 1 + at, chosen[2 * at], chosen[2 * at + 1]);
            }
        }
        chosen[0]
    }
}
