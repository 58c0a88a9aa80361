//! Continuous batching: requests join and leave the running batch at any step.
//!
//! A request that does not fit beside those that run waits. The plan of a request counts its caches
//! up to their full length, so that no request that runs is ever stopped for lack of memory.
//! Prompts run one at a time, a chunk in each step, while the other requests go on. Caches of texts
//! that ended stay as long as nothing else needs their memory: a prompt that begins alike takes
//! them over.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ort_alloc::Reservation;
use ort_core::{ErrorKind, Result, ensure, error};

use crate::batch::{Batch, TextRows};
use crate::decoder::Decoder;
use crate::request::{Constraint, EndReason, Event, GenerateOptions, RequestId, Text, context_for};
use crate::sampling::{Candidate, Sampler};

/// The settings of a [`Scheduler`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerOptions {
    /// The most requests that run at once; as many as the memory limit allows if `None`.
    pub max_requests: Option<usize>,
    /// The most requests that wait. Further ones are refused.
    pub max_waiting: Option<usize>,
    /// The texts whose caches are kept when they end, for prompts that begin alike. The last text
    /// of a batch is kept in any case.
    pub kept_texts: usize,
}

/// The work and time of a generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// Prompt tokens that were run; those that were in caches already are not.
    pub prompt_tokens: usize,
    /// The time for these.
    pub prompt_time: Duration,
    /// New tokens after the first of each text.
    pub new_tokens: usize,
    /// The time for these.
    pub new_time: Duration,
    /// The most requests that one step ran.
    pub most_requests: usize,
}

/// A text whose prompt runs.
struct Prefill {
    text: Text,
    batch: Batch,
    chunk: usize,
}

/// The caches of a text that ended.
struct KeptText {
    tokens: Vec<u32>,
    batch: Batch,
}

/// Where the first tokens of a prompt have run already.
#[derive(Clone, Copy)]
enum PrefixSource {
    Kept(usize),
    Running(usize),
}

/// Runs many requests on one decoder.
pub struct Scheduler {
    decoder: Decoder,
    options: SchedulerOptions,
    waiting: VecDeque<Text>,
    prefill: Option<Prefill>,
    running: Vec<Text>,
    /// The caches of `running`, in the same order.
    batch: Option<Batch>,
    /// The oldest first.
    kept: VecDeque<KeptText>,
    /// Whether the first request that waits does not fit until another one ends.
    is_full: bool,
    next: u64,
    timing: Timing,
    sampler: Option<Reservation>,
    candidates: Vec<Candidate>,
    logits: Vec<f32>,
}

impl Scheduler {
    /// Creates a scheduler without requests.
    pub fn new(decoder: Decoder, options: SchedulerOptions) -> Scheduler {
        Scheduler {
            decoder,
            options,
            waiting: VecDeque::new(),
            prefill: None,
            running: Vec::new(),
            batch: None,
            kept: VecDeque::new(),
            is_full: false,
            next: 0,
            timing: Timing::default(),
            sampler: None,
            candidates: Vec::new(),
            logits: Vec::new(),
        }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The work and time since the last [`Self::reset_timing`].
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Begins to count work and time again.
    pub fn reset_timing(&mut self) {
        self.timing = Timing::default();
    }

    /// Whether no request waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prefill.is_none() && self.running.iter().all(|text| text.is_over)
    }

    /// The requests that run, and those that wait.
    pub fn counts(&self) -> (usize, usize) {
        let running = self.running.iter().filter(|text| !text.is_over).count();
        (running + usize::from(self.prefill.is_some()), self.waiting.len())
    }

    /// Whether a request waits or runs.
    pub fn contains(&self, request: RequestId) -> bool {
        let prefill = self.prefill.iter().map(|prefill| &prefill.text);
        let mut all = self.waiting.iter().chain(prefill).chain(&self.running);
        all.any(|text| text.id == request && !text.is_over)
    }

