//! Value types with symbolic shapes.

use std::fmt;

use crate::dim::Dim;
use crate::dtype::DType;

/// A shape whose sizes may be symbolic expressions.
pub type SymShape = Vec<Dim>;

/// The type of a tensor. Without a shape even the rank is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorType {
    /// The element type.
    pub dtype: DType,
    /// The sizes, if the rank is known.
    pub shape: Option<SymShape>,
}

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum ValueType {
    /// Not known yet.
    #[default]
    Unknown,
    /// A dense tensor.
    Tensor(TensorType),
    /// A list of values of one type.
    Sequence(Box<ValueType>),
    /// A value that may be absent.
    Optional(Box<ValueType>),
    /// A map from keys of one type to values of one type.
    Map(DType, Box<ValueType>),
    /// A sparse tensor.
    Sparse(TensorType),
}

impl ValueType {
    /// Creates a tensor type.
    pub fn tensor(dtype: DType, shape: Option<SymShape>) -> ValueType {
        ValueType::Tensor(TensorType { dtype, shape })
    }

    /// Returns the tensor type, if this is one.
    pub fn as_tensor(&self) -> Option<&TensorType> {
        match self {
            ValueType::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    /// Returns the element type of a tensor.
    pub fn dtype(&self) -> Option<DType> {
        self.as_tensor().map(|tensor| tensor.dtype)
    }

    /// Returns the type without shapes in ONNX notation, such as `seq(tensor(float))`.
    pub fn onnx_name(&self) -> String {
        match self {
            ValueType::Tensor(tensor) => format!("tensor({})", tensor.dtype.name()),
            ValueType::Sequence(element) => format!("seq({})", element.onnx_name()),
            ValueType::Optional(element) => format!("optional({})", element.onnx_name()),
            ValueType::Map(key, value) => format!("map({},{})", key.name(), value.onnx_name()),
            ValueType::Sparse(tensor) => format!("sparse_tensor({})", tensor.dtype.name()),
            ValueType::Unknown => "unknown".to_owned(),
        }
    }

    /// Returns the shape of a tensor of known rank.
    pub fn shape(&self) -> Option<&[Dim]> {
        self.as_tensor().and_then(|tensor| tensor.shape.as_deref())
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.dtype.name())?;
        match &self.shape {
            None => write!(f, "[..]"),
            Some(shape) => {
                let sizes: Vec<String> = shape.iter().map(Dim::to_string).collect();
                write!(f, "[{}]", sizes.join(", "))
            }
        }
    }
}

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Unknown => write!(f, "?"),
            ValueType::Tensor(tensor) => write!(f, "{tensor}"),
            ValueType::Sequence(element) => write!(f, "seq({element})"),
            ValueType::Optional(element) => write!(f, "optional({element})"),
            ValueType::Map(key, value) => write!(f, "map({}, {value})", key.name()),
            ValueType::Sparse(tensor) => write!(f, "sparse({tensor})"),
        }
    }
}
