//! Deserializes a node's records inside a provider library, to a graph of one node.

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

/// Decodes a record to a graph of that one node. Its constants share the host's bytes.
///
/// # Safety
///
/// `record` is null, or it and everything it points to are valid as [`tables`](super::tables)
/// documents. The host's table is valid forever.
pub(super) unsafe fn read_node(
    record: *const OrtProviderNode,
    host: &'static OrtProviderHost,
) -> Result<Graph> {
    // SAFETY: null or valid, by this function's contract.
    let record = unsafe { record.as_ref() }.ok_or_else(|| error!(Fail, "the host gave no node"))?;
    // SAFETY: the record is valid by this function's contract, so its strings and lists are, too.
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
        // SAFETY: the attribute is part of the valid record.
        given.push(unsafe { read_attribute(attribute, host) }?);
    }
    let mut graph = Graph::new("node");
    let mut values = |kind: &str, records: &[OrtProviderValue]| -> Result<Vec<Option<ValueId>>> {
        let values = records.iter().enumerate();
        // SAFETY: the values are part of the valid record.
        values
            .map(|(index, value)| unsafe { read_value(&mut graph, format!("{kind} {index}"), value, host) })
            .collect()
    };
    let (inputs, outputs) = (values("input", inputs)?, values("output", outputs)?);
    let attrs = Attributes::new(spec, given)
        // A newer host may pass attributes that this library does not know. That is a refusal, not
        // a failure.
        .map_err(|problem| error!(NotImplemented, "{}", problem.message()))?;
    let (inputs, outputs) = (inputs.into_iter().collect(), outputs.into_iter().collect());
    graph.nodes.push(Node { name: name.into(), spec, inputs, outputs, attrs, subgraphs: Vec::new() });
    Ok(graph)
}

/// Borrows a C string; fails if it is null or not UTF-8.
///
/// # Safety
///
/// `pointer` is null or a NUL-terminated string that outlives `'a`.
pub(super) unsafe fn text<'a>(pointer: *const c_char) -> Result<&'a str> {
    ensure!(!pointer.is_null(), Fail, "a text is missing");
    // SAFETY: not null, and NUL-terminated by this function's contract.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|problem| error!(Fail, "a text is not UTF-8: {problem}"))
}

/// Borrows a C array.
///
/// # Safety
///
/// `pointer` is null or points to `count` elements that outlive `'a`.
pub(super) unsafe fn list<'a, T>(pointer: *const T, count: usize) -> &'a [T] {
    if pointer.is_null() || count == 0 {
        return &[];
    }
    // SAFETY: not null, and `count` elements long by this function's contract.
    unsafe { std::slice::from_raw_parts(pointer, count) }
}

/// Returns the element type of an ONNX `TensorProto.DataType`.
pub(super) fn read_dtype(code: i32) -> Result<DType> {
    DType::all()
        .find(|dtype| *dtype as i32 == code)
        .ok_or_else(|| error!(NotImplemented, "the library does not know element type {code}"))
}

/// Adds a value to the graph; returns `None` for an absent one.
///
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
        // SAFETY: the record is valid by this function's contract.
        let tensor = unsafe { read_constant(value, host) }?;
        return Ok(Some(graph.add_constant(name, tensor)));
    }
    if value.element_type == 0 {
        return Ok(Some(graph.add_value(name, ValueType::Unknown)));
    }
    let shape = match usize::try_from(value.rank) {
        Err(_) => None,
        Ok(rank) => {
            // SAFETY: by the ABI, `expressions` has one string per dimension.
            let texts = unsafe { list(value.expressions, rank) };
            // SAFETY: each expression is a NUL-terminated string.
            let dims = texts.iter().map(|size| Ok(Dim::parse(unsafe { text(*size) }?)));
            Some(dims.collect::<Result<Vec<Dim>>>()?)
        }
    };
    Ok(Some(graph.add_value(name, ValueType::tensor(read_dtype(value.element_type)?, shape))))
}

/// Keeps a host constant alive, and releases it on drop.
struct Retained {
    host: &'static OrtProviderHost,
    owner: *const OrtProviderOwner,
}

// SAFETY: the host counts references atomically, so any thread may release one.
unsafe impl Send for Retained {}
// SAFETY: a shared reference gives no access to the owner.
unsafe impl Sync for Retained {}

impl Drop for Retained {
    fn drop(&mut self) {
        if let Some(release) = self.host.release {
            // SAFETY: `read_constant` retained the owner once for this value.
            unsafe { release(self.owner) }
        }
    }
}

/// Decodes a constant without a copy. The host keeps the bytes until the tensor is dropped.
///
/// # Safety
///
/// As for [`read_node`].
unsafe fn read_constant(value: &OrtProviderValue, host: &'static OrtProviderHost) -> Result<Tensor> {
    let dtype = read_dtype(value.element_type)?;
    let rank = usize::try_from(value.rank).map_err(|_| error!(Fail, "a constant without a rank"))?;
    // SAFETY: the record is valid by this function's contract, so `sizes` has `rank` elements.
    let shape = read_shape(unsafe { list(value.sizes, rank) })?;
    let retain = host.retain.ok_or_else(|| error!(Fail, "the host keeps no constants"))?;
    // SAFETY: the owner is alive during the call, because it is that of a valid record.
    unsafe { retain(value.owner) };
    let owner = Retained { host, owner: value.owner };
    // SAFETY: the bytes neither move nor change while the host's tensor is retained, and the buffer
    // keeps `owner` until its last clone is dropped.
    let bytes = unsafe { SharedBuffer::foreign(value.data, value.bytes as usize, owner) }?;
    let bytes = bytes.bytes().ok_or_else(|| error!(Fail, "a constant is not in host memory"))?;
    Tensor::from_bytes(dtype, &shape, bytes).within(|| "a constant")
}

pub(super) fn read_shape(sizes: &[i64]) -> Result<crate::tensor::Shape> {
    let size = |size: &i64| usize::try_from(*size).map_err(|_| error!(Fail, "a size of {size}"));
    sizes.iter().map(size).collect()
}

/// Decodes an attribute and its name.
///
/// # Safety
///
/// As for [`read_node`].
unsafe fn read_attribute(
    attribute: &OrtProviderAttribute,
    host: &'static OrtProviderHost,
) -> Result<(String, Attribute)> {
    let count = attribute.count;
    // SAFETY: the record is valid by this function's contract; `kind` says which of its fields are
    // set.
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
