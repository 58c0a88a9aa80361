//! From a model file to the canonical graph.
//!
//! On the way the file's habits end: functions local to the model are inlined, `Constant` nodes and
//! `Identity` of constants become constants, nodes are put in order and get unique names, what
//! subgraphs read from outside becomes explicit, and each node is upgraded to the canonical form of
//! its operator's record.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use indexmap::IndexMap;
use ort_alloc::MappedFile;

use super::build::Loader;
use super::external::ExternalData;
use super::names::{FunctionKey, Opsets, canonical_domain, domain_name, function_key};
use super::order::{for_each_subgraph, node_label};
use super::proto::{
    FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    ValueInfoProto,
};
use super::source::Source;
use super::warnings::{ModelWarning, WarningKind, Warnings};
use crate::cache::{CompiledModel, Content, FileWatch};
use crate::ir::Graph;
use crate::spec::{RUNTIME, Registry};
use crate::tensor::Tensor;
use crate::{Limits, Result, Within, ensure, error, nearest};

/// A model as it was loaded: the canonical graph, not yet inferred, and what else the file says.
#[derive(Debug, Default)]
pub struct LoadedModel {
    /// The graph.
    pub graph: Graph,
    /// What the file says about itself.
    pub info: ModelInfo,
    /// The files whose mappings the constants are slices of.
    pub mappings: Vec<MappedFile>,
    /// The files themselves, the model's own first.
    pub(crate) contents: Vec<Content>,
    /// Whether mapped files are changed in place.
    pub(crate) watch: FileWatch,
    /// The compiled model that all of it lies in, if it does.
    pub(crate) compiled: Option<Arc<CompiledModel>>,
    /// What it was loaded within; runs of sessions on it keep to its deadline.
    pub limits: Limits,
    /// What in the file ONNX does not allow, and loading made good.
    pub warnings: Vec<ModelWarning>,
    /// Whether loading refuses what it could warn of.
    pub(crate) strict: bool,
}

impl LoadedModel {
    /// An error if a mapped file of the model was changed in place; `now` looks however soon after
    /// the last time.
    pub(crate) fn check_files(&self, now: bool) -> Result<()> {
        if now { self.watch.look() } else { self.watch.check() }
    }

    /// Lets go of the resident pages of a weight; they come back from the file when they are read.
    /// A weight that is in no mapped file stays as it is.
    pub(crate) fn release(&self, tensor: &Tensor) {
        let Some(bytes) = tensor.bytes() else { return };
        for mapping in &self.mappings {
            if let Some(range) = mapping.range_of(bytes) {
                release(mapping, range);
            }
        }
    }

    /// The same for all pages: reading what lies between the weights brings many of those in, too.
    pub(crate) fn release_all(&self) {
        for mapping in &self.mappings {
            // Packed weights that lie in the same file stay.
            let end =
                self.compiled.as_ref().map_or(mapping.len(), |compiled| compiled.entry().source_bytes());
            release(mapping, 0..end);
        }
    }
}

fn release(mapping: &MappedFile, range: Range<usize>) {
    if let Err(problem) = mapping.release(range) {
        tracing::debug!("pages of the model's file stay resident: {problem}");
    }
}

/// What a model file says about itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelInfo {
    /// The IR version it was written against.
    pub ir_version: i64,
    /// The tool that wrote it.
    pub producer_name: String,
    /// That tool's version.
    pub producer_version: String,
    /// The model's namespace.
    pub domain: String,
    /// The model's own version.
    pub model_version: i64,
    /// The graph's name.
    pub graph_name: String,
    /// Operator sets: domain (empty for the standard's own) and version.
    pub opsets: Vec<(String, i64)>,
    /// Named metadata.
    pub metadata: Vec<(String, String)>,
    /// The number of functions local to the model.
    pub functions: usize,
    /// The names of the initializers of the graph and of its subgraphs, in order: the weights, as
    /// against constants that nodes give.
    pub initializers: Vec<String>,
    /// Those of the graph that PyTorch's exporter marks as buffers or constants, as against
    /// parameters.
    pub buffers: Vec<String>,
}

