//! `ort quantize`: what it writes runs, is smaller, and computes nearly the same; what cannot be
//! quantized stays, with the reason; a failure leaves no file.

use ort_runtime::onnx::proto::{
    AttributeProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, attribute_proto, tensor_proto,
};
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
        ("static", &["--smooth", "off", "--data", &samples][..], 0.05, 85),
        ("static", &["--smooth", "off", "--data", &samples, "--ranges", "mse", "--symmetric"][..], 0.05, 85),
        (
            "static",
            &["--smooth", "off", "--data", &samples, "--ranges", "percentile=99", "--per-tensor"][..],
            0.2,
            85,
        ),
        ("static", &["--smooth", "off", "--data", &samples, "--format", "qoperator"][..], 0.05, 85),
        (
            "static",
            &["--smooth", "off", "--data", &samples, "--format", "qoperator", "--symmetric", "--per-tensor"]
                [..],
            0.1,
            85,
        ),
        ("fp8", &["--data", &samples][..], 0.1, 85),
        ("fp8", &["--data", &samples, "--per-tensor", "--ranges", "average"][..], 0.1, 85),
        ("fp16", &["--exclude", "matmul_y"][..], 0.002, 60),
        ("bf16", &[][..], 0.02, 60),
        ("int8", &[][..], 0.02, 60),
        ("int8", &["--symmetric", "--block", "16"][..], 0.02, 60),
        ("int4", &[][..], 0.2, 50),
        ("int4", &["--method", "rtn"][..], 0.2, 50),
        ("int4", &["--method", "k-quant"][..], 0.2, 50),
        ("int4", &["--method", "k-quant", "--symmetric"][..], 0.3, 50),
        ("int4", &["--method", "hqq"][..], 0.2, 50),
        ("int8", &["--method", "hqq", "--block", "64", "--format", "nbits"][..], 0.02, 60),
        ("int4", &["--no-protect-last", "--protect-last"][..], 0.2, 50),
        ("int4", &["--no-protect-last", "--symmetric", "--external-data"][..], 0.3, 50),
        ("int3", &[][..], 0.4, 50),
        ("int3", &["--method", "gptq", "--data", &samples][..], 0.6, 50),
        ("int2", &["--block", "64"][..], 1.5, 50),
        ("int4", &["--method", "gptq", "--data", &samples][..], 0.3, 50),
        ("int4", &["--method", "gptq", "--act-order", "--symmetric", "--data", &samples][..], 0.4, 50),
        ("int4", &["--method", "awq", "--data", &samples][..], 0.2, 50),
        ("int2", &["--bias-correction", "--method", "rtn", "--data", &samples][..], 1.5, 50),
        ("int2", &["--bias-correction", "--method", "gptq", "--data", &samples][..], 1.5, 50),
    ] {
        let out = folder.path("out.onnx");
        let out = out.to_str().unwrap();
        let args = [&["quantize", &path, out, "--mode", mode, "--json"][..], flags].concat();
        let report = run(&args).json();
        let label = format!("{mode} {flags:?}: {report}");
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < error, "{label}");
        // 6 dB for each bit of a code, and some more with channels and blocks. With GPTQ, the error
        // of a weight makes up for others.
        let least = if flags.contains(&"gptq") {
            0.0
        } else if mode == "int2" {
            5.0
        } else if mode == "int3" {
            10.0
        } else if mode == "int4" {
            15.0
        } else if mode == "fp8" {
            // Three bits of mantissa.
            28.0
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

/// Branches have constants of the same name, a bias among them, and read a value around them.
#[test]
fn float16_reaches_into_branches() {
    let folder = Folder::new();
    let constant = |factor: f32| {
        let value = AttributeProto {
            name: Some("value".into()),
            t: Some(Box::new(floats("", &[64], &numbers(64, factor)))),
            r#type: Some(attribute_proto::AttributeType::Tensor as i32),
            ..AttributeProto::default()
        };
        with(node("Constant", &[], &["c"]), value)
    };
    let branch = |factor: f32| {
        let nodes = vec![
            constant(factor),
            node("MatMul", &["h", "W"], &["m"]),
            node("Add", &["m", "bias"], &["n"]),
            node("Mul", &["n", "c"], &["out"]),
        ];
        let weights = vec![
            floats("W", &[64, 64], &numbers(64 * 64, factor)),
            floats("bias", &[64], &numbers(64, factor)),
        ];
        graph(nodes, vec![], vec![open_value("out", 1)], weights)
    };
    let choice = with(node("If", &["first"], &["y"]), graph_attribute("then_branch", branch(2.0)));
    let choice = with(choice, graph_attribute("else_branch", branch(-5.0)));
    let nodes = vec![node("Relu", &["x"], &["h"]), choice];
    let inputs = vec![value("first", 9, &[]), value("x", 1, &["3", "64"])];
    let path = folder.model("if.onnx", &model(graph(nodes, inputs, vec![open_value("y", 1)], vec![])));
    let out = text(&folder.path("out.onnx"));
    for first in [true, false] {
        let archive = folder.path("inputs.npz");
        let values = [
            ("first".to_string(), Value::from(Tensor::from_bools(&[], &[first]).unwrap())),
            ("x".to_string(), Tensor::from_slice(&[3, 64], &numbers(192, 2.0)).unwrap().into()),
        ];
        ort_numpy::write_npz(std::fs::File::create(&archive).unwrap(), &values).unwrap();
        let args = ["quantize", &path, &out, "--mode", "fp16", "--inputs", &text(&archive), "--json"];
        let report = run(&args).json();
        let error = report["checked"]["relative_error"].as_f64().unwrap();
        assert!(error > 0.0 && error < 0.002, "{report}");
        let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
        assert_eq!(written.initializer.len(), 6);
        assert!(written.initializer.iter().all(|tensor| tensor.data_type() == 10));
        let choice = written.node.iter().find(|node| node.op_type() == "If").unwrap();
        for body in choice.attribute.iter().filter_map(|attribute| attribute.g.as_ref()) {
            assert!(body.initializer.is_empty() && body.node.iter().all(|node| node.op_type() != "Constant"));
            // Of the value around it, and of the output.
            assert_eq!(body.node.iter().filter(|node| node.op_type() == "Cast").count(), 2);
        }
    }
}

/// A sum of squares beyond float16, and a variance as the difference of two means.
#[test]
fn float16_keeps_values_that_it_cannot_hold() {
    let folder = Folder::new();
    let mean = |input: &str, output: &str| {
        with(node("ReduceMean", &[input], &[output]), int_attribute("keepdims", 1))
    };
    let nodes = vec![
        node("MatMul", &["x", "W"], &["a"]),
        node("Mul", &["a", "a"], &["square"]),
        node("ReduceSum", &["square"], &["sum"]),
        node("Mul", &["sum", "small"], &["y"]),
        node("Mul", &["x", "x"], &["x2"]),
        mean("x2", "mean2"),
        mean("x", "mean"),
        node("Mul", &["mean", "mean"], &["meansquare"]),
        node("Sub", &["mean2", "meansquare"], &["variance"]),
        node("Sqrt", &["variance"], &["z"]),
    ];
    let weights = vec![floats("W", &[64, 64], &numbers(64 * 64, 2.0)), floats("small", &[1], &[1e-3])];
    let outputs = vec![open_value("y", 1), open_value("z", 1)];
    let path =
        folder.model("sum.onnx", &model(graph(nodes, vec![value("x", 1, &["4", "64"])], outputs, weights)));
    let archive = text(&folder.path("samples.npz"));
    // The means are large beside the deviations.
    let x: Vec<f32> = numbers(8 * 256, 4.0).into_iter().map(|x| x + 100.0).collect();
    let values = [("x".to_string(), Value::from(Tensor::from_slice(&[8, 4, 64], &x).unwrap()))];
    ort_numpy::write_npz(std::fs::File::create(&archive).unwrap(), &values).unwrap();
    let out = text(&folder.path("out.onnx"));
    let report = run(&["quantize", &path, &out, "--mode", "fp16", "--data", &archive, "--json"]).json();
    for output in report["outputs"].as_array().unwrap() {
        assert!(output["relative_error"].as_f64().unwrap() < 0.02, "{report}");
    }
    let kept = |node: &str| {
        let rows = report["layers"].as_array().unwrap().iter();
        let mut rows = rows.filter(|row| row["node"] == node);
        rows.find_map(|row| row["kept"].as_str()).unwrap_or_default().to_string()
    };
    assert!(kept("reducesum_sum").contains("near the end of float16"), "{report}");
    assert!(kept("sub_variance").contains("difference of two means"), "{report}");
    // Without samples, the sum is not known.
    let without = run(&["quantize", &path, &out, "--mode", "fp16", "--inputs", &inputs_of(&folder, &x)]);
    assert_fails("a sum beyond float16", &without, &["NaN or infinite", "--exclude"]);
}

/// One set of inputs of the model above.
fn inputs_of(folder: &Folder, x: &[f32]) -> String {
    let path = text(&folder.path("one.npz"));
    let values = [("x".to_string(), Value::from(Tensor::from_slice(&[4, 64], &x[..256]).unwrap()))];
    ort_numpy::write_npz(std::fs::File::create(&path).unwrap(), &values).unwrap();
    path
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
    let flags = ["--mode", "static", "--smooth", "off", "--data", &samples, "--json"];
    let report = run(&[&["quantize", &path, out][..], &flags].concat()).json();
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
    let usage = |flags: &[&str], words: &[&str]| assert_wrong_usage(&quantize(&path, flags), words);
    usage(&["--mode", "int4", "--portable"], &["--portable", "no effect"]);
    usage(&["--mode", "dynamic", "--symmetric"], &["--symmetric", "no effect"]);
    usage(&["--mode", "fp16", "--smooth", "auto"], &["--smooth", "no effect"]);
    usage(&["--mode", "int8", "--format", "qoperator"], &["--format", "no effect"]);
    usage(&["--mode", "dynamic", "--format", "nbits"], &["--format nbits", "no effect"]);
    usage(&["--mode", "dynamic", "--protect-last"], &["--protect-last", "no effect"]);
    usage(&["--mode", "static", "--smooth", "2"], &["not off, auto or a number from 0 to 1"]);
    usage(&["--mode", "static"], &["--data", "dynamic"]);
    usage(&["--mode", "fp8"], &["--data", "fp16"]);
    usage(&["--mode", "fp8", "--data", "x.npz", "--ranges", "mse"], &["--ranges", "minmax"]);
    usage(&["--mode", "fp8", "--data", "x.npz", "--format", "qoperator"], &["--format", "no effect"]);
    usage(&["--mode", "int4", "--method", "gptq"], &["--data", "mse"]);
    usage(&["--mode", "int4", "--bias-correction"], &["--data"]);
    usage(&["--mode", "dynamic", "--bias-correction"], &["--bias-correction", "no effect"]);
    usage(&["--mode", "int4", "--method", "mse", "--act-order"], &["--act-order", "no effect"]);
    usage(&["--mode", "int4", "--method", "hqq", "--symmetric"], &["--symmetric", "leave one of them out"]);
    usage(&["--mode", "int4", "--report", out], &["same file"]);
    usage(&["--mode", "int4", "--compare"], &["cannot be used with"]);
    usage(&["--mode", "int4", "--data", "x.npz", "--samples", "0"], &["1 or more"]);
    usage(&["--mode", "int4", "--data", "x.npz", "--held-out", "-1"], &["must not be negative"]);
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

/// bfloat16 needs no exceptions for its range, and its constants are the nearest ones.
#[test]
fn bfloat16_is_the_upper_half_of_float32() {
    let folder = Folder::new();
    let weight = numbers(64 * 4, 2.0);
    let nodes = vec![
        node("MatMul", &["x", "W"], &["m"]),
        node("Add", &["m", "mask"], &["n"]),
        node("Softmax", &["n"], &["s"]),
        node("Mul", &["s", "big"], &["y"]),
    ];
    let weights = vec![
        floats("W", &[64, 4], &weight),
        floats("mask", &[4], &[0.0, f32::MIN, 0.0, -1.0]),
        floats("big", &[1], &[1.0e30]),
    ];
    let graph = graph(nodes, vec![value("x", 1, &["3", "64"])], vec![open_value("y", 1)], weights);
    let path = folder.model("m.onnx", &model(graph));
    let out = text(&folder.path("out.onnx"));
    let report = run(&["quantize", &path, &out, "--mode", "bf16", "--json"]).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.03, "{report}");
    let kept = report["layers"].as_array().unwrap().iter().filter(|row| !row["kept"].is_null());
    assert_eq!(kept.count(), 0, "{report}");
    let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap();
    assert!(written.opset_import[0].version() >= 22);
    let written = written.graph.unwrap();
    let named = |name: &str| written.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
    assert_eq!([named("W").data_type(), named("mask").data_type(), named("big").data_type()], [16; 3]);
    // Rounding to nearest even on the bits.
    let nearest = |value: &f32| {
        let bits = value.to_bits();
        ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
    };
    let expected: Vec<u8> = weight.iter().flat_map(|value| nearest(value).to_le_bytes()).collect();
    assert_eq!(named("W").raw_data.as_deref().unwrap(), expected);
    // The least float32 rounds to an infinity, and stays finite.
    assert_eq!(named("mask").raw_data.as_deref().unwrap(), [0, 0, 0x7f, 0xff, 0, 0, 0x80, 0xbf]);
    assert_eq!(operators(&out).iter().filter(|operator| *operator == "Cast").count(), 2);
    let report = run(&["quantize", &path, &out, "--mode", "bf16", "--convert-io", "--json"]).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.03, "{report}");
    let (inputs, outputs) = (Model::load(&out).unwrap().inputs(), operators(&out));
    assert_eq!(inputs[0].ty.dtype(), Some(ort_runtime::DType::BF16));
    assert!(!outputs.iter().any(|operator| operator == "Cast"), "{outputs:?}");
}

