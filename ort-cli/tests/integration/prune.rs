//! `ort prune`: the zeros it writes are exact in number, the rest of the model is as it was, and a
//! failure leaves no file.

use ort_runtime::onnx::proto::{ModelProto, StringStringEntryProto, TensorProto, tensor_proto};
use ort_runtime::{Model, Tensor, Value};
use prost::Message;

use crate::support::*;

/// Numbers that are neither regular nor random.
fn numbers(count: usize, factor: f32) -> Vec<f32> {
    (0..count).map(|step| ((step * 7919 % 10007) as f32 / 10007.0 - 0.5) * factor).collect()
}

/// A convolution, two products behind it of which one has a transposed weight, a recurrent layer,
/// and a product of activations.
fn layers(folder: &Folder) -> String {
    let nodes = vec![
        node("Conv", &["image", "K", "KB"], &["c"]),
        node("Flatten", &["c"], &["f"]),
        with(node("Gemm", &["f", "G", "GB"], &["g"]), int_attribute("transB", 1)),
        node("MatMul", &["g", "W"], &["h"]),
        node("LSTM", &["seq", "LW", "LR"], &["l"]),
        node("Transpose", &["h"], &["t"]),
        node("MatMul", &["h", "t"], &["y"]),
    ];
    let mut nodes = nodes;
    nodes[4].attribute.push(int_attribute("hidden_size", 4));
    let inputs = vec![value("image", 1, &["n", "4", "6", "6"]), value("seq", 1, &["2", "1", "3"])];
    let outputs = vec![open_value("y", 1), open_value("l", 1)];
    let weights = vec![
        floats("K", &[8, 4, 3, 3], &numbers(8 * 36, 0.7)),
        floats("KB", &[8], &numbers(8, 1.0)),
        floats("G", &[32, 128], &numbers(32 * 128, 1.0)),
        floats("GB", &[32], &numbers(32, 1.0)),
        floats("W", &[32, 20], &numbers(32 * 20, 1.5)),
        floats("LW", &[1, 16, 3], &numbers(48, 1.0)),
        floats("LR", &[1, 16, 4], &numbers(64, 1.0)),
    ];
    folder.model("layers.onnx", &model(graph(nodes, inputs, outputs, weights)))
}

/// Twenty samples of the inputs of [`layers`].
fn samples(folder: &Folder) -> String {
    let path = folder.path("samples.npz");
    let tensor = |shape: &[usize]| {
        let values = numbers(shape.iter().product(), 3.0);
        Value::from(Tensor::from_slice(shape, &values).unwrap())
    };
    let values = [("image".to_string(), tensor(&[20, 4, 6, 6])), ("seq".to_string(), tensor(&[20, 2, 1, 3]))];
    ort_numpy::write_npz(std::fs::File::create(&path).unwrap(), &values).unwrap();
    text(&path)
}

fn initializers(path: &str) -> Vec<(String, Vec<f32>)> {
    let graph = ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap().graph.unwrap();
    let values = |tensor: &TensorProto| {
        let bytes = tensor.raw_data.as_deref().unwrap();
        bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
    };
    let mut all: Vec<(String, Vec<f32>)> =
        graph.initializer.iter().map(|tensor| (tensor.name().to_string(), values(tensor))).collect();
    all.sort_by(|one, other| one.0.cmp(&other.0));
    all
}

fn zeros(values: &[f32]) -> usize {
    values.iter().filter(|value| **value == 0.0).count()
}

