//! Model loading: from an ONNX file to the canonical graph.
//!
//! Loading normalizes the model. Model-local functions are inlined. `Constant` nodes, and
//! `Identity` of constants, become constants. Nodes are sorted topologically and get unique names.
//! Captures of subgraphs become explicit. Each node is upgraded to the canonical form of its
//! operator's record.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use indexmap::IndexMap;
use ort_alloc::{HUGE_PAGE_BYTES, MappedFile};

use super::build::Loader;
use super::changes::{GivenValues, LoadOptions, fix_dimensions, give_files, warn_of_unread_files};
use super::declared::{DeclaredShapes, declared_shapes};
use super::external::ExternalData;
use super::files::NO_GRAPH;
use super::names::{FunctionKey, Opsets, domain_name, function_key};
use super::order::{for_each_subgraph, node_label};
use super::proto::{
    FunctionProto, GraphProto, IR_VERSION, ModelProto, NodeProto, OperatorSetIdProto, StringStringEntryProto,
    ValueInfoProto,
};
use super::source::Source;
use super::warnings::{ModelWarning, WarningKind, Warnings};
use crate::cache::{CompiledModel, Content, FileWatch};
use crate::custom::CustomOperators;
use crate::ir::Graph;
use crate::spec::{MICROSOFT, RUNTIME, Registry, canonical_domain};
use crate::{Error, ErrorKind, Limits, Result, Within, ensure, error, nearest};

/// A loaded model: the canonical graph before shape inference, and the rest of what the file says.
#[derive(Debug, Default)]
pub struct LoadedModel {
    /// The graph.
    pub graph: Graph,
    /// The file's metadata.
    pub info: ModelInfo,
    /// The mapped files whose memory the constants share.
    pub mappings: Vec<MappedFile>,
    /// All files of the model, its own first.
    pub(crate) contents: Vec<Content>,
    /// What the caller had changed in the model, apart from the content of data files.
    pub(crate) changes: Vec<Content>,
    /// Detects mapped files that are modified in place.
    pub(crate) watch: FileWatch,
    /// The compiled model that all of this was read from, if it was.
    pub(crate) compiled: Option<Arc<CompiledModel>>,
    /// The limits it was loaded with. Runs of its sessions obey their deadline.
    pub limits: Limits,
    /// Deviations from ONNX that loading repaired.
    pub warnings: Vec<ModelWarning>,
    /// Whether loading refuses what it would otherwise only warn of.
    pub(crate) strict: bool,
}

impl LoadedModel {
    /// Returns an error if a mapped file of the model was modified in place. `now` checks even if
    /// the last check was moments ago.
    pub(crate) fn check_files(&self, now: bool) -> Result<()> {
        if now { self.watch.look() } else { self.watch.check() }
    }

    /// Drops the resident pages of a weight or a part of one; reading them faults them in from the
    /// file again. Bytes outside the mapped files are unaffected.
    pub(crate) fn release(&self, bytes: &[u8]) {
        for mapping in &self.mappings {
            let Some(Range { start, end }) = mapping.range_of(bytes) else { continue };
            // Reading them has also made pages around them resident, even released ones: Linux maps
            // the whole folio in which a fault is, which never exceeds a huge page.
            let end = end.saturating_add(HUGE_PAGE_BYTES).min(self.source_bytes(mapping)).max(end);
            release(mapping, start.saturating_sub(HUGE_PAGE_BYTES)..end);
        }
    }

    /// The bytes of a mapped file before the packed weights of a compiled model.
    fn source_bytes(&self, mapping: &MappedFile) -> usize {
        self.compiled.as_ref().map_or(mapping.len(), |compiled| compiled.entry().source_bytes())
    }

    /// Drops all resident pages of the files, because reading the bytes between the weights faults
    /// in many pages too.
    pub(crate) fn release_all(&self) {
        for mapping in &self.mappings {
            // Packed weights stored in the same file stay resident.
            release(mapping, 0..self.source_bytes(mapping));
        }
    }
}

