//! Construction of single nodes: attributes, constants, operator upgrades and function inlining.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::build::{BoundAttributes, Loader, Meaning, Scope};
use super::load::{NEWEST_OPSET, opsets_of};
use super::names::{domain_name, function_key};
use super::proto::attribute_proto::AttributeType;
use super::proto::{AttributeProto, FunctionProto, NodeProto};
use super::tensor::{dense_from_proto, sparse_from_proto, tensor_from_proto};
use super::types::type_from_proto;
use super::warnings::WarningKind;
use crate::dim::Dim;
use crate::ir::{
    Attribute, Attributes, Node, Subgraph, ValueId, ValueIds, mismatched_attribute, unknown_attribute,
};
use crate::spec::{AttrDefault, AttrKind, Draft, OpSpec};
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// An attribute under the name that the node uses. The value may come from the enclosing function.
type Given<'m> = (&'m str, &'m AttributeProto);

/// What a node of the model refers to, resolved.
struct Resolved<'m> {
    name: Arc<str>,
    inputs: ValueIds,
    outputs: ValueIds,
    attributes: Vec<Given<'m>>,
}

impl<'m> Loader<'m> {
    /// Builds one node whose outputs are declared. If `inputs` is `None`, the names are resolved
    /// here.
    pub(super) fn node(
        &mut self,
        node: &'m NodeProto,
        index: usize,
        inputs: Option<ValueIds>,
        outputs: ValueIds,
    ) -> Result<()> {
        self.count_node()?;
        let name = self.node_name(node, index);
        let place = || format!("node '{name}' ({})", node.op_type());
        self.build_node(node, name.clone(), inputs, outputs).within(place)
    }

    fn build_node(
        &mut self,
        node: &'m NodeProto,
        name: Arc<str>,
        inputs: Option<ValueIds>,
        mut outputs: ValueIds,
    ) -> Result<()> {
        let mut inputs = match inputs {
            Some(inputs) => inputs,
            None => self.node_inputs(node)?,
        };
        // Omitted trailing inputs and outputs mean the same as none at all.
        for values in [&mut inputs, &mut outputs] {
            while values.last() == Some(&None) {
                values.pop();
            }
        }
        let attributes = self.given_attributes(node);
        let key = function_key(node);
        if let Some(function) = self.functions.get(&key).copied() {
            return self.call(node, function, Resolved { name, inputs, outputs, attributes });
        }
        let single = (inputs.as_slice(), outputs.as_slice());
        match (key.0, key.1, single) {
            ("", "Constant", (_, [Some(output)])) => {
                let tensor = self.constant(&name, &attributes)?;
                self.set_constant(*output, tensor);
                Ok(())
            }
            ("", "Identity", ([Some(input)], [Some(output)])) if self.is_constant(*input) => {
                self.identity(name, *input, *output)
            }
            _ => self.operator(node, Resolved { name, inputs, outputs, attributes }),
        }
    }

    fn is_constant(&mut self, id: ValueId) -> bool {
        self.top().graph.constants.contains_key(&id)
    }

    /// Resolves the inputs, which may be names of enclosing scopes.
    fn node_inputs(&mut self, node: &'m NodeProto) -> Result<ValueIds> {
        let mut inputs = ValueIds::with_capacity(node.input.len());
        for (index, name) in node.input.iter().enumerate() {
            if name.is_empty() {
                inputs.push(None);
                continue;
            }
            let found = self.resolve(self.scopes.len() - 1, name);
            inputs
                .push(found.ok_or_else(|| self.unknown_input(node, name).within(format!("input {index}")))?);
        }
        Ok(inputs)
    }

    /// Returns the attributes, with references to attributes of the enclosing function resolved. A
    /// reference to an attribute that the caller left out is dropped.
    fn given_attributes(&mut self, node: &'m NodeProto) -> Vec<Given<'m>> {
        let bound = self.scope().attributes.clone();
        let given = |attribute: &'m AttributeProto| match attribute.ref_attr_name() {
            "" => Some((attribute.name(), attribute)),
            reference => bound.get(reference).map(|&value| (attribute.name(), value)),
        };
        node.attribute.iter().filter_map(given).collect()
    }

