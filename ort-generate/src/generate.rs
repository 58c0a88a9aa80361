//! The generation loop: prompts in chunks, then one token of each text at a time.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use ort_core::{Result, ensure, error};

use crate::decoder::Decoder;
use crate::sampling::{Sampler, Sampling};

/// The settings of a generation.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// The most tokens of an answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The seed of the first text; the others follow it.
    pub seed: u64,
    /// Whether to go on after a token that ends the text.
    pub ignore_end: bool,
    /// The tokens that each text may have, prompt and answer; what the longest one needs if `None`.
    /// A larger number leaves room for the next turn of a conversation.
    pub context: Option<usize>,
}

impl Default for GenerateOptions {
    fn default() -> GenerateOptions {
        GenerateOptions {
            max_tokens: 256,
            sampling: Sampling::default(),
            seed: 0,
            ignore_end: false,
            context: None,
        }
    }
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndReason {
    /// The model ended it.
    EndToken,
    /// It has as many tokens as were asked for.
    MaxTokens,
    /// The caller ended it, for example at a stop string.
    Stopped,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens, without the one that ended the text.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: EndReason,
}

/// The work and time of a generation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// Prompt tokens that were run; those in the caches already are not.
    pub prompt_tokens: usize,
    /// The time until the first new token.
    pub prompt_time: Duration,
    /// New tokens after the first of each text.
    pub new_tokens: usize,
    /// The time for these.
    pub new_time: Duration,
}

/// Called with each new token: the text that it belongs to and the token.
pub type OnToken<'a> = dyn FnMut(usize, u32) -> Result<ControlFlow<()>> + 'a;

/// Generates texts with a decoder.
pub struct Generator {
    decoder: Decoder,
    /// The tokens in the caches, if one text was generated last.
    history: Vec<u32>,
    timing: Timing,
    logits: Vec<f32>,
}

/// A text while it is generated.
struct Text<'a> {
    prompt: &'a [u32],
    answer: Generated,
    sampler: Sampler,
    is_open: bool,
}

impl Text<'_> {
    fn token_at(&self, place: usize) -> Option<u32> {
        let after = place.checked_sub(self.prompt.len());
        after.map_or_else(|| self.prompt.get(place), |after| self.answer.tokens.get(after)).copied()
    }
}

impl Generator {
    /// Creates a generator.
    pub fn new(decoder: Decoder) -> Generator {
        Generator { decoder, history: Vec::new(), timing: Timing::default(), logits: Vec::new() }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The work and time of the last generation.
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// Answers prompts of tokens, all at once in one batch. A prompt that begins with the last text
    /// reuses its caches. Prompts of unequal length run in chunks up to the end of the shortest.
    /// The rest of the longer ones runs a token at a time, beside the answers of the shorter.
    ///
    /// # Errors
    ///
    /// A prompt is empty, a prompt and its answer are longer than the context, or the memory limit
    /// is too small for them. The last two are found before anything is allocated. Errors of
    /// `on_token`.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut OnToken<'_>,
    ) -> Result<Vec<Generated>> {
        let shortest = prompts.iter().map(Vec::len).min().unwrap_or(0);
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        ensure!(
            shortest > 0,
            InvalidArgument,
            help = "give at least one token",
            "{}",
            if prompts.is_empty() { "there is no prompt" } else { "a prompt is empty" }
        );
        let context = self.context_for(longest, options)?;
        let mut texts = Vec::with_capacity(prompts.len());
        for (index, prompt) in prompts.iter().enumerate() {
            let sampler = Sampler::new(options.sampling, options.seed.wrapping_add(index as u64))?;
            let answer = Generated { tokens: Vec::new(), reason: EndReason::MaxTokens };
            texts.push(Text { prompt, answer, sampler, is_open: options.max_tokens > 0 });
        }
        let start = Instant::now();
        self.timing = Timing::default();
        let cached = self.reuse(prompts, context)?;
        self.prefill(&texts, cached..shortest)?;
        while texts.iter().any(|text| text.is_open) {
            self.choose_all(&mut texts, options, on_token)?;
            self.count(&texts, start);
            if texts.iter().any(|text| text.is_open) {
                self.step(&texts)?;
            }
        }
        self.timing.new_time = start.elapsed().saturating_sub(self.timing.prompt_time);
        Ok(texts.into_iter().map(|text| text.answer).collect())
    }

