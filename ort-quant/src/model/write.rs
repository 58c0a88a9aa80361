//! Streaming writer of models: weights are computed and written one at a time.
//!
//! The lengths of all fields are known before the first byte, so that a weight needs no second copy
//! in an encoded message. Pages of the original file are given back once they were read. Both files
//! are complete, and the caller has looked at the model, before they appear under their names.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use bytes::Bytes;
use ort_alloc::MappedFile;
use ort_core::files::{NewFile, publish_pair};
use ort_core::onnx::proto::TensorProto;
use ort_core::onnx::proto::tensor_proto::DataLocation;
use ort_core::onnx::{
    ExternalData, FileAccess, LoadOptions, MESSAGE_LIMIT, Source, Weights, data_file, refer_to,
    tensor_from_proto, tensor_to_proto, visit_node_tensors, visit_tensors,
};
use ort_core::session::Model;
use ort_core::tensor::Tensor;
use ort_core::{Error, ErrorKind, Result, Within};
use prost::Message;
use prost::encoding::{WireType, encode_key, encode_varint, encoded_len_varint, key_len};

use super::draft::{Draft, Part};
use super::weights::{Form, Job};
use crate::noise::Noise;
use crate::pages::WeightPages;
use crate::prune::Zeros;

/// Field numbers of `onnx.proto`.
const GRAPH: u32 = 7;
const INITIALIZER: u32 = 5;
const RAW_DATA: u32 = 9;

/// The alignment of tensors in a data file: small ones to a cache line, others to a page, so that
/// they can be mapped.
const ALIGNMENT: u64 = 64;
const PAGE: u64 = 4096;

/// The device that discards its input, and what a model for it would be called.
const NULL_DEVICE: &str = "/dev/null";
const DISCARDED: &str = "ort-discarded.onnx";

/// What was written.
#[derive(Clone, Debug, PartialEq)]
pub struct Written {
    /// The bytes of the model file.
    pub model: u64,
    /// The bytes of the data file beside it; 0 without one.
    pub data: u64,
    /// What quantization changed in each weight, by the name of its codes.
    pub noises: BTreeMap<String, Noise>,
    /// The zeros of each pruned weight, by its name.
    pub zeros: BTreeMap<String, Zeros>,
}

/// The files of the original model.
struct Original<'s> {
    source: &'s Source,
    external: ExternalData,
}

impl Original<'_> {
    /// The elements of an initializer, without a copy if they are raw bytes in a file.
    fn tensor(&mut self, proto: &TensorProto) -> Result<Tensor> {
        tensor_from_proto(proto.clone(), &mut self.external)
    }

    /// Makes the data of a tensor part of its message. Nothing is copied from a mapped file.
    fn bring_inside(&mut self, tensor: &mut TensorProto) -> Result<()> {
        if tensor.data_location() == DataLocation::External as i32 {
            let inside = tensor_to_proto(tensor.name(), &self.tensor(tensor)?)?;
            let doc_string = tensor.doc_string.take();
            let metadata_props = std::mem::take(&mut tensor.metadata_props);
            *tensor = TensorProto { doc_string, metadata_props, ..inside };
        }
        Ok(())
    }

    fn mappings(&self) -> impl Iterator<Item = &MappedFile> {
        self.source.mapping().into_iter().chain(self.external.mappings())
    }

    /// Gives pages of the files back. They are read again on demand.
    fn release(&self, bytes: &[u8]) {
        for mapping in self.mappings() {
            if let Some(range) = mapping.range_of(bytes)
                && let Err(problem) = mapping.release(range)
            {
                tracing::debug!("pages of the model's file stay resident: {problem}");
            }
        }
    }
}

/// Where the bytes of an initializer go.
struct Placed {
    /// As it is written: without data that is computed or goes to the data file.
    header: TensorProto,
    data: Data,
    /// The bytes of the data.
    length: usize,
    /// The offset in the data file.
    offset: Option<u64>,
}

/// The data of an initializer that is not in its header.
enum Data {
    /// There is none.
    None,
    /// The original's.
    Original(Bytes),
    /// A result of a job.
    Job { job: usize, result: usize },
}

