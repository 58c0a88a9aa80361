//! The decoder: a session on a model of a folder, its caches, and the memory of its contexts.

use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use ort_alloc::{Budget, Category, Reservation};
use ort_core::dtype::DType;
use ort_core::onnx::{FileAccess, Source};
use ort_core::session::{IoBinding, Model, RunOptions, Session};
use ort_core::{Result, Within, ensure, error};

use crate::caches::{CachePlace, allocate, capacity_for};
use crate::folder::ModelFolder;
use crate::last_row::{EDIT, keep_last_row};
use crate::layout::{Layout, Role, StepSizes};
use crate::memory::{ContextMemory, ContextPlan, MemoryModel, sampler_bytes};

/// The settings of a [`Decoder`].
#[derive(Clone, Debug, Default)]
pub struct DecoderOptions {
    /// A hard limit in bytes on packed weights, caches, prefill, logits and the sampler. Weights
    /// that are read from the mapped file are not allocated and do not count.
    pub memory_limit: Option<usize>,
    /// The threads inside one operator; as many as cores if `None`.
    pub threads: Option<usize>,
    /// The tokens of a prompt that one run takes; as many as the limit allows, up to 512, if
    /// `None`.
    pub prefill_chunk: Option<usize>,
    /// A folder for the compiled cache.
    pub cache: Option<PathBuf>,
}

/// A decoder that predicts the next token of one or several texts.
pub struct Decoder {
    session: Session,
    layout: Layout,
    options: DecoderOptions,
    /// Counts everything if there is a limit.
    budget: Option<Arc<Budget>>,
    /// What the limit leaves beside the weights.
    room: usize,
    weights: [usize; 2],
    longest: Option<usize>,
    end_tokens: Vec<u32>,
    texts: Option<Texts>,
}

/// The texts that are decoded now.
struct Texts {
    binding: IoBinding,
    batch: usize,
    /// The tokens that each text may have.
    context: usize,
    chunk: usize,
    /// The tokens that the caches hold.
    length: usize,
    /// The rows of the buffers, if runs update them in place.
    capacity: usize,
    _sampler: Option<Reservation>,
}

impl Decoder {
    /// Loads the model of a folder, for logits of the last position.
    ///
    /// # Errors
    ///
    /// The model cannot be loaded, or its inputs and outputs are not those of a decoder. The memory
    /// limit is too small for the weights.
    pub fn open(folder: &ModelFolder, options: &DecoderOptions) -> Result<Decoder> {
        ensure!(
            options.prefill_chunk != Some(0),
            InvalidArgument,
            help = "leave it out, or give 1 or more",
            "the prefill chunk is 0 tokens"
        );
        let source = Source::open(&folder.model, FileAccess::default())?.keep_hash(options.cache.is_some());
        let model =
            Model::from_source_edited(source, EDIT, |graph| keep_last_row(graph, &folder.names.logits))?;
        let layout = Layout::of(&model, folder).within(|| format!("model '{}'", folder.model.display()))?;
        let budget = options.memory_limit.map(|limit| Budget::new(Some(limit)));
        let mut builder = Session::builder(&model);
        if let Some(budget) = &budget {
            builder = builder.budget(budget);
        }
        if let Some(threads) = options.threads {
            builder = builder.threads(threads);
        }
        if let Some(cache) = &options.cache {
            builder = builder.cache_dir(cache);
        }
        let session = builder.build()?;
        // Sizes that go together: not all dimensions of a decoder may be 1.
        let first = StepSizes { batch: 1, past: usize::from(layout.in_place), new: 1, total: 1 };
        let dims = layout.dims(&first);
        let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let room = session.plan(&dims)?.available_bytes;
        let held = session.memory();
        Ok(Decoder {
            session,
            layout,
            options: options.clone(),
            budget,
            room,
            weights: [held.weights_mapped, held.weights_copied.saturating_add(held.packed)],
            longest: folder.context,
            end_tokens: folder.end_tokens.clone(),
            texts: None,
        })
    }

    /// The longest text in tokens, if the configuration says it.
    pub fn longest_context(&self) -> Option<usize> {
        self.longest
    }

    /// The tokens that end a text.
    pub fn end_tokens(&self) -> &[u32] {
        &self.end_tokens
    }

    /// The number of tokens that the model distinguishes.
    pub fn vocabulary(&self) -> usize {
        self.layout.vocabulary
    }