    /// Checks that a request fits if it runs alone, and returns its context.
    ///
    /// # Errors
    ///
    /// The prompt is empty or has tokens that the model does not have. Prompt and answer are longer
    /// than the context, or do not fit the memory limit; the error has the number that does.
    pub fn check(&self, prompt: &[u32], options: &GenerateOptions) -> Result<usize> {
        ensure!(!prompt.is_empty(), InvalidArgument, help = "give at least one token", "a prompt is empty");
        self.decoder.check_tokens(prompt)?;
        options.sampling.check()?;
        let context = context_for(self.decoder.longest_context(), prompt.len(), options)?;
        let memory = self.decoder.memory_of(context, 1)?;
        if memory.total() > self.decoder.room() {
            return Err(self.decoder.plan(context, 1)?.refusal());
        }
        Ok(context)
    }

    /// Adds a request. It waits until it fits beside the others.
    ///
    /// # Errors
    ///
    /// As [`Self::check`]; or too many requests wait already.
    pub fn submit(
        &mut self,
        prompt: Vec<u32>,
        options: &GenerateOptions,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<RequestId> {
        let context = self.check(&prompt, options)?;
        if let Some(most) = self.options.max_waiting
            && self.waiting.len() >= most
            && !self.is_idle()
        {
            return Err(self.full(context, most));
        }
        if self.sampler.is_none() {
            self.sampler = self.decoder.reserve_sampler()?;
        }
        let id = RequestId(self.next);
        self.next += 1;
        self.waiting.push_back(Text {
            id,
            prompt,
            answer: Vec::new(),
            max_tokens: options.max_tokens,
            ignore_end: options.ignore_end,
            context,
            has_penalty: options.sampling.repetition_penalty != 1.0,
            sampler: Sampler::new(options.sampling, options.seed)?,
            constraint,
            is_over: false,
        });
        Ok(id)
    }

    /// The refusal of a request that not even the queue has room for.
    fn full(&self, context: usize, most: usize) -> ort_core::Error {
        let (running, waiting) = self.counts();
        let asked = self.options.max_requests.unwrap_or(1 << 10);
        let fit = self.decoder.most_requests(context, asked).unwrap_or(0);
        ort_core::Error::new(
            ErrorKind::OutOfMemory,
            format!("{running} requests run and {waiting} wait, of at most {most} that may wait"),
        )
        .help(format!("try again later; {fit} requests of {context} tokens fit at once"))
    }

    /// Ends a request. Its other tokens are not generated. Unknown requests are ignored.
    pub fn cancel(&mut self, request: RequestId) {
        self.waiting.retain(|text| text.id != request);
        if self.prefill.as_ref().is_some_and(|prefill| prefill.text.id == request) {
            self.prefill = None;
        }
        for text in self.running.iter_mut().filter(|text| text.id == request) {
            text.is_over = true;
        }
        self.is_full = false;
    }

    /// Drops the caches of texts that ended.
    pub fn forget(&mut self) {
        self.kept.clear();
        self.is_full = false;
    }

    /// Runs one chunk of a prompt, if there is one, and the next token of all other requests.
    ///
    /// # Errors
    ///
    /// Errors of a run. The requests that ran are over then; those that wait are not. An error of a
    /// sampler or of a constraint is an [`Event::Failed`] of its request.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        let mut events = Vec::new();
        match self.try_step(&mut events) {
            Ok(()) => Ok(events),
            Err(problem) => {
                // A failed run may have written to caches.
                (self.prefill, self.batch, self.is_full) = (None, None, false);
                self.running.clear();
                Err(problem)
            }
        }
    }

    fn try_step(&mut self, events: &mut Vec<Event>) -> Result<()> {
        self.remove_ended()?;
        self.admit()?;
        self.run_chunk(events)?;
        self.run_tokens(events)?;
        self.remove_ended()
    }

