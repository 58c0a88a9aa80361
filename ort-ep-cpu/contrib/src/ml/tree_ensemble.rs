//! Tree ensembles (`TreeEnsemble`).

use ort_core::dtype::DType;
use ort_core::ep::{CompileCx, Executable, IoShapes, KernelDef, RunCx};
use ort_core::ir::Attributes;
use ort_core::spec::ONNX_ML;
use ort_core::tensor::TensorView;
use ort_core::{Result, ensure, error, for_each_type};

use super::forest::{Aggregate, Branch, Comparison, Forest, Leaves, Request, Shape, Test};
use super::scores::Transform;
use ort_cpu_kernel::cpu_kernels;

cpu_kernels![KernelDef { domain: ONNX_ML, op: "TreeEnsemble", make, ..KernelDef::BASE }];

struct TreeEnsemble {
    forest: Forest,
    aggregate: Aggregate,
    transform: Transform,
}

/// Converts the elements of a float tensor to `f64`.
fn doubles(view: &TensorView<'_>) -> Result<Vec<f64>> {
    Ok(match view.dtype() {
        DType::F32 => view.to_vec::<f32>()?.into_iter().map(f64::from).collect(),
        DType::F16 => view.to_vec::<half::f16>()?.into_iter().map(f64::from).collect(),
        DType::F64 => view.to_vec::<f64>()?,
        other => return Err(error!(InvalidGraph, "expected floats, got {}", other.name())),
    })
}

/// Reads a list of indices, checking its length if `count` is given.
fn indices(attrs: &Attributes, name: &str, count: Option<usize>) -> Result<Vec<usize>> {
    let given = attrs.ints(name)?;
    if let Some(count) = count {
        ensure!(given.len() == count, InvalidGraph, "{name} has {} elements, not {count}", given.len());
    }
    let index = |given: &i64| {
        usize::try_from(*given).map_err(|_| error!(InvalidGraph, "{name} has the negative element {given}"))
    };
    given.iter().map(index).collect()
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let weights = doubles(&attrs.tensor("leaf_weights")?.view())?;
    let leaf_targets = indices(attrs, "leaf_targetids", Some(weights.len()))?;
    if let Some(targets) = attrs.find_int("n_targets") {
        let below = |&&target: &&usize| !i64::try_from(target).is_ok_and(|target| target < targets);
        if let Some(target) = leaf_targets.iter().find(below) {
            return Err(error!(
                InvalidGraph,
                "leaf_targetids has {target}, expected 0 or more and less than {targets}"
            ));
        }
    }
    // Each leaf has exactly one weight, so its index is its place in the list.
    let leaves: Vec<(usize, usize, f64)> = leaf_targets
        .into_iter()
        .zip(weights)
        .enumerate()
        .map(|(leaf, (to, weight))| (leaf, to, weight))
        .collect();
    let branches = read_nodes(attrs, leaves.len())?;
    let count = attrs.tensor("nodes_modes")?.view().element_count();
    let roots = indices(attrs, "tree_roots", None)?;
    if let Some(root) = roots.iter().find(|root| **root >= count) {
        return Err(error!(InvalidGraph, "tree_roots has {root}, but there are {count} nodes"));
    }
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
    let leaves = Leaves::new(leaves.len(), &leaves)?;
    let input = cx.node.bound_dtype("T");
    let forest = Forest::new(cx, input, (&roots, &branches), &leaves)?;
    Ok(Box::new(TreeEnsemble { forest, aggregate, transform }))
}

/// Reads the nodes, followed by one leaf per edge that leads to a leaf. Edges may share a leaf in
/// the model, but the forest requires a tree.
fn read_nodes(attrs: &Attributes, leaves: usize) -> Result<Vec<Branch>> {
    let modes = attrs.tensor("nodes_modes")?.view().to_ints()?;
    let splits = doubles(&attrs.tensor("nodes_splits")?.view())?;
    let count = modes.len();
    ensure!(splits.len() == count, InvalidGraph, "nodes_splits has {} elements, not {count}", splits.len());
    let features = indices(attrs, "nodes_featureids", Some(count))?;
    let side = |ids: &str, leaf: &str| -> Result<(Vec<usize>, Vec<usize>)> {
        Ok((indices(attrs, ids, Some(count))?, indices(attrs, leaf, Some(count))?))
    };
    let yes = side("nodes_truenodeids", "nodes_trueleafs")?;
    let no = side("nodes_falsenodeids", "nodes_falseleafs")?;
    let missing = attrs.find_ints("nodes_missing_value_tracks_true").unwrap_or(&[]);
    let members = match attrs.find_tensor("membership_values") {
        Some(members) => doubles(&members.view())?,
        None => Vec::new(),
    };
    // The membership sets are concatenated, each terminated by a NaN.
    let mut sets = members.split(|member| member.is_nan());
    // `ends` collects the leaves, which follow the nodes in the result.
    let mut branches = Vec::with_capacity(count);
    let mut ends = Vec::new();
    for (index, ((mode, &split), &feature)) in modes.into_iter().zip(&splits).zip(&features).enumerate() {
        let missing = missing.get(index).is_some_and(|&flag| flag != 0);
        let comparison = match mode {
            0 => Some(Comparison::LessOrEqual),
            1 => Some(Comparison::Less),
            2 => Some(Comparison::GreaterOrEqual),
            3 => Some(Comparison::Greater),
            4 => Some(Comparison::Equal),
            5 => Some(Comparison::NotEqual),
            6 => None,
            other => return Err(error!(InvalidGraph, "mode {other} of node {index} is not known")),
        };
        let test = match comparison {
            Some(comparison) => Test::compare(comparison, split, missing),
            // A model with fewer sets than tests gets empty ones, which no number is in.
            None => Test::member(sets.next().unwrap_or(&[]), missing),
        };
        let mut next = |(ids, are_leaves): &(Vec<usize>, Vec<usize>)| {
            let (id, is_leaf) =
                (ids.get(index).copied(), are_leaves.get(index).is_some_and(|&leaf| leaf != 0));
            // Ids count leaves or nodes, each from 0.
            let known = if is_leaf { leaves } else { count };
            let id = id.filter(|&id| id < known);
            let id = id.ok_or_else(|| error!(InvalidGraph, "node {index} leads to what is not there"))?;
            if is_leaf {
                ends.push(Branch::leaf(id));
            }
            // Leaves follow the `count` nodes, so this is the one that was just pushed.
            Ok::<_, ort_core::Error>(if is_leaf { count + ends.len() - 1 } else { id })
        };
        let next = Some((next(&yes)?, next(&no)?));
        branches.push(Branch { feature, test, next, leaf: 0 });
    }
    branches.append(&mut ends);
    Ok(branches)
}

impl Executable for TreeEnsemble {
    fn workspace(&self, shapes: &IoShapes<'_>) -> Result<usize> {
        self.forest.workspace(Shape::new(shapes.input(0), shapes.output(0))?, shapes.threads)
    }

    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.input(0)?;
        let workspace = cx.workspace()?;
        let output = cx.output(0)?;
        let request = Request {
            input,
            shape: Shape::new(input.shape(), output.shape())?,
            aggregate: self.aggregate,
            threads: cx.threads(),
            workspace,
        };
        let dtype = output.dtype();
        for_each_type!(dtype in [F32, F16, F64], T => {
            let scores = output.as_mut_slice::<T>()?;
            self.forest.run(request, scores, &|row, _| {
                self.transform.apply(row);
                0
            })?;
            Ok(())
        }, else => Err(error!(NotImplemented, "scores of {} are not supported", DType::name(dtype))))
    }
}
