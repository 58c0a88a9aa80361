//! `ort quantize`: flags that look at the outputs or at the samples before they decide.

use ort_runtime::onnx::proto::{AttributeProto, ModelProto, NodeProto, attribute_proto};
use ort_runtime::{Tensor, Value};
use prost::Message;

use crate::support::*;

/// Numbers that are neither regular nor random.
fn numbers(count: usize, factor: f32) -> Vec<f32> {
    (0..count).map(|step| ((step * 7919 % 10007) as f32 / 10007.0 - 0.5) * factor).collect()
}

/// A convolution with uneven channels, a pointwise one, and two products with biases.
fn chain(folder: &Folder) -> String {
    let nodes = vec![
        node("Conv", &["image", "K", "KB"], &["a"]),
        node("Relu", &["a"], &["b"]),
        node("Conv", &["b", "P"], &["c"]),
        node("GlobalAveragePool", &["c"], &["d"]),
        node("Flatten", &["d"], &["e"]),
        node("Gemm", &["e", "G", "GB"], &["f"]),
        node("Relu", &["f"], &["g"]),
        node("MatMul", &["g", "M"], &["y"]),
    ];
    let mut filters = numbers(16 * 27, 0.7);
    filters.iter_mut().enumerate().for_each(|(place, value)| *value *= [0.1, 1.0, 6.0][place / 27 % 3]);
    let weights = vec![
        floats("K", &[16, 3, 3, 3], &filters),
        floats("KB", &[16], &numbers(16, 1.0)),
        floats("P", &[24, 16, 1, 1], &numbers(24 * 16, 1.0)),
        floats("G", &[24, 64], &numbers(24 * 64, 1.0)),
        floats("GB", &[64], &numbers(64, 1.0)),
        floats("M", &[64, 10], &numbers(640, 1.0)),
    ];
    let inputs = vec![value("image", 1, &["1", "3", "8", "8"])];
    folder.model("chain.onnx", &model(graph(nodes, inputs, vec![open_value("y", 1)], weights)))
}

fn samples(folder: &Folder) -> String {
    let path = folder.path("samples.npz");
    let images = Tensor::from_slice(&[24, 3, 8, 8], &numbers(24 * 192, 4.0)).unwrap();
    let values = [("image".to_string(), Value::from(images))];
    ort_numpy::write_npz(std::fs::File::create(&path).unwrap(), &values).unwrap();
    text(&path)
}

fn files(folder: &Folder) -> Vec<String> {
    let mut files = folder.files();
    files.sort();
    files
}

#[test]
fn an_original_beyond_the_memory_limit_is_not_compared() {
    let folder = Folder::new();
    let weights = vec![floats("W", &[1024, 1024], &numbers(1024 * 1024, 1.0))];
    let product = vec![node("MatMul", &["x", "W"], &["y"])];
    let inputs = vec![value("x", 1, &["1", "1024"])];
    let path = folder.model("wide.onnx", &model(graph(product, inputs, vec![open_value("y", 1)], weights)));
    let out = text(&folder.path("out.onnx"));
    let flags = ["quantize", &path, &out, "--mode", "int4", "--memory-limit", "3MB"];
    let report = run(&[&flags[..], &["--json"]].concat()).json();
    let checked = &report["checked"];
    assert_eq!((&checked["is_compared"], &checked["runs"]), (&false.into(), &1.into()), "{report}");
    assert!(checked["relative_error"].is_null() && checked["planned_peak"].is_number(), "{report}");
    let shown = run(&flags);
    assert!(shown.stdout.contains("too low to run the original"), "{}", shown.stdout);
    let enough = [&flags[..6], &["12MB", "--json"]].concat();
    let report = run(&enough).json();
    assert_eq!(report["checked"]["is_compared"], true, "{report}");
    assert!(report["checked"]["relative_error"].as_f64().unwrap() > 0.0);
}

