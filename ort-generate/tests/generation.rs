//! Generation from folders of other tools: the tokens that onnxruntime-genai and PyTorch generate,
//! memory limits that are kept, and errors.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use ort_core::{ErrorKind, Result};
use ort_ep_cpu as _;
use ort_generate::{
    Constraint, Decoder, DecoderOptions, EndReason, Event, FolderFormat, GenerateOptions, Generator,
    ModelFolder, RequestId, Sampler, Sampling, Scheduler, SchedulerOptions,
};
use serde_json::Value;
use tempfile::TempDir;

const FOLDERS: [&str; 6] = ["llama", "llama_int4", "llama_cache8", "llama_cache4", "qwen2", "gpt2"];

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

/// Numbers that look random, from a seed.
fn noise(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |below| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

/// The prompt of a request, and its settings.
fn random_request(random: &mut impl FnMut(usize) -> usize) -> (Vec<u32>, GenerateOptions) {
    // Few beginnings, so that some have run already.
    let begin = random(4) as u32;
    let length = 1 + random(60);
    let prompt = (0..length as u32).map(|place| match place {
        0..12 => 20 + begin * 50 + place,
        _ => 5 + random(300) as u32,
    });
    let prompt = prompt.collect();
    let temperature = if random(2) == 0 { 0.0 } else { 0.8 };
    let options = GenerateOptions {
        max_tokens: 1 + random(40),
        sampling: Sampling { temperature, repetition_penalty: 1.1, ..Sampling::default() },
        seed: random(1000) as u64,
        ignore_end: random(3) == 0,
        context: None,
    };
    (prompt, options)
}

#[test]
fn requests_in_any_company_give_the_tokens_that_they_give_alone() -> Result<()> {
    for (name, kept_texts, max_requests) in [
        ("llama", 0, None),
        ("llama", 3, Some(5)),
        ("llama_int4", 2, Some(4)),
        ("qwen2", 0, Some(3)),
        ("gpt2", 0, None),
        ("gpt2", 3, Some(6)),
    ] {
        let mut random = noise(7);
        let options = SchedulerOptions { max_requests, kept_texts, ..SchedulerOptions::default() };
        let decoder = Decoder::open(&ModelFolder::open(data(name), None)?, &DecoderOptions::default())?;
        let mut scheduler = Scheduler::new(decoder, options);
        let mut requests = Vec::new();
        let mut answers: HashMap<RequestId, (Vec<u32>, Option<EndReason>)> = HashMap::new();
        while requests.len() < 24 || !scheduler.is_idle() {
            while requests.len() < 24 && random(3) == 0 {
                let (prompt, options) = random_request(&mut random);
                let id = scheduler.submit(prompt.clone(), &options, None)?;
                // Some are canceled after a few tokens.
                let most = if random(5) == 0 { 3 } else { usize::MAX };
                requests.push((id, prompt, options, most));
                answers.insert(id, (Vec::new(), None));
            }
            for event in scheduler.step()? {
                match event {
                    Event::Token { request, token } => {
                        let answer = answers.get_mut(&request).unwrap();
                        assert!(answer.1.is_none(), "a token after the end");
                        answer.0.push(token);
                        let most = requests.iter().find(|(id, ..)| *id == request).unwrap().3;
                        if answer.0.len() == most {
                            scheduler.cancel(request);
                        }
                    }
                    Event::End { request, reason } => answers.get_mut(&request).unwrap().1 = Some(reason),
                    Event::Failed { problem, .. } => return Err(problem),
                }
            }
        }
        let most = scheduler.timing().most_requests;
        assert!(most > 2 && max_requests.is_none_or(|asked| most <= asked), "{name}: {most}");
        for (id, prompt, options, most) in requests {
            let mut alone = open(&data(name), &DecoderOptions::default())?;
            let expected = alone
                .generate(std::slice::from_ref(&prompt), &options, &mut |_, _| Ok(ControlFlow::Continue(())))?
                .swap_remove(0);
            let (tokens, reason) = &answers[&id];
            let count = expected.tokens.len().min(most);
            assert_eq!(*tokens, expected.tokens[..count], "{name}, {prompt:?}, {options:?}");
            assert!(reason.is_none_or(|reason| reason == expected.reason), "{name}: {reason:?}");
        }
    }
    Ok(())
}

#[test]
fn requests_beyond_the_limit_wait_or_are_refused() -> Result<()> {
    for name in FOLDERS {
        let folder = ModelFolder::open(data(name), None)?;
        let (prompt, expected) = references(name).swap_remove(1);
        let expected = without_end(&expected);
        let answer = GenerateOptions { max_tokens: expected.len(), ..GenerateOptions::default() };
        let context = prompt.len() + expected.len();
        // The smallest of these limits that has room for two requests.
        let limits = (8..200).map(|step| step << 12);
        let opened = limits.map(|limit| -> Result<(Decoder, usize)> {
            let options =
                DecoderOptions { prefill_chunk: Some(4), memory_limit: Some(limit), ..Default::default() };
            Ok((Decoder::open(&folder, &options)?, limit))
        });
        let fits_two = |decoder: &Decoder| decoder.most_requests(context, 100).is_ok_and(|most| most == 2);
        let (decoder, limit) = opened.flatten().find(|(decoder, _)| fits_two(decoder)).expect(name);
        let options = SchedulerOptions { max_waiting: Some(6), ..SchedulerOptions::default() };
        let mut scheduler = Scheduler::new(decoder, options);
        for _ in 0..6 {
            scheduler.submit(prompt.clone(), &answer, None)?;
        }
        let problem = scheduler.submit(prompt.clone(), &answer, None).unwrap_err();
        let text = problem.to_string();
        assert_eq!(problem.kind(), ErrorKind::OutOfMemory, "{text}");
        assert!(text.contains("6 wait") && text.contains("2 requests of"), "{text}");
        let mut answers: HashMap<RequestId, Vec<u32>> = HashMap::new();
        while !scheduler.is_idle() {
            for event in scheduler.step()? {
                if let Event::Token { request, token } = event {
                    answers.entry(request).or_default().push(token);
                }
            }
        }
        assert!(answers.len() == 6 && answers.values().all(|tokens| *tokens == expected), "{name}");
        assert_eq!(scheduler.timing().most_requests, 2, "{name}");
        assert!(scheduler.decoder().peak_bytes() <= limit, "{name}");
    }
    Ok(())
}

/// A constraint that allows everything, up to an error.
struct Failing {
    /// Tokens until `accept` fails, or until `mask` allows none.
    left: usize,
    in_accept: bool,
}

impl Constraint for Failing {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        if self.left == 0 && !self.in_accept {
            logits.fill(f32::NEG_INFINITY);
        }
        Ok(())
    }

    fn accept(&mut self, _: u32) -> Result<()> {
        ort_core::ensure!(self.left > 0, Fail, "the grammar ends here");
        self.left -= 1;
        Ok(())
    }
}

