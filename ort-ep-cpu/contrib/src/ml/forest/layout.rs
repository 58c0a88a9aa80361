//! The in-memory layout of a forest.
//!
//! A tree's nodes are in breadth-first order, and the two children of a node are adjacent. A
//! traversal goes on to `child + !(x <= split)`. A leaf leads back to itself, so traversals of
//! different lengths can run together for a fixed number of steps. A node takes 8 bytes: the split,
//! and the child and the feature's column packed into 32 bits. It takes 16 if the split must be
//! `f64`, or 32 bits are too few.
//!
//! NaN goes right by default, because no comparison with it holds. Nodes that send NaN left read a
//! second copy of their column, in which minus infinity replaces NaN. The bit above the column's
//! bits selects that copy.

use bytemuck::{Pod, Zeroable};
use ort_core::dtype::DType;
use ort_core::ep::CompileCx;
use ort_core::{Result, ensure, error};

use super::Test;
use super::plan::{Number, Place, Plan, Tree};
use super::shallow::Shallow;
use ort_cpu_kernel::packed::Packed;

/// A node as the model defines it.
#[derive(Debug)]
pub(in crate::ml) struct Branch {
    pub(in crate::ml) feature: usize,
    pub(in crate::ml) test: Test,
    /// The nodes for true and false; `None` for a leaf.
    pub(in crate::ml) next: Option<(usize, usize)>,
    /// The index of the leaf.
    pub(in crate::ml) leaf: usize,
}

impl Branch {
    pub(in crate::ml) fn leaf(leaf: usize) -> Branch {
        Branch { feature: 0, test: Test::member(&[], false), next: None, leaf }
    }
}

/// The weights of leaves, grouped by leaf, each with its target.
pub(in crate::ml) struct Leaves {
    /// For each leaf the index of its first weight, then the total.
    starts: Vec<u32>,
    targets: Vec<u32>,
    weights: Vec<f64>,
}

impl Leaves {
    /// Sorts `(leaf, target, weight)` by leaf. The order within a leaf stays.
    pub(in crate::ml) fn new(count: usize, given: &[(usize, usize, f64)]) -> Result<Leaves> {
        ensure!(
            u32::try_from(given.len()).is_ok() && u32::try_from(count).is_ok(),
            InvalidGraph,
            "an ensemble of {count} nodes and {} weights is too large",
            given.len()
        );
        let mut order: Vec<usize> = (0..given.len()).collect();
        // A stable sort, because the order of additions decides the bits of a sum.
        order.sort_by_key(|&index| given.get(index).map(|weight| weight.0));
        let mut leaves = Leaves { starts: Vec::with_capacity(count + 1), targets: vec![], weights: vec![] };
        for &(leaf, target, weight) in order.iter().filter_map(|&index| given.get(index)) {
            // Leaves without weights get the start of the next one, so their range is empty.
            leaves.starts.resize(leaf + 1, leaves.weights.len() as u32);
            let target = u32::try_from(target);
            leaves.targets.push(target.map_err(|_| error!(InvalidGraph, "a leaf has an unknown target"))?);
            leaves.weights.push(weight);
        }
        leaves.starts.resize(count + 1, leaves.weights.len() as u32);
        Ok(leaves)
    }

    /// Returns the target and weight of a leaf that has exactly one, if an `f32` represents the
    /// weight exactly.
    fn only(&self, leaf: usize) -> Option<(u32, f32)> {
        let &[start, end] = self.starts.get(leaf..leaf + 2)? else { return None };
        let weight = *self.weights.get(start as usize)?;
        // False for NaN, which then takes the general form.
        let exact = f64::from(weight as f32) == weight;
        (end - start == 1 && exact).then_some((*self.targets.get(start as usize)?, weight as f32))
    }
}

/// A packed node.
pub(super) trait Node: Pod + Send + Sync {
    /// The type of features and splits.
    type Value: Number;
    /// The bits available for child and column.
    const PLACE_BITS: u32;
    fn new(split: Self::Value, child: u32, column: u64, places: Places) -> Self;
    fn split(self) -> Self::Value;
    /// Returns the left child.
    fn child(self, places: Places) -> u32;
    /// Returns the column, including the copy bit if the mask of `places` has it.
    fn column(self, places: Places) -> usize;
}