#[test]
fn each_method_writes_the_zeros_that_were_asked_for() {
    let folder = Folder::new();
    let (path, samples) = (layers(&folder), samples(&folder));
    let before = initializers(&path);
    let data = ["--data", &samples];
    let (wanda, sparse_gpt) = (["--method", "wanda"], ["--method", "sparsegpt"]);
    let pattern = ["--pattern", "2:4"];
    for (flags, share, method) in [
        (["--sparsity", "0.5"].to_vec(), 0.5, "magnitude"),
        ([&["--sparsity", "0.25", "--scope", "row"], &data[..]].concat(), 0.25, "magnitude"),
        ([&["--pattern", "1:4"], &data[..]].concat(), 0.75, "magnitude"),
        ([&["--sparsity", "0.5"], &wanda[..], &data[..]].concat(), 0.5, "wanda"),
        ([&["--sparsity", "0.5", "--scope", "layer"], &wanda[..], &data[..]].concat(), 0.5, "wanda"),
        ([&pattern, &wanda[..], &data[..]].concat(), 0.5, "wanda"),
        ([&["--sparsity", "0.75"], &sparse_gpt[..], &data[..]].concat(), 0.75, "sparsegpt"),
        ([&["--sparsity", "0.5", "--scope", "row"], &sparse_gpt[..], &data[..]].concat(), 0.5, "sparsegpt"),
        ([&pattern, &sparse_gpt[..], &data[..]].concat(), 0.5, "sparsegpt"),
    ] {
        let out = text(&folder.path("out.onnx"));
        let report = run(&[&["prune", &path, &out, "--json"][..], &flags].concat()).json();
        let label = format!("{flags:?}: {report}");
        let rows = report["layers"].as_array().unwrap();
        let operators: Vec<&str> = rows.iter().map(|row| row["operator"].as_str().unwrap()).collect();
        assert_eq!(operators, ["Conv", "Gemm", "MatMul", "LSTM", "MatMul"], "{label}");
        assert_eq!(rows[3]["kept"], "recurrent layers are not pruned");
        assert_eq!(rows[4]["kept"], "its weight is computed");
        let after = initializers(&out);
        for (row, name) in rows.iter().zip(["K", "G", "W"]) {
            let find = |all: &[(String, Vec<f32>)]| {
                all.iter().find(|(other, _)| other == name).map(|(_, values)| values.clone()).unwrap()
            };
            let (given, found) = (find(&before), find(&after));
            let expected = (share * found.len() as f64) as usize;
            assert_eq!(zeros(&found), expected, "{name} {label}");
            assert_eq!(row["zeros"], expected, "{name} {label}");
            assert_eq!((&row["removed"], &row["zeros_before"]), (&expected.into(), &0.into()), "{label}");
            assert_eq!(row["method"], method, "{label}");
            assert!((row["kept_share"].as_f64().unwrap() - (1.0 - share)).abs() < 1e-9, "{label}");
            let has_data = flags.contains(&"--data");
            assert_eq!(row["output_error"].is_f64(), has_data, "{label}");
            if has_data {
                let error = |name: &str| row[name].as_f64().unwrap();
                let (own, magnitude) = (error("output_error"), error("magnitude_output_error"));
                let is_right = match method {
                    "magnitude" => own == magnitude,
                    // Both estimate, one output or one element at a time.
                    _ => own < 1.1 * magnitude,
                };
                assert!(own > 0.0 && own < 1.0 && is_right, "{name} {label}");
            }
            // Only SparseGPT changes the others.
            let is_same = given.iter().zip(&found).all(|(given, found)| given == found || *found == 0.0);
            assert_eq!(is_same, method != "sparsegpt", "{name} {label}");
        }
        let others = |all: &[(String, Vec<f32>)]| -> Vec<(String, Vec<f32>)> {
            all.iter().filter(|(name, _)| !["K", "G", "W"].contains(&name.as_str())).cloned().collect()
        };
        assert_eq!(others(&before), others(&after), "{label}");
        let total = rows[..3].iter().map(|row| row["zeros"].as_u64().unwrap()).sum::<u64>();
        assert_eq!((&report["zeros"], &report["elements"]), (&total.into(), &(288 + 4096 + 640).into()));
        let bitmap = 4 * (288 + 4096 + 640 - total) + 36 + 512 + 80;
        assert_eq!((&report["bytes"], &report["bytes_as_bitmap"]), (&(4 * 5024).into(), &bitmap.into()));
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < 1.5, "{label}");
        // What is written is a model like any other, and the same call writes the same bytes.
        assert_eq!(run(&["check", &out]).code, Some(0), "{label}");
        let again = text(&folder.path("again.onnx"));
        let args = [&["prune", &path, &again, "--json", "--threads", "1"][..], &flags].concat();
        assert_eq!(run(&args).code, Some(0));
        assert_eq!(std::fs::read(&again).unwrap(), std::fs::read(&out).unwrap(), "{label}");
    }
}

#[test]
fn patterns_choose_nodes_and_the_report_says_what_zeros_are_worth() {
    let folder = Folder::new();
    let path = layers(&folder);
    let out = text(&folder.path("out.onnx"));
    let args = ["prune", &path, &out, "--sparsity", "0.5", "--exclude", "op:Conv", "--exclude", "#3"];
    let dry = run(&[&args[..], &["--dry-run"]].concat());
    assert_eq!(dry.code, Some(0), "{}", dry.stderr);
    for words in ["excluded by 'op:Conv'", "excluded by '#3'", "nothing was written", "50.00 %", "2048"] {
        assert!(dry.stdout.contains(words), "{words}: {}", dry.stdout);
    }
    assert!(!folder.path("out.onnx").exists());
    let report = folder.path("report.json");
    let finished = run(&[&args[..], &["--report", report.to_str().unwrap()]].concat());
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    for words in ["2048 of 4096 elements", "zeros save no memory or time", "the outputs differ by"] {
        assert!(finished.stdout.contains(words), "{words}: {}", finished.stdout);
    }
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!((&report["layers"][1]["zeros"], &report["calibration"]), (&2048.into(), &().into()));
    let flags = ["--pattern", "2:4", "--only", "matmul_h", "--json"];
    let only = run(&[&["prune", &path, &out][..], &flags].concat()).json();
    assert_eq!(only["layers"][0]["kept"], "not among the chosen nodes");
    assert_eq!((&only["zeros"], &only["elements"]), (&320.into(), &640.into()));
}

