//! Generation from folders of other tools: the tokens that onnxruntime-genai and PyTorch generate,
//! memory limits that are kept, and errors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ort_core::{ErrorKind, Result};
use ort_ep_cpu as _;
use ort_generate::{
    ChatTemplate, Decoder, DecoderOptions, EndReason, FolderFormat, GenerateOptions, Generator, Message,
    ModelFolder, Sampler, Sampling, TextCodec, TextStream,
};
use serde_json::Value;
use tempfile::TempDir;

const FOLDERS: [&str; 4] = ["llama", "llama_int4", "qwen2", "gpt2"];

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The prompts of a folder and the tokens that another runtime generates from them.
fn references(name: &str) -> Vec<(Vec<u32>, Vec<u32>)> {
    let all = json(&data(name).join("generated.json"));
    all.as_array().unwrap().iter().map(|case| (ids(&case["prompt"]), ids(&case["tokens"]))).collect()
}

fn open(folder: &Path, options: &DecoderOptions) -> Result<Generator> {
    Ok(Generator::new(Decoder::open(&ModelFolder::open(folder, None)?, options)?))
}

/// Generates as many tokens as the reference has.
fn tokens(generator: &mut Generator, prompts: &[Vec<u32>], count: usize) -> Result<Vec<Vec<u32>>> {
    let options = GenerateOptions { max_tokens: count, ..GenerateOptions::default() };
    let answers = generator.generate(prompts, &options, &mut |_, _| Ok(ControlFlow::Continue(())))?;
    Ok(answers.into_iter().map(|answer| answer.tokens).collect())
}

/// The reference without the token that ends the text.
fn without_end(tokens: &[u32]) -> Vec<u32> {
    tokens.iter().copied().take_while(|token| *token != 1).collect()
}

