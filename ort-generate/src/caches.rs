//! KV caches: buffers that runs update in place and that grow in pages, or tensors that each run
//! allocates.

use ort_alloc::DeviceId;
use ort_core::dtype::DType;
use ort_core::session::{IoBinding, OutputTarget, Session};
use ort_core::tensor::{Tensor, TensorBuffer};
use ort_core::{ErrorKind, Result, error};

use crate::layout::{CacheSpec, Layout};

/// Buffers grow by this many tokens.
const PAGE: usize = 64;

/// Allocates a buffer in the session's budget. Idle memory of earlier runs makes way for it.
pub(crate) fn allocate(session: &Session, dtype: DType, shape: &[usize]) -> Result<TensorBuffer> {
    match session.buffer_on(DeviceId::HOST, dtype, shape) {
        Err(problem) if problem.kind() == ErrorKind::OutOfMemory => {
            session.trim();
            session.buffer_on(DeviceId::HOST, dtype, shape)
        }
        allocated => allocated,
    }
}

/// The rows of a buffer for `rows` tokens of a text that has at most `most`.
pub(crate) fn capacity_for(rows: usize, most: usize) -> usize {
    rows.next_multiple_of(PAGE).min(most).max(rows)
}

/// Where the caches of a batch of texts are.
pub(crate) struct CachePlace<'a> {
    pub(crate) session: &'a Session,
    pub(crate) layout: &'a Layout,
    pub(crate) batch: usize,
    /// The tokens that the caches hold.
    pub(crate) length: usize,
}

impl CachePlace<'_> {
    /// Binds caches of `rows` rows that keep the tokens so far. One cache at a time is copied.
    pub(crate) fn grow(&self, binding: &mut IoBinding, rows: usize) -> Result<()> {
        let mut old: Vec<(String, TensorBuffer)> = binding.take_buffers();
        for cache in &self.layout.caches {
            let place = old.iter().position(|(name, _)| *name == cache.past);
            let before = place.map(|place| old.swap_remove(place).1);
            let mut buffer = allocate(self.session, cache.dtype, &cache.shape(self.batch, rows))?;
            if let Some(before) = before.filter(|_| self.length > 0) {
                self.copy_rows(cache, &before, &mut buffer)?;
            }
            binding.bind_input(&cache.past, buffer)?;
            binding.bind_output(&cache.present, OutputTarget::Input(cache.past.clone()))?;
        }
        binding.bind_output(&self.layout.logits, DeviceId::HOST)
    }

    fn copy_rows(&self, cache: &CacheSpec, from: &TensorBuffer, to: &mut TensorBuffer) -> Result<()> {
        let bytes_of = |rows: usize| cache.bytes(1, rows) / cache.heads.max(1);
        let rows_of = |buffer: &TensorBuffer| buffer.shape().get(2).copied().unwrap_or(0);
        let (step_from, step_to) = (bytes_of(rows_of(from)), bytes_of(rows_of(to)));
        let held = bytes_of(self.length);
        let source = from.view().bytes()?;
        let target = to.bytes_mut()?;
        for (from, to) in source.chunks_exact(step_from.max(1)).zip(target.chunks_exact_mut(step_to.max(1))) {
            let (Some(from), Some(to)) = (from.get(..held), to.get_mut(..held)) else {
                return Err(error!(Fail, "a cache of {} has fewer rows than its text", cache.past));
            };
            to.copy_from_slice(from);
        }
        Ok(())
    }

    /// Binds caches without rows, for graphs that concatenate.
    pub(crate) fn clear(&self, binding: &mut IoBinding) -> Result<()> {
        binding.clear_binding_inputs();
        binding.clear_binding_outputs();
        for cache in &self.layout.caches {
            let none = Tensor::from_bytes(cache.dtype, &cache.shape(self.batch, 0), Vec::new().into())?;
            binding.bind_input(&cache.past, none)?;
            binding.bind_output(&cache.present, DeviceId::HOST)?;
        }
        binding.bind_output(&self.layout.logits, DeviceId::HOST)
    }

    /// Makes the presents of the last run the pasts of the next.
    pub(crate) fn pass_on(&self, binding: &mut IoBinding) -> Result<()> {
        for cache in &self.layout.caches {
            let present = binding.shared_output(&cache.present)?;
            binding.bind_input(&cache.past, present)?;
        }
        Ok(())
    }
}