    fn operator(&mut self, node: &'m NodeProto, resolved: Resolved<'m>) -> Result<()> {
        let (domain, op, _) = function_key(node);
        if self.operators.has(domain, op) {
            return self.custom_operator(domain, op, resolved);
        }
        let Resolved { name, inputs, outputs, attributes } = resolved;
        let spec = self.registry.operator(domain, op)?;
        let version = self.version_of(domain, &name)?;
        if version < spec.first && spec.upgrades.is_empty() {
            let text =
                format!("operator {op} is newer than the imported operator set: {} > {version}", spec.first);
            self.warnings.add(WarningKind::OperatorVersion, || format!("node '{name}'"), text)?;
        }
        let mut attrs: Vec<(&str, Attribute)> = Vec::new();
        let mut subgraphs = Vec::new();
        for (attr_name, attribute) in attributes {
            if version < spec.unchecked_before && kind_in(spec, attr_name).is_none() {
                let text = format!("operator {op} has no attribute '{attr_name}', which is ignored");
                self.warnings.add(WarningKind::Attribute, || format!("node '{name}'"), text)?;
                continue;
            }
            // Only rewrites set internal attributes. A file that has one is refused as if it were
            // unknown.
            let is_internal = spec.internal_attrs.iter().any(|attr| attr.name == attr_name);
            if is_internal {
                return Err(unknown_attribute(spec, attr_name));
            }
            match attribute_type(attribute, kind_in(spec, attr_name))? {
                AttributeType::Graph => subgraphs.push(self.graph_attribute(spec, attr_name, attribute)?),
                ty => {
                    let value =
                        self.attribute(attribute, ty).within(|| format!("attribute '{attr_name}'"))?;
                    attrs.push((attr_name, value));
                }
            }
        }
        check_graphs(spec, &subgraphs)?;
        // Without a pending upgrade the node is canonical already, and needs no draft.
        if spec.upgrades.iter().all(|upgrade| version >= upgrade.before) {
            let attrs = Attributes::checked(spec, attrs)?;
            let node = Node { name, spec, inputs, outputs, attrs, subgraphs };
            spec.check_arity(&node)?;
            self.top().graph.nodes.push(node);
            return Ok(());
        }
        let graph = &mut self.top().graph;
        let mut draft = Draft::new(graph, name, (domain, op, version));
        draft.attrs = attrs.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        (draft.inputs, draft.outputs, draft.subgraphs) = (inputs, outputs, subgraphs);
        for upgrade in spec.upgrades.iter().filter(|upgrade| version < upgrade.before) {
            (upgrade.apply)(&mut draft)?;
            // After an upgrade to another operator the node is already in the canonical form of
            // that one.
            if draft.op != spec.name {
                break;
            }
        }
        let nodes = draft.finish()?;
        // An upgrade may have left out an input that its new form requires.
        nodes.iter().try_for_each(|node| node.spec.check_arity(node))?;
        self.top().graph.nodes.extend(nodes);
        Ok(())
    }

    /// Builds a node of a custom operator, whose attributes are not declared.
    fn custom_operator(&mut self, domain: &str, op: &str, resolved: Resolved<'m>) -> Result<()> {
        let Resolved { name, inputs, outputs, attributes: given } = resolved;
        let version = self.version_of(domain, &name)?;
        let found = self.operators.find(domain, op, version)?;
        let mut attributes = Vec::with_capacity(given.len());
        for (attr_name, attribute) in given {
            let ty = attribute_type(attribute, None)?;
            let value = match (ty, std::str::from_utf8(attribute.s())) {
                (AttributeType::String, Err(_)) => Ok(Attribute::Bytes(attribute.s().to_vec())),
                _ => self.attribute(attribute, ty),
            };
            let value = value.within(|| format!("attribute '{attr_name}'"))?;
            attributes.push((attr_name.to_owned(), value));
        }
        let attrs = Attributes::owned(attributes, found.owner);
        let node = Node { name, spec: found.spec, inputs, outputs, attrs, subgraphs: Vec::new() };
        node.spec.check_arity(&node)?;
        self.top().graph.nodes.push(node);
        Ok(())
    }

    /// Returns the version of a domain that the model imports. If the domain is not imported, the
    /// newest version is assumed, as in ONNX Runtime. A model without any imports is ambiguous and
    /// refused.
    fn version_of(&mut self, domain: &str, node: &str) -> Result<i64> {
        let opsets = &self.scope().opsets;
        if let Some(version) = opsets.get(domain) {
            return Ok(*version);
        }
        if opsets.is_empty() {
            return Err(error!(
                Fail,
                "Missing opset in the model. All ModelProtos MUST have at least one entry that specifies \
                 which version of the ONNX OperatorSet is being imported"
            )
            .help(format!("add domain '{domain}' and its version to the model's opset_import")));
        }
        let text =
            format!("operator set '{}' is not imported; its newest version is assumed", domain_name(domain));
        self.warnings.add(WarningKind::OpsetImport, || format!("node '{node}'"), text)?;
        Ok(match domain {
            "" => NEWEST_OPSET,
            _ => self.registry.newest_version(domain),
        })
    }