    /// The context for the longest prompt and its answer.
    fn context_for(&self, prompt: usize, options: &GenerateOptions) -> Result<usize> {
        // The last token of an answer is not fed.
        let needed = prompt.saturating_add(options.max_tokens.saturating_sub(1));
        if let Some(most) = self.decoder.longest_context() {
            ensure!(
                prompt <= most,
                InvalidArgument,
                help = "shorten the prompt",
                "the prompt has {prompt} tokens, the context of the model {most}"
            );
            // An answer ends with the context at the latest.
            return Ok(options.context.unwrap_or(needed.min(most)).max(needed.min(most)));
        }
        Ok(options.context.unwrap_or(needed).max(needed))
    }

    /// Makes the decoder ready for prompts, and returns how many of their tokens are in the caches.
    fn reuse(&mut self, prompts: &[Vec<u32>], context: usize) -> Result<usize> {
        let history = std::mem::take(&mut self.history);
        if let ([prompt], Some((most, _))) = (prompts, self.decoder.bounds()) {
            let same = history.iter().zip(prompt).take_while(|(one, other)| one == other).count();
            // The last token runs in any case: its logits are needed.
            let same = same.min(prompt.len().saturating_sub(1));
            if context <= most && self.decoder.truncate(same) {
                self.history = history.into_iter().take(same).collect();
                return Ok(same);
            }
        }
        self.decoder.begin(prompts.len(), context)?;
        Ok(0)
    }

    /// Runs these tokens of all prompts, in chunks.
    fn prefill(&mut self, texts: &[Text<'_>], range: Range<usize>) -> Result<()> {
        let chunk = self.decoder.bounds().map_or(1, |(_, chunk)| chunk);
        let mut place = range.start;
        while place < range.end {
            let end = place.saturating_add(chunk).min(range.end);
            let parts = texts.iter().flat_map(|text| text.prompt.get(place..end).unwrap_or_default());
            let tokens: Vec<u32> = parts.copied().collect();
            self.feed(&tokens, texts.len())?;
            self.timing.prompt_tokens += tokens.len();
            place = end;
        }
        Ok(())
    }

    fn feed(&mut self, tokens: &[u32], texts: usize) -> Result<()> {
        if let Err(problem) = self.decoder.feed(tokens) {
            self.history.clear();
            return Err(problem);
        }
        if texts == 1 {
            self.history.extend(tokens);
        }
        Ok(())
    }

    /// Chooses the next token of each text whose prompt has run.
    fn choose_all(
        &mut self,
        texts: &mut [Text<'_>],
        options: &GenerateOptions,
        on_token: &mut OnToken<'_>,
    ) -> Result<()> {
        let length = self.decoder.length();
        let most = self.decoder.bounds().map_or(0, |(context, _)| context);
        let mut seen = Vec::new();
        for (index, text) in texts.iter_mut().enumerate() {
            if !text.is_open || length < text.prompt.len() {
                continue;
            }
            self.decoder.logits(index, &mut self.logits)?;
            if options.sampling.repetition_penalty != 1.0 {
                seen.clear();
                seen.extend(text.prompt.iter().chain(&text.answer.tokens));
            }
            let token = text.sampler.choose(&mut self.logits, &seen)?;
            if !options.ignore_end && self.decoder.end_tokens().contains(&token) {
                (text.is_open, text.answer.reason) = (false, EndReason::EndToken);
                continue;
            }
            text.answer.tokens.push(token);
            if on_token(index, token)?.is_break() {
                (text.is_open, text.answer.reason) = (false, EndReason::Stopped);
            } else if text.answer.tokens.len() >= options.max_tokens || length >= most {
                text.is_open = false;
            }
        }
        Ok(())
    }

    /// Runs the next token of each text. A text that has ended repeats its last one.
    fn step(&mut self, texts: &[Text<'_>]) -> Result<()> {
        let place = self.decoder.length();
        let mut tokens = Vec::with_capacity(texts.len());
        for text in texts {
            let last = || text.answer.tokens.last().or(text.prompt.last()).copied();
            let token = text.token_at(place).or_else(last);
            tokens.push(token.ok_or_else(|| error!(Fail, "a text has no tokens"))?);
        }
        self.feed(&tokens, texts.len())
    }

    fn count(&mut self, texts: &[Text<'_>], start: Instant) {
        if self.timing.prompt_time.is_zero() {
            self.timing.prompt_time = start.elapsed();
        }
        self.timing.new_tokens = texts.iter().map(|text| text.answer.tokens.len().saturating_sub(1)).sum();
    }
}
