//! Custom operators: schema, inference and kernels that the caller gives when a model is loaded.
//!
//! A custom operator is a [`CustomOperator`]. Several of one name are overloads: they share an
//! operator record ([`crate::spec::OpSpec`]), and each node takes the first one whose types fit.
//! From then on the pipeline treats the node like any other: inference, placement, plan and run.
//! Nothing is registered globally, so two models may give one name different meanings.
//!
//! ```
//! use ort_core::custom::{CustomOperator, CustomParam, CustomSchema};
//! use ort_core::dtype::{DType, TypeSet};
//! use ort_core::ep::{Executable, NodeView, RunCx, Unary};
//! use ort_core::spec::InferCx;
//! use ort_core::{Result, error};
//!
//! /// Multiplies by the attribute `factor`.
//! struct Scale(CustomSchema);
//!
//! impl Scale {
//!     fn new() -> Scale {
//!         let floats = TypeSet::of(&[DType::F32]);
//!         Scale(CustomSchema {
//!             inputs: vec![CustomParam::one("X", "T", floats)],
//!             outputs: vec![CustomParam::one("Y", "T", floats)],
//!             in_place: vec![(0, 0)],
//!             has_exact_shapes: true,
//!             is_pure: true,
//!             ..CustomSchema::new("my.domain", "Scale")
//!         })
//!     }
//! }
//!
//! impl CustomOperator for Scale {
//!     fn schema(&self) -> &CustomSchema {
//!         &self.0
//!     }
//!
//!     fn infer(&self, cx: &mut InferCx<'_>) -> Result<()> {
//!         match cx.shape(0) {
//!             Some(shape) => cx.set_shape(0, shape.to_vec()),
//!             None => Ok(()),
//!         }
//!     }
//!
//!     fn kernel(&self, node: &NodeView<'_>) -> Result<Box<dyn Executable>> {
//!         let factor = node.attrs().float("factor")?;
//!         Ok(Box::new(move |cx: &mut RunCx<'_>| {
//!             match cx.unary::<f32>(0, 0)? {
//!                 Unary::InPlace(values) => values.iter_mut().for_each(|value| *value *= factor),
//!                 Unary::Apart(from, to) => {
//!                     to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
//!                 }
//!             }
//!             Ok(())
//!         }))
//!     }
//! }
//! ```

mod node;
mod operators;
mod record;

pub use operators::CustomOperators;

use std::ops::RangeInclusive;

use crate::Result;
use crate::dtype::TypeSet;
use crate::ep::{Executable, NodeView};
use crate::spec::{Arity, InferCx};

/// An operator of the caller.
pub trait CustomOperator: Send + Sync {
    /// Its names, types and properties. They do not change.
    fn schema(&self) -> &CustomSchema;

    /// Infers the types and shapes of the outputs that follow from the inputs. It runs when the
    /// model is loaded, with symbolic sizes, and for values of unknown size also in runs. An output
    /// that it leaves open has a type by its type variable, and an unknown shape: its size is then
    /// known only when the kernel has run.
    fn infer(&self, _cx: &mut InferCx<'_>) -> Result<()> {
        Ok(())
    }

    /// Makes the kernel of a node. A session may make one more than once, and drops those that it
    /// does not use. Several threads may run one kernel at once.
    ///
    /// With [`CustomSchema::has_exact_shapes`] the run allocates the outputs whose shapes are known
    /// ([`RunCx::output`](crate::ep::RunCx::output)). The kernel hands over the others
    /// ([`RunCx::set`](crate::ep::RunCx::set)).
    fn kernel(&self, node: &NodeView<'_>) -> Result<Box<dyn Executable>>;
}

/// The names, types and properties of a [`CustomOperator`].
#[derive(Clone, Debug)]
pub struct CustomSchema {
    /// The domain of the operator set.
    pub domain: String,
    /// The operator's name.
    pub name: String,
    /// The versions of the domain that have it in this form.
    pub versions: RangeInclusive<i64>,
    /// Inputs, in order.
    pub inputs: Vec<CustomParam>,
    /// Outputs, in order.
    pub outputs: Vec<CustomParam>,
    /// The provider that runs it, by its short name. Its device must work on host memory.
    pub provider: String,
    /// Pairs (input, output) that may share memory if they have the same length.
    pub in_place: Vec<(usize, usize)>,
    /// Whether the shapes that `infer` sets are those of the outputs. The plan then allocates the
    /// outputs. Otherwise the kernel does, and the plan counts them as data-dependent.
    pub has_exact_shapes: bool,
    /// Whether equal inputs always give equal outputs, without any other effect. Such nodes may be
    /// folded, merged and left out. Others run once per run, even if nothing reads their outputs.
    pub is_pure: bool,
}

impl CustomSchema {
    /// Returns the schema of an impure operator of the CPU without inputs and outputs, in all
    /// versions of its domain.
    pub fn new(domain: impl Into<String>, name: impl Into<String>) -> CustomSchema {
        CustomSchema {
            domain: domain.into(),
            name: name.into(),
            versions: 1..=i64::MAX,
            inputs: Vec::new(),
            outputs: Vec::new(),
            provider: "cpu".to_owned(),
            in_place: Vec::new(),
            has_exact_shapes: false,
            is_pure: false,
        }
    }

    fn full_name(&self) -> String {
        match self.domain.as_str() {
            "" => self.name.clone(),
            domain => format!("{domain}.{}", self.name),
        }
    }
}

/// An input or output of a [`CustomOperator`]: tensors of some element types.
#[derive(Clone, Debug)]
pub struct CustomParam {
    /// The name in error messages.
    pub name: String,
    /// The type variable. Parameters with the same variable have the same element type, except the
    /// values of a heterogeneous one.
    pub variable: String,
    /// The element types that it takes.
    pub types: TypeSet,
    /// The number of values it takes.
    pub arity: Arity,
}

impl CustomParam {
    /// Returns a required parameter.
    pub fn one(name: impl Into<String>, variable: impl Into<String>, types: TypeSet) -> CustomParam {
        CustomParam { name: name.into(), variable: variable.into(), types, arity: Arity::Single }
    }

    /// Changes the number of values it takes.
    #[must_use]
    pub fn taking(self, arity: Arity) -> CustomParam {
        CustomParam { arity, ..self }
    }
}
