//! Loaded models. A model is immutable, and all its sessions share it.
//!
//! A model holds the canonical graph after shape inference, the mapped files that contain its
//! weights, and the programs that sessions have compiled for it. Parsing is in `crate::onnx`.

use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ort_alloc::TrimOnDrop;

use crate::cache::{CompiledModel, Content, Reading, hash_of};
use crate::dim::Symbol;
use crate::ir::verify::verify;
use crate::ir::{Graph, ValueInfo, ValueType};
use crate::onnx::{
    FileAccess, LoadOptions, LoadedModel, Location, ModelInfo, ModelWarning, Source, Warnings, load_warning,
};
use crate::pass::{expand_gradients, holds_gradient};
use crate::spec::{find_requirements, infer_comparing, infer_until};
use crate::tensor::Tensor;
use crate::{Result, Within};

use super::ValueSpec;
use super::shared::CompiledPrograms;

/// A loaded model. Clones share it.
#[derive(Clone)]
pub struct Model {
    /// Shared with the programs of sessions whose rewrites do not change it.
    graph: Arc<Graph>,
    /// Everything else that was loaded. The graph in it is empty.
    file: Arc<LoadedModel>,
    /// The programs that sessions have compiled for it.
    compiled: Arc<CompiledPrograms>,
    /// What equal dimension names imply.
    dims: DimNames,
    /// Last, so that it drops last: it trims the heap once the graph is freed. `None` for graphs
    /// that were built by hand.
    _trim: Option<Arc<TrimOnDrop>>,
}

/// What the dimension names of the inputs imply.
#[derive(Clone, Copy, PartialEq)]
enum DimNames {
    /// Equal names guarantee equal sizes, and nothing else records this equality. This is so for
    /// graphs that were built by hand, and for graphs with gradients.
    Guaranteed,
    /// Names are documentation, which a run may contradict.
    Documentation,
    /// No two names are equal.
    Independent,
}

/// A change to a graph after inference.
struct GraphEdit<'a> {
    name: &'a str,
    edit: &'a mut dyn FnMut(&mut Graph) -> Result<()>,
}

impl GraphEdit<'_> {
    fn apply(self, loaded: &mut LoadedModel) -> Result<()> {
        (self.edit)(&mut loaded.graph)?;
        loaded.graph.sort()?;
        infer_until(&mut loaded.graph, loaded.limits.until())?;
        verify(&loaded.graph)?;
        // The weights of a compiled model were packed for the graph before the edit.
        loaded.compiled = None;
        loaded.changes.push(Content::of_edit(self.name));
        Ok(())
    }
}

impl Model {
    /// Loads a model from a file. The file is mapped, so its weights are read on demand.
    pub fn load(path: impl AsRef<Path>) -> Result<Model> {
        Model::from_source(Source::open(path, FileAccess::default())?)
    }

