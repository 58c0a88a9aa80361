//! Model sources: a mapped file, a file read whole, memory, or a reader.
//!
//! If a file is not a model, the error says what it is instead and what to do about it. Lengths
//! stored in the file are never trusted beyond the file's own length.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use ort_alloc::MappedFile;
use prost::Message;

use super::expansion::check_expansion;
use super::external::{ExternalData, Location};
use super::files::{EMPTY, EMPTY_MODEL, FileAccess, FileBytes, NO_GRAPH, read_file};
use super::proto::tensor_proto::DataLocation;
use super::proto::{GraphProto, ModelProto};
use super::{ort_format, recognise, visit_tensors};
use crate::cache::{CompiledModel, Content, Identity};
use crate::{Limits, Result, Within, ensure, error};

/// The maximum size of a protobuf message in bytes.
const LARGEST_MESSAGE: u64 = 1 << 31;

/// A model's bytes, and the folder of its external data files.
#[derive(Clone, Debug)]
pub struct Source {
    bytes: Bytes,
    mapping: Option<MappedFile>,
    identity: Identity,
    /// The compiled model that the bytes are part of, if it is one.
    compiled: Option<Arc<CompiledModel>>,
    name: String,
    path: Option<PathBuf>,
    folder: Option<PathBuf>,
    access: FileAccess,
    limits: Limits,
    keep_hash: bool,
    strict: bool,
}

