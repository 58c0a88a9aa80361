//! Prompts that are answered at once: a [`Scheduler`] that is run until all of them have ended.

use std::ops::ControlFlow;

use ort_core::{Result, ensure};

use crate::decoder::Decoder;
use crate::request::{Constraint, EndReason, Event, GenerateOptions, RequestId};
use crate::scheduler::{Scheduler, SchedulerOptions, Timing};

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new tokens, without the one that ended the text.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub reason: EndReason,
}

/// Called with each new token: the text that it belongs to and the token.
pub type OnToken<'a> = dyn FnMut(usize, u32) -> Result<ControlFlow<()>> + 'a;

/// Makes the constraint of a text, by its index.
pub type MakeConstraint<'a> = dyn Fn(usize) -> Result<Option<Box<dyn Constraint>>> + 'a;

/// Generates texts with a decoder.
pub struct Generator {
    scheduler: Scheduler,
}

impl Generator {
    /// Creates a generator.
    pub fn new(decoder: Decoder) -> Generator {
        Generator::with_options(decoder, SchedulerOptions::default())
    }

    /// Creates a generator that runs as many requests at once as the options say.
    pub fn with_options(decoder: Decoder, options: SchedulerOptions) -> Generator {
        Generator { scheduler: Scheduler::new(decoder, options) }
    }

    /// The decoder.
    pub fn decoder(&self) -> &Decoder {
        self.scheduler.decoder()
    }

    /// The work and time of the last generation.
    pub fn timing(&self) -> Timing {
        self.scheduler.timing()
    }

    /// Answers prompts of tokens. They run in one batch, as many at once as the memory limit
    /// allows; the others wait. A prompt that begins like an earlier text reuses its caches.
    ///
    /// # Errors
    ///
    /// A prompt is empty, a prompt and its answer are longer than the context, or the memory limit
    /// is too small for one of them. These are found before anything runs. Errors of `on_token`.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        on_token: &mut OnToken<'_>,
    ) -> Result<Vec<Generated>> {
        self.generate_within(prompts, options, &|_| Ok(None), on_token)
    }

    /// Answers prompts with constraints on their answers.
    ///
    /// # Errors
    ///
    /// As [`Self::generate`]. Errors of the constraints; one ends all answers.
    pub fn generate_within(
        &mut self,
        prompts: &[Vec<u32>],
        options: &GenerateOptions,
        constraint: &MakeConstraint<'_>,
        on_token: &mut OnToken<'_>,
    ) -> Result<Vec<Generated>> {
        ensure!(
            !prompts.is_empty(),
            InvalidArgument,
            help = "give at least one prompt",
            "there is no prompt"
        );
        for prompt in prompts {
            self.scheduler.check(prompt, options)?;
        }
        self.scheduler.reset_timing();
        let mut answers = Vec::with_capacity(prompts.len());
        let mut ids = Vec::with_capacity(prompts.len());
        let submitted = prompts.iter().enumerate().try_for_each(|(index, prompt)| {
            let options =
                GenerateOptions { seed: options.seed.wrapping_add(index as u64), ..options.clone() };
            ids.push(self.scheduler.submit(prompt.clone(), &options, constraint(index)?)?);
            answers.push(Generated { tokens: Vec::new(), reason: EndReason::Stopped });
            Ok(())
        });
        let done = submitted.and_then(|()| self.run(&ids, &mut answers, on_token));
        if done.is_err() {
            ids.iter().for_each(|id| self.scheduler.cancel(*id));
        }
        done.map(|()| answers)
    }

    fn run(
        &mut self,
        ids: &[RequestId],
        answers: &mut [Generated],
        on_token: &mut OnToken<'_>,
    ) -> Result<()> {
        // Ids ascend.
        let index_of = |request: RequestId| ids.binary_search(&request).unwrap_or(usize::MAX);
        let mut is_stopped = vec![false; ids.len()];
        while !self.scheduler.is_idle() {
            for event in self.scheduler.step()? {
                match event {
                    Event::Token { request, token } => {
                        let index = index_of(request);
                        let Some(answer) = answers.get_mut(index) else { continue };
                        answer.tokens.push(token);
                        if on_token(index, token)?.is_break() {
                            self.scheduler.cancel(request);
                            is_stopped.get_mut(index).into_iter().for_each(|stopped| *stopped = true);
                        }
                    }
                    Event::End { request, reason } => {
                        let index = index_of(request);
                        // A text that was stopped at its last token counts as stopped.
                        let answer = answers.get_mut(index).filter(|_| is_stopped.get(index) == Some(&false));
                        answer.into_iter().for_each(|answer| answer.reason = reason);
                    }
                    Event::Failed { problem, .. } => return Err(problem),
                }
            }
        }
        Ok(())
    }
}
