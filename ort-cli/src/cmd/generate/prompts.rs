//! Prompts: from files and standard input, and as messages of a chat.

use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::{Context, Result};
use ort_runtime::text::Message;

/// The longest prompt that is read from a file or from standard input.
pub(super) const MOST_PROMPT_BYTES: u64 = 64 << 20;

/// Reads a prompt from a file; `-` is standard input.
pub(super) fn read_prompt(path: &Path) -> Result<String> {
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin()
            .lock()
            .take(MOST_PROMPT_BYTES)
            .read_to_string(&mut text)
            .context("standard input")?;
        return Ok(text);
    }
    let place = || format!("the prompt '{}'", path.display());
    let file = ort_runtime::open_regular(path).with_context(place)?;
    file.take(MOST_PROMPT_BYTES).read_to_string(&mut text).with_context(place)?;
    Ok(text)
}

/// Whether a person types on standard input.
pub(super) fn is_interactive() -> bool {
    std::io::stdin().is_terminal()
}

pub(super) fn message(role: &str, content: &str) -> Message {
    Message { role: role.to_owned(), content: content.to_owned() }
}
