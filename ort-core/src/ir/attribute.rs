//! Typed node attributes, checked against the operator's record when the node is built.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::spec::{AttrDefault, AttrKind, OpSpec};
use crate::tensor::{SparseTensor, Tensor};
use crate::{Result, advise, ensure, error};

use super::ValueType;

/// The value of one attribute. Graph attributes are stored separately, as [`super::Subgraph`].
#[derive(Clone, Debug)]
pub enum Attribute {
    /// `INT`
    Int(i64),
    /// `FLOAT`
    Float(f32),
    /// `STRING`
    String(String),
    /// `STRING` that is not UTF-8. Only custom operators have such attributes.
    Bytes(Vec<u8>),
    /// `TENSOR`
    Tensor(Tensor),
    /// `SPARSE_TENSOR`
    Sparse(SparseTensor),
    /// `TYPE_PROTO`
    Type(ValueType),
    /// `INTS`
    Ints(Vec<i64>),
    /// `FLOATS`
    Floats(Vec<f32>),
    /// `STRINGS`
    Strings(Vec<String>),
    /// `TENSORS`
    Tensors(Vec<Tensor>),
}

impl Attribute {
    /// Returns the kind, as operator records declare it.
    pub fn kind(&self) -> AttrKind {
        match self {
            Attribute::Int(_) => AttrKind::Int,
            Attribute::Float(_) => AttrKind::Float,
            Attribute::String(_) | Attribute::Bytes(_) => AttrKind::String,
            Attribute::Tensor(_) => AttrKind::Tensor,
            Attribute::Sparse(_) => AttrKind::Sparse,
            Attribute::Type(_) => AttrKind::Type,
            Attribute::Ints(_) => AttrKind::Ints,
            Attribute::Floats(_) => AttrKind::Floats,
            Attribute::Strings(_) => AttrKind::Strings,
            Attribute::Tensors(_) => AttrKind::Tensors,
        }
    }
}

/// Attributes that no record declares.
struct FreeAttributes {
    given: Vec<(String, Attribute)>,
    /// What the node brings along. Its type is known above this layer.
    owner: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for FreeAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.given).finish()
    }
}

