//! `OrtKernelInfo`: the node of a client's kernel, with its attributes and constant inputs.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::Arc;

use ort_runtime::ep::NodeView;
use ort_runtime::ir::{Attribute, ValueType};
use ort_runtime::{DType, Value as EngineValue};
use ort_sys::OrtAllocator;

use crate::allocator::{Allocator, default_allocator};
use crate::entry::{ArrayMut, In, Object, Out, Place, Released, Text, entries, kinds};
use crate::key_values::KeyValues;
use crate::logger::{Logger, logger};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::{ShapeSource, TypeInfo};
use crate::value::Value;

/// What a kernel may know of its node. Copies share it.
#[derive(Clone)]
pub(crate) struct KernelInfo(Arc<Facts>);

kinds! {
    KernelInfo => "OrtKernelInfo", b"OrtKrnIn";
}

struct Facts {
    name: String,
    domain: String,
    operator: String,
    since: i32,
    inputs: Vec<NodePort>,
    outputs: Vec<NodePort>,
    attributes: Vec<(String, Attribute)>,
    entries: Arc<BTreeMap<String, String>>,
}

/// An input or output of a node.
struct NodePort {
    /// Empty if it is left out.
    name: String,
    ty: ValueType,
    constant: Option<Object<Value>>,
}

impl KernelInfo {
    pub(crate) fn of_node(
        node: &NodeView<'_>,
        entries: &Arc<BTreeMap<String, String>>,
    ) -> Outcome<KernelInfo> {
        let NodeView { graph, node: inner } = node;
        let port = |id: &Option<ort_runtime::ir::ValueId>| {
            let Some(id) = *id else {
                return Ok(NodePort { name: String::new(), ty: ValueType::Unknown, constant: None });
            };
            let value = graph.value(id);
            let constant = graph.constants.get(&id).map(Value::of_constant).transpose()?.map(Object::new);
            Ok(NodePort { name: value.name.to_string(), ty: value.ty.clone(), constant })
        };
        let ports = |ids: &[_]| ids.iter().map(port).collect::<Outcome<Vec<NodePort>>>();
        Ok(KernelInfo(Arc::new(Facts {
            name: inner.name.to_string(),
            domain: inner.spec.domain.to_owned(),
            operator: inner.spec.name.to_owned(),
            since: i32::try_from(inner.spec.since).unwrap_or(i32::MAX),
            inputs: ports(&inner.inputs)?,
            outputs: ports(&inner.outputs)?,
            attributes: inner.attrs.iter().map(|(name, value)| (name.to_owned(), value.clone())).collect(),
            entries: Arc::clone(entries),
        })))
    }

    /// The number of outputs, and the element type of each that is not left out.
    pub(crate) fn outputs(&self) -> impl ExactSizeIterator<Item = Option<Option<DType>>> {
        self.0.outputs.iter().map(|port| (!port.name.is_empty()).then(|| port.ty.dtype()))
    }

    fn attribute(&self, name: Text) -> Outcome<(&Attribute, &str)> {
        let name = name.get("the name of the attribute")?;
        let found = self.0.attributes.iter().find(|(known, _)| known == name);
        found
            .map(|(name, value)| (value, name.as_str()))
            .ok_or_else(|| Failure::new(code::FAIL, format!("No attribute with name:'{name}'is defined.")))
    }
}

/// What an attribute of another kind gives.
fn mismatch<T>(name: &str, expected: &str, actual: &Attribute) -> Outcome<T> {
    let actual = actual.kind().onnx_name();
    fail(
        code::FAIL,
        format!("Attribute name and type don't match: {name} is expected to be {expected}, but is {actual}"),
    )
}

/// Writes elements to a buffer of the caller. Without one, the caller asks for their number.
fn put<T: Copy>(elements: &[T], mut to: ArrayMut<T>, size: Place<'_, usize>, too_small: &str) -> Outcome {
    let needed = elements.len();
    if to.is_null() {
        size.put(needed);
        return Ok(());
    }
    let given = size.read();
    size.put(needed);
    if given < needed {
        return invalid(too_small);
    }
    to.get(needed, "the buffer")?.copy_from_slice(elements);
    Ok(())
}

fn put_text(text: &[u8], to: ArrayMut<u8>, size: Place<'_, usize>, too_small: &str) -> Outcome {
    put(&[text, &[0]].concat(), to, size, too_small)
}

