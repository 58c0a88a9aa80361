//! Checkpoint files of the on-device training API.
//!
//! A checkpoint is a `safetensors` file whose metadata describes the tensors in JSON.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use ort_alloc::MappedFile;
use ort_core::dtype::DType;
use ort_core::files::{Complete, NewFile};
use ort_core::tensor::{Tensor, byte_count};
use ort_core::{Result, ensure, error};
use safetensors::tensor::SafeTensors;
use serde::{Deserialize, Serialize};

use super::shared::{Kept, OptimizerState, Property, Shared};
use crate::checkpoint::{
    Stored, USE_OLDER, check_rate, check_steps, damaged, dtype_of, stored_dtype, system,
};
use crate::state::state_name;

/// The metadata key of the description.
const KEY: &str = "ort-runtime.checkpoint";
/// The version of the file format.
const VERSION: u32 = 1;
/// The name prefix of optimizer state. With [`PARAMETER`] it keeps a parameter apart from a state
/// of the same name.
const STATE: &str = "optimizer:";
/// The name prefix of parameters.
const PARAMETER: &str = "parameter:";

/// The description of the tensors, in the metadata.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    parameters: BTreeMap<String, Entry>,
    properties: BTreeMap<String, Property>,
    optimizer: Option<OptimizerEntry>,
}

/// A parameter in the description.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    requires_grad: bool,
    shape: Vec<usize>,
    dtype: String,
    /// Whether the file contains its value.
    has_value: bool,
}

/// The optimizer in the description.
#[derive(Debug, Serialize, Deserialize)]
struct OptimizerEntry {
    optimizer: crate::Optimizer,
    updates: u64,
    learning_rate: f32,
}

/// What to write in addition to frozen parameters and properties.
#[derive(Clone, Copy)]
pub(super) struct Contents {
    /// The values of trained parameters.
    pub(super) values: bool,
    /// The optimizer state.
    pub(super) optimizer: bool,
}

/// Writes the shared state into a file.
pub(super) fn save(shared: &mut Shared, path: &Path, contents: Contents) -> Result<()> {
    let mut tensors = BTreeMap::new();
    let mut parameters = BTreeMap::new();
    for name in shared.parameters.keys().cloned().collect::<Vec<_>>() {
        let Kept { dtype, shape, requires_grad, .. } = shared.kept(&name)?.clone();
        let has_value = contents.values || !requires_grad;
        if has_value {
            tensors.insert(format!("{PARAMETER}{name}"), shared.value(&name)?);
        }
        let dtype = stored_name(dtype)?.to_string();
        parameters.insert(name, Entry { requires_grad, shape, dtype, has_value });
    }
    let optimizer = if contents.optimizer { Some(states(shared)?) } else { None };
    let optimizer = optimizer.map(|state| {
        tensors.extend(state.tensors.into_iter().map(|(name, tensor)| (format!("{STATE}{name}"), tensor)));
        OptimizerEntry {
            optimizer: state.optimizer,
            updates: state.updates,
            learning_rate: state.learning_rate,
        }
    });
    let manifest =
        Manifest { version: VERSION, parameters, properties: shared.properties.clone(), optimizer };
    write(path, &tensors, &manifest)
}

/// Returns the optimizer state: that of a loaded checkpoint which no optimizer has taken yet, or
/// that of the trainer.
fn states(shared: &mut Shared) -> Result<OptimizerState> {
    let none = || {
        error!(InvalidArgument, "there is no optimizer whose state could be saved")
            .help("make an Optimizer first, or save without its state")
    };
    if let Some(state) = &shared.optimizer {
        return Ok(state.clone());
    }
    let trainer = shared.trainer.as_mut().filter(|_| shared.has_optimizer).ok_or_else(none)?;
    trainer.detach();
    let optimizer = trainer.options.optimizer;
    let mut tensors = BTreeMap::new();
    for parameter in &trainer.training.parameters {
        for state in optimizer.states(parameter.tensor.dtype(), parameter.tensor.shape()) {
            let name = state_name(&parameter.name, state.kind);
            let tensor = trainer.state.tensor(&name)?;
            tensors.insert(name, tensor);
        }
    }
    let (updates, learning_rate) = (trainer.updates, trainer.options.learning_rate);
    Ok(OptimizerState { optimizer, updates, learning_rate, tensors })
}

