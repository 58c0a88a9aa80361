//! The state of a training: parameters, properties, and the optimizer's states where there are
//! some.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ort_core::dtype::DType;
use ort_core::tensor::Tensor;
use ort_core::{Result, Within, advise, ensure, error};
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::files;
use crate::Trainer;
use crate::state::State;
use crate::trainer::gradient_name;

/// The state of a training. Clones share it, and so do the [`Module`](super::Module) and the
/// [`Optimizer`](super::Optimizer) that are made of it.
#[derive(Clone)]
pub struct CheckpointState {
    shared: Arc<Mutex<Shared>>,
}

/// A parameter as it is now, a copy.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The name of the model's initializer.
    pub name: String,
    /// Its value.
    pub data: Tensor,
    /// The sum of its gradients; none before the first batch, and for what is not trained.
    pub grad: Option<Tensor>,
    /// Whether it is trained.
    pub requires_grad: bool,
}

/// A property of a state: what a user wants to find again with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Property {
    /// An integer.
    Int(i64),
    /// A finite number.
    Float(f64),
    /// Text.
    String(String),
}

impl From<i64> for Property {
    fn from(value: i64) -> Property {
        Property::Int(value)
    }
}

impl From<f64> for Property {
    fn from(value: f64) -> Property {
        Property::Float(value)
    }
}

impl From<&str> for Property {
    fn from(value: &str) -> Property {
        Property::String(value.to_string())
    }
}

/// What [`CheckpointState`], [`Module`](super::Module) and [`Optimizer`](super::Optimizer) share.
#[derive(Default)]
pub(super) struct Shared {
    /// In order of their names.
    pub(super) parameters: BTreeMap<String, Kept>,
    pub(super) properties: BTreeMap<String, Property>,
    /// States from a checkpoint, until an optimizer takes them.
    pub(super) optimizer: Option<OptimizerState>,
    pub(super) trainer: Option<Trainer>,
    /// Whether the training has an optimizer of the user's.
    pub(super) has_optimizer: bool,
    /// Whether sums of gradients begin anew with the next batch.
    pub(super) resets: bool,
}

/// A parameter as the checkpoint has it. While there is a trainer, that has the values of those
/// that change.
#[derive(Clone, Debug)]
pub(super) struct Kept {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) requires_grad: bool,
    /// None in a nominal checkpoint, until it is set.
    pub(super) tensor: Option<Tensor>,
}

/// An optimizer's states.
#[derive(Clone, Debug)]
pub(super) struct OptimizerState {
    pub(super) optimizer: crate::Optimizer,
    pub(super) updates: u64,
    pub(super) learning_rate: f32,
    pub(super) tensors: BTreeMap<String, Tensor>,
}

impl CheckpointState {
    /// The state in a file of [`Self::save_checkpoint`] or
    /// [`generate_artifacts`](crate::generate_artifacts). The file is mapped.
    ///
    /// # Errors
    ///
    /// There is no such file, or it is no checkpoint, or damaged.
    pub fn load_checkpoint(path: impl AsRef<Path>) -> Result<CheckpointState> {
        let path = path.as_ref();
        let shared = files::load(path).within(|| format!("checkpoint '{}'", path.display()))?;
        Ok(CheckpointState { shared: Arc::new(Mutex::new(shared)) })
    }

    /// Writes parameters and properties into one file, and the optimizer's states and learning rate
    /// where asked for; sums of gradients are not in it.
    ///
    /// # Errors
    ///
    /// A nominal checkpoint was not completed, there is no optimizer, or the file cannot be
    /// written; then it holds what it held before.
    pub fn save_checkpoint(&self, path: impl AsRef<Path>, include_optimizer_state: bool) -> Result<()> {
        let path = path.as_ref();
        let mut shared = self.lock();
        files::save(&mut shared, path, files::Contents { values: true, optimizer: include_optimizer_state })
            .within(|| format!("checkpoint '{}'", path.display()))
    }

    /// The same without the values of trained parameters.
    pub(crate) fn save_nominal(&self, path: &Path) -> Result<()> {
        let mut shared = self.lock();
        files::save(&mut shared, path, files::Contents { values: false, optimizer: false })
            .within(|| format!("checkpoint '{}'", path.display()))
    }