/// The bit fields of child and column in a node.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// The child is above these bits.
    shift: u32,
    /// Mask of the column.
    mask: u64,
}

impl Places {
    /// The fields for columns of `column_bits` bits. Without copies the mask drops the copy bit.
    pub(super) fn new(column_bits: u32, with_copies: bool) -> Places {
        // The copy bit is between column and child, whether or not the mask reads it.
        Places { shift: column_bits + 1, mask: (1 << (column_bits + u32::from(with_copies))) - 1 }
    }
}

/// A node of a forest over `f32`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Narrow {
    split: f32,
    place: u32,
}

/// A node of a forest over `f64`, or of one that is too large for [`Narrow`] nodes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Wide {
    split: f64,
    place: u64,
}

impl Node for Narrow {
    type Value = f32;
    const PLACE_BITS: u32 = u32::BITS;
    fn new(split: f32, child: u32, column: u64, places: Places) -> Narrow {
        Narrow { split, place: column as u32 | child << places.shift }
    }
    #[inline(always)]
    fn split(self) -> f32 {
        self.split
    }
    #[inline(always)]
    fn child(self, places: Places) -> u32 {
        self.place >> places.shift
    }
    #[inline(always)]
    fn column(self, places: Places) -> usize {
        (self.place & places.mask as u32) as usize
    }
}

impl Node for Wide {
    type Value = f64;
    const PLACE_BITS: u32 = u64::BITS;
    fn new(split: f64, child: u32, column: u64, places: Places) -> Wide {
        Wide { split, place: column | u64::from(child) << places.shift }
    }
    #[inline(always)]
    fn split(self) -> f64 {
        self.split
    }
    #[inline(always)]
    fn child(self, places: Places) -> u32 {
        (self.place >> places.shift) as u32
    }
    #[inline(always)]
    fn column(self, places: Places) -> usize {
        (self.place & places.mask) as usize
    }
}

/// The weights of the leaves.
#[allow(clippy::large_enum_variant, reason = "a forest has one")]
pub(super) enum Values {
    /// One weight per leaf, for the target of the tree, indexed by node.
    One(Packed<f32>),
    Many(Box<ManyValues>),
}

/// The leaf of each node, the first weight of each leaf, and the weights with their targets.
pub(super) struct ManyValues {
    pub(super) leaves: Packed<u32>,
    pub(super) starts: Packed<u32>,
    pub(super) targets: Packed<u32>,
    pub(super) weights: Packed<f64>,
}

/// A forest of nodes of one type.
pub(super) struct Trees<N> {
    pub(super) trees: Vec<Tree>,
    pub(super) nodes: Packed<N>,
    pub(super) values: Values,
    pub(super) shallow: Shallow,
    /// Whether some nodes read the second copy of their column.
    pub(super) has_copies: bool,
    /// The bits of a column, without the copy bit.
    pub(super) column_bits: u32,
    /// Whether features must be converted to the nodes' type.
    pub(super) converts: bool,
    /// One more than the largest column.
    pub(super) features: usize,
    /// The cost of a row, in traversal steps.
    pub(super) row_steps: usize,
}

impl<N> Trees<N> {
    /// Returns the elements of a row with copies: space for all columns, twice.
    pub(super) fn copied_len(&self) -> usize {
        2 << self.column_bits
    }
}

/// A forest that is ready to run.
pub(in crate::ml) struct Forest(pub(super) Width);

/// A forest, by its node type.
pub(super) enum Width {
    Narrow(Trees<Narrow>),
    Wide(Trees<Wide>),
}

