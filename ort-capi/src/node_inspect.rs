//! Reading nodes and values of graphs: `Node_*` and `ValueInfo_*`.

use std::ffi::{CString, c_char};
use std::ptr::null;
use std::sync::atomic::Ordering;

use ort_runtime::spec::Registry;

use crate::entry::{ArrayMut, In, Object, Out, Owned, Text, entries};
use crate::external_info::ExternalInfo;
use crate::graph_inspect::fill;
use crate::graph_objects::{Graph, Node, ValueInfo};
use crate::op_attr::OpAttr;
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::TypeInfo;
use crate::value::Value;

/// The graph of a node.
fn graph_of(node: &Node) -> Outcome<&Graph> {
    match node.graph.get() {
        Some(graph) => Ok(graph),
        None => invalid(format!(
            "node '{}' is in no graph; add it with AddNodeToGraph",
            node.name.to_string_lossy()
        )),
    }
}

/// The graph of a value.
fn graph_with(info: &ValueInfo) -> Outcome<&Graph> {
    match info.graph.get() {
        Some(graph) => Ok(graph),
        None => invalid(format!(
            "value '{}' is in no graph; add it with SetGraphInputs or SetGraphOutputs",
            info.name.to_string_lossy()
        )),
    }
}

/// The values of names.
fn values(node: &Node, names: &[CString]) -> Outcome<Vec<*const Object<ValueInfo>>> {
    let graph = graph_of(node)?;
    Ok(names.iter().map(|name| graph.value(node.graph.address(), name)).collect())
}

/// The operator set version that the model imports for a node.
fn opset_of(node: &Node) -> Outcome<i64> {
    let model = graph_of(node)?.model.get();
    let version = model.and_then(|model| model.opsets.get(&node.domain));
    version.map(|version| i64::from(*version)).ok_or_else(|| {
        let domain = node.domain.to_string_lossy();
        Failure::invalid(format!("no model of the node imports domain '{domain}'; add the graph to one"))
    })
}

/// The version of the operator set that last changed an operator.
fn since_version(node: &Node) -> Outcome<i32> {
    let opset = opset_of(node)?;
    let text = |text: &CString| text.to_string_lossy().into_owned();
    let (domain, operator) = (text(&node.domain), text(&node.operator));
    match Registry::global()?.find(&domain, &operator).map(|record| record.since) {
        Some(since) if since <= opset => Ok(i32::try_from(since).unwrap_or(i32::MAX)),
        Some(since) => fail(
            code::NOT_IMPLEMENTED,
            format!(
                "{operator} changed in operator set {since}; its versions up to {opset} are not known apart"
            ),
        ),
        None => fail(code::FAIL, format!("No Op registered for {operator} with domain_version of {opset}")),
    }
}

