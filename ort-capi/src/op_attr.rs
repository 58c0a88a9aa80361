//! `OrtOpAttr`: an attribute of a node.

use std::ffi::{CStr, CString, c_char, c_void};

use bytes::Bytes;
use ort_runtime::Tensor;
use ort_runtime::ir::Attribute;
use ort_runtime::onnx::proto::AttributeProto;
use ort_runtime::onnx::proto::attribute_proto::AttributeType;
use ort_runtime::onnx::{ExternalData, tensor_from_proto, tensor_to_proto};

use crate::allocator::default_handle;
use crate::entry::{Array, ArrayMut, In, Object, Out, Released, Text, entries, kinds};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::Value;

/// An attribute of C: what the ONNX file has, and its name as a text of C.
#[derive(Clone)]
pub(crate) struct OpAttr {
    proto: AttributeProto,
    name: CString,
}

kinds! {
    OpAttr => "OrtOpAttr", b"OrtOpAtr";
}

impl OpAttr {
    pub(crate) fn new(proto: AttributeProto) -> OpAttr {
        let name = CString::new(proto.name().replace('\0', "\\0")).unwrap_or_default();
        OpAttr { proto, name }
    }

    /// Makes an attribute of an operator of the engine.
    pub(crate) fn of(name: &str, value: &Attribute) -> Outcome<OpAttr> {
        let mut proto = AttributeProto { name: Some(name.to_owned()), ..AttributeProto::default() };
        match value {
            Attribute::Int(number) => proto.i = Some(*number),
            Attribute::Ints(numbers) => proto.ints.clone_from(numbers),
            Attribute::Float(number) => proto.f = Some(*number),
            Attribute::Floats(numbers) => proto.floats.clone_from(numbers),
            Attribute::String(text) => proto.s = Some(text.clone().into()),
            Attribute::Bytes(text) => proto.s = Some(text.clone().into()),
            Attribute::Strings(texts) => {
                proto.strings = texts.iter().map(|text| text.clone().into()).collect();
            }
            Attribute::Tensor(tensor) => proto.t = Some(Box::new(tensor_to_proto("", tensor)?)),
            Attribute::Sparse(_) | Attribute::Type(_) | Attribute::Tensors(_) => {}
        }
        proto.r#type = Some(type_of_attribute(value) as i32);
        Ok(OpAttr::new(proto))
    }

    pub(crate) fn proto(&self) -> &AttributeProto {
        &self.proto
    }

    pub(crate) fn name(&self) -> &CStr {
        &self.name
    }

    fn tensor(&self) -> Outcome<Tensor> {
        match &self.proto.t {
            Some(tensor) => Ok(tensor_from_proto((**tensor).clone(), &mut ExternalData::unavailable())?),
            None => invalid("This OrtOpAttr instance is not a 'TENSOR' attribute"),
        }
    }
}

/// Returns the ONNX type of an attribute. C has no others, so they are undefined there.
fn type_of_attribute(value: &Attribute) -> AttributeType {
    match value {
        Attribute::Int(_) => AttributeType::Int,
        Attribute::Ints(_) => AttributeType::Ints,
        Attribute::Float(_) => AttributeType::Float,
        Attribute::Floats(_) => AttributeType::Floats,
        Attribute::String(_) | Attribute::Bytes(_) => AttributeType::String,
        Attribute::Strings(_) => AttributeType::Strings,
        Attribute::Tensor(_) => AttributeType::Tensor,
        Attribute::Sparse(_) | Attribute::Type(_) | Attribute::Tensors(_) => AttributeType::Undefined,
    }
}

/// A value of `OrtOpAttrType` that C reads and writes, and the type that ONNX has for it.
pub(crate) struct AttrType {
    number: i32,
    ty: AttributeType,
}

const fn attr_type(number: i32, ty: AttributeType) -> AttrType {
    AttrType { number, ty }
}

const TYPES: [AttrType; 9] = [
    attr_type(0, AttributeType::Undefined),
    attr_type(1, AttributeType::Int),
    attr_type(2, AttributeType::Ints),
    attr_type(3, AttributeType::Float),
    attr_type(4, AttributeType::Floats),
    attr_type(5, AttributeType::String),
    attr_type(6, AttributeType::Strings),
    attr_type(7, AttributeType::Graph),
    attr_type(8, AttributeType::Tensor),
];

/// Returns the ONNX type of a number of `OrtOpAttrType`.
fn type_of(number: i32) -> Option<AttributeType> {
    TYPES.iter().find(|known| known.number == number).map(|known| known.ty)
}

