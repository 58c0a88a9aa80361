//! Checkpoints of a training run.
//!
//! A checkpoint is a folder with the tensors as `safetensors`, and `training.json`, which describes
//! them.
//!
//! Saving is atomic. The tensors are first written under a new name, then `training.json` replaces
//! the old one. Even if writing is interrupted, the folder holds one complete checkpoint, the old
//! or the new one. Folders are untrusted input: saving writes and removes only files with our own
//! names in them, and loading rejects numbers that no training run could have produced.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs;
use std::io::{ErrorKind as IoErrorKind, Write};
use std::path::Path;

use ort_alloc::MappedFile;
use ort_core::dtype::DType;
use ort_core::files::{Complete, NewFile, is_plain_name, read_text};
use ort_core::tensor::TensorBuffer;
use ort_core::{Error, Result, Within, ensure, error};
use safetensors::tensor::{Dtype, SafeTensors, View};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use crate::mixed::LossScaler;
use crate::state::{State, gradient_name};
use crate::{MixedPrecision, Optimizer, Schedule, Trainer};

/// The file that makes a folder a checkpoint.
const MANIFEST: &str = "training.json";
/// The version of the file format.
const VERSION: u32 = 1;
/// The prefix and suffix of tensor file names, with a number in between.
const OWN: (&str, &str) = ("tensors-", ".safetensors");
/// The size limit of `training.json`. It is large because properties may hold a history of the
/// training run.
const MOST_MANIFEST: usize = 64 << 20;
/// The advice for a damaged checkpoint.
pub(crate) const USE_OLDER: &str = "use an older checkpoint";
/// The limit on step counters. No training run makes more steps, and a counter can continue from
/// here without overflow.
const MOST_STEPS: u64 = 1 << 53;
/// The limit on learning rates. A larger one is taken for damage.
const MOST_RATE: f32 = 1e6;

