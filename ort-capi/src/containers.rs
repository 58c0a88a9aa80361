//! Sequences and maps.

use ort_runtime::ir::ValueType;
use ort_runtime::tensor::{MapKeys, MapValue, SequenceValue};
use ort_runtime::{DType, Tensor, Value as EngineValue};

use crate::allocator::Allocator;
use crate::entry::{Array, In, Object, Out, entries};
use crate::status::{Failure, Outcome, code, fail, invalid};
use crate::type_info::onnx_type;
use crate::value::Value;

const KEY_TYPES: [DType; 2] = [DType::I64, DType::String];
const VALUE_TYPES: [DType; 4] = [DType::I64, DType::F32, DType::F64, DType::String];

fn engine(value: &In<Value>) -> Outcome<EngineValue> {
    value.get()?.engine()
}

fn sequence_of(elements: Vec<EngineValue>) -> Outcome<EngineValue> {
    let Some(first) = elements.first() else {
        return fail(code::FAIL, "Number of values should be at least 1.".to_owned());
    };
    let element_type = match first {
        EngineValue::Tensor(tensor) => ValueType::tensor(tensor.dtype(), None),
        EngineValue::Map(_) => first.value_type(),
        _ => {
            return fail(
                code::FAIL,
                "Each element of the sequence should be either tensor or map.".to_owned(),
            );
        }
    };
    let is_other_kind = |element: &&EngineValue| element.kind_name() != first.kind_name();
    if elements.iter().any(|element| is_other_kind(&element)) {
        let text = "At least one element in the sequence is of a type different from others.";
        return fail(code::FAIL, text.to_owned());
    }
    let is_other_type = |element: &EngineValue| match (element, first) {
        (EngineValue::Tensor(one), EngineValue::Tensor(other)) => one.dtype() != other.dtype(),
        (one, other) => one.value_type().onnx_name() != other.value_type().onnx_name(),
    };
    if elements.iter().any(is_other_type) {
        let text = "Sequences must have tensors of the same data type. There was at least one tensor in the input \
                    that was different.";
        return fail(code::FAIL, text.to_owned());
    }
    Ok(EngineValue::Sequence(SequenceValue { element_type, elements }))
}

fn map_of(elements: Vec<EngineValue>) -> Outcome<EngineValue> {
    let Ok([keys, values]) = <[EngineValue; 2]>::try_from(elements) else {
        return fail(code::FAIL, "For map type num_values MUST be 2".to_owned());
    };
    let (keys, values) = (keys.tensor()?, values.tensor()?);
    if keys.shape().len() > 1 || values.shape().len() > 1 {
        return fail(
            code::FAIL,
            "Either the key tensor or the value tensor has NumDimensions > 1".to_owned(),
        );
    }
    if keys.element_count() != values.element_count() {
        return fail(code::FAIL, "Key and value tensors have unequal number of elements.".to_owned());
    }
    if !KEY_TYPES.contains(&keys.dtype()) {
        return fail(
            code::FAIL,
            format!("Key type is not supported yet: {}; it is int64 or string", keys.dtype().name()),
        );
    }
    if !VALUE_TYPES.contains(&values.dtype()) {
        let text = "it is int64, float, double or string";
        return fail(
            code::FAIL,
            format!("Value type is not supported yet: {}; {text}", values.dtype().name()),
        );
    }
    let count = keys.element_count();
    let map_keys = match keys.dtype() {
        DType::String => MapKeys::Strings(keys.strings()?.iter().map(ToString::to_string).collect()),
        dtype => MapKeys::Ints(dtype, keys.to_vec()?),
    };
    // The map has memory of its own, as in ONNX Runtime: the tensors may change.
    let values = values.to_owned_copy()?.reshape(&[count])?;
    Ok(EngineValue::Map(MapValue { keys: map_keys, values: Box::new(values.into()) }))
}

/// The places of a map's keys in ascending order.
fn order_of(keys: &MapKeys) -> Vec<usize> {
    fn sorted<T: Ord>(keys: &[T]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|one, other| keys.get(*one).cmp(&keys.get(*other)));
        order
    }
    match keys {
        MapKeys::Ints(_, keys) => sorted(keys),
        MapKeys::Strings(keys) => sorted(keys),
    }
}

