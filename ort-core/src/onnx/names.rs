//! Naming of domains, operator sets and functions.

use std::collections::HashMap;

use super::proto::NodeProto;
use crate::spec::canonical_domain;

/// Returns the name of a domain for messages.
pub(super) fn domain_name(domain: &str) -> &str {
    if domain.is_empty() { "ai.onnx" } else { domain }
}

/// The version of each domain, with the standard's own under the empty name.
pub(super) type Opsets = HashMap<String, i64>;

/// The key of a function: domain, name, overload.
pub(super) type FunctionKey<'m> = (&'m str, &'m str, &'m str);

pub(super) fn function_key(node: &NodeProto) -> FunctionKey<'_> {
    (canonical_domain(node.domain()), node.op_type(), node.overload())
}
