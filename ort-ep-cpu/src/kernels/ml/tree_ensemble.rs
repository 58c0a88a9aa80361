//! `TreeEnsemble`: sums of what decision trees give.

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::spec::ONNX_ML;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error};

use crate::cpu_kernels;

cpu_kernels![KernelDef { domain: ONNX_ML, op: "TreeEnsemble", make, ..KernelDef::BASE }];

/// Where a branch leads.
#[derive(Clone, Copy)]
enum Next {
    Node(usize),
    Leaf(usize),
}

/// The question that a node asks of its feature.
enum Test {
    LessOrEqual(f64),
    Less(f64),
    GreaterOrEqual(f64),
    Greater(f64),
    Equal(f64),
    NotEqual(f64),
    Member(Vec<f64>),
}

impl Test {
    fn holds(&self, x: f64) -> bool {
        match self {
            Test::LessOrEqual(split) => x <= *split,
            Test::Less(split) => x < *split,
            Test::GreaterOrEqual(split) => x >= *split,
            Test::Greater(split) => x > *split,
            Test::Equal(split) => x == *split,
            Test::NotEqual(split) => x != *split,
            Test::Member(members) => members.contains(&x),
        }
    }
}

struct Branching {
    feature: usize,
    test: Test,
    /// Whether a feature that is not a number goes the way of true.
    missing: bool,
    yes: Next,
    no: Next,
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Aggregate {
    Average,
    Sum,
    Min,
    Max,
}

#[derive(Clone, Copy, PartialEq)]
enum Transform {
    None,
    Softmax,
    Logistic,
    SoftmaxZero,
    Probit,
}

struct TreeEnsemble {
    roots: Vec<usize>,
    nodes: Vec<Branching>,
    /// The target and weight of each leaf.
    leaves: Vec<(usize, f64)>,
    aggregate: Aggregate,
    transform: Transform,
}

/// The elements of a float tensor.
fn doubles(view: &TensorView<'_>) -> Result<Vec<f64>> {
    Ok(match view.dtype() {
        DType::F32 => view.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
        DType::F16 => view.to_vec::<half::f16>()?.into_iter().map(f64::from).collect(),
        DType::F64 => view.to_vec::<f64>()?,
        other => return Err(error!(InvalidGraph, "expected floats, got {}", other.name())),
    })
}

fn indices(attrs: &Attributes, name: &str, count: Option<usize>, below: usize) -> Result<Vec<usize>> {
    let given = attrs.ints(name)?;
    ensure!(
        count.is_none_or(|count| given.len() == count),
        InvalidGraph,
        "{name} has {} elements",
        given.len()
    );
    let index = |&index: &i64| usize::try_from(index).ok().filter(|&index| index < below);
    given
        .iter()
        .map(|given| index(given).ok_or_else(|| error!(InvalidGraph, "{name} has the element {given}")))
        .collect()
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let weights = doubles(&attrs.tensor("leaf_weights")?.view())?;
    let targets = match attrs.find_int("n_targets") {
        Some(targets) => usize::try_from(targets).unwrap_or(0),
        None => usize::MAX,
    };
    let leaf_targets = indices(attrs, "leaf_targetids", Some(weights.len()), targets)?;
    let nodes = read_nodes(attrs, weights.len())?;
    let aggregate = match attrs.int("aggregate_function")? {
        0 => Aggregate::Average,
        1 => Aggregate::Sum,
        2 => Aggregate::Min,
        3 => Aggregate::Max,
        other => return Err(error!(InvalidGraph, "aggregate_function {other} is not known")),
    };
    let transform = match attrs.int("post_transform")? {
        0 => Transform::None,
        1 => Transform::Softmax,
        2 => Transform::Logistic,
        3 => Transform::SoftmaxZero,
        4 => Transform::Probit,
        other => return Err(error!(InvalidGraph, "post_transform {other} is not known")),
    };
    Ok(Box::new(TreeEnsemble {
        roots: indices(attrs, "tree_roots", None, nodes.len())?,
        nodes,
        leaves: leaf_targets.into_iter().zip(weights).collect(),
        aggregate,
        transform,
    }))
}

fn read_nodes(attrs: &Attributes, leaves: usize) -> Result<Vec<Branching>> {
    let modes = attrs.tensor("nodes_modes")?.view().to_ints()?;
    let splits = doubles(&attrs.tensor("nodes_splits")?.view())?;
    let count = modes.len();
    ensure!(splits.len() == count, InvalidGraph, "{} splits for {count} nodes", splits.len());
    let features = indices(attrs, "nodes_featureids", Some(count), usize::MAX)?;
    let side = |ids: &str, leaf: &str| -> Result<Vec<Next>> {
        let ids = indices(attrs, ids, Some(count), usize::MAX)?;
        let is_leaf = indices(attrs, leaf, Some(count), 2)?;
        let next = |(id, is_leaf)| {
            let next = if is_leaf == 1 { Next::Leaf(id) } else { Next::Node(id) };
            let known = id < if is_leaf == 1 { leaves } else { count };
            known.then_some(next).ok_or_else(|| error!(InvalidGraph, "a branch leads to {id}, which is not"))
        };
        ids.into_iter().zip(is_leaf).map(next).collect()
    };
    let yes = side("nodes_truenodeids", "nodes_trueleafs")?;
    let no = side("nodes_falsenodeids", "nodes_falseleafs")?;
    let missing = attrs.find_ints("nodes_missing_value_tracks_true").unwrap_or(&[]);
    let members = match attrs.find_tensor("membership_values") {
        Some(members) => doubles(&members.view())?,
        None => Vec::new(),
    };
    // The sets stand one behind the other, each closed by a NaN.
    let mut sets = members.split(|member| member.is_nan());
    let mut nodes = Vec::with_capacity(count);
    for (index, mode) in modes.into_iter().enumerate() {
        let split = splits[index];
        let test = match mode {
            0 => Test::LessOrEqual(split),
            1 => Test::Less(split),
            2 => Test::GreaterOrEqual(split),
            3 => Test::Greater(split),
            4 => Test::Equal(split),
            5 => Test::NotEqual(split),
            6 => Test::Member(sets.next().unwrap_or(&[]).to_vec()),
            other => return Err(error!(InvalidGraph, "mode {other} of a node is not known")),
        };
        nodes.push(Branching {
            feature: features[index],
            test,
            missing: missing.get(index).is_some_and(|&flag| flag != 0),
            yes: yes[index],
            no: no[index],
        });
    }
    Ok(nodes)
}

impl TreeEnsemble {
    fn leaf(&self, root: usize, row: &[f64]) -> Result<(usize, f64)> {
        let mut at = root;
        // A way through a tree passes each node at most once.
        for _ in 0..self.nodes.len() {
            let node = &self.nodes[at];
            let x = row.get(node.feature).copied();
            let x = x.ok_or_else(|| error!(InvalidArgument, "feature {} is missing", node.feature))?;
            let holds = node.test.holds(x) || (node.missing && x.is_nan());
            match if holds { node.yes } else { node.no } {
                Next::Node(next) => at = next,
                Next::Leaf(leaf) => return Ok(self.leaves[leaf]),
            }
        }
        Err(error!(InvalidGraph, "the nodes of a tree form a cycle"))
    }

