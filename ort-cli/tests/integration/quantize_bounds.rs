//! `ort quantize` within a bound: a size of the file, the memory of a run, or an error.

use std::path::Path;

use ort_runtime::{Tensor, Value};
use serde_json::Value as Json;

use crate::support::*;

const BLOCKS: usize = 6;

/// Random numbers from -0.5 to 0.5.
fn unit(step: usize) -> f32 {
    let mut hash = (step as u32).wrapping_mul(0x9e37_79b1);
    hash = (hash ^ hash >> 15).wrapping_mul(0x85eb_ca77);
    ((hash ^ hash >> 13) >> 8) as f32 / 16_777_216.0 - 0.5
}

fn numbers(count: usize, from: usize, factor: f32) -> Vec<f32> {
    (from..from + count).map(|step| factor * unit(step)).collect()
}

/// Residual blocks of two products. Those in the middle change the outputs most.
fn blocks(folder: &Folder) -> String {
    let (mut nodes, mut weights) = (Vec::new(), Vec::new());
    for block in 0..BLOCKS {
        let name = |kind: &str| format!("{kind}{block}");
        let (up, down, hidden, active, change) = (name("U"), name("D"), name("a"), name("r"), name("c"));
        let before = if block == 0 { "x".to_string() } else { format!("h{}", block - 1) };
        nodes.push(node("MatMul", &[&before, &up], &[&hidden]));
        nodes.push(node("Relu", &[&hidden], &[&active]));
        nodes.push(node("MatMul", &[&active, &down], &[&change]));
        nodes.push(node("Add", &[&before, &change], &[&name("h")]));
        let factor = [0.05, 0.2, 0.9, 0.6, 0.1, 0.02][block];
        weights.push(floats(&up, &[64, 96], &numbers(64 * 96, block * 20_000, 1.0)));
        weights.push(floats(&down, &[96, 64], &numbers(64 * 96, block * 20_000 + 10_000, factor)));
    }
    let output = format!("h{}", BLOCKS - 1);
    let graph = graph(nodes, vec![value("x", 1, &["n", "64"])], vec![open_value(&output, 1)], weights);
    folder.model("blocks.onnx", &model(graph))
}

/// Twenty samples, of which five are held out.
fn samples(folder: &Folder) -> String {
    let path = folder.path("samples.npz");
    let tensor = Tensor::from_slice(&[20, 4, 64], &numbers(20 * 4 * 64, 777_777, 2.0)).unwrap();
    let file = std::fs::File::create(&path).unwrap();
    ort_numpy::write_npz(file, &[("x".to_string(), Value::from(tensor))]).unwrap();
    text(&path)
}

fn quantize(path: &str, out: &str, flags: &[&str]) -> Finished {
    run(&[&["quantize", path, out][..], flags].concat())
}

fn error(report: &Json) -> f64 {
    report["checked"]["relative_error"].as_f64().unwrap()
}

fn length(path: &str) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

