//! Sampling: from logits to the next token, in the order of transformers' logits processors.

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

use ort_core::{Result, ensure};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits. 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps this many most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities first sum to this; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens of at least this probability relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive logits of earlier tokens, and multiplies negative ones; 1 changes nothing.
    pub repetition_penalty: f32,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl Sampling {
    /// Refuses numbers that no text can be sampled with.
    pub(crate) fn check(&self) -> Result<()> {
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = *self;
        let rules = [
            ("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "0 or more"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1"),
            (
                "repetition_penalty",
                repetition_penalty,
                repetition_penalty.is_finite() && repetition_penalty > 0.0,
                "above 0",
            ),
        ];
        for (name, value, is_valid, expected) in rules {
            ensure!(
                is_valid,
                InvalidArgument,
                help = "leave it out for its default",
                "{name} is {value}, expected {expected}"
            );
        }
        Ok(())
    }
}

/// A token that may come next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Candidate {
    token: u32,
    weight: f32,
}

/// Chooses tokens. One seed always gives the same choices.
pub struct Sampler {
    sampling: Sampling,
    random: Pcg64,
    candidates: Vec<Candidate>,
}

impl Sampler {
    /// Creates a sampler.
    ///
    /// # Errors
    ///
    /// A setting is out of its range.
    pub fn new(sampling: Sampling, seed: u64) -> Result<Sampler> {
        sampling.check()?;
        Ok(Sampler { sampling, random: Pcg64::seed_from_u64(seed), candidates: Vec::new() })
    }

    /// Exchanges the memory for candidates, which the texts of a batch use in turn.
    pub(crate) fn swap_candidates(&mut self, candidates: &mut Vec<Candidate>) {
        std::mem::swap(&mut self.candidates, candidates);
    }

    /// Chooses the next token of a text whose tokens so far are `seen`. Changes the logits.
    ///
    /// # Errors
    ///
    /// No logit is a number, or a constraint allows no token.
    pub fn choose(&mut self, logits: &mut [f32], seen: &[u32]) -> Result<u32> {
        self.penalize(logits, seen);
        if self.sampling.temperature == 0.0 {
            return most_likely(logits);
        }
        most_likely(logits)?;
        self.weigh(logits)?;
        let total: f64 = self.candidates.iter().map(|candidate| f64::from(candidate.weight)).sum();
        let mut left = self.random.random::<f64>() * total;
        for candidate in &self.candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return Ok(candidate.token);
            }
        }
        // Rounding may leave a rest; the last candidate is as good as any.
        most_likely(logits).map(|best| self.candidates.last().map_or(best, |last| last.token))
    }

    /// Returns the probability of each token, as [`Self::choose`] draws from them.
    ///
    /// # Errors
    ///
    /// No logit is a number.
    pub fn probabilities(&mut self, logits: &mut [f32], seen: &[u32]) -> Result<Vec<f32>> {
        self.penalize(logits, seen);
        let mut all = vec![0.0; logits.len()];
        if self.sampling.temperature == 0.0 {
            let best = most_likely(logits)?;
            all.get_mut(best as usize).into_iter().for_each(|place| *place = 1.0);
            return Ok(all);
        }
        self.weigh(logits)?;
        let total: f32 = self.candidates.iter().map(|candidate| candidate.weight).sum();
        for candidate in &self.candidates {
            let place = all.get_mut(candidate.token as usize);
            place.into_iter().for_each(|place| *place = candidate.weight / total);
        }
        Ok(all)
    }

    fn penalize(&self, logits: &mut [f32], seen: &[u32]) {
        let penalty = self.sampling.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        // Each token counts once, however often it was seen.
        let mut seen = seen.to_vec();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
    }

    /// Fills the candidates with weights relative to the most likely token.
    fn weigh(&mut self, logits: &[f32]) -> Result<()> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.sampling;
        let best = most_likely(logits)?;
        let highest = logits.get(best as usize).copied().unwrap_or(0.0);
        self.candidates.clear();
        self.candidates.extend(
            logits
                .iter()
                .zip(0..)
                .filter(|(logit, _)| !logit.is_nan())
                .map(|(logit, token)| Candidate { token, weight: ((logit - highest) / temperature).exp() }),
        );
        let descending =
            |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token));
        if top_k > 0 && top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(top_k - 1, descending);
            self.candidates.truncate(top_k);
        }
        if top_p < 1.0 {
            self.candidates.sort_unstable_by(descending);
            let total: f32 = self.candidates.iter().map(|candidate| candidate.weight).sum();
            let (mut before, mut kept) = (0.0, 0);
            for candidate in &self.candidates {
                if before >= top_p * total {
                    break;
                }
                (before, kept) = (before + candidate.weight, kept + 1);
            }
            self.candidates.truncate(kept.max(1));
        }
        // The most likely token has the weight 1. A masked one has none.
        self.candidates.retain(|candidate| candidate.weight > 0.0 && candidate.weight >= min_p);
        // One order for all ways here, so that a seed gives the same text on any machine.
        self.candidates.sort_unstable_by(descending);
        Ok(())
    }
}

/// The first of the largest logits.
fn most_likely(logits: &[f32]) -> Result<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (token, logit) in (0..).zip(logits) {
        if best.is_none_or(|(_, highest)| *logit > highest) && !logit.is_nan() {
            best = Some((token, *logit));
        }
    }
    match best {
        Some((_, f32::NEG_INFINITY)) => Err(ort_core::error!(RuntimeException, "no token may follow")
            .help("the constraint allows none; let it allow a token that ends the text")),
        Some((token, _)) => Ok(token),
        None => Err(ort_core::error!(RuntimeException, "all logits of the next token are NaN")
            .help("the model overflows; try one in float32 or bfloat16")),
    }
}
