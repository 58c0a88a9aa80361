//! Values that are not tensors: sequences, optionals, maps and sparse tensors.

use super::Tensor;
use super::types::{TensorType, ValueType};
use crate::dtype::DType;
use crate::{Result, ensure, error};

/// Any ONNX value.
#[derive(Clone, Debug)]
pub enum Value {
    /// A dense tensor.
    Tensor(Tensor),
    /// An ordered list of values of one type.
    Sequence(SequenceValue),
    /// A value that may be absent.
    Optional(OptionalValue),
    /// A map from integers or strings to values.
    Map(MapValue),
    /// A tensor given by its nonzero elements. Boxed: it is rare, and would more than double the
    /// size of a value.
    Sparse(Box<SparseTensor>),
}

/// A sequence, with its element type even if it is empty.
#[derive(Clone, Debug)]
pub struct SequenceValue {
    /// The type of each element.
    pub element_type: ValueType,
    /// The elements.
    pub elements: Vec<Value>,
}

/// An optional, with its element type even if it is empty.
#[derive(Clone, Debug)]
pub struct OptionalValue {
    /// The type of the element.
    pub element_type: ValueType,
    /// The element, if there is one.
    pub element: Option<Box<Value>>,
}

/// The keys of a map.
#[derive(Clone, Debug, PartialEq)]
pub enum MapKeys {
    /// Integer keys of the given type, each as `i64`.
    Ints(DType, Vec<i64>),
    /// String keys.
    Strings(Vec<String>),
}

/// A map: the i-th key maps to the i-th of the values.
#[derive(Clone, Debug)]
pub struct MapValue {
    /// The keys, without duplicates.
    pub keys: MapKeys,
    /// The values: a tensor whose first dimension counts the keys, or a sequence with one element
    /// per key.
    pub values: Box<Value>,
}

/// A sparse tensor in coordinate format.
#[derive(Clone, Debug)]
pub struct SparseTensor {
    /// The nonzero elements, rank 1.
    pub values: Tensor,
    /// Their ascending positions as `i64`: `[count]` linear ones, or `[count, rank]` coordinates.
    pub indices: Tensor,
    /// The dense shape.
    pub shape: super::Shape,
}

impl SparseTensor {
    /// Converts to a dense tensor.
    pub fn to_dense(&self) -> Result<Tensor> {
        // Both counts are computed before `positions`: they refuse shapes that overflow, so its
        // arithmetic cannot.
        let count = super::element_count(&self.shape)?;
        let width = self.values.dtype().byte_size();
        let width =
            width.ok_or_else(|| error!(NotImplemented, "sparse {} tensors", self.values.dtype().name()))?;
        let source = self.values.view().bytes()?;
        let total = super::byte_count(self.values.dtype(), &self.shape)?;
        // Absent elements are zero, which is all bits clear (float8e8m0 has no zero).
        let mut dense = vec![0u8; total];
        for (index, position) in self.positions()?.into_iter().enumerate() {
            // `positions` bounds coordinates by their dimensions, but takes linear offsets as they
            // are.
            ensure!(
                position < count,
                Fail,
                help = "an index is the offset of an element in the dense tensor, or one coordinate for each axis",
                "a sparse index points outside shape {:?}",
                self.shape
            );
            // Files state values and indices separately, so their numbers may differ.
            let from = source.get(index * width..(index + 1) * width);
            let from = from.ok_or_else(|| error!(Fail, "more sparse indices than values"))?;
            let to = dense.get_mut(position * width..(position + 1) * width);
            to.into_iter().for_each(|to| to.copy_from_slice(from));
        }
        // A byte vector may be misaligned for the type, so copy it into aligned memory.
        Tensor::from_bytes(self.values.dtype(), &self.shape, dense.into())?.to_owned_copy()
    }

