//! The custom operators of a model, by name.

use std::fmt;
use std::sync::Arc;

use indexmap::IndexMap;

use super::node::CustomNode;
use super::record::record;
use super::{CustomOperator, CustomParam, CustomSchema};
use crate::cache::Content;
use crate::ep::KernelOwner;
use crate::spec::{Arity, OpSpec, canonical_domain};
use crate::{Result, ensure, error};

/// Custom operators for [`LoadOptions`](crate::onnx::LoadOptions). Clones share them.
#[derive(Clone, Default)]
pub struct CustomOperators {
    by_name: Arc<IndexMap<(String, String), Vec<Arc<dyn CustomOperator>>>>,
}

impl fmt::Debug for CustomOperators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.schemas()).finish()
    }
}

/// The custom operators that a node may stand for.
pub(crate) struct Found {
    pub(crate) spec: &'static OpSpec,
    /// What the node brings along.
    pub(crate) owner: KernelOwner,
}

impl CustomOperators {
    /// Collects operators. Those of one name are overloads for other types.
    ///
    /// # Errors
    ///
    /// An operator has no name. A parameter that is not the last one is variadic, or takes no type.
    /// Overloads differ in more than types and versions.
    pub fn new(operators: impl IntoIterator<Item = Arc<dyn CustomOperator>>) -> Result<CustomOperators> {
        let mut by_name: IndexMap<_, Vec<Arc<dyn CustomOperator>>> = IndexMap::new();
        for operator in operators {
            let schema = operator.schema();
            check(schema)?;
            let domain = canonical_domain(&schema.domain).to_owned();
            let same = by_name.entry((domain, schema.name.clone())).or_default();
            for other in same.iter().map(|other| other.schema()).filter(|other| overlap(other, schema)) {
                check_overload(other, schema)?;
            }
            same.push(operator);
        }
        Ok(CustomOperators { by_name: Arc::new(by_name) })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// The schemas of all operators.
    pub fn schemas(&self) -> impl Iterator<Item = &CustomSchema> {
        self.by_name.values().flatten().map(|operator| operator.schema())
    }

    /// Whether there is an operator of this name in any version.
    pub(crate) fn has(&self, domain: &str, name: &str) -> bool {
        // Most models have none, and the key would be two allocations.
        !self.is_empty() && self.by_name.contains_key(&(domain.to_owned(), name.to_owned()))
    }

    /// Finds the operators that a node of this version of the domain may stand for.
    pub(crate) fn find(&self, domain: &str, name: &str, version: i64) -> Result<Found> {
        let all = self.by_name.get(&(domain.to_owned(), name.to_owned()));
        let all = all.map(Vec::as_slice).unwrap_or_default();
        let overloads: Vec<Arc<dyn CustomOperator>> =
            all.iter().filter(|operator| operator.schema().versions.contains(&version)).cloned().collect();
        let schemas: Vec<&CustomSchema> = overloads.iter().map(|operator| operator.schema()).collect();
        let [first, others @ ..] = schemas.as_slice() else {
            let known: Vec<String> =
                all.iter().map(|operator| format!("{:?}", operator.schema().versions)).collect();
            return Err(error!(InvalidGraph, "No Op registered for {name} with domain_version of {version}")
                .help(format!("the custom operator exists in versions {}", known.join(", "))));
        };
        let mut merged = (*first).clone();
        for other in others {
            widen(&mut merged.inputs, &other.inputs);
            widen(&mut merged.outputs, &other.outputs);
            merged.is_pure &= other.is_pure;
        }
        Ok(Found { spec: record(&merged), owner: KernelOwner(Box::new(CustomNode { overloads })) })
    }

    /// What stands for the operators in the key of the compiled cache: folded constants depend on
    /// them.
    pub(crate) fn content(&self) -> Option<Content> {
        let list = || self.schemas().map(|schema| format!("{schema:?}")).collect::<Vec<_>>().join("\n");
        (!self.is_empty()).then(|| Content::of_edit(&format!("custom operators {}", list())))
    }
}

/// Adds the element types of another overload.
fn widen(params: &mut [CustomParam], others: &[CustomParam]) {
    for (param, other) in params.iter_mut().zip(others) {
        param.types = param.types.union(other.types);
    }
}

fn overlap(one: &CustomSchema, other: &CustomSchema) -> bool {
    one.versions.start() <= other.versions.end() && other.versions.start() <= one.versions.end()
}

fn check(schema: &CustomSchema) -> Result<()> {
    let CustomSchema { name, inputs, outputs, in_place, .. } = schema;
    ensure!(!name.is_empty(), InvalidArgument, "a custom operator of domain '{}' has no name", schema.domain);
    for (kind, params) in [("input", inputs), ("output", outputs)] {
        for (index, param) in params.iter().enumerate() {
            let is_last = index + 1 == params.len();
            ensure!(
                is_last || !matches!(param.arity, Arity::Variadic { .. }),
                InvalidArgument,
                "Only the last {kind} to a custom op may be marked variadic. {kind} {index} of {} is",
                schema.full_name()
            );
            ensure!(
                !param.types.is_empty(),
                InvalidArgument,
                "{kind} {index} of custom operator {} takes no element type",
                schema.full_name()
            );
        }
    }
    let fits = |(input, output): &(usize, usize)| *input < inputs.len() && *output < outputs.len();
    ensure!(
        in_place.iter().all(fits),
        InvalidArgument,
        "custom operator {} has {} inputs and {} outputs, but shares memory of {in_place:?}",
        schema.full_name(),
        inputs.len(),
        outputs.len()
    );
    Ok(())
}

/// Overloads share a record, which has one list of inputs and outputs.
fn check_overload(one: &CustomSchema, other: &CustomSchema) -> Result<()> {
    let arities = |params: &[CustomParam]| params.iter().map(|param| param.arity).collect::<Vec<_>>();
    for (kind, of_one, of_other) in
        [("inputs", &one.inputs, &other.inputs), ("outputs", &one.outputs, &other.outputs)]
    {
        let (expected, actual) = (arities(of_one), arities(of_other));
        ensure!(
            expected == actual,
            InvalidArgument,
            help = "give one of them another name, or versions that the other does not have",
            "two custom operators {} have different {kind}: {actual:?}, the first has {expected:?}",
            one.full_name()
        );
    }
    ensure!(
        one.versions.start() == other.versions.start(),
        InvalidArgument,
        help = "give overloads the same first version, or versions that the other does not have",
        "two custom operators {} have versions {:?} and {:?}",
        one.full_name(),
        one.versions,
        other.versions
    );
    Ok(())
}
