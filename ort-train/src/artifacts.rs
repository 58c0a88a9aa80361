//! Artifacts for on-device training.
//!
//! They are the files that a training run through ONNX Runtime's API ([`crate::api`]) starts from.
//! File and option names are ONNX Runtime's. The contents are not: the training model holds only
//! the forward pass.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use ort_core::ir::{Graph, ValueId};
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_core::{Result, advise, ensure, error};
use serde::{Deserialize, Serialize};

use crate::api::CheckpointState;
use crate::assemble::apply_graph;
use crate::graph::{TrainingGraph, evaluation};
use crate::values::{named_values, values_by_name};
use crate::weights::TrainableGraph;
use crate::{Loss, Optimizer, TrainingOptions};

/// Options of [`generate_artifacts`], under the names of ONNX Runtime's function.
#[derive(Clone, Debug, Default)]
pub struct ArtifactOptions {
    /// The names of the parameters to train.
    pub requires_grad: Vec<String>,
    /// Parameters that are stored in the checkpoint and stay frozen.
    pub frozen_params: Vec<String>,
    /// The loss. Without one, the model's first output is the loss and must be a single number.
    pub loss: Option<Loss>,
    /// The optimizer, for example [`Optimizer::onnxruntime_adamw`]. Without one, no optimizer model
    /// is written.
    pub optimizer: Option<Optimizer>,
    /// The largest global gradient norm: `ClipGradNorm` of ONNX Runtime's optimizers.
    pub clip_grad: Option<f32>,
    /// The output folder, by default the current one. It is created if it does not exist.
    pub artifact_directory: Option<PathBuf>,
    /// The prefix of the file names.
    pub prefix: String,
    /// Values of the model that training and evaluation return next to the loss.
    pub additional_output_names: Vec<String>,
    /// Whether to write a nominal checkpoint as well, which leaves out the values of trained
    /// parameters.
    pub nominal_checkpoint: bool,
    /// The model output that the loss is computed from, by default the first. The loss's own input,
    /// `labels` or `target`, may follow it.
    pub loss_input_names: Vec<String>,
}

/// The files that [`generate_artifacts`] wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifacts {
    /// The forward pass with parameters as inputs, and a description of the training run.
    pub training_model: PathBuf,
    /// The forward pass and the loss.
    pub eval_model: PathBuf,
    /// The parameters with their values.
    pub checkpoint: PathBuf,
    /// The parameters, without values for those that are trained.
    pub nominal_checkpoint: Option<PathBuf>,
    /// The update of the parameters.
    pub optimizer_model: Option<PathBuf>,
}

/// Writes the files that a training run through [`crate::api`] starts from: `training_model.onnx`,
/// `eval_model.onnx` and `checkpoint`, and on request `optimizer_model.onnx` and
/// `nominal_checkpoint`.
///
/// The names of files and options are those of ONNX Runtime's `generate_artifacts`. The contents
/// are this runtime's own. The training model holds the forward pass. Its backward pass is derived
/// when a [`Module`](crate::api::Module) is created, so that the memory limit and the recomputation
/// of that moment apply. The checkpoint is a `safetensors` file. It alone stores the parameters, so
/// that models of any size have artifacts.
///
/// # Errors
///
/// A name is unknown, a parameter is both trained and frozen, a node between parameters and loss
/// has no gradient, or a file cannot be written. Each file is written completely or not at all.
///
/// ```no_run
/// use ort_core::session::Model;
/// use ort_train::{ArtifactOptions, Loss, Optimizer, generate_artifacts};
///
/// let options = ArtifactOptions {
///     requires_grad: vec!["fc.weight".into(), "fc.bias".into()],
///     loss: Some(Loss::cross_entropy()),
///     optimizer: Some(Optimizer::onnxruntime_adamw()),
///     artifact_directory: Some("artifacts".into()),
///     ..ArtifactOptions::default()
/// };
/// generate_artifacts(&Model::load("model.onnx")?, &options)?;
/// # Ok::<(), ort_core::Error>(())
/// ```
pub fn generate_artifacts(model: &Model, options: &ArtifactOptions) -> Result<Artifacts> {
    let training = training_options(options)?;
    let graph = TrainingGraph::new(model, &training)?;
    check_trained(&graph, &options.requires_grad)?;
    let description = describe(model, options, &training, &graph)?;
    let folder = options.artifact_directory.clone().unwrap_or_else(|| PathBuf::from("."));
    std::fs::create_dir_all(&folder)
        .map_err(|problem| error!(Fail, "folder '{}' cannot be created: {problem}", folder.display()))?;
    let path = |name: &str| folder.join(format!("{}{name}", options.prefix));
    let mut forward = TrainableGraph::of(model, &training)?.graph;
    let state = CheckpointState::of(tensors(&forward, &description, &graph)?);

    let training_model = path("training_model.onnx");
    // The checkpoint was taken from `forward` above, while its weights were still constants.
    take_out(&mut forward, &description.all())?;
    write(&forward, model, &training_model, &Description::Training(description.clone()))?;

    let eval_model = path("eval_model.onnx");
    let (mut evaluated, _) = evaluation(model, &graph, &training)?;
    take_out(&mut evaluated, &description.all())?;
    write(&evaluated, model, &eval_model, &Description::Evaluation(description.clone()))?;

    let checkpoint = path("checkpoint");
    state.save_checkpoint(&checkpoint, false)?;
    let nominal_checkpoint = options.nominal_checkpoint.then(|| path("nominal_checkpoint"));
    if let Some(path) = &nominal_checkpoint {
        state.save_nominal(path)?;
    }
    let optimizer_model = options.optimizer.map(|_| path("optimizer_model.onnx"));
    if let Some(path) = &optimizer_model {
        let (optimizer, clip_norm) = (training.optimizer, training.clip_norm);
        let described = OptimizerDescription { parameters: description.trained, optimizer, clip_norm };
        let update = apply_graph(&graph, &training)?.graph;
        write(&update, model, path, &Description::Optimizer(described))?;
    }
    Ok(Artifacts { training_model, eval_model, checkpoint, nominal_checkpoint, optimizer_model })
}