fn release(mapping: &MappedFile, range: Range<usize>) {
    // Releasing is a hint, so a failure only costs memory.
    if let Err(problem) = mapping.release(range) {
        tracing::debug!("pages of the model's file stay resident: {problem}");
    }
}

/// The metadata of a model file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelInfo {
    /// The IR version the model was written against.
    pub ir_version: i64,
    /// The tool that wrote the model.
    pub producer_name: String,
    /// That tool's version.
    pub producer_version: String,
    /// The model's namespace.
    pub domain: String,
    /// The model's own version.
    pub model_version: Option<i64>,
    /// What the model is, in its own words.
    pub description: String,
    /// The graph's name.
    pub graph_name: String,
    /// What the graph is, in its own words.
    pub graph_description: String,
    /// Imported operator sets: domain (empty for the standard's own) and version.
    pub opsets: Vec<(String, i64)>,
    /// The metadata properties.
    pub metadata: Vec<(String, String)>,
    /// The number of model-local functions.
    pub functions: usize,
    /// The names of the initializers of the graph and its subgraphs, in order. These are the
    /// weights; the outputs of `Constant` nodes are not included.
    pub initializers: Vec<String>,
    /// The names that the loader gave to nodes without one, such as `Add_3`, unless another node
    /// of the model has such a name.
    pub unnamed_nodes: BTreeSet<String>,
    /// The initializers that PyTorch's exporter marks as buffers or constants rather than
    /// parameters.
    pub buffers: Vec<String>,
    /// The shapes of the graph's inputs as the model declares them.
    pub declared_inputs: DeclaredShapes,
    /// The shapes of the graph's outputs as the model declares them.
    pub declared_outputs: DeclaredShapes,
}

impl ModelInfo {
    /// Collects the metadata of `model`.
    pub fn of(model: &ModelProto) -> ModelInfo {
        let pair = |entry: &super::proto::StringStringEntryProto| (entry.key().into(), entry.value().into());
        // Descriptions in old files may be in any encoding.
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ModelInfo {
            ir_version: model.ir_version(),
            producer_name: model.producer_name().into(),
            producer_version: model.producer_version().into(),
            domain: model.domain().into(),
            model_version: model.model_version,
            description: text(model.doc_string()),
            graph_name: model.graph.as_ref().map_or("", |graph| graph.name()).into(),
            graph_description: model
                .graph
                .as_ref()
                .map_or_else(String::new, |graph| text(graph.doc_string())),
            opsets: model.opset_import.iter().map(|set| (set.domain().into(), set.version())).collect(),
            metadata: model.metadata_props.iter().map(pair).collect(),
            functions: model.functions.len(),
            initializers: initializer_names(model),
            unnamed_nodes: unnamed_nodes(model),
            buffers: buffer_names(model),
            declared_inputs: model
                .graph
                .as_ref()
                .map(|graph| declared_shapes(&graph.input))
                .unwrap_or_default(),
            declared_outputs: model
                .graph
                .as_ref()
                .map(|graph| declared_shapes(&graph.output))
                .unwrap_or_default(),
        }
    }
}

/// The metadata key under which PyTorch stores the role of an initializer: `PARAMETER`, `BUFFER` or
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

/// Returns the metadata entry that marks an initializer as a buffer.
pub(super) fn buffer_mark() -> StringStringEntryProto {
    StringStringEntryProto { key: Some(INPUT_KIND.into()), value: Some("BUFFER".into()) }
}

fn initializer_names(model: &ModelProto) -> Vec<String> {
    let mut names = Vec::new();
    for graph in all_graphs(model) {
        names.extend(graph.initializer.iter().map(|tensor| tensor.name().to_string()));
        let sparse = graph.sparse_initializer.iter().filter_map(|tensor| tensor.values.as_ref());
        names.extend(sparse.map(|values| values.name().to_string()));
    }
    names
}

