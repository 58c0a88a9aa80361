//! Serializes a node to the records of the provider ABI.

use std::ffi::{CString, c_char};
use std::marker::PhantomData;
use std::ptr::null;
use std::sync::Arc;

use super::tables::{
    ORT_PROVIDER_ABSENT, ORT_PROVIDER_ATTRIBUTE_FLOAT, ORT_PROVIDER_ATTRIBUTE_FLOATS,
    ORT_PROVIDER_ATTRIBUTE_INT, ORT_PROVIDER_ATTRIBUTE_INTS, ORT_PROVIDER_ATTRIBUTE_STRING,
    ORT_PROVIDER_ATTRIBUTE_STRINGS, ORT_PROVIDER_ATTRIBUTE_TENSOR, ORT_PROVIDER_HOST, ORT_PROVIDER_SHAPE,
    OrtProviderAttribute, OrtProviderNode, OrtProviderValue,
};
use crate::dim::Dim;
use crate::dtype::DType;
use crate::ep::NodeView;
use crate::ir::{Attribute, ValueId, ValueType};
use crate::tensor::Tensor;

/// Why a node cannot be offered to a provider library.
type Refusal = String;

/// The records of one node, with everything that they point to.
pub(in crate::ep) struct NodeRecords<'a> {
    /// The node's record; its pointers are valid while this struct lives.
    pub(in crate::ep) node: OrtProviderNode,
    _inputs: Vec<OrtProviderValue>,
    _outputs: Vec<OrtProviderValue>,
    _attributes: Vec<OrtProviderAttribute>,
    _held: Held,
    _node: PhantomData<NodeView<'a>>,
}

/// Owns what the records point to. Each item has a heap allocation of its own, so that growing a
/// list does not move it.
#[derive(Default)]
struct Held {
    texts: Vec<CString>,
    lists: Vec<Vec<*const c_char>>,
    sizes: Vec<Vec<i64>>,
    constants: Vec<Arc<Tensor>>,
    #[expect(clippy::vec_box, reason = "a record points to each of them, and must not move with the list")]
    tensors: Vec<Box<OrtProviderValue>>,
}

impl<'a> NodeRecords<'a> {
    /// Encodes a node, or says which feature of it the ABI cannot express.
    pub(in crate::ep) fn new(view: &NodeView<'a>) -> Result<NodeRecords<'a>, Refusal> {
        let node = view.node;
        if !node.subgraphs.is_empty() {
            return Err("provider libraries cannot run operators with subgraphs".to_owned());
        }
        let mut held = Held::default();
        let mut values = |ids: &[Option<ValueId>]| {
            ids.iter().map(|id| held.value(view, *id)).collect::<Result<Vec<_>, _>>()
        };
        let (inputs, outputs) = (values(&node.inputs)?, values(&node.outputs)?);
        let attributes = node.attrs.iter().map(|(name, value)| held.attribute(name, value));
        let attributes = attributes.collect::<Result<Vec<_>, _>>()?;
        let node = OrtProviderNode {
            size: size_of::<OrtProviderNode>(),
            domain: held.text(node.spec.domain)?,
            op_type: held.text(node.spec.name)?,
            name: held.text(&node.name)?,
            inputs: inputs.as_ptr(),
            input_count: inputs.len(),
            outputs: outputs.as_ptr(),
            output_count: outputs.len(),
            attributes: attributes.as_ptr(),
            attribute_count: attributes.len(),
        };
        let (_inputs, _outputs, _attributes) = (inputs, outputs, attributes);
        Ok(NodeRecords { node, _inputs, _outputs, _attributes, _held: held, _node: PhantomData })
    }
}

impl Held {
    fn text(&mut self, text: &str) -> Result<*const c_char, Refusal> {
        // The ABI has NUL-terminated strings only.
        let text = CString::new(text).map_err(|_| {
            "a text of the node has a zero byte, which provider libraries do not read".to_owned()
        })?;
        let pointer = text.as_ptr();
        self.texts.push(text);
        Ok(pointer)
    }

    fn texts<'t>(&mut self, texts: impl Iterator<Item = &'t str>) -> Result<*const *const c_char, Refusal> {
        let list = texts.map(|text| self.text(text)).collect::<Result<Vec<_>, _>>()?;
        let pointer = list.as_ptr();
        self.lists.push(list);
        Ok(pointer)
    }