impl Source {
    /// Opens a file. External data is looked up in its folder; a compiled model contains its own.
    ///
    /// Errors: the file is missing, unreadable, empty, a folder or another special file.
    pub fn open(path: impl AsRef<Path>, access: FileAccess) -> Result<Source> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let place = || format!("model '{name}'");
        let FileBytes { bytes, mapping, identity } = read_file(path, access.map).within(place)?;
        let compiled = CompiledModel::open(&bytes, mapping.as_ref()).within(place)?.map(Arc::new);
        // The first file of a compiled model is the ONNX model itself.
        let own = compiled.as_ref().and_then(|compiled| compiled.files().first()?.bytes().cloned());
        let bytes = own.unwrap_or(bytes);
        let folder = match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_path_buf(),
            // A bare file name has the empty path as its parent, which `canonicalize` refuses.
            _ => PathBuf::from("."),
        };
        let path = Some(path.to_path_buf());
        let (folder, limits) = (Some(folder), Limits::default());
        Ok(Source {
            bytes,
            mapping,
            identity,
            compiled,
            name,
            path,
            folder,
            access,
            limits,
            keep_hash: false,
            strict: false,
        })
    }

    /// Creates a source from bytes in memory, without a copy. External data is unavailable unless
    /// [`Source::in_folder`] says where it is.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Source {
        let access = FileAccess::default();
        Source {
            bytes: bytes.into(),
            mapping: None,
            identity: Identity::Unknown,
            compiled: None,
            name: "(memory)".into(),
            path: None,
            folder: None,
            access,
            limits: Limits::default(),
            keep_hash: false,
            strict: false,
        }
    }

    /// Reads all bytes of `reader`.
    ///
    /// Errors: reading fails, or there are more bytes than a protobuf message may have, 2 GiB.
    pub fn from_reader(reader: impl Read) -> Result<Source> {
        let mut bytes = Vec::new();
        // One byte more than allowed, to recognize a longer input.
        let read = reader.take(LARGEST_MESSAGE + 1).read_to_end(&mut bytes);
        read.map_err(|problem| error!(Fail, "cannot read the model: {problem}"))?;
        if bytes.len() as u64 > LARGEST_MESSAGE {
            return Err(error!(InvalidProtobuf, "the reader gives more than {LARGEST_MESSAGE} bytes")
                .help("load a larger model from its file, which is mapped"));
        }
        Ok(Source { name: "(reader)".into(), ..Source::from_bytes(bytes) })
    }

    /// Sets the folder of the external data files.
    #[must_use]
    pub fn in_folder(self, folder: impl Into<PathBuf>, access: FileAccess) -> Source {
        Source { folder: Some(folder.into()), access, ..self }
    }

    /// Sets the limits for loading and for runs of sessions on the model.
    #[must_use]
    pub fn limits(self, limits: Limits) -> Source {
        Source { limits, ..self }
    }

    /// Keeps a hash of the model's bytes, the key by which the compile cache finds it. Needed only
    /// for models over 1 MiB that are in memory rather than a mapped file: loading copies what it
    /// needs from those and frees the rest.
    #[must_use]
    pub fn keep_hash(self, keep_hash: bool) -> Source {
        Source { keep_hash, ..self }
    }

    /// Makes loading refuse what ONNX forbids but ONNX Runtime accepts, which otherwise is a
    /// warning ([`Model::warnings`](crate::session::Model::warnings)). Sessions then also refuse
    /// inputs that give one symbolic dimension two sizes.
    #[must_use]
    pub fn strict(self, strict: bool) -> Source {
        Source { strict, ..self }
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.strict
    }

    pub(crate) fn keeps_hash(&self) -> bool {
        self.keep_hash
    }

    /// Returns the limits for loading.
    pub(crate) fn limits_of(&self) -> &Limits {
        &self.limits
    }

    /// Returns how errors name the source: the path, or `(memory)`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the bytes; a slice of the mapping if the file is mapped.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Returns whether the model is of ORT format rather than ONNX.
    pub fn is_ort_format(&self) -> bool {
        ort_format::is_ort_format(&self.bytes)
    }

    /// Refuses a model of another format than the caller names.
    ///
    /// Errors: ORT format is expected, and the bytes are not of it, or the reverse.
    pub fn expect_ort_format(&self, expected: bool) -> Result<()> {
        match (expected, self.is_ort_format()) {
            (true, false) => Err(ort_format::not_ort_format()),
            (false, true) => {
                Err(error!(InvalidProtobuf, "the file is not an ONNX model; it is of ORT format")
                    .help("load it as a model of ORT format"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the mapping of the file, if it is mapped.
    pub fn mapping(&self) -> Option<&MappedFile> {
        self.mapping.as_ref()
    }

    /// Returns the path of the file; `None` for a model in memory.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    pub(super) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the model's own file in the form that the compile cache uses.
    pub(super) fn content(&self) -> Content {
        let own = self.compiled.as_ref().and_then(|compiled| compiled.files().first().cloned());
        own.unwrap_or_else(|| {
            let (mapping, identity) = (self.mapping.clone(), self.identity.clone());
            Content::new(String::new(), self.bytes.clone(), mapping, identity)
        })
    }

    /// Returns the compiled model that the source is, if it is one.
    pub(super) fn compiled(&self) -> Option<&Arc<CompiledModel>> {
        self.compiled.as_ref()
    }

    /// Decodes the model. Its weights stay slices of [`Source::bytes`].
    ///
    /// Errors: the bytes are no model in ONNX or ORT format; the error says what they look like
    /// instead.
    pub fn decode(&self) -> Result<ModelProto> {
        self.decode_model().within(|| format!("model '{}'", self.name))
    }

    fn decode_model(&self) -> Result<ModelProto> {
        ensure!(!self.bytes.is_empty(), InvalidArgument, help = EMPTY, "{EMPTY_MODEL}");
        if self.is_ort_format() {
            return ort_format::decode(&self.bytes, &self.limits);
        }
        let nodes = check_expansion(&self.bytes, &self.limits)?;
        // Reserve the node list up front, because growing it would move large messages repeatedly.
        let graph = || GraphProto { node: Vec::with_capacity(nodes), ..GraphProto::default() };
        // Without nodes the decoder decides: a file without a graph must not seem to have one.
        let mut model = ModelProto { graph: (nodes > 0).then(graph), ..ModelProto::default() };
        match model.merge(self.bytes.clone()) {
            Ok(()) if model.graph.is_some() => Ok(model),
            Ok(()) => Err(recognise::known_format(&self.bytes).unwrap_or_else(|| {
                error!(InvalidArgument, "{NO_GRAPH}")
                    .help("check that it is a model, not test data or a model of another framework")
            })),
            Err(problem) => Err(recognise::why_undecodable(&self.bytes, &problem)),
        }
    }

    /// Returns access to the external data files of the model.
    pub fn external_data(&self) -> Result<ExternalData> {
        if let Some(compiled) = &self.compiled {
            return Ok(ExternalData::within(compiled));
        }
        match &self.folder {
            None => Ok(ExternalData::unavailable()),
            Some(folder) => ExternalData::in_folder(folder, self.path.as_deref(), self.access),
        }
    }

    /// Refuses outputs that would replace the model's file or one of its data files.
    ///
    /// Outputs are atomic, so replacing them would succeed, and would leave a model without its
    /// data, or no original to go back to.
    ///
    /// # Errors
    ///
    /// An output is such a file, or the model cannot be decoded.
    pub fn check_outputs<'p>(&self, outputs: impl IntoIterator<Item = &'p Path>) -> Result<()> {
        let mut existing = Vec::new();
        for output in outputs {
            // An output that does not exist yet replaces nothing.
            existing.extend(output.canonicalize().ok().map(|real| (output, real)));
        }
        if existing.is_empty() {
            return Ok(());
        }
        let refuse = |files: &[PathBuf], what: &str| {
            let replaced = existing.iter().find(|(_, real)| files.contains(real));
            replaced.map_or(Ok(()), |(output, _)| {
                let shown = output.display();
                Err(error!(InvalidArgument, "'{shown}' would replace {what} that is read")
                    .help("give another file to write"))
            })
        };
        let own: Vec<PathBuf> = self.path.iter().filter_map(|path| path.canonicalize().ok()).collect();
        refuse(&own, "the model")?;
        refuse(&self.data_files()?, "a data file of the model")
    }

    /// Returns the resolved paths of the data files that exist.
    fn data_files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        let Some(folder) = self.folder.as_ref().filter(|_| self.compiled.is_none()) else {
            return Ok(files);
        };
        visit_tensors(&mut self.decode()?, &mut |tensor| {
            if tensor.data_location() == DataLocation::External as i32 {
                let location = Location::parse(&tensor.external_data)?;
                files.extend(folder.join(location.path).canonicalize().ok());
            }
            Ok(())
        })?;
        Ok(files)
    }
}
