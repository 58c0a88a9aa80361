//! The decoder: a session on a model of a folder, its caches, and the memory of its contexts.

use std::path::PathBuf;
use std::sync::Arc;

use half::{bf16, f16};
use ort_alloc::{Budget, Category, Reservation};
use ort_core::dtype::DType;
use ort_core::onnx::{FileAccess, Source};
use ort_core::session::{Model, RunOptions, Session};
use ort_core::{Result, Within, ensure, error};

use crate::batch::{Batch, Batcher, allocate};
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

/// A decoder: a model with the memory of its contexts. A [`crate::Scheduler`] runs texts on it.
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
    /// Nothing is allocated. Requests of a graph that cannot mix lengths run one at a time: their
    /// plan is that of one.
    ///
    /// # Errors
    ///
    /// The model does not go that far, or a size is 0.
    pub fn plan(&self, context: usize, requests: usize) -> Result<ContextPlan> {
        let requests = if self.layout.mixes_lengths { requests } else { requests.min(1) };
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
    pub(crate) fn memory_of(&self, context: usize, requests: usize) -> Result<ContextMemory> {
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

    /// How many requests of `context` tokens fit at once, up to `most`.
    ///
    /// # Errors
    ///
    /// The model does not go that far, or the context is 0.
    pub fn most_requests(&self, context: usize, most: usize) -> Result<usize> {
        self.memory_of(context, 1)?;
        let most = if self.layout.mixes_lengths { most } else { most.min(1) };
        self.memory_model().most_requests(context, most)
    }

    /// What the limit, or the machine, leaves beside the weights.
    pub(crate) fn room(&self) -> usize {
        self.room
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn batcher(&self) -> Batcher<'_> {
        Batcher { session: &self.session, layout: &self.layout }
    }

    /// Reserves the memory of the sampler.
    pub(crate) fn reserve_sampler(&self) -> Result<Option<Reservation>> {
        let bytes = sampler_bytes(self.layout.vocabulary);
        Ok(self.budget.as_ref().map(|budget| budget.reserve(Category::Dynamic, bytes)).transpose()?)
    }

    /// Refuses tokens that the model does not have.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocabulary = self.layout.vocabulary;
        match tokens.iter().find(|token| **token as usize >= vocabulary) {
            Some(token) => {
                Err(error!(InvalidArgument, "token {token} is not in the vocabulary of {vocabulary}")
                    .help("use the tokenizer that belongs to the model"))
            }
            None => Ok(()),
        }
    }

    /// Runs the model on the next tokens of the texts of a batch, as many for each, one text after
    /// another. Texts have at most `context` tokens.
    pub(crate) fn feed(&self, batch: Batch, tokens: &[u32], context: usize) -> Result<Batch> {
        let texts = batch.lengths.len();
        let new = tokens.len() / texts.max(1);
        let longest = batch.lengths.iter().max().copied().unwrap_or(0);
        let total = longest.saturating_add(new);
        ensure!(
            new > 0 && tokens.len() == new * texts && total <= context,
            Fail,
            "{} tokens for {texts} texts of {longest} tokens in a context of {context}",
            tokens.len()
        );
        let batcher = self.batcher();
        let mut batch = batch;
        if self.layout.in_place && total > batch.rows {
            batch = batcher.grow(batch, total, context)?;
        }
        let sizes = StepSizes { batch: texts, past: batch.rows, new, total: self.total(&batch, total, new) };
        self.write_inputs(&mut batch, &sizes, tokens)?;
        self.session.run_with_binding(&mut batch.binding, &RunOptions::default())?;
        batcher.pass_on(&mut batch)?;
        batch.lengths.iter_mut().for_each(|length| *length += new);
        if !self.layout.in_place {
            batch.rows += new;
        }
        Ok(batch)
    }

    /// The columns of the mask: those of the longest text, or of the concatenated caches.
    fn total(&self, batch: &Batch, longest: usize, new: usize) -> usize {
        if self.layout.in_place { longest } else { batch.rows + new }
    }

    /// Writes tokens, masks and positions. Other shapes get new buffers.
    fn write_inputs(&self, batch: &mut Batch, sizes: &StepSizes, tokens: &[u32]) -> Result<()> {
        for input in &self.layout.inputs {
            if matches!(input.role, Role::Cache(_)) {
                continue;
            }
            let shape = self.layout.shape_of(input, sizes);
            let is_bound = batch.binding.input_mut(&input.name).is_ok_and(|buffer| buffer.shape() == shape);
            if !is_bound {
                batch.binding.bind_input(&input.name, allocate(&self.session, input.dtype, &shape)?)?;
            }
            let columns = shape.last().copied().unwrap_or(1).max(1);
            let lengths = &batch.lengths;
            let number = |index: usize| -> i64 {
                let (text, column) = (index / columns, index % columns);
                let length = lengths.get(text).copied().unwrap_or(0);
                match input.role {
                    Role::Tokens => tokens.get(index).map_or(0, |token| i64::from(*token)),
                    Role::Mask if self.layout.in_place => i64::from(column < length + sizes.new),
                    Role::Mask => i64::from(column + length >= sizes.past),
                    Role::Positions => (length + column) as i64,
                    Role::UsesCache | Role::RowsWanted | Role::Cache(_) => 1,
                }
            };
            let buffer = batch.binding.input_mut(&input.name)?;
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
    pub(crate) fn logits(&self, batch: &Batch, text: usize, to: &mut Vec<f32>) -> Result<()> {
        let view = batch.binding.output(&self.layout.logits)?.tensor()?;
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use ort_core::Result;
    use ort_ep_cpu as _;

    use super::{Decoder, DecoderOptions, ModelFolder};

    #[test]
    fn requests_that_run_one_at_a_time_have_the_plan_of_one() -> Result<()> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gpt2");
        let mut decoder = Decoder::open(&ModelFolder::open(folder, None)?, &DecoderOptions::default())?;
        let one = decoder.plan(100, 1)?;
        assert!(decoder.plan(100, 4)?.memory.caches >= 4 * one.memory.caches);
        decoder.layout.mixes_lengths = false;
        assert_eq!(decoder.plan(100, 4)?, one);
        assert_eq!(decoder.most_requests(100, 4)?, 1);
        Ok(())
    }
}
