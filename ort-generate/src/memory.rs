//! Memory of a context: the bytes that caches, prefill and decoding take, before any of them is
//! allocated.

use ort_alloc::{DeviceId, human_bytes};
use ort_core::session::{BoundPeak, KeptIn, Session};
use ort_core::{Error, MemoryShortage, Result};

use crate::layout::{Layout, StepSizes};

/// The longest chunk of a prompt that is chosen without a request for another one. Longer chunks
/// are hardly faster, and activations grow with them.
const LONGEST_CHUNK: usize = 512;

/// The bytes that requests of one length take beside the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextMemory {
    /// The tokens of each request: prompt and answer.
    pub context: usize,
    /// The requests that run at once.
    pub requests: usize,
    /// The tokens of a prompt that one run takes.
    pub chunk: usize,
    /// KV caches.
    pub caches: usize,
    /// Activations, workspaces, logits, and new caches if a run makes them, at their peak.
    pub run: usize,
    /// Tokens, masks and positions.
    pub inputs: usize,
    /// The candidates of the sampler.
    pub sampler: usize,
    /// Whether the sizes of all values are known, so that the sum is the whole peak.
    pub is_exact: bool,
}

impl ContextMemory {
    /// The sum.
    pub fn total(&self) -> usize {
        [self.caches, self.run, self.inputs, self.sampler].into_iter().fold(0, usize::saturating_add)
    }
}

/// What fits beside the weights, and what a context takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextPlan {
    /// The bytes of the context.
    pub memory: ContextMemory,
    /// The bytes that the limit, or the machine, leaves beside the weights.
    pub room: usize,
    /// The longest context of as many requests that fits; `None` if not even one token does.
    pub largest: Option<usize>,
    /// The limit, if there is one.
    pub limit: Option<usize>,
    /// The bytes of weights that are read from the mapped file.
    pub weights_mapped: usize,
    /// The bytes of weights in memory of their own, without those that a limit streams.
    pub weights_in_memory: usize,
}

impl ContextPlan {
    /// Whether the context fits.
    pub fn fits(&self) -> bool {
        self.memory.total() <= self.room
    }

    /// Returns the refusal of a context that does not fit.
    pub fn refusal(&self) -> Error {
        let ContextMemory { context, requests, chunk, caches, run, .. } = self.memory;
        let shortage = MemoryShortage {
            needed: self.memory.total(),
            available: self.room,
            limit: self.limit.unwrap_or(self.room),
            largest: vec![
                ("KV caches".to_owned(), caches),
                (format!("a run on a prompt in chunks of {chunk}"), run),
            ],
        };
        let raised = human_bytes(shortage.sufficient_limit());
        let of = if requests == 1 { String::new() } else { format!("{requests} requests of ") };
        let shorter = match self.largest {
            Some(largest) => format!("ask for a context of at most {largest} tokens, "),
            None => String::new(),
        };
        let advice = match self.limit {
            Some(_) => format!("{shorter}or raise the memory limit to {raised}"),
            None => format!("{shorter}or free memory of the machine"),
        };
        Error::out_of_memory(&format!("{of}a context of {context} tokens"), shortage).help(advice)
    }
}

/// Computes the bytes of contexts for one session.
pub(crate) struct MemoryModel<'a> {
    pub(crate) session: &'a Session,
    pub(crate) layout: &'a Layout,
    pub(crate) room: usize,
    /// The chunk that was asked for.
    pub(crate) chunk: Option<usize>,
}