fn unnamed_nodes(model: &ModelProto) -> BTreeSet<String> {
    let graphs = all_graphs(model);
    let nodes = || graphs.iter().flat_map(|graph| graph.node.iter().enumerate());
    let unnamed = nodes().filter(|(_, node)| node.name().is_empty());
    let mut labels: BTreeSet<String> = unnamed.map(|(index, node)| node_label(node, index)).collect();
    if !labels.is_empty() {
        for (_, node) in nodes() {
            labels.remove(node.name());
        }
    }
    labels
}

/// Returns the model's graph and all subgraphs.
fn all_graphs(model: &ModelProto) -> Vec<&GraphProto> {
    let mut waiting: Vec<&GraphProto> = model.graph.iter().collect();
    let mut graphs = Vec::new();
    while let Some(graph) = waiting.pop() {
        for node in &graph.node {
            for_each_subgraph(node, &mut |inner| waiting.push(inner));
        }
        graphs.push(graph);
    }
    graphs
}

/// An operator that a model uses but that has no record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownOperator {
    /// Its domain; empty for the standard's own.
    pub domain: String,
    /// Its name.
    pub op: String,
    /// The imported version of its domain, if the model imports the domain.
    pub version: Option<i64>,
    /// The number of nodes that use it, including those in subgraphs and functions.
    pub count: usize,
    /// The first of those nodes.
    pub first_node: String,
}

impl UnknownOperator {
    /// Returns the kind that ONNX Runtime reports, and its words: the graph is invalid if ONNX
    /// itself does not define the operator, or if the model does not import its domain.
    fn in_onnx_runtime(&self) -> (ErrorKind, String) {
        let UnknownOperator { domain, op, .. } = self;
        // ONNX Runtime imports its own domain into every model.
        let version = self.version.or((domain == MICROSOFT).then_some(1));
        match version {
            _ if op.is_empty() => {
                (ErrorKind::InvalidGraph, "Field 'op_type' of 'node' is required to be non-empty".into())
            }
            None => {
                let text = format!("No opset import for domain '{domain}' of operator {op}");
                (ErrorKind::InvalidGraph, text)
            }
            Some(version) if matches!(&**domain, "" | "ai.onnx.ml" | "ai.onnx.training") => {
                let text = format!("No Op registered for {op} with domain_version of {version}");
                (ErrorKind::InvalidGraph, text)
            }
            // -1 stands for no version of the operator.
            Some(_) => (ErrorKind::Fail, format!("{domain}:{op}(-1) is not a registered function/op")),
        }
    }

    /// Returns advice: an operator of a similar name, or the domain that has an operator of this
    /// name.
    pub fn advice(&self) -> Result<String> {
        let records = Registry::global()?.records();
        let of_domain = || records.iter().filter(|record| record.domain == self.domain);
        if let Some(near) = nearest(&self.op, of_domain().map(|record| record.name)) {
            return Ok(format!("did you mean '{near}'?"));
        }
        if let Some(record) = records.iter().find(|record| record.name == self.op) {
            return Ok(format!("domain {} has an operator of that name", domain_name(record.domain)));
        }
        if self.version.is_none() {
            let UnknownOperator { domain, op, .. } = self;
            return Ok(match of_domain().next() {
                Some(_) => format!("add an opset import for domain '{domain}' to the model"),
                None => format!(
                    "add an opset import for domain '{domain}' and define {op} as a function of the model, or export \
                     the model without it"
                ),
            });
        }
        let domains = records.iter().map(|record| record.domain).filter(|domain| !domain.is_empty());
        // A known domain cannot be the misspelled part.
        let known = self.domain.is_empty() || of_domain().next().is_some();
        Ok(match nearest(&self.domain, domains).filter(|_| !known) {
            Some(domain) => format!("did you mean domain '{domain}'?"),
            None => "export the model without it, or give it as a custom operator".to_string(),
        })
    }
}

