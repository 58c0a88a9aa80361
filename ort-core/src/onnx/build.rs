//! Builds graphs from their messages: scopes of names, captures of subgraphs, order of nodes.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use indexmap::map::Entry;

use super::external::ExternalData;
use super::names::{FunctionKey, Opsets, function_key};
use super::order::{for_each_subgraph, node_label, schedule};
use super::proto::tensor_proto::DataLocation;
use super::proto::{
    AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto,
};
use super::tensor::{dense_from_proto, tensor_from_proto};
use super::types::type_from_proto;
use super::warnings::{WarningKind, Warnings};
use crate::dim::Dim;
use crate::ir::{Capture, Graph, ValueId, ValueIds, ValueType};
use crate::limits::{NODES_PER_DEADLINE_CHECK, at_most, check_deadline};
use crate::spec::Registry;
use crate::tensor::Tensor;
use crate::{Error, Limits, Result, Within, ensure, error, nearest};

/// A graph under construction.
pub(super) struct OpenGraph {
    pub(super) graph: Graph,
    captures: Vec<Capture>,
    /// The scope that opened with it, by its place among the open ones.
    scope: usize,
    node_names: Names,
    /// Names of values that are not among those of the scope: of inlined functions, captured, or
    /// renamed.
    other_names: Names,
}

/// Names that are taken, and how often each was asked for, in order: large graphs read names soon
/// after they were written, while those are in the cache. The texts are shared with the graph that
/// has the names.
#[derive(Default)]
struct Names(IndexMap<Arc<str>, usize>);

impl Names {
    /// The name, or the name with the first free number; `also` tells of others that are taken.
    fn unique(&mut self, name: Arc<str>, also: impl Fn(&str) -> bool) -> Arc<str> {
        let mut count = match self.0.entry(name.clone()) {
            Entry::Vacant(free) => {
                free.insert(1);
                if !also(&name) {
                    return name;
                }
                1
            }
            Entry::Occupied(taken) => *taken.get(),
        };
        loop {
            count += 1;
            let numbered: Arc<str> = format!("{name}_{count}").into();
            if !self.0.contains_key(&numbered) && !also(&numbered) {
                self.0.insert(name, count);
                self.0.insert(numbered.clone(), 1);
                return numbered;
            }
        }
    }
}

/// What a name means in a scope.
#[derive(Clone, Copy)]
pub(super) struct Meaning {
    /// The value; none is an optional input of a function that the caller left out.
    pub(super) value: Option<ValueId>,
    /// The node of the scope that writes it, by its place in the file; none for what is given.
    pub(super) writer: Option<u32>,
}

impl Meaning {
    /// What no node of the scope writes.
    pub(super) fn given(value: Option<ValueId>) -> Meaning {
        Meaning { value, writer: None }
    }
}

/// The attributes that a function was called with.
pub(super) type BoundAttributes<'m> = HashMap<&'m str, &'m AttributeProto>;

/// The names that nodes of one graph or function body see.
pub(super) struct Scope<'m> {
    /// The graph that the nodes go to, by its place among the open ones.
    pub(super) graph: usize,
    /// What each name means.
    pub(super) names: IndexMap<Arc<str>, Meaning>,
    /// Values of the caller that outputs of a function are written to.
    pub(super) promised: HashMap<&'m str, ValueId>,
    /// Declared types of values that nodes write.
    pub(super) types: HashMap<&'m str, &'m ValueInfoProto>,
    /// What names get in front, so that those of two calls differ.
    pub(super) prefix: String,
    pub(super) opsets: Arc<Opsets>,
    pub(super) attributes: Arc<BoundAttributes<'m>>,
    /// Whether names end here: the main graph and function bodies see nothing outside.
    pub(super) closed: bool,
}

/// Turns messages into graphs.
pub(super) struct Loader<'m> {
    pub(super) registry: &'static Registry,
    pub(super) functions: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    pub(super) external: ExternalData,
    pub(super) graphs: Vec<OpenGraph>,
    pub(super) scopes: Vec<Scope<'m>>,
    /// The functions that are being inlined, outermost first.
    pub(super) calls: Vec<FunctionKey<'m>>,
    ir_version: i64,
    limits: Limits,
    until: Option<Instant>,
    nodes: usize,
    function_nodes: usize,
    pub(super) folded_bytes: usize,
    pub(super) warnings: &'m mut Warnings,
}

