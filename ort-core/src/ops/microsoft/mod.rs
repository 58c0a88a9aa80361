//! Operators of the domain `com.microsoft` that exported and optimized models contain. Their records follow the schemas
//! that ONNX Runtime registers.
//!
//! An operator that is one of the standard's under another name or with another default becomes that one when a model
//! is loaded (`upgrades`), so that nothing after the loader knows it. One that is made of several of the standard's is
//! decomposed where no provider has a kernel for it (`lower`).

mod attention_groups;
mod attention_heads;
mod attention_rotary;
mod gelu;

use crate::Result;
use crate::spec::{Draft, Upgrade};

/// The upgrade of an operator that is the standard's of the same name.
const SAME_AS_STANDARD: &[Upgrade] = &[becomes(|draft| {
    draft.domain.clear();
    Ok(())
})];

/// The upgrade of an operator that is another one, whatever the version.
const fn becomes(apply: fn(&mut Draft<'_>) -> Result<()>) -> Upgrade {
    Upgrade { before: i64::MAX, apply }
}
