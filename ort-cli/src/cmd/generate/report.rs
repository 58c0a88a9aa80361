//! What a generation took: tokens a second and memory.

use ort_runtime::generate::Generator;
use serde::Serialize;

use crate::args::human_bytes;
use crate::resident;

/// What `--json` prints.
#[derive(Serialize)]
pub(super) struct GenerationReport {
    pub(super) answers: Vec<Answer>,
    prompt_tokens: usize,
    prompt_ms: f64,
    new_tokens: usize,
    new_ms: f64,
    /// The most prompts that ran at once.
    requests: usize,
    /// The most bytes that were allocated at once.
    peak_bytes: usize,
    peak_rss: Option<u64>,
}

/// One answer.
#[derive(Serialize)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) prompt_tokens: usize,
    pub(super) tokens: Vec<u32>,
    pub(super) reason: &'static str,
}

impl GenerationReport {
    /// The numbers of the last generation.
    pub(super) fn new(generator: &Generator) -> GenerationReport {
        let timing = generator.timing();
        GenerationReport {
            answers: Vec::new(),
            prompt_tokens: timing.prompt_tokens,
            prompt_ms: timing.prompt_time.as_secs_f64() * 1e3,
            new_tokens: timing.new_tokens,
            new_ms: timing.new_time.as_secs_f64() * 1e3,
            requests: timing.most_requests,
            peak_bytes: generator.decoder().peak_bytes(),
            peak_rss: resident::measure().peak,
        }
    }

    /// Writes a line to standard error.
    pub(super) fn note(&self) {
        let rate = |tokens: usize, ms: f64| if ms > 0.0 { tokens as f64 * 1e3 / ms } else { 0.0 };
        let resident = self.peak_rss.map_or(String::new(), |bytes| {
            format!(", {} resident at most", human_bytes(usize::try_from(bytes).unwrap_or(usize::MAX)))
        });
        let together = match self.requests {
            0 | 1 => String::new(),
            requests => format!(", at most {requests} prompts at once"),
        };
        let text = format!(
            "prompt: {} tokens, {:.1} tokens/s; answer: {:.1} tokens/s{together}; {} allocated at most{resident}",
            self.prompt_tokens,
            rate(self.prompt_tokens, self.prompt_ms),
            rate(self.new_tokens, self.new_ms),
            human_bytes(self.peak_bytes),
        );
        crate::logging::note(&text);
    }
}
