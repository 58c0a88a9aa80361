//! Decision trees laid out for speed.
//!
//! The nodes of a tree lie in breadth-first order in one array with the two children of a node side by side, so that a step is
//! `child + (x does not go left)`. Comparisons with `<=`, `<`, `>=` and `>` all become `<=`: of the neighbouring double, or with
//! the children swapped.

use ort_core::ir::Attributes;
use ort_core::{Result, ensure, error};

use super::tree_ensemble::Aggregate;
use crate::parallel::Pool;

/// The weights of a leaf by target.
pub(super) type Leaf = Vec<(usize, f64)>;

/// The question a node asks of its feature.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Test {
    LessOrEqual,
    Less,
    GreaterOrEqual,
    Greater,
    Equal,
    NotEqual,
}

impl Test {
    /// The test of a mode by name; none for a leaf.
    pub(super) fn named(mode: &str) -> Result<Option<Test>> {
        Ok(Some(match mode {
            "BRANCH_LEQ" => Test::LessOrEqual,
            "BRANCH_LT" => Test::Less,
            "BRANCH_GTE" => Test::GreaterOrEqual,
            "BRANCH_GT" => Test::Greater,
            "BRANCH_EQ" => Test::Equal,
            "BRANCH_NEQ" => Test::NotEqual,
            "LEAF" => return Ok(None),
            other => return Err(error!(InvalidGraph, "nodes_modes has '{other}', which is not known")),
        }))
    }
}

/// A node as it is read.
pub(super) struct Branch {
    pub(super) feature: usize,
    pub(super) test: Test,
    pub(super) split: f64,
    /// Whether a feature that is not a number goes the way of true.
    pub(super) missing: bool,
    /// The nodes for true and false; none for a leaf.
    pub(super) next: Option<(usize, usize)>,
    /// The leaf's place among the leaves.
    pub(super) leaf: usize,
}

impl Branch {
    pub(super) fn leaf(leaf: usize) -> Branch {
        Branch { feature: 0, test: Test::LessOrEqual, split: 0.0, missing: false, next: None, leaf }
    }
}

/// How a node compares.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Left where `x <= split`.
    Left,
    /// Left where `x <= split` or x is not a number.
    LeftOrMissing,
    /// Left where `x == split`.
    Equal,
    /// Left where `x == split` or x is not a number.
    EqualOrMissing,
    Leaf,
}

#[derive(Clone, Copy)]
struct Node {
    split: f64,
    feature: u32,
    /// The left child; the right one follows it. For a leaf its weights.
    child: u32,
    kind: Kind,
}

/// Whether the weights are floats, so that their sums are floats in ONNX Runtime.
pub(super) fn rounds_to_single(attrs: &Attributes) -> bool {
    attrs.find_tensor("class_weights_as_tensor").is_none()
}

pub(super) struct Forest {
    nodes: Vec<Node>,
    roots: Vec<u32>,
    /// The first weight of each leaf, and one past the last.
    starts: Vec<u32>,
    weights: Vec<(u32, f64)>,
    features: usize,
}

impl Forest {
    /// Lays trees out. A node that can be reached in two ways is an error: that would be no tree, or a cycle.
    pub(super) fn new(roots: &[usize], branches: Vec<Branch>, leaves: Vec<Leaf>) -> Result<Forest> {
        let too_large = || error!(InvalidGraph, "an ensemble of {} nodes is too large", branches.len());
        ensure!(u32::try_from(branches.len()).is_ok(), InvalidGraph, "{}", too_large().message());
        let mut forest = Forest {
            nodes: Vec::new(),
            roots: Vec::new(),
            starts: vec![0],
            weights: Vec::new(),
            features: 0,
        };
        for leaf in leaves {
            forest.weights.extend(leaf.into_iter().map(|(target, weight)| (target as u32, weight)));
            forest.starts.push(u32::try_from(forest.weights.len()).map_err(|_| too_large())?);
        }
        let mut reached = vec![false; branches.len()];
        for &root in roots {
            forest.roots.push(forest.nodes.len() as u32);
            let mut order = vec![root];
            let mut next = 0;
            let first = forest.nodes.len();
            while let Some(&index) = order.get(next) {
                next += 1;
                let twice = std::mem::replace(reached.get_mut(index).ok_or_else(too_large)?, true);
                ensure!(
                    !twice,
                    InvalidGraph,
                    "node {index} can be reached in two ways: the nodes form no tree"
                );
                let branch = branches.get(index).ok_or_else(too_large)?;
                forest.nodes.push(forest.node(branch, first + order.len()));
                if let Some((yes, no)) = branch.next {
                    let swapped =
                        matches!(branch.test, Test::GreaterOrEqual | Test::Greater | Test::NotEqual);
                    order.extend(if swapped { [no, yes] } else { [yes, no] });
                    forest.features = forest.features.max(branch.feature.saturating_add(1));
                }
            }
        }
        Ok(forest)
    }

