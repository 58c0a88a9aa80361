//! Batches of texts: their KV caches, which runs update in place and which grow in pages, or which
//! each run allocates. Texts join and leave by copies of their rows.

use ort_alloc::DeviceId;
use ort_core::dtype::DType;
use ort_core::session::{IoBinding, OutputTarget, Session};
use ort_core::tensor::{Tensor, TensorBuffer, TensorView, Value};
use ort_core::{ErrorKind, Result, error};

use crate::layout::{CacheSpec, Layout, Role};

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

/// The caches of texts that run together. The tensors have as many rows for each text. A cache that
/// is updated in place begins with the rows of its text; one that is concatenated ends with them.
pub(crate) struct Batch {
    pub(crate) binding: IoBinding,
    /// The tokens of each text that the caches hold.
    pub(crate) lengths: Vec<usize>,
    /// The rows of the caches.
    pub(crate) rows: usize,
}

/// A text of a batch, with as many of its first tokens as are wanted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextRows {
    /// The index of the batch.
    pub(crate) batch: usize,
    /// The index of the text in it.
    pub(crate) text: usize,
    pub(crate) length: usize,
}

/// The memory of a cache.
enum CacheMemory {
    Buffer(TensorBuffer),
    Value(Value),
}

impl CacheMemory {
    fn view(&self) -> Result<TensorView<'_>> {
        match self {
            CacheMemory::Buffer(buffer) => Ok(buffer.view()),
            CacheMemory::Value(value) => value.view().tensor(),
        }
    }
}

/// Makes batches for one session.
#[derive(Clone, Copy)]
pub(crate) struct Batcher<'a> {
    pub(crate) session: &'a Session,
    pub(crate) layout: &'a Layout,
}