/// The limit keeps the original from running, so it may have infinities, too.
#[test]
fn infinities_of_a_model_that_is_not_compared_are_refused() {
    let folder = Folder::new();
    let weights = vec![floats("W", &[1024, 1024], &numbers(1024 * 1024, 1000.0))];
    let nodes = vec![node("MatMul", &["x", "W"], &["p"]), node("Exp", &["p"], &["y"])];
    let inputs = vec![value("x", 1, &["1", "1024"])];
    let path = folder.model("exp.onnx", &model(graph(nodes, inputs, vec![open_value("y", 1)], weights)));
    let out = text(&folder.path("out.onnx"));
    let flags = ["quantize", &path, &out, "--mode", "int4", "--memory-limit", "3MB"];
    let words = ["NaN or infinite", "too low to run the original", "raise --memory-limit"];
    assert_fails("not compared", &run(&flags), &words);
    assert_eq!(files(&folder), ["exp.onnx"]);
}

#[test]
fn random_samples_are_reported_and_repeatable() {
    let folder = Folder::new();
    let path = chain(&folder);
    let (out, again) = (text(&folder.path("out.onnx")), text(&folder.path("again.onnx")));
    let flags = ["--mode", "static", "--data", "random", "--samples", "12", "--held-out", "3", "--json"];
    let report = run(&[&["quantize", &path, &out][..], &flags].concat()).json();
    assert_eq!(report["random_samples"], true, "{report}");
    assert_eq!((&report["calibration"]["samples"], &report["checked"]["runs"]), (&9.into(), &3.into()));
    let error = report["checked"]["relative_error"].as_f64().unwrap();
    assert!(error > 0.0 && error < 0.1, "{error}");
    run(&[&["quantize", &path, &again][..], &flags].concat()).json();
    assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&again).unwrap());
    run(&[&["quantize", &path, &again][..], &flags, &["--seed", "5"]].concat()).json();
    assert_ne!(std::fs::read(&out).unwrap(), std::fs::read(&again).unwrap(), "other samples");
    let shown = run(&["quantize", &path, &out, "--mode", "int4", "--data", "random", "--samples", "2"]);
    assert!(shown.stdout.contains("the samples are random"), "{}", shown.stdout);
}

/// The last product has more bits if nothing normalizes its result.
#[test]
fn heads_are_protected() {
    let folder = Folder::new();
    let chain = |last: NodeProto| {
        let nodes = vec![node("MatMul", &["x", "A"], &["a"]), node("MatMul", &["a", "B"], &["b"]), last];
        let weights = vec![
            floats("A", &[128, 128], &numbers(128 * 128, 1.0)),
            floats("B", &[128, 64], &numbers(128 * 64, 1.0)),
            floats("S", &[64], &numbers(64, 1.0)),
        ];
        model(graph(nodes, vec![value("x", 1, &["3", "128"])], vec![open_value("y", 1)], weights))
    };
    let answer = folder.model("answer.onnx", &chain(node("Add", &["b", "S"], &["y"])));
    let normalized = folder.model("normalized.onnx", &chain(node("LayerNormalization", &["b", "S"], &["y"])));
    let (low, high) = ("int4, blocks of 32 with zero points", "int8, blocks of 128 with zero points");
    for (path, flags, last) in [
        (&answer, &[][..], high),
        (&answer, &["--no-protect-last"], low),
        (&normalized, &[], low),
        (&normalized, &["--protect-last"], high),
    ] {
        let flags = [&["--mode", "int4", "--dry-run", "--json"][..], flags].concat();
        let report = run(&[&["quantize", path, "out.onnx"][..], &flags].concat()).json();
        let layers = report["layers"].as_array().unwrap();
        let precisions: Vec<_> = layers.iter().map(|layer| layer["precision"].as_str().unwrap()).collect();
        assert_eq!(precisions, [low, last], "{path} {flags:?}");
    }
}

