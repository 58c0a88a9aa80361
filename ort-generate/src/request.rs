//! Requests: a prompt with the settings of its answer, and how the answer ends.

use ort_core::{Error, Result, ensure};

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

/// Limits the next token, for example to those of a grammar.
pub trait Constraint: Send {
    /// Makes the logits of tokens that must not follow negative infinity.
    ///
    /// # Errors
    ///
    /// No token may follow, or the constraint is damaged.
    fn mask(&mut self, logits: &mut [f32]) -> Result<()>;

    /// Takes the token that was chosen.
    ///
    /// # Errors
    ///
    /// The token must not follow.
    fn accept(&mut self, token: u32) -> Result<()>;
}

/// Names a request of a [`crate::Scheduler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What happened to a request in a step.
#[derive(Clone, Debug)]
pub enum Event {
    /// It has another token.
    Token {
        /// The request.
        request: RequestId,
        /// The token.
        token: u32,
    },
    /// It is over.
    End {
        /// The request.
        request: RequestId,
        /// Why.
        reason: EndReason,
    },
    /// Its constraint or its sampler failed, and it is over. The others go on.
    Failed {
        /// The request.
        request: RequestId,
        /// The error.
        problem: Error,
    },
}

/// A request while it waits or runs.
pub(crate) struct Text {
    pub(crate) id: RequestId,
    pub(crate) prompt: Vec<u32>,
    pub(crate) answer: Vec<u32>,
    pub(crate) max_tokens: usize,
    pub(crate) ignore_end: bool,
    /// The most tokens that the caches will hold.
    pub(crate) context: usize,
    pub(crate) has_penalty: bool,
    pub(crate) sampler: Sampler,
    pub(crate) constraint: Option<Box<dyn Constraint>>,
    /// Whether it leaves before the next run.
    pub(crate) is_over: bool,
}

impl Text {
    /// The first tokens of prompt and answer.
    pub(crate) fn tokens(&self, count: usize) -> impl Iterator<Item = u32> + '_ {
        self.prompt.iter().chain(&self.answer).copied().take(count)
    }

    pub(crate) fn last(&self) -> u32 {
        self.answer.last().or(self.prompt.last()).copied().unwrap_or(0)
    }
}

/// The context for a prompt and its answer.
pub(crate) fn context_for(longest: Option<usize>, prompt: usize, options: &GenerateOptions) -> Result<usize> {
    // The last token of an answer is not fed.
    let needed = prompt.saturating_add(options.max_tokens.saturating_sub(1));
    let Some(most) = longest else {
        return Ok(options.context.unwrap_or(needed).max(needed));
    };
    ensure!(
        prompt <= most,
        InvalidArgument,
        help = "shorten the prompt",
        "the prompt has {prompt} tokens, the context of the model {most}"
    );
    // An answer ends with the context at the latest.
    Ok(options.context.unwrap_or(needed.min(most)).max(needed.min(most)))
}