    fn row(&self, row: &[f64], scores: &mut [f64]) -> Result<()> {
        let mut seen = vec![false; scores.len()];
        for &root in &self.roots {
            let (target, weight) = self.leaf(root, row)?;
            let place = scores.get_mut(target).zip(seen.get_mut(target));
            let (score, seen) = place.ok_or_else(|| error!(InvalidGraph, "target {target} is unknown"))?;
            *score = match self.aggregate {
                Aggregate::Min if *seen => score.min(weight),
                Aggregate::Max if *seen => score.max(weight),
                Aggregate::Min | Aggregate::Max => weight,
                Aggregate::Sum | Aggregate::Average => *score + weight,
            };
            *seen = true;
        }
        if self.aggregate == Aggregate::Average {
            scores.iter_mut().for_each(|score| *score /= self.roots.len() as f64);
        }
        transform(self.transform, scores);
        Ok(())
    }
}

fn transform(transform: Transform, scores: &mut [f64]) {
    match transform {
        Transform::None => {}
        Transform::Logistic => scores.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        Transform::Probit => scores.iter_mut().for_each(|x| *x = probit(*x)),
        Transform::Softmax | Transform::SoftmaxZero => {
            let kept = |x: f64| transform == Transform::Softmax || x != 0.0;
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().filter(|x| kept(**x)).map(|x| (x - largest).exp()).sum();
            for x in scores.iter_mut().filter(|x| kept(**x)) {
                *x = (*x - largest).exp() / sum;
            }
        }
    }
}

/// The quantile function of the normal distribution: Winitzki's approximation of the inverse error function,
/// made exact by Newton's method.
pub(super) fn probit(p: f64) -> f64 {
    let x = 2.0 * p - 1.0;
    if x.abs() >= 1.0 || x.is_nan() {
        return if x.abs() == 1.0 { x * f64::INFINITY } else { f64::NAN };
    }
    const A: f64 = 0.147;
    let log = ((1.0 - x) * (1.0 + x)).ln();
    let v = 2.0 / (std::f64::consts::PI * A) + 0.5 * log;
    let mut y = x.signum() * (-v + (v * v - log / A).sqrt()).max(0.0).sqrt();
    for _ in 0..3 {
        let slope = std::f64::consts::FRAC_2_SQRT_PI * (-y * y).exp();
        if slope > 0.0 {
            y -= (libm::erf(y) - x) / slope;
        }
    }
    y * std::f64::consts::SQRT_2
}

impl Executable for TreeEnsemble {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.input(0)?;
        let &[rows, features] = input.shape() else {
            return Err(error!(InvalidArgument, "TreeEnsemble takes rank 2, got {:?}", input.shape()));
        };
        let output = cx.output(0)?;
        let targets = output.shape().get(1).copied().unwrap_or(0);
        let values = doubles(&input)?;
        let mut scores = vec![0.0; rows * targets];
        for index in 0..rows {
            let row = &values[index * features..(index + 1) * features];
            self.row(row, &mut scores[index * targets..(index + 1) * targets])?;
        }
        match output.dtype() {
            DType::F64 => output.as_mut_slice::<f64>()?.copy_from_slice(&scores),
            DType::F16 => {
                let to = output.as_mut_slice::<half::f16>()?;
                to.iter_mut().zip(scores).for_each(|(to, score)| *to = half::f16::from_f64(score));
            }
            _ => {
                let to = output.as_mut_slice::<f32>()?;
                to.iter_mut().zip(scores).for_each(|(to, score)| *to = score as f32);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::probit;

    /// Values of scipy.special.ndtri.
    #[test]
    fn quantiles() {
        let table = [(0.5, 0.0), (0.975, 1.959963984540054), (0.01, -2.3263478740408408)];
        for (p, expected) in table {
            assert!((probit(p) - expected).abs() < 1e-9, "probit({p}) = {}", probit(p));
        }
        assert_eq!(probit(1.0), f64::INFINITY);
    }
}