impl ModelInfo {
    /// What `model` says about itself.
    pub fn of(model: &ModelProto) -> ModelInfo {
        let pair = |entry: &super::proto::StringStringEntryProto| (entry.key().into(), entry.value().into());
        ModelInfo {
            ir_version: model.ir_version(),
            producer_name: model.producer_name().into(),
            producer_version: model.producer_version().into(),
            domain: model.domain().into(),
            model_version: model.model_version(),
            graph_name: model.graph.as_ref().map_or("", |graph| graph.name()).into(),
            opsets: model.opset_import.iter().map(|set| (set.domain().into(), set.version())).collect(),
            metadata: model.metadata_props.iter().map(pair).collect(),
            functions: model.functions.len(),
            initializers: initializer_names(model),
            buffers: buffer_names(model),
        }
    }
}

/// The metadata that says what an initializer was in PyTorch: `PARAMETER`, `BUFFER` or
/// `CONSTANT_TENSOR`. See <https://docs.pytorch.org/docs/stable/onnx_export.html>.
const INPUT_KIND: &str = "pkg.torch.export.graph_signature.InputSpec.kind";

fn buffer_names(model: &ModelProto) -> Vec<String> {
    let is_buffer = |info: &&ValueInfoProto| {
        let mut kinds = info.metadata_props.iter().filter(|entry| entry.key() == INPUT_KIND);
        kinds.any(|entry| matches!(entry.value(), "BUFFER" | "CONSTANT_TENSOR"))
    };
    let infos = model.graph.iter().flat_map(|graph| graph.value_info.iter().chain(&graph.input));
    infos.filter(is_buffer).map(|info| info.name().to_string()).collect()
}

/// What marks an initializer as a buffer.
pub(super) fn buffer_mark() -> StringStringEntryProto {
    StringStringEntryProto { key: Some(INPUT_KIND.into()), value: Some("BUFFER".into()) }
}

fn initializer_names(model: &ModelProto) -> Vec<String> {
    let mut graphs: Vec<&GraphProto> = model.graph.iter().collect();
    let mut names = Vec::new();
    while let Some(graph) = graphs.pop() {
        names.extend(graph.initializer.iter().map(|tensor| tensor.name().to_string()));
        let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
        names.extend(sparse.map(|values| values.name().to_string()));
        let attributes = graph.node.iter().flat_map(|node| &node.attribute);
        graphs.extend(
            attributes.flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs)),
        );
    }
    names
}

/// An operator that a model uses and no record describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownOperator {
    /// Its domain; empty for the standard's own.
    pub domain: String,
    /// Its name.
    pub op: String,
    /// The version of its domain that the model asks for, where it asks for one.
    pub version: Option<i64>,
    /// The number of nodes that use it, in subgraphs and functions, too.
    pub count: usize,
    /// The first of those nodes.
    pub first_node: String,
}

impl UnknownOperator {
    /// What it may have been meant to be: an operator of nearly the same name, or of another
    /// domain.
    pub fn advice(&self) -> Result<String> {
        let records = Registry::global()?.records();
        let of_domain = || records.iter().filter(|record| record.domain == self.domain);
        if let Some(near) = nearest(&self.op, of_domain().map(|record| record.name)) {
            return Ok(format!("did you mean '{near}'?"));
        }
        if let Some(record) = records.iter().find(|record| record.name == self.op) {
            return Ok(format!("domain {} has an operator of that name", domain_name(record.domain)));
        }
        let domains = records.iter().map(|record| record.domain).filter(|domain| !domain.is_empty());
        let known = self.domain.is_empty() || of_domain().next().is_some();
        Ok(match nearest(&self.domain, domains).filter(|_| !known) {
            Some(domain) => format!("did you mean domain '{domain}'?"),
            None => "export the model without it, or register its record and a kernel".to_string(),
        })
    }
}

/// Loads the model that `source` holds.
///
/// Errors: the bytes are no model; it uses unknown operators (all are named at once); it
/// contradicts the standard (cycles, dangling or doubly defined values, wrong attributes, data that
/// does not fill its shape).
pub fn load(source: &Source) -> Result<LoadedModel> {
    let mut warnings = Warnings::new(source.is_strict());
    let mut loaded = load_warning(source, &mut warnings)?;
    warnings.log();
    loaded.warnings = warnings.into_list();
    Ok(loaded)
}

