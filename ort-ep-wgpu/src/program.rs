//! Shader programs: WGSL text and its bindings.

use std::sync::Arc;

/// The WGSL text of a shader module, and its number of storage bindings.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Program {
    pub(crate) text: Arc<str>,
    pub(crate) bindings: usize,
}
