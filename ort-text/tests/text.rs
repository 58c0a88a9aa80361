//! Texts of model folders: tokens of tokenizers, prompts of transformers, stop strings, and errors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::fs;
use std::path::{Path, PathBuf};

use ort_core::Result;
use ort_generate::ModelFolder;
use ort_text::{ChatTemplate, Message, TextCodec, TextStream};
use serde_json::Value;
use tempfile::TempDir;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ort-generate/tests/data").join(name)
}

/// The texts of other tools.
fn references() -> Value {
    serde_json::from_str(&fs::read_to_string(data("text.json")).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn texts_are_encoded_as_by_tokenizers() -> Result<()> {
    let text = TextCodec::open(&ModelFolder::open(data("llama"), None)?)?;
    for case in references()["encoded"].as_array().unwrap() {
        let given = case["text"].as_str().unwrap();
        assert_eq!(text.encode(given, false)?, ids(&case["plain"]), "{given:?}");
        assert_eq!(text.encode(given, true)?, ids(&case["special"]), "{given:?}");
        let expected = case["decoded"].as_str().unwrap();
        assert_eq!(text.decode(&ids(&case["special"]))?, expected, "{given:?}");
        let mut stream = TextStream::new(&text, &[]);
        let mut pieces = String::new();
        for token in ids(&case["special"]) {
            pieces.push_str(&stream.push(token)?);
        }
        assert_eq!(pieces + &stream.finish(), expected, "{given:?}");
    }
    Ok(())
}

#[test]
fn a_stop_string_ends_the_text_before_it() -> Result<()> {
    let text = TextCodec::open(&ModelFolder::open(data("llama"), None)?)?;
    let given = "Memory is planned before it is used: 512 bytes";
    for (stops, expected) in [
        (vec!["before"], "Memory is planned "),
        (vec!["used: 5", "planned b"], "Memory is "),
        (vec!["nowhere", ""], given),
        (vec!["bytes!"], given),
    ] {
        let stops: Vec<String> = stops.into_iter().map(str::to_owned).collect();
        let mut stream = TextStream::new(&text, &stops);
        let mut pieces = String::new();
        for token in text.encode(given, false)? {
            pieces.push_str(&stream.push(token)?);
            assert!(stops.iter().all(|stop| stop.is_empty() || !pieces.contains(stop.as_str())));
        }
        let is_stopped = stream.is_stopped();
        assert_eq!(pieces + &stream.finish(), expected, "{stops:?}");
        assert_eq!(is_stopped, expected != given, "{stops:?}");
    }
    Ok(())
}

#[test]
fn conversations_are_rendered_as_by_transformers() -> Result<()> {
    for case in references()["chats"].as_array().unwrap() {
        let template = case["template"].as_str().unwrap();
        let message = |message: &Value| Message {
            role: message["role"].as_str().unwrap().to_owned(),
            content: message["content"].as_str().unwrap().to_owned(),
        };
        let messages: Vec<Message> = case["messages"].as_array().unwrap().iter().map(message).collect();
        let text = ChatTemplate::new(template, "<|begin|>", "<|end|>")?.render(&messages)?;
        assert_eq!(text, case["text"].as_str().unwrap(), "{template}");
    }
    Ok(())
}

/// Opens the texts of a copy of the folder `llama` with one file changed; `None` removes it.
fn open_changed(file: &str, change: Option<&dyn Fn(String) -> String>) -> Result<TextCodec> {
    let folder = TempDir::new().unwrap();
    for entry in fs::read_dir(data("llama")).unwrap() {
        let path = entry.unwrap().path();
        let to = folder.path().join(path.file_name().unwrap());
        match change {
            _ if !path.ends_with(file) => drop(fs::copy(&path, to).unwrap()),
            Some(change) => fs::write(to, change(fs::read_to_string(&path).unwrap())).unwrap(),
            None => {}
        }
    }
    TextCodec::open(&ModelFolder::open(folder.path(), None)?)
}

#[test]
fn bad_files_say_what_is_wrong() {
    type Change = Option<&'static dyn Fn(String) -> String>;
    let cases: [(&str, Change, &str); 4] = [
        ("tokenizer.json", None, "tokenizer.json'"),
        ("tokenizer.json", Some(&|text| text[..200].to_owned()), "the tokenizer"),
        ("tokenizer_config.json", Some(&|_| "nonsense".to_owned()), "not valid JSON"),
        ("chat_template.jinja", Some(&|_| "{% for %}".to_owned()), "chat template"),
    ];
    for (file, change, expected) in cases {
        let problem = open_changed(file, change).err().expect(file).to_string();
        assert!(problem.contains(expected), "{file}: {problem}");
    }
}

#[test]
fn a_folder_without_a_template_has_no_conversations() -> Result<()> {
    let text = open_changed("chat_template.jinja", None)?;
    let problem = text.encode_chat(&[]).unwrap_err().to_string();
    assert!(!text.has_template() && problem.contains("no chat template"), "{problem}");
    Ok(())
}