    fn positions(&self) -> Result<Vec<usize>> {
        let indices = self.indices.view().to_ints()?;
        let rank = self.shape.len();
        let outside = || {
            error!(Fail, "a sparse index points outside shape {:?}", self.shape).help(
                "an index is the offset of an element in the dense tensor, or one coordinate for each axis",
            )
        };
        // ONNX's `SparseTensorProto.indices` has rank 1 for linear offsets and rank 2 for
        // coordinates.
        if self.indices.shape().len() < 2 {
            return indices.into_iter().map(|i| usize::try_from(i).map_err(|_| outside())).collect();
        }
        let row = |coordinates: &[i64]| {
            coordinates.iter().zip(&self.shape).try_fold(0usize, |linear, (&i, &size)| {
                let i = usize::try_from(i).ok().filter(|&i| i < size).ok_or_else(outside)?;
                // Each coordinate is less than its size, so the offset is less than the element
                // count.
                Ok(linear * size + i)
            })
        };
        // `chunks` panics at 0, and a sparse scalar has no coordinates.
        indices.chunks(rank.max(1)).map(row).collect()
    }
}

impl Value {
    /// Returns what kind of value it is, for messages.
    pub fn kind_name(&self) -> &'static str {
        match self {
            Value::Tensor(_) => "a tensor",
            Value::Sequence(_) => "a sequence",
            Value::Optional(_) => "an optional",
            Value::Map(_) => "a map",
            Value::Sparse(_) => "a sparse tensor",
        }
    }

    /// Returns the tensor, or an error that names the actual kind.
    pub fn tensor(&self) -> Result<&Tensor> {
        match self {
            Value::Tensor(tensor) => Ok(tensor),
            other => Err(error!(InvalidArgument, "expected a tensor, got {}", other.kind_name())),
        }
    }

    /// Returns the sequence, or an error that names the actual kind.
    pub fn sequence(&self) -> Result<&SequenceValue> {
        match self {
            Value::Sequence(sequence) => Ok(sequence),
            other => Err(error!(InvalidArgument, "expected a sequence, got {}", other.kind_name())),
        }
    }

    /// Returns the same value with every tensor aligned for its type. Only misaligned tensors are
    /// copied. Sparse tensors are returned as they are.
    pub fn to_aligned(&self) -> Result<Value> {
        Ok(match self {
            Value::Tensor(tensor) if !tensor.is_aligned() => Value::Tensor(tensor.to_owned_copy()?),
            Value::Sequence(sequence) => Value::Sequence(SequenceValue {
                element_type: sequence.element_type.clone(),
                elements: sequence.elements.iter().map(Value::to_aligned).collect::<Result<_>>()?,
            }),
            Value::Optional(optional) => Value::Optional(OptionalValue {
                element_type: optional.element_type.clone(),
                element: match &optional.element {
                    Some(element) => Some(Box::new(element.to_aligned()?)),
                    None => None,
                },
            }),
            Value::Map(map) => {
                Value::Map(MapValue { keys: map.keys.clone(), values: Box::new(map.values.to_aligned()?) })
            }
            // An aligned tensor is shared, not copied: a clone only counts one more owner of its
            // memory.
            other => other.clone(),
        })
    }

    /// Returns the type, with concrete shapes.
    pub fn value_type(&self) -> ValueType {
        let tensor = |dtype: DType, shape: &[usize]| {
            let shape = shape.iter().map(|&size| crate::dim::Dim::constant(size as i64)).collect();
            TensorType { dtype, shape: Some(shape) }
        };
        match self {
            Value::Tensor(value) => ValueType::Tensor(tensor(value.dtype(), value.shape())),
            Value::Sequence(value) => ValueType::Sequence(Box::new(value.element_type.clone())),
            Value::Optional(value) => ValueType::Optional(Box::new(value.element_type.clone())),
            Value::Map(value) => {
                let key = match &value.keys {
                    MapKeys::Ints(dtype, _) => *dtype,
                    MapKeys::Strings(_) => DType::String,
                };
                ValueType::Map(key, Box::new(value.values.value_type()))
            }
            Value::Sparse(value) => ValueType::Sparse(tensor(value.values.dtype(), &value.shape)),
        }
    }

    /// Returns the size in bytes of all tensors inside.
    pub fn byte_count(&self) -> usize {
        match self {
            Value::Tensor(tensor) => tensor.byte_count(),
            Value::Sequence(sequence) => sequence.elements.iter().map(Value::byte_count).sum(),
            Value::Optional(optional) => optional.element.as_ref().map_or(0, |element| element.byte_count()),
            Value::Map(map) => map.values.byte_count(),
            Value::Sparse(sparse) => sparse.values.byte_count() + sparse.indices.byte_count(),
        }
    }
}

impl From<Tensor> for Value {
    fn from(tensor: Tensor) -> Value {
        Value::Tensor(tensor)
    }
}
