//! `ort quantize`: what it writes runs, is smaller, and computes nearly the same; what cannot be
//! quantized stays, with the reason; a failure leaves no file.

use ort_runtime::onnx::proto::ModelProto;
use ort_runtime::{Model, Tensor, Value};
use prost::Message;

use crate::support::*;

/// Numbers that are neither regular nor random.
fn numbers(count: usize, factor: f32) -> Vec<f32> {
    (0..count).map(|step| ((step * 7919 % 10007) as f32 / 10007.0 - 0.5) * factor).collect()
}

/// Two products that share a weight, a Gemm with the same weight transposed, a table, a convolution
/// with a bias, and a product of activations.
fn layers(folder: &Folder) -> String {
    let mut gemm = node("Gemm", &["c", "W", "bias"], &["d"]);
    gemm.attribute.push(int_attribute("transB", 1));
    let nodes = vec![
        node("MatMul", &["x", "W"], &["a"]),
        node("Gather", &["E", "ids"], &["e"]),
        node("MatMul", &["e", "W"], &["b"]),
        node("Add", &["a", "b"], &["c"]),
        gemm,
        node("Conv", &["image", "K", "KB"], &["g"]),
        node("Transpose", &["d"], &["t"]),
        node("MatMul", &["d", "t"], &["y"]),
        node("Identity", &["e"], &["rows"]),
    ];
    let inputs =
        vec![value("x", 1, &["3", "64"]), value("ids", 7, &["3"]), value("image", 1, &["1", "3", "8", "8"])];
    let outputs = vec![open_value("y", 1), open_value("g", 1), open_value("rows", 1)];
    let weights = vec![
        floats("W", &[64, 64], &numbers(64 * 64, 2.0)),
        floats("bias", &[64], &numbers(64, 1.0)),
        floats("E", &[50, 64], &numbers(50 * 64, 3.0)),
        floats("K", &[16, 3, 3, 3], &numbers(16 * 27, 0.7)),
        floats("KB", &[16], &numbers(16, 1.0)),
    ];
    folder.model("layers.onnx", &model(graph(nodes, inputs, outputs, weights)))
}

/// Twenty samples of the inputs of [`layers`].
fn samples(folder: &Folder) -> String {
    let path = folder.path("samples.npz");
    let tensor = |shape: &[usize], factor: f32| {
        let count = shape.iter().product();
        Value::from(Tensor::from_slice(shape, &numbers(count, factor)).unwrap())
    };
    let ids: Vec<i64> = (0..60).map(|step| step * 7 % 50).collect();
    let values = [
        // The model has no axis for the batch here, and one there.
        ("x".to_string(), tensor(&[20, 3, 64], 2.0)),
        ("ids".to_string(), Tensor::from_slice(&[20, 3], &ids).unwrap().into()),
        ("image".to_string(), tensor(&[20, 1, 3, 8, 8], 4.0)),
    ];
    ort_numpy::write_npz(std::fs::File::create(&path).unwrap(), &values).unwrap();
    text(&path)
}

fn operators(path: &str) -> Vec<String> {
    let written = ModelProto::decode(&*std::fs::read(path).unwrap()).unwrap();
    let graph = written.graph.unwrap();
    graph.node.iter().map(|node| node.op_type().to_string()).collect()
}

