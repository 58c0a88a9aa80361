//! Copies of constants that the programs of one build share.

use std::cell::RefCell;

use ort_alloc::DeviceId;
use rustc_hash::FxHashMap;

use crate::Result;
use crate::dtype::DType;
use crate::tensor::{Shape, Tensor};

/// The copies that a build made of constants: aligned ones, and those in device memory. Programs of
/// subgraphs have constants in common, such as a weight that two loops read, and share its copy.
#[derive(Default)]
pub(crate) struct ConstantCopies(RefCell<FxHashMap<CopyKey, CopyOf>>);

/// The address of a constant, the memory of its copy, and its type and shape.
type CopyKey = (usize, DeviceId, DType, Shape);

struct CopyOf {
    /// It lives as long as the entry, so that no other one gets its address.
    _constant: Tensor,
    copy: Option<Tensor>,
}

impl ConstantCopies {
    /// Returns the copy of a constant in a memory, which `make` makes if there is none. A copy that
    /// is not needed, or is only counted, is `None`.
    pub(super) fn one_of(
        &self,
        constant: &Tensor,
        memory: DeviceId,
        make: impl FnOnce() -> Result<Option<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let Some(bytes) = constant.bytes() else { return make() };
        let key = (bytes.as_ptr() as usize, memory, constant.dtype(), Shape::from(constant.shape()));
        if let Some(known) = self.0.borrow().get(&key) {
            return Ok(known.copy.clone());
        }
        let copy = make()?;
        self.0.borrow_mut().insert(key, CopyOf { _constant: constant.clone(), copy: copy.clone() });
        Ok(copy)
    }
}
