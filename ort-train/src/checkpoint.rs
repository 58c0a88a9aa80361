//! Checkpoints: a folder with the tensors of a training as `safetensors`, and `training.json`,
//! which says what they are of.
//!
//! The tensors are written under a name of their own first, then `training.json` takes the place of
//! the one before. Whatever ends the writing, the folder holds one whole checkpoint, the old or the
//! new one. A folder may come from anyone: saving into it writes and removes nothing but files of
//! our own names in it, and loading refuses numbers that no training could have had.

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
use crate::state::State;
use crate::{MixedPrecision, Optimizer, Schedule, Trainer};

/// The file that makes a folder a checkpoint.
const MANIFEST: &str = "training.json";
/// The form of the files.
const VERSION: u32 = 1;
/// How the names of files with tensors begin and end; a number is between.
const OWN: (&str, &str) = ("tensors-", ".safetensors");
/// The most bytes of `training.json`: properties may hold a history of the training.
const MOST_MANIFEST: usize = 64 << 20;
/// No training run makes more steps, and the counter can go on from here without overflow.
const MOST_STEPS: u64 = 1 << 53;
/// What is above this is no learning rate, but damage.
const MOST_RATE: f32 = 1e6;

/// Whether a file is one of those that saving a checkpoint writes and removes.
fn is_own(name: &str) -> bool {
    let number = name.strip_prefix(OWN.0).and_then(|rest| rest.strip_suffix(OWN.1));
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// What `training.json` holds.
#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    /// The file of the tensors, in the same folder.
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
    /// Refuses a checkpoint of a training in another precision than that of `trainer`.
    fn check_precision(&self, trainer: &Trainer) -> Result<()> {
        let (then, now) = (self.mixed_precision, trainer.options.mixed_precision);
        ensure!(
            then == now,
            InvalidArgument,
            help = "go on in the precision that the training began in",
            "it is of mixed precision {then:?}, not {now:?}"
        );
        let (then, now) = (self.loss_scale.is_some(), trainer.scaler.is_some());
        ensure!(
            then == now,
            InvalidArgument,
            help = "go on with a loss scale where the training began with one, and without otherwise",
            "it is of a training {} a loss scale",
            if then { "with" } else { "without" }
        );
        let scale = self.loss_scale.map_or(1.0, |scaler| scaler.scale);
        ensure!(
            scale.is_normal() && scale > 0.0,
            InvalidArgument,
            help = "take an older one",
            "its loss scale is {scale}, expected a number above 0"
        );
        Ok(())
    }

    /// Refuses numbers that no training could have had: they would spoil the weights, or overflow.
    fn check_numbers(&self) -> Result<()> {
        check_rate(self.learning_rate)?;
        self.schedule.check().map_err(|problem| damaged(&problem))?;
        let counts = [("updates", self.updates), ("batches", self.batches), ("pending", self.pending as u64)];
        match counts.iter().find(|(_, count)| *count > MOST_STEPS) {
            None => Ok(()),
            Some((name, count)) => {
                Err(damaged(&format!("it counts {count} {name}, expected at most {MOST_STEPS}")))
            }
        }
    }
}

/// Refuses a learning rate that no training could have had.
pub(crate) fn check_rate(rate: f32) -> Result<()> {
    ensure!(
        rate.is_finite() && (0.0..=MOST_RATE).contains(&rate),
        InvalidArgument,
        help = "take an older one",
        "it is damaged: its learning rate is {rate}, expected a number from 0 to {MOST_RATE}"
    );
    Ok(())
}

impl Trainer {
    /// Writes all that the training needs to go on as if it had not ended, and properties of the
    /// caller's, such as where it is in its data.
    ///
    /// # Errors
    ///
    /// The folder cannot be made or written to; then it holds what it held before.
    pub fn save_checkpoint(
        &mut self,
        folder: impl AsRef<Path>,
        properties: &Map<String, Json>,
    ) -> Result<()> {
        let folder = folder.as_ref();
        self.save_in(folder, properties).within(|| format!("checkpoint '{}'", folder.display()))
    }

    fn save_in(&mut self, folder: &Path, properties: &Map<String, Json>) -> Result<()> {
        self.leave();
        fs::create_dir_all(folder).map_err(|problem| system("the folder cannot be made", &problem))?;
        // What the folder says may come from anyone: only a file that a checkpoint of ours could
        // have written is taken for an old one and removed.
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
        written.map_err(|problem| system("it cannot be written", &problem))?;
        // What nothing refers to any more; another try removes it where this one cannot.
        if let Some(before) = before.filter(|before| *before != manifest.tensors) {
            let _ = fs::remove_file(folder.join(before));
        }
        Ok(())
    }