    /// Loads a model from bytes in memory.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<Model> {
        Model::from_source(Source::from_bytes(bytes))
    }

    /// Loads a model from a reader.
    pub fn from_reader(reader: impl Read) -> Result<Model> {
        Model::from_source(Source::from_reader(reader)?)
    }

    /// Loads a model from an open source.
    pub fn from_source(source: Source) -> Result<Model> {
        Model::from_source_with(source, &LoadOptions::default())
    }

    /// Loads a model from an open source, and changes it: fixes dimensions, takes weights or data
    /// files from memory. Sessions see the changed model. The compiled cache has separate entries
    /// for it.
    ///
    /// ```no_run
    /// use ort_core::onnx::{FileAccess, LoadOptions, Source};
    /// use ort_core::session::Model;
    ///
    /// let free_dimensions = vec![("batch".into(), 4)];
    /// let options = LoadOptions { free_dimensions, ..LoadOptions::default() };
    /// let source = Source::open("model.onnx", FileAccess::default())?;
    /// let model = Model::from_source_with(source, &options)?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`from_source`](Self::from_source). A change that contradicts the model: a
    /// size that an input does not declare, a weight of another type or shape, an external weight
    /// that the model does not have. Other changes for which the model has no counterpart are
    /// [`warnings`](Self::warnings).
    pub fn from_source_with(source: Source, options: &LoadOptions) -> Result<Model> {
        Model::load_edited(source, options, None)
    }

    /// Loads a model from an open source, and edits its inferred graph. Unlike a graph that was
    /// built by hand, the edited one keeps the mapped files of its weights. `name` stands for the
    /// edit: the compiled cache has separate entries for it, so two edits need two names.
    ///
    /// ```no_run
    /// use ort_core::onnx::{FileAccess, Source};
    /// use ort_core::session::Model;
    ///
    /// let source = Source::open("model.onnx", FileAccess::default())?;
    /// let model = Model::from_source_edited(source, "without the second output", |graph| {
    ///     graph.outputs.truncate(1);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`from_source`](Self::from_source) and of the edit, and a graph that is not
    /// valid after the edit.
    pub fn from_source_edited(
        source: Source,
        name: &str,
        mut edit: impl FnMut(&mut Graph) -> Result<()>,
    ) -> Result<Model> {
        let edit = GraphEdit { name, edit: &mut edit };
        Model::load_edited(source, &LoadOptions::default(), Some(edit))
    }

    fn load_edited(source: Source, options: &LoadOptions, edit: Option<GraphEdit<'_>>) -> Result<Model> {
        let mut warnings = Warnings::new(source.is_strict());
        let mut loaded = load_warning(&source, options, &mut warnings)?;
        let (name, keeps_hash) = (source.name().to_owned(), source.keeps_hash());
        // The source shares the files' bytes. Without it `forget_unshared` can free those that no
        // weight uses.
        drop(source);
        let until = loaded.limits.until();
        let reading = Reading { threads: usize::MAX, until };
        loaded.contents.iter_mut().try_for_each(|content| content.forget_unshared(keeps_hash, reading))?;
        let start = Instant::now();
        // Looked up before `expand_gradients` replaces the gradient nodes.
        let dims = match holds_gradient(&loaded.graph) {
            true => DimNames::Guaranteed,
            false => DimNames::Documentation,
        };
        let mut compare = |value: &ValueInfo, ty: &ValueType| warnings.compare(&value.name, &value.ty, ty);
        infer_comparing(&mut loaded.graph, until, &mut compare)
            .and_then(|()| expand_gradients(&mut loaded.graph))
            .within(|| format!("model '{name}'"))?;
        if let Some(edit) = edit {
            edit.apply(&mut loaded).within(|| format!("model '{name}'"))?;
        }
        find_requirements(&mut loaded.graph);
        warnings.log();
        loaded.warnings = warnings.into_list();
        tracing::info!(milliseconds = start.elapsed().as_millis() as u64, "inferred");
        let graph = Arc::new(std::mem::take(&mut loaded.graph));
        let (file, compiled) = (Arc::new(loaded), Arc::default());
        let model = Model { graph, file, compiled, dims, _trim: Some(Arc::default()) };
        // Inference has made pages of the files resident. Runs read those pages again if needed.
        model.release_all();
        Ok(model)
    }

    /// Wraps a graph that was built by hand.
    pub fn from_graph(mut graph: Graph) -> Model {
        find_requirements(&mut graph);
        let (file, compiled) = (Arc::default(), Arc::default());
        Model { graph: Arc::new(graph), file, compiled, dims: DimNames::Guaranteed, _trim: None }
    }

    /// The same model with a graph in which all dimensions are independent.
    pub(super) fn with_graph(&self, mut graph: Graph) -> Model {
        find_requirements(&mut graph);
        // Programs compiled for the named graph rely on its names, so none is shared.
        let (graph, compiled) = (Arc::new(graph), Arc::default());
        Model { graph, compiled, dims: DimNames::Independent, ..self.clone() }
    }

    /// Whether runs may contradict the dimension names.
    pub(super) fn may_be_independent(&self) -> bool {
        self.dims == DimNames::Documentation
    }

    /// The violations of ONNX in the model's file that loading tolerated. A strict [`Source`]
    /// refuses such a file instead.
    pub fn warnings(&self) -> &[ModelWarning] {
        &self.file.warnings
    }

    /// Whether the model was loaded strictly.
    pub(super) fn is_strict(&self) -> bool {
        self.file.strict
    }

    /// Returns an error if a mapped file of the model was modified in place. With `now`, checks
    /// even if the last check was a moment ago.
    pub(super) fn check_files(&self, now: bool) -> Result<()> {
        self.file.check_files(now)
    }

    /// The limits that the model was loaded with.
    pub fn limits(&self) -> &crate::Limits {
        &self.file.limits
    }

    /// The canonical graph.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The canonical graph, shared.
    pub(super) fn shared_graph(&self) -> Arc<Graph> {
        self.graph.clone()
    }

    /// The programs that sessions have compiled for it.
    pub(super) fn compiled(&self) -> &CompiledPrograms {
        &self.compiled
    }

    /// The file's metadata.
    pub fn info(&self) -> &ModelInfo {
        &self.file.info
    }

    /// The inputs of a run, in the model's order.
    pub fn inputs(&self) -> Vec<ValueSpec> {
        let graph = self.graph();
        let spec = |&id: &crate::ir::ValueId| ValueSpec {
            name: graph.value(id).name.to_string(),
            ty: graph.value(id).ty.clone(),
            has_default: graph.input_defaults.contains_key(&id),
        };
        graph.inputs.iter().map(spec).collect()
    }

    /// The symbolic dimensions of the inputs, sorted.
    pub fn symbols(&self) -> Vec<Symbol> {
        let graph = self.graph();
        let shapes = graph.inputs.iter().filter_map(|&id| graph.value(id).ty.shape());
        let all: std::collections::BTreeSet<Symbol> =
            shapes.flatten().flat_map(|dim| dim.symbols()).collect();
        all.into_iter().collect()
    }

    /// The hash of the model's files and of the changes made while loading, for the compiled cache;
    /// `None` for a graph that was built by hand. `stamps` is the folder in which known hashes are
    /// stored.
    pub(super) fn content_hash(&self, stamps: Option<&Path>, reading: Reading) -> Result<Option<String>> {
        // Clones share the hashes that are known.
        let all: Vec<Content> = self.file.contents.iter().chain(&self.file.changes).cloned().collect();
        let hash = hash_of(&all, stamps, reading)?;
        Ok(hash.map(|hash| hash.to_hex().to_string()))
    }

    /// Whether loading changed the model, so that its content differs from its files.
    pub(super) fn was_changed(&self) -> bool {
        !self.file.changes.is_empty()
    }

    /// The files that the model was loaded from, the model file first.
    pub(super) fn contents(&self) -> &[Content] {
        &self.file.contents
    }

    /// The compiled model that the model was loaded from.
    pub(super) fn compiled_model(&self) -> Option<&Arc<CompiledModel>> {
        // Its weights were packed under the assumption that equal dimension names mean equal sizes.
        self.file.compiled.as_ref().filter(|_| self.dims != DimNames::Independent)
    }

    /// Returns where a weight is in a data file of the model, if it is in one.
    pub(super) fn location_of(&self, tensor: &Tensor) -> Option<Location> {
        let bytes = tensor.bytes().filter(|bytes| !bytes.is_empty())?;
        // The first is the model file itself. The names of weights that the caller supplied begin
        // with a null byte.
        let mut files = self.contents().iter().skip(1).filter(|content| !content.name().starts_with('\0'));
        files.find_map(|content| {
            let file = content.bytes()?;
            let offset = bytes.as_ptr().addr().checked_sub(file.as_ptr().addr())?;
            let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= file.len());
            fits.then(|| Location {
                path: content.name().into(),
                offset: offset as u64,
                length: Some(bytes.len() as u64),
            })
        })
    }

    /// Whether weights of the model are in a mapped file.
    pub(super) fn has_mapped_files(&self) -> bool {
        !self.file.mappings.is_empty()
    }

    /// Whether these bytes are part of a mapped file of the model.
    pub(super) fn is_mapped(&self, bytes: &[u8]) -> bool {
        self.file.mappings.iter().any(|mapping| mapping.contains(bytes))
    }

    /// Whether a constant is aligned for its type. A constant in a file of the model is judged by
    /// its offset in that file, so the answer does not depend on where the file is mapped. Any
    /// other constant is judged by its address.
    pub(super) fn is_aligned_in_file(&self, tensor: &Tensor) -> bool {
        let (Some(bytes), Some(size)) = (tensor.bytes(), tensor.dtype().byte_size()) else { return true };
        let start = bytes.as_ptr().addr();
        let mut files = self.file.contents.iter().filter_map(|content| content.bytes());
        let file = files.find(|file| file.as_ptr_range().contains(&bytes.as_ptr()));
        start.wrapping_sub(file.map_or(0, |file| file.as_ptr().addr())).is_multiple_of(size)
    }

    /// Whether a file of the model is mapped.
    pub(super) fn has_mapping(&self) -> bool {
        !self.file.mappings.is_empty()
    }

    /// Drops the resident pages of a weight that was packed or copied. They are read from the file
    /// again on demand. A weight that is not in a mapped file is left alone.
    pub fn release(&self, tensor: &Tensor) {
        if let Some(bytes) = tensor.bytes() {
            self.file.release(bytes);
        }
    }

    /// Drops all resident pages of the model's files. Reading the bytes between weights makes pages
    /// of weights resident, too.
    pub(super) fn release_all(&self) {
        self.file.release_all();
    }

    /// The files that the model was loaded from, for runs.
    pub(super) fn files(&self) -> Arc<LoadedModel> {
        self.file.clone()
    }
}