/// The same for a caller that adds warnings of its own and logs them.
pub(crate) fn load_warning(source: &Source, warnings: &mut Warnings) -> Result<LoadedModel> {
    let model = source.decode()?;
    let mut loaded = load_within(model, source.external_data()?, source.limits_of(), warnings)
        .within(|| format!("model '{}'", source.name()))?;
    loaded.strict = source.is_strict();
    loaded.mappings.extend(source.mapping().cloned());
    loaded.contents.insert(0, source.content());
    if let (Some(path), Some(_)) = (source.path(), source.mapping()) {
        loaded.watch.add(path, source.identity());
    }
    loaded.compiled = source.compiled().cloned();
    Ok(loaded)
}

/// Loads a model that is decoded already.
pub fn load_proto(model: ModelProto, external: ExternalData) -> Result<LoadedModel> {
    let mut warnings = Warnings::default();
    let mut loaded = load_within(model, external, &Limits::default(), &mut warnings)?;
    warnings.log();
    loaded.warnings = warnings.into_list();
    Ok(loaded)
}

fn load_within(
    mut model: ModelProto,
    external: ExternalData,
    limits: &Limits,
    warnings: &mut Warnings,
) -> Result<LoadedModel> {
    let info = ModelInfo::of(&model);
    let unknown = unknown_operators(&model)?;
    if let Some(first) = unknown.first() {
        return Err(error!(NotImplemented, "{}", describe(&unknown)).help(first.advice()?));
    }
    if !model.training_info.is_empty() {
        tracing::debug!("the model's training graphs are not loaded");
    }
    let opsets = opsets_of(&model.opset_import, info.ir_version, warnings)?;
    if let Some(&version) = opsets.get("").filter(|&&version| version > NEWEST_OPSET) {
        let text = format!(
            "operator set {version} is newer than {NEWEST_OPSET}, the newest known; operators are taken to be unchanged"
        );
        warnings.add(WarningKind::OpsetImport, String::new, text)?;
    }
    let graph = model.graph.as_mut().ok_or_else(|| error!(NoModel, "the model has no graph"))?;
    // Taken by value: typed data then becomes the weights' memory without a copy.
    let weights = std::mem::take(&mut graph.initializer);
    let sparse = std::mem::take(&mut graph.sparse_initializer);
    let functions = functions_of(&model)?;
    for (domain, name, _) in functions.hidden {
        let text = format!("function '{name}' is ignored: domain '{domain}' has an operator of that name");
        warnings.add(WarningKind::Function, String::new, text)?;
    }
    let mut loader = Loader::new(functions.called, info.ir_version, external, *limits, warnings)?;
    let graph = model.graph.as_ref().ok_or_else(|| error!(NoModel, "the model has no graph"))?;
    let graph = loader.main_graph(graph, weights, sparse, Arc::new(opsets))?;
    graph.verify()?;
    tracing::info!(
        nodes = graph.nodes.len(),
        constants = graph.constants.len(),
        weight_bytes = graph.weight_bytes(),
        "loaded"
    );
    let mappings = loader.external.mappings().cloned().collect();
    let contents = loader.external.contents();
    let mut watch = FileWatch::default();
    loader.external.watch(&mut watch);
    let limits = *limits;
    Ok(LoadedModel { graph, info, mappings, contents, watch, limits, ..LoadedModel::default() })
}

/// The newest version of the standard's operator set that the records were compared with.
pub const NEWEST_OPSET: i64 = 28;

/// The version of each domain; of a domain that is imported twice the last one, as in ONNX Runtime.
/// Models older than IR version 3 have no list and mean version 1.
pub(super) fn opsets_of(
    imports: &[OperatorSetIdProto],
    ir_version: i64,
    warnings: &mut Warnings,
) -> Result<Opsets> {
    let mut opsets = Opsets::new();
    for import in imports {
        let domain = canonical_domain(import.domain());
        ensure!(
            import.version() > 0,
            InvalidGraph,
            help = format!("versions count from 1; the newest of ai.onnx is {NEWEST_OPSET}"),
            "operator set '{domain}' has version {}",
            import.version()
        );
        let other = opsets.insert(domain.to_string(), import.version());
        if other.is_some() {
            let text =
                format!("operator set '{}' is imported twice; the last import counts", domain_name(domain));
            warnings.add(WarningKind::OpsetImport, String::new, text)?;
        }
    }
    if imports.is_empty() && ir_version < 3 {
        opsets.insert(String::new(), 1);
    }
    Ok(opsets)
}