/// Reads the value of an attribute that a caller makes. A negative count stands for no elements, as
/// in ONNX Runtime.
fn value_of(ty: Option<AttributeType>, data: *const c_void, len: i32) -> Outcome<AttributeProto> {
    let count = usize::try_from(len).unwrap_or(0);
    let one = |what: &str| format!("the data of {what}");
    let mut proto = AttributeProto { r#type: ty.map(|ty| ty as i32), ..AttributeProto::default() };
    // Whatever the length says, a single number is read.
    match ty {
        Some(AttributeType::Int) => proto.i = Array::of(data.cast()).get(1, &one("an int"))?.first().copied(),
        Some(AttributeType::Float) => {
            proto.f = Array::of(data.cast()).get(1, &one("a float"))?.first().copied();
        }
        Some(AttributeType::Ints) => proto.ints = Array::of(data.cast()).get(count, &one("ints"))?.to_vec(),
        Some(AttributeType::Floats) => {
            proto.floats = Array::of(data.cast()).get(count, &one("floats"))?.to_vec();
        }
        Some(AttributeType::String) => {
            let bytes = Array::<u8>::of(data.cast());
            proto.s = Some(Bytes::copy_from_slice(bytes.get(count, &one("a string"))?));
        }
        Some(AttributeType::Strings) => {
            let texts = Array::<Text>::of(data.cast());
            let texts = texts.get(count, &one("strings"))?.iter();
            let owned = |text: &Text| Ok(Bytes::copy_from_slice(text.bytes("a string of an attribute")?));
            proto.strings = texts.map(owned).collect::<Outcome<_>>()?;
        }
        _ => return fail(code::FAIL, "Attribute type not supported yet.".to_owned()),
    }
    Ok(proto)
}

/// A value as bytes, and what says that the caller's memory does not hold them.
struct AttributeBytes {
    bytes: Vec<u8>,
    what: &'static str,
}

/// Returns the value of an attribute that is read as of a type. Lists of another type are empty, as
/// in ONNX Runtime.
fn content(proto: &AttributeProto, ty: Option<AttributeType>) -> Outcome<AttributeBytes> {
    let (bytes, what) = match ty {
        Some(AttributeType::Int) => (proto.i().to_ne_bytes().to_vec(), "an int64"),
        Some(AttributeType::Float) => (proto.f().to_ne_bytes().to_vec(), "a float"),
        Some(AttributeType::Ints) => {
            (proto.ints.iter().flat_map(|int| int.to_ne_bytes()).collect(), "the array of int64")
        }
        Some(AttributeType::Floats) => {
            (proto.floats.iter().flat_map(|float| float.to_ne_bytes()).collect(), "the array of floats")
        }
        Some(AttributeType::String) => (proto.s().to_vec(), "the string"),
        Some(AttributeType::Strings) => {
            // Each ends with a zero.
            let texts = proto.strings.iter().flat_map(|text| text.iter().copied().chain([0]));
            (texts.collect(), "the array of strings")
        }
        _ => return invalid("Unexpected attribute type. "),
    };
    Ok(AttributeBytes { bytes, what })
}

/// Refuses to read a number that the attribute does not have.
fn check_has_number(proto: &AttributeProto, ty: Option<AttributeType>) -> Outcome {
    match ty {
        Some(AttributeType::Int) if proto.i.is_none() => invalid("Attribute has no int64 value."),
        Some(AttributeType::Float) if proto.f.is_none() => invalid("Attribute has no float value."),
        _ => Ok(()),
    }
}

entries! {
    /// 211
    fn CreateOpAttr(name: Text, data: *const c_void, len: i32, number: i32, out: Out<*mut Object<OpAttr>>) {
        let out = out.place()?;
        let name = name.get("the name of the attribute")?.to_owned();
        let value = value_of(type_of(number), data, len)?;
        out.put(Object::give(OpAttr::new(AttributeProto { name: Some(name), ..value })));
        Ok(())
    }

    /// 212
    fn ReleaseOpAttr(attribute: Released<OpAttr>) -> (), else (), {
        attribute.release();
    }

    /// 272
    fn ReadOpAttr(attribute: In<OpAttr>, number: i32, data: ArrayMut<u8>, len: usize, out: Out<usize>) {
        let out = out.place()?;
        let (proto, ty) = (&attribute.get()?.proto, type_of(number));
        let AttributeBytes { bytes, what } = content(proto, ty)?;
        out.put(bytes.len());
        if len < bytes.len() {
            return invalid(format!("Size of data not large enough to hold {what}."));
        }
        check_has_number(proto, ty)?;
        data.get(bytes.len(), "the memory for the value")?.copy_from_slice(&bytes);
        Ok(())
    }

    /// 362
    fn OpAttr_GetTensorAttributeAsOrtValue(attribute: In<OpAttr>, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let tensor = attribute.get()?.tensor()?;
        out.put(Object::give(Value::copy(&tensor.into(), default_handle())?));
        Ok(())
    }

    /// 363
    fn OpAttr_GetType(attribute: In<OpAttr>, out: Out<i32>) {
        let out = out.place()?;
        let number = attribute.get()?.proto.r#type();
        let known = TYPES.iter().find(|known| known.ty as i32 == number);
        let known = known.ok_or_else(|| {
            Failure::new(code::FAIL, format!("Unexpected attribute type {number}: OrtOpAttrType has no such type"))
        })?;
        out.put(known.number);
        Ok(())
    }

    /// 364
    fn OpAttr_GetName(attribute: In<OpAttr>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(attribute.get()?.name().as_ptr());
        Ok(())
    }
}
