//! Warnings before a training run: models, flags and data that are valid but probably a mistake.

use ort_runtime::Model;
use ort_runtime::ir::Graph;
use ort_runtime::train::{Loss, TrainingGraph, TrainingOptions};

use super::data::DataSet;
use crate::output::listed;

/// Warns of an activation before the loss, and of weights that are tied, untied or not trained
/// unexpectedly.
pub(super) fn warn(model: &Model, training: &TrainingGraph, loss: &Loss) {
    if let Some(warning) = activation_before_loss(model.graph(), training.output(), loss) {
        tracing::warn!("{warning}");
    }
    let merged = training.shared_weights().iter().filter(|weight| weight.by_normalizations);
    let merged: Vec<String> =
        merged.map(|weight| format!("'{}' ({} nodes)", weight.name, weight.readers.len())).collect();
    if !merged.is_empty() {
        tracing::warn!(
            "weights of several normalizations train as one: {}; exporters merge equal initializers: --untie NAME \
             gives each normalization its own",
            listed(&merged)
        );
    }
    let equal: Vec<String> = training
        .equal_weights()
        .iter()
        .map(|pair| {
            let relation = if pair.transposed { "is the transpose of" } else { "equals" };
            format!("'{}' {relation} '{}'", pair.second, pair.first)
        })
        .collect();
    if !equal.is_empty() {
        tracing::warn!(
            "weights of the same numbers train apart: {}; exporters copy or transpose tied weights: --tie PATTERN \
             makes them one",
            listed(&equal)
        );
    }
    let scalars = training.untrained_scalars();
    if !scalars.is_empty() {
        tracing::warn!(
            "weights of rank 0 are not trained: {}; --train NAME beside patterns for the others trains one",
            listed(scalars)
        );
    }
    let constants = training.untrained_constants();
    if !constants.is_empty() {
        tracing::warn!(
            "buffers and constants are not trained: {}; --train NAME beside patterns for the others trains one",
            listed(constants)
        );
    }
    let doubtful = training.doubtful_weights();
    if !doubtful.is_empty() {
        tracing::warn!(
            "weights that may be constants are trained: {}; the exporter made up their names: --freeze NAME keeps one",
            listed(doubtful)
        );
    }
    let has_one = |shape: &[usize]| !shape.is_empty() && shape.iter().all(|size| *size == 1);
    let single = training.parameters().iter().filter(|it| has_one(it.tensor.shape()));
    let single: Vec<String> = single.map(|it| format!("'{}'", it.name)).collect();
    if !single.is_empty() {
        tracing::warn!(
            "weights of one element are trained: {}; --freeze NAME keeps one that is a constant of the exporter",
            listed(&single)
        );
    }
    for weight in training.shared_weights() {
        tracing::info!("weight '{}' serves {}", weight.name, listed(&weight.readers));
    }
    tracing::info!(
        "trained: {}",
        training.parameters().iter().map(|it| it.name.as_str()).collect::<Vec<_>>().join(", ")
    );
    tracing::info!("frozen: {}", training.frozen().join(", "));
}

/// Warns of flags that have no effect, because the model has no nodes of the kind they control.
pub(super) fn warn_of_ignored_flags(model: &Model, options: &TrainingOptions) {
    let flags = [
        ("--freeze-statistics", options.freeze_statistics, "BatchNormalization"),
        ("--no-dropout", !options.dropout, "Dropout"),
    ];
    for (flag, is_given, op) in flags {
        if is_given && !has_node(model.graph(), op) {
            tracing::warn!("{flag} has no effect: the model has no {op}");
        }
    }
}

/// Returns whether the graph or a subgraph has a node of this standard operator.
fn has_node(graph: &Graph, op: &str) -> bool {
    graph.nodes.iter().any(|node| {
        let is_one = node.spec.domain.is_empty() && node.spec.name == op;
        is_one || node.subgraphs.iter().any(|body| has_node(&body.graph, op))
    })
}

/// Warns of an activation that the loss applies again: it expects logits. Applied twice, the
/// activation nearly makes gradients vanish.
fn activation_before_loss(graph: &Graph, output: &str, loss: &Loss) -> Option<String> {
    let (activation, name) = match loss {
        Loss::CrossEntropy { .. } => ("Softmax", "cross-entropy"),
        Loss::BceWithLogits => ("Sigmoid", "bce"),
        _ => return None,
    };
    let value = graph.find_value(output)?;
    let maker = graph.nodes.iter().find(|node| node.outputs.contains(&Some(value)))?;
    if maker.spec.name != activation {
        return None;
    }
    let before = maker.inputs.first().copied().flatten().map(|id| graph.value(id).name.to_string())?;
    Some(format!(
        "output '{output}' comes from {activation}, and --loss {name} takes logits: take what goes into it, \
         --output-name '{before}'"
    ))
}

/// Warns that the class axis was guessed, if the labels fit another axis as well.
pub(super) fn warn_of_class_axis(training: &TrainingGraph, loss: &Loss, data: &DataSet) {
    let Loss::CrossEntropy { class_axis: None, .. } = loss else { return };
    let graph = training.graph();
    let scores = graph.find_value(training.output()).and_then(|id| graph.value(id).ty.shape());
    let (Some([_, second, classes]), Some(labels)) = (scores, data.array("labels")) else { return };
    // Labels [N, L] fit scores [N, C, L] and scores [N, L, C] if C equals L.
    let places = labels.shape().get(1).and_then(|&size| i64::try_from(size).ok());
    if places.is_some() && classes.as_constant() == places && second.as_constant() == places {
        tracing::warn!(
            "classes are taken to be on axis 2 of '{}', the last; axis 1 is as long: if the model has PyTorch's layout \
             [N, C, L], say --class-axis 1",
            training.output()
        );
    }
}
