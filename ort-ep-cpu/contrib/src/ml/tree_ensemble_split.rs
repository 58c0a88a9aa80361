//! Tree ensemble classifier and regressor: `TreeEnsembleClassifier` and `TreeEnsembleRegressor`.
//!
//! Where the standard is silent (base values, and two classes that share one score), the kernels
//! follow ONNX Runtime.

use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::seeded::{HashMap, HashSet};
use ort_core::spec::ONNX_ML;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use super::forest::{Aggregate, Branch, Comparison, Finish, Forest, Leaves, Request, Shape, Test};
use super::scores::{Labels, Transform, doubles, largest, matrix, probit};
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![
    KernelDef { domain: ONNX_ML, op: "TreeEnsembleClassifier", make: make_classifier, ..KernelDef::BASE },
    KernelDef { domain: ONNX_ML, op: "TreeEnsembleRegressor", make: make_regressor, ..KernelDef::BASE },
];

/// Reads a list of numbers from a float attribute or its tensor variant.
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

/// Builds the forest. The attributes of leaf weights have names that start with `what`.
fn read(cx: &mut CompileCx<'_>, what: &str, targets: usize) -> Result<Forest> {
    let attrs = cx.attrs();
    let modes = attrs.find_strings("nodes_modes").unwrap_or(&[]);
    let count = modes.len();
    let trees = ints(attrs, "nodes_treeids", count)?;
    let ids = ints(attrs, "nodes_nodeids", count)?;
    let mut places: HashMap<(i64, i64), usize> = HashMap::default();
    // Node ids are unique within a tree only, so the key is the pair.
    places.reserve(count);
    // The first node of each tree is its root.
    let mut roots: Vec<usize> = Vec::new();
    let mut seen: HashSet<i64> = HashSet::default();
    for (index, (&tree, &id)) in trees.iter().zip(ids).enumerate() {
        let twice = places.insert((tree, id), index).is_some();
        ensure!(!twice, InvalidGraph, "node {id} of tree {tree} is given twice");
        if seen.insert(tree) {
            roots.push(index);
        }
    }
    let find = |tree: i64, id: i64| {
        let place = places.get(&(tree, id)).copied();
        place
            .ok_or_else(|| error!(InvalidGraph, "tree {tree} has no node {id}, to which an attribute refers"))
    };
    let branches = read_nodes(attrs, (modes, trees), &find)?;
    let weights = numbers(attrs, &format!("{what}_weights"))?;
    let of = |name: &str| ints(attrs, &format!("{what}_{name}"), weights.len());
    let (weight_trees, weight_nodes, weight_targets) = (of("treeids")?, of("nodeids")?, of("ids")?);
    let mut leaves = Vec::with_capacity(weights.len());
    for (((&tree, &node), &target), &weight) in
        weight_trees.iter().zip(weight_nodes).zip(weight_targets).zip(&weights)
    {
        // The run drops a weight without a place, so an unknown target is refused here.
        let known = usize::try_from(target).ok().filter(|&target| target < targets);
        let known = known.ok_or_else(|| {
            error!(InvalidGraph, "'{what}_ids' has {target}, expected 0 or more and less than {targets}")
        })?;
        leaves.push((find(tree, node)?, known, weight));
    }
    let input = cx.node.bound_dtype(if what == "class" { "T1" } else { "T" });
    Forest::new(cx, input, (&roots, &branches), &Leaves::new(count, &leaves)?)
}

/// Reads the nodes. `find` returns the index of the node that a branch leads to.
fn read_nodes(
    attrs: &Attributes,
    (modes, trees): (&[String], &[i64]),
    find: &dyn Fn(i64, i64) -> Result<usize>,
) -> Result<Vec<Branch>> {
    let count = modes.len();
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
    let mut branches: Vec<Branch> = Vec::with_capacity(count);
    for (index, (((mode, &tree), &split), &feature)) in
        modes.iter().zip(trees).zip(&splits).zip(features).enumerate()
    {
        // A mode of `LEAF` has no comparison.
        let (Some(comparison), Some(&yes), Some(&no)) =
            (Comparison::named(mode)?, yes.get(index), no.get(index))
        else {
            branches.push(Branch::leaf(index));
            continue;
        };
        let column = usize::try_from(feature);
        // Only branches use their feature, so a leaf's may be anything.
        branches.push(Branch {
            feature: column.map_err(|_| error!(InvalidGraph, "feature {feature} is negative"))?,
            test: Test::compare(comparison, split, missing.get(index).is_some_and(|&flag| flag != 0)),
            next: Some((find(tree, yes)?, find(tree, no)?)),
            leaf: index,
        });
    }
    Ok(branches)
}

/// Builds the forest's request of one run, for either operator.
fn request<'a>(cx: &mut RunCx<'a>, targets: usize, aggregate: Aggregate) -> Result<Request<'a>> {
    let input: TensorView<'a> = cx.input(0)?;
    let (rows, features) = matrix(input.shape())?;
    let shape = Shape { rows, features, targets };
    Ok(Request { input, shape, aggregate, threads: cx.threads(), workspace: cx.workspace()? })
}

/// Returns the workspace bytes of either operator.
fn workspace(forest: &Forest, shapes: &IoShapes<'_>, targets: usize) -> Result<usize> {
    let (rows, features) = matrix(shapes.input(0))?;
    forest.workspace(Shape { rows, features, targets }, shapes.threads)
}

