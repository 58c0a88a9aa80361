//! `TreeEnsembleClassifier` and `TreeEnsembleRegressor`.
//!
//! Where the standard is silent (two classes with one score, base values, which class wins) this does what ONNX Runtime does.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::spec::ONNX_ML;
use ort_core::{Result, ensure, error};
use rustc_hash::FxHashMap;

use super::forest::{Branch, Forest, Leaf, Test, rounds_to_single};
use super::scores::{Labels, Transform, doubles, matrix, write_scores};
use super::tree_ensemble::{Aggregate, probit};
use crate::cpu_kernels;

cpu_kernels![
    KernelDef { domain: ONNX_ML, op: "TreeEnsembleClassifier", make: make_classifier, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "TreeEnsembleRegressor", make: make_regressor, ..KernelDef::BASE },
];

/// A list of numbers in one of two attributes: floats, or a tensor.
fn numbers(attrs: &Attributes, name: &str) -> Result<Vec<f64>> {
    match attrs.find_tensor(&format!("{name}_as_tensor")) {
        Some(tensor) => doubles(&tensor.view()),
        None => Ok(super::scores::floats(attrs, name)),
    }
}

fn ints<'a>(attrs: &'a Attributes, name: &str, count: usize) -> Result<&'a [i64]> {
    let list = attrs.find_ints(name).unwrap_or(&[]);
    ensure!(list.len() == count, InvalidGraph, "'{name}' has {} elements, expected {count}", list.len());
    Ok(list)
}

/// Reads the trees; the weights of leaves stand under names that start with `what`.
fn read(attrs: &Attributes, what: &str, targets: usize) -> Result<Forest> {
    let modes = attrs.find_strings("nodes_modes").unwrap_or(&[]);
    let count = modes.len();
    let trees = ints(attrs, "nodes_treeids", count)?;
    let ids = ints(attrs, "nodes_nodeids", count)?;
    let features = ints(attrs, "nodes_featureids", count)?;
    let yes = ints(attrs, "nodes_truenodeids", count)?;
    let no = ints(attrs, "nodes_falsenodeids", count)?;
    let splits = numbers(attrs, "nodes_values")?;
    ensure!(
        splits.len() == count,
        InvalidGraph,
        "'nodes_values' has {} elements, expected {count}",
        splits.len()
    );
    let missing = attrs.find_ints("nodes_missing_value_tracks_true").unwrap_or(&[]);
    let mut places: FxHashMap<(i64, i64), usize> = FxHashMap::default();
    let mut roots: Vec<usize> = Vec::new();
    let mut seen: rustc_hash::FxHashSet<i64> = Default::default();
    for index in 0..count {
        let (tree, id) = (trees[index], ids[index]);
        let twice = places.insert((tree, id), index).is_some();
        ensure!(!twice, InvalidGraph, "node {id} of tree {tree} is given twice");
        if seen.insert(tree) {
            roots.push(index);
        }
    }
    let find = |tree: i64, id: i64| {
        let place = places.get(&(tree, id)).copied();
        place.ok_or_else(|| error!(InvalidGraph, "tree {tree} has no node {id}, but something leads to it"))
    };
    let mut branches: Vec<Branch> = Vec::with_capacity(count);
    for index in 0..count {
        let test = Test::named(&modes[index])?;
        let Some(test) = test else {
            branches.push(Branch::leaf(index));
            continue;
        };
        let feature = usize::try_from(features[index]);
        branches.push(Branch {
            feature: feature.map_err(|_| error!(InvalidGraph, "feature {} is negative", features[index]))?,
            test,
            split: splits[index],
            missing: missing.get(index).is_some_and(|&flag| flag != 0),
            next: Some((find(trees[index], yes[index])?, find(trees[index], no[index])?)),
            leaf: index,
        });
    }
    let weights = numbers(attrs, &format!("{what}_weights"))?;
    let of = |name: &str| ints(attrs, &format!("{what}_{name}"), weights.len());
    let (weight_trees, weight_nodes, weight_targets) = (of("treeids")?, of("nodeids")?, of("ids")?);
    let mut leaves: Vec<Leaf> = vec![Leaf::default(); count];
    for (index, &weight) in weights.iter().enumerate() {
        let node = find(weight_trees[index], weight_nodes[index])?;
        let target = usize::try_from(weight_targets[index]).ok().filter(|&target| target < targets);
        let target = target.ok_or_else(|| {
            error!(InvalidGraph, "'{what}_ids' has {}, expected less than {targets}", weight_targets[index])
        })?;
        leaves[node].push((target, weight));
    }
    Forest::new(&roots, branches, leaves)
}

/// Sums as ONNX Runtime has them before the transform, with whether each target got any.
struct Sums {
    scores: Vec<f64>,
    seen: Vec<bool>,
    rows: usize,
}