/// The functions of a model.
struct Functions<'m> {
    called: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    /// Those that stand behind an operator.
    hidden: Vec<FunctionKey<'m>>,
}

fn functions_of(model: &ModelProto) -> Result<Functions<'_>> {
    let registry = Registry::global()?;
    let mut functions = Functions { called: HashMap::new(), hidden: Vec::new() };
    for function in &model.functions {
        let key = (canonical_domain(function.domain()), function.name(), function.overload());
        if is_operator(registry, &model.opset_import, key) {
            functions.hidden.push(key);
            continue;
        }
        ensure!(
            functions.called.insert(key, function).is_none(),
            InvalidGraph,
            "function '{}' of domain '{}' is defined twice",
            key.1,
            key.0
        );
    }
    Ok(functions)
}

/// Whether a function has the name of an operator that the model imports. ONNX leaves to the
/// runtime which of the two a node means; in ONNX Runtime it is the operator.
fn is_operator(
    registry: &Registry,
    imports: &[OperatorSetIdProto],
    (domain, name, overload): FunctionKey<'_>,
) -> bool {
    let is_of_domain = |import: &&OperatorSetIdProto| canonical_domain(import.domain()) == domain;
    let version = imports.iter().rfind(is_of_domain).map(|import| import.version());
    let record = registry.find(domain, name).filter(|_| overload.is_empty() && domain != RUNTIME);
    record.zip(version).is_some_and(|(record, version)| record.first <= version)
}

/// Every operator of the model, in subgraphs and functions that are called, too, that no record
/// describes.
pub fn unknown_operators(model: &ModelProto) -> Result<Vec<UnknownOperator>> {
    let mut survey = Survey {
        registry: Registry::global()?,
        functions: functions_of(model)?.called,
        seen: HashSet::new(),
        unknown: IndexMap::new(),
    };
    if let Some(graph) = &model.graph {
        survey.graph(graph, &model.opset_import);
    }
    Ok(survey.unknown.into_values().collect())
}

struct Survey<'m> {
    registry: &'static Registry,
    functions: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    seen: HashSet<FunctionKey<'m>>,
    unknown: IndexMap<(&'m str, &'m str), UnknownOperator>,
}

impl<'m> Survey<'m> {
    fn graph(&mut self, graph: &'m GraphProto, imports: &'m [OperatorSetIdProto]) {
        self.nodes(&graph.node, imports);
    }

    /// Functions wait in a list, so that their calls, however deep, need no stack.
    fn nodes(&mut self, nodes: &'m [NodeProto], imports: &'m [OperatorSetIdProto]) {
        let mut work = vec![(nodes, imports)];
        while let Some((nodes, imports)) = work.pop() {
            for (index, node) in nodes.iter().enumerate() {
                let key = function_key(node);
                match self.functions.get(&key) {
                    Some(function) if self.seen.insert(key) => {
                        work.push((&function.node, &function.opset_import));
                    }
                    Some(_) => {}
                    None => self.operator(node, index, imports),
                }
                for_each_subgraph(node, &mut |graph| work.push((&graph.node, imports)));
            }
        }
    }

    fn operator(&mut self, node: &'m NodeProto, index: usize, imports: &[OperatorSetIdProto]) {
        let (domain, op, _) = function_key(node);
        if self.registry.find(domain, op).is_some() || (domain, op) == ("", "Constant") {
            return;
        }
        let import = imports.iter().rfind(|import| canonical_domain(import.domain()) == domain);
        let entry = self.unknown.entry((domain, op)).or_insert_with(|| UnknownOperator {
            domain: domain.to_string(),
            op: op.to_string(),
            version: import.map(|import| import.version()),
            count: 0,
            first_node: node_label(node, index),
        });
        entry.count += 1;
    }
}

fn describe(unknown: &[UnknownOperator]) -> String {
    let one = |operator: &UnknownOperator| {
        let domain = domain_name(&operator.domain);
        let nodes = if operator.count == 1 { "node" } else { "nodes" };
        let UnknownOperator { op, count, first_node, .. } = operator;
        format!("{op} of domain {domain} ({count} {nodes}, first '{first_node}')")
    };
    let shown: Vec<String> = unknown.iter().take(20).map(one).collect();
    let more = unknown.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let what = if unknown.len() == 1 { "operator is" } else { "operators are" };
    format!("{} {what} not known: {}{more}", unknown.len(), shown.join(", "))
}
