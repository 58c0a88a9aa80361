//! `Tokenizer`: splits texts at separators, into matches of a regular expression, or into
//! characters.
//!
//! Expressions have RE2's leftmost-longest semantics, as in ONNX Runtime: the leftmost position
//! with a match, and the longest match there. The crate `regex` instead takes the first alternative
//! that matches. The classes `\w`, `\d`, `\s` and the word boundary are ASCII.

use std::fmt::Display;

use ort_core::ep::{CompileCx, Executable, KernelDef, OutputsFrom, RunCx};
use ort_core::spec::MICROSOFT;
use ort_core::tensor::Shape;
use ort_core::{Result, ensure, error};
use regex::Regex;
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson;
use regex_automata::{Anchored, Input, MatchKind};

use ort_cpu_kernel::cpu_kernels;
use ort_cpu_threads::interrupt::spend;

cpu_kernels![KernelDef {
    domain: MICROSOFT,
    op: "Tokenizer",
    outputs: OutputsFrom::Kernel,
    make,
    ..KernelDef::BASE
}];

/// The start and end marks that enclose the tokens of a text if the node asks for them.
const MARKS: [&str; 2] = ["\u{2}", "\u{3}"];
/// Maximum bytes of a compiled expression.
const EXPRESSION_BYTES: usize = 10 << 20;

/// How texts are split.
enum Cut {
    Characters,
    /// At matches, one expression after the other.
    Separators(Vec<Longest>),
    Matches(Box<Longest>),
}

/// An expression with leftmost-longest semantics: `leftmost` finds the start, `longest` the end.
struct Longest {
    leftmost: Regex,
    longest: DFA,
}

impl Longest {
    fn new(expression: &str) -> Result<Longest> {
        let ascii = with_ascii_classes(expression);
        let invalid = |problem: &dyn Display| {
            // The message quotes the expression, which may be arbitrarily long.
            let [expression, problem] = [expression.to_string(), problem.to_string()].map(clip);
            error!(InvalidGraph, "the expression '{expression}' is not valid: {problem}")
                .help("write it in the syntax of RE2")
        };
        let leftmost = Regex::new(&ascii).map_err(|problem| invalid(&problem))?;
        let longest = DFA::builder()
            // `All` makes the automaton go on behind a match, which finds the longest one.
            .configure(DFA::config().match_kind(MatchKind::All).skip_cache_capacity_check(true))
            .thompson(thompson::Config::new().nfa_size_limit(Some(EXPRESSION_BYTES)))
            .build(&ascii)
            .map_err(|problem| invalid(&problem))?;
        Ok(Longest { leftmost, longest })
    }

    /// Returns the start and end of the first match from `start` on.
    fn find(&self, cache: &mut Cache, text: &str, start: usize) -> Result<Option<(usize, usize)>> {
        let Some(found) = self.leftmost.find_at(text, start) else { return Ok(None) };
        let from = Input::new(text).range(found.start()..).anchored(Anchored::Yes);
        let longest = self.longest.try_search_fwd(cache, &from);
        let longest =
            longest.map_err(|problem| error!(Fail, "an expression cannot be matched: {problem}"))?;
        // Never shorter than the leftmost match, whatever the automaton finds.
        let end = longest.map_or(found.end(), |longest| longest.offset().max(found.end()));
        Ok(Some((found.start(), end)))
    }
}

/// Truncates a text for a message.
fn clip(text: String) -> String {
    text.chars().take(300).collect()
}

/// Rewrites classes and boundaries to ASCII, as RE2 has them.
fn with_ascii_classes(expression: &str) -> String {
    let mut ascii = String::with_capacity(expression.len());
    let mut characters = expression.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            ascii.push(character);
            continue;
        }
        match characters.next() {
            Some('d') => ascii.push_str("[0-9]"),
            Some('D') => ascii.push_str("[^0-9]"),
            Some('w') => ascii.push_str("[0-9A-Za-z_]"),
            Some('W') => ascii.push_str("[^0-9A-Za-z_]"),
            Some('s') => ascii.push_str(r"[\t\n\f\r ]"),
            Some('S') => ascii.push_str(r"[^\t\n\f\r ]"),
            Some('b') => ascii.push_str(r"(?-u:\b)"),
            Some(other) => ascii.extend(['\\', other]),
            None => ascii.push('\\'),
        }
    }
    ascii
}

struct Tokenizer {
    cut: Cut,
    /// Minimum characters per token (`mincharnum`).
    least: usize,
    pad: String,
    /// Whether the tokens of each text are enclosed in [`MARKS`].
    marks: bool,
}