    /// Writes the tensors into a file of another name than the one before; returns the name.
    fn write_tensors(&self, folder: &Path, before: Option<&str>) -> Result<String> {
        let name = |index: u64| format!("{}{index}{}", OWN.0, OWN.1);
        let index =
            (self.batches..).find(|index| before != Some(name(*index).as_str())).unwrap_or(self.batches);
        let (state, lost) = (&self.state, RefCell::new(None));
        let views = state.iter().map(|(name, buffer)| {
            let dtype = stored_dtype(buffer.dtype())?;
            Ok((name.to_string(), Kept { dtype, buffer, state, lost: &lost }))
        });
        let views = views.collect::<Result<Vec<_>>>()?;
        let file = NewFile::create_in(folder, &name(index))
            .map_err(|problem| system("no file can be made", &problem))?;
        safetensors::serialize_to_file(views, None, file.unfinished_path())
            .map_err(|problem| error!(Fail, "the tensors cannot be written: {problem}"))?;
        if let Some(problem) = lost.take() {
            return Err(problem);
        }
        let written = file.complete().and_then(Complete::publish);
        written.map_err(|problem| system("the tensors cannot be written", &problem))?;
        Ok(name(index))
    }

    /// Goes on from a checkpoint of a training with the same parameters and optimizer; returns the
    /// properties that were saved with it.
    ///
    /// # Errors
    ///
    /// There is no checkpoint, it is damaged, or it is of another training: then the training is as
    /// it was.
    pub fn load_checkpoint(&mut self, folder: impl AsRef<Path>) -> Result<Map<String, Json>> {
        let folder = folder.as_ref();
        self.load_from(folder).within(|| format!("checkpoint '{}'", folder.display()))
    }

    fn load_from(&mut self, folder: &Path) -> Result<Map<String, Json>> {
        let manifest = read_manifest(folder)?;
        ensure!(
            manifest.optimizer == self.options.optimizer,
            InvalidArgument,
            help = "go on with the optimizer that the training began with",
            "it is of optimizer {:?}, not {:?}",
            manifest.optimizer,
            self.options.optimizer
        );
        manifest.check_precision(self)?;
        manifest.check_numbers()?;
        ensure!(
            is_plain_name(&manifest.tensors),
            InvalidArgument,
            help = "take an older one",
            "'{}' is no name of a file in the folder",
            manifest.tensors
        );
        let file = MappedFile::open(&folder.join(&manifest.tensors))
            .map_err(|problem| error!(NoSuchFile, "{problem}"))?;
        let bytes = file.bytes();
        let tensors = SafeTensors::deserialize(&bytes).map_err(|problem| damaged(&problem))?;
        self.leave();
        self.hold_gradients(manifest.pending > 0)?;
        self.check_tensors(&tensors)?;
        let names: Vec<String> = self.state.iter().map(|(name, _)| name.to_string()).collect();
        for name in names {
            let Ok(stored) = tensors.tensor(&name) else { continue };
            let there = self.state.get(&name)?;
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

    /// Refuses tensors that are not those of this training.
    fn check_tensors(&self, tensors: &SafeTensors<'_>) -> Result<()> {
        for (name, buffer) in self.state.iter() {
            let found = tensors.tensor(name).map_err(|_| {
                error!(InvalidArgument, "it has no tensor '{name}'")
                    .help("go on with the model and the options that the training began with")
            })?;
            let dtype = stored_dtype(buffer.dtype())?;
            ensure!(
                found.dtype() == dtype && found.shape() == buffer.shape(),
                InvalidArgument,
                help = "go on with the model that the training began with",
                "tensor '{name}' is {:?}{:?}, expected {dtype:?}{:?}",
                found.dtype(),
                found.shape(),
                buffer.shape()
            );
        }
        Ok(())
    }
}

fn read_manifest(folder: &Path) -> Result<Manifest> {
    let text = read_text(&folder.join(MANIFEST), MOST_MANIFEST).map_err(|problem| match problem.kind() {
        IoErrorKind::NotFound => error!(NoSuchFile, "there is no {MANIFEST} in it"),
        _ => system("it cannot be read", &problem),
    })?;
    let manifest: Manifest = serde_json::from_str(&text).map_err(|problem| damaged(&problem))?;
    ensure!(
        manifest.version == VERSION,
        NotImplemented,
        "it has version {}, this program reads version {VERSION}",
        manifest.version
    );
    Ok(manifest)
}

pub(crate) fn damaged(problem: &dyn std::fmt::Display) -> Error {
    error!(InvalidArgument, "it is damaged: {problem}").help("take an older one")
}

pub(crate) fn system(what: &str, problem: &std::io::Error) -> Error {
    error!(Fail, "{what}: {problem}").help("check the path, its permissions and the space that is left")
}

/// A tensor as it is stored.
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

/// A tensor of the training, which comes from its device when it is written: the host has one at a
/// time.
struct Kept<'a> {
    dtype: Dtype,
    buffer: &'a TensorBuffer,
    state: &'a State,
    /// Why a tensor could not be had; what is written instead is of no use.
    lost: &'a RefCell<Option<Error>>,
}

impl Kept<'_> {
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
            vec![0; self.data_len()]
        });
        copied.into()
    }

    fn data_len(&self) -> usize {
        self.buffer.byte_count()
    }
}

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