#[test]
fn decisions_are_reported_and_repeatable() {
    let folder = Folder::new();
    let (path, samples) = (chain(&folder), samples(&folder));
    let (out, again) = (text(&folder.path("out.onnx")), text(&folder.path("again.onnx")));
    let plain = ["--mode", "static", "--smooth", "off", "--data", &samples, "--json"];
    let cases: [(&[&str], &str, u64); 7] = [
        (&["--bias-correction"], "corrected", 2),
        (&["--bias-correction=auto", "--per-tensor"], "corrected", 0),
        (&["--bias-correction", "--format", "qoperator"], "corrected", 2),
        (&["--equalise"], "equalised", 2),
        (&["--equalise", "--per-tensor", "--bias-correction"], "equalised", 2),
        (&["--ranges", "auto"], "samples", 18),
        (&["--ranges", "auto", "--format", "qoperator", "--equalise"], "equalised", 2),
    ];
    for (flags, field, least) in cases {
        let call = |out: &str| {
            let mut all = vec!["quantize", &path, out];
            all.extend(plain);
            all.extend(flags);
            run(&all)
        };
        let report = call(&out).json();
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.05, "{flags:?}: {report}");
        assert!(report["calibration"][field].as_u64().unwrap() >= least, "{flags:?}: {report}");
        if flags.contains(&"auto") {
            let rules = report["calibration"]["rules"].as_object().unwrap();
            assert_eq!(rules.values().map(|count| count.as_u64().unwrap()).sum::<u64>(), 4, "{rules:?}");
        }
        assert_eq!(run(&["check", &out]).code, Some(0), "{flags:?}");
        assert_eq!(call(&again).code, Some(0));
        assert_eq!(std::fs::read(&out).unwrap(), std::fs::read(&again).unwrap(), "{flags:?}");
        // Nothing is left beside the models.
        assert_eq!(files(&folder), ["again.onnx", "chain.onnx", "out.onnx", "samples.npz"], "{flags:?}");
    }
}

#[test]
fn the_ends_of_the_chain_can_be_named() {
    let folder = Folder::new();
    let (path, out) = (chain(&folder), text(&folder.path("out.onnx")));
    for (flag, pattern, expected) in [
        ("--exclude", "first", [false, true, true, true]),
        ("--exclude", "last", [true, true, true, false]),
        ("--only", "last", [false, false, false, true]),
    ] {
        let report = run(&["quantize", &path, &out, "--mode", "dynamic", flag, pattern, "--json"]).json();
        let kept = report["layers"].as_array().unwrap().iter().map(|row| row["kept"].is_null());
        assert_eq!(kept.collect::<Vec<_>>(), expected, "{flag} {pattern}: {report}");
    }
}

