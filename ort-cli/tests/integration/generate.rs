//! `ort generate` and `ort plan FOLDER`: answers, plans, refusals and wrong usage.

use crate::support::*;

/// A folder that the builder of onnxruntime-genai wrote.
fn llama() -> String {
    format!("{}/../ort-generate/tests/data/llama", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_prompt_is_continued() {
    let folder = llama();
    let reference = std::fs::read_to_string(format!("{folder}/generated.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_str(&reference).unwrap();
    let arguments = ["generate", &folder, "--prompt", "The quick", "--max-tokens", "12"];
    let json = run(&[&arguments[..], &["--json"]].concat()).json();
    let answer = &json["answers"][0];
    assert_eq!(answer["tokens"].as_array().unwrap()[..], reference[0]["tokens"].as_array().unwrap()[..12]);
    assert_eq!((&answer["reason"], &answer["prompt_tokens"]), (&"max_tokens".into(), &7.into()));
    let text = answer["text"].as_str().unwrap();
    let streamed = run(&arguments);
    assert_eq!(streamed.stdout, format!("{text}\n"));
    assert!(streamed.stderr.contains("tokens/s") && streamed.stderr.contains("allocated at most"));
    let quiet = run(&[&arguments[..], &["-q"]].concat());
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), (streamed.stdout.as_str(), ""));
    // The text ends before the second half of itself.
    let middle = text.char_indices().nth(text.chars().count() / 2).unwrap().0;
    let stopped = run(&[&arguments[..], &["--stop", &text[middle..], "--json"]].concat()).json();
    assert_eq!(stopped["answers"][0]["text"], text[..middle]);
    assert_eq!(stopped["answers"][0]["reason"], "stop_string");
    // Two prompts are one batch.
    let both = run(&[&arguments[..], &["--prompt", "Memory", "--json"]].concat()).json();
    assert_eq!(both["answers"][0]["tokens"], answer["tokens"]);
    assert_eq!(both["answers"].as_array().unwrap().len(), 2);
}

#[test]
fn many_prompts_run_as_they_fit() {
    let folder = llama();
    let folder_of_prompts = Folder::new();
    let lines: Vec<String> = (0..7).map(|index| format!("The {index} quick")).collect();
    let file = folder_of_prompts.write("prompts.txt", lines.join("\n\n"));
    let all = ["generate", &folder, "--prompts", &file, "--max-tokens", "10", "--json"];
    let json = run(&[&all[..], &["--requests", "3"]].concat()).json();
    assert_eq!((json["answers"].as_array().unwrap().len(), &json["requests"]), (7, &3.into()));
    for (line, answer) in lines.iter().zip(json["answers"].as_array().unwrap()) {
        let alone = run(&["generate", &folder, "--prompt", line, "--max-tokens", "10", "--json"]).json();
        assert_eq!(alone["answers"][0]["tokens"], answer["tokens"], "{line}");
    }
    assert_eq!(run(&all).json()["requests"], 7);
    std::fs::write(&file, "\n").unwrap();
    assert_wrong_usage(&run(&all), &["has no prompts"]);
    assert_wrong_usage(&run(&["generate", &folder, "--prompts", &file, "--prompt", "x"]), &["--prompt"]);
}

#[test]
fn a_chat_answers_each_line() {
    use std::io::Write;
    use std::process::Stdio;
    let mut child = ort()
        .args(["generate", &llama(), "--chat", "--max-tokens", "4", "--system", "Be short."])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Hello\n\nWhy?\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let notes = String::from_utf8(output.stderr).unwrap();
    let rates: Vec<&str> = notes.lines().filter(|line| line.starts_with("prompt: ")).collect();
    assert_eq!(rates.len(), 2, "{notes}");
    let tokens = |line: &str| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap();
    // The second question runs without the conversation before it.
    assert!(tokens(rates[1]) < tokens(rates[0]), "{notes}");
}

#[test]
fn plans_say_what_fits() {
    let folder = llama();
    let plan = ["plan", &folder, "--context", "100", "--requests", "3", "--json"];
    let json = run(&plan).json();
    // Two layers, keys and values, one head of 16 floats, three requests of 100 tokens.
    assert_eq!(json["cache_bytes"], 2 * 2 * 16 * 4 * 3 * 100);
    assert_eq!((&json["fits"], &json["largest_context"]), (&true.into(), &256.into()));
    // The smallest of these limits that leaves room for a part of the context.
    let limits = (10..200).map(|step| (step << 13).to_string());
    let planned =
        limits.map(|limit| (run(&["plan", &folder, "--threads", "1", "--memory-limit", &limit]), limit));
    let mut partial = planned.filter(|(plan, _)| plan.stdout.contains("the longest context"));
    let (small, limit) = partial.next().unwrap();
    assert_fails("plan", &small, &["a context of 256 tokens needs"]);
    let largest = small.stdout.split("fits within").nth(1).and_then(|rest| rest.split(": ").nth(1));
    let largest: usize = largest.unwrap().split(' ').next().unwrap().parse().unwrap();
    let context = largest.to_string();
    let one = ["generate", &folder, "--threads", "1", "--memory-limit", &limit];
    let dry = run(&[&one[..], &["--dry-run", "--context", &context]].concat());
    assert_eq!(dry.code, Some(0), "{}", dry.stderr);
    assert!(dry.stdout.contains(&format!("{largest} tokens")));
    let long = run(&[&one[..], &["--prompt", "x", "--context", "256"]].concat());
    assert_fails("generate", &long, &[&format!("at most {largest} tokens")]);
}

#[test]
fn a_dry_run_plans_the_prompts_that_run_together() {
    let folder = llama();
    let planned = |limit: &str, more: &[&str]| {
        let prompts = ["--prompt", "One", "--prompt", "Two", "--prompt", "Three", "--max-tokens", "100"];
        let all = ["generate", &folder, "--dry-run", "--threads", "1", "--memory-limit", limit];
        run(&[&all[..], &prompts, more].concat())
    };
    let whole = planned("64MiB", &[]);
    assert!(whole.stdout.contains("KV caches, 3 x"), "{}", whole.stdout);
    assert!(planned("64MiB", &["--requests", "2"]).stdout.contains("KV caches, 2 x"));
    // The smallest of these limits that any prompt fits: the others wait for it.
    let limits = (10..200).map(|step| (step << 13).to_string());
    let small = limits.map(|limit| planned(&limit, &[])).find(|dry| dry.code == Some(0)).unwrap();
    assert!(small.stdout.contains("KV caches, 1 x"), "{}", small.stdout);
}

#[test]
fn what_is_wrong_is_said() {
    let folder = llama();
    let model = format!("{folder}/model.onnx");
    for (arguments, words) in [
        (vec!["generate", "no/such/folder", "--prompt", "x"], "is not a folder"),
        (vec!["generate", &model, "--prompt", "x"], "is not a folder"),
        (vec!["generate", &folder, "--prompt-file", "no/such/file"], "no/such/file"),
        (vec!["generate", &folder, "--prompt", "x", "--context", "1000"], "longer than the model's"),
        (vec!["generate", &folder, "--prompt", "x", "--memory-limit", "1KiB"], "needs"),
        (vec!["generate", &folder, "--prompt", "x", "--top-p", "2"], "top_p is 2"),
        (vec!["generate", &folder, "--prompt", "x", "--model-file", "../x.onnx"], "not in the folder"),
    ] {
        assert_fails(&arguments.join(" "), &run(&arguments), &[words]);
    }
    for (arguments, words) in [
        (vec!["plan", &model, "--context", "5"], "--context"),
        (vec!["plan", &folder, "--dim", "x=5"], "--dim"),
        (vec!["generate", &folder, "--prompt", "x", "--prompt-file", "y"], "--prompt"),
        (vec!["generate", &folder, "--system", "x"], "--chat"),
    ] {
        assert_wrong_usage(&run(&arguments), &[words]);
    }
}
