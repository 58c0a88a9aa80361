//! Model folders: what the configuration files of onnxruntime-genai, optimum and Transformers.js
//! say about a decoder.
//!
//! The graph itself is authoritative for types and shapes. The files add what it lacks: names of
//! caches, the longest context, the tokens that end a text, and sizes that the graph leaves free.

use std::io::Read;
use std::path::{Component, Path, PathBuf};

use ort_core::{ErrorKind, Result, ensure, error};
use serde_json::Value;

/// The largest configuration or tokenizer file that is read. The largest tokenizers have 35 MB.
const MOST_BYTES: u64 = 256 << 20;

/// Whose layout a folder has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FolderFormat {
    /// `genai_config.json` of onnxruntime-genai.
    Genai,
    /// `config.json` of transformers: folders of optimum and Transformers.js.
    Transformers,
}

/// A decoder in a folder, with what its configuration says.
#[derive(Clone, Debug)]
pub struct ModelFolder {
    /// The folder.
    pub folder: PathBuf,
    /// The model file.
    pub model: PathBuf,
    /// The layout.
    pub format: FolderFormat,
    /// The longest text in tokens, if the configuration says it.
    pub context: Option<usize>,
    /// The tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// The elements of a head of keys and values, if the configuration says it.
    pub(crate) head_size: Option<usize>,
    /// The heads of keys and values.
    pub(crate) key_heads: Option<usize>,
    pub(crate) names: ValueNames,
}

/// The names of the graph's inputs and outputs.
#[derive(Clone, Debug)]
pub(crate) struct ValueNames {
    pub(crate) input_ids: String,
    pub(crate) attention_mask: String,
    pub(crate) position_ids: String,
    pub(crate) logits: String,
    /// Pairs of past and present, each with `%d` for the layer.
    pub(crate) caches: Vec<(String, String)>,
}

impl Default for ValueNames {
    fn default() -> ValueNames {
        let pair = |past: &str, present: &str| (past.to_owned(), present.to_owned());
        ValueNames {
            input_ids: "input_ids".to_owned(),
            attention_mask: "attention_mask".to_owned(),
            position_ids: "position_ids".to_owned(),
            logits: "logits".to_owned(),
            caches: vec![
                pair("past_key_values.%d.key", "present.%d.key"),
                pair("past_key_values.%d.value", "present.%d.value"),
                pair("past_key_values.%d.key", "present_key_values.%d.key"),
                pair("past_key_values.%d.value", "present_key_values.%d.value"),
            ],
        }
    }
}

impl ModelFolder {
    /// Opens a folder. `file` chooses a model file in it, if there are several.
    ///
    /// # Errors
    ///
    /// There is no such folder, configuration or model file, or the configuration is of a model
    /// that is not a decoder of text.
    pub fn open(folder: impl AsRef<Path>, file: Option<&Path>) -> Result<ModelFolder> {
        let folder = folder.as_ref();
        ensure!(
            folder.is_dir(),
            NoSuchFile,
            help = "name the folder that holds genai_config.json, or config.json and model.onnx",
            "'{}' is not a folder",
            folder.display()
        );
        let (genai, transformers) = (folder.join("genai_config.json"), folder.join("config.json"));
        if genai.is_file() {
            return ModelFolder::of_genai(folder, &json_of(&genai)?, file)
                .map_err(|problem| problem.within(format!("'{}'", genai.display())));
        }
        ensure!(
            transformers.is_file(),
            NoSuchFile,
            help = "name a folder that onnxruntime-genai, optimum or Transformers.js wrote",
            "'{}' has neither genai_config.json nor config.json",
            folder.display()
        );
        ModelFolder::of_transformers(folder, &json_of(&transformers)?, file)
            .map_err(|problem| problem.within(format!("'{}'", transformers.display())))
    }

    /// Reads a file of the folder as text; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, is too large, or is not UTF-8.
    pub fn read(&self, name: &str) -> Result<Option<String>> {
        let path = self.folder.join(name);
        path.is_file().then(|| text_of(&path)).transpose()
    }

    /// Reads a file of the folder as JSON; `None` if there is no such file.
    ///
    /// # Errors
    ///
    /// As [`Self::read`], or the file is not valid JSON.
    pub fn read_json(&self, name: &str) -> Result<Option<Value>> {
        let path = self.folder.join(name);
        path.is_file().then(|| json_of(&path)).transpose()
    }

    fn of_genai(folder: &Path, config: &Value, file: Option<&Path>) -> Result<ModelFolder> {
        let model = field(config, "model")?;
        for part in ["encoder", "vision", "speech", "embedding"] {
            ensure!(
                model.get(part).is_none(),
                NotImplemented,
                help = "generation runs decoders of text alone",
                "the model has a part '{part}'"
            );
        }
        let decoder = field(model, "decoder")?;
        ensure!(
            decoder.get("pipeline").is_none(),
            NotImplemented,
            help = "build the model as one graph",
            "the decoder is a pipeline of several graphs"
        );
        let text = |value: &Value, name: &str, default: &str| {
            value.get(name).and_then(Value::as_str).unwrap_or(default).to_owned()
        };
        let empty = Value::Null;
        let inputs = decoder.get("inputs").unwrap_or(&empty);
        let outputs = decoder.get("outputs").unwrap_or(&empty);
        let pair = |kind: &str| {
            let past = text(inputs, &format!("past_{kind}_names"), &format!("past_key_values.%d.{kind}"));
            (past, text(outputs, &format!("present_{kind}_names"), &format!("present.%d.{kind}")))
        };
        let names = ValueNames {
            input_ids: text(inputs, "input_ids", "input_ids"),
            attention_mask: text(inputs, "attention_mask", "attention_mask"),
            position_ids: text(inputs, "position_ids", "position_ids"),
            logits: text(outputs, "logits", "logits"),
            caches: vec![pair("key"), pair("value")],
        };
        let named = text(decoder, "filename", "model.onnx");
        Ok(ModelFolder {
            folder: folder.to_owned(),
            model: inside(folder, file.unwrap_or(Path::new(&named)))?,
            format: FolderFormat::Genai,
            context: count(model, "context_length"),
            end_tokens: tokens(model.get("eos_token_id")),
            head_size: count(decoder, "head_size"),
            key_heads: count(decoder, "num_key_value_heads"),
            names,
        })
    }