    fn graph_attribute(
        &mut self,
        spec: &'static OpSpec,
        name: &str,
        attribute: &'m AttributeProto,
    ) -> Result<Subgraph> {
        let known = spec.attrs.iter().find(|attr| attr.name == name && attr.kind == AttrKind::Graph);
        let known = known.ok_or_else(|| match kind_in(spec, name) {
            Some(kind) => mismatched_attribute(name, kind, AttrKind::Graph.onnx_name()),
            None => unknown_attribute(spec, name),
        })?;
        let proto =
            attribute.g.as_deref().ok_or_else(|| error!(InvalidGraph, "graph '{name}' is missing"))?;
        let (graph, captures) = self.subgraph(proto).within(|| known.name)?;
        Ok(Subgraph { attr: known.name, graph, captures })
    }

    fn attribute(&mut self, attribute: &AttributeProto, ty: AttributeType) -> Result<Attribute> {
        let missing = || error!(InvalidGraph, "its value is missing");
        Ok(match ty {
            AttributeType::Float => Attribute::Float(attribute.f()),
            AttributeType::Int => Attribute::Int(attribute.i()),
            AttributeType::String => Attribute::String(text(attribute.s())?),
            AttributeType::Floats => Attribute::Floats(attribute.floats.clone()),
            AttributeType::Ints => Attribute::Ints(attribute.ints.clone()),
            AttributeType::Strings => {
                Attribute::Strings(attribute.strings.iter().map(|bytes| text(bytes)).collect::<Result<_>>()?)
            }
            AttributeType::Tensor => {
                let proto = attribute.t.as_deref().cloned().ok_or_else(missing)?;
                Attribute::Tensor(tensor_from_proto(proto, &mut self.external)?)
            }
            AttributeType::SparseTensor => {
                let proto = attribute.sparse_tensor.as_deref().cloned().ok_or_else(missing)?;
                Attribute::Sparse(sparse_from_proto(proto, &mut self.external)?)
            }
            AttributeType::Tensors => {
                let read = |proto: &_| tensor_from_proto(Clone::clone(proto), &mut self.external);
                Attribute::Tensors(attribute.tensors.iter().map(read).collect::<Result<_>>()?)
            }
            AttributeType::TypeProto => {
                let proto = attribute.tp.as_deref().ok_or_else(missing)?;
                Attribute::Type(type_from_proto(proto, &|_| Dim::unknown())?)
            }
            AttributeType::Undefined
            | AttributeType::Graph
            | AttributeType::Graphs
            | AttributeType::SparseTensors
            | AttributeType::TypeProtos => {
                return Err(error!(NotImplemented, "attributes of kind {ty:?} are not supported here"));
            }
        })
    }