impl MemoryModel<'_> {
    /// The bytes of a context with the longest chunk that fits, or with that of one token.
    pub(crate) fn of(&self, context: usize, requests: usize) -> Result<ContextMemory> {
        let mut chunk = self.chunk.unwrap_or(LONGEST_CHUNK).clamp(1, context.max(1));
        loop {
            let memory = self.with_chunk(context, requests, chunk)?;
            if memory.total() <= self.room || chunk == 1 || self.chunk.is_some() {
                return Ok(memory);
            }
            // The next lower power of two.
            chunk = chunk.next_power_of_two() / 2;
        }
    }

    fn with_chunk(&self, context: usize, requests: usize, chunk: usize) -> Result<ContextMemory> {
        let prefill = self.prefill(context, requests, chunk)?;
        let step = self.step(context, requests)?;
        let longer = if prefill.total() >= step.total() { prefill } else { step };
        Ok(ContextMemory { chunk, is_exact: prefill.is_exact && step.is_exact, ..longer })
    }

    /// The last chunk of a prompt, while the other requests wait.
    fn prefill(&self, context: usize, requests: usize, chunk: usize) -> Result<ContextMemory> {
        let layout = self.layout;
        let others = requests.saturating_sub(1);
        let sizes = self.sizes(1, chunk, context);
        let peak = self.peak(&sizes)?;
        let waiting = match others {
            0 => 0,
            others => layout.input_bytes(&self.sizes(others, 1, context)),
        };
        Ok(ContextMemory {
            context,
            requests,
            chunk,
            caches: layout.cache_bytes(1, sizes.past).saturating_add(layout.cache_bytes(others, context)),
            run: peak.bytes.saturating_add(layout.logits_bytes(others)),
            inputs: layout.input_bytes(&sizes).saturating_add(waiting),
            sampler: sampler_bytes(layout.vocabulary),
            is_exact: peak.is_known,
        })
    }

    /// The last token of all requests, or the copy of one cache before it.
    fn step(&self, context: usize, requests: usize) -> Result<ContextMemory> {
        let layout = self.layout;
        let sizes = self.sizes(requests, 1, context);
        let peak = self.peak(&sizes)?;
        let largest = layout.caches.iter().map(|cache| cache.bytes(requests, sizes.past)).max();
        let copy = largest.filter(|_| layout.in_place).unwrap_or(0);
        // Of a request that is prefilled while the caches of the others grow.
        let held = if requests > 1 { layout.logits_bytes(1) } else { 0 };
        Ok(ContextMemory {
            context,
            requests,
            chunk: 1,
            caches: layout.cache_bytes(requests, sizes.past),
            run: peak.bytes.max(copy.saturating_add(held)),
            inputs: layout.input_bytes(&sizes),
            sampler: sampler_bytes(layout.vocabulary),
            is_exact: peak.is_known,
        })
    }

    fn sizes(&self, batch: usize, new: usize, context: usize) -> StepSizes {
        let past = if self.layout.in_place { context } else { context.saturating_sub(new) };
        StepSizes { batch, past, new, total: context }
    }

    fn peak(&self, sizes: &StepSizes) -> Result<BoundPeak> {
        let dims = self.layout.dims(sizes);
        let dims: Vec<(&str, i64)> = dims.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        let mut kept = vec![(self.layout.logits.as_str(), KeptIn::Device(DeviceId::HOST))];
        kept.extend(self.layout.caches.iter().map(|cache| {
            let to = match self.layout.in_place {
                true => KeptIn::Input(&cache.past),
                false => KeptIn::Device(DeviceId::HOST),
            };
            (cache.present.as_str(), to)
        }));
        self.session.bound_peak(&dims, &kept)
    }

    /// The most requests of a context that fit, up to `most`.
    pub(crate) fn most_requests(&self, context: usize, most: usize) -> Result<usize> {
        self.last_that_fits(most, |requests| (context, requests))
    }

    /// The longest context up to `most` that fits.
    pub(crate) fn largest(&self, most: usize, requests: usize) -> Result<Option<usize>> {
        let largest = self.last_that_fits(most, |context| (context, requests))?;
        Ok(Some(largest).filter(|largest| *largest > 0))
    }

    /// The largest number up to `most` whose context and requests fit; 0 if none does.
    fn last_that_fits(&self, most: usize, of: impl Fn(usize) -> (usize, usize)) -> Result<usize> {
        let (mut least, mut beyond) = (0, most.saturating_add(1));
        while beyond - least > 1 {
            let middle = least + (beyond - least) / 2;
            let (context, requests) = of(middle);
            let chunk = self.chunk.unwrap_or(1).clamp(1, context);
            if self.with_chunk(context, requests, chunk)?.total() <= self.room {
                least = middle;
            } else {
                beyond = middle;
            }
        }
        Ok(least)
    }
}

/// A copy of the logits, and a probability and an id for each token.
pub(crate) fn sampler_bytes(vocabulary: usize) -> usize {
    vocabulary.saturating_mul(4 + 8)
}