const TOO_SMALL: &str = "Result buffer is not large enough";

fn port_at<'a>(ports: &'a [NodePort], index: usize, kind: &str) -> Outcome<&'a NodePort> {
    let unknown = || Failure::invalid(format!("::OrtKernelInfo {kind} index is out of bounds"));
    ports.get(index).ok_or_else(unknown)
}

fn type_of(port: &NodePort, kind: &str) -> Outcome<*mut Object<TypeInfo>> {
    match &port.ty {
        ValueType::Unknown => invalid(format!("::OrtKernelInfo {kind} does not have a type")),
        ty => Ok(Object::give(TypeInfo::of(ty, &ShapeSource::default()))),
    }
}

entries! {
    /// 85
    fn KernelInfoGetAttribute_float(info: In<KernelInfo>, name: Text, out: Out<f32>) {
        let out = out.place()?;
        match info.get()?.attribute(name)? {
            (Attribute::Float(number), _) => out.put(*number),
            (other, name) => return mismatch(name, "FLOAT", other),
        }
        Ok(())
    }

    /// 86
    fn KernelInfoGetAttribute_int64(info: In<KernelInfo>, name: Text, out: Out<i64>) {
        let out = out.place()?;
        match info.get()?.attribute(name)? {
            (Attribute::Int(number), _) => out.put(*number),
            (other, name) => return mismatch(name, "INT", other),
        }
        Ok(())
    }

    /// 87
    fn KernelInfoGetAttribute_string(info: In<KernelInfo>, name: Text, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        match info.get()?.attribute(name)? {
            (Attribute::String(text), _) => put_text(text.as_bytes(), buffer, size, TOO_SMALL),
            (Attribute::Bytes(text), _) => put_text(text, buffer, size, TOO_SMALL),
            (other, name) => mismatch(name, "STRING", other),
        }
    }

    /// 162
    fn KernelInfoGetAttributeArray_float(info: In<KernelInfo>, name: Text, buffer: ArrayMut<f32>, size: Out<usize>) {
        let size = size.place()?;
        match info.get()?.attribute(name)? {
            (Attribute::Floats(numbers), _) => put(numbers, buffer, size, TOO_SMALL),
            (other, name) => mismatch(name, "FLOATS", other),
        }
    }

    /// 163
    fn KernelInfoGetAttributeArray_int64(info: In<KernelInfo>, name: Text, buffer: ArrayMut<i64>, size: Out<usize>) {
        let size = size.place()?;
        match info.get()?.attribute(name)? {
            (Attribute::Ints(numbers), _) => put(numbers, buffer, size, TOO_SMALL),
            (other, name) => mismatch(name, "INTS", other),
        }
    }

    /// 417. The array and its texts come from the allocator.
    fn KernelInfoGetAttributeArray_string(info: In<KernelInfo>, name: Text, allocator: Allocator, out: Out<*mut *mut c_char>, size: Out<usize>) {
        let (out, size) = (out.place()?, size.place()?);
        allocator.info()?;
        match info.get()?.attribute(name)? {
            (Attribute::Strings(texts), _) => {
                let texts = texts.iter().map(|text| allocator.text(text.as_bytes()));
                let texts = texts.collect::<Outcome<Vec<*mut c_char>>>()?;
                out.put(allocator.array(&texts)?);
                size.put(texts.len());
                Ok(())
            }
            (other, name) => mismatch(name, "STRINGS", other),
        }
    }

    /// 236
    fn KernelInfoGetAttribute_tensor(info: In<KernelInfo>, name: Text, allocator: Allocator, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        allocator.info()?;
        match info.get()?.attribute(name)? {
            (Attribute::Tensor(tensor), _) => {
                let value = EngineValue::Tensor(tensor.clone());
                out.put(Object::give(Value::copy(&value, allocator)?));
                Ok(())
            }
            (other, name) => mismatch(name, "TENSOR", other),
        }
    }

    /// 217
    fn CopyKernelInfo(info: In<KernelInfo>, out: Out<*mut Object<KernelInfo>>) {
        let out = out.place()?;
        out.put(Object::give(info.get()?.clone()));
        Ok(())
    }

    /// 218
    fn ReleaseKernelInfo(info: Released<KernelInfo>) -> (), else (), {
        info.release();
    }

    /// 230
    fn KernelInfo_GetInputCount(info: In<KernelInfo>, out: Out<usize>) {
        let out = out.place()?;
        out.put(info.get()?.0.inputs.len());
        Ok(())
    }

    /// 231
    fn KernelInfo_GetOutputCount(info: In<KernelInfo>, out: Out<usize>) {
        let out = out.place()?;
        out.put(info.get()?.0.outputs.len());
        Ok(())
    }

    /// 232
    fn KernelInfo_GetInputName(info: In<KernelInfo>, index: usize, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        let port = port_at(&info.get()?.0.inputs, index, "input")?;
        let too_small = "Output buffer is not large enough for ::OrtKernelInfo input name";
        put_text(port.name.as_bytes(), buffer, size, too_small)
    }

    /// 233
    fn KernelInfo_GetOutputName(info: In<KernelInfo>, index: usize, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        let port = port_at(&info.get()?.0.outputs, index, "output")?;
        let too_small = "Output buffer is not large enough for ::OrtKernelInfo output name";
        put_text(port.name.as_bytes(), buffer, size, too_small)
    }

    /// 234
    fn KernelInfo_GetInputTypeInfo(info: In<KernelInfo>, index: usize, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(type_of(port_at(&info.get()?.0.inputs, index, "input")?, "input")?);
        Ok(())
    }

    /// 235
    fn KernelInfo_GetOutputTypeInfo(info: In<KernelInfo>, index: usize, out: Out<*mut Object<TypeInfo>>) {
        let out = out.place()?;
        out.put(type_of(port_at(&info.get()?.0.outputs, index, "output")?, "output")?);
        Ok(())
    }

    /// 244
    fn KernelInfo_GetNodeName(info: In<KernelInfo>, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        let too_small = "Output buffer is not large enough for ::OrtKernelInfo node name";
        put_text(info.get()?.0.name.as_bytes(), buffer, size, too_small)
    }

    /// 392
    fn KernelInfo_GetOperatorDomain(info: In<KernelInfo>, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        let too_small = "Output buffer is not large enough for ::OrtKernelInfo's operator domain";
        put_text(info.get()?.0.domain.as_bytes(), buffer, size, too_small)
    }

    /// 393
    fn KernelInfo_GetOperatorType(info: In<KernelInfo>, buffer: ArrayMut<u8>, size: Out<usize>) {
        let size = size.place()?;
        let too_small = "Output buffer is not large enough for ::OrtKernelInfo's operator type";
        put_text(info.get()?.0.operator.as_bytes(), buffer, size, too_small)
    }

    /// 394
    fn KernelInfo_GetOperatorSinceVersion(info: In<KernelInfo>, out: Out<c_int>) {
        let out = out.place()?;
        out.put(info.get()?.0.since);
        Ok(())
    }

    /// 391
    fn KernelInfo_GetConfigEntries(info: In<KernelInfo>, out: Out<*mut Object<KeyValues>>) {
        let out = out.place()?;
        let mut pairs = KeyValues::default();
        let entries = &info.get()?.0.entries;
        entries.iter().for_each(|(key, value)| pairs.set(key.as_bytes(), value.as_bytes()));
        out.put(Object::give(pairs));
        Ok(())
    }

    /// 245
    fn KernelInfo_GetLogger(info: In<KernelInfo>, out: Out<*const Object<Logger>>) {
        let out = out.place()?;
        info.get()?;
        out.put(logger());
        Ok(())
    }

    /// 249. The value is lent for the life of the kernel.
    fn KernelInfoGetConstantInput_tensor(info: In<KernelInfo>, index: usize, is_constant: Out<c_int>, out: Out<*const Object<Value>>) {
        let (is_constant, out) = (is_constant.place()?, out.place()?);
        let constant = port_at(&info.get()?.0.inputs, index, "input")?.constant.as_ref();
        is_constant.put(c_int::from(constant.is_some()));
        out.put(constant.map_or(std::ptr::null(), |value| value));
        Ok(())
    }

    /// 278
    fn KernelInfoGetAllocator(info: In<KernelInfo>, _kind: i32, out: Out<*mut OrtAllocator>) {
        let out = out.place()?;
        info.get()?;
        out.put(default_allocator());
        Ok(())
    }
}