fn make(cx: &mut CompileCx<'_>) -> Result<Box<dyn Executable>> {
    let attrs = cx.attrs();
    let least = attrs.int("mincharnum")?;
    ensure!(least > 0, InvalidGraph, "mincharnum is {least}, expected 1 or more");
    let cut = match (attrs.find_strings("separators"), attrs.find_string("tokenexp")) {
        (Some([separator]), _) if separator.is_empty() => {
            ensure!(least == 1, InvalidGraph, "mincharnum is {least}, but tokens are single characters");
            Cut::Characters
        }
        (Some(separators @ [_, ..]), _) => {
            let separators = separators.iter().map(|separator| Longest::new(separator));
            Cut::Separators(separators.collect::<Result<_>>()?)
        }
        (_, Some(expression)) if !expression.is_empty() => Cut::Matches(Box::new(Longest::new(expression)?)),
        _ => {
            return Err(error!(InvalidGraph, "a Tokenizer needs separators or tokenexp, and has neither")
                .help("set one of the two attributes"));
        }
    };
    let (pad, marks) = (attrs.string("pad_value")?.to_string(), attrs.int("mark")? != 0);
    Ok(Box::new(Tokenizer { cut, least: usize::try_from(least).unwrap_or(usize::MAX), pad, marks }))
}

impl Executable for Tokenizer {
    fn run(&self, cx: &mut RunCx<'_>) -> Result<()> {
        let input = cx.input(0)?;
        let texts = input.strings()?;
        let longest = texts.iter().map(|text| text.len()).max().unwrap_or(0);
        // Two lists of a text's tokens, each token at least a byte.
        let _tokens = cx.reserve(2usize.saturating_mul(longest).saturating_mul(size_of::<&str>()))?;
        let mut caches = self.caches();
        let mut most = 0;
        for text in texts {
            most = most.max(self.tokens(&mut caches, text)?.len());
        }
        // If no text has a token, there are no marks either.
        let [before, after] = if self.marks && most > 0 { MARKS.map(Some) } else { [None, None] };
        let width = most + before.iter().chain(&after).count();
        let shape: Shape = input.shape().iter().copied().chain([width]).collect();
        // Texts are split again instead of kept, because one text with many tokens widens all rows.
        let mut problem = None;
        let rows = texts.iter().flat_map(|text| {
            let tokens = self.tokens(&mut caches, text);
            let tokens = tokens.unwrap_or_else(|found| {
                problem.get_or_insert(found);
                Vec::new()
            });
            let row = before.into_iter().chain(tokens).chain(after);
            row.chain(std::iter::repeat(self.pad.as_str())).take(width)
        });
        let output = cx.strings(&shape, rows);
        problem.map_or(Ok(()), Err)?;
        cx.set(0, output?)
    }
}

impl Tokenizer {
    fn caches(&self) -> Vec<Cache> {
        match &self.cut {
            Cut::Characters => Vec::new(),
            Cut::Separators(separators) => {
                separators.iter().map(|separator| separator.longest.create_cache()).collect()
            }
            Cut::Matches(expression) => vec![expression.longest.create_cache()],
        }
    }

    fn tokens<'t>(&self, caches: &mut [Cache], text: &'t str) -> Result<Vec<&'t str>> {
        match &self.cut {
            Cut::Characters => {
                spend(32 + 8 * text.len());
                Ok(text.split("").filter(|character| !character.is_empty()).collect())
            }
            Cut::Separators(separators) => {
                let mut parts = vec![text];
                for (separator, cache) in separators.iter().zip(caches) {
                    let mut finer = Vec::with_capacity(parts.len());
                    for part in parts {
                        self.cut_part((separator, cache), part, &mut finer, false)?;
                    }
                    parts = finer;
                }
                Ok(parts)
            }
            Cut::Matches(expression) => {
                let mut tokens = Vec::new();
                for cache in caches.iter_mut().take(1) {
                    self.cut_part((expression, cache), text, &mut tokens, true)?;
                }
                Ok(tokens)
            }
        }
    }

    /// Appends the matches in a text, or the parts between them, if they are long enough. After an
    /// empty match, the search resumes after the next character.
    fn cut_part<'t>(
        &self,
        (expression, cache): (&Longest, &mut Cache),
        text: &'t str,
        tokens: &mut Vec<&'t str>,
        takes_matches: bool,
    ) -> Result<()> {
        let mut add = |token: Option<&'t str>| {
            tokens.extend(token.filter(|token| token.chars().take(self.least).count() >= self.least));
        };
        let mut start = 0;
        while start <= text.len() {
            // The search for the longest match may read to the end of the text, and again for each
            // match.
            spend(32 + text.len() - start);
            let Some((from, to)) = expression.find(cache, text, start)? else { break };
            add(if takes_matches { text.get(from..to) } else { text.get(start..from) });
            let next = text.get(to..).and_then(|rest| rest.chars().next()).map_or(1, char::len_utf8);
            start = if to > from { to } else { to + next };
        }
        if !takes_matches {
            add(text.get(start..));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_those_of_ascii() {
        assert_eq!(with_ascii_classes(r"\w+\\w[\d.]\b\."), r"[0-9A-Za-z_]+\\w[[0-9].](?-u:\b)\.");
    }

    #[test]
    fn the_leftmost_match_is_the_longest() {
        let expression = Longest::new("b|a|ab|abc").unwrap();
        let mut cache = expression.longest.create_cache();
        assert_eq!(expression.find(&mut cache, "xxabcd", 0).unwrap(), Some((2, 5)));
        assert_eq!(expression.find(&mut cache, "xxabcd", 3).unwrap(), Some((3, 4)));
        assert_eq!(expression.find(&mut cache, "xxabcd", 4).unwrap(), None);
    }
}