impl Placed {
    /// The length of the tensor's message.
    fn message_length(&self) -> usize {
        let data = key_len(RAW_DATA) + encoded_len_varint(self.length as u64) + self.length;
        self.header.encoded_len() + if self.is_inside() { data } else { 0 }
    }

    /// Whether the data follows the header in the message.
    fn is_inside(&self) -> bool {
        self.offset.is_none() && !matches!(self.data, Data::None)
    }
}

/// What a file will have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSize {
    /// The bytes of the model file.
    pub model: u64,
    /// The bytes of the data file beside it; 0 without one.
    pub data: u64,
    /// The largest initializer, and its bytes.
    pub largest: Option<(String, u64)>,
}

/// The size of a model, before any weight is computed.
pub(super) fn size(
    draft: &mut Draft,
    source: &Source,
    (path, weights): (&Path, &Weights),
) -> Result<FileSize> {
    let mut original = Original { source, external: source.external_data()? };
    let Layout { placed, end, .. } = lay_out(draft, &mut original, (path, weights))?;
    let bytes = |placed: &Placed| placed.length.max(placed.header.encoded_len()) as u64;
    let largest = placed.iter().max_by_key(|placed| bytes(placed));
    let largest = largest.map(|placed| (placed.header.name().to_string(), bytes(placed)));
    Ok(FileSize { model: head(draft, &placed)?.1, data: end, largest })
}

/// Where everything goes.
struct Layout {
    placed: Vec<Placed>,
    /// The name of the data file, and the least bytes of a tensor in it.
    data: Option<(String, usize)>,
    /// The bytes of that file.
    end: u64,
}

fn lay_out(
    draft: &mut Draft,
    original: &mut Original<'_>,
    (path, weights): (&Path, &Weights),
) -> Result<Layout> {
    // The message has functions; the draft has the nodes and initializers of the graph.
    visit_tensors(&mut draft.message, &mut |tensor| original.bring_inside(tensor))?;
    visit_node_tensors(&mut draft.nodes, &mut |tensor| original.bring_inside(tensor))?;
    let parts = all_parts(draft, original)?;
    let inside: usize = parts.iter().map(|part| part_length(draft, part)).sum::<Result<usize>>()?;
    // Some way below the limit, for the nodes and headers.
    let is_large = inside > MESSAGE_LIMIT - (64 << 20);
    let beside = Weights::Beside { least: 1024 };
    let weights = if is_large && *weights == Weights::Inside { &beside } else { weights };
    let data = data_file(path, weights)?;
    let (placed, end) = place(draft, parts, data.as_ref())?;
    Ok(Layout { placed, data, end })
}

/// Writes a model. `check` gets it as it will be loaded, before it has its name; if `check` fails,
/// nothing is left.
pub(super) fn write(
    mut draft: Draft,
    source: &Source,
    (path, weights): (&Path, &Weights),
    check: &mut dyn FnMut(&Model) -> Result<()>,
) -> Result<Written> {
    let mut original = Original { source, external: source.external_data()? };
    let Layout { placed, data, end } = lay_out(&mut draft, &mut original, (path, weights))?;
    // What is discarded is checked all the same, in files that never get a name.
    let is_discarded = path.canonicalize().is_ok_and(|real| real == Path::new(NULL_DEVICE));
    let target = if is_discarded { std::env::temp_dir().join(DISCARDED) } else { path.to_path_buf() };
    let data_path = data.as_ref().filter(|_| end > 0).map(|(name, _)| target.with_file_name(name));
    source.check_outputs([path].into_iter().chain(data_path.as_deref()))?;
    let mut files = Files {
        model: NewFile::create(&target).map_err(|problem| cannot_write(&target, &problem))?,
        data: match &data_path {
            Some(path) => Some(NewFile::create(path).map_err(|problem| cannot_write(path, &problem))?),
            None => None,
        },
    };
    let written = write_parts(&draft, &mut original, &placed, &mut files)?;
    let cannot = |problem: io::Error| cannot_write(path, &problem);
    let unfinished = files.model.unfinished_path().to_path_buf();
    let unfinished_data = files.data.as_ref().map(|file| file.unfinished_path().to_path_buf());
    let model = files.model.complete().map_err(cannot)?;
    let complete_data = files.data.map(NewFile::complete).transpose().map_err(cannot)?;
    let mut options = LoadOptions::default();
    if let (Some(path), Some((name, _))) = (&unfinished_data, &data) {
        options
            .external_files
            .push((name.clone(), Source::open(path, FileAccess::default())?.bytes().clone()));
    }
    let loaded = Model::from_source_with(Source::open(&unfinished, FileAccess::default())?, &options);
    loaded.and_then(|model| check(&model)).within(|| format!("checking '{}'", path.display()))?;
    if is_discarded {
        return Ok(written);
    }
    match complete_data {
        Some(data) => publish_pair(model, data),
        None => model.publish(),
    }
    .map_err(cannot)?;
    Ok(written)
}