#[test]
fn a_budget_is_spent_on_the_weights_that_matter() {
    let folder = Folder::new();
    let (path, samples) = (blocks(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let uniform = |bits: &str| {
        let mode = ["--mode", bits, "--no-protect-last", "--data", &samples, "--json"];
        let report = quantize(&path, &out, &mode).json();
        (length(&out), error(&report))
    };
    let (four, eight) = (uniform("int4"), uniform("int8"));
    let budget = (four.0 + eight.0) / 2;
    let flags = ["--budget", &budget.to_string(), "--data", &samples, "--json"];
    let report = quantize(&path, &out, &flags).json();
    let size = length(&out);
    assert!(size <= budget && size * 100 >= budget * 97, "{size} of {budget}");
    assert_eq!(report["written"]["model_bytes"], size);
    // Half of the bytes between them take away two thirds of the error.
    assert!(error(&report) < four.1 / 3.0 && error(&report) > eight.1, "{four:?} {eight:?} {report}");
    let search = &report["search"];
    let predicted = search["predicted_error"].as_f64().unwrap();
    assert!((predicted / error(&report) - 1.0).abs() < 0.15, "{predicted} {report}");
    assert_eq!((search["bound"].as_str(), search["samples"].as_u64()), (Some("file"), Some(15)));
    let weights = search["weights"].as_array().unwrap();
    assert_eq!(weights.len(), 2 * BLOCKS);
    let share = |row: &Json| row["error_share"].as_f64().unwrap();
    assert!((weights.iter().map(share).sum::<f64>() - 1.0).abs() < 1e-9, "{search}");
    let bits: Vec<_> = weights.iter().map(|weight| weight["bits"].as_u64().unwrap_or(32)).collect();
    assert!(bits[5] > bits[11], "{bits:?}");
    // Rows of the table have the share of their weight, and its bytes.
    for (row, weight) in report["layers"].as_array().unwrap().iter().zip(weights) {
        assert_eq!(share(row), share(weight));
        assert_eq!(weight["nodes"][0], row["node"]);
        let precision = row["precision"].as_str();
        match weight["bits"].as_u64() {
            Some(bits) => {
                assert!(precision.unwrap().starts_with(&format!("int{bits}")), "{row}");
                assert_eq!(row["bytes_after"], weight["bytes"]);
            }
            None => assert!(row["kept"].as_str().unwrap().contains("within the bound"), "{row}"),
        }
    }
    // The file is the same for any number of threads.
    let kept = std::fs::read(&out).unwrap();
    for threads in ["1", "2"] {
        let again = text(&folder.path("again.onnx"));
        let flags = [&flags[..], &["--threads", threads]].concat();
        assert_eq!(quantize(&path, &again, &flags).code, Some(0));
        assert_eq!(std::fs::read(&again).unwrap(), kept, "{threads} threads");
    }
    // Each precision is measured, and the answer is as good.
    let exact = quantize(&path, &out, &[&flags[..], &["--exact-errors"]].concat()).json();
    assert!(error(&exact) < 1.2 * error(&report), "{exact}");
}

#[test]
fn a_bound_holds_in_every_way_to_give_it() {
    let folder = Folder::new();
    let (path, samples) = (blocks(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let whole = length(&path);
    for (budget, flags) in [
        ("80KB", &[][..]),
        ("80KB", &["--data", &samples][..]),
        ("70KB", &["--mode", "int4", "--data", &samples, "--symmetric"][..]),
        ("60KB", &["--mode", "int2", "--method", "hqq", "--block", "64"][..]),
        ("89KB", &["--mode", "int8", "--data", &samples][..]),
        ("70KB", &["--method", "gptq", "--data", &samples][..]),
        ("70KB", &["--bias-correction", "--method", "rtn", "--data", &samples][..]),
        ("70KB", &["--external-data"][..]),
        ("1GB", &["--data", &samples][..]),
    ] {
        let label = format!("{budget} {flags:?}");
        let args = [&["--budget", budget, "--json"][..], flags].concat();
        let report = quantize(&path, &out, &args).json();
        let sizes = &report["written"];
        let bytes = sizes["model_bytes"].as_u64().unwrap() + sizes["data_bytes"].as_u64().unwrap();
        let most = match budget {
            "1GB" => whole,
            _ => budget.trim_end_matches("KB").parse::<u64>().unwrap() * 1000,
        };
        assert!(bytes <= most && bytes * 100 >= most * 93, "{label}: {bytes}");
        let least_bits = if flags.contains(&"int4") {
            4
        } else if flags.contains(&"int8") {
            8
        } else {
            2
        };
        let bits = report["search"]["weights"].as_array().unwrap().iter();
        assert!(bits.clone().all(|weight| weight["bits"].as_u64().unwrap_or(32) >= least_bits), "{label}");
        assert_eq!(run(&["check", &out]).code, Some(0), "{label}");
        if flags.contains(&"gptq") {
            assert!(report["calibration"]["compensated"].as_u64().unwrap() > 0, "{label}: {report}");
        }
        let _ = std::fs::remove_file(format!("{out}.data"));
    }
    // The memory of a run: weights and the peak that the plan has.
    let flags = ["--budget-run", "90KB", "--data", &samples, "--json"];
    let report = quantize(&path, &out, &flags).json();
    let (checked, rounds) = (&report["checked"], report["search"]["rounds"].as_array().unwrap());
    let run_bytes = checked["weights"].as_u64().unwrap() + checked["planned_peak"].as_u64().unwrap();
    assert!(run_bytes <= 90_000 && run_bytes > 86_000, "{report}");
    assert_eq!(rounds.last().unwrap()["run_bytes"], run_bytes);
    let plan = run(&["plan", &out, "--dim", "n=4", "--json"]).json();
    assert_eq!(plan["peak_bytes"], checked["planned_peak"]);
}

#[test]
fn an_error_bound_holds_on_the_written_file() {
    let folder = Folder::new();
    let (path, samples) = (blocks(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let mut last = 0;
    for bound in ["0.2", "0.05", "0.01", "0.002"] {
        let limit: f64 = bound.parse().unwrap();
        let flags = ["--error", bound, "--data", &samples, "--json"];
        let report = quantize(&path, &out, &flags).json();
        assert!(error(&report) <= limit, "{bound}: {report}");
        // What another command measures.
        let compared = run(&["quantize", &path, &out, "--compare", "--data", &samples, "--json"]).json();
        assert!(error(&compared) < 1.3 * limit, "{compared}");
        let size = length(&out);
        assert!(size > last, "{bound}: {size} {last}");
        last = size;
        let rounds = report["search"]["rounds"].as_array().unwrap();
        assert!((1..=6).contains(&rounds.len()), "{rounds:?}");
        // A file that is smaller by less than a float weight fails, or there is none.
        let holds = |round: &&Json| round["holds"].as_bool().unwrap();
        let bytes = |round: &Json| round["file_bytes"].as_u64().unwrap();
        let failed = rounds.iter().filter(|round| !holds(round)).map(bytes).max();
        let is_tight = failed.is_some_and(|failed| failed + 24_576 > size);
        assert!(is_tight || size == report["search"]["least_bytes"], "{bound}: {size} {rounds:?}");
        let smallest = rounds.iter().filter(holds).map(bytes).min();
        assert_eq!(smallest, Some(size), "{bound}: {rounds:?}");
    }
    // A dry run measures as well, and writes nothing.
    let dry = text(&folder.path("dry.onnx"));
    let report =
        quantize(&path, &dry, &["--error", "0.01", "--data", &samples, "--dry-run", "--json"]).json();
    assert!(error(&report) <= 0.01 && report["written"].is_null(), "{report}");
    let budget = quantize(&path, &dry, &["--budget", "80KB", "--data", &samples, "--dry-run"]);
    assert_eq!(budget.code, Some(0), "{}", budget.stderr);
    for word in ["error share", "15 samples predict", "nothing was written"] {
        assert!(budget.stdout.contains(word), "{word}: {}", budget.stdout);
    }
    let blind = quantize(&path, &dry, &["--budget", "80KB", "--dry-run"]);
    assert!(blind.stdout.contains("without --data"), "{}", blind.stdout);
    assert!(!Path::new(&dry).exists());
    assert!(!folder.files().iter().any(|file| file.contains("unfinished")), "{:?}", folder.files());
}

#[test]
fn impossible_bounds_say_what_is_possible() {
    let folder = Folder::new();
    let (path, samples) = (blocks(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let case = |name: &str, flags: &[&str], words: &[&str]| {
        assert_fails(name, &quantize(&path, &out, flags), words);
        let files = folder.files();
        assert!(
            !files.iter().any(|file| file.starts_with("out") || file.contains("unfinished")),
            "{files:?}"
        );
    };
    let least = quantize(&path, &out, &["--budget", "100KB", "--dry-run", "--json"]).json();
    let least = least["search"]["least_bytes"].as_u64().unwrap().to_string();
    let below = (least.parse::<u64>().unwrap() - 1).to_string();
    // The last product has 8 bits, which makes it the largest.
    case("too small", &["--budget", &below], &[&below, &least, "layer 'matmul_c5'", "--budget"]);
    assert_eq!(quantize(&path, &out, &["--budget", &least, "--dry-run"]).code, Some(0));
    case("a run", &["--budget-run", "20KB", "--data", &samples], &["20000", "planned peak", "together"]);
    case(
        "an error",
        &["--error", "0.000001", "--data", &samples],
        &["no quantized model", "differ by", "--block 16"],
    );
    case("excluded", &["--budget", "40KB", "--exclude", "matmul_a2"], &["no model fits", "'U2'", "24576"]);
    case("nothing", &["--budget", "100KB", "--exclude", "op:MatMul"], &["no weight of the model"]);
    let usage = |flags: &[&str], words: &[&str]| assert_wrong_usage(&quantize(&path, &out, flags), words);
    usage(&[], &["--mode"]);
    usage(&["--budget", "lots"], &["lots", "not a size"]);
    usage(&["--budget", "-1"], &["must not be negative"]);
    usage(&["--error", "0", "--data", &samples], &["a share above 0"]);
    usage(&["--error", "nan", "--data", &samples], &["a share above 0"]);
    usage(&["--error", "0.1"], &["--data", "--budget"]);
    usage(&["--budget", "1MB", "--error", "0.1"], &["cannot be used with"]);
    usage(&["--budget", "1MB", "--exact-errors"], &["--exact-errors", "--data"]);
    usage(&["--mode", "int4", "--exact-errors", "--data", &samples], &["--budget"]);
    usage(&["--mode", "dynamic", "--budget", "1MB"], &["no effect"]);
    usage(&["--budget", "1MB", "--data", &samples, "--no-protect-last"], &["--no-protect-last", "no effect"]);
    usage(&["--compare", "--budget", "1MB"], &["cannot be used with"]);
}