#[test]
fn tokens_are_those_of_other_runtimes() -> Result<()> {
    for name in FOLDERS {
        for chunk in [None, Some(1), Some(5), Some(32)] {
            let options = DecoderOptions { prefill_chunk: chunk, ..DecoderOptions::default() };
            let mut generator = open(&data(name), &options)?;
            for (prompt, expected) in references(name) {
                let answer = tokens(&mut generator, std::slice::from_ref(&prompt), expected.len())?;
                assert_eq!(answer, [without_end(&expected)], "{name}, chunk {chunk:?}, {prompt:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_batch_gives_the_tokens_of_its_texts() -> Result<()> {
    for name in FOLDERS {
        let (prompts, expected): (Vec<_>, Vec<_>) = references(name).into_iter().unzip();
        let mut generator = open(&data(name), &DecoderOptions::default())?;
        let answers = tokens(&mut generator, &prompts, expected[0].len())?;
        let expected: Vec<_> = expected.iter().map(|tokens| without_end(tokens)).collect();
        assert_eq!(answers, expected, "{name}");
    }
    Ok(())
}

#[test]
fn a_longer_prompt_reuses_the_caches() -> Result<()> {
    for name in FOLDERS {
        let (prompt, expected) = references(name).swap_remove(1);
        let mut generator = open(&data(name), &DecoderOptions::default())?;
        let options = GenerateOptions { max_tokens: 8, context: Some(200), ..GenerateOptions::default() };
        let mut go = |prompt: &[u32]| -> Result<(Vec<u32>, usize)> {
            let answers = generator
                .generate(&[prompt.to_vec()], &options, &mut |_, _| Ok(ControlFlow::Continue(())))?;
            Ok((answers[0].tokens.clone(), generator.timing().prompt_tokens))
        };
        let (first, ran) = go(&prompt)?;
        assert_eq!((first.as_slice(), ran), (&expected[..8], prompt.len()), "{name}");
        let longer: Vec<u32> = prompt.iter().chain(&expected[..12]).copied().collect();
        let (second, ran) = go(&longer)?;
        // Seven of the tokens of the first answer were fed.
        assert_eq!((second.as_slice(), ran), (&expected[12..20], 5), "{name}");
        // Another begin: buffers keep what is the same, concatenated caches are cleared.
        let other: Vec<u32> = prompt[..10].iter().chain(&[300, 301]).copied().collect();
        let (third, ran) = go(&other)?;
        assert_eq!(ran, if name == "gpt2" { 12 } else { 2 }, "{name}");
        let mut fresh = open(&data(name), &DecoderOptions::default())?;
        assert_eq!(third, tokens(&mut fresh, &[other], 8)?[0], "{name}");
    }
    Ok(())
}

#[test]
fn transformers_js_keeps_models_in_a_folder_of_their_own() -> Result<()> {
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("onnx")).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(data("gpt2").join(file), folder.path().join(file)).unwrap();
    }
    for file in ["onnx/model_q4.onnx", "onnx/model_fp16.onnx"] {
        fs::copy(data("gpt2/model.onnx"), folder.path().join(file)).unwrap();
    }
    let problem = ModelFolder::open(folder.path(), None).unwrap_err().to_string();
    assert!(problem.contains("onnx/model_fp16.onnx, onnx/model_q4.onnx"), "{problem}");
    let chosen = ModelFolder::open(folder.path(), Some(Path::new("onnx/model_q4.onnx")))?;
    assert_eq!((chosen.format, chosen.context), (FolderFormat::Transformers, Some(256)));
    fs::copy(data("gpt2/model.onnx"), folder.path().join("onnx/model.onnx")).unwrap();
    let (prompt, expected) = references("gpt2").swap_remove(0);
    let mut generator = open(folder.path(), &DecoderOptions::default())?;
    assert_eq!(tokens(&mut generator, &[prompt], expected.len())?, [without_end(&expected)]);
    Ok(())
}

#[test]
fn logits_are_computed_for_the_last_position_alone() -> Result<()> {
    for name in FOLDERS {
        let decoder = Decoder::open(&ModelFolder::open(data(name), None)?, &DecoderOptions::default())?;
        let outputs = decoder.session().outputs();
        let logits = outputs.iter().find(|output| output.name == "logits").unwrap();
        assert_eq!(logits.ty.shape().unwrap()[1].as_constant(), Some(1), "{name}: {}", logits.ty);
        // Logits of all rows of a chunk would be 160 kB.
        let plan = decoder.plan(128, 1)?;
        assert!(plan.memory.is_exact && plan.memory.chunk == 128, "{name}: {plan:?}");
    }
    Ok(())
}

#[test]
fn a_limit_is_kept_to_or_refused_with_the_least_one() -> Result<()> {
    for name in FOLDERS {
        let folder = ModelFolder::open(data(name), None)?;
        let (prompt, expected) = references(name).swap_remove(2);
        for (step, requests) in [(0, 1), (1, 1), (2, 2), (3, 1), (4, 3), (5, 1)] {
            let limit = (140 + 90 * step) << 10;
            let options = DecoderOptions { memory_limit: Some(limit), ..DecoderOptions::default() };
            let run = |options: &DecoderOptions| -> Result<(Vec<Vec<u32>>, usize)> {
                let mut generator = Generator::new(Decoder::open(&folder, options)?);
                let prompts = vec![prompt.clone(); requests];
                let tokens = tokens(&mut generator, &prompts, expected.len())?;
                Ok((tokens, generator.decoder().peak_bytes()))
            };
            // Loading may name one limit, and the context another; neither is more than needed.
            let mut limit = limit;
            let (answers, peak) = loop {
                let options = DecoderOptions { memory_limit: Some(limit), ..options.clone() };
                match run(&options) {
                    Ok(done) => break done,
                    Err(problem) => {
                        assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{name}: {problem}");
                        let least = problem.shortage().unwrap().sufficient_limit();
                        assert!(least > limit, "{name}: {problem}");
                        limit = least;
                        let below = DecoderOptions { memory_limit: Some(least - 4096), ..options };
                        assert!(run(&below).is_err(), "{name}: {least} is more than needed");
                    }
                }
            };
            assert!(peak <= limit, "{name}: {peak} of {limit}");
            assert!(answers.iter().all(|answer| *answer == without_end(&expected)), "{name}, {limit}");
        }
    }
    Ok(())
}

#[test]
fn the_plan_is_what_a_generation_takes() -> Result<()> {
    for name in FOLDERS {
        let folder = ModelFolder::open(data(name), None)?;
        let options = DecoderOptions { memory_limit: Some(64 << 20), ..DecoderOptions::default() };
        for requests in [1, 3] {
            let mut generator = Generator::new(Decoder::open(&folder, &options)?);
            let plan = generator.decoder().plan(200, requests)?;
            // The longest prompt that the plan allows, in the chunks that it has.
            let prompt: Vec<u32> = (0..200).map(|token| 10 + token % 200).collect();
            tokens(&mut generator, &vec![prompt; requests], 1)?;
            let memory = generator.decoder().session().memory();
            // The sampler counts in the limit, beside the session.
            let measured = memory.activations_peak + plan.memory.sampler;
            assert_eq!(plan.memory.total(), measured, "{name}, {requests}: {plan:?} {memory:?}");
        }
    }
    Ok(())
}

#[test]
fn the_longest_context_is_the_last_that_fits() -> Result<()> {
    for name in FOLDERS {
        let folder = ModelFolder::open(data(name), None)?;
        let whole = Decoder::open(&folder, &DecoderOptions::default())?;
        assert_eq!(whole.plan(1, 1)?.largest, Some(256), "{name}");
        // The smallest of these limits that leaves room for a part of the context.
        let partial = (10..200).find_map(|step| {
            let options = DecoderOptions { memory_limit: Some(step << 13), ..DecoderOptions::default() };
            let decoder = Decoder::open(&folder, &options).ok()?;
            let largest = decoder.plan(1, 1).ok()?.largest?;
            Some((decoder, largest))
        });
        let (decoder, largest) = partial.expect(name);
        assert!((1..256).contains(&largest), "{name}: {largest}");
        assert!(decoder.plan(largest, 1)?.fits() && !decoder.plan(largest + 1, 1)?.fits(), "{name}");
        let problem = decoder.plan(largest + 1, 1)?.refusal().to_string();
        assert!(problem.contains(&format!("at most {largest} tokens")), "{problem}");
    }
    Ok(())
}

#[test]
fn texts_are_encoded_as_by_tokenizers() -> Result<()> {
    let text = TextCodec::open(&ModelFolder::open(data("llama"), None)?)?;
    for case in json(&data("text.json"))["encoded"].as_array().unwrap() {
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
    for case in json(&data("text.json"))["chats"].as_array().unwrap() {
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

#[test]
fn probabilities_are_those_of_transformers() -> Result<()> {
    let sampling = &json(&data("text.json"))["sampling"];
    let numbers = |value: &Value| -> Vec<f32> {
        value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
    };
    for case in sampling["cases"].as_array().unwrap() {
        let parameters = &case["parameters"];
        let number = |name: &str, default: f64| parameters[name].as_f64().unwrap_or(default) as f32;
        let settings = Sampling {
            temperature: number("temperature", 1.0),
            top_k: number("top_k", 0.0) as usize,
            top_p: number("top_p", 1.0),
            min_p: number("min_p", 0.0),
            repetition_penalty: number("repetition_penalty", 1.0),
        };
        let mut sampler = Sampler::new(settings, 3)?;
        let seen = ids(&sampling["seen"]);
        let expected = numbers(&case["probabilities"]);
        let ours = sampler.probabilities(&mut numbers(&sampling["logits"]), &seen)?;
        for (token, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            assert!((ours - expected).abs() < 1e-5, "{settings:?}, token {token}: {ours} {expected}");
        }
        // Draws follow the probabilities: within five standard deviations.
        let draws = 4000;
        let mut counts = vec![0u32; expected.len()];
        for _ in 0..draws {
            counts[sampler.choose(&mut numbers(&sampling["logits"]), &seen)? as usize] += 1;
        }
        for (count, probability) in counts.iter().zip(&expected) {
            let mean = probability * draws as f32;
            let bound = 5.0 * (mean * (1.0 - probability)).sqrt() + 1.0;
            assert!((*count as f32 - mean).abs() <= bound, "{settings:?}: {count} {mean}");
        }
    }
    Ok(())
}

#[test]
fn one_seed_gives_one_text() -> Result<()> {
    let mut texts = Vec::new();
    for seed in [1, 1, 2] {
        let mut generator = open(&data("llama"), &DecoderOptions::default())?;
        let sampling = Sampling { temperature: 1.0, top_k: 40, ..Sampling::default() };
        let options = GenerateOptions { max_tokens: 24, sampling, seed, ..GenerateOptions::default() };
        let prompt = references("llama").swap_remove(0).0;
        let mut streamed = Vec::new();
        let answers = generator.generate(&[prompt], &options, &mut |_, token| {
            streamed.push(token);
            Ok(if streamed.len() == 20 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        assert_eq!(answers[0].tokens, streamed);
        assert!(answers[0].reason != EndReason::MaxTokens);
        texts.push(streamed);
    }
    assert!(texts[0] == texts[1] && texts[0] != texts[2]);
    Ok(())
}

/// A copy of a folder with one file changed; `None` removes it.
fn changed(name: &str, file: &str, change: Option<&dyn Fn(String) -> String>) -> TempDir {
    let folder = TempDir::new().unwrap();
    for entry in fs::read_dir(data(name)).unwrap() {
        let path = entry.unwrap().path();
        let to = folder.path().join(path.file_name().unwrap());
        match change {
            _ if !path.ends_with(file) => drop(fs::copy(&path, to).unwrap()),
            Some(change) => fs::write(to, change(fs::read_to_string(&path).unwrap())).unwrap(),
            None => {}
        }
    }
    folder
}

#[test]
fn bad_folders_say_what_is_wrong() {
    type Change = Option<&'static dyn Fn(String) -> String>;
    let cases: [(&str, &str, Change, &str); 15] = [
        ("llama", "genai_config.json", None, "neither genai_config.json nor config.json"),
        ("llama", "genai_config.json", Some(&|_| "{".to_owned()), "not valid JSON"),
        ("llama", "genai_config.json", Some(&|_| "[]".to_owned()), "no object 'model'"),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace("model.onnx", "../x.onnx")),
            "not in the folder",
        ),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace("model.onnx", "other.onnx")),
            "no model file",
        ),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace(": \"logits\"", ": \"scores\"")),
            "no output",
        ),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace("\"decoder\": {", "\"encoder\": {}, \"decoder\": {")),
            "a part 'encoder'",
        ),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace("past_key_values.%d.key", "past.%d.key")),
            "does not know the input 'past_key_values.0.key'",
        ),
        (
            "llama",
            "genai_config.json",
            Some(&|text| text.replace("head_size", "size")),
            "head size of the cache",
        ),
        ("llama", "model.onnx", None, "no model file"),
        ("llama", "tokenizer.json", None, "tokenizer.json'"),
        ("llama", "tokenizer.json", Some(&|text| text[..200].to_owned()), "the tokenizer"),
        ("llama", "tokenizer_config.json", Some(&|_| "nonsense".to_owned()), "not valid JSON"),
        ("llama", "chat_template.jinja", Some(&|_| "{% for %}".to_owned()), "chat template"),
        (
            "gpt2",
            "config.json",
            Some(&|text| text.replace("{", "{\"is_encoder_decoder\": true,")),
            "has an encoder",
        ),
    ];
    for (name, file, change, expected) in cases {
        let folder = changed(name, file, change);
        let opened = ModelFolder::open(folder.path(), None).and_then(|folder| {
            TextCodec::open(&folder)?;
            Decoder::open(&folder, &DecoderOptions::default()).map(drop)
        });
        let problem = opened.expect_err(file).to_string();
        assert!(problem.contains(expected), "{file}: {problem}");
    }
    let problem = ModelFolder::open("no/such/folder", None).unwrap_err().to_string();
    assert!(problem.contains("not a folder"), "{problem}");
}