    fn node(&self, branch: &Branch, child: usize) -> Node {
        if branch.next.is_none() {
            return Node { split: 0.0, feature: 0, child: branch.leaf as u32, kind: Kind::Leaf };
        }
        let split = match branch.test {
            Test::Less | Test::GreaterOrEqual => branch.split.next_down(),
            _ => branch.split,
        };
        // With swapped children left is false, which is where a missing value goes unless it tracks true.
        let swapped = matches!(branch.test, Test::GreaterOrEqual | Test::Greater | Test::NotEqual);
        let missing_left = if branch.test == Test::NotEqual { false } else { branch.missing != swapped };
        let equal = matches!(branch.test, Test::Equal | Test::NotEqual);
        let kind = match (equal, missing_left) {
            (false, false) => Kind::Left,
            (false, true) => Kind::LeftOrMissing,
            (true, false) => Kind::Equal,
            (true, true) => Kind::EqualOrMissing,
        };
        Node { split, feature: branch.feature as u32, child: child as u32, kind }
    }

    /// An error where a tree asks for a feature that rows do not have.
    pub(super) fn check_features(&self, given: usize) -> Result<()> {
        let needed = self.features;
        ensure!(needed <= given, InvalidArgument, "the trees use {needed} features, the input has {given}");
        Ok(())
    }

    /// Sums what the leaves give: `values` are rows of features, `results` the scores, whether each got any, and how many there are in
    /// a row. Threads take rows, so the bits do not depend on how many there are.
    pub(super) fn sum(
        &self,
        threads: usize,
        (values, features): (&[f64], usize),
        (scores, seen, targets): (&mut [f64], &mut [bool], usize),
        aggregate: Aggregate,
    ) {
        const ROWS: usize = 64;
        let pieces: Vec<_> = scores.chunks_mut(ROWS * targets).zip(seen.chunks_mut(ROWS * targets)).collect();
        let pieces: Vec<_> = pieces.into_iter().map(parking_lot::Mutex::new).collect();
        Pool::global().run(threads, pieces.len(), &|index| {
            let Some(piece) = pieces.get(index) else { return };
            let mut piece = piece.lock();
            let (scores, seen) = &mut *piece;
            let rows = values.get(index * ROWS * features..).unwrap_or(&[]);
            self.sum_block((rows, features), (scores, seen, targets), aggregate);
        });
    }

    fn sum_block(
        &self,
        (values, features): (&[f64], usize),
        (scores, seen, targets): (&mut [f64], &mut [bool], usize),
        aggregate: Aggregate,
    ) {
        for &root in &self.roots {
            let rows = scores.chunks_mut(targets).zip(seen.chunks_mut(targets));
            for (index, (scores, seen)) in rows.enumerate() {
                let row = values.get(index * features..(index + 1) * features).unwrap_or(&[]);
                for &(target, weight) in self.leaf(root, row) {
                    let place = scores.get_mut(target as usize).zip(seen.get_mut(target as usize));
                    let Some((score, seen)) = place else { continue };
                    *score = match aggregate {
                        Aggregate::Min if *seen => score.min(weight),
                        Aggregate::Max if *seen => score.max(weight),
                        Aggregate::Min | Aggregate::Max => weight,
                        Aggregate::Sum | Aggregate::Average => *score + weight,
                    };
                    *seen = true;
                }
            }
        }
        if aggregate == Aggregate::Average {
            scores.iter_mut().for_each(|score| *score /= self.roots.len() as f64);
        }
    }

    /// The weights of the leaf that a row leads to. Children always lie behind their parent, so every walk ends.
    fn leaf(&self, root: u32, row: &[f64]) -> &[(u32, f64)] {
        let mut at = root as usize;
        while let Some(node) = self.nodes.get(at) {
            let x = row.get(node.feature as usize).copied().unwrap_or(f64::NAN);
            let left = match node.kind {
                Kind::Left => x <= node.split,
                Kind::LeftOrMissing => x <= node.split || x.is_nan(),
                Kind::Equal => x == node.split,
                Kind::EqualOrMissing => x == node.split || x.is_nan(),
                Kind::Leaf => {
                    let bounds = self.starts.get(node.child as usize..node.child as usize + 2);
                    let Some(&[start, end]) = bounds else { return &[] };
                    return self.weights.get(start as usize..end as usize).unwrap_or(&[]);
                }
            };
            at = node.child as usize + usize::from(!left);
        }
        &[]
    }
}