/// Loads the model in `source`.
///
/// Errors: the bytes are not a model; it uses unknown operators (the error names all of them); it
/// violates the standard (cycles, undefined or multiply defined values, wrong attributes, data that
/// does not fill its shape).
pub fn load(source: &Source) -> Result<LoadedModel> {
    let mut warnings = Warnings::new(source.is_strict());
    let mut loaded = load_warning(source, &LoadOptions::default(), &mut warnings)?;
    warnings.log();
    loaded.warnings = warnings.into_list();
    Ok(loaded)
}

/// Same as [`load`] for a caller that changes the model, adds warnings of its own and logs them.
pub(crate) fn load_warning(
    source: &Source,
    options: &LoadOptions,
    warnings: &mut Warnings,
) -> Result<LoadedModel> {
    let model = source.decode()?;
    let mut loaded = load_within(model, source.external_data()?, options, source.limits_of(), warnings)
        .within(|| format!("model '{}'", source.name()))?;
    loaded.strict = source.is_strict();
    loaded.mappings.extend(source.mapping().cloned());
    loaded.contents.insert(0, source.content());
    // Only a mapping shows later writes; bytes that were read are a copy.
    if let (Some(path), Some(_)) = (source.path(), source.mapping()) {
        loaded.watch.add(path, source.identity());
    }
    loaded.compiled = source.compiled().cloned();
    Ok(loaded)
}

/// Loads a model that is already decoded.
pub fn load_proto(model: ModelProto, external: ExternalData) -> Result<LoadedModel> {
    let mut warnings = Warnings::default();
    let options = LoadOptions::default();
    let mut loaded = load_within(model, external, &options, &Limits::default(), &mut warnings)?;
    warnings.log();
    loaded.warnings = warnings.into_list();
    Ok(loaded)
}