struct Regressor {
    forest: Forest,
    aggregate: Aggregate,
    transform: Transform,
    base: Vec<f64>,
    targets: usize,
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
    // Without `n_targets`, the largest target id decides.
    let named = || attrs.find_ints("target_ids")?.iter().max()?.checked_add(1);
    let targets = attrs.find_int("n_targets").or_else(named).and_then(|n| usize::try_from(n).ok());
    let targets = targets.filter(|&n| n > 0).ok_or_else(|| error!(InvalidGraph, "there are no targets"))?;
    let base = numbers(attrs, "base_values")?;
    let forest = read(cx, "target", targets)?;
    Ok(Box::new(Regressor { forest, aggregate, transform, base, targets }))
}

impl Executable for Regressor {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        workspace(&self.forest, shapes, self.targets)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let request = request(cx, self.targets, self.aggregate)?;
        let scores = cx.output(0)?.as_mut_slice::<f32>()?;
        self.forest.run(request, scores, &|row, _| {
            // Like ONNX Runtime, a list of another length is ignored.
            if self.base.len() == self.targets {
                row.iter_mut().zip(&self.base).for_each(|(score, base)| *score += base);
            }
            match row {
                [score] => *score = self.transform.apply_to_one(*score),
                row => self.transform.apply(row),
            }
            0
        })?;
        Ok(())
    }
}

/// How scores decide between classes.
struct Classes {
    count: usize,
    transform: Transform,
    base: Vec<f64>,
    /// Whether there are two classes but all weights belong to one of them.
    binary: bool,
    all_positive: bool,
    /// Whether the weights are `f32`, so that sums are rounded to `f32`.
    single: bool,
}

struct Classifier {
    forest: Forest,
    labels: Labels,
    classes: Classes,
}

fn make_classifier(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let labels = Labels::read(attrs, "classlabels_int64s", "classlabels_strings")?;
    let ids: HashSet<i64> = attrs.find_ints("class_ids").unwrap_or(&[]).iter().copied().collect();
    let classes = Classes {
        count: labels.count(),
        transform: Transform::named(attrs)?,
        base: numbers(attrs, "base_values")?,
        // Weights for a single class id: the score of one class decides between two.
        binary: labels.count() == 2 && ids.len() == 1,
        all_positive: numbers(attrs, "class_weights")?.iter().all(|&weight| weight >= 0.0),
        single: attrs.find_tensor("class_weights_as_tensor").is_none(),
    };
    let forest = read(cx, "class", classes.count)?;
    Ok(Box::new(Classifier { forest, labels, classes }))
}

impl Executable for Classifier {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        workspace(&self.forest, shapes, self.classes.count)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let request = request(cx, self.classes.count, Aggregate::Sum)?;
        let scores = if cx.wants(1) { cx.output(1)?.as_mut_slice::<f32>()? } else { &mut [] };
        // Sums are in `f64`. Weights of `f32` ask for sums of `f32`, which this rounds once.
        let decide: &Finish<'_> = &|row, seen| {
            if self.classes.single {
                row.iter_mut().for_each(|score| *score = f64::from(*score as f32));
            }
            self.classes.decide(row, seen)
        };
        let chosen = self.forest.run(request, scores, decide)?;
        self.labels.write(cx, chosen.iter().map(|&class| class as usize))
    }
}

impl Classes {
    /// Decides the class of a row, and turns its sums into the scores to write.
    fn decide(&self, row: &mut [f64], seen: &mut [u8]) -> usize {
        // Two classes have rules of their own; all other counts compare scores.
        let [first, second] = row else { return self.decide_many(row, seen) };
        if !self.binary {
            if let Some(base) = self.base.first() {
                self.add(first, *base);
            }
            if let Some(base) = self.base.get(1) {
                self.add(second, *base);
            }
            return self.greater(row);
        }
        // A weight for the second class means that all weights are for it.
        let has_second = seen.get(1).is_some_and(|&seen| seen != 0);
        match *self.base {
            // The only score is the second one, and the first mirrors it.
            [_, base] if has_second => {
                self.add(second, base);
                *first = -*second;
            }
            [base, other] => {
                self.add(first, base);
                self.add(second, other);
                return self.greater(row);
            }
            [base] => self.add(first, base),
            _ => {}
        }
        // Weights that are never negative are taken as probabilities, with a threshold of one half.
        let decisive = if has_second { *second } else { *first };
        let positive = if self.all_positive { decisive > 0.5 } else { decisive > 0.0 };
        if has_second {
            self.transform.apply(row);
        } else if self.transform == Transform::Probit {
            [*first, *second] = [probit(1.0 - *first), probit(*first)];
        } else {
            [*first, *second] = self.transform.pair(*first, !self.all_positive);
        }
        usize::from(positive)
    }

    /// Picks the class with the greater score, the first one on a tie, and transforms both scores.
    fn greater(&self, row: &mut [f64]) -> usize {
        let class = largest(row);
        self.transform.apply(row);
        class
    }

    /// Adds a base value in the precision of the sums.
    fn add(&self, score: &mut f64, base: f64) {
        // The sum was rounded before, so the addition rounds a second time.
        *score += base;
        if self.single {
            *score = f64::from(*score as f32);
        }
    }

    fn decide_many(&self, row: &mut [f64], seen: &mut [u8]) -> usize {
        for ((score, seen), base) in row.iter_mut().zip(seen.iter_mut()).zip(&self.base) {
            self.add(score, *base);
            *seen = 1;
        }
        // Only classes with a leaf weight or a base value compete.
        let mut best: Option<usize> = None;
        for (class, score) in row.iter().enumerate().filter(|(class, _)| seen.get(*class) == Some(&1)) {
            if best.and_then(|best| row.get(best)).is_none_or(|most| score > most) {
                best = Some(class);
            }
        }
        self.transform.apply(row);
        best.unwrap_or(0)
    }
}