    /// Begins the first request that waits, if it fits.
    fn admit(&mut self) -> Result<()> {
        if self.prefill.is_some() || self.is_full {
            return Ok(());
        }
        let Some(text) = self.waiting.pop_front() else { return Ok(()) };
        let requests = self.running.len() + 1;
        let mixes = self.decoder.layout().mixes_lengths;
        let most = if mixes { self.options.max_requests.unwrap_or(usize::MAX).max(1) } else { 1 };
        let context = self.running.iter().map(|text| text.context).fold(text.context, usize::max);
        let memory = self.decoder.memory_of(context, requests)?;
        let room = self.decoder.room();
        if requests > most || memory.total() > room {
            // Alone it fits, because it was checked.
            self.is_full = true;
            self.waiting.push_front(text);
            return Ok(());
        }
        let batch = self.begin(&text, room - memory.total())?;
        self.prefill = Some(Prefill { text, batch, chunk: memory.chunk });
        Ok(())
    }

    /// Makes the batch of one text, with the tokens that have run already. Kept texts leave until
    /// the others fit in `spare` bytes.
    fn begin(&mut self, text: &Text, spare: usize) -> Result<Batch> {
        let found = self.longest_prefix(&text.prompt);
        let mut own = None;
        if let Some((PrefixSource::Kept(index), length)) = found {
            own = self.kept.remove(index).map(|kept| (kept, length));
        }
        let bytes = |batch: &Batch| self.decoder.batcher().kept_bytes(batch);
        let mut held: usize = self.kept.iter().map(|kept| bytes(&kept.batch)).sum();
        let mut gone = 0;
        for kept in &self.kept {
            if held <= spare {
                break;
            }
            held -= bytes(&kept.batch);
            gone += 1;
        }
        self.kept.drain(..gone);
        let batcher = self.decoder.batcher();
        let in_place = self.decoder.layout().in_place;
        match (own, found) {
            (Some((mut kept, length)), _) => {
                // What other prompts may still begin with stays, if there is room.
                let rows = if in_place { batcher.rows_for(length, text.context) } else { length };
                let is_branch = length < kept.tokens.len() / 2 && self.options.kept_texts > 0;
                if is_branch && held.saturating_add(bytes(&kept.batch)) <= spare {
                    let batch = batcher.copy(&mut kept.batch, 0, length, rows)?;
                    self.kept.push_back(kept);
                    return Ok(batch);
                }
                if in_place && kept.batch.rows <= text.context {
                    kept.batch.lengths = vec![length];
                    return Ok(kept.batch);
                }
                if !in_place && length == kept.batch.rows {
                    return Ok(kept.batch);
                }
                batcher.join(vec![kept.batch], &[TextRows { batch: 0, text: 0, length }], rows)
            }
            (None, Some((PrefixSource::Running(index), length))) => match &mut self.batch {
                Some(batch) => {
                    let rows = if in_place { batcher.rows_for(length, text.context) } else { length };
                    batcher.copy(batch, index, length, rows)
                }
                None => batcher.empty(),
            },
            _ => batcher.empty(),
        }
    }

    /// The text that begins with most tokens of a prompt. The last token of the prompt runs in any
    /// case: its logits are needed.
    fn longest_prefix(&self, prompt: &[u32]) -> Option<(PrefixSource, usize)> {
        let most = prompt.len().saturating_sub(1);
        let mut best: Option<(PrefixSource, usize)> = None;
        let mut offer = |source, length: usize| {
            let length = length.min(most);
            if length > best.map_or(0, |(_, best)| best) {
                best = Some((source, length));
            }
        };
        for (index, kept) in self.kept.iter().enumerate() {
            let same = kept.tokens.iter().zip(prompt).take_while(|(one, other)| one == other).count();
            offer(PrefixSource::Kept(index), same);
        }
        let lengths = self.batch.iter().flat_map(|batch| &batch.lengths);
        for (index, (text, length)) in self.running.iter().zip(lengths).enumerate() {
            let same = text.tokens(*length).zip(prompt).take_while(|(one, other)| one == *other).count();
            offer(PrefixSource::Running(index), same);
        }
        best
    }

