//! What a model says of itself: its inputs and outputs, and its metadata, as objects of the
//! package's `_metadata` module.

use std::collections::{HashMap, HashSet};

use ort_runtime::dim::Dim;
use ort_runtime::ir::{Graph, Node, ValueType};
use ort_runtime::onnx::{DeclaredShapes, DeclaredSize};
use ort_runtime::onnxruntime::{CPU, name_of};
use ort_runtime::{Model, Session, ValueSpec};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::build::Settings;
use crate::cancel::detached;
use crate::error::OrRaise;

/// Writes a type as onnxruntime does: `tensor(float)`, `seq(map(string,tensor(float)))`.
pub(crate) fn type_text(ty: &ValueType) -> String {
    ty.onnx_name()
}

/// Returns the sizes of a type: numbers, names, and `None` for those without a name. A shape that
/// is not known and that of a scalar are both empty.
///
/// A declared shape comes first, as programs look names up to the letter. Inference adds the
/// numbers that it leaves open.
fn shape_of<'py>(
    py: Python<'py>,
    ty: &ValueType,
    declared: Option<&[DeclaredSize]>,
    made: &HashSet<String>,
) -> PyResult<Bound<'py, PyList>> {
    let list = PyList::empty(py);
    let shape = match ty {
        ValueType::Optional(element) => element.shape(),
        other => other.shape(),
    };
    if let Some(declared) = declared {
        let inferred = shape.filter(|shape| shape.len() == declared.len()).unwrap_or_default();
        for (axis, size) in declared.iter().enumerate() {
            match (size, inferred.get(axis).and_then(Dim::as_constant)) {
                (_, Some(size)) => list.append(size)?,
                (DeclaredSize::Number(size), None) => list.append(*size)?,
                (DeclaredSize::Name(name), None) => list.append(name)?,
                (DeclaredSize::Open, None) => list.append(py.None())?,
            }
        }
        return Ok(list);
    }
    for dim in shape.unwrap_or_default() {
        match dim.as_constant() {
            Some(size) => list.append(size)?,
            None => list.append(symbol_of(dim).filter(|name| !made.contains(*name)))?,
        }
    }
    Ok(list)
}

/// The name of a size, if the model gave it one.
fn symbol_of(dim: &Dim) -> Option<&str> {
    dim.as_symbol().and_then(|symbol| symbol.name())
}

/// Returns inputs or outputs as a list of `NodeArg`.
///
/// The loader names a size of an input that has no name after the input and the axis; `model` says
/// which. Programs see `None`.
pub(crate) fn node_args<'py>(
    py: Python<'py>,
    model: &Model,
    specs: &[ValueSpec],
    declared: &DeclaredShapes,
) -> PyResult<Bound<'py, PyList>> {
    let declared: HashMap<&str, &[DeclaredSize]> =
        declared.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
    let made: HashSet<String> = model
        .inputs()
        .iter()
        .flat_map(|spec| {
            (0..spec.ty.shape().map_or(0, |dims| dims.len())).map(|axis| format!("{}.{axis}", spec.name))
        })
        .collect();
    let class = py.import("ort_runtime.capi._metadata")?.getattr("NodeArg")?;
    let list = PyList::empty(py);
    for spec in specs {
        let shape = shape_of(py, &spec.ty, declared.get(spec.name.as_str()).copied(), &made)?;
        list.append(class.call1((&spec.name, type_text(&spec.ty), shape))?)?;
    }
    Ok(list)
}

/// Returns a `ModelMetadata`.
pub(crate) fn model_metadata<'py>(py: Python<'py>, model: &Model) -> PyResult<Bound<'py, PyAny>> {
    let (info, class) = (model.info(), py.import("ort_runtime.capi._metadata")?.getattr("ModelMetadata")?);
    let custom = PyDict::new(py);
    for (key, value) in &info.metadata {
        custom.set_item(key, value)?;
    }
    let fields = PyDict::new(py);
    fields.set_item("producer_name", &info.producer_name)?;
    fields.set_item("domain", &info.domain)?;
    fields.set_item("description", &info.description)?;
    fields.set_item("graph_name", &info.graph_name)?;
    fields.set_item("graph_description", &info.graph_description)?;
    // What a model without a version has in onnxruntime.
    fields.set_item("version", info.model_version.unwrap_or(i64::MAX))?;
    fields.set_item("custom_metadata_map", custom)?;
    class.call((), Some(&fields))
}

/// Returns which provider runs which nodes: one `OrtEpAssignedSubgraph` for each provider and each
/// run of nodes that follow each other on it.
///
/// If the CPU runs all of them, each node has a subgraph of its own, as in onnxruntime. The nodes
/// are those that basic rewrites leave: nodes that are computed while loading are not assigned, and
/// fused nodes are listed one by one. Otherwise they are the nodes that providers are given.
pub(crate) fn assigned_subgraphs<'py>(
    py: Python<'py>,
    model: &Model,
    session: &Session,
    settings: Settings,
) -> PyResult<Bound<'py, PyList>> {
    let module = py.import("ort_runtime.capi._metadata")?;
    let (node_class, subgraph_class) =
        (module.getattr("OrtEpAssignedNode")?, module.getattr("OrtEpAssignedSubgraph")?);
    let list = PyList::empty(py);
    let placement = session.placement();
    if placement.iter().all(|node| name_of(node.provider) == CPU) {
        let graph = detached(py, || settings.basic_graph(model)).or_raise(py)?;
        let unnamed = &model.info().unnamed_nodes;
        for node in nodes_of(&graph) {
            let name = if unnamed.contains(&*node.name) { "" } else { &*node.name };
            let made = node_class.call1((name, node.spec.domain, node.spec.name))?;
            list.append(subgraph_class.call1((CPU, PyList::new(py, [made])?))?)?;
        }
        return Ok(list);
    }
    for group in placement.chunk_by(|node, next| node.provider == next.provider) {
        let nodes = PyList::empty(py);
        for node in group {
            let (domain, operator) = node.operator.rsplit_once('.').unwrap_or(("", &node.operator));
            nodes.append(node_class.call1((&node.node, domain, operator))?)?;
        }
        let provider = group.first().map_or(CPU, |node| name_of(node.provider));
        list.append(subgraph_class.call1((provider, nodes))?)?;
    }
    Ok(list)
}

/// Returns the nodes of a graph, those in the subgraphs of a node before it.
fn nodes_of(graph: &Graph) -> Vec<&Node> {
    let mut nodes = Vec::new();
    for node in &graph.nodes {
        nodes.extend(node.subgraphs.iter().flat_map(|subgraph| nodes_of(&subgraph.graph)));
        nodes.push(node);
    }
    nodes
}

/// Returns a list of `OrtMemoryInfo`: runs take values from the host's memory and give them there.
pub(crate) fn memory_infos<'py>(py: Python<'py>, count: usize) -> PyResult<Bound<'py, PyList>> {
    let info = py.import("ort_runtime.capi._session")?.getattr("host_memory")?.call0()?;
    PyList::new(py, std::iter::repeat_n(info, count))
}