    fn value(&mut self, view: &NodeView<'_>, id: Option<ValueId>) -> Result<OrtProviderValue, Refusal> {
        let absent = OrtProviderValue {
            kind: ORT_PROVIDER_ABSENT,
            element_type: 0,
            rank: -1,
            sizes: null(),
            expressions: null(),
            data: null(),
            bytes: 0,
            owner: null(),
        };
        // A left-out input or output keeps its position, as an absent record.
        let Some(id) = id else { return Ok(absent) };
        if let Some(constant) = view.graph.constants.get(&id) {
            return self.constant(constant);
        }
        let value = OrtProviderValue { kind: ORT_PROVIDER_SHAPE, ..absent };
        match &view.graph.value(id).ty {
            ValueType::Unknown => Ok(value),
            ValueType::Tensor(tensor) if tensor.dtype != DType::String => {
                let value = OrtProviderValue { element_type: tensor.dtype as i32, ..value };
                match &tensor.shape {
                    None => Ok(value),
                    Some(shape) => self.shaped(value, shape),
                }
            }
            other => Err(format!("provider libraries do not support values of type {other}")),
        }
    }

    fn shaped(&mut self, value: OrtProviderValue, shape: &[Dim]) -> Result<OrtProviderValue, Refusal> {
        let texts: Vec<String> = shape.iter().map(Dim::to_string).collect();
        let expressions = self.texts(texts.iter().map(String::as_str))?;
        let sizes: Vec<i64> = shape.iter().map(|size| size.as_constant().unwrap_or(-1)).collect();
        let value =
            OrtProviderValue { rank: shape.len() as i32, sizes: sizes.as_ptr(), expressions, ..value };
        self.sizes.push(sizes);
        Ok(value)
    }

    fn constant(&mut self, tensor: &Tensor) -> Result<OrtProviderValue, Refusal> {
        let bytes = tensor.bytes().ok_or("provider libraries do not support string constants")?;
        let value = OrtProviderValue {
            kind: ORT_PROVIDER_HOST,
            element_type: tensor.dtype() as i32,
            rank: -1,
            sizes: null(),
            expressions: null(),
            data: bytes.as_ptr(),
            bytes: bytes.len() as u64,
            owner: null(),
        };
        // The clone shares the tensor's bytes, so `data` is valid as long as the library retains
        // the clone.
        let owner = Arc::new(tensor.clone());
        let value = OrtProviderValue { owner: Arc::as_ptr(&owner).cast(), ..value };
        self.constants.push(owner);
        let shape: Vec<Dim> = tensor.shape().iter().map(|&size| Dim::constant(size as i64)).collect();
        self.shaped(value, &shape)
    }

    fn attribute(&mut self, name: &str, value: &Attribute) -> Result<OrtProviderAttribute, Refusal> {
        let none = OrtProviderAttribute {
            name: self.text(name)?,
            kind: 0,
            f: 0.0,
            i: 0,
            s: null(),
            floats: null(),
            ints: null(),
            strings: null(),
            count: 0,
            tensor: null(),
        };
        Ok(match value {
            Attribute::Float(f) => OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_FLOAT, f: *f, ..none },
            Attribute::Int(i) => OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_INT, i: *i, ..none },
            Attribute::String(text) => {
                OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_STRING, s: self.text(text)?, ..none }
            }
            Attribute::Floats(list) => {
                let (floats, count) = (list.as_ptr(), list.len());
                OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_FLOATS, floats, count, ..none }
            }
            Attribute::Ints(list) => {
                let (ints, count) = (list.as_ptr(), list.len());
                OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_INTS, ints, count, ..none }
            }
            Attribute::Strings(list) => {
                let strings = self.texts(list.iter().map(String::as_str))?;
                let count = list.len();
                OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_STRINGS, strings, count, ..none }
            }
            Attribute::Tensor(tensor) => {
                let value = Box::new(self.constant(tensor)?);
                let tensor = &raw const *value;
                self.tensors.push(value);
                OrtProviderAttribute { kind: ORT_PROVIDER_ATTRIBUTE_TENSOR, tensor, ..none }
            }
            Attribute::Bytes(_) | Attribute::Sparse(_) | Attribute::Type(_) | Attribute::Tensors(_) => {
                return Err(format!(
                    "provider libraries do not support attributes of kind {:?}",
                    value.kind()
                ));
            }
        })
    }
}