entries! {
    /// 348
    fn Node_GetId(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        out.put(node.get()?.id.load(Ordering::Relaxed));
        Ok(())
    }

    /// 349
    fn Node_GetName(node: In<Node>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.name.as_ptr());
        Ok(())
    }

    /// 350
    fn Node_GetOperatorType(node: In<Node>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.operator.as_ptr());
        Ok(())
    }

    /// 351
    fn Node_GetDomain(node: In<Node>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(node.get()?.domain.as_ptr());
        Ok(())
    }

    /// 352
    fn Node_GetSinceVersion(node: In<Node>, out: Out<i32>) {
        let out = out.place()?;
        out.put(since_version(node.get()?)?);
        Ok(())
    }

    /// 353
    fn Node_GetNumInputs(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        out.put(node.get()?.inputs.len());
        Ok(())
    }

    /// 354
    fn Node_GetInputs(node: In<Node>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        let node = node.get()?;
        fill(&mut places, count, values(node, &node.inputs)?.into_iter(), "the inputs of the node")
    }

    /// 355
    fn Node_GetNumOutputs(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        out.put(node.get()?.outputs.len());
        Ok(())
    }

    /// 356
    fn Node_GetOutputs(node: In<Node>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        let node = node.get()?;
        fill(&mut places, count, values(node, &node.outputs)?.into_iter(), "the outputs of the node")
    }

    /// 357. Nodes of the editor have no subgraphs, which could read values of the graph.
    fn Node_GetNumImplicitInputs(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        node.get()?;
        out.put(0);
        Ok(())
    }

    /// 358
    fn Node_GetImplicitInputs(node: In<Node>, places: ArrayMut<*const Object<ValueInfo>>, count: usize) {
        node.get()?;
        places.get(count, "the implicit inputs of the node").map(drop)
    }

    /// 359
    fn Node_GetNumAttributes(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        out.put(node.get()?.attributes.len());
        Ok(())
    }

    /// 360
    fn Node_GetAttributes(node: In<Node>, places: ArrayMut<*const Object<OpAttr>>, count: usize) {
        let attributes = node.get()?.attributes.iter().map(Owned::address);
        fill(&mut places, count, attributes, "the attributes of the node")
    }

    /// 361
    fn Node_GetAttributeByName(node: In<Node>, name: Text, out: Out<*const Object<OpAttr>>) {
        let out = out.place()?;
        let (node, name) = (node.get()?, name.bytes("the name of the attribute")?);
        match node.attributes.iter().find(|attribute| attribute.name().to_bytes() == name) {
            Some(attribute) => out.put(attribute.address()),
            None => {
                let (node, name) = (node.name.to_string_lossy(), String::from_utf8_lossy(name));
                return fail(code::NOT_FOUND, format!("Node attribute does not exist: {name} (node '{node}')"));
            }
        }
        Ok(())
    }

    /// 365
    fn Node_GetNumSubgraphs(node: In<Node>, out: Out<usize>) {
        let out = out.place()?;
        node.get()?;
        out.put(0);
        Ok(())
    }

    /// 366
    fn Node_GetSubgraphs(node: In<Node>, graphs: ArrayMut<*const Object<Graph>>, count: usize, _names: ArrayMut<*const c_char>) {
        node.get()?;
        graphs.get(count, "the subgraphs of the node").map(drop)
    }

    /// 367
    fn Node_GetGraph(node: In<Node>, out: Out<*const Object<Graph>>) {
        let out = out.place()?;
        out.put(node.get()?.graph.address());
        Ok(())
    }

    /// 368. A node gets its provider when a session is made, from a copy of it.
    fn Node_GetEpName(node: In<Node>, out: Out<*const c_char>) {
        let out = out.place()?;
        node.get()?;
        out.put(c"".as_ptr());
        Ok(())
    }

    /// 289
    fn GetValueInfoName(info: In<ValueInfo>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(info.get()?.name.as_ptr());
        Ok(())
    }

    /// 290. Null for a value whose type is not known before a session is made.
    fn GetValueInfoTypeInfo(info: In<ValueInfo>, out: Out<*const Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(info.get()?.ty.as_ref().map_or(null(), |ty| &raw const *ty));
        Ok(())
    }

    /// 323. Null for an input or an initializer.
    fn ValueInfo_GetValueProducer(info: In<ValueInfo>, node: Out<*const Object<Node>>, port: Out<usize>) {
        // The place of the output is optional.
        let (node, port) = (node.place()?, port.place().ok());
        let info = info.get()?;
        let producer = graph_with(info)?.producer(&info.name);
        node.put(producer.as_ref().map_or(null(), |producer| producer.node.address()));
        if let (Some(port), Some(producer)) = (port, producer) {
            port.put(producer.port);
        }
        Ok(())
    }

    /// 324
    fn ValueInfo_GetValueNumConsumers(info: In<ValueInfo>, out: Out<usize>) {
        let out = out.place()?;
        let info = info.get()?;
        out.put(graph_with(info)?.consumers(&info.name).count());
        Ok(())
    }

    /// 325
    fn ValueInfo_GetValueConsumers(info: In<ValueInfo>, nodes: ArrayMut<*const Object<Node>>, ports: ArrayMut<i64>, count: usize) {
        let info = info.get()?;
        let consumers: Vec<_> = graph_with(info)?.consumers(&info.name).collect();
        fill(&mut nodes, count, consumers.iter().map(|reader| reader.node.address()), "the consumers of the value")?;
        let places = consumers.iter().map(|reader| i64::try_from(reader.port).unwrap_or(i64::MAX));
        fill(&mut ports, count, places, "the input places of the consumers")
    }

    /// 326. Null for a value that is no initializer.
    fn ValueInfo_GetInitializerValue(info: In<ValueInfo>, out: Out<*const Object<Value>>) {
        let out = out.place()?;
        let info = info.get()?;
        let initializer = graph_with(info)?.initializer(&info.name);
        out.put(initializer.map_or(null(), |initializer| initializer.value.address()));
        Ok(())
    }

    /// 327. Null: no initializer of the editor is in a file.
    fn ValueInfo_GetExternalInitializerInfo(info: In<ValueInfo>, out: Out<*mut Object<ExternalInfo>>) {
        let out = out.place()?;
        graph_with(info.get()?)?;
        out.put(std::ptr::null_mut());
        Ok(())
    }

    /// 328
    fn ValueInfo_IsRequiredGraphInput(info: In<ValueInfo>, out: Out<bool>) {
        let out = out.place()?;
        let role = Role::of(info.get()?)?;
        out.put(role.is_input && !role.is_initializer);
        Ok(())
    }

    /// 329
    fn ValueInfo_IsOptionalGraphInput(info: In<ValueInfo>, out: Out<bool>) {
        let out = out.place()?;
        let role = Role::of(info.get()?)?;
        out.put(role.is_input && role.is_initializer);
        Ok(())
    }

    /// 330
    fn ValueInfo_IsGraphOutput(info: In<ValueInfo>, out: Out<bool>) {
        let out = out.place()?;
        out.put(Role::of(info.get()?)?.is_output);
        Ok(())
    }

    /// 331
    fn ValueInfo_IsConstantInitializer(info: In<ValueInfo>, out: Out<bool>) {
        let out = out.place()?;
        let role = Role::of(info.get()?)?;
        out.put(role.is_initializer && !role.is_input);
        Ok(())
    }

    /// 332
    fn ValueInfo_IsFromOuterScope(info: In<ValueInfo>, out: Out<bool>) {
        let out = out.place()?;
        graph_with(info.get()?)?;
        out.put(false);
        Ok(())
    }
}

/// What a value is in its graph.
struct Role {
    is_input: bool,
    is_output: bool,
    is_initializer: bool,
}

impl Role {
    fn of(info: &ValueInfo) -> Outcome<Role> {
        let graph = graph_with(info)?;
        let is_in = |infos: &[Owned<ValueInfo>]| infos.iter().any(|other| other.name == info.name);
        Ok(Role {
            is_input: is_in(graph.inputs()),
            is_output: is_in(graph.outputs()),
            is_initializer: graph.initializer(&info.name).is_some(),
        })
    }
}