impl Batcher<'_> {
    /// A batch of one text without tokens.
    pub(crate) fn empty(&self) -> Result<Batch> {
        let mut binding = self.session.io_binding();
        if !self.layout.in_place {
            for cache in &self.layout.caches {
                let none = Tensor::from_bytes(cache.dtype, &cache.shape(1, 0), Vec::new().into())?;
                binding.bind_input(&cache.past, none)?;
                binding.bind_output(&cache.present, DeviceId::HOST)?;
            }
            binding.bind_output(&self.layout.logits, DeviceId::HOST)?;
        }
        Ok(Batch { binding, lengths: vec![0], rows: 0 })
    }

    /// The rows for texts of these lengths, one more token each, and at most `context` tokens.
    pub(crate) fn rows_for(&self, longest: usize, context: usize) -> usize {
        if self.layout.in_place { capacity_for(longest.saturating_add(1), context) } else { longest }
    }

    /// Gives a batch caches of more rows, for texts of up to `context` tokens.
    pub(crate) fn grow(&self, batch: Batch, rows: usize, context: usize) -> Result<Batch> {
        let rows = capacity_for(rows, context);
        let texts = batch.lengths.iter().enumerate();
        let texts: Vec<TextRows> =
            texts.map(|(text, length)| TextRows { batch: 0, text, length: *length }).collect();
        self.join(vec![batch], &texts, rows)
    }

    /// Makes one batch of texts of others, which end. One cache after another is copied.
    pub(crate) fn join(&self, mut batches: Vec<Batch>, texts: &[TextRows], rows: usize) -> Result<Batch> {
        // The copies take the place of what the last run left, as the plan of a context says.
        if batches.iter().any(|batch| batch.rows > 0) {
            self.session.trim();
        }
        let mut held: Vec<Vec<Option<CacheMemory>>> = Vec::with_capacity(batches.len());
        for batch in &mut batches {
            held.push(self.take(batch)?);
        }
        let lengths: Vec<Vec<usize>> = batches.into_iter().map(|batch| batch.lengths).collect();
        let mut binding = self.session.io_binding();
        for (index, cache) in self.layout.caches.iter().enumerate() {
            let mut sources = Vec::with_capacity(held.len());
            for caches in &mut held {
                sources.push(caches.get_mut(index).and_then(Option::take));
            }
            let mut copy = self.new_cache(cache, texts.len(), rows)?;
            for (to, text) in texts.iter().enumerate() {
                let Some(Some(source)) = sources.get(text.batch) else { continue };
                let held = lengths.get(text.batch).and_then(|all| all.get(text.text)).copied().unwrap_or(0);
                self.copy_text(cache, (source.view()?, *text, held), (&mut copy, to))?;
            }
            self.bind(&mut binding, cache, copy)?;
        }
        binding.bind_output(&self.layout.logits, DeviceId::HOST)?;
        Ok(Batch { binding, lengths: texts.iter().map(|text| text.length).collect(), rows })
    }

    /// Copies the first tokens of a text of a batch that goes on.
    pub(crate) fn copy(&self, batch: &mut Batch, text: usize, length: usize, rows: usize) -> Result<Batch> {
        let held = batch.lengths.get(text).copied().unwrap_or(0);
        let mut binding = self.session.io_binding();
        for cache in &self.layout.caches {
            let mut copy = self.new_cache(cache, 1, rows)?;
            let view = if batch.binding.input_mut(&cache.past).is_ok() {
                batch.binding.input_mut(&cache.past)?.view()
            } else {
                batch.binding.output(&cache.present)?.tensor()?
            };
            self.copy_text(cache, (view, TextRows { batch: 0, text, length }, held), (&mut copy, 0))?;
            self.bind(&mut binding, cache, copy)?;
        }
        binding.bind_output(&self.layout.logits, DeviceId::HOST)?;
        Ok(Batch { binding, lengths: vec![length], rows })
    }

    /// Frees what a batch holds beside its caches: inputs and logits, which the next run allocates
    /// again.
    pub(crate) fn strip(&self, batch: &mut Batch) -> Result<()> {
        for input in &self.layout.inputs {
            if !matches!(input.role, Role::Cache(_)) {
                batch.binding.unbind_input(&input.name)?;
            }
        }
        // Without its logits a run's other outputs are gone, too. Concatenated caches are such.
        if self.layout.in_place {
            batch.binding.unbind_output(&self.layout.logits)?;
            batch.binding.bind_output(&self.layout.logits, DeviceId::HOST)?;
        }
        Ok(())
    }

    /// The bytes of a text that is kept: its caches, and logits that [`Self::strip`] leaves.
    pub(crate) fn kept_bytes(&self, batch: &Batch) -> usize {
        let has_logits = batch.binding.output(&self.layout.logits).is_ok();
        let logits = if has_logits { self.layout.logits_bytes(1) } else { 0 };
        self.layout.cache_bytes(1, batch.rows).saturating_add(logits)
    }

    /// Makes the presents of the last run the pasts of the next, if they are not one buffer.
    pub(crate) fn pass_on(&self, batch: &mut Batch) -> Result<()> {
        if self.layout.in_place {
            return Ok(());
        }
        for cache in &self.layout.caches {
            let present = batch.binding.shared_output(&cache.present)?;
            batch.binding.bind_input(&cache.past, present)?;
        }
        Ok(())
    }

    /// Takes the memory of all caches.
    fn take(&self, batch: &mut Batch) -> Result<Vec<Option<CacheMemory>>> {
        let mut all = Vec::with_capacity(self.layout.caches.len());
        for cache in &self.layout.caches {
            let is_value = batch.rows > 0 && batch.binding.input_mut(&cache.past).is_err();
            all.push(match is_value {
                true => Some(CacheMemory::Value(batch.binding.shared_output(&cache.present)?)),
                false => None,
            });
        }
        for (name, buffer) in batch.binding.take_buffers() {
            let place = self.layout.caches.iter().position(|cache| cache.past == name);
            if let Some(place) = place.and_then(|place| all.get_mut(place)) {
                *place = Some(CacheMemory::Buffer(buffer));
            }
        }
        Ok(all)
    }

    fn new_cache(&self, cache: &CacheSpec, texts: usize, rows: usize) -> Result<TensorBuffer> {
        let mut buffer = allocate(self.session, cache.dtype, &cache.shape(texts, rows))?;
        if !self.layout.in_place {
            // Rows before a text are masked, which hides numbers but not NaN.
            buffer.bytes_mut()?.fill(0);
        }
        Ok(buffer)
    }

    fn bind(&self, binding: &mut IoBinding, cache: &CacheSpec, buffer: TensorBuffer) -> Result<()> {
        binding.bind_input(&cache.past, buffer)?;
        match self.layout.in_place {
            true => binding.bind_output(&cache.present, OutputTarget::Input(cache.past.clone())),
            false => binding.bind_output(&cache.present, DeviceId::HOST),
        }
    }

    /// Copies the first rows of a text, which has `held` rows, to the text `to` of a buffer.
    fn copy_text(
        &self,
        cache: &CacheSpec,
        (from, text, held): (TensorView<'_>, TextRows, usize),
        (buffer, to): (&mut TensorBuffer, usize),
    ) -> Result<()> {
        let short = || error!(Fail, "a cache of {} has fewer rows than its text", cache.past);
        let rows_of = |shape: &[usize]| shape.get(2).copied().unwrap_or(0);
        let (rows_from, rows_to) = (rows_of(from.shape()), rows_of(buffer.shape()));
        let row = cache.row_bytes();
        let first = |rows: usize, length: usize| {
            if self.layout.in_place { Some(0) } else { rows.checked_sub(length) }
        };
        let start_from = first(rows_from, held).ok_or_else(short)?;
        let start_to = first(rows_to, text.length).ok_or_else(short)?;
        let source = from.bytes()?;
        let target = buffer.bytes_mut()?;
        for head in 0..cache.heads {
            let from = ((text.text * cache.heads + head) * rows_from + start_from) * row;
            let to = ((to * cache.heads + head) * rows_to + start_to) * row;
            let len = text.length * row;
            let from = source.get(from..from + len).ok_or_else(short)?;
            target.get_mut(to..to + len).ok_or_else(short)?.copy_from_slice(from);
        }
        Ok(())
    }
}
