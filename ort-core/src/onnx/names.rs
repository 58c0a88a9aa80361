//! What domains and functions are called.

use std::collections::HashMap;

use super::proto::NodeProto;

/// A domain as messages name it.
pub(super) fn domain_name(domain: &str) -> &str {
    if domain.is_empty() { "ai.onnx" } else { domain }
}

/// The empty domain and `ai.onnx` are one.
pub(super) fn canonical_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// The version of each domain, the standard's own under the empty name.
pub(super) type Opsets = HashMap<String, i64>;

/// What identifies a function: domain, name, overload.
pub(super) type FunctionKey<'m> = (&'m str, &'m str, &'m str);

pub(super) fn function_key(node: &NodeProto) -> FunctionKey<'_> {
    (canonical_domain(node.domain()), node.op_type(), node.overload())
}