impl Forest {
    /// Lays out trees for features of type `input`. A node that can be reached in two ways is an
    /// error, because the nodes then form a cycle or no tree.
    pub(in crate::ml) fn new(
        cx: &mut CompileCx<'_>,
        input: Option<DType>,
        (roots, branches): (&[usize], &[Branch]),
        leaves: &Leaves,
    ) -> Result<Forest> {
        let plan = Plan::new(roots, branches)?;
        // Children are slots, so they are below the number of slots.
        let child_bits = usize::BITS - plan.places.len().leading_zeros();
        let needed = plan.column_bits() + 1 + child_bits;
        // Features other than `f64` fit `f32`, except that large integers are rounded.
        let narrow = input != Some(DType::F64) && needed <= Narrow::PLACE_BITS;
        ensure!(
            needed <= Wide::PLACE_BITS,
            InvalidGraph,
            "feature {} of a forest of {} nodes is out of range",
            plan.features.saturating_sub(1),
            plan.places.len()
        );
        Ok(Forest(match narrow {
            true => Width::Narrow(plan.pack(cx, leaves, input)?),
            false => Width::Wide(plan.pack(cx, leaves, input)?),
        }))
    }
}

/// A slot that is still to be filled, while its tree is laid out.
#[derive(Clone, Copy)]
enum Item {
    Branch(usize),
    /// The splits `low..high` of a branch. `shared` indexes the slots of its answers.
    Part {
        branch: usize,
        low: usize,
        high: usize,
        shared: usize,
    },
    Jump(u32),
}

/// The state of laying out the trees of one model.
struct Planter<'a> {
    branches: &'a [Branch],
    reached: Vec<bool>,
    /// The tree's slots in order, with their depths, and the index of the first one.
    items: Vec<(Item, u32)>,
    first: usize,
    /// For each branch with several splits, the slots of its answers false and true.
    shared: Vec<[Option<u32>; 2]>,
}

impl Plan {
    pub(super) fn new(roots: &[usize], branches: &[Branch]) -> Result<Plan> {
        // A leaf's child is the slot before its own, so slot 0 stays unused.
        let mut plan = Plan { places: vec![Place::Leaf(0)], trees: Vec::new(), features: 0 };
        // One list for all trees, because trees may not share nodes either.
        let reached = vec![false; branches.len()];
        let mut planter = Planter { branches, reached, items: Vec::new(), first: 0, shared: Vec::new() };
        for &root in roots {
            planter.first = plan.places.len();
            planter.items.clear();
            planter.shared.clear();
            // Item `i` becomes slot `first + i`, so children are known before they are placed.
            planter.items.push((Item::Branch(root), 0));
            let mut depth = 0;
            let mut next = 0;
            // The list of items is also the queue of the breadth-first traversal.
            while let Some(&(item, level)) = planter.items.get(next) {
                next += 1;
                depth = depth.max(level);
                let place = planter.place(item, level)?;
                if let Place::Split { column, .. } = place {
                    plan.features = plan.features.max(column.saturating_add(1));
                }
                plan.places.push(place);
            }
            ensure!(
                u32::try_from(plan.places.len()).is_ok(),
                InvalidGraph,
                "an ensemble of {} nodes is too large",
                plan.places.len()
            );
            let root = planter.first as u32;
            let has_jumps = planter.items.iter().any(|(item, _)| matches!(item, Item::Jump(_)));
            // Item depths do not count the steps that follow a jump.
            let depth = if has_jumps { plan.height(root) } else { depth };
            plan.trees.push(Tree { root, depth, target: None });
        }
        Ok(plan)
    }

    /// Returns the maximum steps from a slot to a leaf, if jumps may lead back to earlier slots.
    fn height(&self, root: u32) -> u32 {
        let mut heights = vec![None; self.places.len()];
        // A stack of its own: recursion would overflow on a model that is one long chain.
        let mut open = vec![root as usize];
        while let Some(&at) = open.last() {
            let below = match self.places.get(at) {
                Some(&Place::Split { child, .. }) => [child as usize, child as usize + 1],
                Some(&Place::Jump(to)) => [to as usize; 2],
                Some(Place::Leaf(_)) | None => {
                    open.pop();
                    heights.get_mut(at).into_iter().for_each(|height| *height = Some(0));
                    continue;
                }
            };
            let known = below.map(|at| heights.get(at).copied().flatten());
            match known {
                [Some(left), Some(right)] => {
                    open.pop();
                    // A jump is a step too, because `walk` passes its node.
                    let height: u32 = 1 + u32::max(left, right);
                    heights.get_mut(at).into_iter().for_each(|known| *known = Some(height));
                }
                // Visited again when the missing heights are known.
                _ => open
                    .extend(below.iter().zip(known).filter(|(_, known)| known.is_none()).map(|(at, _)| at)),
            }
        }
        heights.get(root as usize).copied().flatten().unwrap_or(0)
    }

