//! Graph construction from ONNX messages: name scopes, subgraph captures, node order.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use indexmap::IndexMap;
use indexmap::map::Entry;

use super::changes::GivenValues;
use super::external::ExternalData;
use super::names::{FunctionKey, Opsets, function_key};
use super::order::{for_each_subgraph, node_label, schedule};
use super::proto::{
    AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto,
};
use super::types::type_from_proto;
use super::warnings::Warnings;
use crate::custom::CustomOperators;
use crate::dim::Dim;
use crate::ir::{Capture, Graph, ValueId, ValueIds, ValueType};
use crate::limits::{NODES_PER_DEADLINE_CHECK, at_most, check_deadline};
use crate::spec::Registry;
use crate::tensor::Tensor;
use crate::{Error, ErrorKind, Limits, Result, Within, ensure, error, nearest};

/// A graph under construction.
pub(super) struct OpenGraph {
    pub(super) graph: Graph,
    captures: Vec<Capture>,
    /// The scope that was opened with the graph, as an index into the open scopes.
    scope: usize,
    node_names: Names,
    /// Names of values that are not names of the scope: values of inlined functions, captured
    /// values, and renamed ones.
    other_names: Names,
}

/// The set of names in use, with a counter for each. It keeps insertion order, because large graphs
/// look names up soon after inserting them, while the entries are in cache. The graph shares the
/// strings.
#[derive(Default)]
struct Names(IndexMap<Arc<str>, usize>);

