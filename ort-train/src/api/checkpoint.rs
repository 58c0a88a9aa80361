//! Checkpoint state of the on-device training API: parameters, properties and optimizer state.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ort_core::tensor::Tensor;
use ort_core::{Result, Within, advise, ensure, error};
use parking_lot::{Mutex, MutexGuard};

use super::files;
use super::shared::{Kept, Property, Shared};
use crate::Trainer;
use crate::state::State;
use crate::state::gradient_name;

/// The state of a training run. Clones share it, and so do the [`Module`](super::Module) and the
/// [`Optimizer`](super::Optimizer) that are created from it.
#[derive(Clone)]
pub struct CheckpointState {
    shared: Arc<Mutex<Shared>>,
}

/// A copy of a parameter's current state.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The name of the initializer in the model.
    pub name: String,
    /// Its value.
    pub data: Tensor,
    /// Its accumulated gradient. `None` before the first batch, and for a parameter that is not
    /// trained.
    pub grad: Option<Tensor>,
    /// Whether it is trained.
    pub requires_grad: bool,
}

impl CheckpointState {
    /// Loads a file that [`Self::save_checkpoint`] or
    /// [`generate_artifacts`](crate::generate_artifacts) wrote. The file is mapped.
    ///
    /// # Errors
    ///
    /// The file does not exist, is not a checkpoint, or is damaged.
    pub fn load_checkpoint(path: impl AsRef<Path>) -> Result<CheckpointState> {
        let path = path.as_ref();
        let shared = files::load(path).within(|| format!("checkpoint '{}'", path.display()))?;
        Ok(CheckpointState { shared: Arc::new(Mutex::new(shared)) })
    }

    /// Writes parameters and properties into one file, and optionally the optimizer state and the
    /// learning rate. Accumulated gradients are not saved.
    ///
    /// # Errors
    ///
    /// A nominal checkpoint was not completed, there is no optimizer, or the file cannot be
    /// written. An existing file then keeps its old contents.
    pub fn save_checkpoint(&self, path: impl AsRef<Path>, include_optimizer_state: bool) -> Result<()> {
        let path = path.as_ref();
        let mut shared = self.lock();
        files::save(&mut shared, path, files::Contents { values: true, optimizer: include_optimizer_state })
            .within(|| format!("checkpoint '{}'", path.display()))
    }

    /// [`Self::save_checkpoint`] without the values of trained parameters.
    pub(crate) fn save_nominal(&self, path: &Path) -> Result<()> {
        let mut shared = self.lock();
        files::save(&mut shared, path, files::Contents { values: false, optimizer: false })
            .within(|| format!("checkpoint '{}'", path.display()))
    }

    /// Creates a state from tensors by name, each with whether it is trained.
    pub(crate) fn of(tensors: BTreeMap<String, (Tensor, bool)>) -> CheckpointState {
        let kept = |(name, (tensor, requires_grad)): (String, (Tensor, bool))| {
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            (name, Kept { dtype, shape, requires_grad, tensor: Some(tensor) })
        };
        let parameters = tensors.into_iter().map(kept).collect();
        let shared = Shared { parameters, ..Shared::default() };
        CheckpointState { shared: Arc::new(Mutex::new(shared)) }
    }