#[test]
fn bad_requests_say_what_is_wrong() -> Result<()> {
    let mut generator = open(&data("llama"), &DecoderOptions::default())?;
    let standard = GenerateOptions::default;
    let hot = Sampling { temperature: f32::NAN, ..Sampling::default() };
    for (prompts, options, expected) in [
        (vec![], standard(), "there is no prompt"),
        (vec![vec![]], standard(), "a prompt is empty"),
        (vec![vec![5; 257]], standard(), "has 257 tokens, the context of the model 256"),
        (vec![vec![320]], standard(), "token 320 is not in the vocabulary of 320"),
        (
            vec![vec![5]],
            GenerateOptions { context: Some(300), ..standard() },
            "longer than the model's, which is 256",
        ),
        (vec![vec![5]], GenerateOptions { sampling: hot, ..standard() }, "temperature is NaN"),
    ] {
        let answers = generator.generate(&prompts, &options, &mut |_, _| Ok(ControlFlow::Continue(())));
        let problem = answers.expect_err(expected).to_string();
        assert!(problem.contains(expected), "{problem}");
    }
    // After an error the generator works as before. An answer ends with the context.
    let long = vec![5; 250];
    assert!(tokens(&mut generator, &[long], 100)?[0].len() <= 7);
    let (prompt, expected) = references("llama").swap_remove(0);
    assert_eq!(tokens(&mut generator, &[prompt], 10)?[0], expected[..10]);
    let zero = DecoderOptions { prefill_chunk: Some(0), ..DecoderOptions::default() };
    assert!(open(&data("llama"), &zero).is_err_and(|problem| problem.to_string().contains("chunk is 0")));
    let text =
        TextCodec::open(&ModelFolder::open(changed("llama", "chat_template.jinja", None).path(), None)?)?;
    let problem = text.encode_chat(&[]).unwrap_err().to_string();
    assert!(problem.contains("no chat template"), "{problem}");
    Ok(())
}