impl Names {
    /// Returns `name`, or `name` with the first free number. `also` reports further names in use.
    fn unique(&mut self, name: Arc<str>, also: impl Fn(&str) -> bool) -> Arc<str> {
        let mut count = match self.0.entry(name.clone()) {
            Entry::Vacant(free) => {
                free.insert(1);
                if !also(&name) {
                    return name;
                }
                1
            }
            // Start at the last number used for this name, not at 1: N equal names would cost N²
            // lookups.
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

/// The binding of a name in a scope.
#[derive(Clone, Copy)]
pub(super) struct Meaning {
    /// The value. `None` is an optional function input that the caller left out.
    pub(super) value: Option<ValueId>,
    /// The node of the scope that writes the value, as its index in the file; `None` for captures,
    /// inputs and constants.
    pub(super) writer: Option<u32>,
}

impl Meaning {
    /// Binds a name to a value that no node of the scope writes.
    pub(super) fn given(value: Option<ValueId>) -> Meaning {
        Meaning { value, writer: None }
    }
}

/// The attributes that a function was called with.
pub(super) type BoundAttributes<'m> = HashMap<&'m str, &'m AttributeProto>;

/// The names visible to the nodes of one graph or function body.
pub(super) struct Scope<'m> {
    /// The graph that the nodes are added to, as an index into the open graphs.
    pub(super) graph: usize,
    /// The binding of each name.
    pub(super) names: IndexMap<Arc<str>, Meaning>,
    /// The caller's values that outputs of a function body are written to.
    pub(super) promised: HashMap<&'m str, ValueId>,
    /// Declared types of the values that nodes write.
    pub(super) types: HashMap<&'m str, &'m ValueInfoProto>,
    /// The prefix of node and value names, which keeps those of two calls apart.
    pub(super) prefix: String,
    pub(super) opsets: Arc<Opsets>,
    pub(super) attributes: Arc<BoundAttributes<'m>>,
    /// Whether lookup stops here: the main graph and function bodies cannot see outer names.
    pub(super) closed: bool,
}

/// Builds graphs from messages.
pub(super) struct Loader<'m> {
    pub(super) registry: &'static Registry,
    pub(super) operators: CustomOperators,
    pub(super) functions: HashMap<FunctionKey<'m>, &'m FunctionProto>,
    pub(super) external: ExternalData,
    /// The values that take the place of initializers.
    pub(super) given: GivenValues<'m>,
    pub(super) graphs: Vec<OpenGraph>,
    pub(super) scopes: Vec<Scope<'m>>,
    /// The functions being inlined, outermost first.
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
        given: GivenValues<'m>,
        limits: Limits,
        warnings: &'m mut Warnings,
    ) -> Result<Loader<'m>> {
        Ok(Loader {
            registry: Registry::global()?,
            operators: CustomOperators::default(),
            functions,
            external,
            given,
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

    /// Builds the main graph. Its initializers are passed separately, by value.
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
                None => Err(error!(Fail, "Model input ({name}) does not have type information")
                    .help("declare its element type and shape: the loader must know what is given")),
            };
            let ty = ty.within(|| format!("input '{name}'"))?;
            let default = constants.get_mut(name).and_then(Option::take);
            ensure!(
                !self.scope().names.contains_key(name),
                Fail,
                help = "rename one of the two, or leave it out",
                "Duplicate definition-site for ({name})"
            );
            let id = self.declare(name, ty, None).within(|| format!("input '{name}'"))?;
            match default {
                // Before IR version 4 every initializer had to be listed among the inputs, so being
                // listed does not make it a default that callers may override.
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

    /// Builds the graph of a subgraph attribute. Names it does not define resolve in the enclosing
    /// scopes.
    pub(super) fn subgraph(&mut self, proto: &'m GraphProto) -> Result<(Graph, Vec<Capture>)> {
        let outer = self.scope();
        let (opsets, attributes) = (outer.opsets.clone(), outer.attributes.clone());
        self.open_graph(proto, opsets, attributes, false)?;
        for input in &proto.input {
            // The enclosing node sets the types of its subgraph's inputs, so a bad declaration is
            // as none.
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
        // Of two declarations of one name, that of the output counts.
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

    /// Returns the innermost scope. One is always open while nodes are built.
    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    pub(super) fn scope(&mut self) -> &mut Scope<'m> {
        let last = self.scopes.len() - 1;
        &mut self.scopes[last]
    }

    /// Returns the graph under construction.
    #[allow(
        clippy::indexing_slicing,
        reason = "a scope and a graph are open as long as nodes are built, and scopes name only open graphs"
    )]
    pub(super) fn top(&mut self) -> &mut OpenGraph {
        let last = self.graphs.len() - 1;
        &mut self.graphs[last]
    }

    /// Declares the initializers that were not also inputs.
    fn declare_constants(&mut self, constants: IndexMap<String, Option<Tensor>>) -> Result<()> {
        for (name, tensor) in constants {
            let Some(tensor) = tensor else { continue };
            let id = self.declare(&name, ValueType::Unknown, None)?;
            self.set_constant(id, tensor);
        }
        Ok(())
    }

    /// Binds a name of the innermost scope to a new value, or to the value that a function's caller
    /// reserved for it.
    fn declare(&mut self, name: &str, ty: ValueType, writer: Option<u32>) -> Result<ValueId> {
        ensure!(!name.is_empty(), InvalidArgument, "a value has no name");
        let (Some((scope, around)), Some(open)) = (self.scopes.split_last_mut(), self.graphs.last_mut())
        else {
            return Err(error!(Fail, "no graph is open"));
        };
        let shared: Arc<str> = name.into();
        let Entry::Vacant(free) = scope.names.entry(shared.clone()) else {
            return Err(error!(Fail, "Duplicate definition of name ({name})"));
        };
        let place = free.index();
        free.insert(Meaning { value: None, writer });
        let id = match scope.promised.get(name).copied() {
            Some(id) => id,
            None => {
                // `get` fails exactly if the graph's own scope is the innermost one. Its names are
                // unique by then; others must avoid the names of the graph's scope too.
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

    /// Returns the type that the file declares for an intermediate value; unusable ones count as
    /// unknown.
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
        // Most files are in topological order, so build as far as possible without sorting.
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

    /// Builds nodes in file order until one reads a name not declared yet in this scope, or has a
    /// subgraph or function body. Those may see all names of the scope, so all outputs must be
    /// declared first. Returns the number of nodes built.
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

    /// Declares the outputs of a node.
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

    /// Adds to the error which other node writes the same value.
    fn defined_twice(&mut self, nodes: &[NodeProto], (index, name): (usize, &str), problem: Error) -> Error {
        let label = |index: usize| nodes.get(index).map_or_else(String::new, |node| node_label(node, index));
        let writer = self.scope().names.get(name).and_then(|meaning| meaning.writer);
        let other = writer.map(|other| format!("node '{}' writes it too", label(other as usize)));
        let other = other.unwrap_or("an input or initializer has the name".into());
        problem.within(format!("node '{}'", label(index))).help(format!("{other}; rename one of the two"))
    }

    /// Counts a node against the limits, and checks the deadline now and then.
    pub(super) fn count_node(&mut self) -> Result<()> {
        self.nodes += 1;
        let what = || "the model has too many nodes with its functions inlined".to_string();
        at_most(self.nodes, self.limits.nodes, "nodes", what)?;
        if !self.calls.is_empty() {
            self.function_nodes += 1;
            let what = || "the model's functions add too many nodes".to_string();
            at_most(self.function_nodes, self.limits.function_nodes, "function_nodes", what)?;
        }
        // 1, not 0, so that the first node checks the deadline too.
        if self.nodes % NODES_PER_DEADLINE_CHECK == 1 {
            check_deadline(self.until, "loading")?
        }
        Ok(())
    }

    /// Returns a node name that is unique in the graph.
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
            let id = id.ok_or_else(|| {
                self.unknown_value(
                    ErrorKind::Fail,
                    format!("Graph output ({name}) does not exist in the graph"),
                    (name, "check the name against the outputs of the nodes"),
                )
            })?;
            self.top().graph.outputs.push(id);
        }
        Ok(())
    }

    /// Returns the error for an input that is not defined. For nodes of subgraphs, ONNX Runtime has
    /// another class and other words.
    pub(super) fn unknown_input(&self, node: &NodeProto, name: &str) -> Error {
        let (kind, text) = match self.graphs.len() {
            0 | 1 => (
                ErrorKind::InvalidArgument,
                format!(
                    "Node input '{name}' is not a graph input, initializer, or output of a previous node"
                ),
            ),
            _ => (
                ErrorKind::InvalidGraph,
                format!(
                    "Nodes in a graph must be topologically sorted, however input '{name}' of node: name: {} \
                     OpType: {} is not output of any previous nodes",
                    node.name(),
                    node.op_type()
                ),
            ),
        };
        self.unknown_value(kind, text, (name, "check the name against the outputs of the nodes before it"))
    }

    /// Returns the error for an undefined name. `advice` is for a name without a similar one.
    fn unknown_value(&self, kind: ErrorKind, text: String, (name, advice): (&str, &str)) -> Error {
        let closed = self.scopes.iter().rposition(|scope| scope.closed).unwrap_or(0);
        // Names outside of the innermost closed scope cannot be meant.
        let visible = self.scopes.iter().skip(closed);
        let names = visible.flat_map(|scope| scope.names.keys().map(|name| &**name));
        let advice = match nearest(name, names) {
            Some(near) => format!("did you mean '{near}'?"),
            None => advice.to_string(),
        };
        Error::new(kind, text).help(advice)
    }

    /// Resolves a name in a scope. `None` means that it is undefined, `Some(None)` an omitted
    /// input. A name of an enclosing graph becomes a capture at each level, or, if it is a
    /// constant, a constant of its own that shares the memory.
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
        // Bind the name in this scope too, so that each subgraph captures a value only once.
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

    /// Turns an existing value into a constant.
    pub(super) fn set_constant(&mut self, id: ValueId, tensor: Tensor) {
        let shape = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        let graph = &mut self.top().graph;
        graph.value_mut(id).ty = ValueType::tensor(tensor.dtype(), Some(shape));
        graph.constants.insert(id, tensor);
    }
}

/// Returns the name with the prefix of its scope.
fn prefixed(prefix: &str, name: &Arc<str>) -> Arc<str> {
    if prefix.is_empty() { name.clone() } else { format!("{prefix}{name}").into() }
}