    /// Reads the value of a `Constant` node from whichever attribute holds it.
    fn constant(&mut self, node: &str, given: &[Given<'m>]) -> Result<Tensor> {
        let Some((name, attribute)) = given.first() else {
            return Err(error!(InvalidGraph, "exactly one value is expected, got 0"));
        };
        if given.len() > 1 {
            let place = || format!("node '{node}'");
            self.warnings.add(
                WarningKind::Attribute,
                place,
                "Constant has several values; the first one counts",
            )?;
        }
        let read = |loader: &mut Self| match *name {
            "value" => {
                let proto = attribute.t.as_deref().cloned();
                let proto = proto.ok_or_else(|| error!(InvalidGraph, "its tensor is missing"))?;
                tensor_from_proto(proto, &mut loader.external)
            }
            "sparse_value" => {
                let proto = attribute.sparse_tensor.as_deref().cloned();
                let proto = proto.ok_or_else(|| error!(InvalidGraph, "its tensor is missing"))?;
                dense_from_proto(proto, &mut loader.external, &mut loader.folded_bytes)
            }
            "value_float" => Tensor::scalar(attribute.f()),
            "value_floats" => Tensor::from_slice(&[attribute.floats.len()], &attribute.floats),
            "value_int" => Tensor::scalar(attribute.i()),
            "value_ints" => Tensor::from_slice(&[attribute.ints.len()], &attribute.ints),
            "value_string" => Tensor::from_strings(&[], vec![text(attribute.s())?]),
            "value_strings" => {
                let texts = attribute.strings.iter().map(|bytes| text(bytes)).collect::<Result<Vec<_>>>()?;
                Tensor::from_strings(&[texts.len()], texts)
            }
            _ => Err(error!(InvalidGraph, "Constant has no such attribute")),
        };
        read(self).within(|| format!("attribute '{name}'"))
    }

    /// Makes `output` equal to `input`: by sharing the constant if it is one, else by an `Identity`
    /// node.
    fn identity(&mut self, name: Arc<str>, input: ValueId, output: ValueId) -> Result<()> {
        if let Some(tensor) = self.top().graph.constants.get(&input).cloned() {
            self.set_constant(output, tensor);
            return Ok(());
        }
        let spec = self.registry.find("", "Identity");
        let spec = spec.ok_or_else(|| error!(NotImplemented, "operator Identity is not known"))?;
        let [inputs, outputs] = [input, output].map(|id| ValueIds::from_slice(&[Some(id)]));
        let attrs = Attributes::default();
        let node = Node { name, spec, inputs, outputs, attrs, subgraphs: Vec::new() };
        self.top().graph.nodes.push(node);
        Ok(())
    }

    /// Inlines a function call: the nodes of the function body replace the node.
    fn call(
        &mut self,
        node: &'m NodeProto,
        function: &'m FunctionProto,
        Resolved { name, inputs, outputs, attributes: given }: Resolved<'m>,
    ) -> Result<()> {
        let name: &str = &name;
        let key = function_key(node);
        ensure!(
            !self.calls.contains(&key),
            InvalidGraph,
            help = "a function may only call others, which do not lead back to it; use Loop for repetition",
            "function '{}' calls itself",
            key.1
        );
        let (most_in, most_out) = (function.input.len(), function.output.len());
        ensure!(
            inputs.len() <= most_in,
            InvalidGraph,
            help = format!("its inputs are {}: remove the others", function.input.join(", ")),
            "the function takes {most_in} inputs, got {}",
            inputs.len()
        );
        ensure!(
            outputs.len() <= most_out,
            InvalidGraph,
            help = format!("its outputs are {}: remove the others", function.output.join(", ")),
            "the function has {most_out} outputs, got {}",
            outputs.len()
        );
        let attributes = self.bind_attributes(function, name, &given)?;
        // A function imports the domains it uses. For one that is missing, fall back to the model's
        // import.
        let mut opsets = (*self.scope().opsets).clone();
        // Only for a model does a missing import mean version 1, so no function counts as older
        // than IR version 3.
        opsets.extend(opsets_of(&function.opset_import, i64::MAX, self.warnings)?);
        // Inputs that the call leaves out at the end are omitted ones of the function.
        let arguments = inputs.into_iter().chain(std::iter::repeat(None));
        let names = function.input.iter().zip(arguments);
        let names = names.map(|(name, id)| (name.as_str().into(), Meaning::given(id))).collect();
        let wanted: Vec<(&'m str, ValueId)> = function
            .output
            .iter()
            .zip(&outputs)
            .filter_map(|(name, id)| id.map(|id| (name.as_str(), id)))
            .collect();
        let outputs_of = |node: &'m NodeProto| node.output.iter().map(String::as_str);
        let produced: HashSet<&str> = function.node.iter().flat_map(outputs_of).collect();
        // Outputs that the body writes go straight to the caller's values. `deliver` copies the
        // others.
        let mut promised = HashMap::new();
        for &(name, id) in wanted.iter().filter(|(name, _)| produced.contains(name)) {
            // A name may be listed as two outputs. The first is written directly, the second by
            // `deliver`.
            promised.entry(name).or_insert(id);
        }
        let graph = self.scope().graph;
        self.open_scope(Scope {
            graph,
            names,
            promised,
            types: function.value_info.iter().map(|info| (info.name(), info)).collect(),
            prefix: format!("{name}/"),
            opsets: Arc::new(opsets),
            attributes: Arc::new(attributes),
            closed: true,
        })?;
        self.calls.push(key);
        self.block(&function.node)?;
        self.deliver(name, &wanted)?;
        self.calls.pop();
        self.scopes.pop();
        Ok(())
    }

    /// Binds the attributes of a function for one call: the given ones, and defaults for the
    /// others. Given attributes that the function does not declare are ignored, as in ONNX Runtime.
    fn bind_attributes(
        &mut self,
        function: &'m FunctionProto,
        node: &str,
        given: &[Given<'m>],
    ) -> Result<BoundAttributes<'m>> {
        let mut bound: BoundAttributes<'m> =
            function.attribute_proto.iter().map(|attribute| (attribute.name(), attribute)).collect();
        let names: HashSet<&str> = function.attribute.iter().map(String::as_str).collect();
        for &(name, value) in given {
            if bound.contains_key(name) || names.contains(name) {
                bound.insert(name, value);
                continue;
            }
            let text = format!("function '{}' has no attribute '{name}', which is ignored", function.name());
            self.warnings.add(WarningKind::Attribute, || format!("node '{node}'"), text)?;
        }
        Ok(bound)
    }

    /// Copies the outputs of a function that its nodes did not write into the caller's value
    /// directly: inputs passed through, and one value returned as two outputs.
    fn deliver(&mut self, name: &str, wanted: &[(&'m str, ValueId)]) -> Result<()> {
        for &(output, id) in wanted {
            let found = self.scope().names.get(output).and_then(|meaning| meaning.value);
            let found = found
                .ok_or_else(|| error!(InvalidArgument, "the function never writes its output '{output}'"))?;
            if found != id {
                self.identity(format!("{name}/{output}").into(), found, id)?;
            }
        }
        Ok(())
    }
}

/// The advice if an attribute is malformed.
const WRITE_AGAIN: &str = "export the model again, or copy the file again if it is damaged";

/// Decodes text of the file, which must be UTF-8.
fn text(bytes: &[u8]) -> Result<String> {
    std::str::from_utf8(bytes)
        .map(str::to_string)
        .map_err(|_| error!(InvalidGraph, "its text is not UTF-8").help(WRITE_AGAIN))
}

/// Checks that each required subgraph is present, and none is given twice.
fn check_graphs(spec: &OpSpec, subgraphs: &[Subgraph]) -> Result<()> {
    for attr in spec.attrs.iter().filter(|attr| attr.kind == AttrKind::Graph) {
        let count = subgraphs.iter().filter(|subgraph| subgraph.attr == attr.name).count();
        ensure!(
            count < 2,
            InvalidGraph,
            help = WRITE_AGAIN,
            "Attribute '{}' appeared multiple times",
            attr.name
        );
        let missing = count == 0 && attr.default == AttrDefault::Required;
        ensure!(
            !missing,
            InvalidGraph,
            help = "the operator needs it: add the graph to the node",
            "Required attribute '{}' is missing",
            attr.name
        );
    }
    Ok(())
}

fn kind_in(spec: &OpSpec, name: &str) -> Option<AttrKind> {
    spec.attrs.iter().find(|attr| attr.name == name).map(|attr| attr.kind)
}

/// Returns which field of an attribute holds its value. Files of IR version 1 do not say. Then it
/// is the field that is set; empty lists are not encoded, so for those the operator's record
/// decides.
fn attribute_type(attribute: &AttributeProto, expected: Option<AttrKind>) -> Result<AttributeType> {
    let code = attribute.r#type();
    let ty = AttributeType::try_from(code).map_err(|_| {
        let name = attribute.name();
        error!(
            InvalidGraph,
            "Field 'type' of 'attr' is required but missing: attribute '{name}' has the unknown kind {code}"
        )
        .help(WRITE_AGAIN)
    })?;
    if ty != AttributeType::Undefined {
        return Ok(ty);
    }
    let fields = [
        (attribute.f.is_some(), AttributeType::Float),
        (attribute.i.is_some(), AttributeType::Int),
        (attribute.s.is_some(), AttributeType::String),
        (attribute.t.is_some(), AttributeType::Tensor),
        (attribute.g.is_some(), AttributeType::Graph),
        (!attribute.floats.is_empty(), AttributeType::Floats),
        (!attribute.ints.is_empty(), AttributeType::Ints),
        (!attribute.strings.is_empty(), AttributeType::Strings),
        (!attribute.tensors.is_empty(), AttributeType::Tensors),
        (expected == Some(AttrKind::Floats), AttributeType::Floats),
        (expected == Some(AttrKind::Ints), AttributeType::Ints),
        (expected == Some(AttrKind::Strings), AttributeType::Strings),
    ];
    let set = fields.iter().find(|(set, _)| *set).map(|(_, ty)| *ty);
    set.ok_or_else(|| match expected {
        Some(expected) => mismatched_attribute(attribute.name(), expected, "UNDEFINED"),
        None => error!(InvalidGraph, "attribute '{}' has no value", attribute.name()).help(WRITE_AGAIN),
    })
}
