//! The lexer of PTX (NVIDIA, "PTX ISA").

use super::bad;
use crate::Result;

/// A word, a number, a string or a sign.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tok {
    Word(String),
    Num(Num),
    Str,
    Sign(char),
}

/// A literal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Num {
    /// An integer in two's complement.
    Int(u64),
    /// The bits of an f32.
    F32(u32),
    /// The bits of an f64.
    F64(u64),
}

fn number(text: &str) -> Option<Num> {
    let lower = text.to_ascii_lowercase();
    // The bits of an f32 or of an f64 in hexadecimal ("Floating-Point Constants").
    if let Some(hex) = lower.strip_prefix("0f").filter(|h| h.len() == 8) {
        return u32::from_str_radix(hex, 16).ok().map(Num::F32);
    }
    if let Some(hex) = lower.strip_prefix("0d").filter(|h| h.len() == 16) {
        return u64::from_str_radix(hex, 16).ok().map(Num::F64);
    }
    let digits = lower.strip_suffix('u').unwrap_or(&lower);
    let int = if let Some(hex) = digits.strip_prefix("0x") {
        u64::from_str_radix(hex, 16)
    } else if let Some(bits) = digits.strip_prefix("0b") {
        u64::from_str_radix(bits, 2)
    } else if digits.len() > 1 && digits.starts_with('0') && !digits.contains('.') {
        u64::from_str_radix(digits, 8)
    } else {
        digits.parse::<u64>()
    };
    int.ok().map(Num::Int).or_else(|| lower.parse::<f64>().ok().map(|v| Num::F64(v.to_bits())))
}

/// Splits a text into tokens with their lines.
pub(crate) fn lex(text: &str) -> Result<Vec<(Tok, u32)>> {
    let bytes = text.as_bytes();
    let (mut at, mut line, mut out) = (0, 1u32, Vec::new());
    let word = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'_' | b'$' | b'%' | b'.');
    while at < bytes.len() {
        let c = bytes[at];
        match c {
            b'\n' => {
                line += 1;
                at += 1;
            }
            c if c.is_ascii_whitespace() || c == 0 => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                at += bytes[at..].iter().position(|b| *b == b'\n').unwrap_or(bytes.len() - at);
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                // Both bytes before are ASCII, so the slice starts at a character.
                let Some(end) = text[at + 2..].find("*/") else { return bad(line, "a comment without end") };
                line += text[at..at + 2 + end].matches('\n').count() as u32;
                at += end + 4;
            }
            b'"' => {
                let Some(end) = text[at + 1..].find('"') else { return bad(line, "a string without end") };
                at += end + 2;
                out.push((Tok::Str, line));
            }
            c if c.is_ascii_digit() => {
                let start = at;
                while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.') {
                    at += 1;
                }
                match number(&text[start..at]) {
                    Some(value) => out.push((Tok::Num(value), line)),
                    None => return bad(line, format_args!("no number: {}", &text[start..at])),
                }
            }
            c if word(c) => {
                let start = at;
                loop {
                    if at < bytes.len() && word(bytes[at]) {
                        at += 1;
                    // `shared::cta` is one word.
                    } else if bytes.get(at) == Some(&b':') && bytes.get(at + 1) == Some(&b':') {
                        at += 2;
                    } else {
                        break;
                    }
                }
                // `.reg.b32` is two directives.
                let word = &text[start..at];
                match word.strip_prefix('.') {
                    Some(rest) => out.extend(rest.split('.').map(|w| (Tok::Word(format!(".{w}")), line))),
                    None => out.push((Tok::Word(word.to_owned()), line)),
                }
            }
            c if c.is_ascii() => {
                out.push((Tok::Sign(c as char), line));
                at += 1;
            }
            _ => return bad(line, "a byte beyond ASCII"),
        }
    }
    Ok(out)
}