/// The command counts quantized weights, so that each one costs a point.
#[cfg(unix)]
#[test]
fn a_score_decides_how_many_layers_stay() {
    let folder = Folder::new();
    let (path, samples) = (chain(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let script = folder.write("score.sh", "grep -ao 'DequantizeLinear_Output' \"$1\" | wc -l | sed s/^/-/\n");
    let command = format!("echo scoring; sh {script}");
    let call = |score: &str, rest: &[&str]| {
        let all = [
            "quantize", &path, &out, "--mode", "static", "--smooth", "off", "--data", &samples, "--score",
            score,
        ];
        run(&[&all[..], &["--json"], rest].concat())
    };
    let report = call(&command, &[]).json();
    let all = report["scores"]["quantized"].as_f64().unwrap();
    assert!(all < -8.0 && report["scores"]["original"] == 0.0, "{report}");
    assert_eq!(report["scores"]["reverted"].as_array().unwrap().len(), 0);
    let mut last = 5;
    for drop in [-all, -all - 1.0, -all / 2.0] {
        let drop_text = drop.to_string();
        let report = call(&command, &["--max-drop", &drop_text]).json();
        let score = report["scores"]["quantized"].as_f64().unwrap();
        assert!(score >= -drop, "{report}");
        let quantized =
            report["layers"].as_array().unwrap().iter().filter(|row| row["kept"].is_null()).count();
        assert!(quantized < last && quantized > 0, "{drop}: {report}");
        last = quantized;
        let written = std::process::Command::new("sh").args([&script, &out]).output().unwrap();
        let found: f64 = String::from_utf8(written.stdout).unwrap().trim().parse().unwrap();
        assert_eq!(found, score, "the score is that of the written file");
    }
    std::fs::remove_file(&out).unwrap();
    let left = files(&folder);
    for (command, rest, words) in [
        (command.as_str(), &["--max-drop", "0"][..], "no quantized model has a score of"),
        ("exit 3; echo", &[], "failed for"),
        ("echo good; true", &[], "is no number: 'good'"),
    ] {
        let finished = call(command, rest);
        assert_fails(command, &finished, &[words]);
        assert_eq!(files(&folder), left, "{command}");
    }
}

#[test]
fn flags_that_do_not_go_together_are_refused() {
    let folder = Folder::new();
    let (path, samples, out) = (chain(&folder), samples(&folder), text(&folder.path("out.onnx")));
    for (flags, words) in [
        (&["--mode", "int4", "--equalise"][..], "--equalise has no effect"),
        (&["--mode", "dynamic", "--bias-correction"], "--bias-correction has no effect"),
        (&["--mode", "fp8", "--ranges", "auto", "--data", &samples], "--ranges auto"),
        (&["--mode", "static", "--data", &samples, "--max-drop", "1"], "--score"),
        (&["--mode", "static", "--data", &samples, "--score", "x", "--max-drop", "-1"], "at least 0"),
        (&["--mode", "int4", "--budget", "1MB", "--score", "x"], "cannot be used with"),
        (&["--mode", "static", "--bias-correction=maybe"], "maybe"),
        (&["--mode", "dynamic", "--data", &samples, "--mask", "image"], "--mask has no effect"),
    ] {
        let finished = run(&[&["quantize", &path, &out][..], flags].concat());
        assert_wrong_usage(&finished, &[words]);
    }
    for (mask, words) in [("imag", "did you mean 'image'?"), ("image", "not of shape [batch, tokens]")] {
        let finished =
            run(&["quantize", &path, &out, "--mode", "static", "--data", &samples, "--mask", mask]);
        assert_fails(mask, &finished, &[words]);
    }
    assert_eq!(files(&folder), ["chain.onnx", "samples.npz"]);
}

/// Of both directions, with and without channels of their own.
#[test]
fn recurrent_layers_have_integer_weights() {
    let folder = Folder::new();
    let out = text(&folder.path("out.onnx"));
    for (direction, directions, layout, flags, kept) in [
        ("forward", 1, 0, &[][..], false),
        ("bidirectional", 2, 0, &[][..], false),
        ("bidirectional", 2, 0, &["--per-tensor"][..], false),
        ("forward", 1, 1, &[][..], true),
    ] {
        let mut lstm = node("LSTM", &["x", "W", "R", "B"], &["y"]);
        lstm.attribute.push(int_attribute("hidden_size", 32));
        if layout == 1 {
            lstm.attribute.push(int_attribute("layout", 1));
        }
        lstm.attribute.push(AttributeProto {
            name: Some("direction".into()),
            s: Some(direction.as_bytes().to_vec().into()),
            r#type: Some(attribute_proto::AttributeType::String as i32),
            ..AttributeProto::default()
        });
        let product = node("MatMul", &["x", "M"], &["z"]);
        let weights = vec![
            floats("W", &[directions, 128, 48], &numbers(directions * 128 * 48, 0.6)),
            floats("R", &[directions, 128, 32], &numbers(directions * 128 * 32, 0.7)),
            floats("B", &[directions, 256], &numbers(directions * 256, 0.3)),
            floats("M", &[48, 48], &numbers(48 * 48, 1.0)),
        ];
        let outputs = vec![open_value("y", 1), open_value("z", 1)];
        let inputs = vec![value("x", 1, &["6", "2", "48"])];
        let path = folder.model("lstm.onnx", &model(graph(vec![lstm, product], inputs, outputs, weights)));
        let report =
            run(&[&["quantize", &path, &out, "--mode", "dynamic", "--json"][..], flags].concat()).json();
        let label = format!("{direction} {layout} {flags:?}: {report}");
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.03, "{label}");
        let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
        let operator = written.node[0].op_type();
        assert_eq!(operator, if kept { "LSTM" } else { "DynamicQuantizeLSTM" }, "{label}");
        if kept {
            let reason = report["layers"][0]["kept"].as_str().unwrap();
            assert!(reason.contains("layout"), "{label}");
            continue;
        }
        let (rows, sizes) = (report["layers"].as_array().unwrap(), std::fs::metadata(&out).unwrap().len());
        assert_eq!(rows.len(), 3, "{label}");
        assert!(sizes * 3 < std::fs::metadata(&path).unwrap().len(), "{label}");
        let shape = |name: &str| {
            let found = written.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
            found.dims.clone()
        };
        let directions = directions as i64;
        assert_eq!(shape("W_quantized"), [directions, 48, 128], "{label}");
        let scales = if flags.is_empty() { vec![directions, 128] } else { vec![directions] };
        assert_eq!(shape("R_scale"), scales, "{label}");
    }
}
