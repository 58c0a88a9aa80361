//! Text streams: pieces of text as tokens arrive, up to a stop string.

use ort_core::Result;
use tokenizers::tokenizer::step_decode_stream;

use crate::codec::{TextCodec, tokenizer_problem};

/// Decodes the tokens of one text. A piece is withheld while it may be the begin of a stop string,
/// or of a character of several tokens.
pub struct TextStream<'a> {
    codec: &'a TextCodec,
    stops: &'a [String],
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
    pending: String,
    is_stopped: bool,
}

impl<'a> TextStream<'a> {
    /// Begins a text that ends before the first of `stops`.
    pub fn new(codec: &'a TextCodec, stops: &'a [String]) -> TextStream<'a> {
        TextStream {
            codec,
            stops,
            ids: Vec::new(),
            prefix: String::new(),
            prefix_index: 0,
            pending: String::new(),
            is_stopped: false,
        }
    }

    /// Whether a stop string was found. Nothing follows it.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Takes the next token and returns the text that is certain now.
    ///
    /// # Errors
    ///
    /// The tokenizer cannot decode the token.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if self.is_stopped {
            return Ok(String::new());
        }
        let piece = step_decode_stream(
            self.codec.tokenizer(),
            vec![token],
            true,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        );
        self.pending.push_str(&piece.map_err(tokenizer_problem)?.unwrap_or_default());
        let found = self.stops.iter().filter(|stop| !stop.is_empty());
        if let Some(place) = found.clone().filter_map(|stop| self.pending.find(stop.as_str())).min() {
            self.is_stopped = true;
            self.pending.truncate(place);
            return Ok(std::mem::take(&mut self.pending));
        }
        let withheld = found.map(|stop| overlap(&self.pending, stop)).max().unwrap_or(0);
        let rest = self.pending.split_off(self.pending.len() - withheld);
        Ok(std::mem::replace(&mut self.pending, rest))
    }

    /// Ends the text and returns what was withheld.
    pub fn finish(mut self) -> String {
        std::mem::take(&mut self.pending)
    }
}

/// The length of the longest end of `text` that `stop` begins with.
fn overlap(text: &str, stop: &str) -> usize {
    let ends = stop.char_indices().map(|(place, _)| place).filter(|place| *place > 0);
    let fits = |length: &usize| stop.get(..*length).is_some_and(|begin| text.ends_with(begin));
    ends.filter(fits).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn the_longest_end_is_withheld() {
        for (text, stop, expected) in [
            ("abc", "cd", 1),
            ("aab", "aabx", 3),
            ("abab", "ababx", 4),
            ("x", "y", 0),
            ("né", "és", 2),
            ("", "a", 0),
        ] {
            assert_eq!(overlap(text, stop), expected, "{text} {stop}");
        }
    }
}
