//! Modules of the on-device training API: losses and gradients of batches.

use std::collections::BTreeSet;
use std::path::Path;

use ort_core::dtype::DType;
use ort_core::ep::Precision;
use ort_core::ir::{Graph, ValueId};
use ort_core::onnx::{ModelInfo, Weights, save};
use ort_core::session::{Model, ProviderRequest};
use ort_core::tensor::{Tensor, TensorBuffer, Value, element_count};
use ort_core::{Result, Within, advise, ensure, error};

use super::CheckpointState;
use super::shared::Shared;
use crate::artifacts::{Description, TrainingDescription, check_trained, put_in};
use crate::values::LOSS;
use crate::{Optimizer, Recompute, StepMemory, Trainer, TrainingOptions};

/// The options of a [`Module`].
#[derive(Clone, Debug)]
pub struct ModuleOptions {
    /// The memory limit in bytes on parameters, optimizer state, gradients and activations
    /// together.
    pub memory_limit: Option<usize>,
    /// Which activations the backward pass recomputes instead of keeping them.
    pub recompute: Recompute,
    /// The execution providers, in order of preference. By default the CPU. It replaces ONNX
    /// Runtime's `device`.
    pub providers: Vec<ProviderRequest>,
    /// The intra-op threads. By default all cores that this process may use.
    pub threads: Option<usize>,
    /// The precision of matmuls on the CPU provider.
    pub precision: Precision,
    /// The seed of the random number generator.
    pub seed: u64,
}

impl Default for ModuleOptions {
    fn default() -> ModuleOptions {
        let TrainingOptions { memory_limit, recompute, providers, threads, precision, seed, .. } =
            TrainingOptions::default();
        ModuleOptions { memory_limit, recompute, providers, threads, precision, seed }
    }
}

/// A model in training. In training mode a call accumulates the gradients of its batch. In
/// evaluation mode it only computes the loss.
pub struct Module {
    state: CheckpointState,
    training: bool,
    evaluates: bool,
    trained: Vec<String>,
}

impl Module {
    /// Creates a module from a training model, an evaluation model (needed for [`Self::eval`]) and
    /// a state. A state can have only one module.
    ///
    /// # Errors
    ///
    /// A file is not an artifact of its kind, the files belong to different training runs, or the
    /// training run does not fit into the memory limit.
    pub fn new(
        train_model: impl AsRef<Path>,
        state: &CheckpointState,
        eval_model: Option<&Path>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let mut shared = state.lock();
        ensure!(
            shared.trainer.is_none(),
            InvalidArgument,
            help = "load the checkpoint once more",
            "the state has a module already"
        );
        let (model, described) = load(train_model.as_ref())?;
        let Description::Training(description) = described else {
            return Err(is_another(train_model.as_ref(), &described, "a training model"));
        };
        check_state(&shared, &description).within(|| train_model.as_ref().display().to_string())?;
        let mut trainer = trainer(&model, &shared, &description, options)?;
        if let Some(path) = eval_model {
            trainer.evaluation = Some(evaluation(path, &shared, &description)?);
        }
        shared.trainer = Some(trainer);
        let (trained, evaluates) = (description.trained, eval_model.is_some());
        Ok(Module { state: state.clone(), training: true, evaluates, trained })
    }

    /// Computes the loss of a batch, whose inputs are in the order of [`Self::input_names`]. In
    /// training mode it also accumulates the gradients.
    ///
    /// # Errors
    ///
    /// An input does not fit, the step exceeds the memory limit, a nominal checkpoint was not
    /// completed, or there is no evaluation model.
    pub fn call(&mut self, inputs: &[Value]) -> Result<f32> {
        let mut shared = self.state.lock();
        shared.check_complete()?;
        let names = shared.trainer()?.training.inputs.clone();
        ensure!(
            names.len() == inputs.len(),
            InvalidArgument,
            help = format!("give {} in this order", names.join(", ")),
            "{} inputs, expected {}",
            inputs.len(),
            names.len()
        );
        let given: Vec<(&str, Value)> =
            names.iter().map(String::as_str).zip(inputs.iter().cloned()).collect();
        if !self.training {
            ensure!(
                self.evaluates,
                InvalidArgument,
                help = "give Module::new the evaluation model",
                "the module has no evaluation model"
            );
            return shared.trainer()?.eval_step(&given);
        }
        // The reset is cleared only after the batch has succeeded, so that a failed one can be
        // repeated.
        let begins = shared.resets || shared.trainer()?.pending == 0;
        let loss = shared.trainer()?.accumulate_onto(&given, begins)?;
        shared.resets = false;
        Ok(loss)
    }

    /// Returns one of the additional outputs of the last call.
    ///
    /// # Errors
    ///
    /// There is no output of this name, or another operation ran since the call.
    pub fn output(&self, name: &str) -> Result<Value> {
        self.state.lock().trainer()?.output(name)
    }