    /// A state of tensors by name, and whether they are trained.
    pub(crate) fn of(tensors: BTreeMap<String, (Tensor, bool)>) -> CheckpointState {
        let kept = |(name, (tensor, requires_grad)): (String, (Tensor, bool))| {
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            (name, Kept { dtype, shape, requires_grad, tensor: Some(tensor) })
        };
        let parameters = tensors.into_iter().map(kept).collect();
        let shared = Shared { parameters, ..Shared::default() };
        CheckpointState { shared: Arc::new(Mutex::new(shared)) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// The names of the parameters, in order: trained, frozen, and running statistics.
    pub fn parameter_names(&self) -> Vec<String> {
        self.lock().parameters.keys().cloned().collect()
    }

    /// A parameter.
    ///
    /// # Errors
    ///
    /// There is none of this name, or a nominal checkpoint was not completed.
    pub fn parameter(&self, name: &str) -> Result<Parameter> {
        let mut shared = self.lock();
        let requires_grad = shared.kept(name)?.requires_grad;
        let (data, grad) = (shared.value(name)?, shared.gradient(name)?);
        Ok(Parameter { name: name.to_string(), data, grad, requires_grad })
    }

    /// All parameters, in order of their names.
    pub fn parameters(&self) -> Result<Vec<Parameter>> {
        self.parameter_names().iter().map(|name| self.parameter(name)).collect()
    }

    /// Sets the value of a parameter. Those that are not trained are set before a module is made.
    ///
    /// # Errors
    ///
    /// There is none of this name, or the tensor has another type or shape.
    pub fn set_parameter(&self, name: &str, data: &Tensor) -> Result<()> {
        self.lock().set_value(name, data)
    }

    /// The names of the properties, in order.
    pub fn property_names(&self) -> Vec<String> {
        self.lock().properties.keys().cloned().collect()
    }

    /// A property; none where there is none of this name.
    pub fn property(&self, name: &str) -> Option<Property> {
        self.lock().properties.get(name).cloned()
    }

    /// Sets a property.
    ///
    /// # Errors
    ///
    /// It is a number that is not finite.
    ///
    /// ```no_run
    /// # let state = ort_train::api::CheckpointState::load_checkpoint("checkpoint")?;
    /// state.set_property("epoch", 7)?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn set_property(&self, name: &str, value: impl Into<Property>) -> Result<()> {
        let value = value.into();
        if let Property::Float(number) = value {
            ensure!(
                number.is_finite(),
                InvalidArgument,
                "property '{name}' is {number}, expected a finite number"
            );
        }
        self.lock().properties.insert(name.to_string(), value);
        Ok(())
    }
}

impl Shared {
    pub(super) fn kept(&self, name: &str) -> Result<&Kept> {
        self.parameters.get(name).ok_or_else(|| {
            let known = self.parameters.keys().map(String::as_str);
            error!(InvalidArgument, "there is no parameter '{name}'").help(advise("parameters", name, known))
        })
    }

    /// The training, where a module was made.
    pub(super) fn trainer(&mut self) -> Result<&mut Trainer> {
        self.trainer.as_mut().ok_or_else(|| error!(Fail, "the state has no module"))
    }

    /// The tensors of the training, where it has one of this name.
    fn changing(&mut self, name: &str) -> Option<&mut State> {
        let trainer = self.trainer.as_mut()?;
        trainer.leave();
        Some(&mut trainer.state).filter(|state| state.get(name).is_ok())
    }

    /// The value of a parameter.
    pub(super) fn value(&mut self, name: &str) -> Result<Tensor> {
        let kept = self.kept(name)?.tensor.clone();
        if kept.is_none() {
            return Err(incomplete(name));
        }
        match self.changing(name) {
            Some(state) => state.tensor(name),
            None => kept.ok_or_else(|| incomplete(name)),
        }
    }

    fn gradient(&mut self, name: &str) -> Result<Option<Tensor>> {
        if self.trainer.as_ref().is_none_or(|trainer| trainer.pending == 0) {
            return Ok(None);
        }
        let name = gradient_name(name);
        self.changing(&name).map(|state| state.tensor(&name)).transpose()
    }

    /// Refuses a tensor that a parameter cannot become.
    pub(super) fn check_value(&mut self, name: &str, data: &Tensor) -> Result<()> {
        let kept = self.kept(name)?;
        ensure!(
            data.dtype() == kept.dtype && data.shape() == kept.shape,
            InvalidArgument,
            "parameter '{name}' is {}{:?}, expected {}{:?}",
            data.dtype(),
            data.shape(),
            kept.dtype,
            kept.shape
        );
        let is_same = kept.tensor.as_ref().is_some_and(|before| before.bytes() == data.bytes());
        ensure!(
            self.trainer.is_none() || is_same || self.changing(name).is_some(),
            NotImplemented,
            help = "set it before the module is made",
            "parameter '{name}' is frozen, and a module is compiled with its value"
        );
        Ok(())
    }

    pub(super) fn set_value(&mut self, name: &str, data: &Tensor) -> Result<()> {
        self.check_value(name, data)?;
        ensure!(data.bytes().is_some(), InvalidArgument, "'{name}' is not in host memory");
        if let Some(state) = self.changing(name) {
            state.write(name, data)?;
        }
        let is_nominal = self.kept(name)?.tensor.is_none();
        // The training has the values of what changes: here it only says that there is one.
        if let Some(kept) = self.parameters.get_mut(name).filter(|_| self.trainer.is_none() || is_nominal) {
            kept.tensor = Some(data.clone());
        }
        Ok(())
    }

    /// Refuses to go on with parameters that have no values.
    pub(super) fn check_complete(&self) -> Result<()> {
        let missing = self.parameters.iter().find(|(_, kept)| kept.tensor.is_none());
        missing.map_or(Ok(()), |(name, _)| Err(incomplete(name)))
    }
}

fn incomplete(name: &str) -> ort_core::Error {
    error!(InvalidArgument, "parameter '{name}' has no value: the checkpoint is nominal")
        .help("complete it by copy_buffer_to_parameters")
}