fn load_within(
    mut model: ModelProto,
    mut external: ExternalData,
    options: &LoadOptions,
    limits: &Limits,
    warnings: &mut Warnings,
) -> Result<LoadedModel> {
    let info = ModelInfo::of(&model);
    let unknown = unknown_besides(&model, &options.operators)?;
    if let Some(first) = unknown.first() {
        let (kind, _) = first.in_onnx_runtime();
        return Err(Error::new(kind, describe(&unknown)).help(first.advice()?));
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
    if info.ir_version > IR_VERSION {
        let text = format!(
            "IR version {} is newer than {IR_VERSION}, the newest known; fields of newer versions are not read",
            info.ir_version
        );
        warnings.add(WarningKind::IrVersion, String::new, text)?;
    }
    let graph = model.graph.as_mut().ok_or_else(|| error!(InvalidArgument, "{NO_GRAPH}"))?;
    let dimensions = fix_dimensions(options, graph, warnings)?;
    let given = GivenValues::new(options, &info.initializers, warnings)?;
    let changes = given.contents().into_iter().chain(dimensions).chain(options.operators.content());
    let changes = changes.collect();
    give_files(options, &mut external)?;
    // Take the initializers by value, so that typed data becomes weight memory without a copy.
    let weights = std::mem::take(&mut graph.initializer);
    let sparse = std::mem::take(&mut graph.sparse_initializer);
    let functions = functions_of(&model, &options.operators)?;
    for (domain, name, _) in functions.hidden {
        let text = format!("function '{name}' is ignored: domain '{domain}' has an operator of that name");
        warnings.add(WarningKind::Function, String::new, text)?;
    }
    let mut loader = Loader::new(functions.called, info.ir_version, external, given, *limits, warnings)?;
    loader.operators = options.operators.clone();
    let graph = model.graph.as_ref().ok_or_else(|| error!(InvalidArgument, "{NO_GRAPH}"))?;
    let graph = loader.main_graph(graph, weights, sparse, Arc::new(opsets))?;
    graph.verify()?;
    warn_of_unread_files(options, &loader.external, loader.warnings)?;
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
    Ok(LoadedModel { graph, info, mappings, contents, changes, watch, limits, ..LoadedModel::default() })
}

/// The newest version of the standard's operator set that the records were checked against.
pub const NEWEST_OPSET: i64 = 28;

/// Returns the version of each imported domain. If a domain is imported twice, the last import
/// wins, as in ONNX Runtime. Models older than IR version 3 have no imports, which means version 1.
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
        // Converters repeat imports, which says nothing new.
        if other.is_some_and(|other| other != import.version()) {
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

/// The model-local functions.
struct Functions<'m> {
    called: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    /// Functions shadowed by an operator of the same name.
    hidden: Vec<FunctionKey<'m>>,
}

fn functions_of<'m>(model: &'m ModelProto, operators: &CustomOperators) -> Result<Functions<'m>> {
    let registry = Registry::global()?;
    let mut functions = Functions { called: HashMap::new(), hidden: Vec::new() };
    for function in &model.functions {
        let key = (canonical_domain(function.domain()), function.name(), function.overload());
        let is_custom = operators.has(key.0, key.1) && key.2.is_empty();
        if is_custom || is_operator(registry, &model.opset_import, key) {
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

/// Returns whether a function has the name of an operator that the model imports. ONNX leaves open
/// which of the two a node calls. ONNX Runtime calls the operator.
fn is_operator(
    registry: &Registry,
    imports: &[OperatorSetIdProto],
    (domain, name, overload): FunctionKey<'_>,
) -> bool {
    let is_of_domain = |import: &&OperatorSetIdProto| canonical_domain(import.domain()) == domain;
    // The last import of a domain counts, as in `opsets_of`.
    let version = imports.iter().rfind(is_of_domain).map(|import| import.version());
    // Operators have no overloads, so a function with one is not shadowed.
    let record = registry.find(domain, name).filter(|_| overload.is_empty() && domain != RUNTIME);
    record.zip(version).is_some_and(|(record, version)| record.first <= version)
}

/// Lists the operators of the model that have no record. Subgraphs and called functions are
/// included.
pub fn unknown_operators(model: &ModelProto) -> Result<Vec<UnknownOperator>> {
    unknown_besides(model, &CustomOperators::default())
}

/// The same for a model that may use custom operators.
fn unknown_besides(model: &ModelProto, operators: &CustomOperators) -> Result<Vec<UnknownOperator>> {
    let mut survey = Survey {
        registry: Registry::global()?,
        operators,
        functions: functions_of(model, operators)?.called,
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
    operators: &'m CustomOperators,
    functions: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    seen: HashSet<FunctionKey<'m>>,
    unknown: IndexMap<(&'m str, &'m str), UnknownOperator>,
}

impl<'m> Survey<'m> {
    fn graph(&mut self, graph: &'m GraphProto, imports: &'m [OperatorSetIdProto]) {
        self.nodes(&graph.node, imports);
    }

    /// Uses a worklist, so that deep chains of function calls cannot overflow the stack.
    fn nodes(&mut self, nodes: &'m [NodeProto], imports: &'m [OperatorSetIdProto]) {
        let mut work = vec![(nodes, imports)];
        while let Some((nodes, imports)) = work.pop() {
            for (index, node) in nodes.iter().enumerate() {
                let key = function_key(node);
                match self.functions.get(&key) {
                    // Each function body is visited once, however many nodes call it.
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
        let is_known = self.registry.find(domain, op).is_some() || self.operators.has(domain, op);
        if is_known || (domain, op) == ("", "Constant") {
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
        let UnknownOperator { count, first_node, .. } = operator;
        let (_, text) = operator.in_onnx_runtime();
        format!("{text} (domain {domain}, {count} {nodes}, first '{first_node}')")
    };
    // A model of another framework may have hundreds of unknown operators.
    let shown: Vec<String> = unknown.iter().take(20).map(one).collect();
    let more = unknown.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more operators") } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