struct Files {
    model: NewFile,
    data: Option<NewFile>,
}

/// All initializers: those that stay as they are, then those to add. Data in other files becomes
/// part of the model; without a copy, because those files are mapped.
fn all_parts(draft: &Draft, original: &mut Original<'_>) -> Result<Vec<Part>> {
    let mut parts = Vec::with_capacity(draft.initializers.len() + draft.parts.len());
    for header in &draft.initializers {
        let mut header = header.clone();
        original.bring_inside(&mut header)?;
        parts.push(Part { header, from: None });
    }
    parts.extend(draft.parts.iter().cloned());
    Ok(parts)
}

fn part_length(draft: &Draft, part: &Part) -> Result<usize> {
    let Some((job, result)) = part.from else { return Ok(part.header.encoded_len()) };
    let lengths = draft.jobs.get(job).map_or(Ok(Vec::new()), Job::lengths)?;
    lengths.get(result).copied().ok_or_else(|| Error::new(ErrorKind::Fail, NO_RESULT))
}

const NO_RESULT: &str = "a weight has no such result";

/// Decides which initializers go to the data file. Returns them, and the length of that file.
fn place(draft: &Draft, parts: Vec<Part>, data: Option<&(String, usize)>) -> Result<(Vec<Placed>, u64)> {
    let mut end = 0_u64;
    let mut placed = Vec::with_capacity(parts.len());
    for part in parts {
        let mut header = part.header.clone();
        let (data_of, length) = match (part.from, header.raw_data.take()) {
            (Some((job, result)), _) => (Data::Job { job, result }, part_length(draft, &part)?),
            (None, Some(raw)) => {
                let length = raw.len();
                (Data::Original(raw), length)
            }
            (None, None) => (Data::None, 0),
        };
        let mut offset = None;
        if let Some((name, least)) = data
            && length >= (*least).max(1)
        {
            let alignment = if length as u64 >= PAGE { PAGE } else { ALIGNMENT };
            let start = end.next_multiple_of(alignment);
            end = start + length as u64;
            offset = Some(start);
            refer_to(&mut header, name, start, length as u64);
        }
        placed.push(Placed { header, data: data_of, length, offset });
    }
    Ok((placed, end))
}

fn write_parts(
    draft: &Draft,
    original: &mut Original<'_>,
    placed: &[Placed],
    files: &mut Files,
) -> Result<Written> {
    let (start, model) = head(draft, placed)?;
    put(&mut files.model, &start)?;
    let mut results =
        Results { draft, original, last: None, noises: BTreeMap::new(), zeros: BTreeMap::new() };
    let mut data_end = 0_u64;
    for placed in placed {
        let mut start = Vec::new();
        encode_key(INITIALIZER, WireType::LengthDelimited, &mut start);
        encode_varint(placed.message_length() as u64, &mut start);
        start.extend(placed.header.encode_to_vec());
        if placed.is_inside() {
            encode_key(RAW_DATA, WireType::LengthDelimited, &mut start);
            encode_varint(placed.length as u64, &mut start);
        }
        put(&mut files.model, &start)?;
        let bytes = results.bytes_of(placed)?;
        match (placed.offset, &mut files.data) {
            (Some(offset), Some(file)) => {
                // Less than a page, because each offset is the next multiple of at most a page.
                put(file, &vec![0; (offset - data_end) as usize])?;
                put(file, bytes)?;
                data_end = offset + placed.length as u64;
            }
            _ if placed.is_inside() => put(&mut files.model, bytes)?,
            _ => {}
        }
        if let Data::Original(raw) = &placed.data {
            results.original.release(raw);
        }
    }
    Ok(Written { model, data: data_end, noises: results.noises, zeros: results.zeros })
}