    /// Selects training mode or evaluation mode.
    pub fn train(&mut self, mode: bool) -> &mut Module {
        self.training = mode;
        self
    }

    /// Selects evaluation mode: no dropout, normalization by running statistics, and no state
    /// changes.
    pub fn eval(&mut self) -> &mut Module {
        self.train(false)
    }

    /// Whether the module is in training mode.
    pub fn is_training(&self) -> bool {
        self.training
    }

    /// Makes the next batch in training mode overwrite the gradient accumulators. No memory is
    /// cleared.
    pub fn lazy_reset_grad(&self) {
        self.state.lock().resets = true;
    }

    /// Returns the names of the inputs of a call: those of the model, then that of the loss.
    pub fn input_names(&self) -> Result<Vec<String>> {
        Ok(self.state.lock().trainer()?.training.inputs.clone())
    }

    /// Returns the names of the outputs of a call: `loss`, then the additional outputs.
    pub fn output_names(&self) -> Result<Vec<String>> {
        let additional = self.state.lock().trainer()?.options.additional_outputs.clone();
        Ok(std::iter::once(LOSS.to_string()).chain(additional).collect())
    }

    /// Returns the memory of a call in training mode with these sizes of symbolic dimensions,
    /// including parameters and optimizer state. It is known before the first call.
    pub fn memory(&self, dims: &[(&str, i64)]) -> Result<StepMemory> {
        self.state.lock().trainer()?.memory(dims)
    }

    /// Returns the number of elements of all parameters, or of the trained ones.
    pub fn get_parameters_size(&self, trainable_only: bool) -> Result<usize> {
        let shared = self.state.lock();
        self.names(&shared, trainable_only).iter().map(|name| element_count(&shared.kept(name)?.shape)).sum()
    }

    /// Returns the elements of all parameters, or of the trained ones, concatenated in the order of
    /// their names.
    ///
    /// # Errors
    ///
    /// A parameter is not of float32.
    pub fn get_contiguous_parameters(&self, trainable_only: bool) -> Result<Tensor> {
        let count = self.get_parameters_size(trainable_only)?;
        let mut shared = self.state.lock();
        let mut all = TensorBuffer::new(DType::F32, &[count])?;
        let mut rest = all.as_mut_slice::<f32>()?;
        for name in self.names(&shared, trainable_only) {
            let elements = shared.value(&name)?.to_vec::<f32>().within(|| format!("parameter '{name}'"))?;
            let (part, behind) = rest
                .split_at_mut_checked(elements.len())
                .ok_or_else(|| error!(Fail, "the parameters have more elements than their shapes declare"))?;
            part.copy_from_slice(&elements);
            rest = behind;
        }
        all.tensor()
    }

    /// Sets the parameters from a buffer in the layout of [`Self::get_contiguous_parameters`]. This
    /// completes a nominal checkpoint.
    ///
    /// # Errors
    ///
    /// The buffer has another size or type, or frozen parameters would change. In these cases
    /// nothing has changed.
    pub fn copy_buffer_to_parameters(&self, buffer: &Tensor, trainable_only: bool) -> Result<()> {
        let count = self.get_parameters_size(trainable_only)?;
        ensure!(
            buffer.dtype() == DType::F32 && buffer.shape() == [count],
            InvalidArgument,
            "a buffer of {}{:?}, expected {}{:?}",
            buffer.dtype(),
            buffer.shape(),
            DType::F32,
            [count]
        );
        let elements = buffer.to_vec::<f32>()?;
        let mut shared = self.state.lock();
        // Two passes: all values are checked before the first is written, so that an error changes
        // nothing.
        let (mut rest, mut parts) = (elements.as_slice(), Vec::new());
        for name in self.names(&shared, trainable_only) {
            let shape = shared.kept(&name)?.shape.clone();
            let (part, behind) = rest
                .split_at_checked(element_count(&shape)?)
                .ok_or_else(|| error!(Fail, "the parameters have more elements than their shapes declare"))?;
            let tensor = Tensor::from_slice(&shape, part)?;
            shared.check_value(&name, &tensor)?;
            parts.push((name, tensor));
            rest = behind;
        }
        parts.iter().try_for_each(|(name, tensor)| shared.set_value(name, tensor))
    }

    /// The state that the module was created from.
    pub(super) fn state(&self) -> &CheckpointState {
        &self.state
    }

    /// The names of the trained parameters.
    pub(super) fn trained(&self) -> &[String] {
        &self.trained
    }

    /// The names of all parameters, or of the trained ones.
    fn names(&self, shared: &Shared, trainable_only: bool) -> Vec<String> {
        if trainable_only { self.trained.clone() } else { shared.parameters.keys().cloned().collect() }
    }