impl<'m> Loader<'m> {
    pub(super) fn new(
        functions: HashMap<FunctionKey<'m>, &'m FunctionProto>,
        ir_version: i64,
        external: ExternalData,
        limits: Limits,
        warnings: &'m mut Warnings,
    ) -> Result<Loader<'m>> {
        Ok(Loader {
            registry: Registry::global()?,
            functions,
            external,
            graphs: Vec::new(),
            scopes: Vec::new(),
            calls: Vec::new(),
            ir_version,
            limits,
            until: limits.until(),
            nodes: 0,
            function_nodes: 0,
            folded_bytes: limits.folded_bytes,
            warnings,
        })
    }

    /// Builds the model's graph; its constants are given apart.
    pub(super) fn main_graph(
        &mut self,
        proto: &'m GraphProto,
        weights: Vec<TensorProto>,
        sparse: Vec<SparseTensorProto>,
        opsets: Arc<Opsets>,
    ) -> Result<Graph> {
        self.open_graph(proto, opsets, Arc::default(), true)?;
        let mut constants = self.read_constants(proto, weights, sparse)?;
        for input in &proto.input {
            let name = input.name();
            let ty = match &input.r#type {
                Some(ty) => type_from_proto(ty, &|axis| Dim::named(&format!("{name}.{axis}"))),
                None => Err(error!(InvalidGraph, "it has no type")
                    .help("declare its element type and shape: the loader must know what is given")),
            };
            let ty = ty.within(|| format!("input '{name}'"))?;
            let default = constants.get_mut(name).and_then(Option::take);
            let id = self.declare(name, ty, None).within(|| format!("input '{name}'"));
            let id = id.map_err(|problem| problem.help("rename one of the two, or leave it out"))?;
            match default {
                // Before IR version 4 every constant had to be among the inputs; it was no less
                // constant.
                Some(tensor) if self.ir_version < 4 => {
                    let declared = self.top().graph.value(id).ty.clone();
                    self.set_constant(id, tensor);
                    let open = self.graphs.last().ok_or_else(|| error!(Fail, "no graph is open"))?;
                    self.warnings.compare(name, &declared, &open.graph.value(id).ty)?;
                }
                Some(tensor) => {
                    self.top().graph.input_defaults.insert(id, tensor);
                    self.top().graph.inputs.push(id);
                }
                None => self.top().graph.inputs.push(id),
            }
        }
        self.declare_constants(constants)?;
        self.block(&proto.node)?;
        self.bind_outputs(proto)?;
        self.close_graph().map(|(graph, _)| graph)
    }

    /// Builds a graph inside a node. Its names lead on to those around it.
    pub(super) fn subgraph(&mut self, proto: &'m GraphProto) -> Result<(Graph, Vec<Capture>)> {
        let outer = self.scope();
        let (opsets, attributes) = (outer.opsets.clone(), outer.attributes.clone());
        self.open_graph(proto, opsets, attributes, false)?;
        for input in &proto.input {
            let ty = input.r#type.as_ref().and_then(|ty| type_from_proto(ty, &|_| Dim::unknown()).ok());
            let id = self.declare(input.name(), ty.unwrap_or_default(), None)?;
            self.top().graph.inputs.push(id);
        }
        let (dense, sparse) = (proto.initializer.clone(), proto.sparse_initializer.clone());
        let constants = self.read_constants(proto, dense, sparse)?;
        self.declare_constants(constants)?;
        self.block(&proto.node)?;
        self.bind_outputs(proto)?;
        self.close_graph()
    }

    fn open_graph(
        &mut self,
        proto: &'m GraphProto,
        opsets: Arc<Opsets>,
        attributes: Arc<BoundAttributes<'m>>,
        closed: bool,
    ) -> Result<()> {
        self.graphs.push(OpenGraph {
            graph: Graph::new(proto.name()),
            captures: Vec::new(),
            scope: self.scopes.len(),
            node_names: Names::default(),
            other_names: Names::default(),
        });
        let infos = proto.value_info.iter().chain(&proto.output);
        self.open_scope(Scope {
            graph: self.graphs.len() - 1,
            names: IndexMap::new(),
            promised: HashMap::new(),
            types: infos.map(|info| (info.name(), info)).collect(),
            prefix: String::new(),
            opsets,
            attributes,
            closed,
        })
    }

    pub(super) fn open_scope(&mut self, scope: Scope<'m>) -> Result<()> {
        let what = || "subgraphs and function calls are nested too deep".to_string();
        at_most(self.scopes.len() + 1, self.limits.nesting, "nesting", what)?;
        self.scopes.push(scope);
        Ok(())
    }

    fn close_graph(&mut self) -> Result<(Graph, Vec<Capture>)> {
        self.scopes.pop();
        let open = self.graphs.pop().ok_or_else(|| error!(Fail, "no graph is open"))?;
        Ok((open.graph, open.captures))
    }

    /// The innermost scope. There always is one while nodes are built.
    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    pub(super) fn scope(&mut self) -> &mut Scope<'m> {
        let last = self.scopes.len() - 1;
        &mut self.scopes[last]
    }

    /// The graph that is being built.
    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    pub(super) fn top(&mut self) -> &mut OpenGraph {
        let last = self.graphs.len() - 1;
        &mut self.graphs[last]
    }

    /// The initializers of a graph, by name. Of those that are defined twice the last one counts,
    /// as in ONNX Runtime.
    fn read_constants(
        &mut self,
        graph: &GraphProto,
        dense: Vec<TensorProto>,
        sparse: Vec<SparseTensorProto>,
    ) -> Result<IndexMap<String, Option<Tensor>>> {
        let mut constants = IndexMap::new();
        let mut read = None;
        for proto in dense {
            let name = proto.name().to_string();
            if !self.takes_initializer(&name, constants.contains_key(&name), proto.segment.is_some())? {
                continue;
            }
            let is_external = proto.data_location() == DataLocation::External as i32;
            match tensor_from_proto(proto, &mut self.external) {
                Ok(tensor) => {
                    constants.insert(name, Some(tensor));
                }
                Err(problem) if is_external && !is_read(graph, &name, &mut read) => {
                    let text = format!("its data are missing, and no node reads it: {problem}");
                    let place = || format!("initializer '{name}'");
                    self.warnings.add(WarningKind::Initializer, place, text)?;
                }
                Err(problem) => return Err(problem),
            }
        }
        for proto in sparse {
            let name = proto.values.as_ref().map_or("", |values| values.name()).to_string();
            if self.takes_initializer(&name, constants.contains_key(&name), false)? {
                let tensor = dense_from_proto(proto, &mut self.external, &mut self.folded_bytes)?;
                constants.insert(name, Some(tensor));
            }
        }
        Ok(constants)
    }

    /// Warns of an initializer that is none of the standard's. Whether it is taken: one without a
    /// name has no readers.
    fn takes_initializer(&mut self, name: &str, is_known: bool, is_segment: bool) -> Result<bool> {
        let problems = [
            (name.is_empty(), "it has no name, and is ignored"),
            (is_known, "it is defined twice; the last definition counts"),
            (is_segment, "it is marked as a segment of a larger tensor; the mark is ignored"),
        ];
        for (_, text) in problems.iter().filter(|(is_so, _)| *is_so) {
            self.warnings.add(WarningKind::Initializer, || format!("initializer '{name}'"), *text)?;
        }
        Ok(!name.is_empty())
    }

    /// Declares the constants that were no inputs.
    fn declare_constants(&mut self, constants: IndexMap<String, Option<Tensor>>) -> Result<()> {
        for (name, tensor) in constants {
            let Some(tensor) = tensor else { continue };
            let id = self.declare(&name, ValueType::Unknown, None)?;
            self.set_constant(id, tensor);
        }
        Ok(())
    }

    /// Gives a name in the innermost scope a new value, or the value that a function's caller waits
    /// for.
    fn declare(&mut self, name: &str, ty: ValueType, writer: Option<u32>) -> Result<ValueId> {
        ensure!(!name.is_empty(), InvalidGraph, "a value has no name");
        let (Some((scope, around)), Some(open)) = (self.scopes.split_last_mut(), self.graphs.last_mut())
        else {
            return Err(error!(Fail, "no graph is open"));
        };
        let shared: Arc<str> = name.into();
        let Entry::Vacant(free) = scope.names.entry(shared.clone()) else {
            return Err(error!(InvalidGraph, "value '{name}' is defined twice"));
        };
        let place = free.index();
        free.insert(Meaning { value: None, writer });
        let id = match scope.promised.get(name).copied() {
            Some(id) => id,
            None => {
                let own = around.get(open.scope);
                let is_free = own.is_none() && !open.other_names.0.contains_key(name);
                let own = own.unwrap_or(scope);
                let unique = match is_free {
                    true => shared,
                    false => {
                        let full = prefixed(&scope.prefix, &shared);
                        open.other_names.unique(full, |name| own.names.contains_key(name))
                    }
                };
                open.graph.add_value(unique, ty)
            }
        };
        if let Some((_, meaning)) = scope.names.get_index_mut(place) {
            meaning.value = Some(id);
        }
        Ok(id)
    }

    /// The type that the file gives for a value in between, as far as it is any use.
    fn declared_type(&mut self, name: &str) -> ValueType {
        let info = self.scope().types.get(name).and_then(|info| info.r#type.as_ref());
        info.and_then(|ty| type_from_proto(ty, &|_| Dim::unknown()).ok()).unwrap_or_default()
    }

    /// Builds the nodes of the innermost scope.
    pub(super) fn block(&mut self, nodes: &'m [NodeProto]) -> Result<()> {
        let outputs = nodes.iter().map(|node| node.output.len()).sum();
        self.scope().names.reserve(outputs);
        let open = self.top();
        open.node_names.0.reserve(nodes.len());
        open.graph.nodes.reserve(nodes.len());
        let built = self.build_while_in_order(nodes)?;
        let mut declared: Vec<ValueIds> = Vec::with_capacity(nodes.len() - built);
        for (index, _) in nodes.iter().enumerate().skip(built) {
            declared.push(self.declare_outputs(nodes, index)?);
        }
        let names = &self.scope().names;
        let order = schedule(nodes, built, |name| names.get(name)?.writer.map(|writer| writer as usize))?;
        for (index, node) in order.of(nodes).filter(|(index, _)| *index >= built) {
            let outputs = declared.get_mut(index - built).map(std::mem::take);
            self.node(node, index, None, outputs.unwrap_or_default())?;
        }
        Ok(())
    }

    /// Builds nodes as they come, up to the first that reads what is not declared in the scope
    /// before it, or that brings a graph or a function body, which may see all names of the scope.
    /// Returns how many were built.
    fn build_while_in_order(&mut self, nodes: &'m [NodeProto]) -> Result<usize> {
        for (index, node) in nodes.iter().enumerate() {
            let names = &self.scope().names;
            let known = |name: &String| match name.as_str() {
                "" => Some(None),
                name => names.get(name).map(|meaning| meaning.value),
            };
            let inputs: Option<ValueIds> = node.input.iter().map(known).collect();
            let mut is_plain = !self.functions.contains_key(&function_key(node));
            for_each_subgraph(node, &mut |_| is_plain = false);
            if inputs.is_none() || !is_plain {
                return Ok(index);
            }
            let outputs = self.declare_outputs(nodes, index)?;
            self.node(node, index, inputs, outputs)?;
        }
        Ok(nodes.len())
    }

    /// Declares what a node writes.
    fn declare_outputs(&mut self, nodes: &'m [NodeProto], index: usize) -> Result<ValueIds> {
        let Some(node) = nodes.get(index) else { return Ok(ValueIds::new()) };
        let mut declared = ValueIds::with_capacity(node.output.len());
        for name in &node.output {
            if name.is_empty() {
                declared.push(None);
                continue;
            }
            let ty = self.declared_type(name);
            match self.declare(name, ty, Some(index as u32)) {
                Ok(id) => declared.push(Some(id)),
                Err(problem) => return Err(self.defined_twice(nodes, (index, name), problem)),
            }
        }
        Ok(declared)
    }

    /// Adds who else writes the value that a node writes.
    fn defined_twice(&mut self, nodes: &[NodeProto], (index, name): (usize, &str), problem: Error) -> Error {
        let label = |index: usize| nodes.get(index).map_or_else(String::new, |node| node_label(node, index));
        let writer = self.scope().names.get(name).and_then(|meaning| meaning.writer);
        let other = writer.map(|other| format!("node '{}' writes it too", label(other as usize)));
        let other = other.unwrap_or("an input or initializer has the name".into());
        problem.within(format!("node '{}'", label(index))).help(format!("{other}; rename one of the two"))
    }

    /// Counts a node against the limit.
    pub(super) fn count_node(&mut self) -> Result<()> {
        self.nodes += 1;
        let what = || "the model has too many nodes with its functions inlined".to_string();
        at_most(self.nodes, self.limits.nodes, "nodes", what)?;
        if !self.calls.is_empty() {
            self.function_nodes += 1;
            let what = || "the model's functions add too many nodes".to_string();
            at_most(self.function_nodes, self.limits.function_nodes, "function_nodes", what)?;
        }
        if self.nodes % NODES_PER_DEADLINE_CHECK == 1 {
            check_deadline(self.until, "loading")?
        }
        Ok(())
    }

    /// A name for a node that no other node of the graph has.
    pub(super) fn node_name(&mut self, node: &NodeProto, index: usize) -> Arc<str> {
        let label: Arc<str> = match node.name() {
            "" => node_label(node, index).into(),
            name => name.into(),
        };
        let full = prefixed(&self.scope().prefix, &label);
        self.top().node_names.unique(full, |_| false)
    }

    fn bind_outputs(&mut self, proto: &'m GraphProto) -> Result<()> {
        for output in &proto.output {
            let name = output.name();
            let id = self.resolve(self.scopes.len() - 1, name).flatten();
            let id = id.ok_or_else(|| self.unknown_value("output ", name))?;
            self.top().graph.outputs.push(id);
        }
        Ok(())
    }

    /// The error for a name that nothing in sight has. `what` says whose it is.
    pub(super) fn unknown_value(&self, what: &str, name: &str) -> Error {
        let closed = self.scopes.iter().rposition(|scope| scope.closed).unwrap_or(0);
        let visible = self.scopes.iter().skip(closed);
        let names = visible.flat_map(|scope| scope.names.keys().map(|name| &**name));
        let advice = match nearest(name, names) {
            Some(near) => format!("did you mean '{near}'?"),
            None => "check the name against the outputs of the nodes before it".to_string(),
        };
        error!(InvalidGraph, "{what}'{name}' is no node's output, and no input or initializer").help(advice)
    }

    /// What a name means in a scope: no such name, an input left out, or a value of the scope's
    /// graph. A name from around a subgraph is made a capture on the way, or a constant of its own,
    /// which shares the memory.
    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    pub(super) fn resolve(&mut self, scope: usize, name: &str) -> Option<Option<ValueId>> {
        if let Some(found) = self.scopes[scope].names.get(name) {
            return Some(found.value);
        }
        if self.scopes[scope].closed {
            return None;
        }
        let around = scope.checked_sub(1)?;
        let found = self.resolve(around, name)?;
        let inner =
            found.map(|outer| self.capture(self.scopes[around].graph, self.scopes[scope].graph, outer));
        self.scopes[scope].names.insert(name.into(), Meaning::given(inner));
        Some(inner)
    }

    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    fn capture(&mut self, outer_graph: usize, inner_graph: usize, outer: ValueId) -> ValueId {
        let source = &self.graphs[outer_graph].graph;
        let info = source.value(outer).clone();
        let constant = source.constants.get(&outer).cloned();
        let open = &mut self.graphs[inner_graph];
        let own = &self.scopes[open.scope].names;
        let name = open.other_names.unique(info.name, |name| own.contains_key(name));
        match constant {
            Some(tensor) => open.graph.add_constant(name, tensor),
            None => {
                let inner = open.graph.add_value(name, info.ty);
                open.captures.push(Capture { outer, inner });
                inner
            }
        }
    }

    /// Makes a value that exists a constant.
    pub(super) fn set_constant(&mut self, id: ValueId, tensor: Tensor) {
        let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        let graph = &mut self.top().graph;
        graph.value_mut(id).ty = ValueType::tensor(tensor.dtype(), Some(shape));
        graph.constants.insert(id, tensor);
    }
}

/// The name behind the prefix of its scope.
fn prefixed(prefix: &str, name: &Arc<str>) -> Arc<str> {
    if prefix.is_empty() { name.clone() } else { format!("{prefix}{name}").into() }
}

/// Whether a node of the graph, or of a graph inside it, reads a name, or the graph's outputs have
/// it. All names that are read are gathered once.
fn is_read<'g>(graph: &'g GraphProto, name: &str, read: &mut Option<HashSet<&'g str>>) -> bool {
    let names = read.get_or_insert_with(|| {
        let mut names = HashSet::new();
        let mut work = vec![graph];
        while let Some(graph) = work.pop() {
            names.extend(graph.output.iter().map(|output| output.name()));
            for node in &graph.node {
                names.extend(node.input.iter().map(String::as_str));
                for_each_subgraph(node, &mut |inner| work.push(inner));
            }
        }
        names
    });
    names.contains(name)
}