    pub(super) fn column_bits(&self) -> u32 {
        // The largest column is `features - 1`. Without features the field has no bits.
        usize::BITS - self.features.saturating_sub(1).leading_zeros()
    }

    pub(super) fn nodes<N: Node>(&self) -> Vec<N> {
        let column_bits = self.column_bits();
        let places = Places::new(column_bits, false);
        let node = |(at, place): (usize, &Place)| {
            // No number is `<= NaN`, so such a node always leads to the right child.
            let (split, child, column) = match *place {
                Place::Split { child, column, split, missing_left } => {
                    let copy = u64::from(missing_left) << column_bits;
                    // The copy bit is directly above the column.
                    (N::Value::floor(split), child, column as u64 | copy)
                }
                Place::Leaf(_) => (N::Value::NAN, (at as u32).saturating_sub(1), 0),
                Place::Jump(to) => (N::Value::NAN, to.saturating_sub(1), 0),
            };
            N::new(split, child, column, places)
        };
        self.places.iter().enumerate().map(node).collect()
    }

    fn pack<N: Node>(
        mut self,
        cx: &mut CompileCx<'_>,
        leaves: &Leaves,
        input: Option<DType>,
    ) -> Result<Trees<N>> {
        let column_bits = self.column_bits();
        let nodes: Vec<N> = self.nodes();
        let nodes = Packed::copy(cx, &nodes)?;
        // Without such nodes, no run copies its rows.
        let has_copies =
            self.places.iter().any(|place| matches!(place, Place::Split { missing_left: true, .. }));
        let (values, shallow) = match self.single_weights(leaves) {
            Some(weights) => {
                // Shallow trees are evaluated in `f32` only.
                let is_narrow = N::PLACE_BITS == Narrow::PLACE_BITS;
                let shallow = Shallow::new(cx, &self, &weights, is_narrow)?;
                (Values::One(Packed::copy(cx, &weights)?), shallow)
            }
            None => (self.many_weights(cx, leaves)?, Shallow::none(cx)?),
        };
        let converts = input != Some(<N::Value as ort_core::dtype::Element>::DTYPE);
        let features = self.features;
        let row_steps = shallow.row_steps(&self.trees);
        Ok(Trees {
            trees: self.trees,
            nodes,
            values,
            shallow,
            has_copies,
            column_bits,
            converts,
            features,
            row_steps,
        })
    }

    /// Returns the weights by slot if each leaf has exactly one and all leaves of a tree share a
    /// target.
    fn single_weights(&mut self, leaves: &Leaves) -> Option<Vec<f32>> {
        let mut weights = vec![0.0; self.places.len()];
        // Trees are contiguous, so each one ends where the next one starts.
        let mut ends: Vec<usize> = self.trees.iter().skip(1).map(|tree| tree.root as usize).collect();
        ends.push(self.places.len());
        for (tree, &end) in self.trees.iter_mut().zip(&ends) {
            let start = tree.root as usize;
            let places = self.places.get(start..end)?.iter().zip(weights.get_mut(start..end)?);
            for (place, weight) in places {
                let Place::Leaf(leaf) = *place else { continue };
                // A single leaf with more or less than one weight makes the whole forest general.
                let (target, only) = leaves.only(leaf as usize)?;
                if *tree.target.get_or_insert(target) != target {
                    return None;
                }
                *weight = only;
            }
        }
        Some(weights)
    }