/// A tensor whose data is in this file, and the bytes of the file.
fn outside(tensor: TensorProto, location: &str) -> (TensorProto, Vec<u8>) {
    let bytes = tensor.raw_data.clone().unwrap().to_vec();
    let entry = |key: &str, value: &str| StringStringEntryProto {
        key: Some(key.to_string()),
        value: Some(value.to_string()),
    };
    let external_data = vec![entry("location", location)];
    let data_location = Some(tensor_proto::DataLocation::External as i32);
    (TensorProto { raw_data: None, data_location, external_data, ..tensor }, bytes)
}

#[test]
fn files_of_the_model_that_is_read_are_not_replaced() {
    let folder = Folder::new();
    let (weight, bytes) = outside(floats("W", &[64, 64], &numbers(64 * 64, 2.0)), "out.onnx.data");
    folder.write("out.onnx.data", &bytes);
    let (vector, small) = outside(floats("V", &[64], &numbers(64, 1.0)), "small.data");
    folder.write("small.data", small);
    // A body may have data in files, too.
    let branch = |name: &str, weights: Vec<TensorProto>, node: NodeProto| {
        graph(vec![node], vec![], vec![open_value(name, 1)], weights)
    };
    let choice = node("If", &["first"], &["y"]);
    let sum = branch("a", vec![vector], node("Add", &["m", "V"], &["a"]));
    let choice = with(choice, graph_attribute("then_branch", sum));
    let same = branch("b", vec![], node("Identity", &["m"], &["b"]));
    let choice = with(choice, graph_attribute("else_branch", same));
    let nodes = vec![node("MatMul", &["x", "W"], &["m"]), choice];
    let inputs = vec![value("first", 9, &[]), value("x", 1, &["2", "64"])];
    let path = folder.model("m.onnx", &model(graph(nodes, inputs, vec![open_value("y", 1)], vec![weight])));
    let original = std::fs::read(&path).unwrap();
    let out = text(&folder.path("out.onnx"));
    let data = text(&folder.path("out.onnx.data"));
    let int8 = ["--mode", "int8"];
    let cases: [(&[&str], &str); 7] = [
        (&["quantize", &path, &out, "--external-data"], "a data file of the model"),
        (&["quantize", &path, &data], "a data file of the model"),
        (&["quantize", &path, &out, "--report", &path], "the model"),
        (&["quantize", &path, &out, "--report", &data], "a data file of the model"),
        (&["optimize", &path, &out, "--external-data"], "a data file of the model"),
        (&["optimize", &path, &data], "a data file of the model"),
        (&["compile", &path, &data], "a data file of the model"),
    ];
    for (args, words) in cases {
        let args = if args[0] == "quantize" { [args, &int8].concat() } else { args.to_vec() };
        assert_fails(&format!("{args:?}"), &run(&args), &["would replace", words]);
        assert!(!folder.path("out.onnx").exists(), "{args:?}");
        assert_eq!(std::fs::read(&data).unwrap(), bytes, "{args:?}");
        assert_eq!(std::fs::read(&path).unwrap(), original, "{args:?}");
    }
    // The weights go into the file, beside which the data of the original stays.
    let finished = run(&["quantize", &path, &out, "--mode", "int8"]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(std::fs::read(&data).unwrap(), bytes);
    // In another folder nothing refers to the files of the original.
    std::fs::create_dir(folder.path("sub")).unwrap();
    let other = text(&folder.path("sub/out.onnx"));
    let finished = run(&["quantize", &path, &other, "--mode", "int8", "--external-data"]);
    assert_eq!(finished.code, Some(0), "{}", finished.stderr);
    assert_eq!(run(&["check", &other]).code, Some(0));
}

#[test]
fn two_models_are_compared_output_by_output() {
    let folder = Folder::new();
    let (path, samples) = (layers(&folder), samples(&folder));
    let out = text(&folder.path("out.onnx"));
    let written = run(&["quantize", &path, &out, "--mode", "int8", "--data", &samples, "--json"]).json();
    let flags = ["--compare", "--data", &samples, "--samples", "5", "--json"];
    let compared = run(&[&["quantize", &path, &out][..], &flags].concat()).json();
    for report in [&written, &compared] {
        let outputs = report["outputs"].as_array().unwrap();
        let names: Vec<&str> = outputs.iter().map(|output| output["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["y", "g", "rows"], "{report}");
        assert_eq!(report["checked"]["runs"], 5);
        assert_eq!(outputs[0]["elements"], 5 * 9);
        for output in outputs {
            let error = output["relative_error"].as_f64().unwrap();
            assert!(error < 0.02, "{output}");
            // The convolution stays in floating point, and its output has no noise.
            let decibels = output["decibels"].as_f64().unwrap_or(f64::INFINITY);
            assert!(
                decibels == f64::INFINITY && error == 0.0 || (decibels + 20.0 * error.log10()).abs() < 1e-6
            );
            assert!(output["same_largest"].as_f64().unwrap() > 0.8 && output["equal"].is_null(), "{output}");
        }
    }
    assert_eq!(compared["layers"].as_array().unwrap().len(), 0);
    assert!(compared["written"].is_null());
    let table = run(&["quantize", &path, &path, "--compare", "--data", &samples]);
    assert_eq!(table.code, Some(0), "{}", table.stderr);
    for word in ["output", "same largest", "100.00 %", "the outputs differ by 0.000 % in 20 runs"] {
        assert!(table.stdout.contains(word), "{word}: {}", table.stdout);
    }
    // A model in other types of floating point gets the inputs in its own.
    let half = text(&folder.path("half.onnx"));
    let flags = ["--mode", "fp16", "--exclude", "matmul_y", "--convert-io"];
    assert_eq!(run(&[&["quantize", &path, &half][..], &flags].concat()).code, Some(0));
    for (one, other) in [(&path, &half), (&half, &path)] {
        let report = run(&["quantize", one, other, "--compare", "--json"]).json();
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.005, "{report}");
    }
    // Other outputs cannot be compared.
    let other = graph(
        vec![node("Identity", &["x"], &["z"])],
        vec![value("x", 1, &["3", "64"]), value("ids", 7, &["3"]), value("image", 1, &["1", "3", "8", "8"])],
        vec![open_value("z", 1)],
        vec![],
    );
    let other = folder.model("other.onnx", &model(other));
    assert_fails("outputs", &run(&["quantize", &path, &other, "--compare"]), &["no output 'y'"]);
}

/// A convolutional network stays in codes from its input to its output.
#[test]
fn integer_operators_follow_one_another() {
    let folder = Folder::new();
    let pads = AttributeProto {
        ints: vec![1; 4],
        name: Some("pads".into()),
        r#type: Some(attribute_proto::AttributeType::Ints as i32),
        ..AttributeProto::default()
    };
    let kernel = AttributeProto { ints: vec![2; 2], name: Some("kernel_shape".into()), ..pads.clone() };
    let strides = AttributeProto { name: Some("strides".into()), ..kernel.clone() };
    let nodes = vec![
        with(node("Conv", &["image", "K", "KB"], &["a"]), pads),
        node("Relu", &["a"], &["r"]),
        with(with(node("MaxPool", &["r"], &["p"]), kernel), strides),
        node("Conv", &["p", "L"], &["c"]),
        node("Flatten", &["c"], &["f"]),
        with(node("Gemm", &["f", "W", "B"], &["g"]), int_attribute("transB", 1)),
        node("Relu", &["g"], &["y"]),
    ];
    let mut kernels = numbers(16 * 27, 0.7);
    // A dead channel: its scale would be far too small for its bias.
    kernels[27 * 3..27 * 4].iter_mut().for_each(|weight| *weight *= 1e-12);
    let mut biases = numbers(16, 1.0);
    biases[3] = 0.75;
    let weights = vec![
        floats("K", &[16, 3, 3, 3], &kernels),
        floats("KB", &[16], &biases),
        floats("L", &[8, 16, 1, 1], &numbers(8 * 16, 1.0)),
        floats("W", &[10, 128], &numbers(1280, 0.5)),
        floats("B", &[1, 10], &numbers(10, 1.0)),
    ];
    let inputs = vec![value("image", 1, &["1", "3", "8", "8"])];
    let path = folder.model("cnn.onnx", &model(graph(nodes, inputs, vec![open_value("y", 1)], weights)));
    let archive = folder.path("samples.npz");
    let images = Tensor::from_slice(&[20, 1, 3, 8, 8], &numbers(20 * 192, 4.0)).unwrap();
    let values = [("image".to_string(), images.into())];
    ort_numpy::write_npz(std::fs::File::create(&archive).unwrap(), &values).unwrap();
    let (out, archive) = (text(&folder.path("out.onnx")), text(&archive));
    let flags = ["--mode", "static", "--format", "qoperator", "--data", &archive, "--json"];
    let report = run(&[&["quantize", &path, &out][..], &flags].concat()).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.03, "{report}");
    let expected =
        ["QuantizeLinear", "QLinearConv", "MaxPool", "QLinearConv", "Flatten", "QGemm", "DequantizeLinear"];
    assert_eq!(operators(&out), expected);
    let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
    let named = |name: &str| written.initializer.iter().find(|tensor| tensor.name() == name).unwrap();
    assert_eq!((named("KB_quantized").data_type(), named("B_quantized").dims.clone()), (6, vec![1, 10]));
    let codes: Vec<i32> = named("KB_quantized").raw_data.as_deref().unwrap()[12..16]
        .chunks(4)
        .map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()))
        .collect();
    assert!(codes[0] > i32::MAX / 1001 * 1000 && codes[0] < i32::MAX, "{codes:?}");
    // A node that is left out reads floating point, and so does the caller.
    let flags = [&flags[..], &["--exclude", "op:Flatten", "--exclude", "relu_r"]].concat();
    let report = run(&[&["quantize", &path, &out][..], &flags].concat()).json();
    assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.03, "{report}");
    let count = |name: &str| operators(&out).iter().filter(|operator| *operator == name).count();
    assert_eq!((count("Relu"), count("QuantizeLinear"), count("DequantizeLinear")), (1, 3, 3));
}