    /// Runs a chunk of the prompt that is read, and lets its text join the others after the last.
    fn run_chunk(&mut self, events: &mut Vec<Event>) -> Result<()> {
        let Some(Prefill { mut text, batch, chunk }) = self.prefill.take() else { return Ok(()) };
        let start = Instant::now();
        let place = batch.lengths.first().copied().unwrap_or(0);
        let end = place.saturating_add(chunk).min(text.prompt.len());
        let tokens = text.prompt.get(place..end).unwrap_or_default();
        let batch = self.decoder.feed(batch, tokens, text.context)?;
        self.timing.prompt_tokens += tokens.len();
        if end < text.prompt.len() {
            self.prefill = Some(Prefill { text, batch, chunk });
        } else {
            if text.max_tokens == 0 {
                text.is_over = true;
                events.push(Event::End { request: text.id, reason: EndReason::MaxTokens });
            } else {
                self.choose(&mut text, &batch, 0, events)?;
            }
            self.join(text, batch)?;
        }
        self.timing.prompt_time += start.elapsed();
        Ok(())
    }

    fn join(&mut self, text: Text, batch: Batch) -> Result<()> {
        let Some(others) = self.batch.take() else {
            (self.running, self.batch) = (vec![text], Some(batch));
            return Ok(());
        };
        if text.is_over {
            self.batch = Some(others);
            return Ok(());
        }
        self.running.push(text);
        let rows_of = |index: usize, batch: &Batch| -> Vec<TextRows> {
            let texts = batch.lengths.iter().enumerate();
            texts.map(|(text, length)| TextRows { batch: index, text, length: *length }).collect()
        };
        let mut texts = rows_of(0, &others);
        texts.extend(rows_of(1, &batch));
        let rows = self.rows_for(&texts);
        self.batch = Some(self.decoder.batcher().join(vec![others, batch], &texts, rows)?);
        Ok(())
    }

    fn rows_for(&self, texts: &[TextRows]) -> usize {
        let longest = texts.iter().map(|text| text.length).max().unwrap_or(0);
        self.decoder.batcher().rows_for(longest, self.context())
    }

    /// The longest context of the requests that run.
    fn context(&self) -> usize {
        self.running.iter().map(|text| text.context).max().unwrap_or(0)
    }

    /// Runs the next token of all texts.
    fn run_tokens(&mut self, events: &mut Vec<Event>) -> Result<()> {
        // A text whose prompt has just ended joined with its first token; the next one is here.
        self.remove_ended()?;
        let Some(batch) = self.batch.take() else { return Ok(()) };
        let start = Instant::now();
        let tokens: Vec<u32> = self.running.iter().map(Text::last).collect();
        let batch = self.decoder.feed(batch, &tokens, self.context())?;
        let mut running = std::mem::take(&mut self.running);
        for (index, text) in running.iter_mut().enumerate() {
            self.choose(text, &batch, index, events)?;
        }
        self.timing.most_requests = self.timing.most_requests.max(running.len());
        self.timing.new_tokens += running.len();
        self.timing.new_time += start.elapsed();
        (self.running, self.batch) = (running, Some(batch));
        Ok(())
    }

    /// Chooses the next token of a text.
    fn choose(
        &mut self,
        text: &mut Text,
        batch: &Batch,
        index: usize,
        events: &mut Vec<Event>,
    ) -> Result<()> {
        self.decoder.logits(batch, index, &mut self.logits)?;
        let request = text.id;
        let end = match self.next_token(text) {
            Ok(Some(token)) => {
                text.answer.push(token);
                events.push(Event::Token { request, token });
                let fed = batch.lengths.get(index).copied().unwrap_or(0);
                let is_full = text.answer.len() >= text.max_tokens || fed >= text.context;
                is_full.then_some(Event::End { request, reason: EndReason::MaxTokens })
            }
            Ok(None) => Some(Event::End { request, reason: EndReason::EndToken }),
            Err(problem) => Some(Event::Failed { request, problem }),
        };
        text.is_over |= end.is_some();
        events.extend(end);
        Ok(())
    }