    fn many_weights(&self, cx: &mut CompileCx<'_>, leaves: &Leaves) -> Result<Values> {
        let leaf = |place: &Place| if let Place::Leaf(leaf) = *place { leaf } else { 0 };
        let by_place: Vec<u32> = self.places.iter().map(leaf).collect();
        Ok(Values::Many(Box::new(ManyValues {
            leaves: Packed::copy(cx, &by_place)?,
            starts: Packed::copy(cx, &leaves.starts)?,
            targets: Packed::copy(cx, &leaves.targets)?,
            weights: Packed::copy(cx, &leaves.weights)?,
        })))
    }

    pub(super) fn trees(&self) -> &[Tree] {
        &self.trees
    }

    /// Follows a jump.
    pub(super) fn resolve(&self, at: u32) -> u32 {
        match self.places.get(at as usize) {
            // A jump never leads to another jump.
            Some(&Place::Jump(to)) => to,
            _ => at,
        }
    }
}

impl Planter<'_> {
    /// Fills the slot of an item. Its children go to the end of the queue.
    fn place(&mut self, item: Item, level: u32) -> Result<Place> {
        match item {
            Item::Jump(to) => Ok(Place::Jump(to)),
            Item::Part { branch, low, high, shared } => self.split(branch, (low, high), shared, level),
            Item::Branch(index) => {
                let unknown = || error!(InvalidGraph, "a branch leads to node {index}, which is not");
                // Each node is placed once, so a cycle cannot make this endless.
                let twice = std::mem::replace(self.reached.get_mut(index).ok_or_else(unknown)?, true);
                ensure!(
                    !twice,
                    InvalidGraph,
                    "node {index} can be reached in two ways: the nodes form no tree"
                );
                let branch = self.branches.get(index).ok_or_else(unknown)?;
                if branch.next.is_none() {
                    return Ok(Place::Leaf(branch.leaf as u32));
                }
                // Its splits follow as parts, which share the two subtrees.
                self.shared.push([None; 2]);
                self.split(index, (0, branch.test.splits.len()), self.shared.len() - 1, level)
            }
        }
    }

    /// Makes a node from the middle one of the splits `low..high`: a binary search over the splits.
    fn split(
        &mut self,
        index: usize,
        (low, high): (usize, usize),
        shared: usize,
        level: u32,
    ) -> Result<Place> {
        let middle = low.midpoint(high);
        let branch = self.branches.get(index);
        let found = branch.and_then(|branch| Some((branch, *branch.test.splits.get(middle)?)));
        let (branch, split) = found.ok_or_else(|| error!(Fail, "node {index} has no split {middle}"))?;
        // The children come next in the queue, side by side.
        let child = u32::try_from(self.first + self.items.len());
        let child = child.map_err(|_| error!(InvalidGraph, "an ensemble of so many nodes is too large"))?;
        for (low, high) in [(low, middle), (middle + 1, high)] {
            // A range without splits is a single interval, whose answer leads to a subtree.
            let item = match low < high {
                true => Item::Part { branch: index, low, high, shared },
                false => self.answer(branch, low, shared)?,
            };
            self.items.push((item, level + 1));
        }
        // The interval of NaN is at or left of this split.
        let missing_left = branch.test.missing_interval() <= middle;
        Ok(Place::Split { child, column: branch.feature, split, missing_left })
    }

    /// Returns where the answer of an interval leads. Only the first interval with an answer holds
    /// the subtree; later ones jump to it.
    fn answer(&mut self, branch: &Branch, interval: usize, shared: usize) -> Result<Item> {
        // The slot that the returned item will get.
        let here = (self.first + self.items.len()) as u32;
        let answer = branch.test.answer(interval);
        let places = self.shared.get_mut(shared).map(|places| &mut places[usize::from(answer)]);
        let place = places.ok_or_else(|| error!(Fail, "a test has lost its places"))?;
        if let Some(place) = *place {
            return Ok(Item::Jump(place));
        }
        *place = Some(here);
        let next = branch.next.ok_or_else(|| error!(Fail, "a leaf has no next node"))?;
        Ok(Item::Branch(if answer { next.0 } else { next.1 }))
    }
}