/// An input with an outlier, and a normalization whose factors have one.
#[test]
fn smoothing_moves_outliers_into_the_weights() {
    let folder = Folder::new();
    let mut gamma = vec![1.0; 64];
    gamma[9] = 40.0;
    let nodes = vec![
        node("MatMul", &["x", "W"], &["a"]),
        node("LayerNormalization", &["x", "gamma", "beta"], &["n"]),
        node("MatMul", &["n", "Q"], &["q"]),
        with(node("Gemm", &["n", "K", "KB"], &["k"]), int_attribute("transB", 1)),
    ];
    let outputs = vec![open_value("a", 1), open_value("q", 1), open_value("k", 1)];
    let weights = vec![
        floats("W", &[64, 32], &numbers(64 * 32, 2.0)),
        floats("gamma", &[64], &gamma),
        floats("beta", &[64], &numbers(64, 0.5)),
        floats("Q", &[64, 32], &numbers(64 * 32, 1.0)),
        floats("K", &[32, 64], &numbers(64 * 32, 1.5)),
        floats("KB", &[32], &numbers(32, 1.0)),
    ];
    let path = folder
        .model("outliers.onnx", &model(graph(nodes, vec![value("x", 1, &["n", "64"])], outputs, weights)));
    let archive = folder.path("samples.npz");
    let mut x = numbers(20 * 4 * 64, 2.0);
    x.iter_mut().skip(5).step_by(64).for_each(|value| *value *= 100.0);
    let values = [("x".to_string(), Value::from(Tensor::from_slice(&[20, 4, 64], &x).unwrap()))];
    ort_numpy::write_npz(std::fs::File::create(&archive).unwrap(), &values).unwrap();
    let out = text(&folder.path("out.onnx"));
    let archive = text(&archive);
    let report = |flags: &[&str]| {
        let args = ["quantize", &path, &out, "--mode", "static", "--data", &archive, "--json"];
        run(&[&args[..], flags].concat()).json()
    };
    let errors = |report: &serde_json::Value| -> Vec<f64> {
        let outputs = report["outputs"].as_array().unwrap().iter();
        outputs.map(|output| output["relative_error"].as_f64().unwrap()).collect()
    };
    let plain = report(&["--smooth", "off"]);
    assert_eq!(plain["calibration"]["smoothed"], 0);
    for flags in
        [&[][..], &["--smooth", "auto"], &["--smooth", "0.5"], &["--smooth", "auto", "--ranges", "mse"]]
    {
        let smooth = report(flags);
        assert_eq!(smooth["calibration"]["smoothed"], 2, "{flags:?}");
        for (smooth, plain) in errors(&smooth).into_iter().zip(errors(&plain)) {
            assert!(2.0 * smooth < plain, "{flags:?}: {smooth} of {plain}");
        }
        // The input is divided by a node, the normalization by its constants.
        let count = |name: &str| operators(&out).iter().filter(|operator| *operator == name).count();
        assert_eq!((count("Mul"), count("QuantizeLinear"), count("LayerNormalization")), (1, 2, 1));
        let written = ModelProto::decode(&*std::fs::read(&out).unwrap()).unwrap().graph.unwrap();
        let names: Vec<&str> = written.initializer.iter().map(|tensor| tensor.name()).collect();
        assert!(names.contains(&"gamma_smoothed") && names.contains(&"beta_smoothed"), "{names:?}");
        assert!(!names.contains(&"gamma") && !names.contains(&"beta"), "{names:?}");
        let precision = smooth["layers"][0]["precision"].as_str().unwrap();
        assert_eq!(precision, "int8, per channel, uint8 inputs, smoothed");
    }
    // So it is with products of integers, whose results are rounded, too.
    let smooth = report(&["--smooth", "auto", "--format", "qoperator"]);
    assert_eq!(smooth["calibration"]["smoothed"], 2);
    assert!(errors(&smooth).into_iter().all(|error| error < 0.02), "{smooth}");
    let count = |name: &str| operators(&out).iter().filter(|operator| *operator == name).count();
    assert_eq!((count("Mul"), count("QLinearMatMul"), count("QGemm")), (1, 2, 1));
    // A product that stays in floating point reads the normalization as it was.
    let smooth = report(&["--smooth", "0.5", "--exclude", "matmul_q"]);
    assert_eq!(smooth["calibration"]["smoothed"], 2);
    let outputs = &smooth["outputs"];
    assert!(outputs[1]["relative_error"].as_f64().unwrap() < 1e-6, "{outputs}");
    assert!(outputs[2]["relative_error"].as_f64().unwrap() < 0.02, "{outputs}");
    assert_eq!(operators(&out).iter().filter(|operator| *operator == "Mul").count(), 2);
}

/// A model that is discarded is compared like any other.
#[cfg(unix)]
#[test]
fn the_null_device_takes_a_model() {
    let folder = Folder::new();
    let path = layers(&folder);
    for flags in [&["--mode", "int8", "--json"][..], &["--mode", "int8", "--external-data", "--json"]] {
        let report = run(&[&["quantize", &path, "/dev/null"][..], flags].concat()).json();
        assert!(report["checked"]["relative_error"].as_f64().unwrap() < 0.02, "{report}");
    }
    assert!(!std::path::Path::new("/dev/null.data").exists());
}