#[test]
fn each_mode_writes_a_smaller_model_with_nearly_the_same_outputs() {
    let folder = Folder::new();
    let path = layers(&folder);
    let before = std::fs::metadata(&path).unwrap().len();
    let samples = samples(&folder);
    for (mode, flags, error, percent) in [
        ("dynamic", &[][..], 0.05, 50),
        ("dynamic", &["--per-tensor", "--portable"][..], 0.1, 50),
        ("static", &["--data", &samples][..], 0.05, 85),
        ("static", &["--data", &samples, "--ranges", "mse", "--symmetric"][..], 0.05, 85),
        ("static", &["--data", &samples, "--ranges", "percentile=99", "--per-tensor"][..], 0.2, 85),
        ("fp16", &["--exclude", "matmul_y"][..], 0.002, 60),
        ("int8", &[][..], 0.02, 60),
        ("int8", &["--symmetric", "--block", "16"][..], 0.02, 60),
        ("int4", &[][..], 0.2, 50),
        ("int4", &["--method", "rtn"][..], 0.2, 50),
        ("int4", &["--no-protect-last", "--symmetric", "--external-data"][..], 0.3, 50),
        ("int2", &["--block", "64"][..], 1.5, 50),
    ] {
        let out = folder.path("out.onnx");
        let out = out.to_str().unwrap();
        let args = [&["quantize", &path, out, "--mode", mode, "--json"][..], flags].concat();
        let report = run(&args).json();
        let label = format!("{mode} {flags:?}: {report}");
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < error, "{label}");
        // 6 dB for each bit of a code, and some more with channels and blocks.
        let least = if mode == "int2" {
            5.0
        } else if mode == "int4" {
            15.0
        } else {
            30.0
        };
        for row in report["layers"].as_array().unwrap().iter().filter(|row| row["bytes_after"] != 0) {
            assert!(row["weight_decibels"].as_f64().unwrap() > least, "{row} {label}");
        }
        let sizes = &report["written"];
        let written = sizes["model_bytes"].as_u64().unwrap();
        assert_eq!(written, std::fs::metadata(out).unwrap().len(), "{label}");
        let data = sizes["data_bytes"].as_u64().unwrap();
        assert_eq!(data > 0, flags.contains(&"--external-data"), "{label}");
        if data > 0 {
            assert_eq!(data, std::fs::metadata(format!("{out}.data")).unwrap().len(), "{label}");
        }
        assert!((written + data) * 100 < before * percent, "{label}");
        // What is written is a model like any other.
        assert_eq!(run(&["check", out]).code, Some(0), "{label}");
        let (old, new) = (Model::load(&path).unwrap(), Model::load(out).unwrap());
        let names = |model: &Model| {
            let inputs = model.inputs().into_iter().map(|spec| (spec.name, spec.ty));
            inputs.collect::<Vec<_>>()
        };
        assert_eq!(names(&old), names(&new));
        // The same call writes the same bytes.
        let again = folder.path("again.onnx");
        let again = again.to_str().unwrap();
        if data == 0 {
            let args = [&["quantize", &path, again, "--mode", mode, "--json"][..], flags].concat();
            assert_eq!(run(&args).code, Some(0));
            assert_eq!(std::fs::read(again).unwrap(), std::fs::read(out).unwrap(), "{label}");
        }
    }
}

