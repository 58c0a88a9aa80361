//! `OrtOpAttr`: an attribute with its name.

use std::ffi::{CString, c_char, c_int, c_void};

use ort_runtime::Value as EngineValue;
use ort_runtime::ir::Attribute;

use crate::allocator::{Allocator, default_allocator};
use crate::entry::{Array, ArrayMut, In, Object, Out, Released, Text, entries, kinds};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::value::Value;

/// The numbers of `OrtOpAttrType`.
mod kind {
    pub(super) const UNDEFINED: i32 = 0;
    pub(super) const INT: i32 = 1;
    pub(super) const INTS: i32 = 2;
    pub(super) const FLOAT: i32 = 3;
    pub(super) const FLOATS: i32 = 4;
    pub(super) const STRING: i32 = 5;
    pub(super) const STRINGS: i32 = 6;
    pub(super) const TENSOR: i32 = 8;
}

/// An attribute of C.
#[derive(Clone)]
pub(crate) struct OpAttr {
    name: CString,
    pub(crate) value: Attribute,
}

kinds! {
    OpAttr => "OrtOpAttr", b"OrtOpAtt";
}

impl OpAttr {
    pub(crate) fn new(name: &str, value: Attribute) -> OpAttr {
        OpAttr { name: CString::new(name).unwrap_or_default(), value }
    }

    pub(crate) fn name(&self) -> &str {
        self.name.to_str().unwrap_or_default()
    }

    fn kind(&self) -> i32 {
        match &self.value {
            Attribute::Int(_) => kind::INT,
            Attribute::Ints(_) => kind::INTS,
            Attribute::Float(_) => kind::FLOAT,
            Attribute::Floats(_) => kind::FLOATS,
            Attribute::String(_) | Attribute::Bytes(_) => kind::STRING,
            Attribute::Strings(_) => kind::STRINGS,
            Attribute::Tensor(_) => kind::TENSOR,
            Attribute::Sparse(_) | Attribute::Type(_) | Attribute::Tensors(_) => kind::UNDEFINED,
        }
    }

    /// The bytes as C reads them. Texts end with a zero.
    fn bytes(&self) -> Outcome<Vec<u8>> {
        let with_zero = |text: &[u8]| [text, &[0]].concat();
        Ok(match &self.value {
            Attribute::Int(number) => number.to_ne_bytes().to_vec(),
            Attribute::Ints(numbers) => numbers.iter().flat_map(|number| number.to_ne_bytes()).collect(),
            Attribute::Float(number) => number.to_ne_bytes().to_vec(),
            Attribute::Floats(numbers) => numbers.iter().flat_map(|number| number.to_ne_bytes()).collect(),
            Attribute::String(text) => with_zero(text.as_bytes()),
            Attribute::Bytes(text) => with_zero(text),
            Attribute::Strings(texts) => texts.iter().flat_map(|text| with_zero(text.as_bytes())).collect(),
            other => {
                let kind = other.kind().onnx_name();
                return invalid(format!("Unexpected attribute type. {kind} has no bytes to read"));
            }
        })
    }
}

/// What does not fit in the caller's memory.
fn too_small(kind: i32) -> Failure {
    let what = match kind {
        kind::INT => "an int64",
        kind::INTS => "the array of int64",
        kind::FLOAT => "a float",
        kind::FLOATS => "the array of floats",
        kind::STRING => "the string",
        _ => "the array of strings",
    };
    Failure::invalid(format!("Size of data not large enough to hold {what}."))
}

/// Reads the value of an attribute from the caller's memory, which has `count` elements.
fn read(data: *const c_void, count: usize, number: i32) -> Outcome<Attribute> {
    Ok(match number {
        kind::INT => Attribute::Int(first(data.cast())?),
        kind::INTS => Attribute::Ints(Array::of(data.cast()).get(count, "the array of numbers")?.to_vec()),
        kind::FLOAT => Attribute::Float(first(data.cast())?),
        kind::FLOATS => {
            Attribute::Floats(Array::of(data.cast()).get(count, "the array of numbers")?.to_vec())
        }
        kind::STRING => text(Text::of(data.cast()))?,
        kind::STRINGS => {
            let texts = Array::of(data.cast::<Text>());
            let text = |text: &Text| Ok(text.get("a string")?.to_owned());
            let texts = texts.get(count, "the array of strings")?;
            Attribute::Strings(texts.iter().map(text).collect::<Outcome<_>>()?)
        }
        _ => return fail(code::FAIL, "Attribute type not supported yet.".to_owned()),
    })
}

fn first<T: Copy>(data: *const T) -> Outcome<T> {
    let array = Array::of(data);
    let first = array.get(1, "the data")?.first().copied();
    first.ok_or_else(|| Failure::invalid("the data is null"))
}

fn text(text: Text) -> Outcome<Attribute> {
    let bytes = text.bytes("the string")?;
    Ok(match std::str::from_utf8(bytes) {
        Ok(text) => Attribute::String(text.to_owned()),
        Err(_) => Attribute::Bytes(bytes.to_vec()),
    })
}

entries! {
    /// 211
    fn CreateOpAttr(name: Text, data: *const c_void, count: c_int, number: i32, out: Out<*mut Object<OpAttr>>) {
        let out = out.place()?;
        let name = name.get("the name of the attribute")?;
        let value = read(data, usize::try_from(count).unwrap_or(0), number)?;
        out.put(Object::give(OpAttr::new(name, value)));
        Ok(())
    }

    /// 212
    fn ReleaseOpAttr(attribute: Released<OpAttr>) -> (), else (), {
        attribute.release();
    }

    /// 272
    fn ReadOpAttr(attribute: In<OpAttr>, number: i32, data: ArrayMut<u8>, len: usize, out: Out<usize>) {
        let out = out.place()?;
        let attribute = attribute.get()?;
        if attribute.kind() != number {
            return invalid(format!(
                "Unexpected attribute type. '{}' is {}, asked for type {number}",
                attribute.name(),
                attribute.value.kind().onnx_name()
            ));
        }
        let bytes = attribute.bytes()?;
        out.put(bytes.len());
        if len < bytes.len() {
            return Err(too_small(number));
        }
        data.get(bytes.len(), "the data")?.copy_from_slice(&bytes);
        Ok(())
    }

    /// 362
    fn OpAttr_GetTensorAttributeAsOrtValue(attribute: In<OpAttr>, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let Attribute::Tensor(tensor) = &attribute.get()?.value else {
            return invalid("the attribute is not a tensor");
        };
        let value = EngineValue::Tensor(tensor.clone());
        out.put(Object::give(Value::copy(&value, Allocator::of(default_allocator()))?));
        Ok(())
    }

    /// 363
    fn OpAttr_GetType(attribute: In<OpAttr>, out: Out<i32>) {
        let out = out.place()?;
        out.put(attribute.get()?.kind());
        Ok(())
    }

    /// 364
    fn OpAttr_GetName(attribute: In<OpAttr>, out: Out<*const c_char>) {
        let out = out.place()?;
        out.put(attribute.get()?.name.as_ptr());
        Ok(())
    }
}