    /// Writes the model from its inputs to the values `graph_output_names`, with the current
    /// parameters, as ONNX. The file appears complete or not at all.
    ///
    /// # Errors
    ///
    /// The model has no such value, or the file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        let mut shared = self.state.lock();
        shared.check_complete()?;
        let mut graph = shared.trainer()?.trained_graph()?;
        ensure!(!graph_output_names.is_empty(), InvalidArgument, "the model has no outputs");
        let mut outputs = Vec::with_capacity(graph_output_names.len());
        for name in graph_output_names {
            let known: Vec<&str> = graph.value_ids().map(|id| &*graph.value(id).name).collect();
            outputs.push(graph.find_value(name).ok_or_else(|| {
                error!(InvalidArgument, "the model has no value '{name}'").help(advise("values", name, known))
            })?);
        }
        keep_only(&mut graph, outputs);
        save(&graph, &ModelInfo::default(), path, &Weights::Inside)
    }
}

/// Makes these values the outputs, and removes dead nodes, inputs and constants.
fn keep_only(graph: &mut Graph, outputs: Vec<ValueId>) {
    let mut needed: BTreeSet<ValueId> = outputs.iter().copied().collect();
    let nodes = std::mem::take(&mut graph.nodes);
    // In reverse, the readers of a node come before it.
    for node in nodes.into_iter().rev() {
        if node.outputs.iter().flatten().any(|output| needed.contains(output)) {
            needed.extend(node.reads());
            graph.nodes.push(node);
        }
    }
    graph.nodes.reverse();
    graph.inputs.retain(|input| needed.contains(input));
    graph.constants.retain(|value, _| needed.contains(value));
    graph.outputs = outputs;
}

/// Loads a model and its description.
pub(super) fn load(path: &Path) -> Result<(Model, Description)> {
    let model = Model::load(path)?;
    let described = Description::of(model.info()).within(|| path.display().to_string())?;
    Ok((model, described))
}

/// The error for an artifact of another kind.
pub(super) fn is_another(path: &Path, found: &Description, expected: &str) -> ort_core::Error {
    error!(InvalidArgument, "'{}' is {}, expected {expected}", path.display(), found.kind())
}

/// Fails if the state's parameters are not those of this training run.
fn check_state(shared: &Shared, description: &TrainingDescription) -> Result<()> {
    let expected: BTreeSet<String> = description.all().into_iter().collect();
    let found: BTreeSet<String> = shared.parameters.keys().cloned().collect();
    if let Some(name) = expected.symmetric_difference(&found).next() {
        return Err(error!(
            InvalidArgument,
            "parameter '{name}' is {} the checkpoint",
            if found.contains(name) { "only in" } else { "not in" }
        )
        .help("use a model and a checkpoint of the same training run"));
    }
    Ok(())
}

/// Gives parameters the tensors that a graph is compiled with. Tensors that a nominal checkpoint
/// leaves out are zero.
fn put_parameters(graph: &mut Graph, shared: &Shared, names: Vec<String>) -> Result<()> {
    let tensor = |name: String| {
        let kept = shared.kept(&name)?;
        let tensor = match &kept.tensor {
            Some(tensor) => tensor.clone(),
            None => TensorBuffer::new(kept.dtype, &kept.shape)?.tensor()?,
        };
        Ok((name, tensor))
    };
    put_in(graph, names.into_iter().map(tensor).collect::<Result<_>>()?)
}

/// Creates the trainer behind a module.
fn trainer(
    model: &Model,
    shared: &Shared,
    description: &TrainingDescription,
    options: ModuleOptions,
) -> Result<Trainer> {
    let mut graph = model.graph().clone();
    put_parameters(&mut graph, shared, description.all())?;
    let ModuleOptions { memory_limit, recompute, providers, threads, precision, seed } = options;
    let options = TrainingOptions {
        loss: description.loss.clone(),
        output: Some(description.output.clone()),
        // A placeholder until [`super::Optimizer`] replaces it: it needs no state.
        optimizer: Optimizer::sgd(),
        trainable: description.trained.clone(),
        additional_outputs: description.additional_outputs.clone(),
        // Gradients are always summed, over any number of batches: the trainer must never update by
        // itself.
        accumulate: usize::MAX,
        memory_limit,
        recompute,
        providers,
        threads,
        precision,
        seed,
        ..TrainingOptions::default()
    };
    let trainer = Trainer::new(&Model::from_graph(graph), options)?;
    check_trained(&trainer.training, &description.trained)?;
    Ok(trainer)
}

/// Loads the evaluation graph of a file. Only frozen parameters become constants. The others
/// change, so they stay inputs.
fn evaluation(path: &Path, shared: &Shared, description: &TrainingDescription) -> Result<Graph> {
    let (model, described) = load(path)?;
    let Description::Evaluation(own) = &described else {
        return Err(is_another(path, &described, "an evaluation model"));
    };
    ensure!(
        own == description,
        InvalidArgument,
        help = "use models that were generated together",
        "'{}' does not belong to the training model",
        path.display()
    );
    let mut graph = model.graph().clone();
    put_parameters(&mut graph, shared, description.frozen.clone())?;
    Ok(graph)
}