#[test]
fn a_constraint_that_fails_ends_its_request_alone() -> Result<()> {
    for name in FOLDERS {
        for (left, in_accept, expected) in [
            (0, true, "the grammar ends here"),
            (0, false, "no token may follow"),
            (3, true, "the grammar ends here"),
            (3, false, "no token may follow"),
        ] {
            let decoder = Decoder::open(&ModelFolder::open(data(name), None)?, &DecoderOptions::default())?;
            let mut scheduler = Scheduler::new(decoder, SchedulerOptions::default());
            let cases = references(name);
            let options = GenerateOptions { max_tokens: cases[0].1.len(), ..GenerateOptions::default() };
            let first = scheduler.submit(cases[0].0.clone(), &options, None)?;
            let failing = Box::new(Failing { left, in_accept });
            let failing = scheduler.submit(cases[1].0.clone(), &options, Some(failing))?;
            let last = scheduler.submit(cases[2].0.clone(), &options, None)?;
            let mut answers: HashMap<RequestId, Vec<u32>> = HashMap::new();
            let mut problems = Vec::new();
            while !scheduler.is_idle() {
                for event in scheduler.step()? {
                    match event {
                        Event::Token { request, token } => answers.entry(request).or_default().push(token),
                        Event::End { request, .. } => assert_ne!(request, failing, "{name}"),
                        Event::Failed { request, problem } => problems.push((request, problem.to_string())),
                    }
                }
            }
            assert!(
                matches!(&problems[..], [(request, text)] if *request == failing && text.contains(expected)),
                "{name}: {problems:?}"
            );
            assert_eq!(answers.get(&failing).map_or(0, Vec::len), left, "{name}");
            for (request, (_, expected)) in [(first, &cases[0]), (last, &cases[2])] {
                assert_eq!(answers[&request], without_end(expected), "{name}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_text_that_is_kept_holds_its_caches_alone() -> Result<()> {
    for name in FOLDERS.into_iter().filter(|name| *name != "gpt2") {
        let mut generator = open(&data(name), &DecoderOptions::default())?;
        // One page of the cache.
        let options = GenerateOptions { max_tokens: 8, context: Some(64), ..GenerateOptions::default() };
        let prompt = references(name).swap_remove(0).0;
        generator.generate(&[prompt], &options, &mut |_, _| Ok(ControlFlow::Continue(())))?;
        let decoder = generator.decoder();
        decoder.session().trim();
        let held = decoder.session().memory().activations;
        assert_eq!(held, decoder.plan(64, 1)?.memory.caches, "{name}");
    }
    Ok(())
}

#[test]
fn a_prompt_shares_the_beginning_of_one_that_runs() -> Result<()> {
    for name in FOLDERS {
        let decoder = Decoder::open(&ModelFolder::open(data(name), None)?, &DecoderOptions::default())?;
        let mut scheduler = Scheduler::new(decoder, SchedulerOptions::default());
        let (prompt, expected) = references(name).swap_remove(1);
        let options = GenerateOptions { max_tokens: 12, ..GenerateOptions::default() };
        let first = scheduler.submit(prompt.clone(), &options, None)?;
        scheduler.step()?;
        assert_eq!(scheduler.timing().prompt_tokens, prompt.len(), "{name}");
        let second = scheduler.submit(prompt.clone(), &options, None)?;
        let mut tokens = Vec::new();
        while !scheduler.is_idle() {
            for event in scheduler.step()? {
                match event {
                    Event::Token { request, token } if request == second => tokens.push(token),
                    _ => {}
                }
            }
        }
        // Only the last token of the second prompt runs.
        assert_eq!(scheduler.timing().prompt_tokens, prompt.len() + 1, "{name}");
        assert_eq!(tokens, expected[..12], "{name}");
        assert!(!scheduler.contains(first) && !scheduler.contains(second));
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
        // Another begin: what is the same stays.
        let other: Vec<u32> = prompt[..10].iter().chain(&[300, 301]).copied().collect();
        let (third, ran) = go(&other)?;
        assert_eq!(ran, 2, "{name}");
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
        let prompt: Vec<u32> = (0..256).map(|token| 10 + token % 200).collect();
        // The longest prompts that the plan allows, in the chunks that it has. Of one text nothing
        // but the prompt runs. Of several, the last prompt runs beside the caches of the others.
        for (requests, context, prompt, chunk) in
            [(1, 200, &prompt[..200], None), (3, 256, &prompt[..240], Some(48))]
        {
            let options = DecoderOptions { prefill_chunk: chunk, ..options.clone() };
            let mut generator = Generator::new(Decoder::open(&folder, &options)?);
            let plan = generator.decoder().plan(context, requests)?;
            // Each prompt begins with another token, so that none has the caches of another.
            let prompt =
                |index: u32| -> Vec<u32> { [5 + index].iter().chain(&prompt[1..]).copied().collect() };
            let prompts: Vec<Vec<u32>> = (0..requests as u32).map(prompt).collect();
            let answers = GenerateOptions {
                max_tokens: context - prompts[0].len() + 1,
                ignore_end: true,
                ..GenerateOptions::default()
            };
            generator.generate(&prompts, &answers, &mut |_, _| Ok(ControlFlow::Continue(())))?;
            let memory = generator.decoder().session().memory();
            // The sampler counts in the limit, beside the session.
            let measured = memory.activations_peak + plan.memory.sampler;
            // Concatenated caches have no pages: they are as long as their texts are by then.
            let slack = if name == "gpt2" && requests > 1 { plan.memory.total() / 10 } else { 0 };
            let planned = plan.memory.total() - slack..=plan.memory.total();
            assert!(planned.contains(&measured), "{name}, {requests}: {measured}, {plan:?} {memory:?}");
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
    let cases: [(&str, &str, Change, &str); 11] = [
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
        (
            "gpt2",
            "config.json",
            Some(&|text| text.replace("{", "{\"is_encoder_decoder\": true,")),
            "has an encoder",
        ),
    ];
    for (name, file, change, expected) in cases {
        let folder = changed(name, file, change);
        let opened = ModelFolder::open(folder.path(), None)
            .and_then(|folder| Decoder::open(&folder, &DecoderOptions::default()).map(drop));
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
    Ok(())
}