/// The attributes of a node, with defaults filled in.
#[derive(Clone, Debug, Default)]
pub struct Attributes {
    known: Vec<(&'static str, Attribute)>,
    /// The attributes of a node that brings its kernels along.
    free: Option<Arc<FreeAttributes>>,
}

/// Defines the accessors for one kind of attribute: one that fails if it is absent, and an optional
/// one.
macro_rules! accessors {
    ($(#[$doc:meta])* $get:ident, $find:ident, $variant:ident, $type:ty, $convert:expr) => {
        $(#[$doc])*
        pub fn $get(&self, name: &str) -> Result<$type> {
            self.$find(name).ok_or_else(|| missing(name))
        }
        /// Returns the same, or `None` if the attribute is absent and has no default.
        pub fn $find(&self, name: &str) -> Option<$type> {
            match self.get(name)? {
                Attribute::$variant(value) => Some($convert(value)),
                _ => None,
            }
        }
    };
}

fn missing(name: &str) -> crate::Error {
    error!(InvalidGraph, "Required attribute '{name}' is missing")
        .help("the operator needs it: add it to the node")
}

/// Returns the error for an attribute that the operator does not have.
pub(crate) fn unknown_attribute(spec: &OpSpec, name: &str) -> crate::Error {
    let names = spec.attrs.iter().map(|attr| attr.name);
    let advice = advise("attributes", name, names);
    match name {
        "" => error!(InvalidGraph, "Field 'name' of 'attr' is required to be non-empty").help(advice),
        _ => error!(InvalidGraph, "Unrecognized attribute: {name} for operator {}", spec.name).help(advice),
    }
}

/// Returns the error for an attribute of another kind than the operator's.
pub(crate) fn mismatched_attribute(name: &str, expected: AttrKind, actual: &str) -> crate::Error {
    let expected = expected.onnx_name();
    error!(InvalidGraph, "Mismatched attribute type in '{name}'. Expected: '{expected}', actual: '{actual}'")
        .help("set the attribute's type and its field to what the operator expects")
}

impl Attributes {
    /// Checks `given` against the record and fills in defaults, except for internal attributes.
    /// Unknown names, wrong kinds, duplicates and missing required attributes are errors.
    pub fn new(spec: &OpSpec, given: Vec<(String, Attribute)>) -> Result<Attributes> {
        Attributes::checked(spec, given)
    }

    /// The same as [`Attributes::new`] for names of any string type, so that the loader can borrow
    /// them.
    pub(crate) fn checked<N: AsRef<str>>(spec: &OpSpec, given: Vec<(N, Attribute)>) -> Result<Attributes> {
        let mut attributes = Vec::with_capacity(spec.attrs.len());
        for (name, value) in given {
            let name = name.as_ref();
            let known = spec.attrs.iter().chain(spec.internal_attrs).find(|attr| attr.name == name);
            let known = known.ok_or_else(|| unknown_attribute(spec, name))?;
            if known.kind != value.kind() {
                return Err(mismatched_attribute(name, known.kind, value.kind().onnx_name()));
            }
            // Duplicates fail here, so the list never outgrows the record and a linear search is
            // enough.
            ensure!(
                !attributes.iter().any(|(other, _)| *other == known.name),
                InvalidGraph,
                help = "give each attribute once",
                "Attribute '{name}' appeared multiple times"
            );
            attributes.push((known.name, value));
        }
        for attr in spec.attrs {
            // Subgraphs are stored outside the attributes, and the loader checks them.
            if attributes.iter().any(|(name, _)| *name == attr.name) || attr.kind == AttrKind::Graph {
                continue;
            }
            match attr.default {
                AttrDefault::Required => return Err(missing(attr.name)),
                AttrDefault::None => {}
                AttrDefault::Int(value) => attributes.push((attr.name, Attribute::Int(value))),
                AttrDefault::Float(value) => attributes.push((attr.name, Attribute::Float(value))),
                AttrDefault::String(value) => attributes.push((attr.name, Attribute::String(value.into()))),
                AttrDefault::Ints(value) => attributes.push((attr.name, Attribute::Ints(value.into()))),
                AttrDefault::Floats(value) => attributes.push((attr.name, Attribute::Floats(value.into()))),
                AttrDefault::Strings(value) => {
                    let strings = value.iter().map(|&text| text.into()).collect();
                    attributes.push((attr.name, Attribute::Strings(strings)));
                }
            }
        }
        Ok(Attributes { known: attributes, free: None })
    }

    /// The attributes of a node that brings its kernels along, in their owner.
    pub(crate) fn owned(given: Vec<(String, Attribute)>, owner: impl Any + Send + Sync) -> Attributes {
        let free = FreeAttributes { given, owner: Box::new(owner) };
        Attributes { known: Vec::new(), free: Some(Arc::new(free)) }
    }

    /// The owner of the attributes, if the node brings its kernels along.
    pub(crate) fn owner(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.free.as_deref().map(|free| &*free.owner)
    }

    /// Returns the attribute of this name, given or by default.
    pub fn get(&self, name: &str) -> Option<&Attribute> {
        match &self.free {
            None => self.known.iter().find(|(known, _)| *known == name).map(|(_, value)| value),
            Some(free) => free.given.iter().find(|(known, _)| known == name).map(|(_, value)| value),
        }
    }

    /// Returns the attributes that the record declares, with their names.
    pub(crate) fn declared(&self) -> impl Iterator<Item = (&'static str, &Attribute)> {
        self.known.iter().map(|(name, value)| (*name, value))
    }

    /// Returns all attributes with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Attribute)> {
        let given = self.free.iter().flat_map(|free| &free.given);
        let given = given.map(|(name, value)| (name.as_str(), value));
        let known = self.known.iter().map(|(name, value)| -> (&str, &Attribute) { (name, value) });
        known.chain(given)
    }

    accessors!(/// Returns an integer; an error if the attribute is absent.
        int, find_int, Int, i64, |value: &i64| *value);
    accessors!(/// Returns a float; an error if the attribute is absent.
        float, find_float, Float, f32, |value: &f32| *value);
    accessors!(/// Returns a string; an error if the attribute is absent.
        string, find_string, String, &str, String::as_str);
    accessors!(/// Returns a tensor; an error if the attribute is absent.
        tensor, find_tensor, Tensor, &Tensor, std::convert::identity);
    accessors!(/// Returns a list of integers; an error if the attribute is absent.
        ints, find_ints, Ints, &[i64], Vec::as_slice);
    accessors!(/// Returns a list of floats; an error if the attribute is absent.
        floats, find_floats, Floats, &[f32], Vec::as_slice);
    accessors!(/// Returns a list of strings; an error if the attribute is absent.
        strings, find_strings, Strings, &[String], Vec::as_slice);
    accessors!(/// Returns a type; an error if the attribute is absent.
        value_type, find_type, Type, &ValueType, std::convert::identity);

    /// Returns a float attribute as the number it was written as: the shortest decimal that rounds
    /// to this float, as a double. Computation in doubles needs it: for the float nearest to 0.999,
    /// `1 - beta` has a relative error of 1e-5.
    ///
    /// # Errors
    ///
    /// There is no float attribute of this name.
    ///
    /// ```
    /// use ort_core::ir::{Attribute, Attributes};
    /// use ort_core::spec::Registry;
    /// let adam = Registry::global()?.find("ort-runtime", "AdamW").ok_or_else(|| ort_core::error!(Fail, "no AdamW"))?;
    /// let attributes = Attributes::new(adam, vec![("beta2".to_string(), Attribute::Float(0.999))])?;
    /// assert_eq!(attributes.decimal("beta2")?, 0.999);
    /// # Ok::<(), ort_core::Error>(())
    /// ```
    pub fn decimal(&self, name: &str) -> Result<f64> {
        let float = self.float(name)?;
        // `to_string` prints the shortest decimal that parses back to this float.
        Ok(float.to_string().parse().unwrap_or_else(|_| f64::from(float)))
    }

    /// Returns whether an integer attribute, used as a boolean, is not zero.
    pub fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.int(name)? != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{OP, attr};

    static SAMPLE: OpSpec = OpSpec {
        name: "Sample",
        attrs: &[
            attr::int("axis", -1),
            attr::required("to", AttrKind::Int),
            attr::optional("alpha", AttrKind::Float),
        ],
        internal_attrs: &[attr::int("mark", 0)],
        ..OP
    };

    #[test]
    fn defaults_and_checks() -> Result<()> {
        let given = |list: &[(&str, Attribute)]| {
            let list = list.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
            Attributes::new(&SAMPLE, list)
        };
        let attributes = given(&[("to", Attribute::Int(1))])?;
        assert_eq!(attributes.int("axis")?, -1);
        assert_eq!(attributes.find_float("alpha"), None);
        assert_eq!(attributes.find_int("mark"), None, "an internal attribute has no default");
        let marked = given(&[("to", Attribute::Int(1)), ("mark", Attribute::Int(1))])?;
        assert_eq!(marked.find_int("mark"), Some(1));
        assert!(given(&[]).is_err(), "a required attribute is missing");
        assert!(given(&[("to", Attribute::Float(1.0))]).is_err(), "the kind is wrong");
        assert!(given(&[("to", Attribute::Int(1)), ("other", Attribute::Int(1))]).is_err(), "unknown name");
        Ok(())
    }
}