#[test]
fn a_shared_weight_is_written_once_for_each_form() {
    let folder = Folder::new();
    let path = layers(&folder);
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let report = run(&["quantize", &path, out, "--mode", "dynamic", "--json"]).json();
    let weights: Vec<(String, u64)> = report["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["operator"].as_str().unwrap().to_string(), row["bytes_after"].as_u64().unwrap()))
        .collect();
    let bytes = |rows: u64| rows * 64 + 64 * 4 + 64;
    let expected = [
        ("MatMul", bytes(64)),
        ("Gather", 50 * 64 + 4 + 1),
        ("MatMul", 0),
        ("Gemm", bytes(64)),
        ("Conv", 16 * 27 + 16 * 4 + 1),
        ("MatMul", 0),
    ];
    assert_eq!(weights, expected.map(|(name, bytes)| (name.to_string(), bytes)));
    assert_eq!(report["layers"][5]["kept"], "its weight is computed");
    let written = ModelProto::decode(&*std::fs::read(out).unwrap()).unwrap();
    let names: Vec<String> =
        written.graph.unwrap().initializer.iter().map(|tensor| tensor.name().to_string()).collect();
    for name in
        ["W_quantized", "W_scale", "W_zero_point", "W_quantized_2", "E_quantized", "K_quantized", "bias"]
    {
        assert!(names.iter().any(|found| found == name), "{name}: {names:?}");
    }
    assert!(!names.iter().any(|name| ["W", "E", "K"].contains(&name.as_str())), "{names:?}");
    // The rows are read as numbers by the caller, and as codes by the product.
    let count = |name: &str| operators(out).iter().filter(|operator| *operator == name).count();
    assert_eq!(
        (count("DynamicQuantizeLinear"), count("DequantizeLinear"), count("MatMulInteger")),
        (3, 1, 3)
    );
}

/// Each branch has a weight of its own, under the same name.
#[test]
fn weights_in_branches_are_quantized() {
    let folder = Folder::new();
    let branch = |name: &str, factor: f32| {
        let product = node("MatMul", &["x", "W"], &[name]);
        let weight = floats("W", &[64, 64], &numbers(64 * 64, factor));
        graph(vec![product], vec![], vec![open_value(name, 1)], vec![weight])
    };
    let choice = node("If", &["first"], &["y"]);
    let choice = with(choice, graph_attribute("then_branch", branch("a", 2.0)));
    let choice = with(choice, graph_attribute("else_branch", branch("b", -5.0)));
    let inputs = vec![value("first", 9, &[]), value("x", 1, &["3", "64"])];
    let path = folder.model("if.onnx", &model(graph(vec![choice], inputs, vec![open_value("y", 1)], vec![])));
    let archive = folder.path("samples.npz");
    let first: Vec<bool> = (0..20).map(|step| step % 3 == 0).collect();
    let values = [
        ("first".to_string(), Value::from(Tensor::from_bools(&[20], &first).unwrap())),
        ("x".to_string(), Tensor::from_slice(&[20, 3, 64], &numbers(20 * 192, 2.0)).unwrap().into()),
    ];
    ort_numpy::write_npz(std::fs::File::create(&archive).unwrap(), &values).unwrap();
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    for (mode, operator, error) in
        [("dynamic", "MatMulInteger", 0.05), ("int4", "MatMulNBits", 0.2), ("static", "QuantizeLinear", 0.05)]
    {
        let data = ["--mode", mode, "--data", archive.to_str().unwrap(), "--json"];
        let report = run(&[&["quantize", &path, out][..], &data].concat()).json();
        assert_eq!(report["layers"].as_array().unwrap().len(), 2, "{report}");
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < error, "{mode}: {report}");
        assert_eq!(report["checked"]["runs"], 5);
        let written = ModelProto::decode(&*std::fs::read(out).unwrap()).unwrap();
        let graph = written.graph.unwrap();
        let bodies: Vec<_> =
            graph.node[0].attribute.iter().filter_map(|attribute| attribute.g.as_ref()).collect();
        assert_eq!(bodies.len(), 2);
        for body in bodies {
            assert!(body.node.iter().any(|node| node.op_type() == operator), "{mode}");
            assert!(body.initializer.is_empty(), "{mode}");
        }
        assert!(
            std::fs::metadata(out).unwrap().len() * 2 < std::fs::metadata(&path).unwrap().len(),
            "{mode}"
        );
    }
}

/// `TopK` and a constant beyond float16 keep nodes in float32, a mask does not.
#[test]
fn float16_has_a_cast_where_types_meet() {
    let folder = Folder::new();
    let mut top = node("TopK", &["s", "k"], &["values"]);
    top.output.push("indices".to_string());
    let nodes = vec![
        node("MatMul", &["x", "W"], &["m"]),
        node("Add", &["m", "mask"], &["n"]),
        node("Softmax", &["n"], &["s"]),
        top,
        node("Relu", &["m"], &["r"]),
        node("Mul", &["r", "big"], &["b"]),
    ];
    let outputs = vec![open_value("values", 1), open_value("r", 1), open_value("b", 1)];
    let weights = vec![
        floats("W", &[64, 4], &numbers(256, 2.0)),
        floats("mask", &[4], &[0.0, -3.0e38, 0.0, 0.0]),
        floats("big", &[1], &[1.0e5]),
        ints("k", &[1], &[2]),
    ];
    let path =
        folder.model("mixed.onnx", &model(graph(nodes, vec![value("x", 1, &["3", "64"])], outputs, weights)));
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let report = run(&["quantize", &path, out, "--mode", "fp16", "--json"]).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.005, "{report}");
    let kept = |name: &str| {
        let rows = report["layers"].as_array().unwrap().iter();
        rows.filter(|row| row["operator"] == name).find_map(|row| row["kept"].as_str()).map(str::to_string)
    };
    assert_eq!(kept("TopK").unwrap(), "its operator stays in float32");
    assert_eq!(kept("Mul").unwrap(), "constant 'big' is beyond the range of float16");
    assert_eq!((kept("Add"), kept("MatMul")), (None, None));
    // The input, what TopK reads, and the output that Mul reads, too.
    let casts = |path: &str| operators(path).iter().filter(|operator| *operator == "Cast").count();
    assert_eq!(casts(out), 3);
    let written = ModelProto::decode(&*std::fs::read(out).unwrap()).unwrap().graph.unwrap();
    let named = |name: &str| written.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
    assert_eq!((named("W").data_type(), named("mask").data_type(), named("big").data_type()), (10, 10, 1));
    // The mask stays finite: 0, -65504, 0, 0.
    assert_eq!(named("mask").raw_data.as_deref().unwrap(), [0, 0, 0xff, 0xfb, 0, 0, 0, 0]);
    // With its inputs and outputs converted, only the nodes in float32 need casts.
    let report = run(&["quantize", &path, out, "--mode", "fp16", "--convert-io", "--json"]).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.005, "{report}");
    assert_eq!(casts(out), 2);
    let converted = Model::load(out).unwrap();
    assert_eq!(converted.inputs()[0].ty.dtype(), Some(ort_runtime::DType::F16));
}

