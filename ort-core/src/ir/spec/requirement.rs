//! Size requirements: what an operator demands of sizes that are known only once a run gives them.
//!
//! Inference compares constant sizes at once. If a size is symbolic, the rule records a requirement
//! instead, and each plan checks it with the sizes that it is made for. A requirement is a relation
//! of two expressions over the symbols of the graph, so it holds whatever becomes of its node:
//! another device, a fusion, a decomposition.
//!
//! Rules record only what no kernel checks. Sizes that depend on data are in no plan. Before such a
//! step the run infers its node again, with the actual sizes.

use std::borrow::Cow;
use std::sync::Arc;

use crate::dim::{Bindings, Dim};
use crate::{Error, ErrorKind, Result};

/// The relation that a size must have to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Relation {
    Equal,
    EqualOrOne,
    MultipleOf,
    AtMost,
}

/// A relation that two sizes must have.
///
/// ```
/// use ort_core::dim::Dim;
/// use ort_core::spec::Requirement;
/// let (length, columns) = (Dim::parse("n"), Dim::constant(4));
/// let requirement = Requirement::equal("the length of the bias", &length, &columns);
/// let problem = requirement.check([3, 4]).unwrap_err();
/// assert_eq!(problem.message(), "the length of the bias is 3, expected 4");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Requirement {
    what: Cow<'static, str>,
    relation: Relation,
    /// The actual and the expected size.
    sizes: [Dim; 2],
    kind: ErrorKind,
    help: Option<&'static str>,
}

impl Requirement {
    /// Requires a size to be `expected`. `what` names it in the error.
    pub fn equal(what: impl Into<Cow<'static, str>>, actual: &Dim, expected: &Dim) -> Requirement {
        Requirement::new(what.into(), Relation::Equal, [actual, expected])
    }

    /// Requires a size to be `expected`, or 1 to broadcast.
    pub fn broadcast(what: impl Into<Cow<'static, str>>, actual: &Dim, expected: &Dim) -> Requirement {
        Requirement::new(what.into(), Relation::EqualOrOne, [actual, expected])
    }

    /// Requires a size to be a multiple of `divisor`, which is above 0.
    pub fn multiple(what: impl Into<Cow<'static, str>>, actual: &Dim, divisor: i64) -> Requirement {
        Requirement::new(what.into(), Relation::MultipleOf, [actual, &Dim::constant(divisor)])
    }

    /// Requires a size to be `limit` or less.
    pub fn at_most(what: impl Into<Cow<'static, str>>, actual: &Dim, limit: &Dim) -> Requirement {
        Requirement::new(what.into(), Relation::AtMost, [actual, limit])
    }

    fn new(what: Cow<'static, str>, relation: Relation, sizes: [&Dim; 2]) -> Requirement {
        let (sizes, kind) = (sizes.map(Dim::clone), ErrorKind::InvalidArgument);
        Requirement { what, relation, sizes, kind, help: None }
    }

    /// Makes the error of a run an [`ErrorKind::Fail`], if that is what ONNX Runtime reports. The
    /// default is [`ErrorKind::InvalidArgument`].
    #[must_use]
    pub fn or_fail(self) -> Requirement {
        self.of_kind(ErrorKind::Fail)
    }

    /// Sets the kind of the error of a run.
    #[must_use]
    pub fn of_kind(mut self, kind: ErrorKind) -> Requirement {
        self.kind = kind;
        self
    }

    /// Adds what the user can try.
    #[must_use]
    pub fn help(mut self, advice: &'static str) -> Requirement {
        self.help = Some(advice);
        self
    }

    /// Whether the requirement holds for all sizes.
    pub(super) fn is_certain(&self) -> bool {
        let [actual, expected] = &self.sizes;
        self.relation != Relation::MultipleOf && actual == expected
    }

    /// Returns the two sizes if both are constants.
    pub(super) fn constants(&self) -> Option<[i64; 2]> {
        let [actual, expected] = &self.sizes;
        Some([actual.as_constant()?, expected.as_constant()?])
    }

    /// Evaluates the two sizes. `None` if one is unbound or out of range.
    fn evaluate(&self, bindings: &Bindings) -> Option<[i64; 2]> {
        let [actual, expected] = &self.sizes;
        Some([actual.evaluate(bindings).ok()?, expected.evaluate(bindings).ok()?])
    }

    /// Checks an actual and an expected size.
    pub fn check(&self, [actual, expected]: [i64; 2]) -> Result<()> {
        let what = &self.what;
        let message = match self.relation {
            Relation::Equal if actual == expected => return Ok(()),
            Relation::Equal => format!("{what} is {actual}, expected {expected}"),
            Relation::EqualOrOne if actual == expected || actual == 1 => return Ok(()),
            Relation::EqualOrOne => format!("{what} is {actual}, expected {expected} or 1"),
            Relation::MultipleOf if actual.checked_rem(expected) == Some(0) => return Ok(()),
            Relation::MultipleOf => format!("{what} {actual} is not a multiple of {expected}"),
            Relation::AtMost if actual <= expected => return Ok(()),
            Relation::AtMost => format!("{what} is {actual}, expected {expected} at most"),
        };
        let problem = Error::new(self.kind, message);
        Err(match self.help {
            Some(advice) => problem.help(advice),
            None => problem,
        })
    }
}

/// A requirement of one node of a graph.
#[derive(Clone, Debug)]
pub struct NodeRequirement {
    /// The name of the node.
    pub(super) node: Arc<str>,
    /// Its operator.
    pub(super) op: &'static str,
    /// What it requires.
    pub(super) requirement: Requirement,
}

impl NodeRequirement {
    /// Checks the requirement under the bindings of a plan. A size that these leave open is left to
    /// the run.
    pub(crate) fn check(&self, bindings: &Bindings) -> Result<()> {
        let Some(sizes) = self.requirement.evaluate(bindings) else { return Ok(()) };
        self.requirement
            .check(sizes)
            .map_err(|problem| problem.help("check the sizes of the model's inputs"))
            .map_err(|problem| problem.at_node(&self.node, self.op))
    }
}