    /// The session.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The most bytes that were allocated at once, packed weights included.
    pub fn peak_bytes(&self) -> usize {
        match &self.budget {
            Some(budget) => budget.peak(),
            None => {
                let memory = self.session.memory();
                memory.activations_peak.saturating_add(memory.packed).saturating_add(memory.weights_copied)
            }
        }
    }

    /// Returns the bytes of requests with `context` tokens each, and the longest context that fits.
    /// Nothing is allocated.
    ///
    /// # Errors
    ///
    /// The model does not go that far, or a size is 0.
    pub fn plan(&self, context: usize, requests: usize) -> Result<ContextPlan> {
        let (memory, model) = (self.memory_of(context, requests)?, self.memory_model());
        let most = self.longest.unwrap_or(context.max(1 << 20));
        let [weights_mapped, weights_in_memory] = self.weights;
        Ok(ContextPlan {
            memory,
            room: self.room,
            largest: model.largest(most, requests)?,
            limit: self.options.memory_limit,
            weights_mapped,
            weights_in_memory,
        })
    }

    fn memory_model(&self) -> MemoryModel<'_> {
        MemoryModel {
            session: &self.session,
            layout: &self.layout,
            room: self.room,
            chunk: self.options.prefill_chunk,
        }
    }

    /// The bytes of requests, without the search for the longest that fit.
    fn memory_of(&self, context: usize, requests: usize) -> Result<ContextMemory> {
        ensure!(
            context > 0 && requests > 0,
            InvalidArgument,
            help = "give 1 or more",
            "{requests} requests of {context} tokens"
        );
        if let Some(longest) = self.longest {
            ensure!(
                context <= longest,
                InvalidArgument,
                help = format!("ask for at most {longest} tokens, prompt and answer together"),
                "a context of {context} tokens is longer than the model's, which is {longest}"
            );
        }
        self.memory_model().of(context, requests)
    }

    /// Begins `batch` texts of up to `context` tokens each.
    ///
    /// # Errors
    ///
    /// They do not fit. The error has the bytes needed and the longest context that fits.
    pub fn begin(&mut self, batch: usize, context: usize) -> Result<()> {
        self.texts = None;
        let memory = self.memory_of(context, batch)?;
        if memory.total() > self.room {
            return Err(self.plan(context, batch)?.refusal());
        }
        let sampler = sampler_bytes(self.layout.vocabulary);
        let _sampler =
            self.budget.as_ref().map(|budget| budget.reserve(Category::Dynamic, sampler)).transpose()?;
        let mut binding = self.session.io_binding();
        if !self.layout.in_place {
            self.place(batch, 0).clear(&mut binding)?;
        }
        let chunk = memory.chunk;
        self.texts = Some(Texts { binding, batch, context, chunk, length: 0, capacity: 0, _sampler });
        Ok(())
    }

    /// The tokens of each text that the caches hold.
    pub fn length(&self) -> usize {
        self.texts.as_ref().map_or(0, |texts| texts.length)
    }

    /// The tokens that each text may have, and how many a run takes of a prompt.
    pub(crate) fn bounds(&self) -> Option<(usize, usize)> {
        self.texts.as_ref().map(|texts| (texts.context, texts.chunk))
    }

    /// Forgets all but the first tokens. Returns whether the caches allow that.
    pub(crate) fn truncate(&mut self, length: usize) -> bool {
        match &mut self.texts {
            Some(texts) if length == texts.length => true,
            Some(texts) if self.layout.in_place && length < texts.length => {
                texts.length = length;
                true
            }
            _ => false,
        }
    }

    fn place(&self, batch: usize, length: usize) -> CachePlace<'_> {
        CachePlace { session: &self.session, layout: &self.layout, batch, length }
    }

    /// Runs the model on the next tokens of all texts: as many for each, one text after another.
    ///
    /// # Errors
    ///
    /// No text was begun, a token is not in the vocabulary, or the texts get too long. Errors of
    /// the run.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        let mut texts = self
            .texts
            .take()
            .ok_or_else(|| error!(InvalidArgument, "no text was begun").help("call `begin` first"))?;
        let fed = self.feed_to(&mut texts, tokens);
        // A failed run may have written to the caches, so its texts are over.
        if fed.is_ok() {
            self.texts = Some(texts);
        }
        fed
    }

    fn feed_to(&self, texts: &mut Texts, tokens: &[u32]) -> Result<()> {
        let new = tokens.len() / texts.batch.max(1);
        ensure!(
            new > 0 && tokens.len() == new * texts.batch,
            InvalidArgument,
            "{} tokens for {} texts, expected as many for each",
            tokens.len(),
            texts.batch
        );
        let vocabulary = self.layout.vocabulary;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocabulary) {
            return Err(error!(InvalidArgument, "token {token} is not in the vocabulary of {vocabulary}")
                .help("use the tokenizer that belongs to the model"));
        }
        let total = texts.length.saturating_add(new);
        ensure!(
            total <= texts.context,
            InvalidArgument,
            help = "shorten the prompt, or ask for a longer context",
            "the text has {total} tokens, the context {}",
            texts.context
        );
        let place = self.place(texts.batch, texts.length);
        if self.layout.in_place && total > texts.capacity {
            let capacity = capacity_for(total, texts.context);
            place.grow(&mut texts.binding, capacity)?;
            texts.capacity = capacity;
        }
        let past = if self.layout.in_place { texts.capacity } else { texts.length };
        let sizes = StepSizes { batch: texts.batch, past, new, total };
        self.write_inputs(texts, &sizes, tokens)?;
        self.session.run_with_binding(&mut texts.binding, &RunOptions::default())?;
        if !self.layout.in_place {
            place.pass_on(&mut texts.binding)?;
        }
        texts.length = total;
        Ok(())
    }

    /// Writes tokens, masks and positions. Other shapes get new buffers.
    fn write_inputs(&self, texts: &mut Texts, sizes: &StepSizes, tokens: &[u32]) -> Result<()> {
        for input in &self.layout.inputs {
            if matches!(input.role, Role::Cache(_)) {
                continue;
            }
            let shape = self.layout.shape_of(input, sizes);
            let is_bound = texts.binding.input_mut(&input.name).is_ok_and(|buffer| buffer.shape() == shape);
            if !is_bound {
                texts.binding.bind_input(&input.name, allocate(&self.session, input.dtype, &shape)?)?;
            }
            let columns = shape.last().copied().unwrap_or(1).max(1);
            let number = |index: usize| -> i64 {
                let column = index % columns;
                match input.role {
                    Role::Tokens => tokens.get(index).map_or(0, |token| i64::from(*token)),
                    Role::Mask => i64::from(column < sizes.total),
                    Role::Positions => (texts.length + column) as i64,
                    Role::UsesCache | Role::RowsWanted | Role::Cache(_) => 1,
                }
            };
            let buffer = texts.binding.input_mut(&input.name)?;
            match input.dtype {
                DType::I64 => {
                    let to = buffer.as_mut_slice::<i64>()?.iter_mut().enumerate();
                    to.for_each(|(index, to)| *to = number(index));
                }
                DType::I32 => {
                    let to = buffer.as_mut_slice::<i32>()?.iter_mut().enumerate();
                    to.for_each(|(index, to)| *to = number(index) as i32);
                }
                _ => buffer.bytes_mut()?.fill(1),
            }
        }
        Ok(())
    }

    /// Copies the logits of the last position of a text.
    ///
    /// # Errors
    ///
    /// There is no such text, or nothing was fed.
    pub fn logits(&self, text: usize, to: &mut Vec<f32>) -> Result<()> {
        let texts = self.texts.as_ref().filter(|texts| text < texts.batch);
        let texts = texts.ok_or_else(|| error!(InvalidArgument, "there is no text {text}"))?;
        let view = texts.binding.output(&self.layout.logits)?.tensor()?;
        let start = text.saturating_mul(self.layout.vocabulary);
        let range = start..start.saturating_add(self.layout.vocabulary);
        let short = || error!(Fail, "the logits have shape {:?}", view.shape());
        to.clear();
        match self.layout.logits_dtype {
            DType::F16 => {
                let row = view.as_slice::<f16>()?.get(range).ok_or_else(short)?;
                to.extend(row.iter().map(|logit| logit.to_f32()));
            }
            DType::BF16 => {
                let row = view.as_slice::<bf16>()?.get(range).ok_or_else(short)?;
                to.extend(row.iter().map(|logit| logit.to_f32()));
            }
            _ => to.extend_from_slice(view.as_slice::<f32>()?.get(range).ok_or_else(short)?),
        }
        Ok(())
    }
}