/// The description that an artifact carries in its metadata.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "artifact", rename_all = "snake_case")]
pub(crate) enum Description {
    Training(TrainingDescription),
    Evaluation(TrainingDescription),
    Optimizer(OptimizerDescription),
}

/// A training run without its optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TrainingDescription {
    pub(crate) loss: Loss,
    pub(crate) output: String,
    pub(crate) trained: Vec<String>,
    pub(crate) frozen: Vec<String>,
    pub(crate) statistics: Vec<String>,
    pub(crate) additional_outputs: Vec<String>,
}

impl TrainingDescription {
    /// Returns the names of all tensors in the checkpoint.
    pub(crate) fn all(&self) -> Vec<String> {
        self.trained.iter().chain(&self.frozen).chain(&self.statistics).cloned().collect()
    }
}

/// An optimizer, and the parameters that it updates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct OptimizerDescription {
    pub(crate) parameters: Vec<String>,
    pub(crate) optimizer: Optimizer,
    pub(crate) clip_norm: Option<f32>,
}

/// The metadata key of a model's description.
const KEY: &str = "ort-runtime.training";

impl Description {
    /// Parses the description in a model's metadata.
    pub(crate) fn of(info: &ModelInfo) -> Result<Description> {
        let text = info.metadata.iter().find(|(key, _)| key == KEY).map(|(_, text)| text);
        let text = text.ok_or_else(|| {
            error!(InvalidArgument, "it is not a training artifact")
                .help("write artifacts with generate_artifacts; those of other runtimes cannot be read")
        })?;
        serde_json::from_str(text).map_err(|problem| {
            error!(InvalidArgument, "its description of the training run is damaged: {problem}")
        })
    }

    /// Returns the kind of artifact, for error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Description::Training(_) => "a training model",
            Description::Evaluation(_) => "an evaluation model",
            Description::Optimizer(_) => "an optimizer model",
        }
    }
}

/// Translates the options of ONNX Runtime's function to those of a [`Trainer`](crate::Trainer).
fn training_options(options: &ArtifactOptions) -> Result<TrainingOptions> {
    ensure!(
        !options.requires_grad.is_empty(),
        InvalidArgument,
        help = "name the parameters that are trained in requires_grad",
        "no parameter requires a gradient"
    );
    let frozen: BTreeSet<&String> = options.frozen_params.iter().collect();
    if let Some(both) = options.requires_grad.iter().find(|name| frozen.contains(name)) {
        return Err(error!(
            InvalidArgument,
            "parameter '{both}' cannot be frozen and require a gradient at the same time"
        ));
    }
    // ONNX Runtime's loss has its classes on axis 1 at every rank, while our default is the last
    // axis at rank 3.
    let loss = match options.loss.clone().unwrap_or(Loss::Output) {
        Loss::CrossEntropy { label_smoothing, ignore_index, class_axis } => {
            Loss::CrossEntropy { label_smoothing, ignore_index, class_axis: class_axis.or(Some(1)) }
        }
        other => other,
    };
    if let Some(name) = options.loss_input_names.get(1) {
        let own = loss.input().unwrap_or_default();
        ensure!(
            name == own && options.loss_input_names.len() == 2,
            NotImplemented,
            help = "name only the output that the loss is computed from",
            "loss_input_names is {:?}, expected one output of the model, and '{own}' or nothing after it",
            options.loss_input_names
        );
    }
    let training = TrainingOptions {
        loss,
        output: options.loss_input_names.first().cloned(),
        // Without an optimizer model the choice is never used, and SGD needs no state.
        optimizer: options.optimizer.unwrap_or_else(Optimizer::sgd),
        clip_norm: options.clip_grad,
        trainable: options.requires_grad.clone(),
        frozen: options.frozen_params.clone(),
        additional_outputs: options.additional_output_names.clone(),
        ..TrainingOptions::default()
    };
    training.check()?;
    Ok(training)
}