    /// The token that the constraint and the sampler of a text choose from its logits; `None` if it
    /// ends the text.
    fn next_token(&mut self, text: &mut Text) -> Result<Option<u32>> {
        if let Some(constraint) = &mut text.constraint {
            constraint.mask(&mut self.logits)?;
        }
        let seen: Vec<u32> = if text.has_penalty { text.tokens(usize::MAX).collect() } else { Vec::new() };
        text.sampler.swap_candidates(&mut self.candidates);
        let token = text.sampler.choose(&mut self.logits, &seen);
        text.sampler.swap_candidates(&mut self.candidates);
        let token = token?;
        if !text.ignore_end && self.decoder.end_tokens().contains(&token) {
            return Ok(None);
        }
        if let Some(constraint) = &mut text.constraint {
            constraint.accept(token)?;
        }
        Ok(Some(token))
    }

    /// Removes the texts that are over from the batch, and keeps their caches if there is room.
    fn remove_ended(&mut self) -> Result<()> {
        if !self.running.iter().any(|text| text.is_over) {
            return Ok(());
        }
        self.is_full = false;
        let Some(mut batch) = self.batch.take() else {
            return Err(error!(Fail, "texts run without caches"));
        };
        let mut texts = Vec::new();
        let (mut left, mut ended) = (Vec::new(), Vec::new());
        for (index, (text, length)) in self.running.drain(..).zip(&batch.lengths).enumerate() {
            if text.is_over {
                ended.push((index, text.tokens(*length).collect::<Vec<u32>>()));
            } else {
                texts.push(TextRows { batch: 0, text: index, length: *length });
                left.push(text);
            }
        }
        self.running = left;
        if let ([], [(_, tokens)]) = (texts.as_slice(), ended.as_mut_slice()) {
            let tokens = std::mem::take(tokens);
            self.decoder.batcher().strip(&mut batch)?;
            self.keep(KeptText { tokens, batch });
            return Ok(());
        }
        for (index, tokens) in ended {
            if !self.has_room_to_keep(&batch, tokens.len())? {
                continue;
            }
            // Without memory for it, a text is not kept.
            if let Ok(copy) = self.decoder.batcher().copy(&mut batch, index, tokens.len(), tokens.len()) {
                self.keep(KeptText { tokens, batch: copy });
            }
        }
        if !texts.is_empty() {
            let rows = self.rows_for(&texts);
            self.batch = Some(self.decoder.batcher().join(vec![batch], &texts, rows)?);
        }
        Ok(())
    }

    fn keep(&mut self, text: KeptText) {
        self.kept.push_back(text);
        while self.kept.len() > self.options.kept_texts.max(1) {
            self.kept.pop_front();
        }
    }

    /// Whether the caches of a text of a batch may stay beside all requests, at their longest.
    fn has_room_to_keep(&self, batch: &Batch, length: usize) -> Result<bool> {
        if self.options.kept_texts == 0 {
            return Ok(false);
        }
        let prefill = self.prefill.iter().map(|prefill| prefill.text.context);
        let context = prefill.chain([self.context(), batch.rows, length, 1]).max().unwrap_or(1);
        let requests = batch.lengths.len() + usize::from(self.prefill.is_some());
        let planned = self.decoder.memory_of(context, requests)?.total();
        let batcher = self.decoder.batcher();
        let kept = self.kept.iter().map(|kept| batcher.kept_bytes(&kept.batch));
        let kept = kept.fold(self.decoder.layout().cache_bytes(1, length), usize::saturating_add);
        Ok(planned.saturating_add(kept) <= self.decoder.room())
    }
}
