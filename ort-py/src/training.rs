//! Training with the classes of `onnxruntime.training.api`, and the artifacts that it starts from.
//!
//! What programs see is Python, in `ort_runtime/training`.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use numpy::PyUntypedArray;
use ort_runtime::train::{ArtifactOptions, Loss, Optimizer, Recompute, api, generate_artifacts};
use ort_runtime::{Error, ErrorKind, Result as EngineResult, Tensor, Value};
use parking_lot::Mutex;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::{array_of, tensor_of};
use crate::build::{self, Settings};
use crate::cancel::detached;
use crate::error::OrRaise;
use crate::ort_value::OrtValue;

/// Options of [`write_artifacts`], which Python writes as JSON.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Given {
    requires_grad: Vec<String>,
    frozen_params: Vec<String>,
    loss: Option<Loss>,
    optimizer: Option<Optimizer>,
    clip_grad: Option<f32>,
    artifact_directory: Option<PathBuf>,
    prefix: String,
    additional_output_names: Vec<String>,
    nominal_checkpoint: bool,
    loss_input_names: Vec<String>,
}

/// Writes the artifacts of a model, which is a path or bytes.
#[pyfunction]
pub(crate) fn write_artifacts(
    py: Python<'_>,
    model: &Bound<'_, PyAny>,
    session_options: &Bound<'_, PyAny>,
    options: &str,
) -> PyResult<()> {
    let source = match model.cast::<PyBytes>() {
        Ok(bytes) => build::wrap(session_options, bytes)?,
        Err(_) => build::open(session_options, &model.extract::<String>()?)?,
    };
    let model = build::load(session_options, source)?;
    let given: Given = serde_json::from_str(options)
        .map_err(|problem| Error::new(ErrorKind::InvalidArgument, format!("{options}: {problem}")))
        .or_raise(py)?;
    let options = ArtifactOptions {
        requires_grad: given.requires_grad,
        frozen_params: given.frozen_params,
        loss: given.loss,
        optimizer: given.optimizer,
        clip_grad: given.clip_grad,
        artifact_directory: given.artifact_directory,
        prefix: given.prefix,
        additional_output_names: given.additional_output_names,
        nominal_checkpoint: given.nominal_checkpoint,
        loss_input_names: given.loss_input_names,
    };
    detached(py, || generate_artifacts(&model, &options)).or_raise(py).map(drop)
}

/// A property: an `int`, a `float` or a `str`.
#[derive(FromPyObject, IntoPyObject)]
enum Property {
    Int(i64),
    Float(f64),
    Text(String),
}

/// Parameters and properties, shared with the module and the optimizer that are made from it.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct CheckpointState(api::CheckpointState);

#[pymethods]
impl CheckpointState {
    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<CheckpointState> {
        detached(py, || api::CheckpointState::load_checkpoint(path)).or_raise(py).map(CheckpointState)
    }

    fn save(&self, py: Python<'_>, path: PathBuf, include_optimizer_state: bool) -> PyResult<()> {
        detached(py, || self.0.save_checkpoint(path, include_optimizer_state)).or_raise(py)
    }

    fn parameter_names(&self, py: Python<'_>) -> Vec<String> {
        detached(py, || self.0.parameter_names())
    }

    fn requires_grad(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        Ok(self.parameter(py, name)?.requires_grad)
    }

    /// A copy of a parameter.
    fn data<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        array_of(py, &self.parameter(py, name)?.data)
    }

    /// A copy of a gradient; `None` before the first batch and for parameters that are not trained.
    fn grad<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.parameter(py, name)?.grad.map(|gradient| array_of(py, &gradient)).transpose()
    }

    fn set_data(&self, py: Python<'_>, name: &str, array: &Bound<'_, PyUntypedArray>) -> PyResult<()> {
        let tensor = tensor_of(array)?;
        detached(py, || self.0.set_parameter(name, &tensor)).or_raise(py)
    }

    fn property_names(&self, py: Python<'_>) -> Vec<String> {
        detached(py, || self.0.property_names())
    }

    fn property(&self, py: Python<'_>, name: &str) -> PyResult<Property> {
        match detached(py, || self.0.property(name)) {
            Some(api::Property::Int(value)) => Ok(Property::Int(value)),
            Some(api::Property::Float(value)) => Ok(Property::Float(value)),
            Some(api::Property::String(text)) => Ok(Property::Text(text)),
            None => Err(PyKeyError::new_err(name.to_owned())),
        }
    }

    fn set_property(&self, py: Python<'_>, name: &str, value: Property) -> PyResult<()> {
        let value = match value {
            Property::Int(value) => api::Property::Int(value),
            Property::Float(value) => api::Property::Float(value),
            Property::Text(text) => api::Property::String(text),
        };
        detached(py, || self.0.set_property(name, value)).or_raise(py)
    }
}

impl CheckpointState {
    fn parameter(&self, py: Python<'_>, name: &str) -> PyResult<api::Parameter> {
        detached(py, || self.0.parameter(name)).or_raise(py)
    }
}

/// A model in training.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct TrainingModule(Mutex<api::Module>);