/// Whether saving a checkpoint could have written a file of this name.
fn is_own(name: &str) -> bool {
    let number = name.strip_prefix(OWN.0).and_then(|rest| rest.strip_suffix(OWN.1));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The contents of `training.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    /// The name of the tensor file in the same folder.
    tensors: String,
    updates: u64,
    batches: u64,
    pending: usize,
    seed: u64,
    learning_rate: f32,
    optimizer: Optimizer,
    schedule: Schedule,
    #[serde(default)]
    mixed_precision: Option<MixedPrecision>,
    #[serde(default)]
    loss_scale: Option<LossScaler>,
    properties: Map<String, Json>,
}

impl Manifest {
    /// Fails if the checkpoint was saved in another precision than that of `trainer`.
    fn check_precision(&self, trainer: &Trainer) -> Result<()> {
        let (then, now) = (self.mixed_precision, trainer.options.mixed_precision);
        let name = |precision: Option<MixedPrecision>| {
            precision.map_or("none", |precision| precision.dtype().name())
        };
        ensure!(
            then == now,
            InvalidArgument,
            help = "resume with the mixed precision of the checkpoint",
            "the checkpoint's mixed precision is {}, expected {}",
            name(then),
            name(now)
        );
        let (then, now) = (self.loss_scale.is_some(), trainer.scaler.is_some());
        let name = |has_scale| if has_scale { "a loss scale" } else { "no loss scale" };
        ensure!(
            then == now,
            InvalidArgument,
            help = "resume with the loss scale setting of the checkpoint",
            "the checkpoint has {}, expected {}",
            name(then),
            name(now)
        );
        let scale = self.loss_scale.map_or(1.0, |scaler| scaler.scale);
        ensure!(
            scale.is_normal() && scale > 0.0,
            InvalidArgument,
            help = USE_OLDER,
            "the checkpoint is damaged: its loss scale is {scale}, expected a number above 0"
        );
        Ok(())
    }

    /// Fails on numbers that no training run could have produced: they would spoil the weights, or
    /// overflow.
    fn check_numbers(&self) -> Result<()> {
        check_rate(self.learning_rate)?;
        self.schedule.check().map_err(|problem| damaged(&problem))?;
        check_steps("updates", self.updates)?;
        check_steps("batches", self.batches)?;
        check_steps("pending batches", self.pending as u64)?;
        check_steps("skipped updates", self.loss_scale.map_or(0, |scaler| scaler.skipped))
    }
}

/// Fails on a step counter that no training run could have reached.
pub(crate) fn check_steps(name: &str, count: u64) -> Result<()> {
    match count <= MOST_STEPS {
        true => Ok(()),
        false => Err(damaged(&format!("it has {count} {name}, expected at most {MOST_STEPS}"))),
    }
}

/// Fails on a learning rate that no training run could have had.
pub(crate) fn check_rate(rate: f32) -> Result<()> {
    ensure!(
        rate.is_finite() && (0.0..=MOST_RATE).contains(&rate),
        InvalidArgument,
        help = USE_OLDER,
        "the checkpoint is damaged: its learning rate is {rate}, expected a number from 0 to {MOST_RATE}"
    );
    Ok(())
}

impl Trainer {
    /// Saves everything that is needed to resume the training run exactly, and the caller's own
    /// properties, such as the position in the data.
    ///
    /// # Errors
    ///
    /// The folder cannot be created or written to. It then keeps its old contents.
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        properties: &Map<String, Json>,
    ) -> Result<()> {
        let folder = folder.as_ref();
        self.save_in(folder, properties).within(|| format!("checkpoint '{}'", folder.display()))
    }

    /// [`Self::save_checkpoint`], with errors that do not name the folder yet.
    fn save_in(&mut self, folder: &Path, properties: &Map<String, Json>) -> Result<()> {
        self.detach();
        fs::create_dir_all(folder).map_err(|problem| system("cannot create the folder", &problem))?;
        // The manifest is untrusted, so its old tensor file is removed only if our own checkpoints
        // could have written that name.
        let before = read_manifest(folder).ok().map(|manifest| manifest.tensors).filter(|name| is_own(name));
        let tensors = self.write_tensors(folder, before.as_deref())?;
        let manifest = Manifest {
            version: VERSION,
            tensors,
            updates: self.updates,
            batches: self.batches,
            pending: self.pending,
            seed: self.options.seed,
            learning_rate: self.options.learning_rate,
            optimizer: self.options.optimizer,
            schedule: self.options.schedule,
            mixed_precision: self.options.mixed_precision,
            loss_scale: self.scaler,
            properties: properties.clone(),
        };
        let text = serde_json::to_string_pretty(&manifest).map_err(|problem| error!(Fail, "{problem}"))?;
        let written = NewFile::create_in(folder, MANIFEST).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.complete()?.publish()
        });
        written.map_err(|problem| system(&format!("cannot write {MANIFEST}"), &problem))?;
        // Nothing refers to the old tensors any more. If they cannot be removed, the checkpoint is
        // still valid.
        if let Some(before) = before.filter(|before| *before != manifest.tensors) {
            let _ = fs::remove_file(folder.join(before));
        }
        Ok(())
    }

    /// Writes the tensors into a file with a name that the previous checkpoint does not use.
    /// Returns the name.
    fn write_tensors(&self, folder: &Path, before: Option<&str>) -> Result<String> {
        let name = |index: u64| format!("{}{index}{}", OWN.0, OWN.1);
        // One name is in use at most, so the first or the second number is free.
        let index =
            (self.batches..).find(|index| before != Some(name(*index).as_str())).unwrap_or(self.batches);
        // A `View` cannot report an error, so the first tensor that cannot be copied from its
        // device leaves it here.
        let (state, lost) = (&self.state, RefCell::new(None));
        let views = state.iter().map(|(name, buffer)| {
            let dtype = stored_dtype(buffer.dtype())?;
            Ok((name.to_string(), Kept { dtype, buffer, state, lost: &lost }))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let file = NewFile::create_in(folder, &name(index))
            .map_err(|problem| system("cannot create a file", &problem))?;
        safetensors::serialize_to_file(views, None, file.unfinished_path())
            .map_err(|problem| error!(Fail, "cannot write the tensors: {problem}"))?;
        if let Some(problem) = lost.take() {
            return Err(problem);
        }
        let written = file.complete().and_then(Complete::publish);
        written.map_err(|problem| system("cannot write the tensors", &problem))?;
        Ok(name(index))
    }

    /// Resumes from a checkpoint of a training run with the same parameters and optimizer. Returns
    /// the properties that were saved with it.
    ///
    /// # Errors
    ///
    /// There is no checkpoint, it is damaged, or it belongs to another training run. In these cases
    /// nothing has changed.
    pub fn load_checkpoint(&mut self, folder: impl AsRef<Path>) -> Result<Map<String, Json>> {
        let folder = folder.as_ref();
        self.load_from(folder).within(|| format!("checkpoint '{}'", folder.display()))
    }

    /// [`Self::load_checkpoint`], with errors that do not name the folder yet.
    fn load_from(&mut self, folder: &Path) -> Result<Map<String, Json>> {
        let manifest = read_manifest(folder)?;
        ensure!(
            manifest.optimizer == self.options.optimizer,
            InvalidArgument,
            help = "resume with the optimizer and the hyperparameters of the checkpoint",
            "the checkpoint's optimizer is {}, expected {}",
            manifest.optimizer,
            self.options.optimizer
        );
        manifest.check_precision(self)?;
        manifest.check_numbers()?;
        // A name with separators could lead out of the folder.
        ensure!(
            is_plain_name(&manifest.tensors),
            InvalidArgument,
            help = USE_OLDER,
            "the checkpoint is damaged: its tensor file is '{}', expected a plain file name",
            manifest.tensors
        );
        let file = MappedFile::open(&folder.join(&manifest.tensors))
            .map_err(|problem| error!(NoSuchFile, "{problem}"))?;
        let bytes = file.bytes();
        let tensors = SafeTensors::deserialize(&bytes).map_err(|problem| damaged(&problem))?;
        // All tensors must be in the state before they are compared.
        self.detach();
        // All tensors are checked before the first is added or overwritten.
        self.check_tensors(&tensors, manifest.pending > 0)?;
        self.hold_gradients(manifest.pending > 0)?;
        let names: Vec<String> = self.state.iter().map(|(name, _)| name.to_string()).collect();
        for name in names {
            // `check_tensors` found each of them, so none is skipped.
            let Ok(stored) = tensors.tensor(&name) else { continue };
            let there = self.state.get(&name)?;
            // The bytes may be unaligned in the file.
            let mut tensor = TensorBuffer::new(there.dtype(), there.shape())?;
            tensor.bytes_mut()?.copy_from_slice(stored.data());
            self.state.write(&name, &tensor.tensor()?)?;
        }
        self.updates = manifest.updates;
        self.batches = manifest.batches;
        self.pending = manifest.pending;
        self.scaler = manifest.loss_scale;
        self.options.seed = manifest.seed;
        self.options.learning_rate = manifest.learning_rate;
        self.options.schedule = manifest.schedule;
        Ok(manifest.properties)
    }

    /// Fails if the tensors are not those of this training run, with gradients if batches wait for
    /// their update.
    fn check_tensors(&self, tensors: &SafeTensors<'_>, has_gradients: bool) -> Result<()> {
        let held = self.state.iter().map(|(name, buffer)| (name.to_string(), buffer.dtype(), buffer.shape()));
        let parameters = self.training.parameters.iter().filter(|_| has_gradients);
        let gradients = parameters.map(|it| (gradient_name(&it.name), it.tensor.dtype(), it.tensor.shape()));
        for (name, expected, shape) in held.chain(gradients) {
            let found = tensors.tensor(&name).map_err(|_| {
                error!(InvalidArgument, "the checkpoint has no tensor '{name}'")
                    .help("resume with the model and the options of the checkpoint")
            })?;
            let dtype = dtype_of(found.dtype())?;
            ensure!(
                dtype == expected && found.shape() == shape,
                InvalidArgument,
                help = "resume with the model of the checkpoint",
                "tensor '{name}' is {}{:?} in the checkpoint, expected {}{:?}",
                dtype.name(),
                found.shape(),
                expected.name(),
                shape
            );
        }
        Ok(())
    }
}

/// Reads and parses `training.json`.
fn read_manifest(folder: &Path) -> Result<Manifest> {
    let text = read_text(&folder.join(MANIFEST), MOST_MANIFEST).map_err(|problem| match problem.kind() {
        IoErrorKind::NotFound => error!(NoSuchFile, "the folder has no checkpoint: there is no {MANIFEST}"),
        _ => system(&format!("cannot read {MANIFEST}"), &problem),
    })?;
    let manifest: Manifest = serde_json::from_str(&text).map_err(|problem| damaged(&problem))?;
    ensure!(
        manifest.version == VERSION,
        NotImplemented,
        help = "resume with the version of this program that wrote it",
        "the checkpoint has format version {}, expected {VERSION}",
        manifest.version
    );
    Ok(manifest)
}

/// The error for a damaged checkpoint.
pub(crate) fn damaged(problem: &dyn std::fmt::Display) -> Error {
    error!(InvalidArgument, "it is damaged: {problem}").help(USE_OLDER)
}

/// The error for a failed call of the operating system.
pub(crate) fn system(what: &str, problem: &std::io::Error) -> Error {
    error!(Fail, "{what}: {problem}").help("check the path, its permissions and the space that is left")
}

/// A host tensor to be written.
pub(crate) struct Stored<'a> {
    pub(crate) dtype: Dtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
}

impl View for Stored<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// A persistent tensor to be written. It is copied from its device when it is its turn, so the host
/// holds one copy at a time.
struct Kept<'a> {
    dtype: Dtype,
    buffer: &'a TensorBuffer,
    state: &'a State,
    /// The reason why a tensor could not be copied. The file is then discarded.
    lost: &'a RefCell<Option<Error>>,
}

impl Kept<'_> {
    /// Copies the bytes from the device.
    fn copied(&self) -> Result<Vec<u8>> {
        Ok(self.state.on_host(self.buffer)?.view().bytes()?.to_vec())
    }
}

impl View for Kept<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.buffer.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        if let Ok(bytes) = self.buffer.view().bytes() {
            return bytes.into();
        }
        let copied = self.copied().unwrap_or_else(|problem| {
            self.lost.replace(Some(problem));
            // The file is discarded. The zeros only keep the layout that its header announces.
            vec![0; self.data_len()]
        });
        copied.into()
    }

    fn data_len(&self) -> usize {
        self.buffer.byte_count()
    }
}

/// The type of a tensor in `safetensors`.
pub(crate) fn stored_dtype(dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::U8 => Dtype::U8,
        DType::I64 => Dtype::I64,
        other => return Err(error!(NotImplemented, "tensors of type {} are not stored", other.name())),
    })
}

/// The type of a stored tensor.
pub(crate) fn dtype_of(dtype: Dtype) -> Result<DType> {
    Ok(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::U8 => DType::U8,
        Dtype::I64 => DType::I64,
        other => {
            return Err(error!(
                InvalidArgument,
                "tensors of type {other:?} are not supported in checkpoints"
            ));
        }
    })
}
