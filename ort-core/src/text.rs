//! Sanitizing of untrusted text for messages, logs and tables.
//!
//! Names come from model files, and a model may come from anyone. Escape sequences change colours
//! and titles, clear the screen or move the cursor; bidirectional marks reorder a line on the
//! screen. [`shown`] escapes them all and bounds the length.

use std::borrow::Cow;
use std::fmt::Write;

/// The most bytes of a name in a table or a list.
pub const NAME_BYTES: usize = 256;

/// Returns `text` with control characters, bidirectional marks and other invisible characters
/// escaped, cut in the middle if it exceeds `most` bytes.
///
/// ```
/// use ort_core::shown;
/// assert_eq!(shown("conv_1", 64), "conv_1");
/// assert_eq!(shown("a\x1b[2Jb\n", 64), "a\\u{1b}[2Jb\\n");
/// assert_eq!(shown("\u{202e}evil", 64), "\\u{202e}evil");
/// assert_eq!(shown(&"x".repeat(1000), 40), format!("{}[.. 970 bytes ..]{}", "x".repeat(20), "x".repeat(10)));
/// ```
pub fn shown(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        let escaped = escaped(text);
        if escaped.len() <= most {
            return escaped;
        }
    }
    // Keep some of the tail as well, because advice and the innermost cause are at the end.
    let head = text.get(..text.floor_char_boundary(most / 2)).unwrap_or_default();
    let tail = text.len().saturating_sub(most / 4).max(head.len());
    let tail = text.get(text.ceil_char_boundary(tail)..).unwrap_or_default();
    let left_out = text.len() - head.len() - tail.len();
    // Escaping makes a character several bytes long, so each part is bounded again.
    let (head, tail) = (cut(&escaped(head), most / 2), cut(&escaped(tail), most / 4));
    Cow::Owned(format!("{head}[.. {left_out} bytes ..]{tail}"))
}

/// Returns at most `most` bytes from the start of `text`.
fn cut(text: &str, most: usize) -> String {
    text.get(..text.floor_char_boundary(most)).unwrap_or_default().to_string()
}

/// Same as [`shown`] for an owned text, which is returned unchanged if it needs no escape.
pub(crate) fn into_shown(text: String, most: usize) -> String {
    match shown(&text, most) {
        Cow::Borrowed(_) => text,
        Cow::Owned(shown) => shown,
    }
}

fn escaped(text: &str) -> Cow<'_, str> {
    // Fast path: most text is plain ASCII, which one pass over its bytes proves.
    let is_plain = text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) || !text.chars().any(steers);
    if is_plain {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '\n' => shown.push_str("\\n"),
            '\r' => shown.push_str("\\r"),
            '\t' => shown.push_str("\\t"),
            _ if steers(character) => {
                // Writing to a String cannot fail.
                let _ = write!(shown, "{}", character.escape_unicode());
            }
            _ => shown.push(character),
        }
    }
    Cow::Owned(shown)
}

/// Returns whether a character acts on a terminal, or on the display order of a line, rather than
/// being displayed itself.
///
/// ```
/// use ort_core::steers;
/// assert!(steers('\x1b') && steers('\u{9b}') && steers('\u{2066}') && !steers('é') && !steers('中'));
/// ```
pub fn steers(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{ad}' // soft hyphen
                | '\u{61c}' // Arabic letter mark
                | '\u{180e}'
                | '\u{200b}' // zero width space
                | '\u{200e}' | '\u{200f}' // marks of direction
                | '\u{2028}'..='\u{202e}' // separators of lines and paragraphs, embeddings and overrides
                | '\u{2060}'..='\u{206f}' // isolates, invisible operators
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}' // interlinear annotations
                | '\u{e0000}'..='\u{e007f}' // tags
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_the_text_is_what_is_shown_is_bounded_and_steers_nothing() {
        let texts = ["\x1b]0;title\x07", "\u{202e}\u{2066}", "\u{9b}31m", "é\r\n", "\u{e0041}", "plain", ""];
        for text in texts {
            for times in [1, 7, 100_000] {
                for most in [16, 256, 4096] {
                    let shown = shown(&text.repeat(times), most).into_owned();
                    assert!(!shown.chars().any(steers), "{text:?}: {shown:?}");
                    assert!(shown.len() <= most + 40, "{text:?} {times}: {} bytes", shown.len());
                }
            }
        }
    }
}