/// The keys of a map as a tensor, in this order.
fn keys_of(keys: &MapKeys, order: &[usize]) -> Outcome<Tensor> {
    Ok(match keys {
        MapKeys::Ints(_, keys) => {
            let keys: Vec<i64> = order.iter().filter_map(|place| keys.get(*place).copied()).collect();
            Tensor::from_vec(&[keys.len()], keys)?
        }
        MapKeys::Strings(keys) => {
            let keys: Vec<&str> =
                order.iter().filter_map(|place| keys.get(*place).map(String::as_str)).collect();
            Tensor::from_strings(&[keys.len()], keys)?
        }
    })
}

/// The values of a map as a tensor, in this order.
fn values_of(values: &EngineValue, order: &[usize]) -> Outcome<Tensor> {
    let tensor = values.tensor()?;
    if tensor.dtype() == DType::String {
        let texts = tensor.strings()?;
        let texts: Vec<_> = order.iter().filter_map(|place| texts.get(*place).cloned()).collect();
        return Ok(Tensor::from_strings(&[texts.len()], texts)?);
    }
    let (Some(width), Some(bytes)) = (tensor.dtype().byte_size(), tensor.bytes()) else {
        return invalid(format!("a map of {} has no values to read", tensor.dtype().name()));
    };
    let element = |place: &usize| bytes.get(place * width..(place + 1) * width);
    let gathered: Vec<u8> = order.iter().filter_map(element).flatten().copied().collect();
    Ok(Tensor::from_bytes(tensor.dtype(), &[order.len()], gathered.into())?)
}

fn element_of(value: &EngineValue, index: usize) -> Outcome<EngineValue> {
    let out_of_range =
        |count: usize| Failure::invalid(format!("index {index} is out of range: there are {count}"));
    match value {
        EngineValue::Sequence(sequence) => {
            let element = sequence.elements.get(index).cloned();
            element.ok_or_else(|| out_of_range(sequence.elements.len()))
        }
        EngineValue::Map(map) => {
            let order = order_of(&map.keys);
            match index {
                0 => Ok(keys_of(&map.keys, &order)?.into()),
                1 => Ok(values_of(&map.values, &order)?.into()),
                _ => Err(out_of_range(2)),
            }
        }
        other => {
            fail(code::FAIL, format!("Input is not of type sequence or map: it is {}", other.kind_name()))
        }
    }
}

entries! {
    /// 80
    fn GetValue(value: In<Value>, index: i32, allocator: Allocator, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let index = usize::try_from(index).map_err(|_| Failure::invalid(format!("the index is {index}")))?;
        let element = match value.get()? {
            Value::Engine(value) => element_of(value, index)?,
            _ => return fail(code::FAIL, "Input is not of type sequence or map: it is a tensor".to_owned()),
        };
        out.put(Object::give(Value::copy(&element, allocator)?));
        Ok(())
    }

    /// 81
    fn GetValueCount(value: In<Value>, out: Out<usize>) {
        let out = out.place()?;
        out.put(match value.get()? {
            Value::Engine(EngineValue::Sequence(sequence)) => sequence.elements.len(),
            Value::Engine(EngineValue::Map(_)) => 2,
            _ => return fail(code::FAIL, "Input is not of type sequence or map.".to_owned()),
        });
        Ok(())
    }

    /// 82
    fn CreateValue(values: Array<In<Value>>, count: usize, kind: i32, out: Out<*mut Object<Value>>) {
        let out = out.place()?;
        let elements = values.get(count, "the array of values")?;
        let elements: Vec<EngineValue> = elements.iter().map(engine).collect::<Outcome<_>>()?;
        let value = match kind {
            onnx_type::SEQUENCE => sequence_of(elements)?,
            onnx_type::MAP => map_of(elements)?,
            _ => return fail(code::FAIL, format!("Input is not of type sequence or map: {kind}")),
        };
        out.put(Object::give(Value::Engine(value)));
        Ok(())
    }
}