    /// Locks the shared state.
    pub(super) fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock()
    }

    /// Returns the sorted names of all parameters: trained and frozen ones, and running statistics.
    pub fn parameter_names(&self) -> Vec<String> {
        self.lock().parameters.keys().cloned().collect()
    }

    /// Returns a parameter.
    ///
    /// # Errors
    ///
    /// There is no parameter of this name, or a nominal checkpoint was not completed.
    pub fn parameter(&self, name: &str) -> Result<Parameter> {
        let mut shared = self.lock();
        let requires_grad = shared.kept(name)?.requires_grad;
        let (data, grad) = (shared.value(name)?, shared.gradient(name)?);
        Ok(Parameter { name: name.to_string(), data, grad, requires_grad })
    }

    /// Returns all parameters, sorted by name.
    pub fn parameters(&self) -> Result<Vec<Parameter>> {
        self.parameter_names().iter().map(|name| self.parameter(name)).collect()
    }

    /// Sets the value of a parameter. A parameter that is not trained must be set before a module
    /// is created.
    ///
    /// # Errors
    ///
    /// There is no parameter of this name, or the tensor has another type or shape.
    pub fn set_parameter(&self, name: &str, data: &Tensor) -> Result<()> {
        self.lock().set_value(name, data)
    }

    /// Returns the sorted names of the properties.
    pub fn property_names(&self) -> Vec<String> {
        self.lock().properties.keys().cloned().collect()
    }

    /// Returns a property, or `None` if there is no property of this name.
    pub fn property(&self, name: &str) -> Option<Property> {
        self.lock().properties.get(name).cloned()
    }

    /// Sets a property.
    ///
    /// # Errors
    ///
    /// The value is a number that is not finite.
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
    /// Returns the checkpoint entry of a parameter.
    pub(super) fn kept(&self, name: &str) -> Result<&Kept> {
        self.parameters.get(name).ok_or_else(|| {
            let known = self.parameters.keys().map(String::as_str);
            error!(InvalidArgument, "there is no parameter '{name}'").help(advise("parameters", name, known))
        })
    }

    /// Returns the trainer, which exists once a module was created.
    pub(super) fn trainer(&mut self) -> Result<&mut Trainer> {
        self.trainer.as_mut().ok_or_else(|| error!(Fail, "the state has no module"))
    }

    /// Returns the trainer's tensors if there is one of this name among them.
    fn changing(&mut self, name: &str) -> Option<&mut State> {
        let trainer = self.trainer.as_mut()?;
        // The attached stage owns its tensors until then.
        trainer.detach();
        Some(&mut trainer.state).filter(|state| state.get(name).is_ok())
    }

    /// Returns the current value of a parameter.
    pub(super) fn value(&mut self, name: &str) -> Result<Tensor> {
        let kept = self.kept(name)?.tensor.clone();
        // The trainer has zeros in place of a value that a nominal checkpoint leaves out.
        if kept.is_none() {
            return Err(incomplete(name));
        }
        match self.changing(name) {
            Some(state) => state.tensor(name),
            None => kept.ok_or_else(|| incomplete(name)),
        }
    }

    /// Returns the accumulated gradient of a parameter, or `None` if no batch has run or it is not
    /// trained.
    fn gradient(&mut self, name: &str) -> Result<Option<Tensor>> {
        if self.trainer.as_ref().is_none_or(|trainer| trainer.pending == 0) {
            return Ok(None);
        }
        let name = gradient_name(name);
        self.changing(&name).map(|state| state.tensor(&name)).transpose()
    }

    /// Fails if a parameter cannot take this tensor as its value.
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
        // Setting a frozen parameter to its own value is allowed, because
        // `copy_buffer_to_parameters` may write all parameters.
        let is_same = kept.tensor.as_ref().is_some_and(|before| before.bytes() == data.bytes());
        ensure!(
            self.trainer.is_none() || is_same || self.changing(name).is_some(),
            NotImplemented,
            help = "set it before the module is made",
            "parameter '{name}' is frozen, and a module is compiled with its value"
        );
        Ok(())
    }

    /// Sets the value of a parameter.
    pub(super) fn set_value(&mut self, name: &str, data: &Tensor) -> Result<()> {
        self.check_value(name, data)?;
        ensure!(data.bytes().is_some(), InvalidArgument, "'{name}' is not in host memory");
        if let Some(state) = self.changing(name) {
            state.write(name, data)?;
        }
        let is_nominal = self.kept(name)?.tensor.is_none();
        // The trainer has the values of everything that changes. The entry here only records that
        // there is a value.
        if let Some(kept) = self.parameters.get_mut(name).filter(|_| self.trainer.is_none() || is_nominal) {
            kept.tensor = Some(data.clone());
        }
        Ok(())
    }

    /// Fails if a parameter has no value.
    pub(super) fn check_complete(&self) -> Result<()> {
        let missing = self.parameters.iter().find(|(_, kept)| kept.tensor.is_none());
        missing.map_or(Ok(()), |(name, _)| Err(incomplete(name)))
    }
}

/// The error for a nominal checkpoint without a value.
fn incomplete(name: &str) -> ort_core::Error {
    error!(InvalidArgument, "parameter '{name}' has no value: the checkpoint is nominal")
        .help("set the values with `copy_buffer_to_parameters`")
}