/// Everything before the initializers, which are the last field of the graph, as the graph is of
/// the model; and the length of the whole model.
fn head(draft: &Draft, placed: &[Placed]) -> Result<(Vec<u8>, u64)> {
    let mut head = draft.message.clone();
    let mut graph = head.graph.take().unwrap_or_default();
    graph.node.clone_from(&draft.nodes);
    let with_key = |length: usize| key_len(INITIALIZER) + encoded_len_varint(length as u64) + length;
    let initializers: usize = placed.iter().map(|placed| with_key(placed.message_length())).sum();
    let graph_length = graph.encoded_len() + initializers;
    let total = head.encoded_len() + key_len(GRAPH) + encoded_len_varint(graph_length as u64) + graph_length;
    if total > MESSAGE_LIMIT {
        let text = format!("the model takes {total} bytes, a message at most {MESSAGE_LIMIT}");
        return Err(Error::new(ErrorKind::InvalidArgument, text).help("store the weights beside the model"));
    }
    let mut start = head.encode_to_vec();
    encode_key(GRAPH, WireType::LengthDelimited, &mut start);
    encode_varint(graph_length as u64, &mut start);
    start.extend(graph.encode_to_vec());
    Ok((start, total as u64))
}

/// The results of the last job: those of one weight are next to each other.
struct Results<'d, 's> {
    draft: &'d Draft,
    original: &'d mut Original<'s>,
    last: Option<(usize, Vec<Vec<u8>>)>,
    noises: BTreeMap<String, Noise>,
    zeros: BTreeMap<String, Zeros>,
}

impl Results<'_, '_> {
    /// The data of an initializer.
    fn bytes_of<'p>(&'p mut self, placed: &'p Placed) -> Result<&'p [u8]> {
        let (index, result) = match &placed.data {
            Data::None => return Ok(&[]),
            Data::Original(raw) => return Ok(raw),
            Data::Job { job, result } => (*job, *result),
        };
        let fail = |text: &str| Error::new(ErrorKind::Fail, text);
        if self.last.as_ref().is_none_or(|(last, _)| *last != index) {
            // Freed before the next is computed.
            self.last = None;
            let job = self.draft.jobs.get(index).ok_or_else(|| fail(NO_RESULT))?;
            let weight = self.original.tensor(&job.weight)?;
            let bias = job.bias.as_ref().map(|bias| self.original.tensor(&bias.tensor)).transpose()?;
            let bytes = weight.bytes().map(|bytes| &bytes[..]).unwrap_or_default();
            let pages = WeightPages::of(bytes, self.original.mappings());
            let done = job.run(&weight, bias.as_ref(), pages.as_ref());
            let done = done.within(|| format!("weight '{}'", job.weight.name()))?;
            self.original.release(bytes);
            self.noises.insert(job.codes.clone(), done.noise);
            if let Form::Pruned(_) = job.form {
                self.zeros.insert(job.codes.clone(), done.zeros);
            }
            self.last = Some((index, done.results));
        }
        let results = self.last.as_ref().map(|(_, results)| results);
        let bytes = results.and_then(|results| results.get(result)).ok_or_else(|| fail(NO_RESULT))?;
        if bytes.len() != placed.length {
            return Err(fail("a weight has a result of another length than planned"));
        }
        Ok(bytes)
    }
}

fn put(file: &mut NewFile, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(|problem| {
        Error::new(ErrorKind::Fail, format!("cannot write the model: {problem}"))
            .help("check the free disk space and quotas")
    })
}

fn cannot_write(path: &Path, problem: &io::Error) -> Error {
    Error::new(ErrorKind::Fail, format!("cannot write '{}': {problem}", path.display()))
        .help("check that its folder exists, its permissions, and the free disk space")
}