/// Writes the tensors and their description. The file appears complete or not at all.
fn write(path: &Path, tensors: &BTreeMap<String, Tensor>, manifest: &Manifest) -> Result<()> {
    let stored = |(name, tensor): (&'_ String, &'_ Tensor)| Ok((name.clone(), stored_dtype(tensor.dtype())?));
    let types = tensors.iter().map(stored).collect::<Result<Vec<_>>>()?;
    let views = types.iter().zip(tensors.values()).map(|((name, dtype), tensor)| {
        // All tensors are copies on the host, so the fallback is never taken.
        let bytes = tensor.bytes().map_or(&[][..], |bytes| bytes.as_ref());
        (name.as_str(), Stored { dtype: *dtype, shape: tensor.shape(), bytes })
    });
    let text = serde_json::to_string(manifest).map_err(|problem| error!(Fail, "{problem}"))?;
    let metadata = HashMap::from([(KEY.to_string(), text)]);
    let file = NewFile::create(path).map_err(|problem| system("cannot create a file", &problem))?;
    safetensors::serialize_to_file(views, Some(metadata), file.unfinished_path())
        .map_err(|problem| error!(Fail, "cannot write the tensors: {problem}"))?;
    let written = file.complete().and_then(Complete::publish);
    written.map_err(|problem| system("cannot write the tensors", &problem))
}

/// Loads a file. Tensors are zero-copy views of the mapping.
pub(super) fn load(path: &Path) -> Result<Shared> {
    let file = MappedFile::open(path).map_err(|problem| error!(NoSuchFile, "{problem}"))?;
    let bytes = file.bytes();
    let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|problem| damaged(&problem))?;
    let text = header.metadata().as_ref().and_then(|metadata| metadata.get(KEY)).ok_or_else(|| {
        error!(InvalidArgument, "it is not a checkpoint of this runtime")
            .help("write one with generate_artifacts or save_checkpoint; checkpoints of other runtimes cannot be read")
    })?;
    let manifest: Manifest = serde_json::from_str(text).map_err(|problem| damaged(&problem))?;
    ensure!(
        manifest.version == VERSION,
        NotImplemented,
        "it has version {}, this program reads version {VERSION}",
        manifest.version
    );
    let tensors = SafeTensors::deserialize(&bytes).map_err(|problem| damaged(&problem))?;
    let mut found = BTreeMap::new();
    for (name, view) in tensors.iter() {
        // `slice_ref` shares the mapping and keeps it alive.
        let tensor = Tensor::from_bytes(dtype_of(view.dtype())?, view.shape(), bytes.slice_ref(view.data()))?;
        found.insert(name.to_string(), tensor);
    }
    let mut parameters = BTreeMap::new();
    for (name, entry) in manifest.parameters {
        let kept = kept(&name, &entry, found.remove(&format!("{PARAMETER}{name}")))?;
        parameters.insert(name, kept);
    }
    let tensors =
        found.into_iter().filter_map(|(name, it)| Some((name.strip_prefix(STATE)?.to_string(), it)));
    let tensors = tensors.collect();
    if let Some(optimizer) = &manifest.optimizer {
        // The file is untrusted: such a number would otherwise reach the weights with the first
        // update, or overflow.
        check_rate(optimizer.learning_rate)?;
        check_steps("updates", optimizer.updates)?;
        optimizer.optimizer.check().map_err(|problem| damaged(&problem))?;
    }
    let optimizer = manifest.optimizer.map(|OptimizerEntry { optimizer, updates, learning_rate }| {
        OptimizerState { optimizer, updates, learning_rate, tensors }
    });
    Ok(Shared { parameters, properties: manifest.properties, optimizer, ..Shared::default() })
}

/// Checks a parameter's entry against its tensor.
fn kept(name: &str, entry: &Entry, tensor: Option<Tensor>) -> Result<Kept> {
    let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16]
        .into_iter()
        .find(|dtype| dtype.name() == entry.dtype)
        .ok_or_else(|| {
            error!(
                InvalidArgument,
                "parameter '{name}' is of type '{}', expected float, double, float16 or bfloat16",
                entry.dtype
            )
        })?;
    // Nominal parameters are allocated from this shape later, so its size must not overflow.
    byte_count(dtype, &entry.shape)?;
    let fits = tensor.as_ref().is_none_or(|it| it.dtype() == dtype && it.shape() == entry.shape);
    ensure!(
        fits && tensor.is_some() == entry.has_value && (entry.has_value || entry.requires_grad),
        InvalidArgument,
        help = USE_OLDER,
        "it is damaged: parameter '{name}' does not match its description"
    );
    Ok(Kept { dtype, shape: entry.shape.clone(), requires_grad: entry.requires_grad, tensor })
}

/// The name of a type that checkpoints can store.
fn stored_name(dtype: DType) -> Result<&'static str> {
    stored_dtype(dtype)?;
    Ok(dtype.name())
}