fn sums(cx: &RunCx<'_>, forest: &Forest, targets: usize, aggregate: Aggregate) -> Result<Sums> {
    let input = cx.input(0)?;
    let (rows, features) = matrix(&input)?;
    forest.check_features(features)?;
    let mut values = doubles(&input)?;
    // Integers are compared as floats.
    if matches!(input.dtype(), DType::I32 | DType::I64) {
        values.iter_mut().for_each(|x| *x = f64::from(*x as f32));
    }
    let count = ort_core::tensor::element_count(&[rows, targets])?;
    let mut sums = Sums { scores: vec![0.0; count], seen: vec![false; count], rows };
    forest.sum(cx.threads(), (&values, features), (&mut sums.scores, &mut sums.seen, targets), aggregate);
    Ok(sums)
}

fn make_regressor(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let aggregate = match attrs.string("aggregate_function")? {
        "AVERAGE" => Aggregate::Average,
        "SUM" => Aggregate::Sum,
        "MIN" => Aggregate::Min,
        "MAX" => Aggregate::Max,
        other => return Err(error!(InvalidGraph, "aggregate_function '{other}' is not known")),
    };
    let transform = Transform::named(attrs)?;
    let named = || attrs.find_ints("target_ids")?.iter().max()?.checked_add(1);
    let targets = attrs.find_int("n_targets").or_else(named).and_then(|n| usize::try_from(n).ok());
    let targets = targets.filter(|&n| n > 0).ok_or_else(|| error!(InvalidGraph, "there are no targets"))?;
    let base = numbers(attrs, "base_values")?;
    let forest = read(attrs, "target", targets)?;
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut sums = sums(cx, &forest, targets, aggregate)?;
        for row in sums.scores.chunks_mut(targets) {
            if base.len() == targets {
                row.iter_mut().zip(&base).for_each(|(score, base)| *score += base);
            }
            // A single score has no others that a softmax could weigh it against.
            if targets > 1 || transform == Transform::Probit {
                transform.apply(row);
            }
        }
        write_scores(cx, 0, &sums.scores)
    }))
}

/// What decides between classes.
struct Classes {
    count: usize,
    transform: Transform,
    base: Vec<f64>,
    /// All weights are of one class of two.
    binary: bool,
    all_positive: bool,
}

fn make_classifier(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let labels = Labels::read(attrs, "classlabels_int64s", "classlabels_strings")?;
    let ids: rustc_hash::FxHashSet<i64> =
        attrs.find_ints("class_ids").unwrap_or(&[]).iter().copied().collect();
    let classes = Classes {
        count: labels.count(),
        transform: Transform::named(attrs)?,
        base: numbers(attrs, "base_values")?,
        binary: labels.count() == 2 && ids.len() == 1,
        all_positive: numbers(attrs, "class_weights")?.iter().all(|&weight| weight >= 0.0),
    };
    let forest = read(attrs, "class", classes.count)?;
    let single = rounds_to_single(cx.attrs());
    Ok(Box::new(move |cx: &mut RunCx<'_>| {
        let mut sums = sums(cx, &forest, classes.count, Aggregate::Sum)?;
        let mut chosen = Vec::with_capacity(sums.rows);
        for (row, seen) in sums.scores.chunks_mut(classes.count).zip(sums.seen.chunks_mut(classes.count)) {
            if single {
                row.iter_mut().for_each(|score| *score = f64::from(*score as f32));
            }
            chosen.push(classes.decide(row, seen));
        }
        labels.write(cx, &chosen)?;
        write_scores(cx, 1, &sums.scores)
    }))
}

impl Classes {
    /// The class of a row; its sums become what is written.
    fn decide(&self, row: &mut [f64], seen: &mut [bool]) -> usize {
        let [first, second] = row else { return self.decide_many(row, seen) };
        let mut has_second = seen.get(1).copied().unwrap_or(false);
        let mut opposite = None;
        match *self.base {
            [_, base] if has_second && self.binary => {
                *second += base;
                *first = -*second;
            }
            [base, other] => {
                *first += base;
                *second += other;
                has_second = true;
            }
            [base] => *first += base,
            _ => opposite = Some(true),
        }
        let decisive = if has_second { *second } else { *first };
        let positive = if self.binary && self.all_positive { decisive > 0.5 } else { decisive > 0.0 };
        if self.binary {
            opposite = Some(!self.all_positive);
        }
        if has_second {
            self.transform.apply(row);
        } else if self.transform == Transform::Probit {
            *first = probit(*first);
        } else if let Some(opposite) = opposite {
            [*first, *second] = self.transform.pair(*first, opposite);
        }
        usize::from(positive)
    }

    fn decide_many(&self, row: &mut [f64], seen: &mut [bool]) -> usize {
        for ((score, seen), base) in row.iter_mut().zip(seen.iter_mut()).zip(&self.base) {
            *score += base;
            *seen = true;
        }
        let mut best: Option<usize> = None;
        for (class, score) in row.iter().enumerate().filter(|(class, _)| seen.get(*class) == Some(&true)) {
            if best.and_then(|best| row.get(best)).is_none_or(|most| score > most) {
                best = Some(class);
            }
        }
        self.transform.apply(row);
        best.unwrap_or(0)
    }
}