/// Smaller shapes take less memory, which the zeros of other methods do not.
#[test]
fn channels_make_the_model_smaller() {
    let folder = Folder::new();
    let (path, samples) = (layers(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let args = ["prune", &path, &out, "--channels", "0.25"];
    let dry = run(&[&args[..], &["--dry-run"]].concat());
    for words in ["6x4x3x3", "24x96", "24x20; all outputs, because 'Transpose_t'", "nothing was written"] {
        let found = dry.stdout.to_lowercase().contains(&words.to_lowercase());
        assert!(found, "{words}: {} {}", dry.stdout, dry.stderr);
    }
    assert!(!dry.stdout.contains("zeros save no memory"), "{}", dry.stdout);
    let report = run(&[&args[..], &["--data", &samples, "--json"]].concat()).json();
    let shapes: Vec<&serde_json::Value> =
        report["layers"].as_array().unwrap().iter().map(|row| &row["shape_after"]).collect();
    let expected = [
        serde_json::json!([6, 4, 3, 3]),
        serde_json::json!([24, 96]),
        serde_json::json!([24, 20]),
        serde_json::Value::Null,
    ];
    assert_eq!(shapes, expected.iter().collect::<Vec<_>>(), "{report}");
    assert_eq!(report["layers"][3]["kept"], "its outputs are not followed");
    let checked = |name: &str| report["checked"][name].as_u64().unwrap();
    assert_eq!(checked("runs"), 20);
    assert!(checked("planned_peak") < checked("planned_peak_before"), "{report}");
    assert!(10 * checked("weights") < 7 * checked("weights_before"), "{report}");
    let after = initializers(&out);
    let lengths: Vec<(&str, usize)> = after.iter().map(|(name, values)| (&name[..], values.len())).collect();
    let expected = [("G", 24 * 96), ("GB", 24), ("K", 216), ("KB", 6), ("LR", 64), ("LW", 48), ("W", 480)];
    assert_eq!(lengths, expected);
    // The channels that stay are those of the greatest norms, in their order.
    let kernels = numbers(8 * 36, 0.7);
    let mut norms: Vec<(f32, usize)> = kernels
        .chunks(36)
        .enumerate()
        .map(|(channel, values)| (values.iter().map(|value| value * value).sum(), channel))
        .collect();
    norms.sort_by(|one, other| one.0.total_cmp(&other.0));
    let mut kept: Vec<usize> = norms[2..].iter().map(|(_, channel)| *channel).collect();
    kept.sort_unstable();
    let expected: Vec<f32> = kept.iter().flat_map(|channel| kernels[channel * 36..][..36].to_vec()).collect();
    assert_eq!(after.iter().find(|(name, _)| name == "K").unwrap().1, expected);
    assert_eq!(run(&["check", &out]).code, Some(0));
    let report = run(&[&args[..], &["--multiple", "8", "--json"]].concat()).json();
    let rows = report["layers"].as_array().unwrap();
    assert_eq!(rows[0]["kept"], "the share leaves all of its 8 outputs");
    assert_eq!(rows[1]["shape_after"], serde_json::json!([24, 128]));
    let none = ["--channels", "0.25", "--exclude", "op:Conv", "--exclude", "op:Gemm"];
    let refused = run(&[&["prune", &path, &text(&folder.path("none.onnx"))][..], &none].concat());
    assert_fails("no channel", &refused, &["no channel", "excluded by 'op:Conv'"]);
    for stray in
        [&["--sparsity", "0.5"][..], &["--pattern", "2:4"], &["--method", "wanda"], &["--scope", "row"]]
    {
        assert_wrong_usage(&run(&[&args[..], stray].concat()), &["cannot be used with"]);
    }
}

/// Weights in a data file, and a run within a memory limit.
#[test]
fn weights_may_be_beside_the_model() {
    let folder = Folder::new();
    let weight = floats("W", &[256, 128], &numbers(256 * 128, 1.0));
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: Some(key.to_string()),
        value: Some(value.to_string()),
    };
    folder.write("w.bin", weight.raw_data.as_deref().unwrap());
    let weight = TensorProto {
        raw_data: None,
        data_location: Some(tensor_proto::DataLocation::External as i32),
        external_data: vec![entry("location", "w.bin")],
        ..weight
    };
    let product = node("MatMul", &["x", "W"], &["y"]);
    let whole =
        graph(vec![product], vec![value("x", 1, &["2", "256"])], vec![open_value("y", 1)], vec![weight]);
    let path = folder.model("m.onnx", &model(whole));
    let (inside, beside) = (text(&folder.path("inside.onnx")), text(&folder.path("beside.onnx")));
    let flags = ["--pattern", "4:8", "--memory-limit", "4MiB", "--json"];
    let report = run(&[&["prune", &path, &inside][..], &flags].concat()).json();
    assert_eq!((&report["zeros"], &report["written"]["data_bytes"]), (&16384.into(), &0.into()));
    let flags = [&flags[..], &["--external-data"]].concat();
    let report = run(&[&["prune", &path, &beside][..], &flags].concat()).json();
    assert_eq!(report["written"]["data_bytes"], 4 * 256 * 128);
    assert_eq!(std::fs::metadata(folder.path("beside.onnx.data")).unwrap().len(), 4 * 256 * 128);
    let run_model = |path: &str| {
        let session = ort_runtime::Session::builder(&Model::load(path).unwrap()).build().unwrap();
        let x = Tensor::from_slice(&[2, 256], &numbers(512, 2.0)).unwrap();
        session.run(&[("x", x.into())]).unwrap()[0].1.tensor().unwrap().to_vec::<f32>().unwrap()
    };
    assert_eq!(run_model(&inside), run_model(&beside));
}

#[test]
fn failures_say_why_and_leave_no_file() {
    let folder = Folder::new();
    let path = layers(&folder);
    let out = text(&folder.path("out.onnx"));
    let prune = |path: &str, flags: &[&str]| run(&[&["prune", path, &out][..], flags].concat());
    let half = ["--sparsity", "0.5"];
    let case = |name: &str, path: &str, flags: &[&str], words: &[&str]| {
        assert_fails(name, &prune(path, flags), words);
        let is_left = |file: &String| file.starts_with("out") || file.contains("unfinished");
        assert!(!folder.files().iter().any(is_left), "{name}");
    };
    assert_fails("itself", &run(&["prune", &path, &path, "--sparsity", "0.5"]), &["replace"]);
    case("report", &path, &["--sparsity", "0.5", "--report", &path], &["replace"]);
    case("no node", &path, &["--sparsity", "0.5", "--only", "nowhere*"], &["nowhere*", "matches no node"]);
    case("no channels", &path, &["--pattern", "5:7"], &["no layer", "no multiple of 7"]);
    case("missing", &text(&folder.path("missing.onnx")), &half, &["missing.onnx"]);
    let mut values = numbers(64 * 64, 1.0);
    values[100] = f32::NAN;
    let product = graph(
        vec![node("MatMul", &["x", "W"], &["y"])],
        vec![value("x", 1, &["2", "64"])],
        vec![open_value("y", 1)],
        vec![floats("W", &[64, 64], &values)],
    );
    case("nan", &folder.model("nan.onnx", &model(product)), &half, &["weight 'W'", "NaN", "exclude"]);
    let activations = graph(
        vec![node("MatMul", &["x", "x"], &["y"])],
        vec![value("x", 1, &["4", "4"])],
        vec![open_value("y", 1)],
        vec![],
    );
    case("none", &folder.model("none.onnx", &model(activations)), &half, &["no layer", "is computed"]);
    assert_fails("a full disk", &run(&["prune", &path, "/dev/full", "--sparsity", "0.5"]), &["/dev/full"]);
    for (flags, words) in [
        (&[][..], &["--sparsity"][..]),
        (&["--channels", "1"], &["such as 0.5"]),
        (&["--channels", "0.5", "--multiple", "0"], &["1 or more"]),
        (&["--sparsity", "0.5", "--multiple", "8"], &["cannot be used with"]),
        (&["--sparsity", "0"], &["`0` is not a share above 0 and below 1"]),
        (&["--sparsity", "1"], &["such as 0.5"]),
        (&["--sparsity", "nan"], &["such as 0.5"]),
        (&["--sparsity", "-0.5"], &["such as 0.5"]),
        (&["--pattern", "4:2"], &["such as 2:4"]),
        (&["--pattern", "0:4"], &["such as 2:4"]),
        (&["--pattern", "2"], &["such as 2:4"]),
        (&["--pattern", "2:4", "--sparsity", "0.5"], &["cannot be used with"]),
        (&["--pattern", "2:4", "--scope", "row"], &["cannot be used with"]),
        (&["--sparsity", "0.5", "--method", "wanda"], &["--data", "magnitude"]),
        (&["--sparsity", "0.5", "--samples", "3"], &["--data"]),
        (&["--sparsity", "0.5", "--report", &out], &["same file"]),
    ] {
        assert_wrong_usage(&prune(&path, flags), words);
    }
}