#[test]
fn patterns_choose_nodes_and_a_dry_run_writes_nothing() {
    let folder = Folder::new();
    let path = layers(&folder);
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let flags = ["--exclude", "op:Gather", "--exclude", "matmul_a", "--exclude", "#4"];
    let args = [&["quantize", &path, out, "--mode", "int4"][..], &flags].concat();
    let dry = run(&[&args[..], &["--dry-run"]].concat());
    assert_eq!(dry.code, Some(0), "{}", dry.stderr);
    for word in ["excluded by 'op:Gather'", "excluded by '#4'", "int8, blocks of 32", "nothing was written"] {
        assert!(dry.stdout.contains(word), "{word}: {}", dry.stdout);
    }
    assert!(!folder.path("out.onnx").exists());
    let report = folder.path("report.json");
    let finished = run(&[&args[..], &["--report", report.to_str().unwrap()]].concat());
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert!(finished.stdout.contains("the outputs differ by"), "{}", finished.stdout);
    assert_eq!(operators(out).iter().filter(|operator| *operator == "MatMulNBits").count(), 1);
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(report).unwrap()).unwrap();
    assert_eq!(report["layers"].as_array().unwrap().len(), 6);
    assert_eq!(report["layers"][4]["kept"], "this mode has no rule for the operator");
    let only = run(&["quantize", &path, out, "--mode", "int4", "--only", "gemm_*", "--json"]).json();
    let quantized = only["layers"].as_array().unwrap().iter().filter(|row| !row["precision"].is_null());
    assert_eq!(quantized.count(), 1, "{only}");
}