/// Fails if a name denotes no trainable parameter, or if a wildcard in a name matched parameters
/// that were not asked for.
pub(crate) fn check_trained(graph: &TrainingGraph, asked: &[String]) -> Result<()> {
    let trained: BTreeSet<&String> = graph.parameters.iter().map(|parameter| &parameter.name).collect();
    for name in asked {
        ensure!(
            trained.contains(name),
            InvalidArgument,
            help = "name parameters as the model does, without patterns",
            "'{name}' is not a float parameter, so it cannot be trained"
        );
    }
    let asked: BTreeSet<&String> = asked.iter().collect();
    if let Some(name) = trained.difference(&asked).next() {
        return Err(error!(
            InvalidArgument,
            "parameter '{name}' matches a pattern and would be trained, although the list does not name it"
        )
        .help("rename weights with '*' or '?' in their names"));
    }
    Ok(())
}

/// Describes the training run, with sorted names as in a checkpoint.
fn describe(
    model: &Model,
    options: &ArtifactOptions,
    training: &TrainingOptions,
    graph: &TrainingGraph,
) -> Result<TrainingDescription> {
    // Only a check: the description keeps names, not values.
    named_values(model.graph(), &options.additional_output_names)?;
    let sorted = |names: &[String]| names.iter().collect::<BTreeSet<_>>().into_iter().cloned().collect();
    Ok(TrainingDescription {
        loss: training.loss.clone(),
        output: graph.output.clone(),
        trained: sorted(&options.requires_grad),
        frozen: sorted(&options.frozen_params),
        statistics: graph.statistics.iter().map(|it| it.name.clone()).collect(),
        additional_outputs: options.additional_output_names.clone(),
    })
}

/// Collects the contents of the checkpoint: tensors by name, and whether they are trained.
fn tensors(
    forward: &Graph,
    description: &TrainingDescription,
    graph: &TrainingGraph,
) -> Result<BTreeMap<String, (Tensor, bool)>> {
    let trained = graph.parameters.iter().map(|it| (it.name.clone(), (it.tensor.clone(), true)));
    let statistics = graph.statistics.iter().map(|it| (it.name.clone(), (it.tensor.clone(), false)));
    let mut all: BTreeMap<String, (Tensor, bool)> = trained.chain(statistics).collect();
    let values = values_by_name(forward);
    for name in &description.frozen {
        let given = |id: &ValueId| forward.constants.get(id).or_else(|| forward.input_defaults.get(id));
        let tensor = values.get(name.as_str()).and_then(given).cloned().ok_or_else(|| {
            let known = forward.constants.keys().map(|id| &*forward.value(*id).name);
            let known: Vec<&str> = known.collect();
            error!(InvalidArgument, "the model has no parameter '{name}'").help(advise(
                "parameters",
                name,
                known,
            ))
        })?;
        all.insert(name.clone(), (tensor, false));
    }
    Ok(all)
}

/// Turns weights into graph inputs, because their values are stored in the checkpoint.
fn take_out(graph: &mut Graph, names: &[String]) -> Result<()> {
    let values = values_by_name(graph);
    let mut taken = HashSet::with_capacity(names.len());
    for name in names {
        let value = values.get(name.as_str()).copied();
        let value = value.ok_or_else(|| error!(Fail, "weight '{name}' is gone"))?;
        // A name may be asked for as frozen and be a statistic at once.
        if graph.constants.contains_key(&value) && taken.insert(value) {
            graph.inputs.push(value);
        }
        graph.input_defaults.remove(&value);
    }
    graph.constants.retain(|value, _| !taken.contains(value));
    Ok(())
}

/// Turns inputs back into weights with values: the inverse of [`take_out`].
pub(crate) fn put_in(graph: &mut Graph, weights: Vec<(String, Tensor)>) -> Result<()> {
    let values = values_by_name(graph);
    let mut inputs: HashSet<ValueId> = graph.inputs.iter().copied().collect();
    for (name, tensor) in weights {
        // Removed at once, so that a name that is given twice is an error.
        let value = values.get(name.as_str()).copied().filter(|value| inputs.remove(value));
        let value = value.ok_or_else(|| error!(InvalidArgument, "it has no parameter '{name}'"))?;
        graph.constants.insert(value, tensor);
    }
    graph.inputs.retain(|input| inputs.contains(input));
    Ok(())
}

/// Writes a graph as ONNX, with its description in the metadata.
fn write(graph: &Graph, model: &Model, path: &Path, description: &Description) -> Result<()> {
    let text = serde_json::to_string(description).map_err(|problem| error!(Fail, "{problem}"))?;
    let mut info = model.info().clone();
    // The model may be an artifact itself. Then its description goes.
    info.metadata.retain(|(key, _)| key != KEY);
    info.metadata.push((KEY.to_string(), text));
    save(graph, &info, path, &Weights::Inside)
}