    fn of_transformers(folder: &Path, config: &Value, file: Option<&Path>) -> Result<ModelFolder> {
        let is_encoder_decoder = config.get("is_encoder_decoder").and_then(Value::as_bool) == Some(true);
        ensure!(
            !is_encoder_decoder,
            NotImplemented,
            help = "generation runs decoders of text alone",
            "the model has an encoder"
        );
        // Models of several modalities keep the numbers of the decoder apart.
        let config = config.get("text_config").unwrap_or(config);
        let first = |names: &[&str]| names.iter().find_map(|name| count(config, name));
        let heads = first(&["num_attention_heads", "n_head"]);
        let hidden = first(&["hidden_size", "n_embd"]);
        let generation = folder.join("generation_config.json");
        let generation = if generation.is_file() { json_of(&generation)? } else { Value::Null };
        let mut end_tokens = tokens(generation.get("eos_token_id"));
        if end_tokens.is_empty() {
            end_tokens = tokens(config.get("eos_token_id"));
        }
        let model = match file {
            Some(file) => inside(folder, file)?,
            None => only_model(folder)?,
        };
        Ok(ModelFolder {
            folder: folder.to_owned(),
            model,
            format: FolderFormat::Transformers,
            context: first(&["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"]),
            end_tokens,
            head_size: first(&["head_dim"])
                .or_else(|| hidden.zip(heads).and_then(|(hidden, heads)| hidden.checked_div(heads))),
            key_heads: first(&["num_key_value_heads", "num_kv_heads"]).or(heads),
            names: ValueNames::default(),
        })
    }
}

/// The model file of a folder without a configuration that names it.
fn only_model(folder: &Path) -> Result<PathBuf> {
    const NAMES: [&str; 4] =
        ["model.onnx", "onnx/model.onnx", "decoder_model_merged.onnx", "onnx/decoder_model_merged.onnx"];
    if let Some(found) = NAMES.iter().map(|name| folder.join(name)).find(|path| path.is_file()) {
        return Ok(found);
    }
    let mut others: Vec<String> = Vec::new();
    for place in ["", "onnx"] {
        let Ok(entries) = std::fs::read_dir(folder.join(place)) else { continue };
        let names = entries.filter_map(|entry| Some(Path::new(place).join(entry.ok()?.file_name())));
        let models = names.filter(|path| path.extension().is_some_and(|ending| ending == "onnx"));
        others.extend(models.map(|path| path.display().to_string()));
    }
    others.sort();
    match others.as_slice() {
        [] => Err(error!(NoSuchFile, "there is no model file").help("add model.onnx, or onnx/model.onnx")),
        [only] => Ok(folder.join(only)),
        _ => Err(error!(NoSuchFile, "there is no model.onnx").help(format!(
            "choose one of the model files, with --model-file on the command line: {}",
            others.join(", ")
        ))),
    }
}

/// A file of the folder. A configuration must not name a file elsewhere.
fn inside(folder: &Path, name: &Path) -> Result<PathBuf> {
    let is_inside = name.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    ensure!(
        is_inside,
        InvalidArgument,
        help = "name a file of the folder",
        "the model file '{}' is not in the folder",
        name.display()
    );
    let path = folder.join(name);
    ensure!(
        path.is_file(),
        NoSuchFile,
        help = "copy the model file into the folder",
        "there is no model file '{}'",
        path.display()
    );
    Ok(path)
}

fn field<'v>(value: &'v Value, name: &str) -> Result<&'v Value> {
    value.get(name).filter(|value| value.is_object()).ok_or_else(|| {
        error!(InvalidArgument, "there is no object '{name}'")
            .help("write the folder again with the builder of onnxruntime-genai")
    })
}

fn count(value: &Value, name: &str) -> Option<usize> {
    value.get(name).and_then(Value::as_u64).and_then(|count| usize::try_from(count).ok()).filter(|n| *n > 0)
}

/// Token ids of a field: none, a number, or a list.
fn tokens(value: Option<&Value>) -> Vec<u32> {
    let one = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(value) => one(value).into_iter().collect(),
        None => Vec::new(),
    }
}

/// Reads a file of bounded length.
fn text_of(path: &Path) -> Result<String> {
    let failed = |problem: std::io::Error| {
        let kind = match problem.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NoSuchFile,
            _ => ErrorKind::InvalidArgument,
        };
        ort_core::Error::new(kind, format!("'{}': {problem}", path.display()))
            .help("check the file and its permissions")
    };
    let file = ort_alloc::open_regular(path).map_err(failed)?;
    let bytes = file.metadata().map_err(failed)?.len();
    ensure!(
        bytes <= MOST_BYTES,
        InvalidArgument,
        help = "it is not a configuration or tokenizer",
        "'{}' has {bytes} bytes, expected at most {MOST_BYTES}",
        path.display()
    );
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

fn json_of(path: &Path) -> Result<Value> {
    serde_json::from_str(&text_of(path)?).map_err(|problem| {
        error!(InvalidArgument, "'{}' is not valid JSON: {problem}", path.display())
            .help("download or write the folder again")
    })
}