#[pymethods]
impl TrainingModule {
    #[new]
    fn new(
        py: Python<'_>,
        train_model: PathBuf,
        state: &CheckpointState,
        eval_model: Option<PathBuf>,
        session_options: &Bound<'_, PyAny>,
        providers: Vec<(String, HashMap<String, String>)>,
        recompute_level: u8,
    ) -> PyResult<TrainingModule> {
        let mut options = Settings::of(session_options, &providers, Vec::new())?.module_options();
        options.recompute = Recompute::of_level(recompute_level).or_raise(py)?;
        let made = detached(py, || api::Module::new(train_model, &state.0, eval_model.as_deref(), options));
        made.or_raise(py).map(|module| TrainingModule(Mutex::new(module)))
    }

    /// Computes the loss of a batch of arrays or values, and in training mode adds its gradients.
    /// Returns the loss and the additional outputs as values.
    fn call<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, OrtValue>>> {
        let inputs = inputs.iter().map(input).collect::<PyResult<Vec<Value>>>()?;
        let outputs = detached(py, || {
            let mut module = self.0.lock();
            let loss = Tensor::scalar(module.call(&inputs)?)?;
            let names = module.output_names()?;
            let additional = names.iter().skip(1).map(|name| module.output(name));
            std::iter::once(Ok(loss.into())).chain(additional).collect::<EngineResult<Vec<Value>>>()
        });
        outputs.or_raise(py)?.into_iter().map(|value| Bound::new(py, OrtValue::of(value))).collect()
    }

    fn train(&self, py: Python<'_>, mode: bool) {
        detached(py, || {
            self.0.lock().train(mode);
        });
    }

    fn is_training(&self, py: Python<'_>) -> bool {
        detached(py, || self.0.lock().is_training())
    }

    fn lazy_reset_grad(&self, py: Python<'_>) {
        detached(py, || self.0.lock().lazy_reset_grad());
    }

    fn input_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        detached(py, || self.0.lock().input_names()).or_raise(py)
    }

    fn output_names(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        detached(py, || self.0.lock().output_names()).or_raise(py)
    }

    fn parameters_size(&self, py: Python<'_>, trainable_only: bool) -> PyResult<usize> {
        detached(py, || self.0.lock().get_parameters_size(trainable_only)).or_raise(py)
    }

    fn contiguous_parameters(&self, py: Python<'_>, trainable_only: bool) -> PyResult<OrtValue> {
        let joined = detached(py, || self.0.lock().get_contiguous_parameters(trainable_only));
        joined.or_raise(py).map(|tensor| OrtValue::of(tensor.into()))
    }

    fn copy_buffer_to_parameters(
        &self,
        py: Python<'_>,
        buffer: &OrtValue,
        trainable_only: bool,
    ) -> PyResult<()> {
        let value = buffer.value(py)?;
        let copy = || self.0.lock().copy_buffer_to_parameters(value.tensor()?, trainable_only);
        detached(py, copy).or_raise(py)
    }

    fn export_model_for_inferencing(
        &self,
        py: Python<'_>,
        path: PathBuf,
        outputs: Vec<String>,
    ) -> PyResult<()> {
        let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
        detached(py, || self.0.lock().export_model_for_inferencing(path, &outputs)).or_raise(py)
    }

    /// The bytes of a step with these sizes of dimensions, by what they are for.
    fn memory(&self, py: Python<'_>, dims: HashMap<String, i64>) -> PyResult<BTreeMap<&'static str, usize>> {
        let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let memory = detached(py, || self.0.lock().memory(&dims)).or_raise(py)?;
        Ok(BTreeMap::from([
            ("parameters", memory.parameters),
            ("states", memory.states),
            ("gradients", memory.gradients),
            ("activations", memory.activations),
            ("constants", memory.constants),
        ]))
    }
}

/// Reads an input of a call.
fn input(given: &Bound<'_, PyAny>) -> PyResult<Value> {
    if let Ok(array) = given.cast::<PyUntypedArray>() {
        return Ok(tensor_of(array)?.into());
    }
    given.cast::<OrtValue>()?.get().value(given.py())
}

/// What updates the parameters of a module.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct TrainingOptimizer(api::Optimizer);

#[pymethods]
impl TrainingOptimizer {
    #[new]
    fn new(py: Python<'_>, path: PathBuf, module: &TrainingModule) -> PyResult<TrainingOptimizer> {
        let made = detached(py, || api::Optimizer::new(path, &module.0.lock()));
        made.or_raise(py).map(TrainingOptimizer)
    }

    fn step(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.0.step()).or_raise(py)
    }

    fn learning_rate(&self, py: Python<'_>) -> PyResult<f32> {
        detached(py, || self.0.get_learning_rate()).or_raise(py)
    }

    fn set_learning_rate(&self, py: Python<'_>, learning_rate: f32) -> PyResult<()> {
        detached(py, || self.0.set_learning_rate(learning_rate)).or_raise(py)
    }
}

/// A learning rate that rises from 0 and falls to 0.
#[pyclass(frozen, module = "ort_runtime.capi.onnxruntime_pybind11_state")]
pub(crate) struct TrainingScheduler(api::LinearLRScheduler);

#[pymethods]
impl TrainingScheduler {
    #[new]
    fn new(
        py: Python<'_>,
        optimizer: &TrainingOptimizer,
        warmup_step_count: u64,
        total_step_count: u64,
        initial_lr: f32,
    ) -> PyResult<TrainingScheduler> {
        let made = detached(py, || {
            api::LinearLRScheduler::new(&optimizer.0, warmup_step_count, total_step_count, initial_lr)
        });
        made.or_raise(py).map(TrainingScheduler)
    }

    fn step(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.0.step()).or_raise(py)
    }
}
