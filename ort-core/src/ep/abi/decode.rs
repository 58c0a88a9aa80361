//! A node's records read by a library: the graph of that one node.

use std::ffi::{CStr, c_char};

use ort_alloc::SharedBuffer;

use super::tables::{
    ORT_PROVIDER_ABSENT, ORT_PROVIDER_ATTRIBUTE_FLOAT, ORT_PROVIDER_ATTRIBUTE_FLOATS,
    ORT_PROVIDER_ATTRIBUTE_INT, ORT_PROVIDER_ATTRIBUTE_INTS, ORT_PROVIDER_ATTRIBUTE_STRING,
    ORT_PROVIDER_ATTRIBUTE_STRINGS, ORT_PROVIDER_ATTRIBUTE_TENSOR, ORT_PROVIDER_HOST, OrtProviderAttribute,
    OrtProviderHost, OrtProviderNode, OrtProviderOwner, OrtProviderValue,
};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ir::{Attribute, Attributes, Graph, Node, ValueId, ValueType};
use crate::spec::Registry;
use crate::tensor::Tensor;
use crate::{Result, Within, ensure, error};

/// The graph of one node that a record describes; its constants share the host's bytes.
///
/// # Safety
///
/// The record and all that it points to are as their documentation says, and the host's table is
/// valid for ever.
pub(super) unsafe fn read_node(
    record: *const OrtProviderNode,
    host: &'static OrtProviderHost,
) -> Result<Graph> {
    // SAFETY: the caller vouches for the record.
    let record = unsafe { record.as_ref() }.ok_or_else(|| error!(Fail, "the host gave no node"))?;
    // SAFETY: the caller vouches for the texts and lists of the record.
    let (domain, op_type, name, inputs, outputs, attributes) = unsafe {
        (
            text(record.domain)?,
            text(record.op_type)?,
            text(record.name)?,
            list(record.inputs, record.input_count),
            list(record.outputs, record.output_count),
            list(record.attributes, record.attribute_count),
        )
    };
    let spec = Registry::global()?.find(domain, op_type);
    let spec = spec.ok_or_else(|| error!(NotImplemented, "the library does not know operator {op_type}"))?;
    let mut given = Vec::with_capacity(attributes.len());
    for attribute in attributes {
        // SAFETY: as above.
        given.push(unsafe { read_attribute(attribute, host) }?);
    }
    let mut graph = Graph::new("node");
    let mut values = |kind: &str, records: &[OrtProviderValue]| -> Result<Vec<Option<ValueId>>> {
        let values = records.iter().enumerate();
        // SAFETY: as above.
        values
            .map(|(index, value)| unsafe { read_value(&mut graph, format!("{kind} {index}"), value, host) })
            .collect()
    };
    let (inputs, outputs) = (values("input", inputs)?, values("output", outputs)?);
    let attrs = Attributes::new(spec, given)
        // Newer hosts may know attributes that this library does not.
        .map_err(|problem| error!(NotImplemented, "{}", problem.message()))?;
    let (inputs, outputs) = (inputs.into_iter().collect(), outputs.into_iter().collect());
    graph.nodes.push(Node { name: name.into(), spec, inputs, outputs, attrs, subgraphs: Vec::new() });
    Ok(graph)
}

/// # Safety
///
/// A pointer that is not null points to text that ends with a zero byte and lives as long as the
/// caller uses it.
pub(super) unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str> {
    ensure!(!pointer.is_null(), Fail, "a text is missing");
    // SAFETY: the caller vouches for it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|problem| error!(Fail, "a text is not UTF-8: {problem}"))
}

/// # Safety
///
/// The pointer points to `count` elements that live as long as the caller uses them, or it is null.
pub(super) unsafe fn list<'a, T>(pointer: *const T, count: usize) -> &'a [T] {
    if pointer.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { std::slice::from_raw_parts(pointer, count) }
}

/// The element type with one of ONNX's codes.
pub(super) fn read_dtype(code: i32) -> Result<DType> {
    DType::all()
        .find(|dtype| *dtype as i32 == code)
        .ok_or_else(|| error!(NotImplemented, "the library does not know element type {code}"))
}

