//! Tokenizers of model folders: `tokenizer.json`, by the crate tokenizers.

use ort_core::{Error, ErrorKind, Result, Within, error};
use ort_generate::ModelFolder;
use tokenizers::Tokenizer;

use crate::chat::{ChatTemplate, Message};

/// The file of a tokenizer.
const FILE: &str = "tokenizer.json";

/// The tokenizer of a folder and its chat template.
pub struct TextCodec {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

impl TextCodec {
    /// Reads the tokenizer and the chat template of a folder.
    ///
    /// # Errors
    ///
    /// There is no `tokenizer.json`, or a file is damaged.
    pub fn open(folder: &ModelFolder) -> Result<TextCodec> {
        let path = folder.folder.join(FILE);
        let source = folder.read(FILE)?.ok_or_else(|| {
            Error::new(ErrorKind::NoSuchFile, format!("there is no '{}'", path.display())).help(
                "copy tokenizer.json of the original model into the folder; models with a tokenizer.model \
                 alone get one by transformers: AutoTokenizer.from_pretrained(..).save_pretrained(..)",
            )
        })?;
        let tokenizer = parse(&source).map_err(tokenizer_problem);
        let tokenizer = tokenizer.within(|| format!("'{}'", path.display()))?;
        Ok(TextCodec { tokenizer, template: ChatTemplate::of_folder(folder)? })
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the tokens of a text; with `special`, also those that begin and end one.
    ///
    /// # Errors
    ///
    /// The tokenizer refuses the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.tokenizer.encode_fast(text, special).map_err(tokenizer_problem)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the text of tokens, without special ones.
    ///
    /// # Errors
    ///
    /// The tokenizer refuses the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(tokenizer_problem)
    }

    /// Whether the folder has a chat template.
    pub fn has_template(&self) -> bool {
        self.template.is_some()
    }

    /// Returns the tokens of a conversation, up to the begin of the next answer.
    ///
    /// # Errors
    ///
    /// The folder has no chat template, or the template refuses the messages.
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>> {
        let template = self.template.as_ref().ok_or_else(|| {
            error!(InvalidArgument, "the folder has no chat template")
                .help("it is not a chat model: give a prompt; or copy chat_template.jinja into the folder")
        })?;
        // The template writes the special tokens itself.
        self.encode(&template.render(messages)?, false)
    }
}

fn parse(source: &str) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer: Tokenizer = source.parse()?;
    // Both are settings for batches of training examples.
    tokenizer.with_padding(None).with_truncation(None)?;
    Ok(tokenizer)
}

/// An error of the crate tokenizers.
pub(crate) fn tokenizer_problem(problem: tokenizers::Error) -> Error {
    error!(InvalidArgument, "the tokenizer: {problem}")
        .help("copy tokenizer.json of the original model again")
}