#[test]
fn a_static_model_quantizes_each_input_of_a_product_once() {
    let folder = Folder::new();
    let (path, samples) = (layers(&folder), samples(&folder));
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let report = run(&["quantize", &path, out, "--mode", "static", "--data", &samples, "--json"]).json();
    assert_eq!((&report["calibration"]["samples"], &report["checked"]["runs"]), (&15.into(), &5.into()));
    let count = |name: &str| operators(out).iter().filter(|operator| *operator == name).count();
    // x, e, c, d, t and image; and the weights W and K, of which one has two forms.
    assert_eq!((count("QuantizeLinear"), count("DequantizeLinear")), (6, 9));
    assert_eq!((count("MatMul"), count("Gemm"), count("Conv"), count("Gather")), (3, 1, 1, 1));
    let written = ModelProto::decode(&*std::fs::read(out).unwrap()).unwrap();
    let graph = written.graph.unwrap();
    let names: Vec<&str> = graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect();
    for name in ["x_QuantizeLinear_Output", "x_DequantizeLinear_Output", "W_DequantizeLinear_Output"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    // Ranges from a file are those of the calibration that wrote it.
    let ranges = folder.path("ranges.json");
    let ranges = ranges.to_str().unwrap();
    let kept = std::fs::read(out).unwrap();
    let flags = ["--mode", "static", "--calibration", ranges, "--json"];
    let first = run(&[&["quantize", &path, out, "--data", &samples][..], &flags].concat());
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    assert!(std::fs::metadata(ranges).unwrap().len() > 100);
    let second = run(&[&["quantize", &path, out][..], &flags].concat());
    assert_eq!(second.code, Some(0), "{}", second.stderr);
    assert_eq!(std::fs::read(out).unwrap(), kept);
    // A folder has a sample in each file, as it is.
    let single = folder.path("folder");
    std::fs::create_dir(&single).unwrap();
    for index in 0..2 {
        let file = std::fs::File::create(single.join(format!("{index}.npz"))).unwrap();
        let values = [
            ("x".to_string(), Tensor::from_slice(&[3, 64], &numbers(192, 2.0)).unwrap().into()),
            ("ids".to_string(), Tensor::from_slice(&[3], &[1_i64, 2, 3]).unwrap().into()),
            ("image".to_string(), Tensor::from_slice(&[1, 3, 8, 8], &numbers(192, 4.0)).unwrap().into()),
        ];
        ort_numpy::write_npz(file, &values).unwrap();
    }
    let folder_of_samples = single.to_str().unwrap();
    let report =
        run(&["quantize", &path, out, "--mode", "static", "--data", folder_of_samples, "--json"]).json();
    assert_eq!((&report["calibration"]["samples"], &report["checked"]["runs"]), (&2.into(), &1.into()));
}

#[test]
fn failures_say_why_and_leave_no_file() {
    let folder = Folder::new();
    let path = layers(&folder);
    let out = folder.path("out.onnx");
    let out = out.to_str().unwrap();
    let quantize = |path: &str, flags: &[&str]| run(&[&["quantize", path, out][..], flags].concat());
    let int4 = ["--mode", "int4"];
    let case = |name: &str, path: &str, flags: &[&str], words: &[&str]| {
        assert_fails(name, &quantize(path, flags), words);
        assert!(
            !folder.files().iter().any(|file| file.starts_with("out") || file.contains("unfinished")),
            "{name}"
        );
    };
    assert_fails("itself", &run(&["quantize", &path, &path, "--mode", "int4"]), &["replace"]);
    case("no node", &path, &["--mode", "int4", "--only", "nowhere*"], &["nowhere*", "matches no node"]);
    case("stray", &path, &["--mode", "int4", "--portable"], &["--portable", "no effect"]);
    case("stray", &path, &["--mode", "dynamic", "--symmetric"], &["--symmetric", "no effect"]);
    let activations = graph(
        vec![node("MatMul", &["x", "x"], &["y"])],
        vec![value("x", 1, &["4", "4"])],
        vec![open_value("y", 1)],
        vec![],
    );
    let none = folder.model("none.onnx", &model(activations));
    case("nothing", &none, &int4, &["no node", "its weight is computed"]);
    for (name, element) in [("nan", f32::NAN), ("infinite", f32::INFINITY)] {
        let mut values = numbers(64 * 64, 1.0);
        values[100] = element;
        let product = graph(
            vec![node("MatMul", &["x", "W"], &["y"])],
            vec![value("x", 1, &["2", "64"])],
            vec![open_value("y", 1)],
            vec![floats("W", &[64, 64], &values)],
        );
        let path = folder.model(&format!("{name}.onnx"), &model(product));
        case(name, &path, &int4, &["weight 'W'", "exclude"]);
        case(name, &path, &["--mode", "dynamic"], &["weight 'W'", "channel 36"]);
    }
    // The last product is beyond the range of float16.
    case("overflow", &path, &["--mode", "fp16"], &["NaN or infinite", "--exclude"]);
    case("no samples", &path, &["--mode", "static"], &["--data", "dynamic"]);
    let other = folder.path("other.npz");
    let values = [("y".to_string(), Value::from(Tensor::from_slice(&[2, 4], &[0.0_f32; 8]).unwrap()))];
    ort_numpy::write_npz(std::fs::File::create(&other).unwrap(), &values).unwrap();
    case("other", &path, &["--mode", "static", "--data", other.to_str().unwrap()], &["no array 'x'"]);
    let nowhere = folder.path("nowhere.npz");
    case("nowhere", &path, &["--mode", "static", "--data", nowhere.to_str().unwrap()], &["nowhere.npz"]);
    case("missing", folder.path("missing.onnx").to_str().unwrap(), &int4, &["missing.onnx"]);
    let full = run(&["quantize", &path, "/dev/full", "--mode", "int4"]);
    assert_fails("a full disk", &full, &["/dev/full"]);
}