/// # Safety
///
/// As for [`read_node`].
unsafe fn read_value(
    graph: &mut Graph,
    name: String,
    value: &OrtProviderValue,
    host: &'static OrtProviderHost,
) -> Result<Option<ValueId>> {
    if value.kind == ORT_PROVIDER_ABSENT {
        return Ok(None);
    }
    if value.kind == ORT_PROVIDER_HOST {
        // SAFETY: the caller vouches for the record.
        let tensor = unsafe { read_constant(value, host) }?;
        return Ok(Some(graph.add_constant(name, tensor)));
    }
    if value.element_type == 0 {
        return Ok(Some(graph.add_value(name, ValueType::Unknown)));
    }
    let shape = match usize::try_from(value.rank) {
        Err(_) => None,
        Ok(rank) => {
            // SAFETY: the caller vouches for the record.
            let texts = unsafe { list(value.expressions, rank) };
            // SAFETY: as above.
            let dims = texts.iter().map(|size| Ok(Dim::parse(unsafe { text(*size) }?)));
            Some(dims.collect::<Result<Vec<Dim>>>()?)
        }
    };
    Ok(Some(graph.add_value(name, ValueType::tensor(read_dtype(value.element_type)?, shape))))
}

/// Gives up a constant of the host when it is dropped.
struct Retained {
    host: &'static OrtProviderHost,
    owner: *const OrtProviderOwner,
}

// SAFETY: the host counts its holders so that any thread may release one.
unsafe impl Send for Retained {}
// SAFETY: nothing is done through a shared reference.
unsafe impl Sync for Retained {}

impl Drop for Retained {
    fn drop(&mut self) {
        if let Some(release) = self.host.release {
            // SAFETY: the owner was retained once for this value.
            unsafe { release(self.owner) }
        }
    }
}

/// A constant that shares the host's bytes, which stay until the tensor is dropped.
///
/// # Safety
///
/// As for [`read_node`].
unsafe fn read_constant(value: &OrtProviderValue, host: &'static OrtProviderHost) -> Result<Tensor> {
    let dtype = read_dtype(value.element_type)?;
    let rank = usize::try_from(value.rank).map_err(|_| error!(Fail, "a constant without a rank"))?;
    // SAFETY: the caller vouches for the record.
    let shape = read_shape(unsafe { list(value.sizes, rank) })?;
    let retain = host.retain.ok_or_else(|| error!(Fail, "the host keeps no constants"))?;
    // SAFETY: the owner is that of a record of this call.
    unsafe { retain(value.owner) };
    let owner = Retained { host, owner: value.owner };
    // SAFETY: the host keeps the bytes where they are, and nobody writes them, until the owner is
    // dropped.
    let bytes = unsafe { SharedBuffer::foreign(value.data, value.bytes as usize, owner) }?;
    let bytes = bytes.bytes().ok_or_else(|| error!(Fail, "a constant is not in host memory"))?;
    Tensor::from_bytes(dtype, &shape, bytes).within(|| "a constant")
}

pub(super) fn read_shape(sizes: &[i64]) -> Result<crate::tensor::Shape> {
    let size = |size: &i64| usize::try_from(*size).map_err(|_| error!(Fail, "a size of {size}"));
    sizes.iter().map(size).collect()
}

/// # Safety
///
/// As for [`read_node`].
unsafe fn read_attribute(
    attribute: &OrtProviderAttribute,
    host: &'static OrtProviderHost,
) -> Result<(String, Attribute)> {
    let count = attribute.count;
    // SAFETY: the caller vouches for the texts, the lists and the tensor of the record, of which
    // the kind says what is there.
    unsafe {
        let name = text(attribute.name)?.to_owned();
        let value = match attribute.kind {
            ORT_PROVIDER_ATTRIBUTE_FLOAT => Attribute::Float(attribute.f),
            ORT_PROVIDER_ATTRIBUTE_INT => Attribute::Int(attribute.i),
            ORT_PROVIDER_ATTRIBUTE_STRING => Attribute::String(text(attribute.s)?.to_owned()),
            ORT_PROVIDER_ATTRIBUTE_FLOATS => Attribute::Floats(list(attribute.floats, count).to_vec()),
            ORT_PROVIDER_ATTRIBUTE_INTS => Attribute::Ints(list(attribute.ints, count).to_vec()),
            ORT_PROVIDER_ATTRIBUTE_STRINGS => {
                let texts = list(attribute.strings, count).iter();
                let texts = texts.map(|pointer| Ok(text(*pointer)?.to_owned()));
                Attribute::Strings(texts.collect::<Result<_>>()?)
            }
            ORT_PROVIDER_ATTRIBUTE_TENSOR => {
                let tensor = attribute.tensor.as_ref();
                let tensor = tensor.ok_or_else(|| error!(Fail, "attribute '{name}' has no tensor"))?;
                Attribute::Tensor(read_constant(tensor, host)?)
            }
            other => {
                return Err(error!(NotImplemented, "the library does not know attributes of kind {other}"));
            }
        };
        Ok((name, value))
    }
}
